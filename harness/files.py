"""Files that several processes may need at the same time, each made by only one of them."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Hold the lock of a file while making it, so that other processes wait; not reentrant for the same file."""
    import fcntl

    path.parent.mkdir(parents=True, exist_ok=True)
    lock = path.with_name(f"{path.name}.lock")
    while True:
        handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            if not _is(handle, lock):
                continue  # the previous holder removed the lock file: another process may have created a new one
            try:
                yield
            finally:
                lock.unlink(missing_ok=True)
            return
        finally:
            os.close(handle)


def _is(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def made_once(path: Path, make: Callable[[], None]) -> None:
    """Make a file unless it exists; if several processes call this, one makes it and the others wait."""
    if path.exists():
        return
    with alone(path):
        if not path.exists():
            make()
