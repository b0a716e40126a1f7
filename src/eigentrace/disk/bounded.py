"""Read untrusted files: regular files only, without large holes, with a limit on their size."""

import errno
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from eigentrace.errors import MismatchError

# Maximum size of a JSON file in bytes, and of the nesting of its values. A run with 100,000 shards stays below.
_JSON_BYTES, _JSON_DEPTH = 1 << 24, 64
# A larger file must have at least this share of its bytes on the disk.
_SPARSE, _SHARE = 1 << 26, 16
# The unit of st_blocks.
_UNIT = 512


class Entries(dict[str, Any]):
    """A JSON object of a file; a missing key raises MismatchError with the file's name."""

    def __init__(self, path: Path, found: dict[str, Any]) -> None:
        super().__init__(found)
        self._path = path

    def __missing__(self, key: str) -> Any:
        raise MismatchError(
            f"{self._path} has no entry {key!r}, so it is damaged or was written by another version of eigentrace. "
            "Restore it, or create the artifact again."
        )


@contextmanager
def open_regular(path: Path) -> Iterator[BinaryIO]:
    """Open a regular file for reading; raise MismatchError for what `check_regular` refuses, without waiting."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        check_regular(path, os.fstat(handle))
    except BaseException:
        os.close(handle)
        raise
    with os.fdopen(handle, "rb", buffering=0, closefd=True) as file:
        yield file


def check_regular(path: Path, found: os.stat_result | None = None) -> None:
    """Raise MismatchError if a path exists and is not a regular file, or is a large one that is almost only holes.

    Opening any other file cannot wait, and reading it takes no more time and memory than its bytes on the disk justify:
    a file of holes has any size, and takes no room.
    """
    try:
        found = found or path.stat()
    except FileNotFoundError:
        return
    if not stat.S_ISREG(found.st_mode):
        raise MismatchError(f"{path} is not a regular file. Remove it, or restore the file that belongs there.")
    size = found.st_size
    # Some file systems count no blocks, or few because they compress: then holes are looked for.
    if size > _SPARSE and found.st_blocks * _UNIT * _SHARE < size and (held := _held(path, size)) * _SHARE < size:
        raise MismatchError(
            f"{path} has {size:,} bytes, of which only {held:,} are on the disk, expected at least one in {_SHARE}: "
            "the rest are holes, which read as zeros. Restore the file from a copy, or remove it. If it is as it "
            "should be, copy it with `cp --sparse=never`."
        )


def _held(path: Path, size: int) -> int:
    """Return how many bytes of a file are outside of holes; counting ends when there are enough."""
    handle, held, at = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), 0, 0
    try:
        while at < size and held * _SHARE < size:
            start = os.lseek(handle, at, os.SEEK_DATA)
            at = os.lseek(handle, start, os.SEEK_HOLE)
            held += at - start
    except OSError as error:
        if error.errno != errno.ENXIO:  # no data after this
            return size
    finally:
        os.close(handle)
    return held


def read_json(path: Path, most: int = _JSON_BYTES) -> Any:
    """Return the content of a JSON file of at most `most` bytes; objects in it are `Entries`.

    Raises:
        FileNotFoundError: If there is no such file; other system errors likewise.
        MismatchError: If the file is not a regular file.
        ValueError: If it is too large, not UTF-8, not JSON, or nested more than 64 levels deep.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise ValueError(f"it has {size:,} bytes, expected at most {most:,}")
        text = file.read(size).decode("utf-8")
    return parsed(text, path)


def parsed(text: str, path: Path) -> Any:
    """Return the value of a JSON text of a file; raise ValueError if it is not JSON or nested too deeply."""
    try:
        found = json.loads(text, object_hook=lambda entries: Entries(path, entries))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    level = [found]
    for _ in range(_JSON_DEPTH):
        level = [
            child
            for value in level
            if isinstance(value, dict | list)
            for child in (value.values() if isinstance(value, dict) else value)
        ]
        if not level:
            return found
    raise ValueError("it is nested too deeply")
