"""The command line shared by benchmarks that measure one model after another."""

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
    """A benchmark: its name, and functions that measure and render."""

    name: str
    parser: argparse.ArgumentParser
    batch: Callable[[Entry], int]
    """Returns the default batch size of a model."""
    measure: Callable[[Subject, Recorder, argparse.Namespace], None]
    """Measures one model and records each number at once."""
    render: Callable[[Path, bool], None]
    """Renders tables and plots from the JSON file in a folder; the flag selects the small results."""


def main(benchmark: Benchmark, argv: Sequence[str]) -> int:
    """Run the command line.

    Returns:
        The number of models that could not be measured, plus that of earlier numbers that could not be repeated.
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

    # Failures of single numbers are caught earlier: this catches failures to build the model, and bugs.
    outcome = attempt(work)
    if "failed" in outcome:
        say(f"{entry.title}: {outcome['failed']}")
    release(run.device)
    return int(outcome.get("not_repeated", 1))


def options(description: str) -> argparse.ArgumentParser:
    """Return a parser with the common options."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--models", type=choices(*MODELS), default=list(MODELS), help=f"some of {','.join(MODELS)}; default: all"
    )
    parser.add_argument("--small", action="store_true", help="the small versions of the models, for a CPU")
    parser.add_argument("--batch", type=positive, help="batch size; each model has its own default")
    parser.add_argument("--seconds", type=float, help="seconds to spend on each number: 3, or 0.5 with --small")
    parser.add_argument("--device", type=torch.device, help="cuda where there is one, else cpu")
    parser.add_argument("--channels-last", action="store_true", help="give images in this memory format")
    parser.add_argument("--profile", action="store_true", help="print a profile of each number")
    result_options(parser)
    return parser
