"""Methods of eigentrace and simple baselines, behind the interface of the peers."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

import eigentrace as et
from bench.peers.method import Fit
from bench.peers.problem import Problem


@dataclass(frozen=True)
class _Ours:
    problem: Problem
    fits: dict[str, Any]
    """One fit per setting."""
    data: et.Data

    @property
    def settings(self) -> tuple[str, ...]:
        return tuple(self.fits)

    def self_scores(self, setting: str) -> Tensor:  # (N,)
        return self.fits[setting].self_influence(self.data)

    def cross_scores(self, setting: str) -> Tensor:  # (Q, N)
        queries = et.Data(self.problem.query_set, batch_size=self.problem.spec.batch)
        return self.fits[setting].influence(self.data, queries)


def _fitted(problem: Problem, make: Callable[[et.Task, et.Data], dict[str, Any]]) -> Fit:
    data = et.Data(problem.train_set, batch_size=problem.spec.batch)
    return _Ours(problem, make(et.classification(problem.model()), data), data)


def _arnoldi(problem: Problem, *, tail: Any, curvature: Any) -> Fit:
    spec = problem.spec
    method = et.Arnoldi(
        steps=spec.steps, keep=max(spec.keeps), sample=spec.sample, tail=tail, curvature=curvature, compile=False
    )

    def cuts(task: et.Task, data: et.Data) -> dict[str, Any]:
        fitted = method.fit(task, data)
        found = len(fitted.spectrum.eigenvalues)  # fewer if no more curvature is left
        return {f"K={min(keep, found)}": fitted.distill(keep=min(keep, found)) for keep in spec.keeps}

    return _fitted(problem, cuts)


def arnoldi(problem: Problem, folder: Path) -> Fit:
    """Arnoldi with its tail, the default of eigentrace."""
    return _arnoldi(problem, tail="auto", curvature="auto")


def truncated(problem: Problem, folder: Path) -> Fit:
    """Arnoldi on the same curvature without a tail, as in the paper."""
    return _arnoldi(problem, tail=None, curvature="auto")


def hessian(problem: Problem, folder: Path) -> Fit:
    """The paper's estimator, which peers' Arnoldi methods compute as well."""
    return _arnoldi(problem, tail=None, curvature="hessian")


def tracin(problem: Problem, folder: Path) -> Fit:
    """Gradient similarity over the training's checkpoints."""
    method = et.TracIn(checkpoints=problem.checkpoints)
    return _fitted(problem, lambda task, data: {f"C={len(problem.checkpoints)}": method.fit(task, data)})


def gradient(problem: Problem, folder: Path) -> Fit:
    """Gradient similarity at the trained network alone."""
    return _fitted(problem, lambda task, data: {"": et.TracIn().fit(task, data)})


def loss(problem: Problem, folder: Path) -> Fit:
    """The loss of each example."""
    return _fitted(problem, lambda task, data: {"": et.Loss().fit(task, data)})


def mean_loss(problem: Problem, folder: Path) -> Fit:
    """The mean loss over the training's checkpoints."""
    method = et.MeanLoss(problem.checkpoints)
    return _fitted(problem, lambda task, data: {f"C={len(problem.checkpoints)}": method.fit(task, data)})
