"""Read untrusted files: regular files only, with a limit on their size."""

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
    """Open a regular file for reading; raise MismatchError for a device, a pipe or a directory, without waiting."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        check_regular(path, os.fstat(handle))
    except BaseException:
        os.close(handle)
        raise
    with os.fdopen(handle, "rb", buffering=0, closefd=True) as file:
        yield file


def check_regular(path: Path, found: os.stat_result | None = None) -> None:
    """Raise MismatchError if a path exists and is not a regular file, so that opening it cannot wait or never end."""
    try:
        mode = (found or path.stat()).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode):
        raise MismatchError(f"{path} is not a regular file. Remove it, or restore the file that belongs there.")


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
