"""Shards of a run: consecutive rows with features and scores, one safetensors file each, listed with checksums."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from eigentrace.disk.atomic import replacing
from eigentrace.disk.blocks import damaged
from eigentrace.disk.bounded import check_regular, read_json
from eigentrace.disk.tensor_file import Header, TensorFile
from eigentrace.disk.tensors import write_tensors
from eigentrace.errors import EigentraceError, MismatchError, StorageError, UnsupportedError
from eigentrace.numeric.hashing import hash_arrays, hash_file
from eigentrace.store.columns import DIGEST, EXPONENTS, FEATURES

if TYPE_CHECKING:
    from torch import Tensor

RECORD, SHARDS = "shards.json", "shards"
MOST_ROWS = 1 << 36
"""Maximum number of rows of a run; larger numbers in a file are damage."""
# Maximum size of a shard's file.
_MOST_BYTES = 1 << 60
_FORMAT = 1
# float16 represents magnitudes from 6e-8 to 65,504: each row is scaled so that its largest is in [2**14, 2**15).
_HALF = 15
# Rows are read as one slice if it is at most this many times longer than the number of rows.
_DENSE = 8


@dataclass(frozen=True)
class Shard:
    """One entry of `shards.json`: rows `start` to `stop` (exclusive), the file's size and its checksum."""

    start: int
    stop: int
    bytes: int
    sha256: str

    def __post_init__(self) -> None:
        numbers = (self.start, self.stop, self.bytes)
        if not all(type(number) is int for number in numbers) or not isinstance(self.sha256, str):
            raise ValueError(f"a shard has {str(vars(self))[:200]}")
        if not (0 <= self.start < self.stop <= MOST_ROWS and 0 <= self.bytes <= _MOST_BYTES):
            raise ValueError(f"a shard has rows {self.start} to {self.stop} and {self.bytes} bytes")

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def name(self) -> str:
        """The file name, which contains the first row."""
        return f"{self.start:012d}.safetensors"


class Record:
    """The list of a run's complete shards, in `shards.json`, and the files of the shards."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder / SHARDS, folder / RECORD

    def read(self) -> tuple[Shard, ...]:
        """Return the listed shards, in row order."""
        try:
            found = read_json(self.path)
        except FileNotFoundError:
            # A process that is killed between writing its first shard and listing it leaves one file, never several.
            if sum(1 for _ in self.folder.glob("*.safetensors")) > 1:
                raise MismatchError(f"{self.path} is missing. {_RECORD_ADVICE}") from None
            return ()
        except OSError as error:
            raise StorageError(f"{self.path} cannot be read ({error}). Check its permissions and the disk.") from None
        except ValueError as error:
            raise MismatchError(f"{self.path} is damaged ({error}). {_RECORD_ADVICE}") from None
        is_record = isinstance(found, dict) and isinstance(found.get("shards"), list)
        if isinstance(found, dict) and found.get("format") != _FORMAT and (is_record or "format" in found):
            raise UnsupportedError(
                f"{self.path} has format {str(found.get('format'))[:40]}, expected {_FORMAT}. It was written by "
                "another version of eigentrace: use that version; nothing was changed."
            )
        if not is_record:
            raise MismatchError(f"{self.path} is incomplete or was edited. {_RECORD_ADVICE}")
        try:
            shards = tuple(Shard(**entry) for entry in found["shards"])
        except (TypeError, ValueError) as error:
            raise MismatchError(f"{self.path} is incomplete or was edited ({error}). {_RECORD_ADVICE}") from None
        for before, after in pairwise(shards):
            if after.start < before.stop:
                raise MismatchError(
                    f"{self.path} lists rows {before.start} to {before.stop} before {after.start} to {after.stop}. "
                    f"{_RECORD_ADVICE}"
                )
        return shards

    def write(self, shards: tuple[Shard, ...]) -> None:
        """Replace the list of shards."""
        entries = [asdict(shard) for shard in sorted(shards, key=lambda shard: shard.start)]
        lines = ",\n  ".join(json.dumps(entry) for entry in entries)
        with replacing(self.path) as partial:
            partial.write_text(f'{{"format": {_FORMAT}, "shards": [\n  {lines}\n]}}\n')

    def add(self, start: int, tensors: Mapping[str, "Tensor"]) -> Shard:
        """Write a shard to disk, then list it in place of any shards that it overlaps."""
        stop = start + len(next(iter(tensors.values())))
        path = self.folder / f"{start:012d}.safetensors"
        self.folder.mkdir(exist_ok=True)
        before = [shard for shard in self.read() if shard.stop <= start or stop <= shard.start]
        with replacing(path) as partial:
            held = shard_hash({name: tensor.numpy() for name, tensor in tensors.items()})
            about = {"start": str(start), "stop": str(stop), "sha256": held}
            write_tensors(tensors, partial, about, checksums=True)
            made = Shard(start, stop, partial.stat().st_size, hash_file(partial))
        self.write((*before, made))
        return made

    def file(self, shard: Shard) -> Path:
        """Return the path of a shard's file."""
        return self.folder / shard.name

    def tensors(self, shard: Shard) -> TensorFile:
        """Return the tensors of a shard; what is read of them is verified."""
        return TensorFile(self.file(shard), CHECK_ADVICE, shard.sha256, shard.bytes)

    def names(self, shard: Shard) -> tuple[str, ...]:
        """Return the names of a shard's tensors; raise StorageError unless all have the shard's number of rows."""
        return tuple(self._header(shard).places)

    def column(self, shard: Shard, name: str, low: int = 0, high: int | None = None) -> np.ndarray:
        """Return rows `low` to `high` (exclusive, counted in the shard) of one tensor of a shard."""
        self._header(shard)
        return self.tensors(shard).read(name, low, high)

    def rows(self, shard: Shard, name: str, rows: np.ndarray) -> np.ndarray:  # (n, ...)
        """Return the given rows (counted in the shard) of one tensor of a shard, in the given order."""
        if not len(rows):
            return self.column(shard, name, 0, 0)
        low, high = int(rows.min()), int(rows.max()) + 1
        if high - low <= _DENSE * len(rows):
            return self.column(shard, name, low, high)[rows - low]
        self._header(shard)
        return self.tensors(shard).rows(name, rows)

    def _header(self, shard: Shard) -> Header:
        header = self.tensors(shard).header
        for name, place in header.places.items():
            kind = "f" if name == FEATURES else "i" if name in (EXPONENTS, DIGEST) else "fiu"
            is_number = place.dtype is not None and place.dtype.kind in kind
            if place.shape[:1] != (len(shard),) or len(place.shape) != 1 + (name == FEATURES) or not is_number:
                what = (
                    f"{name!r} has shape {place.shape} and type {place.dtype}, expected {len(shard):,} rows of numbers"
                )
                raise damaged(self.file(shard), what, CHECK_ADVICE)
        if not any(len(place.shape) == 1 for place in header.places.values()):
            # Features alone may have no bytes per row, and then any number of rows fits into a file.
            raise damaged(self.file(shard), "it has no column", CHECK_ADVICE)
        held = tuple(header.metadata.get(name, "") for name in ("start", "stop"))
        if held != (str(shard.start), str(shard.stop)):
            what = f"it has rows {held[0]} to {held[1]}, expected {shard.start} to {shard.stop}"
            raise damaged(self.file(shard), what, CHECK_ADVICE)
        return header


