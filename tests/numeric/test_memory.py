"""Free memory, as a system in a folder reports it, and settings that limit memory."""

import sys

import pytest
import torch

from eigentrace.errors import InputError
from eigentrace.numeric.memory import as_text, bytes_of, check_memory, free_memory
from tests.helpers.expecting import refused
from tests.helpers.small import table

CPU = torch.device("cpu")
AVAILABLE = "MemTotal:       16000000 kB\nMemFree:          100 kB\nMemAvailable:    8000000 kB\n"
V1, V2 = "4:cpu,memory:/jobs/mine\n3:cpu:/\n", "0::/jobs/mine\n"


def system(root, groups="", **files):
    """Write what a system reports below `root`, and files of control groups."""
    (root / "proc" / "self").mkdir(parents=True)
    (root / "proc" / "meminfo").write_text(AVAILABLE)
    (root / "proc" / "self" / "cgroup").write_text(groups)
    for name, text in files.items():
        path = root / "sys" / "fs" / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(text))
    return root


SYSTEMS = {
    "no group": ("", {}, 8_192_000_000),
    "a group without a limit": (V2, {"jobs/mine/memory.max": "max\n"}, 8_192_000_000),
    "version 2": (
        V2,
        {
            "jobs/mine/memory.max": 5000,
            "jobs/mine/memory.current": 3000,
            "jobs/mine/memory.stat": "anon 7\ninactive_file 400\n",
        },
        2400,
    ),
    "a limit of the parent": (
        V2,
        {
            "jobs/mine/memory.max": "max",
            "jobs/memory.max": 900,
            "jobs/memory.current": 200,
            "jobs/memory.stat": "anon 7\n",
        },
        700,
    ),
    "in a container": (V2, {"memory.max": 900, "memory.current": 1000, "memory.stat": "inactive_file 50\n"}, 0),
    "version 1": (
        V1,
        {
            "memory/jobs/mine/memory.limit_in_bytes": 5000,
            "memory/jobs/mine/memory.usage_in_bytes": 1000,
            "memory/jobs/mine/memory.stat": "inactive_file 1\ntotal_inactive_file 20\n",
        },
        4020,
    ),
    "version 1 without a limit": (
        V1,
        {
            "memory/memory.limit_in_bytes": 9223372036854771712,
            "memory/memory.usage_in_bytes": 1000,
            "memory/memory.stat": "total_inactive_file 20\n",
        },
        8_192_000_000,
    ),
}


@pytest.mark.parametrize(("groups", "files", "expected"), table(SYSTEMS))
def test_the_smallest_limit_counts(groups, files, expected, tmp_path):
    assert free_memory(CPU, system(tmp_path, groups, **files)) == expected


def test_other_systems_report_pages(tmp_path):
    assert 0 < free_memory(CPU, tmp_path) <= sys.maxsize
    assert 2**20 < free_memory(CPU) < 2**50


@pytest.mark.parametrize(
    ("memory", "expected"),
    [(7, 7), (0.5, 500), ("12GB", 12 * 10**9), (" 1.5 GiB ", 3 * 2**29), ("8kB", 8000), ("8KB", 8000), ("1MiB", 2**20)],
)
def test_limits_are_bytes_shares_or_text(memory, expected):
    check_memory(memory)
    assert bytes_of(memory, lambda: 1000) == expected


@pytest.mark.parametrize("memory", [0, -1, 1.0, 2.5, True, "12", "GB", "0GB", "12 gig", float("nan"), [1]])
def test_other_limits_are_refused(memory):
    with refused(InputError, "memory", "'12GB'", 0, 1, repr(memory)):
        check_memory(memory)


@pytest.mark.parametrize(
    ("count", "text"), [(12, "12 bytes"), (53_833_064_592, "53.8 GB"), (100_000, "100 kB"), (3.2e15, "3,200 TB")]
)
def test_bytes_as_text(count, text):
    assert as_text(count) == text
