"""Files that several processes may want to make at the same time: one of them does."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Have the processes that would make the same file wait for each other; what must not be nested for one file."""
    import fcntl

    path.parent.mkdir(parents=True, exist_ok=True)
    lock = path.with_name(f"{path.name}.lock")
    while True:
        handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            if not _is(handle, lock):
                continue  # whoever held it has removed it: another may hold a new file of this name
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
    """Have a file made unless it is there; where several processes ask for it, one makes it and the others wait."""
    if path.exists():
        return
    with alone(path):
        if not path.exists():
            make()
