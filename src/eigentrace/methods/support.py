"""Do the other examples back this one? A score for noise that one final checkpoint has memorised."""

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
    """How little the other examples back this one: −⟨φᵢ, Σ_{j≠i} φⱼ⟩/N, φ the gradient of the margin at unit length.

    High means suspicious: a step that raises everybody else's margin lowers this one's. One final checkpoint is
    enough, even one at which every loss is zero. Exact, by two passes over the training data and one to score.
    """

    def fit(self, task: Task, data: Any, *, num_train: int | None = None) -> SupportFit:
        """Sum up the unit gradients of all margins; see `Method.fit` for the arguments.

        `num_train` is taken for N in the score only: the sum is over `data`.
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
    """Sum the margins' gradients with one weight each, by an ordinary backward pass."""
    with torch.enable_grad():
        leaves = {name: value.detach().requires_grad_() for name, value in task.params.items()}
        values = margins(task, leaves, task.place(batch.values))
        found = torch.autograd.grad(values @ weights.to(values), list(leaves.values()), materialize_grads=True)
    return task.layout.flatten(dict(zip(leaves, found, strict=True))).double()
