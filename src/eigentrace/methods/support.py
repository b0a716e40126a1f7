"""Support of each label by the other examples: a score that finds memorised label noise from one checkpoint."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eigentrace.data import Batch
from eigentrace.fits.fitted import checked_compute
from eigentrace.methods.label_agreement import SupportFit, check_classifier, job_of, margins
from eigentrace.methods.method import ready
from eigentrace.numeric.accumulate import over
from eigentrace.projection import project
from eigentrace.settings import settings_of
from eigentrace.task.task import Task


@dataclass(frozen=True)
class Support:
    """Score how little the other examples support a label: −⟨φᵢ, Σ_{j≠i} φⱼ⟩/N, with unit margin gradients φ.

    A high score is suspicious: a step that raises the margins of the other examples lowers this one's. One final
    checkpoint is enough, even one at which every loss is zero. Exact, with two passes over the training data to fit
    and one to score.
    """

    def fit(self, task: Task, data: Any, *, num_train: int | None = None) -> SupportFit:
        """Sum the unit margin gradients of all examples; see `Method.fit` for the arguments.

        `num_train` only replaces N in the score; the sum is over `data`.
        """
        task, data, size = ready(task, data, num_train)
        compute = checked_compute(None)
        with task.session():
            check_classifier(task, data, "Support")
            total = torch.zeros(task.layout.numel, dtype=torch.float64, device=task.layout.device)
            for batch, found in project(job_of(task, margins, None, True, compute), data, "Margins"):
                total += _weighted(task, batch, over(torch.ones_like(found.squares()), found.squares().sqrt()))
        return SupportFit(task, total.to(task.layout.dtype), settings_of(self), size)


def _weighted(task: Task, batch: Batch, weights: Tensor) -> Tensor:  # (B,) -> (P,)
    """Return the weighted sum of the margins' gradients, by one ordinary backward pass."""
    with torch.enable_grad():
        leaves = {name: value.detach().requires_grad_() for name, value in task.params.items()}
        values = margins(task, leaves, task.place(batch.values))
        found = torch.autograd.grad(values @ weights.to(values), list(leaves.values()), materialize_grads=True)
    return task.layout.flatten(dict(zip(leaves, found, strict=True))).double()
