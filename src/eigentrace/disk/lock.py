"""A write lock for a directory, which the system releases when its process ends."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import IO

from eigentrace.disk.atomic import storage_error
from eigentrace.errors import BusyError

LOCK = "lock"
_held: set[IO[bytes]] = set()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Take the write lock of a directory, created if missing; raise BusyError if another process has it."""
    import fcntl

    _at_fork()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # A link is not followed: the file that it names would be overwritten.
        file = os.fdopen(os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666), "r+b", buffering=0)
    except OSError as error:
        raise storage_error(error, folder / LOCK) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            holder = (file.read(200) or b"").decode(errors="replace").strip() or "another process"
            raise BusyError(
                f"{folder} is being written by {holder}. Wait until that process has ended, or stop it, and run this "
                "again. Reading is possible meanwhile."
            ) from None
        with suppress(OSError):  # on a full disk the lock file stays empty, but is locked
            file.seek(0)
            file.truncate()
            file.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
        _held.add(file)
        try:
            yield
        finally:
            _held.discard(file)


def _let_go() -> None:
    """Close the lock files in a forked child: a loader's worker that outlives its parent must not keep the lock."""
    for file in _held:
        file.close()
    _held.clear()


@cache
def _at_fork() -> None:
    os.register_at_fork(after_in_child=_let_go)
