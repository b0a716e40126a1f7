"""The command line of benchmarks and experiments: measure, merge results, render pages."""

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
from harness.places import check_layout, data_file, page_file
from harness.record import read, stem, taking_turns
from harness.refusal import check_place
from harness.screen import shown_tables

# Options that are not recorded: paths, which depend on the machine, and options that do not affect results.
_PLACES = ("--out", "--cache", "--data", "--model", "--checkout")
_FLAGS = ("--replace", "--no-tables")
# Exit codes end at 255: 256 failures would look like none.
_MOST_FAILURES = 100


def place_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for the folder of results, for merging other results, and for rendering pages again."""
    parser.add_argument("--out", type=Path, default=Path("docs/results"), help="where results are merged and rendered")
    parser.add_argument("--render", action="store_true", help="render the pages again, without measuring")
    parser.add_argument("--merge", type=Path, nargs="+", help="merge these JSON files and render, without measuring")


def result_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `carried_out`."""
    place_options(parser)
    parser.add_argument("--replace", action="store_true", help="drop numbers that were measured with other settings")
    parser.add_argument("--no-tables", action="store_true", help="do not print the tables at the end")


def carried_out(
    name: str, settings: argparse.Namespace, measure: Callable[[Path], int], render: Callable[[Path, bool], None]
) -> int:
    """Measure, or merge other results, as `result_options` say; then render the pages and print the tables.

    Args:
        name: The first part of the file names of results.
        settings: The parsed command line.
        measure: Measures everything into a JSON file, and returns the number of failures.
        render: Writes the pages from the JSON file in a folder; the flag selects the small results.

    Returns:
        The number of failures, capped at the largest exit code.
    """
    page = stem(name, small=settings.small)
    path = data_file(settings.out, page)
    check_place(settings.out)
    check_layout(settings.out, page, settings.merge or ())
    if settings.merge:
        take_over(path, settings.merge, name, render, small=settings.small, replace=settings.replace)
    before = read(path)
    try:
        failures = 0 if settings.merge or settings.render else measure(path)
    except BaseException:
        if read(path) != before:  # also render what was measured before an interruption
            _rendered(path, settings, render)
        raise
    _rendered(path, settings, render)
    if not settings.no_tables:
        say("\n".join(["", *shown_tables(page_file(settings.out, page), path)]))
    return min(failures, _MOST_FAILURES)


def _rendered(path: Path, settings: argparse.Namespace, render: Callable[[Path, bool], None]) -> None:
    with taking_turns(path.parent):
        render(settings.out, settings.small)


def choices(*allowed: str) -> Callable[[str], list[str]]:
    """Return a parser of comma-separated lists of the given choices."""

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
    """Parse an integer of at least 1."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def share(text: str) -> float:
    """Parse a number from 0 to below 1."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to below 1")
    return value


def start(module: str, settings: argparse.Namespace, argv: Sequence[str]) -> Run:
    """Create the record of a run of a module with the settings of the command line."""
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
    """Remove options with their values, and flags, from a command."""
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
    """Print a line and flush it, since the run may be interrupted."""
    print(text, flush=True, file=sys.stdout)
