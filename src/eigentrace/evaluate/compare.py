"""Comparing several scores on known noisy examples, together with two cheap baselines."""

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
from eigentrace.settings import counted, short
from eigentrace.task.task import Task


@dataclass(frozen=True, eq=False)
class Comparison:
    """How well several scores find the same noisy examples."""

    retrieval: dict[str, Retrieval]
    """AUC, AP and precision by the name of the score, in the order passed, baselines last."""
    detection: dict[str, Detection]
    """Detection curves by the name of the score, in the same order."""

    def __repr__(self) -> str:
        return f"<Comparison of {counted(len(self.retrieval), 'score')}: {short(', '.join(self.retrieval))}>"

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
    """Measure how well several scores find the same noisy examples, and compare them with baselines.

    Args:
        scores: One number per example, by the name of the score; higher should mean noisier.
        is_noisy: One truth value per example.
        task: If passed together with `data`, the baselines "loss" and "gradient norm" are added. A score that does not
            beat them is not worth its cost.
        data: The examples that were scored, in order.
        compute: Engine, precision, memory and batch size for computing the baselines.

    Raises:
        InputError: If there is nothing to compare, only one of `task` and `data` is passed, the shape of a score does
            not match, or a score has the name of a baseline.
    """
    if (task is None) != (data is None):
        given = "data" if task is None else "task"
        raise InputError(f"The baselines need both the task and the data, got only {given}: pass both, or neither.")
    every = dict(scores)
    if task is not None:
        own = baselines(task, data, compute=compute)
        taken = sorted(own.keys() & every.keys())
        if taken:
            raise InputError(f"{taken[0]!r} is the name of a baseline: rename this score.")
        every |= own
    if not every:
        raise InputError("There are no scores to compare: pass at least one, or a task and data for the baselines.")
    return Comparison(
        {name: retrieval(values, is_noisy) for name, values in every.items()},
        {name: detection(values, is_noisy) for name, values in every.items()},
    )


def baselines(task: Task, data: Any, *, compute: Compute | None = None) -> dict[str, np.ndarray]:  # each (N,)
    """Return the loss and the gradient norm of every example, as baselines for other scores."""
    losses = Loss().fit(task, data).self_influence(data, compute=compute)
    squares = TracIn().fit(task, data).self_influence(data, compute=compute)  # ⟨g, g⟩
    return {"loss": as_array(losses), "gradient norm": np.sqrt(as_array(squares).clip(min=0.0))}