def shard_hash(tensors: Mapping[str, np.ndarray]) -> str:
    """Return a hash of a shard's tensors, which is stored in its file and verifies it if `shards.json` is lost."""
    arrays = sorted(tensors.items())
    return hash_arrays((f"{name} {array.shape} torch.{array.dtype};", array) for name, array in arrays)


def recovered(path: Path) -> Shard | None:
    """Return the entry of an unlisted shard, or None if its content does not match the hash stored in its file."""
    held = TensorFile(path, CHECK_ADVICE)
    try:
        metadata = held.header.metadata
        if shard_hash({name: held.read(name) for name in held.names}) != metadata["sha256"]:
            return None
        return Shard(int(metadata["start"]), int(metadata["stop"]), path.stat().st_size, hash_file(path))
    except (EigentraceError, OSError, KeyError, ValueError):
        return None


def gaps(shards: tuple[Shard, ...], total: int) -> Iterator[range]:
    """Yield the ranges of rows that are in no shard."""
    at = 0
    for shard in shards:
        if shard.start > at:
            yield range(at, shard.start)
        at = max(at, shard.stop)
    if at < total:
        yield range(at, total)


_RECORD_ADVICE = "Run `eigentrace check RUN --repair` to rebuild it from the shards."
CHECK_ADVICE = "Run `eigentrace check RUN` to list damaged shards; with --repair, only their rows are scored again."


def fault_of(path: Path, shard: Shard) -> str | None:
    """Describe what is wrong with a shard's file; None if it is intact."""
    if not path.exists():
        return "is missing"
    if not path.is_file():
        return "is not a regular file"
    size = path.stat().st_size
    if size != shard.bytes:
        return f"has {size:,} bytes, expected {shard.bytes:,}"
    try:
        check_regular(path)
        found = hash_file(path)
    except (MismatchError, OSError) as error:
        return f"cannot be read ({error})"
    return None if found == shard.sha256 else "has changed since it was written (its checksum differs)"


def halved(features: "Tensor") -> "tuple[Tensor, Tensor]":  # (n, K) -> (n, K) float16, (n,) int16
    """Convert features to float16, each row scaled by its own power of two against underflow and overflow."""
    import torch

    exponents = torch.frexp(features.double().abs().amax(dim=1)).exponent.clamp(-900, 900)
    scaled = torch.ldexp(features.double(), (_HALF - exponents)[:, None])
    return scaled.half(), exponents.short()


def unhalved(features: np.ndarray, exponents: np.ndarray) -> np.ndarray:  # (n, K), (n,) -> (n, K) float32
    """Convert features to float32 and undo the scaling of each row."""
    return np.ldexp(features.astype(np.float32), (exponents.astype(np.int32) - _HALF)[:, None])
