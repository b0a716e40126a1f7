"""Measure the parts of an experiment in several processes, which write to the same results."""

import signal
import subprocess
import sys
from collections.abc import Sequence

from harness.command import say, without


def dealt_out(parts: Sequence[str], first: Sequence[str], workers: int) -> list[list[list[str]]]:
    """Distribute parts over rounds of parallel processes, each of which measures its parts in turn.

    Args:
        parts: The parts to measure, most important first.
        first: The parts that run before all others, alone.
        workers: The number of processes for the other parts.
    """
    before = [part for part in parts if part in first]
    others = [part for part in parts if part not in first]
    shared = [others[k::workers] for k in range(min(workers, len(others)))]
    return [processes for processes in ([before], shared) if any(processes)]


def run_parts(module: str, argv: Sequence[str], rounds: Sequence[Sequence[Sequence[str]]]) -> int:
    """Measure the parts of an experiment in separate processes; return the number of failures.

    Args:
        module: The module of the experiment.
        argv: Its command line.
        rounds: The rounds that `dealt_out` returns.
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
    """Run commands in parallel; terminate them if this process is terminated."""
    running: list[subprocess.Popen[bytes]] = []
    told = False

    def end(*_: object) -> None:
        nonlocal told
        told = True
        if len(running) == len(commands):  # a process that is just being started could not be terminated
            sys.exit("Told to end; what was measured is kept.")

    before = signal.signal(signal.SIGTERM, end)
    try:
        for command in commands:
            running.append(subprocess.Popen(command))
        if told:
            end()
        return [process.wait() for process in running]
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.wait()
        signal.signal(signal.SIGTERM, before)
