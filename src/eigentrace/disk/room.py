"""Free space on a disk, checked before files are written."""

import shutil
from pathlib import Path

from eigentrace.errors import StorageError
from eigentrace.numeric.memory import as_text


def check_room(path: Path, needed: int, what: str, remedy: str = "") -> None:
    """Raise StorageError unless the disk of a path, which need not exist yet, has `needed` free bytes.

    Args:
        path: Where files are to be written.
        needed: Their size in bytes.
        what: What they are, for the message.
        remedy: What else would help, for the message.
    """
    folder = next(part for part in (path, *path.absolute().parents) if part.exists())
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise StorageError(
            f"The disk of {path} has {as_text(free)} left, but {as_text(needed)} are needed for {what}. Free some "
            f"space, or choose another disk. {remedy}".strip()
        )
