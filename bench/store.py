"""Measure a run on disk: writing, scanning and checking shards, exporting a table, and scoring a corpus end to end.

python -m bench.store                     # 10M rows of 32 features; 1M rows scored; memory of scoring by rows and width
python -m bench.store --rows 1000000 --features 128 --scored 100000
python -m bench.store --small             # seconds, to see that all runs
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import eigentrace as et
from bench.page import write_page
from bench.peers.worker import Memory
from eigentrace.demo.cnn import make_cnn
from eigentrace.store import Folder
from eigentrace.store.write import write_table
from harness.command import carried_out, positive, result_options, say, start
from harness.measure import Cell, attempt, release
from harness.record import Notes, Record, Recorder, shown, table

_CPU = torch.device("cpu")
_SHARD = 250_000
_INPUTS, _CLASSES, _DIRECTIONS, _BATCH, _DIGITS = 16, 4, 8, 4096, 2000
# Sizes of the runs whose memory is compared: rows and features.
_SIZES = [(25_000, 32), (100_000, 32), (400_000, 32), (25_000, 1024), (100_000, 1024)]
STEPS = {
    "write": "write shards",
    "features": "read all features, chunk by chunk",
    "column": "read self-influence, find the highest 100",
    "rows": "read the features of 1,000 rows",
    "table": "write the table",
    "check": "check every file",
    "score": "score a linear model from end to end",
    "classes": "score a CNN, with its classes",
    "no classes": "score the same CNN, without classes",
}


def main(argv: Sequence[str]) -> int:
    """Run the command line; return the number of failures."""
    settings = _parser().parse_args(argv)

    def measure(path: Path) -> int:
        rows = settings.rows or (100_000 if settings.small else 10_000_000)
        scored = settings.scored or (5_000 if settings.small else 1_000_000)
        facts = {"title": f"{rows:,} × {settings.features}", "settings": {"scored": scored, "shard_rows": _SHARD}}
        recorder = Recorder(start("bench.store", settings, argv), path, f"{rows}x{settings.features}", facts)
        with tempfile.TemporaryDirectory(dir=settings.cache) as folder:
            steps = _steps(Path(folder), rows, settings.features, scored)
            return sum(_measured(recorder, name, step) for name, step in steps.items())

    return carried_out("store", settings, measure, render)


def _steps(base: Path, rows: int, width: int, scored: int) -> dict[str, tuple[Callable[[], float], int]]:
    """Return, for every step, a function that returns its seconds, and the number of rows."""
    folder, digits = Folder(base / "x"), min(scored, _DIGITS)
    return {
        "write": (partial(_write, folder, rows, width), rows),
        "features": (
            partial(_clocked, lambda: sum(float(part.sum()) for _, part in et.open_run(folder.path).feature_chunks())),
            rows,
        ),
        "column": (partial(_clocked, lambda: et.open_run(folder.path).self_influence().top(100)), rows),
        "rows": (partial(_clocked, partial(_some_rows, folder, rows)), 1000),
        "table": (partial(_clocked, lambda: write_table(folder)), rows),
        "check": (partial(_clocked, partial(_checked, folder)), rows),
        "score": (partial(_score, base / "y", scored), scored),
        "classes": (partial(_score_cnn, base / "classes", digits, with_classes=True), digits),
        "no classes": (partial(_score_cnn, base / "none", digits, with_classes=False), digits),
        **{
            _sized(size, features): (partial(_score_wide, base / f"{size}x{features}", size, features), size)
            for size, features in _SIZES
            if size <= scored
        },
    }


def _sized(rows: int, width: int) -> str:
    return f"score {rows:,} × {width:,}"


def _measured(recorder: Recorder, name: str, step: tuple[Callable[[], float], int]) -> bool:
    """Record the time and memory of a step; return whether it failed."""

    def work() -> Cell:
        seconds = step[0]()
        return {"seconds": seconds, "rows_per_second": step[1] / seconds} | memory.numbers() | {"load": load}

    release(_CPU)
    load, memory = os.getloadavg()[0], Memory(_CPU)
    cell = recorder.add(name, attempt(work))
    told = (
        cell.get("failed") or f"{cell['rows_per_second']:14,.0f} rows/s  {cell['peak_growth'] / 2**20:8,.0f} MiB more"
    )
    say(f"{STEPS.get(name, name):45} {told}")
    return "failed" in cell


def _clocked(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _write(folder: Folder, rows: int, width: int) -> float:
    """Write shards as scoring does; return the seconds of writing only."""
    manifest = {
        "kind": "run",
        "format": 1,
        "method": {"name": "numbers"},
        "has_curvature": False,
        "data": {"rows": rows},
        "features": {"count": width, "type": "fp32", "hold": "everything"},
    }
    folder.begin(manifest, torch.ones(width, dtype=torch.float64), None)
    generator, seconds = torch.Generator().manual_seed(0), 0.0
    for first in range(0, rows, _SHARD):
        seconds += _clocked(partial(folder.record.add, first, _drawn(min(_SHARD, rows - first), width, generator)))
    return seconds


def _drawn(rows: int, width: int, generator: torch.Generator) -> dict[str, Tensor]:
    numbers = torch.randn(rows, width, generator=generator)
    names = ("loss", "square_norm", "self_influence", "confidence")
    whole = {name: torch.randint(10, (rows,), generator=generator) for name in ("label", "prediction", "digest")}
    return {"features": numbers} | {name: numbers[:, 0].square() for name in names} | whole


def _some_rows(folder: Folder, rows: int) -> None:
    asked = torch.randint(rows, (1000,), generator=torch.Generator().manual_seed(1))
    et.open_run(folder.path).features_of(asked.numpy())


def _checked(folder: Folder) -> None:
    found = et.check(folder.path)
    if not found.is_good:
        raise RuntimeError(f"The run that was written is not complete: {found}")


class _Lazy(Dataset):
    """A dataset of any length whose examples are generated on access."""

    def __init__(self, size: int, inputs: int = _INPUTS) -> None:
        self.size = size
        self.inputs = torch.randn(4096, inputs, generator=torch.Generator().manual_seed(2))

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        return self.inputs[row % 4096], row % _CLASSES


def _score(out: Path, rows: int) -> float:
    torch.manual_seed(3)
    task = et.classification(nn.Linear(_INPUTS, _CLASSES))
    data = et.Data(_Lazy(rows), batch_size=_BATCH)
    fitted = et.Arnoldi(steps=20, keep=_DIRECTIONS).fit(task, data.take(range(min(2048, rows))), num_train=rows)
    return _clocked(partial(et.score, fitted, data, out))


def _score_wide(out: Path, rows: int, width: int) -> float:
    """Score a linear model of 1,028 parameters with random directions: features are most of what is stored."""
    torch.manual_seed(3)
    task = et.classification(nn.Linear(256, _CLASSES))
    data = et.Data(_Lazy(rows, 256), batch_size=1000)
    fitted = et.RandProj(keep=width).fit(task, data.take(range(1000)), num_train=rows)
    return _clocked(partial(et.score, fitted, data, out))


def _score_cnn(out: Path, rows: int, *, with_classes: bool) -> float:
    """Score random digits with the demo's network; classes come from the same forward pass."""
    generator = torch.Generator().manual_seed(3)
    images = torch.rand(rows, 1, 28, 28, generator=generator)
    labels = torch.randint(0, 10, (rows,), generator=generator)
    data, model = et.Data(TensorDataset(images, labels), batch_size=100), make_cnn(seed=0)
    task = et.classification(model)
    if not with_classes:
        loss = partial(F.cross_entropy, reduction="none")
        task = et.Task(model, outputs=lambda m, b: m(b[0]), output_loss=lambda logits, b: loss(logits, b[1]))
    fitted = et.Arnoldi(steps=20, keep=_DIRECTIONS, sample=min(256, rows)).fit(task, data)
    return _clocked(partial(et.score, fitted, data, out))


