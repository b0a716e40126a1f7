"""New files and directories: they appear whole or not at all, and never in the place of another."""

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from eigentrace.errors import InputError
from eigentrace.files import storage_error, sync


@contextmanager
def appearing(path: Path) -> Iterator[Path]:
    """Give a temporary path to write a new file or directory to; on success it becomes `path`, in one step.

    A path that exists is refused, before the work and after it. Whatever goes wrong, nothing is left behind.
    """
    _refuse_existing(path)
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.partial")
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
        if partial.is_dir():
            shutil.rmtree(partial, ignore_errors=True)
        else:
            partial.unlink(missing_ok=True)


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
