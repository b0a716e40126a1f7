"""The framework of all experiments: command line, mergeable results, pages and figures.

    python -m experiments.AREA.NAME --small                # minutes at most, on a CPU: check that everything runs
    python -m experiments.AREA.NAME --data FOLDER          # full size; FOLDER has the data, --download fetches it
    python -m experiments.AREA.NAME --parts a,b --missing  # only these parts, and only numbers that are missing
    python -m experiments.AREA.NAME --workers 4            # distribute the parts over four processes
    python -m experiments.AREA.NAME --merge other.json     # merge results that were measured elsewhere
    python -m experiments.AREA.NAME --render               # render page and figures again

Results go to docs/results/data/NAME.json, from which docs/results/NAME.md and its figures are rendered; the tables are
printed at the end. If measuring a number again fails, the old one is kept. If existing numbers have other settings, a
command exits before it measures, unless --replace drops them.
"""

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from eigentrace.errors import InputError
from experiments.shared.claims import Claim
from experiments.shared.needed import Needed
from experiments.shared.workers import dealt_out, run_parts
from harness.command import carried_out, choices, positive, result_options, say, start
from harness.measure import Cell, Run, attempt, described
from harness.places import data_file, figure_link, save_figure, save_page
from harness.plot import Drawing, can_draw, undrawn
from harness.record import Record, Recorder, heading, is_number, read, runs_of, stem
from harness.refusal import differences

Records = dict[str, Record]
"""The results of one machine, by part."""


def no_figures(records: Records, *, small: bool) -> dict[str, Drawing]:
    """Draw nothing."""
    return {}


def no_options(parser: argparse.ArgumentParser) -> None:
    """Add nothing to the command line."""


@dataclass(frozen=True)
class Experiment:
    """One command under `experiments/`."""

    name: str
    """Name of its module, and of its files in docs/results/."""
    title: str
    about: str
    """Introduction of the page in Markdown: the paper's experiment, this one, its size and its duration."""
    parts: Mapping[str, Callable[["Session"], None]]
    """Its parts, measured separately, by the names of `--parts`."""
    tables: Callable[[Records], list[str]]
    """Returns the tables of one machine's results, with the paper's numbers, as lines of Markdown."""
    figures: Callable[..., Mapping[str, Drawing]] = no_figures
    """Returns the figures of one machine's results by a suffix of the file name; called with `small`."""
    options: Callable[[argparse.ArgumentParser], None] = no_options
    """Adds the options of this experiment to the command line."""
    verdict: str = ""
    """What readers need besides the claims, in Markdown: likely reasons, and what the package adds."""
    claims: tuple[Claim, ...] = ()
    """The paper's claims, each judged by the stored numbers at full size."""
    summary: Callable[[Records], list[str]] | None = None
    """Returns the tables with the paper's numbers alone, for the page of all experiments; None: `tables`."""
    needed: Needed = field(default_factory=Needed)
    """The files that it reads."""
    first: tuple[str, ...] = ()
    """Parts whose files other parts read, or that measure time: with `--workers` they run first, alone."""
    area: str = ""
    """The folder of its module in `experiments/`."""

    @property
    def module(self) -> str:
        """The name of its module."""
        return ".".join(("experiments", *filter(None, [self.area]), self.name))

    @property
    def command(self) -> str:
        """The command that runs it."""
        return f"python -m {self.module}"


@dataclass(frozen=True)
class Session:
    """One call of an experiment."""

    run: Run
    settings: argparse.Namespace
    path: Path
    failures: list[str] = field(default_factory=list)

    @property
    def device(self) -> torch.device:
        """The device to compute on."""
        return self.run.device

    @property
    def small(self) -> bool:
        """Whether to run at toy size."""
        return self.run.small

    @property
    def seeds(self) -> range:
        """The seeds to run with."""
        return range(self.settings.seeds)

    def data(self, what: str) -> Path:
        """Return the folder of the data.

        Raises:
            InputError: If none was given.
        """
        if self.settings.data is None:
            raise InputError(f"{what} is not embedded: give the folder of its files as --data, or add --download.")
        folder: Path = self.settings.data
        return folder

    def part(self, name: str, title: str, settings: Mapping[str, Any], **facts: Any) -> "Part":
        """Begin a part; exit if there are numbers with other settings."""
        settings = dict(settings)
        if self.small and self.settings.data is not None:
            settings["data"] = "from --data"  # other numbers than those of what stands in for it
        return Part(self, Recorder(self.run, self.path, name, {"title": title, "settings": settings, "facts": facts}))


@dataclass(frozen=True)
class Part:
    """Records the numbers of one part as they are measured."""

    session: Session
    recorder: Recorder

    @property
    def name(self) -> str:
        """The name under which its numbers are recorded."""
        return self.recorder.model

    def has(self, name: str) -> bool:
        """Return whether an earlier run measured this number, and it need not be measured again."""
        session = self.session
        if not session.settings.missing:
            return False
        kept = read(session.path).get(described(session.device), {}).get(self.name)
        if kept is None or differences(kept["settings"], self.recorder.record["settings"]):
            return False
        return is_number(kept["cells"].get(name))

    def cell(self, name: str, work: Callable[[], Cell]) -> Cell | None:
        """Measure and record a number, or its failure; None if it exists already."""
        if self.has(name):
            return None
        cell = attempt(work)
        return self.add(name, cell)

    def add(self, name: str, cell: Cell) -> Cell:
        """Record a number that was measured elsewhere."""
        self.recorder.add(name, cell)
        if "failed" in cell:
            self.session.failures.append(f"{self.name}/{name}")
        say(f"{self.name:16} {name:44} {_line(cell)}")
        return cell


