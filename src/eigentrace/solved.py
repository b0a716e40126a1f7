"""Fits that score without rows: an inverse-curvature solve per gradient, or no gradient at all."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eigentrace.data import Data
from eigentrace.errors import UnsupportedError
from eigentrace.fitted import Fitted, over_square
from eigentrace.progress import track
from eigentrace.project import Job, gradients, in_chunks, project
from eigentrace.project.engine import memory_budget
from eigentrace.rows import DenseRows
from eigentrace.task import Task


@dataclass(frozen=True)
class SolvedFit(Fitted):
    """Scores ⟨g(z), H⁻¹g(x)⟩ with H⁻¹ applied to one gradient after the other."""

    task: Task
    solve: Callable[[Tensor], Tensor]  # (q, P) -> (q, P)
    method: dict[str, Any]
    num_train: int
    has_curvature: bool = True

    @property
    def positive_metric(self) -> bool:
        """An iterative solve promises nothing about its sign."""
        return False

    def features(self, data: Any, *, queries: bool = False) -> Tensor:
        """Refuse: there are no rows to project on."""
        raise UnsupportedError(f"{self.method['name']} solves per gradient and has no features. Use Arnoldi for them.")

    def save(self, path: str | Path) -> None:
        """Refuse: there is nothing cached to write."""
        raise UnsupportedError(
            f"{self.method['name']} caches nothing, so there is nothing to save: keep its settings and fit again."
        )

    def _self(self, data: Data, *, queries: bool, unit_gradients: bool) -> Tensor:
        scores = []
        with self.task.session():
            function = self.task.measurements if queries else self.task.losses
            found = gradients(self.task, function, data)
            for g in in_chunks(found, memory_budget(self.task.layout.device) // 4):
                score = (self.solve(g) * g).sum(dim=1)
                scores.append((over_square(score, g.square().sum(dim=1)) if unit_gradients else score).cpu())
        return torch.cat(scores)

    def _cross(self, train: Data, queries: Data, *, unit_gradients: bool) -> Tensor:
        total = torch.zeros(len(queries), len(train), dtype=self.task.layout.dtype)
        start = 0
        with self.task.session():
            asked = gradients(self.task, self.task.measurements, queries)
            for g in in_chunks(asked, memory_budget(self.task.layout.device) // 4):
                solved = self.solve(over_square(g, g.norm(dim=1, keepdim=True)) if unit_gradients else g)
                job = Job(self.task, self.task.losses, DenseRows(solved, self.task.layout), unit_gradients)
                for batch, found in project(job, train):
                    scores = found.features
                    if unit_gradients:
                        scores = over_square(scores, found.squares().sqrt()[:, None])
                    total[start : start + len(g), batch.rows] = scores.T.cpu()
                start += len(g)
        return total


@dataclass(frozen=True)
class LossFit(Fitted):
    """The loss of each example as its score."""

    task: Task
    method: dict[str, Any]
    num_train: int
    has_curvature: bool = False

    @property
    def positive_metric(self) -> bool:
        """There is no metric."""
        return False

    def features(self, data: Any, *, queries: bool = False) -> Tensor:
        """Refuse: a loss is one number."""
        raise UnsupportedError("Loss has no features: it is one number per example. Use Arnoldi or RandProj for them.")

    def save(self, path: str | Path) -> None:
        """Refuse: there is nothing cached to write."""
        raise UnsupportedError("Loss caches nothing, so there is nothing to save.")

    def _self(self, data: Data, *, queries: bool, unit_gradients: bool) -> Tensor:
        if unit_gradients:
            raise UnsupportedError("Loss uses no gradients, so normalize='gradient' has no meaning: use None.")
        scores = torch.empty(len(data), dtype=self.task.layout.dtype)
        with self.task.session():
            for batch in track(data.batches(), "Loss", len(data), len):
                scores[batch.rows] = self.task.losses(self.task.params, self.task.place(batch.values)).to(scores)
        return scores

    def _cross(self, train: Data, queries: Data, *, unit_gradients: bool) -> Tensor:
        raise UnsupportedError("Loss scores single examples, not pairs: use Arnoldi or TracIn for influence.")
