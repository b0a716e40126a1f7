"""Several scores side by side on known bad examples, never without the two that cost next to nothing."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from eigentrace.errors import InputError
from eigentrace.evaluate.arrays import Values, as_array
from eigentrace.evaluate.retrieval import Detection, Retrieval, detection, retrieval
from eigentrace.methods.losses import Loss
from eigentrace.methods.similarity import TracIn
from eigentrace.projection.engine import Compute
from eigentrace.task.task import Task


@dataclass(frozen=True, eq=False)
class Comparison:
    """How well each of several scores finds the same noisy examples."""

    retrieval: dict[str, Retrieval]
    """By the name of the score, in the order given, baselines last."""
    detection: dict[str, Detection]
    """Likewise."""

    def __str__(self) -> str:
        width = max(len(name) for name in self.retrieval)
        rows = [f"{'':{width}}     AUC      AP   precision   area"]
        rows += [
            f"{name:{width}}  {r.auc:6.1%}  {r.ap:6.1%}  {r.precision:10.1%}  {self.detection[name].area:5.3f}"
            for name, r in self.retrieval.items()
        ]
        return "\n".join(rows)


def compare(
    scores: Mapping[str, Values],
    is_noisy: Values,
    *,
    task: Task | None = None,
    data: Any = None,
    compute: Compute | None = None,
) -> Comparison:
    """Measure several scores on the same noisy examples, beside the loss and the gradient norm.

    Args:
        scores: Numbers per example by name; higher should mean noisier.
        is_noisy: One truth value per example.
        task: With `data`, adds the baselines "loss" and "gradient norm", which a score has to beat to be worth
            its price.
        data: The examples that were scored, in order.
        compute: Engine, precision, memory and batch size of the baselines' pass.

    Raises:
        InputError: If there is nothing to compare, only one of `task` and `data` is given, a score does not fit, or a
            score has the name of a baseline.
    """
    if (task is None) != (data is None):
        raise InputError("The baselines need both the task and the data: give both, or neither.")
    every = dict(scores)
    if task is not None:
        own = baselines(task, data, compute=compute)
        taken = sorted(own.keys() & every.keys())
        if taken:
            raise InputError(f"{taken[0]!r} is the name of a baseline: give this score another name.")
        every |= own
    if not every:
        raise InputError("There are no scores to compare: give at least one, or a task and data for the baselines.")
    return Comparison(
        {name: retrieval(values, is_noisy) for name, values in every.items()},
        {name: detection(values, is_noisy) for name, values in every.items()},
    )


def baselines(task: Task, data: Any, *, compute: Compute | None = None) -> dict[str, np.ndarray]:  # each (N,)
    """Return the loss and the gradient norm of every example, what any other score is to be held against."""
    losses = Loss().fit(task, data).self_influence(data, compute=compute)
    squares = TracIn().fit(task, data).self_influence(data, compute=compute)  # ⟨g, g⟩
    return {"loss": as_array(losses), "gradient norm": np.sqrt(as_array(squares).clip(min=0.0))}
