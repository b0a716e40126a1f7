"""Ground truth by retraining on random halves of the data, and the linear datamodelling score of scores."""

from pathlib import Path
from typing import Any

from torch import Tensor

from bench.peers.problem import Problem
from harness.measure import Cell

NUM_SUBSETS, SMALL_SUBSETS = 100, 6
SEEDS, SMALL_SEEDS = 5, 1
_BOOTSTRAP = 200


def place(cache: Path, name: str) -> Path:
    """Return the folder of a problem's ground truth."""
    return cache / f"{name}-retrained"


def read_truth(path: Path | None, problem: Problem) -> Any:
    """Read the ground truth; None if there is none yet."""
    from eigentrace.evaluate import Retrained

    if path is None or not path.exists():
        return None
    truth = Retrained.load(path)
    expected = (problem.num_train, problem.examples.num_queries)
    found = (truth.masks.shape[1], truth.outputs.shape[2])
    if found != expected:
        raise ValueError(
            f"retrained for {found[0]} examples and {found[1]} queries, not {expected[0]} and {expected[1]}"
        )
    trained, asked = truth.recipe.get("sgd", {}), _sgd(problem)
    differing = [name for name, value in asked.items() if trained.get(name, value) != value]
    if differing:
        raise ValueError(f"the ground truth was trained with another {differing[0]}: remove it, or retrain elsewhere")
    return truth


def make_truth(problem: Problem, cache: Path, *, small: bool) -> None:
    """Train many networks at once on random halves of the data, and store their results on the queries."""
    from eigentrace.evaluate import SGD, ManyModels, Subsets, retrain

    if problem.spec.recipe.cosine or problem.spec.recipe.augment:
        raise ValueError("many networks at once are trained with one step size on images as they are")
    trainer = ManyModels(problem.spec.build(), problem.train, problem.queries, SGD(**_sgd(problem)))
    subsets = Subsets.random(problem.num_train, SMALL_SUBSETS if small else NUM_SUBSETS)
    name = problem.spec.name
    models = cache / f"{name}-models"  # one by one, so that a killed run can be resumed
    retrained = retrain(trainer, subsets, seeds=SMALL_SEEDS if small else SEEDS, cache=models)
    retrained.save(place(cache, name))


def _sgd(problem: Problem) -> dict[str, Any]:
    recipe = problem.spec.recipe
    shared = {name: getattr(recipe, name) for name in ("epochs", "lr", "momentum", "weight_decay")}
    return shared | {"batch_size": recipe.batch}


def fidelity(scores: Tensor, truth: Any) -> Cell:  # (Q, N) -> a cell
    """Measure the linear datamodelling score, in percent, with its interval."""
    from eigentrace.evaluate import lds

    found = lds(scores, truth, num_bootstrap=_BOOTSTRAP)
    low, high = found.interval
    return {"lds": 100 * found.mean, "lds_low": 100 * low, "lds_high": 100 * high}
