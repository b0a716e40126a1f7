"""The counterfactual check: without a query's strongest proponents, does its prediction really fall?"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from eigentrace.errors import InputError
from eigentrace.evaluate.arrays import checked
from eigentrace.evaluate.leave_out import actual_changes, predicted_changes, standard_error
from eigentrace.evaluate.training import as_trainer
from eigentrace.settings import check_counts


@dataclass(frozen=True, eq=False)
class Counterfactual:
    """What became of each query when its strongest proponents were left out, beside as many random examples."""

    dropped: np.ndarray
    """(Q, k), rows of the proponents, strongest first."""
    predicted: np.ndarray
    """(Q,), predicted change of the query's output: nats, for a loss."""
    actual: np.ndarray
    """(Q,), the change, as a mean over seeds."""
    error: np.ndarray
    """(Q,), its standard error over seeds; NaN with a single seed."""
    random_predicted: np.ndarray
    """(Q, draws), predicted change without k random examples."""
    random_actual: np.ndarray
    """(Q, draws), the change."""
    higher_is_worse: bool = True
    """Whether the outputs are losses."""

    @property
    def wins(self) -> float:
        """Share of queries that got worse without their proponents than without any of the random draws."""
        sign = 1 if self.higher_is_worse else -1
        return float((sign * self.actual > (sign * self.random_actual).max(axis=1)).mean())

    def __str__(self) -> str:
        rows = ["query  predicted     actual  (± error)   random"]
        rows += [
            f"{q:5d}  {p:+9.4f}  {a:+9.4f}  ({e:7.4f})  {r:+9.4f}"
            for q, (p, a, e, r) in enumerate(
                zip(self.predicted, self.actual, self.error, self.random_actual.mean(axis=1), strict=True)
            )
        ]
        return "\n".join(rows)


def counterfactual(
    trainer: Any,
    scores: Any,
    drop: int,
    *,
    seeds: int = 5,
    draws: int = 3,
    seed: int = 0,
    cache: str | Path | None = None,
) -> Counterfactual:
    """Leave out each query's strongest proponents, train again, and compare with the prediction.

    It takes seeds × (1 + queries + draws) trainings: ask about the few queries that matter.

    Args:
        trainer: `ManyModels`, `Loop`, or a function of rows and seed that returns one number per query.
        scores: (Q, N), as `fitted.influence(train, queries)` gives them, without a unit.
        drop: k, how many examples to leave out.
        seeds: How many models to train with and without them.
        draws: How many times k random examples are left out instead; the same ones for all queries.
        seed: Fixes draws and seeds.
        cache: A directory that remembers models; see `retrain`.
    """
    trainer, values = as_trainer(trainer), checked(scores, "scores", 2)
    check_counts(1, drop=drop, draws=draws)
    check_counts(0, seed=seed)
    num_queries, num_train = values.shape
    if drop >= num_train:
        raise InputError(f"drop={drop} of {num_train} training examples leaves nothing to train on: drop fewer.")
    dropped = np.argsort(-values, axis=1, kind="stable")[:, :drop]
    random = [np.random.default_rng([seed, i]).permutation(num_train)[:drop] for i in range(draws)]
    left_out = np.zeros((num_queries + draws, num_train), dtype=bool)
    np.put_along_axis(left_out, np.vstack([dropped, *(rows[None] for rows in random)]), True, axis=1)
    predicted = predicted_changes(values, left_out, trainer)  # (Q, Q + draws)
    changes = actual_changes(trainer, ~left_out, num_queries, seeds=seeds, seed=seed, cache=cache)
    actual, own = changes.mean(axis=1).T, np.arange(num_queries)  # (Q, Q + draws)
    return Counterfactual(
        dropped=dropped,
        predicted=predicted[own, own],
        actual=actual[own, own],
        error=standard_error(changes).T[own, own],
        random_predicted=predicted[:, num_queries:],
        random_actual=actual[:, num_queries:],
        higher_is_worse=trainer.higher_is_worse,
    )
