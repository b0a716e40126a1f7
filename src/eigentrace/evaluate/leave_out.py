"""Take examples away, train again, and hold what really changes against what influence predicts."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from eigentrace.errors import InputError
from eigentrace.evaluate.arrays import checked, summed
from eigentrace.evaluate.retrain import train_jobs
from eigentrace.evaluate.subsets import Subsets, model_seed
from eigentrace.evaluate.training import Trainer, as_trainer
from eigentrace.numeric.rank_correlation import pearson, spearman
from eigentrace.settings import check_counts


@dataclass(frozen=True, eq=False)
class LeftOut:
    """Changes of each query's output when groups of examples are left out."""

    predicted: np.ndarray
    """(Q, G), influences summed over the group and divided by the number of training examples: nats, for a loss."""
    actual: np.ndarray
    """(Q, G), output without the group minus output with it, the mean over seeds."""
    error: np.ndarray
    """(Q, G), standard error of `actual` over seeds; NaN with a single seed."""

    @property
    def pearson(self) -> float:
        """Correlation over all queries and groups; NaN where nothing varies."""
        return float(pearson(self.predicted.reshape(1, -1), self.actual.reshape(1, -1))[0])

    @property
    def spearman(self) -> float:
        """Rank correlation over all queries and groups; NaN where nothing varies."""
        return float(spearman(self.predicted.reshape(1, -1), self.actual.reshape(1, -1))[0])

    @property
    def per_query(self) -> np.ndarray:  # (Q,)
        """Rank correlation over the groups, for each query; NaN where nothing varies."""
        return spearman(self.predicted, self.actual)

    @property
    def slope(self) -> float:
        """Actual change per predicted one, by least squares: 1 if the size is right, not only the order."""
        square = float((self.predicted**2).sum())
        return float((self.predicted * self.actual).sum()) / square if square else np.nan


def leave_out(
    trainer: Any,
    scores: Any,
    groups: Iterable[Any],
    *,
    seeds: int = 5,
    seed: int = 0,
    cache: str | Path | None = None,
) -> LeftOut:
    """Compare predicted with actual changes when groups of training examples are left out.

    Every model without a group is compared with the one of the same seed on all of the data, so that chance in training
    cancels as far as it can.

    Args:
        trainer: `ManyModels`, `Loop`, or a function of rows and seed that returns one number per query.
        scores: (Q, N), as `fitted.influence(train, queries)` gives them, without a unit.
        groups: Rows to leave out together, one list per group; single rows for leave-one-out.
        seeds: How many models to train with and without each group.
        seed: Fixes their seeds.
        cache: A directory that remembers models; see `retrain`.
    """
    trainer, values = as_trainer(trainer), checked(scores, "scores", 2)
    subsets = Subsets.without(values.shape[1], groups)
    predicted = predicted_changes(values, ~subsets.masks, trainer)
    changes = actual_changes(trainer, subsets.masks, len(values), seeds=seeds, seed=seed, cache=cache)  # (G, s, Q)
    return LeftOut(predicted, changes.mean(axis=1).T, standard_error(changes).T)


def predicted_changes(scores: np.ndarray, left_out: np.ndarray, trainer: Trainer) -> np.ndarray:  # (Q, N), (G, N)
    """Predict how each query's output changes, (Q, G): by Σ I(x, z)/N, and the other way round for margins."""
    changes = summed(scores, left_out) / scores.shape[1]
    return changes if trainer.higher_is_worse else -changes


def actual_changes(
    trainer: Trainer, masks: np.ndarray, num_queries: int, *, seeds: int, seed: int, cache: str | Path | None
) -> np.ndarray:  # (G, N) -> (G, s, Q)
    """Train on all data and on each subset with the same seeds, and return the differences."""
    check_counts(1, seeds=seeds)
    check_counts(0, seed=seed)
    num_train = masks.shape[1]
    every = Subsets(np.vstack([np.ones((1, num_train), dtype=bool), masks]))
    numbers = [model_seed(seed, j) for j in range(seeds)]
    outputs = train_jobs(trainer, every.jobs([numbers] * len(every)), num_train, cache)
    values = outputs.view(len(every), seeds, -1).numpy()
    check_queries(values.shape[2], num_queries)
    return values[1:] - values[:1]


def check_queries(measured: int, scored: int) -> None:
    """Refuse scores of other queries than the trainer measures."""
    if measured != scored:
        raise InputError(
            f"The trainer measures {measured} queries and scores has {scored} rows: give one row for each query, in "
            "the same order."
        )


def standard_error(changes: np.ndarray) -> np.ndarray:  # (G, s, Q) -> (G, Q)
    """Return the standard error of a mean over seeds, NaN where there is only one."""
    num_seeds = changes.shape[1]
    if num_seeds == 1:
        return np.full((changes.shape[0], changes.shape[2]), np.nan)
    return changes.std(axis=1, ddof=1) / np.sqrt(num_seeds)
