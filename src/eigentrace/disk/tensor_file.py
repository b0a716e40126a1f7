"""Parts of the tensors in a safetensors file as NumPy arrays, verified by the checksums of their blocks."""

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from eigentrace.disk.blocks import Blocks, damaged, identity, read_bytes, verify_whole
from eigentrace.disk.bounded import open_regular, parsed
from eigentrace.errors import StorageError

CHECKSUMS = "checksums"
"""The last tensor of a file with checksums: one uint64 per block of all bytes before it, stored as bytes."""
_LENGTH = 8
# A header has some hundred bytes per tensor.
_LONGEST_HEADER = 1 << 25
# Bytes that are verified at a time if the whole file is.
_AT_ONCE = 1 << 24
_TYPES: dict[str, np.dtype] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U64": np.dtype("<u8"),
    "U32": np.dtype("<u4"),
    "U16": np.dtype("<u2"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}


@dataclass(frozen=True)
class _Place:
    """Where a tensor is in its file, in bytes."""

    dtype: np.dtype | None
    """None for types that NumPy does not have."""
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class Header:
    """The tensors and the metadata of a file, and the checksums of its blocks, if it has them."""

    places: dict[str, _Place]
    metadata: dict[str, str]
    blocks: Blocks | None


@dataclass(frozen=True)
class TensorFile:
    """A safetensors file that is read in parts.

    Files written with checksums are verified block by block, files of earlier versions as a whole on first use.
    """

    path: Path
    advice: str
    """What to do about damage, for messages."""
    sha256: str | None = None
    """The checksum of the whole file, if it is recorded; files with checksums of their blocks do not need it."""
    bytes: int | None = None
    """The size of the file, if it is recorded."""

    @property
    def header(self) -> Header:
        """The file's header, verified."""
        with self._open() as (_, header):
            return header

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tensors."""
        return tuple(self.header.places)

    def read(self, name: str, low: int = 0, high: int | None = None) -> np.ndarray:
        """Return rows `low` to `high` (exclusive) of a tensor, those of its first dimension."""
        with self._open() as (file, header):
            return self._read(file, header, name, low, high)

    def rows(self, name: str, rows: np.ndarray) -> np.ndarray:  # (n, ...)
        """Return single rows of a tensor, in the given order."""
        with self._open() as (file, header):
            return np.concatenate([self._read(file, header, name, row, row + 1) for row in rows.tolist()])

    def _read(self, file: BinaryIO, header: Header, name: str, low: int, high: int | None) -> np.ndarray:
        place = header.places.get(name)
        if place is None or place.dtype is None or not place.shape:
            what = f"expected numbers in a tensor {name!r}, got {'none' if place is None else place}"
            raise damaged(self.path, what, self.advice)
        count = place.shape[0]
        high = count if high is None else high
        if not 0 <= low <= high <= count:
            raise damaged(self.path, f"rows {low:,} to {high:,} of {name!r} are not among its {count:,}", self.advice)
        width = (place.stop - place.start) // max(count, 1)
        start, stop = place.start + low * width, place.start + high * width
        data = read_bytes(file, start, stop) if header.blocks is None else header.blocks.read(file, start, stop)
        return data.view(place.dtype).reshape(high - low, *place.shape[1:])

    @contextmanager
    def _open(self) -> Iterator[tuple[BinaryIO, Header]]:
        with self.opened() as file:
            yield file, _header_of(self, identity(file))

    @contextmanager
    def opened(self) -> Iterator[BinaryIO]:
        """Open the file; system errors become StorageError."""
        try:
            with open_regular(self.path) as file:
                yield file
        except StorageError:
            raise
        except FileNotFoundError:
            raise StorageError(f"{self.path} is missing. {self.advice}") from None
        except OSError as error:
            raise StorageError(f"{self.path} cannot be read ({error}). {self.advice}") from None


@lru_cache(maxsize=65_536)
def _header_of(of: TensorFile, version: tuple[int, int, int, int]) -> Header:
    """Read and verify the header of one version of a file; a file without checksums of its blocks as a whole."""
    with open_regular(of.path) as file:
        size = os.fstat(file.fileno()).st_size
        if of.bytes not in (None, size):
            raise damaged(of.path, f"it has {size:,} bytes, expected {of.bytes:,}", of.advice)
        try:
            places, metadata, data = _parsed(file, size, of.path)
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise damaged(of.path, f"its header cannot be read ({error})", of.advice) from None
        table = places.pop(CHECKSUMS, None)
        if table is None:
            if of.sha256 is not None:
                verify_whole(of.path, file, of.sha256, of.advice)
            return Header(places, metadata, None)
        sums = read_bytes(file, table.start, table.stop)
        if len(sums) % _LENGTH or table.stop != size:
            raise damaged(of.path, "it does not end with its checksums", of.advice)
        blocks = Blocks(of.path, sums.view(np.uint64), table.start, of.advice)
        blocks.read(file, 0, data)
        return Header(places, metadata, blocks)


def _parsed(file: BinaryIO, size: int, path: Path) -> tuple[dict[str, _Place], dict[str, str], int]:
    """Return the tensors, the metadata, and the end of a file's header; raise ValueError if it is not valid."""
    length = int.from_bytes(read_bytes(file, 0, min(_LENGTH, size)).tobytes(), "little")
    begin = _LENGTH + length
    if size < _LENGTH or not length or begin > size or length > _LONGEST_HEADER:
        raise ValueError(f"it would have {length:,} bytes, in a file of {size:,}")
    found = parsed(read_bytes(file, _LENGTH, begin).tobytes().decode(), path)
    metadata = found.pop("__metadata__", {})
    places = {name: _place(entry, begin, size) for name, entry in found.items()}
    if max((place.stop for place in places.values()), default=begin) != size:
        raise ValueError(f"its tensors do not end where the file of {size:,} bytes does")
    if not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("its metadata is not text")
    return places, dict(metadata), begin


def _place(entry: dict[str, Any], begin: int, size: int) -> _Place:
    kind, shape, (start, stop) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    dtype = _TYPES.get(kind)
    if not all(isinstance(number, int) and number >= 0 for number in (*shape, start, stop)):
        raise ValueError(f"a tensor has the shape {shape} at {start}, {stop}")
    if not start <= stop <= size - begin or (dtype is not None and math.prod(shape) * dtype.itemsize != stop - start):
        raise ValueError(f"a tensor of shape {shape} has bytes {start:,} to {stop:,} of {size - begin:,}")
    return _Place(dtype, shape, begin + start, begin + stop)


def verify_tensors(path: Path) -> None:
    """Raise an error unless all blocks of a file have their checksums; do nothing for a file without checksums."""
    with open_regular(path) as file:
        blocks = _header_of(TensorFile(path, "Restore it, or create it again."), identity(file)).blocks
        if blocks is not None:
            for start in range(0, blocks.end, _AT_ONCE):
                blocks.read(file, start, min(start + _AT_ONCE, blocks.end))


def check_recorded(path: Path, sha256: str, advice: str) -> None:
    """Raise StorageError if a file is missing or not the recorded one.

    A safetensors file with checksums of its blocks is verified when it is read.
    """
    held = TensorFile(path, advice, sha256)
    if path.suffix == ".safetensors":
        _ = held.header
        return
    with held.opened() as file:
        verify_whole(path, file, sha256, advice)
