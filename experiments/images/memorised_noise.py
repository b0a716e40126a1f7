"""Compare scores on finding wrong labels that a network has memorised, with one table per problem.

    python -m experiments.images.memorised_noise                                   # digits, a few minutes on a CPU
    python -m experiments.images.memorised_noise --problems augmented,memorised --data FOLDER   # CIFAR-10, on a GPU
    python -m experiments.images.memorised_noise --problems memorised-reduced --data FOLDER     # less of it, on a CPU
    python -m experiments.images.memorised_noise --small --data FOLDER      # all of it at toy size, to see that it runs

Results merge into docs/results/data/memorised_noise.json, score by score, and the page beside it is written from that.
"""

import argparse
import json
import platform
import sys
import time
import warnings
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from statistics import mean
from typing import Any

import torch

import eigentrace as et
from eigentrace.errors import EigentraceWarning
from eigentrace.evaluate import retrieval
from experiments.images.parts.noise_problems import (
    REDUCED,
    SMALL,
    Problem,
    Size,
    accuracy,
    cifar,
    copied,
    digits,
    train,
)
from experiments.images.parts.noise_scores import (
    Trained,
    dense_variants,
    from_checkpoints,
    from_folds,
    from_one_checkpoint,
)
from harness.command import place_options, positive
from harness.measure import described, reason
from harness.places import check_layout, data_file, data_link, save_page
from harness.record import read, save, stem, table

PROBLEMS = ("digits", "augmented", "memorised", "memorised-reduced")
GROUPS = {
    "checkpoints": ("From checkpoints", from_checkpoints),
    "one": ("From the final checkpoint alone", from_one_checkpoint),
    "dense": ("Variants tried on all pairs (dense; not part of the package)", dense_variants),
    "folds": ("From several trainings", from_folds),  # last, since it takes longest and a run may be interrupted
}


