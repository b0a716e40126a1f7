"""Atomic writes of files and directories: write to a temporary path, fsync, rename."""

import errno
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from eigentrace.errors import InputError, StorageError

_PARTIAL = ".partial"
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def sync(path: Path) -> None:
    """Flush a file, or the entries of a directory, to disk (fsync)."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to; on success, flush it to disk and rename it to `path` atomically.

    On any error `path` is unchanged and the temporary file is removed.
    """
    partial = _beside(path)
    try:
        yield partial
        sync(partial)
        partial.replace(path)
        sync(path.parent)
    except OSError as error:
        raise storage_error(error, path) from error
    finally:
        _discard(partial)


@contextmanager
def appearing(path: Path) -> Iterator[Path]:
    """Yield a temporary path for a new file or directory; on success rename it to `path` atomically.

    Raises InputError if `path` exists, before or after the work. On any error nothing is left behind.
    """
    _refuse_existing(path)
    partial = _beside(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        for written in (*partial.rglob("*"), partial):
            sync(written)
        _publish(partial, path)
        sync(path.parent)
    except OSError as error:
        raise storage_error(error, path) from error
    finally:
        _discard(partial)


def _discard(partial: Path) -> None:
    """Remove a temporary file or directory, if it exists and the file system is not read-only."""
    if partial.is_dir():
        shutil.rmtree(partial, ignore_errors=True)
    else:
        with suppress(OSError):
            partial.unlink(missing_ok=True)


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}{_PARTIAL}")


def _publish(partial: Path, path: Path) -> None:
    """Rename a finished file or directory to `path`, unless `path` was created in the meantime."""
    if partial.is_file():
        with suppress(OSError):  # the name is taken, or the file system has no hard links
            os.link(partial, path)
            return
    _refuse_existing(path)
    partial.rename(path)


def _refuse_existing(path: Path) -> None:
    if path.exists() or path.is_symlink():
        raise InputError(f"{path} already exists and was not changed. Choose another path, or remove it first.")


def storage_error(error: OSError, path: Path) -> StorageError:
    """Return a StorageError that explains a system error and its remedy."""
    if isinstance(error, StorageError):
        return error
    if error.errno in _NO_ROOM:
        return StorageError(
            f"No space left on the disk to write {path}. Files written before are complete: free some space (or raise "
            "the quota), and run the same command again."
        )
    return StorageError(f"{path} could not be written ({error}). Check the path, its permissions and the disk.")


def sweep(folder: Path) -> None:
    """Remove partial files and directories left by killed processes."""
    for leftover in folder.glob(f".*{_PARTIAL}"):
        if leftover.is_dir():
            shutil.rmtree(leftover)
        else:
            leftover.unlink(missing_ok=True)