def render(out: Path, small: bool) -> None:
    """Render the tables from the JSON file."""
    about = (
        f"Shards of {_SHARD:,} rows with checksums, forced to the disk one by one. *Growth* is the most memory that a "
        "step held beyond what the process held before it, *peak* all that the process held, torch included. Scoring "
        f"reads examples one by one, gives them digests, and takes {_DIRECTIONS} directions and a tail; the last rows, "
        "which show memory by rows and width, take random directions instead. *Load* is the machine's load average "
        "before the measurement: 0 if nothing else runs."
    )
    write_page(out, "store", "Runs on disk", about, _machine, small=small)


def _machine(problems: dict[str, Record]) -> list[str]:
    notes, lines = Notes(), []
    for record in problems.values():
        scored = {"score": record["settings"]["scored"]} | dict.fromkeys(("classes", "no classes"), _DIGITS)
        steps = {step: (title, str(record["title"])) for step, title in STEPS.items()}
        steps |= {step: (STEPS[step], f"{rows:,} × {_DIRECTIONS}") for step, rows in scored.items()}
        steps |= {
            _sized(rows, width): ("score a linear model, random directions", f"{rows:,} × {width:,}")
            for rows, width in _SIZES
        }
        for step, (title, size) in steps.items():
            cell = record["cells"].get(step)
            if cell is None:
                continue
            mebi = {key: cell[key] / 2**20 for key in ("peak", "peak_growth") if key in cell}
            numbers = (("seconds", ",.2f"), ("rows_per_second", ",.0f"), ("peak_growth", ",.0f"), ("peak", ",.0f"))
            written = [shown(cell | mebi, key, pattern, notes) for key, pattern in (*numbers, ("load", ".1f"))]
            lines.append([title, size, *written])
    headings = ["step", "rows × features", "seconds", "rows/s", "growth, MiB", "peak, MiB", "load"]
    return ["", *table(headings, lines), *(["", *notes.lines()] if notes.texts else [])]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.store", description="Runs on disk.")
    parser.add_argument("--rows", type=positive, help="number of examples to write and scan: 10M, or 100k with --small")
    parser.add_argument("--features", type=positive, default=32, help="numbers per example")
    parser.add_argument(
        "--scored", type=positive, help="number of examples to score end to end: 1M, or 5k with --small"
    )
    parser.add_argument("--small", action="store_true", help="a few rows, to see that all runs")
    parser.add_argument("--cache", type=Path, help="folder for the runs; default: a temporary folder")
    result_options(parser)
    parser.set_defaults(profile=False, device=_CPU, seconds=0.0)
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
