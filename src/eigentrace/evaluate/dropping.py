"""Retraining curves: outputs of the queries after dropping increasing shares of the training data by a score."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from eigentrace.errors import InputError
from eigentrace.evaluate.arrays import checked
from eigentrace.evaluate.curves import Curve, curves_svg
from eigentrace.evaluate.retrain import train_jobs
from eigentrace.evaluate.subsets import TrainingJob, model_seed
from eigentrace.evaluate.training import as_trainer
from eigentrace.settings import check_counts, counted, short

RANDOM = "random"


@dataclass(frozen=True, eq=False)
class RetrainingCurves:
    """Mean outputs of the queries after dropping shares of the training data, ranked by several scores."""

    shares: np.ndarray
    """(S,), shares of the data dropped, ascending from 0."""
    values: dict[str, np.ndarray]
    """(S, s) by the name of the score, "random" last: the mean output over the queries, per share and seed."""
    drop: Literal["top", "bottom"]
    """The end of each ranking that was dropped."""

    def __repr__(self) -> str:
        shares = counted(len(self.shares), "share")
        return f"<RetrainingCurves: the {self.drop} of {short(', '.join(self.values))} dropped, at {shares}>"

    def mean(self, name: str) -> np.ndarray:  # (S,)
        """Return a curve, averaged over seeds."""
        return self._of(name).mean(axis=1)

    def spread(self, name: str) -> np.ndarray:  # (S,)
        """Return the standard deviation over seeds; 0 with a single seed."""
        values = self._of(name)
        return values.std(axis=1, ddof=1) if values.shape[1] > 1 else np.zeros(len(values))

    def svg(self, output: str = "mean output of the queries") -> str:
        """Draw all curves with their spread, as a standalone SVG."""
        lines = [Curve(n, self.shares, self.mean(n), self.spread(n), is_control=n == RANDOM) for n in self.values]
        return curves_svg(f"Dropping the {self.drop} of each ranking", lines, "share of the data dropped", output)

    def _of(self, name: str) -> np.ndarray:
        if name not in self.values:
            raise InputError(f"There is no curve {name!r}. The curves are {', '.join(self.values)}.")
        return self.values[name]


def retraining_curves(
    trainer: Any,
    scores: Mapping[str, Any],
    *,
    shares: Sequence[float] = (0.05, 0.1, 0.2, 0.3),
    drop: Literal["top", "bottom"] = "top",
    seeds: int = 5,
    seed: int = 0,
    cache: str | Path | None = None,
) -> RetrainingCurves:
    """Drop the top or bottom of rankings, retrain, and measure the queries.

    Dropping in random order, a different one for every seed, is always included as the control. All curves start with
    the models trained on all data. Models at the same seed differ only in their training data.

    Args:
        trainer: `ManyModels`, `Loop`, or a function of rows and seed that returns one number per query.
        scores: (N,) numbers by name, such as self-influence, or influence averaged over the queries.
        shares: Shares of the data to drop, between 0 and 1.
        drop: "top" drops the highest scores first, "bottom" the lowest; ties are in the order of the data.
        seeds: Number of models to train for each score and share.
        seed: Seed of the models' seeds and of the random orders.
        cache: A directory that stores the outputs of trained models; see `retrain`.
    """
    trainer = as_trainer(trainer)
    check_counts(1, seeds=seeds)
    check_counts(0, seed=seed)
    orders, num_train = _orders(scores, drop)
    counts = _counts(shares, num_train)
    numbers = [model_seed(seed, j) for j in range(seeds)]
    randoms = [np.random.default_rng([seed, j]).permutation(num_train) for j in range(seeds)]
    jobs = [
        TrainingJob(np.sort(order[count:]), number)
        for own in ([order] * seeds for order in orders.values())
        for count in counts
        for order, number in zip(own, numbers, strict=True)
    ]
    jobs += [TrainingJob(np.sort(o[count:]), n) for count in counts for o, n in zip(randoms, numbers, strict=True)]
    outputs = train_jobs(trainer, jobs, num_train, cache).mean(dim=1).view(-1, len(counts), seeds).numpy()
    values = dict(zip([*orders, RANDOM], outputs, strict=True))
    return RetrainingCurves(np.array(counts) / num_train, values, drop)


def _orders(scores: Mapping[str, Any], drop: str) -> tuple[dict[str, np.ndarray], int]:
    if drop not in ("top", "bottom"):
        raise InputError(f"drop must be 'top' or 'bottom', got {drop!r}.")
    if RANDOM in scores:
        raise InputError(f"{RANDOM!r} is the name of the control: rename this score.")
    arrays = {name: checked(values, f"scores[{name!r}]", 1) for name, values in scores.items()}
    sizes = {len(values) for values in arrays.values()}
    if len(sizes) != 1:
        raise InputError(
            f"Scores must be for the same examples, got scores for {sorted(sizes)} examples: pass at least one score, "
            "all with the same length."
        )
    sign = -1 if drop == "top" else 1
    return {name: np.argsort(sign * values, kind="stable") for name, values in arrays.items()}, sizes.pop()


def _counts(shares: Sequence[float], num_train: int) -> list[int]:
    if not len(shares) or not all(0 <= share < 1 for share in shares):
        raise InputError(f"shares must be at least 0 and below 1, got {list(shares)!r}.")
    counts = sorted({0, *(round(share * num_train) for share in shares)})
    if len(counts) < 2 or counts[-1] >= num_train:
        raise InputError(
            f"shares={list(shares)!r} of {num_train} examples drop at most {counts[-1]} examples: choose shares that "
            "drop at least one and keep at least one."
        )
    return counts