def main(experiment: Experiment, argv: Sequence[str]) -> int:
    """Run the command line; return the number of failures."""
    settings = _parser(experiment).parse_args(argv)
    chosen = settings.parts or list(experiment.parts)
    if not settings.merge and not settings.render:
        experiment.needed.check(settings, chosen, list(experiment.parts))

    def measure(path: Path) -> int:
        if settings.workers > 1:
            return run_parts(experiment.module, argv, dealt_out(chosen, experiment.first, settings.workers))
        run = start(experiment.module, settings, argv)
        session = Session(run, settings, path)
        for name in chosen:
            outcome = attempt(lambda name=name: experiment.parts[name](session) or {})  # type: ignore[misc]
            if "failed" in outcome:
                say(f"{name}: {outcome['failed']}")
                session.failures.append(name)
        return len(session.failures)

    return carried_out(experiment.name, settings, measure, lambda out, small: render(experiment, out, small=small))


def render(experiment: Experiment, out: Path, *, small: bool) -> None:
    """Render the page and the figures from the JSON file."""
    name = stem(experiment.name, small=small)
    command = experiment.command + (" --small" if small else "")
    lines = heading(experiment.title + (", small" if small else ""), command, name)
    if small:
        full = f"{experiment.command}{experiment.needed.full_options}"
        lines += ["", f"**Numbers of the small form**, which shows that all runs and no more. At full size: `{full}`."]
    lines += ["", experiment.about]
    found = read(data_file(out, name))
    if not small:
        lines += shows(experiment, found, "## What it shows")
    for machine, records in found.items():
        for word, drawing in experiment.figures(records, small=small).items() if can_draw() else ():
            save_figure(out, figure_name(name, word, machine), drawing())
        lines += [
            "",
            f"## {machine}",
            "",
            *shown_on(experiment, machine, records, small=small),
            "",
            *runs_of(records, experiment.module),
        ]
    save_page(out, name, lines)


def shows(experiment: Experiment, results: Mapping[str, Records], heading: str = "") -> list[str]:
    """Return the verdict on each claim of the paper, by the results of each machine, then the discussion."""
    lines = ["", heading] if heading and (experiment.verdict or experiment.claims) else []
    for machine, records in results.items() if experiment.claims else ():
        lines += [
            "",
            f"The paper's claims, by the numbers of {machine}:" if len(results) > 1 else "The paper's claims:",
        ]
        lines += ["", *(f"- {claim.line(records)}" for claim in experiment.claims)]
    return [*lines, *(["", experiment.verdict] if experiment.verdict else [])]


def shown_on(experiment: Experiment, machine: str, records: Records, *, small: bool) -> list[str]:
    """Return the section of one machine: tables, then figures."""
    lines = list(experiment.tables(records))
    words = list(experiment.figures(records, small=small))
    if words and not can_draw():
        return [*lines, "", undrawn(experiment.command + (" --small" if small else ""))]
    name = stem(experiment.name, small=small)
    for word in words:
        lines += ["", f"![{experiment.title}: {word}]({figure_link(figure_name(name, word, machine))})"]
    return lines


def figure_name(name: str, word: str, machine: str) -> str:
    """Return the file name of a figure: experiment, content and machine."""
    return "_".join([name, word, re.sub(r"[^a-z0-9]+", "-", machine.lower()).strip("-")])


def _line(cell: Cell) -> str:
    if "failed" in cell:
        return f"failed: {cell['failed']}"
    numbers = {key: value for key, value in cell.items() if isinstance(value, int | float) and key != "run"}
    return ", ".join(f"{key} {value:.4g}" for key, value in numbers.items())


def _parser(experiment: Experiment) -> argparse.ArgumentParser:
    # Options are passed to other processes, so abbreviations are disabled.
    parser = argparse.ArgumentParser(prog=experiment.command, description=experiment.title, allow_abbrev=False)
    names = ",".join(experiment.parts)
    parser.add_argument("--parts", type=choices(*experiment.parts), help=f"some of {names}; default: all")
    parser.add_argument(
        "--small", action="store_true", help="toy size, to check that everything runs; with --data, on a part of it"
    )
    parser.add_argument("--seeds", type=positive, default=1, help="number of trainings, if the experiment repeats them")
    parser.add_argument("--data", type=Path, help="folder of data that is not embedded")
    parser.add_argument("--download", action="store_true", help="download missing public data to the folder")
    parser.add_argument("--missing", action="store_true", help="measure only numbers that are not in the results yet")
    parser.add_argument(
        "--workers", type=positive, default=1, help="number of processes that measure parts in parallel"
    )
    parser.add_argument("--device", type=torch.device, help="cuda where there is one, else cpu")
    result_options(parser)
    parser.set_defaults(seconds=0.0, profile=False)
    experiment.options(parser)
    return parser
