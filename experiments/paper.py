"""Render one page that summarises every experiment of the paper from the existing results.

python -m experiments.paper    # after an experiment ran, or its claims changed: writes docs/results/paper.md
"""

import argparse
import re
import sys
from collections import Counter
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from textwrap import wrap

from experiments.shared.claims import NOT_SEEN, RULE, SEEN, UNDECIDED
from experiments.shared.frame import Experiment, shows
from harness.places import data_file
from harness.record import read

NAMES = (
    *("digits.mnist_small", "digits.mnist_large", "digits.mnist_long", "digits.mnist_neighbours"),
    *("digits.inverse_arnoldi", "digits.error_analysis", "images.resnet_cifar", "images.image_exemplars"),
    *("images.resnet_curve", "images.scaling"),
    *("translation.mt_retrieval", "translation.mt_filter", "translation.mt_prefiltered", "translation.mt_exemplars"),
    "translation.throughput",
)
"""Modules, in the order of the page."""

WIDTH = 120
"""Letters of a line of text."""

INTRODUCTION = """\
<!-- Written by `python -m experiments.paper` from the results beside it: edits here are lost. -->

# The paper's experiments

*Scaling Up Influence Functions* (Schioppa, Zablotskaia, Vilar, Sokolov, 2021), run again with this package. The paper's
rows are its estimator (the Hessian, nothing beyond the kept directions); beside them stands what the package adds: a
tail for the other directions, and the loss of each example, which costs one pass and no curvature at all. Numbers of
the paper are quoted from its tables and text. Each experiment is one command, has a page of its own with its settings,
and a `--small` form that runs on anybody's machine; `make experiments-small` runs them all."""


def experiments() -> list[Experiment]:
    """Import all experiments."""
    return [import_module(f"experiments.{name}").EXPERIMENT for name in NAMES]


def page(out: Path) -> str:
    """Render the page from the results in a folder."""
    lines = [INTRODUCTION, *(["", *glance] if (glance := _glance(out)) else [])]
    for experiment in experiments():
        lines += ["", f"## {experiment.title}", ""]
        results = read(data_file(out, experiment.name))
        command = f"`{experiment.command}`"
        if not results:
            lines.append(f"Not run at full size yet: {command}.")
            continue
        lines.append(f"Settings, runs and all tables: [{experiment.name}.md]({experiment.name}.md); {command}.")
        lines += shows(experiment, results)
        for machine, records in results.items():
            lines += ["", f"**{machine}**", "", *(experiment.summary or experiment.tables)(records)]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"


def _glance(out: Path) -> list[str]:
    """List the main claims of the experiments that ran, each with its outcome and evidence."""
    lines, counts = [], Counter[str]()
    for experiment in experiments():
        anchor = _anchor(experiment.title)
        for records in read(data_file(out, experiment.name)).values():
            counts.update(claim.on(records).outcome for claim in experiment.claims)
            lines += [f"- {claim.glance(records, anchor)}" for claim in experiment.claims if claim.is_main]
    if not lines:
        return []
    total = ", ".join(f"{counts[outcome]} {outcome}" for outcome in (SEEN, NOT_SEEN, UNDECIDED))
    said = f"The main claims; of all {sum(counts.values())} claims below, {total}. {RULE}"
    return [*wrap(said, WIDTH), "", *lines]


def _anchor(title: str) -> str:
    """Return the anchor of a heading, by GitHub's rule."""
    return "".join(sign for sign in title.lower().replace(" ", "-") if sign.isalnum() or sign in "-_")


def main(argv: Sequence[str]) -> int:
    """Write the page."""
    parser = argparse.ArgumentParser(prog="python -m experiments.paper", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/results"), help="folder of the results and the page")
    out = parser.parse_args(argv).out
    out.mkdir(parents=True, exist_ok=True)
    (out / "paper.md").write_text(page(out), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
