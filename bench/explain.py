"""Measure the recall of explanations by stored features and shortlists, compared with all exact scores.

python -m bench.explain            # 6,000 digits, minutes on a CPU
python -m bench.explain --small    # 400 digits, to see that all runs
python -m bench.explain --rows 1000000,300000x1024 # the time and memory of one question to runs of drawn numbers
python -m bench.explain --rows 10000000 --checkout OTHER --called "before"    # by another version of the package
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

import eigentrace as et
from bench.page import write_page
from bench.peers.networks import Recipe, logits_of, mlp, seeded, train
from bench.question import ask_runs, question_tables
from bench.search import same_rows
from bench.serve import FEATURES
from eigentrace.demo.digits import load_digits
from harness.command import carried_out, positive, result_options, say, start
from harness.measure import Cell, Run, attempt, with_seconds
from harness.record import Notes, Record, Recorder, shown, table

KEEPS = (5, 10, 50)
NORMALIZED = {"none": None, "gradient": "gradient", "metric": "metric"}
WAYS: dict[str, dict[str, Any]] = {
    "kept directions only": {"rescore": False},
    "shortlist of 200": {"shortlist": 200},
    "shortlist of 2,000": {"shortlist": 2000},
}
_TOP = 10
_RECIPE = Recipe(epochs=10, batch=64, lr=0.05)


def main(argv: Sequence[str]) -> int:
    """Run the command line; return the number of failures."""
    settings = _parser().parse_args(argv)
    work = ask_runs if settings.rows else _measure
    return carried_out(
        "explain", settings, lambda path: work(start("bench.explain", settings, argv), path, settings), render
    )


def _measure(run: Run, path: Path, settings: argparse.Namespace) -> int:
    digits = load_digits()
    count = 400 if run.small else len(digits.train_images)
    images, labels = digits.train_images[:count], digits.train_labels[:count]
    model = seeded(mlp, 0).to(run.device)
    train(model, images.to(run.device), labels.to(run.device), _RECIPE, seed=0)
    predicted = logits_of(model, digits.test_images.to(run.device)).argmax(dim=1).cpu()
    wrong = (predicted != digits.test_labels).nonzero().flatten()[: settings.queries]
    queries = digits.test_images[wrong], digits.test_labels[wrong]
    data, failures = et.Data(TensorDataset(images, labels), batch_size=500), 0
    facts = {"title": f"{count:,} digits", "settings": {"queries": len(wrong), "top": _TOP}}
    recorder = Recorder(run, path, str(count), facts)
    for keep in KEEPS[:1] if run.small else KEEPS:
        fitted = et.Arnoldi(steps=max(4 * keep, 40), keep=keep, sample=min(2048, count)).fit(
            et.classification(model), data
        )
        with tempfile.TemporaryDirectory() as folder:
            for name, cell in _cells(et.score(fitted, data, folder + "/run"), fitted, data, queries, run):
                recorder.add(f"{keep}/{name}", cell)
                say(f"K = {keep:<3} {name:32} {cell.get('failed') or _line(cell)}")
                failures += "failed" in cell
    return failures


def _cells(
    scored: et.Run, fitted: Any, data: et.Data, queries: tuple[Tensor, Tensor], run: Run
) -> Iterator[tuple[str, Cell]]:
    """Compare the examples that each way returns with the extremes of all scores of the fit."""
    for word, normalize in NORMALIZED.items():
        exact = fitted.influence(data, queries, normalize=normalize)  # (Q, N)
        truth = [(sign * exact).topk(_TOP, dim=1).indices.cpu() for sign in (1, -1)]
        for way, options in WAYS.items():
            yield (
                f"{word}/{way}",
                attempt(partial(_named, scored, queries, options, normalize, truth, run)),
            )


def _named(
    scored: et.Run, queries: tuple[Tensor, Tensor], options: Any, normalize: Any, truth: list[Tensor], run: Run
) -> Cell:
    first = tuple(part[:1] for part in queries)
    one = with_seconds(lambda: scored.explain(first, _TOP, normalize=normalize, **options), run.device)[1]
    found, all_of_them = with_seconds(lambda: scored.explain(queries, _TOP, normalize=normalize, **options), run.device)
    sides = (torch.from_numpy(side.rows) for side in (found.proponents, found.opponents))
    shares = [same_rows(rows, expected) for rows, expected in zip(sides, truth, strict=True)]
    return {"proponents": shares[0], "opponents": shares[1], "how": found.how, "one": one, "all": all_of_them}


def _line(cell: Cell) -> str:
    return f"{cell['how']}: {cell['proponents']:.2f} of the proponents, {cell['opponents']:.2f} of the opponents"


def render(out: Path, small: bool) -> None:
    """Render the tables from the JSON file."""
    about = (
        f"Which share of the {_TOP} strongest proponents and opponents, by all scores of a fit, an explanation names. "
        "Questions are test digits that a 784-128-64-10 network gets wrong. Seconds are of one question and of all."
    )
    write_page(out, "explain", "Whom explanations name", about, _machine, small=small)


def _machine(problems: dict[str, Record]) -> list[str]:
    notes, lines = Notes(), []
    keys = (("how", ""), ("proponents", ".2f"), ("opponents", ".2f"), ("one", ".2f"), ("all", ".2f"))
    for record in (record for record in problems.values() if "queries" in record["settings"]):
        rows = [
            [way, f"{keep}", word, *(shown(record["cells"][f"{keep}/{word}/{way}"], *key, notes) for key in keys)]
            for keep in KEEPS
            for word in NORMALIZED
            for way in WAYS
            if f"{keep}/{word}/{way}" in record["cells"]
        ]
        headings = ["way", "K", "normalize", "how", "proponents", "opponents", "one, s", "all, s"]
        lines += ["", f"### {record['title']}, {record['settings']['queries']} questions", "", *table(headings, rows)]
    lines += question_tables(
        {name: record for name, record in problems.items() if "features" in record["settings"]}, notes
    )
    return [*lines, *(["", *notes.lines()] if notes.texts else [])]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.explain", description="Whom explanations name.")
    parser.add_argument("--queries", type=positive, default=25, help="number of misclassified digits to explain")
    parser.add_argument(
        "--rows", type=_sizes, help="instead, explain one row of runs of these sizes, ROWS or ROWSxFEATURES"
    )
    parser.add_argument("--checkout", type=Path, help="with --rows: the clone whose package is measured")
    parser.add_argument("--cache", type=Path, help="with --rows: folder for the runs; default: a temporary folder")
    parser.add_argument("--called", default="this version", help="with --rows: its name in the tables")
    parser.add_argument("--small", action="store_true", help="400 digits, to see that all runs")
    parser.add_argument("--device", type=torch.device, help="cuda where there is one, else cpu")
    result_options(parser)
    parser.set_defaults(seconds=0.0, profile=False)
    return parser


def _sizes(text: str) -> list[tuple[int, int]]:
    """Parse numbers of rows, each with an optional number of features."""
    sizes = (part.partition("x") for part in text.split(","))
    return [(positive(rows), positive(features) if times else FEATURES) for rows, times, features in sizes]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
