"""Benchmarks that measure model after model: the command line that they share."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from harness.command import carried_out, choices, positive, result_options, say, start
from harness.measure import Cell, Run, Subject, attempt, release
from harness.models import MODELS, SMALL, Entry
from harness.record import Recorder


@dataclass(frozen=True)
class Benchmark:
    """What a benchmark is made of."""

    name: str
    parser: argparse.ArgumentParser
    batch: Callable[[Entry], int]
    """Examples per batch unless told otherwise."""
    measure: Callable[[Subject, Recorder, argparse.Namespace], None]
    """Measures one model and records each number as it comes."""
    render: Callable[[Path, bool], None]
    """Writes tables and plots into a folder from the JSON that lies there; the flag asks for the small ones."""


def main(benchmark: Benchmark, argv: Sequence[str]) -> int:
    """Do what the command line asks for.

    Returns:
        How many models could not be measured at all, and how many numbers of earlier runs could not be measured again.
    """
    settings = benchmark.parser.parse_args(argv)

    def measure(path: Path) -> int:
        run = start(f"bench.{benchmark.name}", settings, argv)
        return sum(_measure(benchmark, name, run, path, settings) for name in settings.models)

    return carried_out(benchmark.name, settings, measure, benchmark.render)


def _measure(benchmark: Benchmark, name: str, run: Run, path: Path, settings: argparse.Namespace) -> int:
    entry = (SMALL if run.small else MODELS)[name]

    def work() -> Cell:
        size = settings.batch or benchmark.batch(entry)
        subject = Subject.of(entry, run.device, size, channels_last=settings.channels_last)
        details = {"batch": size, "channels_last": settings.channels_last}
        recorder = Recorder(run, path, name, subject.description | {"settings": details})
        benchmark.measure(subject, recorder, settings)
        return {"not_repeated": recorder.not_repeated}

    # Each number has an attempt of its own: what ends here is building the model, or a mistake in the benchmark.
    outcome = attempt(work)
    if "failed" in outcome:
        say(f"{entry.title}: {outcome['failed']}")
    release(run.device)
    return int(outcome.get("not_repeated", 1))


def options(description: str) -> argparse.ArgumentParser:
    """Return a parser of what all of them understand."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--models", type=choices(*MODELS), default=list(MODELS), help=f"some of {','.join(MODELS)}; all if left out"
    )
    parser.add_argument("--small", action="store_true", help="the small versions of the models, for a CPU")
    parser.add_argument("--batch", type=positive, help="examples per batch; each model has its own default")
    parser.add_argument("--seconds", type=float, help="to spend on each number: 3, or 0.5 with --small")
    parser.add_argument("--device", type=torch.device, help="cuda where there is one, else cpu")
    parser.add_argument("--channels-last", action="store_true", help="give images in this memory format")
    parser.add_argument("--profile", action="store_true", help="print where the time of each number goes")
    result_options(parser)
    return parser
