"""The counterfactual check: does a query's output get worse when its strongest proponents are left out of training?"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from eigentrace.errors import InputError
from eigentrace.evaluate.arrays import checked
from eigentrace.evaluate.leave_out import actual_changes, predicted_changes, standard_error
from eigentrace.evaluate.training import as_trainer
from eigentrace.settings import check_counts, counted


@dataclass(frozen=True, eq=False)
class Counterfactual:
    """Changes of each query's output when its strongest proponents, or as many random examples, are left out."""

    dropped: np.ndarray
    """(Q, k), rows of the proponents, strongest first."""
    predicted: np.ndarray
    """(Q,), predicted change of the query's output, in nats for a loss."""
    actual: np.ndarray
    """(Q,), actual change, the mean over seeds."""
    error: np.ndarray
    """(Q,), standard error of `actual` over seeds; NaN with a single seed."""
    random_predicted: np.ndarray
    """(Q, draws), predicted change without k random examples."""
    random_actual: np.ndarray
    """(Q, draws), actual change without these k random examples, the mean over seeds."""
    higher_is_worse: bool = True
    """Whether the outputs are losses, or scores such as margins that rise as the model gets better."""

    def __repr__(self) -> str:
        queries, k = self.dropped.shape
        draws = self.random_actual.shape[1]
        return f"<Counterfactual: {counted(queries, 'query')} without {k} proponents, {counted(draws, 'random draw')}>"

    @property
    def wins(self) -> float:
        """Share of queries that get worse without their proponents than without any of the random draws."""
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
    """Leave out each query's strongest proponents, retrain, and compare the change with the predicted one.

    This trains seeds × (1 + queries + draws) models, so pass only a few queries.

    Args:
        trainer: `ManyModels`, `Loop`, or a function of rows and seed that returns one number per query.
        scores: (Q, N), the result of `fitted.influence(train, queries)` without a unit.
        drop: k, the number of examples to leave out.
        seeds: Number of models to train on all data and on each subset.
        draws: Number of times that k random examples are left out instead; the same ones for all queries.
        seed: Seed of the draws and of the models' seeds.
        cache: A directory that stores the outputs of trained models; see `retrain`.
    """
    trainer, values = as_trainer(trainer), checked(scores, "scores", 2)
    check_counts(1, drop=drop, draws=draws)
    check_counts(0, seed=seed)
    num_queries, num_train = values.shape
    if drop >= num_train:
        raise InputError(f"drop={drop} of {num_train} training examples leaves none to train on: lower drop.")
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
