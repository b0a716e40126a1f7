"""Files that appear whole or not at all: written under a temporary name, forced to the disk, then renamed."""

import errno
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from eigentrace.errors import StorageError

_PARTIAL = ".partial"
_CHUNK = 1 << 22
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def sync(path: Path) -> None:
    """Force a file, or the entries of a directory, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a temporary path to write to; on success it becomes `path`, in one step and for good.

    Whatever goes wrong, `path` is as it was before, and the temporary file is gone.
    """
    partial = path.with_name(f".{path.name}{_PARTIAL}")
    try:
        yield partial
        sync(partial)
        partial.replace(path)
        sync(path.parent)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise storage_error(error, path) from error
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def storage_error(error: OSError, path: Path) -> StorageError:
    """Say what the system's refusal means, and what to do about it."""
    if isinstance(error, StorageError):
        return error
    if error.errno in NO_ROOM:
        return StorageError(
            f"There is no room left to write {path}. What was written before is whole: free some space (or raise the "
            "quota), and run the same command again."
        )
    return StorageError(f"{path} could not be written ({error}). Check the path, its permissions and the disk.")


def sweep(folder: Path) -> None:
    """Remove what killed processes left half written."""
    for leftover in folder.glob(f".*{_PARTIAL}*"):
        if leftover.is_dir():
            shutil.rmtree(leftover)
        else:
            leftover.unlink(missing_ok=True)


def checksum(path: Path) -> str:
    """Hash what a file holds."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
