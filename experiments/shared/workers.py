"""The parts of an experiment in several processes, which write to the same results."""

import signal
import subprocess
import sys
from collections.abc import Sequence

from harness.command import say, without


def dealt_out(parts: Sequence[str], first: Sequence[str], workers: int) -> list[list[list[str]]]:
    """Say which parts run when: rounds, each of so many processes at a time, each of so many parts in turn.

    Args:
        parts: What is to be measured, the most important first.
        first: Those that run before all others, by themselves.
        workers: How many processes the others are shared among.
    """
    before = [part for part in parts if part in first]
    others = [part for part in parts if part not in first]
    shared = [others[k::workers] for k in range(min(workers, len(others)))]
    return [processes for processes in ([before], shared) if any(processes)]


def run_parts(module: str, argv: Sequence[str], rounds: Sequence[Sequence[Sequence[str]]]) -> int:
    """Measure the parts of an experiment in processes of their own; return how many numbers failed.

    Args:
        module: Of the experiment.
        argv: Its command line.
        rounds: As `dealt_out` returns them.
    """
    kept = without(argv, ("--parts", "--workers"), ("--no-tables",))
    failures = 0
    for processes in rounds:
        commands = [
            [sys.executable, "-m", module, *kept, "--no-tables", "--parts", ",".join(parts)] for parts in processes
        ]
        for code, parts in zip(_together(commands), processes, strict=True):
            if code < 0:
                say(f"{', '.join(parts)}: the process was killed by signal {-code}; what it had measured is kept.")
            failures += max(code, 1) if code else 0
    return failures


def _together(commands: Sequence[Sequence[str]]) -> list[int]:
    """Run commands at the same time; end them if this process is told to end."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit("Told to end; what was measured is kept."))
    running = [subprocess.Popen(command) for command in commands]
    try:
        return [process.wait() for process in running]
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.wait()
        signal.signal(signal.SIGTERM, before)
