"""Checksums of the blocks of a file, so that a part of a file can be verified without reading the rest.

The checksum of a block is a weighted sum of its 64-bit words modulo 2^64, with one odd weight per KiB. It detects every
change within one word, and misses other damage with a chance of about 2^-64, except words that change places within a
KiB. It costs about as much as copying the bytes in memory; SHA-256 costs ten times as much. It does not detect forgery:
whoever can change the file can change the checksum.
"""

import io
import os
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

import numpy as np

from eigentrace.disk.bounded import open_regular
from eigentrace.errors import StorageError
from eigentrace.numeric.hashing import hash_file

BLOCK = 1 << 16
"""Bytes of a block; the last block of a file may be shorter."""
_LANES = 64
# Odd numbers, so that a changed word always changes the sum: multiples of 2^64 / golden ratio.
_WEIGHTS = np.arange(1, _LANES + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) | np.uint64(1)
# Memory of arrays that are read begins at multiples of this, as tensors do.
_ALIGNED = 64
_AT_ONCE = 64 * BLOCK


def block_sums(data: np.ndarray) -> np.ndarray:  # (bytes,) uint8 -> (blocks,) uint64
    """Return the checksum of every block of some bytes."""
    whole = len(data) // BLOCK * BLOCK
    sums = [_sums(data[:whole])]
    if whole < len(data):
        last = np.zeros(BLOCK, np.uint8)
        last[: len(data) - whole] = data[whole:]
        sums.append(_sums(last))
    return np.concatenate(sums)


def _sums(data: np.ndarray) -> np.ndarray:
    lanes = data.view(np.uint64).reshape(-1, _LANES, BLOCK // 8 // _LANES).sum(axis=2, dtype=np.uint64)
    return (lanes * _WEIGHTS).sum(axis=1, dtype=np.uint64)


def sums_of(file: BinaryIO) -> np.ndarray:  # (blocks,) uint64
    """Return the checksum of every block of an open file, read from its beginning."""
    file.seek(0)
    parts = [np.empty(0, np.uint64)]
    while chunk := file.read(_AT_ONCE):
        parts.append(block_sums(np.frombuffer(chunk, np.uint8)))
    return np.concatenate(parts)


def identity(file: BinaryIO) -> tuple[int, int, int, int]:
    """Return what identifies the content of an open file within a process: device, inode, size and time of change."""
    found = os.fstat(file.fileno())
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def damaged(path: Path, what: str, advice: str) -> StorageError:
    """Return the error for a file whose content is not what was written."""
    return StorageError(f"{path} is damaged: {what}. {advice}")


def verify_whole(path: Path, file: BinaryIO, sha256: str, advice: str) -> None:
    """Raise StorageError unless the checksum of a whole file is as expected; once per file, version and process."""
    if _hash_of(path, identity(file)) != sha256:
        raise damaged(path, "its checksum differs from the one recorded when it was written", advice)


@lru_cache(maxsize=65_536)
def _hash_of(path: Path, version: tuple[int, int, int, int]) -> str:
    return hash_file(path)


class Blocks:
    """The checksums of a file's blocks, and which of them this process has verified.

    Args:
        path: The file.
        sums: (blocks,) uint64, one per block of the bytes to verify.
        end: Number of bytes that the checksums cover.
        advice: What to do about damage.
    """

    def __init__(self, path: Path, sums: np.ndarray, end: int, advice: str) -> None:
        self.path, self.sums, self.end, self.advice = path, sums, end, advice
        if len(sums) != -(-end // BLOCK):
            raise damaged(path, f"it has {len(sums):,} checksums for {end:,} bytes", advice)
        self._seen = np.zeros(len(sums), dtype=bool)

    def read(self, file: BinaryIO, start: int, stop: int) -> np.ndarray:  # (stop - start,) uint8
        """Return bytes `start` to `stop` of the file, after verifying their blocks if not done before."""
        if not 0 <= start <= stop <= self.end:
            raise damaged(self.path, f"bytes {start:,} to {stop:,} are not among its {self.end:,}", self.advice)
        blocks = slice(start // BLOCK, -(-stop // BLOCK))
        if self._seen[blocks].all():
            return read_bytes(file, start, stop)
        first, last = blocks.start * BLOCK, min(blocks.stop * BLOCK, self.end)
        data = read_bytes(file, first, last, aligned=start)
        wrong = np.flatnonzero(block_sums(data) != self.sums[blocks])
        if len(wrong):
            at = first + int(wrong[0]) * BLOCK
            raise damaged(self.path, f"the checksum of bytes {at:,} to {min(at + BLOCK, last):,} differs", self.advice)
        self._seen[blocks] = True
        return data[start - first : stop - first]


def read_bytes(file: BinaryIO, start: int, stop: int, aligned: int | None = None) -> np.ndarray:  # uint8
    """Return bytes of a file in memory in which byte `aligned` (default: `start`) begins at a multiple of 64."""
    size, lead = stop - start, (start if aligned is None else aligned) - start
    room = np.empty(size + 2 * _ALIGNED, np.uint8)
    skip = -(room.ctypes.data + lead) % _ALIGNED
    data = room[skip : skip + size]
    file.seek(start)
    view, done = memoryview(data), 0  # type: ignore[arg-type]
    while done < size:
        count = file.readinto(view[done:])  # type: ignore[attr-defined]
        if not count:
            raise StorageError(f"The file ended {size - done:,} bytes early. It was cut while it was read.")
        done += count
    return data


class VerifiedFile(io.RawIOBase):
    """A file for other readers, such as pyarrow's, in which every block is verified before it is returned."""

    def __init__(self, path: Path, blocks: Blocks) -> None:
        super().__init__()
        self._blocks, self._at = blocks, 0
        self._context = open_regular(path)
        self._file = self._context.__enter__()

    def close(self) -> None:
        """Close the file."""
        if not self.closed:
            self._context.__exit__(None, None, None)
        super().close()

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position."""
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move to a position."""
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._blocks.end}[whence]
        return self._at

    def read(self, size: int = -1) -> bytes:
        """Return verified bytes from the current position."""
        stop = self._blocks.end if size is None or size < 0 else min(self._at + size, self._blocks.end)
        data = self._blocks.read(self._file, min(self._at, stop), stop)
        self._at = stop
        return data.tobytes()
