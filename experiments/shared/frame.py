"""What all experiments share: the command line, results that merge number by number, a page and figures.

    python -m experiments.AREA.NAME --small                # minutes at most, on a CPU: to see that everything runs
    python -m experiments.AREA.NAME --data FOLDER          # real size; FOLDER has the data, --download puts it there
    python -m experiments.AREA.NAME --parts a,b --missing  # some of it, and only numbers that are not there yet
    python -m experiments.AREA.NAME --workers 4            # parts shared among four processes at a time
    python -m experiments.AREA.NAME --merge other.json     # take over what was measured elsewhere
    python -m experiments.AREA.NAME --render               # write page and figures again

Results go to docs/results/NAME.json, from which NAME.md and its figures are written; its tables are printed at the end.
A number that fails when it is measured again is kept, and settings other than those of the numbers that are there end a
command before it measures, unless --replace says to drop these.
"""

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from eigentrace.errors import InputError
from experiments.shared.needed import Needed
from experiments.shared.workers import dealt_out, run_parts
from harness.command import carried_out, choices, positive, result_options, say, start
from harness.measure import Cell, Run, attempt, described
from harness.places import figure_link, save_figure, save_page
from harness.plot import Drawing, can_draw, undrawn
from harness.record import Record, Recorder, heading, is_number, read, runs_of, stem
from harness.refusal import differences

Records = dict[str, Record]
"""What one machine measured, part by part."""


def no_figures(records: Records, *, small: bool) -> dict[str, Drawing]:
    """Draw nothing."""
    return {}


def no_options(parser: argparse.ArgumentParser) -> None:
    """Add nothing to the command line."""


@dataclass(frozen=True)
class Experiment:
    """One command under `experiments/`."""

    name: str
    """The file of its command, and its own files under docs/results/."""
    title: str
    about: str
    """What the paper did, what runs here, at which size and how long: Markdown, at the top of the page."""
    parts: Mapping[str, Callable[["Session"], None]]
    """What it is made of, each measured for itself, by the names of `--parts`."""
    tables: Callable[[Records], list[str]]
    """Lays out what one machine measured, the paper's numbers beside it, as lines of Markdown."""
    figures: Callable[..., Mapping[str, Drawing]] = no_figures
    """What is drawn of what one machine measured, by a word that goes into the file's name. Called with `small`."""
    options: Callable[[argparse.ArgumentParser], None] = no_options
    """Adds what only this experiment understands to the command line."""
    verdict: str = ""
    """What the full size showed, where it agrees with the paper and where not: Markdown, written after it ran."""
    seen: str = ""
    """The verdict in a line or two, for the list at the top of the page of all experiments."""
    needed: Needed = field(default_factory=Needed)
    """The files that it reads."""
    first: tuple[str, ...] = ()
    """Parts that leave what others read, or whose seconds count: with `--workers` they run before, by themselves."""
    area: str = ""
    """The folder of its command under `experiments/`."""

    @property
    def module(self) -> str:
        """What its command is called."""
        return ".".join(("experiments", *filter(None, [self.area]), self.name))

    @property
    def command(self) -> str:
        """What runs it."""
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
        """Where to compute."""
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
        """Begin a part. Numbers with other settings do not stand beside its own: it ends here if there are any."""
        settings = dict(settings)
        if self.small and self.settings.data is not None:
            settings["data"] = "from --data"  # other numbers than those of what stands in for it
        return Part(self, Recorder(self.run, self.path, name, {"title": title, "settings": settings, "facts": facts}))


@dataclass(frozen=True)
class Part:
    """Keeps the numbers of one part as they come."""

    session: Session
    recorder: Recorder

    @property
    def name(self) -> str:
        """What its numbers are kept under."""
        return self.recorder.model

    def has(self, name: str) -> bool:
        """Tell whether an earlier run measured this number, and it may be left as it is."""
        session = self.session
        if not session.settings.missing:
            return False
        kept = read(session.path).get(described(session.device), {}).get(self.name)
        if kept is None or differences(kept["settings"], self.recorder.record["settings"]):
            return False
        return is_number(kept["cells"].get(name))

    def cell(self, name: str, work: Callable[[], Cell]) -> Cell | None:
        """Measure and keep; None if it is there already. What fails is kept as a failure, and the rest goes on."""
        if self.has(name):
            return None
        cell = attempt(work)
        return self.add(name, cell)

    def add(self, name: str, cell: Cell) -> Cell:
        """Keep what is measured already."""
        self.recorder.add(name, cell)
        if "failed" in cell:
            self.session.failures.append(f"{self.name}/{name}")
        say(f"{self.name:16} {name:44} {_line(cell)}")
        return cell


def main(experiment: Experiment, argv: Sequence[str]) -> int:
    """Do what the command line asks for; return how many numbers failed."""
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
    """Write the page and the figures from the JSON."""
    name = stem(experiment.name, small=small)
    command = experiment.command + (" --small" if small else "")
    lines = heading(experiment.title + (", small" if small else ""), command, name)
    if small:
        full = f"{experiment.command}{experiment.needed.full_options}"
        lines += ["", f"**Numbers of the small form**, which shows that all runs and no more. At full size: `{full}`."]
    lines += ["", experiment.about]
    if experiment.verdict and not small:
        lines += ["", "## What it shows", "", experiment.verdict]
    for machine, records in read(out / f"{name}.json").items():
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


def shown_on(experiment: Experiment, machine: str, records: Records, *, small: bool) -> list[str]:
    """Lay out what one machine measured: tables, then figures."""
    lines = list(experiment.tables(records))
    words = list(experiment.figures(records, small=small))
    if words and not can_draw():
        return [*lines, "", undrawn(experiment.command + (" --small" if small else ""))]
    name = stem(experiment.name, small=small)
    for word in words:
        lines += ["", f"![{experiment.title}: {word}]({figure_link(figure_name(name, word, machine))})"]
    return lines


def figure_name(name: str, word: str, machine: str) -> str:
    """Name the file of a figure after the experiment, what it shows and the machine."""
    return "_".join([name, word, re.sub(r"[^a-z0-9]+", "-", machine.lower()).strip("-")])


def _line(cell: Cell) -> str:
    if "failed" in cell:
        return f"failed: {cell['failed']}"
    numbers = {key: value for key, value in cell.items() if isinstance(value, int | float) and key != "run"}
    return ", ".join(f"{key} {value:.4g}" for key, value in numbers.items())


def _parser(experiment: Experiment) -> argparse.ArgumentParser:
    # Options are passed on to other processes, so each has one name.
    parser = argparse.ArgumentParser(prog=experiment.command, description=experiment.title, allow_abbrev=False)
    names = ",".join(experiment.parts)
    parser.add_argument("--parts", type=choices(*experiment.parts), help=f"some of {names}; all if left out")
    parser.add_argument(
        "--small", action="store_true", help="toy size, to see that everything runs; with --data, a cut of it"
    )
    parser.add_argument(
        "--seeds", type=positive, default=1, help="so many trainings, where the experiment repeats them"
    )
    parser.add_argument("--data", type=Path, help="folder of the data that is not embedded")
    parser.add_argument("--download", action="store_true", help="fetch public data into the folder if it is not there")
    parser.add_argument("--missing", action="store_true", help="measure only what is not in the results yet")
    parser.add_argument("--workers", type=positive, default=1, help="processes that measure parts at the same time")
    parser.add_argument("--device", type=torch.device, help="cuda where there is one, else cpu")
    result_options(parser)
    parser.set_defaults(seconds=0.0, profile=False)
    experiment.options(parser)
    return parser