def main(argv: Sequence[str]) -> int:
    """Run the command line; return the number of scores that failed."""
    settings = _parser().parse_args(argv)
    device = torch.device(settings.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda":
        # Training runs in bfloat16; scoring losses of 1e-6 needs full float32 precision.
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cudnn.benchmark = True
    page = stem("memorised_noise", small=settings.small)
    path = data_file(settings.out, page)
    check_layout(settings.out, page, settings.merge or ())
    failures = 0
    for other in settings.merge or []:
        _merge(path, json.loads(other.read_text(encoding="utf-8")))
    for name in [] if settings.render or settings.merge else settings.problems:
        for seed in range(settings.seeds):
            failures += _measure(name, seed, device, path, settings)
    save_page(settings.out, page, _page(path))
    return failures


def _measure(name: str, seed: int, device: torch.device, path: Path, settings: argparse.Namespace) -> int:
    start = time.perf_counter()
    problem = _problem(name, seed, device, settings)
    trained, facts = _train(problem, seed, settings.small)
    took = time.perf_counter() - start
    _say(f"{problem.title}, seed {seed}: {facts} ({took:.0f} s)")
    run = {
        "date": datetime.now(UTC).isoformat(" ", "seconds"),
        "machine": described(device),
        "torch": torch.__version__,
        "eigentrace": et.__version__,
        "python": platform.python_version(),
        "seconds_of_training": round(took, 1),
    }
    failures = 0
    for group in settings.groups:
        for score, make in GROUPS[group][1](trained):
            cell = _cell(make, problem, device)
            failures += "failed" in cell
            _record(path, name, problem.title, seed, facts, run, {score: cell | {"group": group}})
            _say(f"  {score}: {cell}")
    return failures


def _problem(name: str, seed: int, device: torch.device, settings: argparse.Namespace) -> Problem:
    if name == "digits":
        return digits(seed, small=settings.small)
    if settings.data is None:
        raise SystemExit(f"The problem {name!r} needs --data, the folder that holds the CIFAR-10 files.")
    size = SMALL if settings.small else REDUCED if name == "memorised-reduced" else Size()
    return cifar(settings.data, device, settings.labels, size, augment=name.startswith("augmented"))


def _train(problem: Problem, seed: int, small: bool) -> tuple[Trained, dict[str, float]]:
    data = et.Data(torch.utils.data.TensorDataset(problem.inputs, problem.labels), batch_size=1000)
    tracker = et.LossTracker(et.classification, data)
    kept: list[dict[str, torch.Tensor]] = []
    every = max(1, problem.recipe.epochs // 10)

    def on_epoch(model: torch.nn.Module, epoch: int) -> None:
        tracker.record(model, epoch)
        if epoch % every == 0:
            kept.append(copied(model))

    model = train(problem, torch.arange(len(problem)), seed, on_epoch)
    wrong = problem.is_wrong.to(problem.device)
    facts = {
        "examples": len(problem),
        "parameters": sum(p.numel() for p in model.parameters()),
        "noise": float(wrong.float().mean()),
        "accuracy_given": accuracy(model, problem.inputs, problem.labels),
        "accuracy_given_wrong": accuracy(model, problem.inputs[wrong], problem.labels[wrong]),
        "accuracy_test": accuracy(model, problem.test_inputs, problem.test_labels),
    }
    return Trained(problem, model, kept, tracker.history, seed, small), {k: round(v, 4) for k, v in facts.items()}


def _cell(make: Any, problem: Problem, device: torch.device) -> dict[str, Any]:
    start = time.perf_counter()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", EigentraceWarning)
            found = retrieval(make().cpu(), problem.is_wrong)
    except Exception as error:  # a score that fails must not stop the others
        return {"failed": reason(error)}
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    took = time.perf_counter() - start
    return {"ap": round(100 * found.ap, 2), "auc": round(100 * found.auc, 2), "seconds": round(took, 2)}


def _record(path: Path, *where: Any) -> None:
    name, title, seed, facts, run, cells = where
    results = read(path)
    problem = results.setdefault(name, {"title": title, "seeds": {}})
    entry = problem["seeds"].setdefault(str(seed), {"scores": {}})
    entry |= {"facts": facts, "run": run}
    before = entry["scores"]
    # A failure does not replace the number of an earlier run.
    before |= {key: cell for key, cell in cells.items() if "failed" not in cell or "failed" in before.get(key, cell)}
    save(path, results)


def _merge(path: Path, other: dict[str, Any]) -> None:
    for name, problem in other.items():
        for seed, entry in problem["seeds"].items():
            _record(path, name, problem["title"], int(seed), entry["facts"], entry["run"], entry["scores"])


def _page(path: Path) -> Iterable[str]:
    results = read(path)
    command = "python -m experiments.images.memorised_noise"
    link = data_link(path.stem)
    yield f"<!-- Generated from {link} by `{command} --render`: edits here are lost. -->"
    yield ""
    yield "# Wrong labels that were memorised"
    yield ""
    yield (
        f"Generated from [{path.name}]({link}) by `{command} --render`. Average precision and AUC in percent of "
        "finding the wrong labels; with several seeds the mean, and the range of AP. Which score to use when is on "
        "[another page](../which_score.md)."
    )
    for problem in (results[name] for name in PROBLEMS if name in results):
        yield from _section(problem)


def _section(problem: dict[str, Any]) -> Iterable[str]:
    seeds = list(problem["seeds"].values())
    facts, run = seeds[0]["facts"], seeds[0]["run"]
    yield from ("", f"## {problem['title']}", "")
    yield (
        f"{facts['examples']:,} examples, {facts['noise']:.1%} wrong, {facts['parameters']:,} parameters, "
        f"{len(seeds)} seed{'s' if len(seeds) > 1 else ''}. Accuracy at the end: {facts['accuracy_given']:.1%} of the "
        f"given labels, {facts['accuracy_given_wrong']:.1%} of the wrong ones, {facts['accuracy_test']:.1%} on test "
        f"examples with true labels (seed 0). {run['machine']}, torch {run['torch']}, eigentrace {run['eigentrace']}, "
        f"Python {run['python']}, {run['date'][:16]} UTC."
    )
    names = list(dict.fromkeys(chain.from_iterable(seed["scores"] for seed in seeds)))
    for group, (heading, _) in GROUPS.items():
        rows = [_row(name, [s["scores"][name] for s in seeds if name in s["scores"]], group) for name in names]
        if any(rows):
            yield from ("", f"**{heading}**", "")
            yield from table(("score", "AP", "range", "AUC", "seconds"), [row for row in rows if row])


def _row(name: str, cells: list[dict[str, Any]], group: str) -> tuple[str, ...]:
    if cells[0]["group"] != group:
        return ()
    good = [cell for cell in cells if "failed" not in cell]
    if not good:
        return (name, "failed", "", "", "")
    ap = [cell["ap"] for cell in good]
    spread = f"{min(ap):.1f}–{max(ap):.1f}" if len(ap) > 1 else ""
    auc, seconds = (mean(cell[key] for cell in good) for key in ("auc", "seconds"))
    return name, f"{mean(ap):.1f}", spread, f"{auc:.1f}", f"{seconds:.1f}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Which score finds wrong labels that a network has memorised?")
    parser.add_argument("--problems", type=_words(PROBLEMS), default=["digits"], help=f"some of {','.join(PROBLEMS)}")
    parser.add_argument("--groups", type=_words(GROUPS), default=list(GROUPS), help=f"some of {','.join(GROUPS)}")
    parser.add_argument("--data", type=Path, help="folder with the CIFAR-10 shards and the human labels")
    parser.add_argument("--labels", default="random1", choices=("random1", "random2", "random3", "aggre", "worse"))
    parser.add_argument("--seeds", type=positive, default=1, help="how many trainings of each problem")
    parser.add_argument("--small", action="store_true", help="toy sizes, for a minute on a CPU")
    parser.add_argument("--device", help="cuda where there is one, else cpu; digits always run on the CPU")
    place_options(parser)
    return parser


def _words(allowed: Iterable[str]) -> Any:
    def words(text: str) -> list[str]:
        found = text.split(",")
        for word in found:
            if word not in allowed:
                raise argparse.ArgumentTypeError(f"{word!r} is none of {', '.join(allowed)}")
        return found

    return words


def _say(text: str) -> None:
    print(text, flush=True, file=sys.stdout)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
