"""pyDVL's ArnoldiInfluence and EkfacInfluence."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from pydvl.influence.torch import ArnoldiInfluence, EkfacInfluence
from torch import Tensor, nn
from torch.utils.data import DataLoader

from bench.peers.method import Fit
from bench.peers.problem import Problem

# pyDVL computes all pairs of a batch, of which only the diagonal is needed, so batches are small.
_SELF_BATCH = 64
SHARES = (0.1, 0.001, 0.01, 1.0, 10.0)
"""Damping, as shares of the mean eigenvalue (EK-FAC) or of the smallest kept one (Woodbury)."""


@dataclass(frozen=True)
class _Pydvl:
    influence: Any
    problem: Problem
    dampings: dict[str, float | None]

    @property
    def settings(self) -> tuple[str, ...]:
        return tuple(self.dampings)

    def self_scores(self, setting: str) -> Tensor:  # (N,)
        self._use(setting)
        return torch.cat([self.influence.influences(x, y).diagonal() for x, y in self._batches(_SELF_BATCH)])

    def cross_scores(self, setting: str) -> Tensor:  # (Q, N)
        self._use(setting)
        factors = self.influence.influence_factors(*self.problem.queries)
        parts = [
            self.influence.influences_from_factors(factors, x, y) for x, y in self._batches(self.problem.spec.batch)
        ]
        return torch.cat(parts, 1)

    def _use(self, setting: str) -> None:
        damping = self.dampings[setting]
        if damping is None:
            return
        if isinstance(self.influence, EkfacInfluence):
            self.influence.hessian_regularization = damping
        else:
            self.influence.with_regularization(damping)

    def _batches(self, size: int) -> DataLoader:
        return DataLoader(self.problem.train_set, batch_size=size)


def arnoldi(problem: Problem, folder: Path) -> Fit:
    """Arnoldi on the Hessian's top eigenpairs by ARPACK, with as many vectors as the other methods take steps."""
    model = problem.model()
    influence = _iterated(model, problem, use_woodbury=False, regularization=None)
    return _Pydvl(influence, problem, {f"K={problem.keep}": None})


def woodbury(problem: Problem, folder: Path) -> Fit:
    """The same eigenpairs, with the regularisation as the eigenvalue of all other directions."""
    model = problem.model()
    influence = _iterated(model, problem, use_woodbury=True, regularization=1.0)
    (block,) = influence.block_mapper.composable_block_dict.values()
    smallest = float(block.op.low_rank_representation.eigen_vals.abs().min())
    return _Pydvl(influence, problem, {f"K={problem.keep}, {share:g}·λ_K": share * smallest for share in SHARES})


def ekfac(problem: Problem, folder: Path) -> Fit:
    """EK-FAC of the linear layers, the only ones it supports, with a corrected diagonal; other layers are frozen."""
    model = problem.model()
    for module in model.modules():
        if not isinstance(module, nn.Linear):
            for parameter in module.parameters(recurse=False):
                parameter.requires_grad_(False)
    influence = EkfacInfluence(model, update_diagonal=True).fit(_loader(problem))
    diagonals = torch.cat([diagonal.flatten() for _, (_, _, _, diagonal) in influence.ekfac_representation])
    mean = float(diagonals.mean())
    return _Pydvl(influence, problem, {f"damping {share:g}·mean": share * mean for share in SHARES})


def _iterated(model: nn.Module, problem: Problem, **options: Any) -> ArnoldiInfluence:
    settings = {"rank": problem.keep, "krylov_dimension": problem.spec.steps, "tol": 1e-4}
    return ArnoldiInfluence(model, F.cross_entropy, **settings, **options).fit(_loader(problem))


def _loader(problem: Problem) -> DataLoader:
    """Return batches of equal size for the curvature, since pyDVL averages over batches, not examples."""
    data = problem.curvature_set
    return DataLoader(data, batch_size=problem.even_batch() if len(data) == problem.num_train else len(data))
