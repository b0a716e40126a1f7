"""Measure training many small networks at once: fused (plain networks), vmapped (any network) and one by one.

python -m bench.retraining                  # 64 networks 784-128-64-10 on 2,500 digits; --device cuda for 512
python -m bench.retraining --small          # seconds, to see that all runs
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.page import write_page
from bench.peers.networks import Recipe, mlp, seeded, train
from eigentrace.demo.digits import load_digits
from eigentrace.evaluate.many import ManyModels
from eigentrace.evaluate.stacked import SGD
from eigentrace.evaluate.subsets import TrainingJob
from harness.command import carried_out, positive, result_options, say, start
from harness.measure import Cell, Run, attempt, release, with_seconds
from harness.record import Notes, Record, Recorder, shown, table

WAYS = {"fused": "batched products (`FusedStack`)", "mapped": "`vmap` (`MappedStack`)", "alone": "one after the other"}
_BATCH, _LR = 50, 0.05


def main(argv: Sequence[str]) -> int:
    """Run the command line; return the number of failures."""
    settings = _parser().parse_args(argv)
    return carried_out(
        "retraining", settings, lambda path: _measure(start("bench.retraining", settings, argv), path, settings), render
    )


def _measure(run: Run, path: Path, settings: argparse.Namespace) -> int:
    count = settings.networks or (4 if run.small else 512 if run.on_gpu else 64)
    rows, epochs = (200, 1) if run.small else (2500, settings.epochs)
    facts = {"title": f"{count} networks", "settings": {"rows": rows, "epochs": epochs, "batch": _BATCH}}
    recorder, failures = Recorder(run, path, str(count), facts), 0
    digits = load_digits()
    pairs = digits.train_images[:rows], digits.train_labels[:rows]
    queries = digits.test_images[:100], digits.test_labels[:100]
    ways: dict[str, Callable[[], Any]] = {
        way: partial(_together, way, pairs, queries, count, epochs, run.device) for way in ("fused", "mapped")
    }
    ways["alone"] = partial(_alone, pairs, min(count, 8), epochs, run.device)
    for name, way in ways.items():
        trained = min(count, 8) if name == "alone" else count
        cell = recorder.add(name, attempt(partial(_cell, way, trained, run)))
        failures += "failed" in cell
        say(f"{WAYS[name]:40} {cell.get('failed') or format(cell['per_second'], ',.1f') + ' networks a second'}")
    return failures


def _together(way: Any, pairs: Any, queries: Any, count: int, epochs: int, device: torch.device) -> None:
    trainer = ManyModels(
        mlp(), pairs, queries, SGD(lr=_LR, epochs=epochs, batch_size=_BATCH), engine=way, device=device
    )
    trainer.outputs([TrainingJob(np.arange(len(pairs[0])), seed) for seed in range(count)])


def _alone(pairs: Any, count: int, epochs: int, device: torch.device) -> None:
    images, labels = (part.to(device) for part in pairs)
    for seed in range(count):
        train(seeded(mlp, seed).to(device), images, labels, Recipe(epochs=epochs, batch=_BATCH, lr=_LR), seed=seed)


def _cell(way: Callable[[], Any], trained: int, run: Run) -> Cell:
    release(run.device)
    if run.on_gpu:
        way()  # warm-up, which loads kernels
    seconds = min(with_seconds(way, run.device)[1] for _ in range(2))
    return {"seconds": seconds, "networks": trained, "per_second": trained / seconds}


def render(out: Path, small: bool) -> None:
    """Render the tables from the JSON file."""
    about = (
        "Networks 784-128-64-10 trained by stochastic gradient descent in batches of 50 digits, each from its own "
        "seed, as `eigentrace.evaluate` trains them for ground truth; the better of two. One after the other is a "
        "plain loop in PyTorch over eight of them."
    )
    write_page(out, "retraining", "Small networks, many at once", about, _machine, small=small)


def _machine(problems: dict[str, Record]) -> list[str]:
    notes, lines = Notes(), []
    for record in problems.values():
        settings = record["settings"]
        for way, title in WAYS.items():
            cell = record["cells"].get(way)
            numbers = (("networks", ",d"), ("seconds", ",.2f"), ("per_second", ",.1f"))
            if cell is not None:
                about = f"{settings['rows']:,} × {settings['epochs']}"
                lines.append([title, about, *(shown(cell, key, pattern, notes) for key, pattern in numbers)])
    headings = ["way", "digits × epochs", "networks", "seconds", "networks/s"]
    return ["", *table(headings, lines), *(["", *notes.lines()] if notes.texts else [])]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.retraining", description="Small networks, many at once.")
    parser.add_argument("--networks", type=positive, help="how many: 64, 512 on a GPU, or 4 with --small")
    parser.add_argument("--epochs", type=positive, default=10, help="passes over the digits")
    parser.add_argument("--small", action="store_true", help="four networks, to see that all runs")
    parser.add_argument("--device", type=torch.device, help="cuda where there is one, else cpu")
    result_options(parser)
    parser.set_defaults(seconds=0.0, profile=False)
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
