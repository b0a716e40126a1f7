"""Comparing predicted with actual changes of outputs when examples are left out of training."""

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
from eigentrace.settings import check_counts, counted


@dataclass(frozen=True, eq=False)
class LeftOut:
    """Predicted and actual changes of each query's output when groups of examples are left out."""

    predicted: np.ndarray
    """(Q, G), influences summed over the group, divided by the number of training examples; in nats for a loss."""
    actual: np.ndarray
    """(Q, G), output without the group minus output with it, the mean over seeds."""
    error: np.ndarray
    """(Q, G), standard error of `actual` over seeds; NaN with a single seed."""

    def __repr__(self) -> str:
        queries, groups = self.actual.shape
        return f"<LeftOut: {counted(queries, 'query')} without each of {counted(groups, 'group')}>"

    @property
    def pearson(self) -> float:
        """Correlation over all queries and groups; NaN if one side is constant."""
        return float(pearson(self.predicted.reshape(1, -1), self.actual.reshape(1, -1))[0])

    @property
    def spearman(self) -> float:
        """Rank correlation over all queries and groups; NaN if one side is constant."""
        return float(spearman(self.predicted.reshape(1, -1), self.actual.reshape(1, -1))[0])

    @property
    def per_query(self) -> np.ndarray:  # (Q,)
        """Rank correlation over the groups, for each query; NaN if one side is constant."""
        return spearman(self.predicted, self.actual)

    @property
    def slope(self) -> float:
        """Least-squares slope of actual on predicted changes: 1 if the predicted sizes are right on average."""
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

    Every model trained without a group is compared with the model of the same seed trained on all data, which removes
    some of the noise of training.

    Args:
        trainer: `ManyModels`, `Loop`, or a function of rows and seed that returns one number per query.
        scores: (Q, N), the result of `fitted.influence(train, queries)` without a unit.
        groups: Rows to leave out together, one list per group; single rows for leave-one-out.
        seeds: Number of models to train on all data and without each group.
        seed: Seed of the models' seeds.
        cache: A directory that stores the outputs of trained models; see `retrain`.
    """
    trainer, values = as_trainer(trainer), checked(scores, "scores", 2)
    subsets = Subsets.without(values.shape[1], groups)
    predicted = predicted_changes(values, ~subsets.masks, trainer)
    changes = actual_changes(trainer, subsets.masks, len(values), seeds=seeds, seed=seed, cache=cache)  # (G, s, Q)
    return LeftOut(predicted, changes.mean(axis=1).T, standard_error(changes).T)


def predicted_changes(scores: np.ndarray, left_out: np.ndarray, trainer: Trainer) -> np.ndarray:  # (Q, N), (G, N)
    """Predict the change of each query's output, (Q, G): Σ I(x, z)/N for losses, with the opposite sign for margins."""
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
    """Raise InputError unless the trainer measures as many queries as were scored."""
    if measured != scored:
        raise InputError(
            f"The trainer measures {measured} queries, but scores are for {scored}: score the same queries, in the "
            "same order."
        )


def standard_error(changes: np.ndarray) -> np.ndarray:  # (G, s, Q) -> (G, Q)
    """Return the standard error of the mean over seeds; NaN with a single seed."""
    num_seeds = changes.shape[1]
    if num_seeds == 1:
        return np.full((changes.shape[0], changes.shape[2]), np.nan)
    return changes.std(axis=1, ddof=1) / np.sqrt(num_seeds)
