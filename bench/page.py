"""Render the page of a benchmark from its results."""

from collections.abc import Callable
from pathlib import Path

from harness.places import data_file, save_page
from harness.record import Record, heading, read, runs_of, stem


def write_page(
    out: Path, bench: str, title: str, about: str, machine: Callable[[dict[str, Record]], list[str]], *, small: bool
) -> None:
    """Render a benchmark's page from its JSON file: an introduction, then one section per machine."""
    name = stem(bench, small=small)
    command = f"python -m bench.{bench}" + (" --small" if small else "")
    lines = [*heading(title + (", small" if small else ""), command, name), "", about]
    for described_as, problems in read(data_file(out, name)).items():
        lines += ["", f"## {described_as}", *machine(problems), "", *runs_of(problems)]
    save_page(out, name, lines)
