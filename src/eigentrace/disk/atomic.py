"""Files and directories that appear whole or not at all: written under another name, forced to the disk, renamed."""

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
    """Give a temporary path to write a new file or directory to; on success it becomes `path`, in one step.

    A path that exists is refused, before the work and after it. Whatever goes wrong, nothing is left behind.
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
    """Remove what was begun, if anything is there; a file system that is read-only refuses even that."""
    if partial.is_dir():
        shutil.rmtree(partial, ignore_errors=True)
    else:
        with suppress(OSError):
            partial.unlink(missing_ok=True)


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}{_PARTIAL}")


def _publish(partial: Path, path: Path) -> None:
    """Give what was written its name, and leave alone what has taken the name in the meantime."""
    if partial.is_file():
        with suppress(OSError):  # the name is taken, or the file system has no hard links
            os.link(partial, path)
            return
    _refuse_existing(path)
    partial.rename(path)


def _refuse_existing(path: Path) -> None:
    if path.exists() or path.is_symlink():
        raise InputError(f"{path} exists already and is left as it is. Choose another path, or remove it first.")


def storage_error(error: OSError, path: Path) -> StorageError:
    """Say what the system's refusal means, and what to do about it."""
    if isinstance(error, StorageError):
        return error
    if error.errno in _NO_ROOM:
        return StorageError(
            f"There is no room left to write {path}. What was written before is whole: free some space (or raise the "
            "quota), and run the same command again."
        )
    return StorageError(f"{path} could not be written ({error}). Check the path, its permissions and the disk.")


def sweep(folder: Path) -> None:
    """Remove what killed processes left half written."""
    for leftover in folder.glob(f".*{_PARTIAL}"):
        if leftover.is_dir():
            shutil.rmtree(leftover)
        else:
            leftover.unlink(missing_ok=True)
