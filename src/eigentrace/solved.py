"""Fits that score without rows: an inverse-curvature solve per gradient, or no gradient at all."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eigentrace.checkpoints import Checkpoint
from eigentrace.compute import Compute
from eigentrace.data import Data
from eigentrace.distill import Spectrum
from eigentrace.errors import UnsupportedError
from eigentrace.fitted import Fitted, over
from eigentrace.probe import check_losses, name_loader, note_batch
from eigentrace.progress import track
from eigentrace.project import Job, gradients, in_chunks, project
from eigentrace.rows import DenseRows
from eigentrace.task import Task


class RowlessFit(Fitted):
    """A fit that keeps no rows, and so has nothing to project on, cut or save."""

    method: dict[str, Any]

    @property
    def positive_metric(self) -> bool:
        """Nothing is promised about the sign of a self-influence."""
        return False

    @property
    def spectrum(self) -> Spectrum:
        """Refuse: nothing was diagonalised."""
        raise UnsupportedError(f"{self.method['name']} has no spectrum: it keeps no eigenpairs of the curvature.")

    def distill(self, keep: int | None = None, tail: Any = "same", positive_only: bool | None = None) -> Fitted:
        """Refuse: there are no eigenpairs."""
        raise UnsupportedError(f"{self.method['name']} has no eigenpairs to cut: distill is for Arnoldi.")

    def features(self, data: Any, *, queries: bool = False, compute: Compute | None = None) -> Tensor:
        """Refuse: there are no rows to project on."""
        raise UnsupportedError(f"{self.method['name']} keeps no rows and has no features: use Arnoldi or RandProj.")

    def save(self, path: str | Path) -> None:
        """Refuse: there is nothing cached to write."""
        raise UnsupportedError(
            f"{self.method['name']} caches nothing, so there is nothing to save: keep its settings and fit again."
        )


@dataclass(frozen=True)
class SolvedFit(RowlessFit):
    """Scores ⟨g(z), H⁻¹g(x)⟩ with H⁻¹ applied to one gradient after the other."""

    task: Task
    solve: Callable[[Tensor], Tensor]  # (q, P) -> (q, P)
    method: dict[str, Any]
    num_train: int
    has_curvature: bool = True

    def _self(self, data: Data, *, queries: bool, unit_gradients: bool, compute: Compute) -> Tensor:
        scores = []
        with self.task.session():
            job = Job.of(self.task, "measurements" if queries else "losses", compute=compute)
            for g in in_chunks(gradients(job, data), job.budget // 4):
                score = (self.solve(g) * g).sum(dim=1)
                scores.append((over(score, g.square().sum(dim=1)) if unit_gradients else score).cpu())
        return torch.cat(scores)

    def _cross(self, train: Data, queries: Data, *, unit_gradients: bool, compute: Compute) -> Tensor:
        total = torch.zeros(len(queries), len(train), dtype=self.task.layout.dtype, device="cpu")
        start = 0
        with self.task.session():
            asked = Job.of(self.task, "measurements", compute=compute)
            for g in in_chunks(gradients(asked, queries), asked.budget // 4):
                solved = self.solve(over(g, g.norm(dim=1, keepdim=True)) if unit_gradients else g)
                job = Job.of(self.task, "losses", DenseRows(solved, self.task.layout), unit_gradients, compute)
                for batch, found in project(job, train):
                    scores = found.features
                    if unit_gradients:
                        scores = over(scores, found.squares().sqrt()[:, None])
                    total[start : start + len(g), batch.rows] = scores.T.cpu()
                start += len(g)
        return total


@dataclass(frozen=True)
class LossFit(RowlessFit):
    """The loss of each example as its score, averaged over the states of the model it is taken at."""

    task: Task
    method: dict[str, Any]
    num_train: int
    states: tuple[Checkpoint | None, ...] = (None,)
    """Where Θ is taken; the model's own parameters if None."""
    has_curvature: bool = False

    def _self(self, data: Data, *, queries: bool, unit_gradients: bool, compute: Compute) -> Tensor:
        if unit_gradients:
            raise UnsupportedError(
                f"{self.method['name']} uses no gradients, so normalize='gradient' has no meaning: use None."
            )
        total = torch.zeros(len(data), dtype=torch.float64, device="cpu")
        for state in self.states:
            with self.task.session():
                total += losses_of(self.task if state is None else self.task.at(state.load()), data)
        return (total / len(self.states)).to(self.task.layout.dtype)

    def _cross(self, train: Data, queries: Data, *, unit_gradients: bool, compute: Compute) -> Tensor:
        raise UnsupportedError(
            f"{self.method['name']} scores single examples, not pairs: use Arnoldi or TracIn for influence."
        )


def losses_of(task: Task, data: Data, change: Callable[[Any, np.ndarray], Any] | None = None) -> Tensor:  # (N,) float64
    """Evaluate the loss of every example, changed by a function of batch and rows if given, in the caller's session."""
    losses = torch.empty(len(data), dtype=torch.float64, device="cpu")
    for batch in track(data.batches(), "Losses", len(data), len):
        placed = task.place(batch.values)
        placed = placed if change is None else change(placed, batch.rows)
        try:
            found = task.losses(task.params, placed)
        except Exception as error:
            note_batch(error, task, placed)
            name_loader(error, data, batch.values)
            raise
        check_losses(found, batch.rows, task=task, batch=placed)
        losses[batch.rows] = found.to(losses)
    return losses
