"""The command line of benchmarks and experiments: measure what is asked for, merge what was found, render it."""

import argparse
import platform
import sys
from collections.abc import Callable, Collection, Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch

import eigentrace
from harness.measure import Run
from harness.merging import take_over
from harness.record import read, stem, taking_turns
from harness.refusal import check_place
from harness.screen import shown_tables

# Where a command read and wrote is the business of one machine, and not recorded; nor is what changes no number.
_PLACES = ("--out", "--cache", "--data", "--checkout")
_FLAGS = ("--replace", "--no-tables")
# A process cannot end with more than 255, and 256 failures must not look like none.
_MOST_FAILURES = 100


def place_options(parser: argparse.ArgumentParser) -> None:
    """Add where results lie, and that they can be taken over or rendered again."""
    parser.add_argument("--out", type=Path, default=Path("docs/results"), help="where results are merged and rendered")
    parser.add_argument("--render", action="store_true", help="measure nothing, only write the pages again")
    parser.add_argument("--merge", type=Path, nargs="+", help="measure nothing, merge these JSON files and render")


def result_options(parser: argparse.ArgumentParser) -> None:
    """Add what `carried_out` understands."""
    place_options(parser)
    parser.add_argument("--replace", action="store_true", help="drop numbers of other settings that are in the way")
    parser.add_argument("--no-tables", action="store_true", help="do not print the tables at the end")


def carried_out(
    name: str, settings: argparse.Namespace, measure: Callable[[Path], int], render: Callable[[Path, bool], None]
) -> int:
    """Do what `result_options` asks for: measure, or merge other results, or nothing; then render and print the tables.

    Args:
        name: What the files of the results begin with.
        settings: Of the command line.
        measure: Measures everything into a JSON file, and returns how many numbers failed.
        render: Writes pages into a folder from the JSON that lies there; the flag asks for the small ones.

    Returns:
        How many numbers failed, as far as a process can say.
    """
    path = settings.out / f"{stem(name, small=settings.small)}.json"
    check_place(settings.out)
    if settings.merge:
        take_over(path, settings.merge, name, render, small=settings.small, replace=settings.replace)
    before = read(path)
    try:
        failures = 0 if settings.merge or settings.render else measure(path)
    except BaseException:
        if read(path) != before:  # what was measured before something ended the run is on the page too
            _rendered(settings, render)
        raise
    _rendered(settings, render)
    if not settings.no_tables:
        say("\n".join(["", *shown_tables(path.with_suffix(".md"), path)]))
    return min(failures, _MOST_FAILURES)


def _rendered(settings: argparse.Namespace, render: Callable[[Path, bool], None]) -> None:
    with taking_turns(settings.out):
        render(settings.out, settings.small)


def choices(*allowed: str) -> Callable[[str], list[str]]:
    """Return a reader of comma-separated words out of some."""

    def words(text: str) -> list[str]:
        found = [word for word in text.split(",") if word]
        if not found:
            raise argparse.ArgumentTypeError(f"{text!r} names none of {', '.join(allowed)}")
        unknown = [word for word in found if word not in allowed]
        if unknown:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(allowed)}")
        return found

    return words


def positive(text: str) -> int:
    """Read a whole number of at least one."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def start(module: str, settings: argparse.Namespace, argv: Sequence[str]) -> Run:
    """Begin a run of a module with the settings of the command line."""
    device = settings.device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    seconds = settings.seconds if settings.seconds is not None else (0.5 if settings.small else 3.0)
    info = {
        "date": datetime.now(UTC).replace(tzinfo=None).isoformat(" ", "milliseconds"),
        "torch": torch.__version__,
        "eigentrace": eigentrace.__version__,
        "python": platform.python_version(),
        "command": " ".join([f"python -m {module}", *without(argv, _PLACES, _FLAGS)]),
    }
    return Run(device, settings.small, seconds, info, settings.profile, settings.replace)


def without(argv: Sequence[str], options: Collection[str], flags: Collection[str] = ()) -> list[str]:
    """Leave options that have a value, and flags, out of a command."""
    kept: list[str] = []
    words = iter(argv)
    for word in words:
        name, given, _ = word.partition("=")
        if word in flags:
            continue
        if name not in options:
            kept.append(word)
        elif not given:
            next(words, None)
    return kept


def say(text: str) -> None:
    """Print a line at once: a run may be cut off."""
    print(text, flush=True, file=sys.stdout)
