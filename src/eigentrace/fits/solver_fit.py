"""Fits that solve a linear system with the curvature for every gradient, and store nothing."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eigentrace.data import Data
from eigentrace.fits.fitted import Capabilities, Fitted
from eigentrace.fits.solved_scores import solved_scores
from eigentrace.fits.weighted_directions import Norm
from eigentrace.numeric.accumulate import over
from eigentrace.projection import Job, gradients, in_chunks
from eigentrace.projection.engine import Compute
from eigentrace.task.task import Task


@dataclass(frozen=True, repr=False)
class SolvedFit(Fitted):
    """A fit that scores ⟨g(z), H⁻¹g(x)⟩ by applying H⁻¹ to one gradient after the other."""

    task: Task
    solve: Callable[[Tensor], Tensor]  # (q, P) -> (q, P)
    method: dict[str, Any]
    num_train: int
    has_curvature: bool = True

    @property
    def can(self) -> Capabilities:
        """Influence and unit gradients; there is nothing to save."""
        return Capabilities(influence=True, unit_gradients=True)

    def _self(self, data: Data, *, queries: bool, norm: Norm, compute: Compute) -> Tensor:
        scores = []
        with self.task.session():
            job = Job.of(self.task, "measurements" if queries else "losses", compute=compute)
            for g in in_chunks(gradients(job, data), job.budget // 4):
                score = (self.solve(g) * g).sum(dim=1)
                scores.append((over(score, g.square().sum(dim=1)) if norm else score).cpu())
        return torch.cat(scores)

    def _cross(self, train: Data, queries: Data, *, norm: Norm, compute: Compute) -> Tensor:
        return solved_scores(self.task, self.solve, train, queries, norm=norm, compute=compute)[0]
