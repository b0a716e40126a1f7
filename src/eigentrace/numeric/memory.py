"""How much memory is free, and settings that limit how much of it is used.

torch is imported only where used, because importing it takes seconds.
"""

import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eigentrace.errors import InputError, MemoryLimitError

if TYPE_CHECKING:
    import torch

_UNITS = {"kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
# Counters that limit a control group: its limit, its use, and the page cache in that use which can be dropped at once.
_GROUP_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}


def free_memory(device: "torch.device", root: Path = Path("/")) -> int:
    """Return the bytes that can still be allocated on a device; sys.maxsize if the system does not report them.

    On a GPU, the reserve of torch's allocator counts as free. On a CPU, the limits of control groups (containers, batch
    systems) count too.

    Args:
        device: The device.
        root: Where the file systems `proc` and `sys` are.
    """
    if device.type == "cuda":
        import torch

        reserve = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + reserve
    return min(_of_system(root), *_of_groups(root), sys.maxsize)


def check_fits(num_bytes: int, device: "torch.device", what: str, remedy: str) -> None:
    """Raise MemoryLimitError unless something fits in the free memory of a device.

    Args:
        num_bytes: Its size.
        device: The device.
        what: What it is, for the message.
        remedy: What to change, for the message.
    """
    free = free_memory(device)
    if num_bytes > free:
        raise MemoryLimitError(f"{what} take {as_text(num_bytes)}, and {as_text(free)} are free ({device}). {remedy}.")


def check_memory(memory: Any) -> None:
    """Raise InputError unless a limit is a number of bytes, a share of the free memory, or text such as "12GB"."""
    whole = isinstance(memory, Integral) and not isinstance(memory, bool) and int(memory) > 0
    share = isinstance(memory, Real) and not isinstance(memory, Integral) and 0 < float(memory) < 1
    text = isinstance(memory, str) and bool(_parsed(memory))
    if not (whole or share or text):
        raise InputError(
            "memory must be a number of bytes (int, or text such as '12GB'), or a share of the free memory between 0 "
            f"and 1 (float), got {memory!r}."
        )


def bytes_of(memory: Any, free: Callable[[], int]) -> int:
    """Return a limit that passed `check_memory` in bytes; `free` returns the free memory, if that matters."""
    if isinstance(memory, str):
        return _parsed(memory)
    return int(memory) if isinstance(memory, Integral) else int(float(memory) * free())


def as_text(count: float) -> str:
    """Format a number of bytes.

    >>> as_text(53_833_064_592), as_text(512)
    ('53.8 GB', '512 bytes')
    """
    for unit in ("TB", "GB", "MB", "kB"):
        if (number := count / _UNITS[unit]) >= 1:
            return f"{number:,.0f} {unit}" if number >= 100 else f"{number:.3g} {unit}"
    return f"{int(count)} bytes"


def _parsed(text: str) -> int:
    """Parse a size such as "12 GB" into bytes; 0 if it is not a size."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kKMGT]i?B)\s*", text)
    if found is None:
        return 0
    unit = found[2] if found[2] in _UNITS else {"KB": "kB", "kiB": "KiB"}[found[2]]
    return int(float(found[1]) * _UNITS[unit])


def _of_system(root: Path) -> int:
    """Return the memory that the whole system has available, or as much of it as is known."""
    with suppress(OSError, ValueError):
        return _counters(root / "proc" / "meminfo")["MemAvailable:"] * 1024
    # Without Linux's own number: free pages, or all of them.
    for pages in ("SC_AVPHYS_PAGES", "SC_PHYS_PAGES"):
        with suppress(AttributeError, OSError, ValueError):
            return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")
    return sys.maxsize


def _of_groups(root: Path) -> Iterator[int]:
    """Yield what is left of the limit of every control group that this process is in, directly or through another."""
    lines: list[str] = []
    with suppress(OSError):
        lines = (root / "proc" / "self" / "cgroup").read_text().splitlines()
    mounted = root / "sys" / "fs" / "cgroup"
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            yield from _left(mounted, path, 2)
        elif "memory" in controllers.split(","):
            yield from _left(mounted / "memory", path, 1)


def _left(mounted: Path, path: str, version: int) -> Iterator[int]:
    limit, usage, cache = _GROUP_FILES[version]
    group = mounted / path.lstrip("/")
    # In a container, the path may be that of the host, of which only the part below the container's group is there.
    for folder in (group, *group.parents):
        if folder.is_relative_to(mounted):
            with suppress(OSError, ValueError):  # not there, or "max" for no limit
                total, used = (int((folder / name).read_text()) for name in (limit, usage))
                yield max(0, total - used + _counters(folder / "memory.stat").get(cache, 0))


def _counters(path: Path) -> dict[str, int]:
    """Read a file with a name and a number on every line."""
    words = (line.split() for line in path.read_text().splitlines())
    return {name: int(number) for name, number, *_ in words}
