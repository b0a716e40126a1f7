"""dattri's attributors: Arnoldi, EK-FAC and TRAK."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from dattri.algorithm.influence_function import IFAttributorArnoldi, IFAttributorEKFAC
from dattri.algorithm.trak import TRAKAttributor
from dattri.task import AttributionTask
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.data import DataLoader, Dataset, Subset

from bench.peers.method import Fit
from bench.peers.networks import State
from bench.peers.problem import Problem

SHARES = (0.1, 0.001, 0.01, 1.0, 10.0)
"""Damping of EK-FAC, as shares of its mean eigenvalue."""
REGULARIZATIONS = (0.0, 0.01, 0.1, 1.0, 10.0)
"""Regularisations of Arnoldi, added to every eigenvalue."""
RIDGES = (0.0, 10.0, 100.0, 1000.0)
"""Ridge of TRAK, in harmonic means of its kernel's eigenvalues."""


@dataclass(frozen=True)
class _Inner:
    """An attributor whose scores are inner products.

    Gradients are computed by `torch.func`, which needs no graph; without `no_grad`, every batch would keep one.
    """

    attributor: Any
    problem: Problem
    dampings: dict[str, float | None]

    @property
    def settings(self) -> tuple[str, ...]:
        return tuple(self.dampings)

    @torch.no_grad()
    def self_scores(self, setting: str) -> Tensor:  # (N,)
        self._use(setting)
        # Correct for one batch only, so every batch is passed as a separate dataset.
        size, data = self.problem.spec.batch, self.problem.train_set
        parts = [Subset(data, range(at, min(at + size, len(data)))) for at in range(0, len(data), size)]
        return torch.cat([self.attributor.self_attribute(_loader(part, len(part))) for part in parts])

    @torch.no_grad()
    def cross_scores(self, setting: str) -> Tensor:  # (Q, N)
        self._use(setting)
        # Queries are computed again for every batch of training data, so these batches are large.
        queries = self.problem.query_set
        train = _loader(self.problem.train_set, self.problem.even_batch(1000))
        return self.attributor.attribute(train, _loader(queries, len(queries))).T

    def _use(self, setting: str) -> None:
        damping = self.dampings[setting]
        if damping is not None:
            self.attributor.damping = damping


@torch.no_grad()
def arnoldi(problem: Problem, folder: Path) -> Fit:
    """Arnoldi on the Hessian's top eigenpairs. dattri starts it when the first example is scored, here in the fit.

    Without `no_grad` the graph of every product is kept: ten times the memory, for the same scores.

    dattri takes square roots of eigenvalues, so that a negative one makes every score NaN. A regularisation larger than
    its magnitude avoids this; the smallest of a few that works is used.
    """
    model = problem.model()
    for regularization in REGULARIZATIONS:
        attributor = IFAttributorArnoldi(
            _task(model, problem.states[:1]),
            device=problem.device.type,
            proj_dim=problem.keep,
            max_iter=problem.spec.steps + 1,  # one vector is the start vector
            regularization=regularization,
        )
        attributor.cache(_loader(problem.curvature_set, problem.num_train))
        if attributor.self_attribute(_loader(Subset(problem.train_set, [0]), 1)).isfinite().all():
            break
    return _Inner(attributor, problem, {f"K={problem.keep}, regularization {regularization:g}": None})


def ekfac(problem: Problem, folder: Path) -> Fit:
    """EK-FAC of the linear layers, the only ones it supports. Biases become weights of a constant input.

    Inputs that are always zero make covariances singular, so that the eigensolver may fail in single precision.
    """
    try:
        return _ekfac(problem, torch.float32)
    except torch.linalg.LinAlgError:
        return _ekfac(problem, torch.float64)


def _ekfac(problem: Problem, dtype: torch.dtype) -> Fit:
    model = folded(problem.model()).to(dtype)
    attributor = IFAttributorEKFAC(_task(model, [dict(model.state_dict())]), device=problem.device.type)
    attributor.cache(_loader(problem.train_set, problem.spec.batch))
    eigenvalues = torch.cat([values.flatten() for values in attributor.cached_lambdas.values()])
    mean = float(eigenvalues.mean())
    return _Inner(attributor, problem, {f"damping {share:g}·mean": share * mean for share in SHARES})


@dataclass
class _Trak:
    """TRAK, whose cache depends on the ridge."""

    problem: Problem
    attributor: Any
    ridges: dict[str, float]
    cached: str = field(default="")

    @property
    def settings(self) -> tuple[str, ...]:
        return tuple(self.ridges)

    def self_scores(self, setting: str) -> Tensor:  # (N,)
        # dattri's self-attribution would project everything again; the diagonal is the same.
        return self._scores(setting, self.problem.train_set).diagonal()

    def cross_scores(self, setting: str) -> Tensor:  # (Q, N)
        return self._scores(setting, self.problem.query_set)

    def _scores(self, setting: str, queries: Dataset) -> Tensor:
        if setting != self.cached:
            self.attributor.regularization = self.ridges[setting]
            self.attributor.cache(_loader(self.problem.train_set, self.problem.spec.batch))
            self.cached = setting
        return self.attributor.attribute(_loader(queries, self.problem.spec.batch)).T


def trak(problem: Problem, folder: Path) -> Fit:
    """TRAK over all networks, with the margin as model output."""
    model = problem.model()

    def margin(params: State, pair: tuple[Tensor, Tensor]) -> Tensor:
        image, label = pair
        log_p = F.log_softmax(functional_call(model, params, (image[None],)), 1)[0]
        this = log_p.gather(0, label[None])[0]
        return this - torch.log1p(-this.exp().clamp(max=1 - 1e-6))

    def probability(params: State, pair: tuple[Tensor, Tensor]) -> Tensor:
        image, label = pair
        logits = functional_call(model, params, (image[None],))
        return torch.exp(-F.cross_entropy(logits, label[None]))

    attributor = TRAKAttributor(
        AttributionTask(loss_func=margin, model=model, checkpoints=problem.states),
        probability,
        projector_kwargs={"proj_dim": problem.spec.proj_dim, "device": problem.device.type},
        device=problem.device.type,
    )
    attributor.cache(_loader(problem.train_set, problem.spec.batch))
    # The cache is (ΦᵀΦ)⁻¹Φᵀ, whose squared Frobenius norm is the trace of the inverse kernel.
    scale = problem.spec.proj_dim / float(attributor.inv_XTX_XT_list[0].square().sum())
    ridges = {f"ridge {share:g}": share * scale for share in RIDGES}
    return _Trak(problem, attributor, ridges, cached=next(iter(ridges)))


def folded(model: nn.Module) -> nn.Module:
    """Replace each linear layer by one without bias, with a constant appended to its inputs."""
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear):
            owner, _, own = name.rpartition(".")
            setattr(model.get_submodule(owner), own, _Folded(module))
    return model


class _Folded(nn.Module):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach()
        bias = weight.new_zeros(len(weight)) if linear.bias is None else linear.bias.detach()
        self.linear = nn.Linear(weight.shape[1] + 1, len(weight), bias=False, device=weight.device)
        self.linear.weight.data = torch.cat((weight, bias[:, None]), 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(F.pad(x, (0, 1), value=1.0))


def _task(model: nn.Module, states: list[State]) -> AttributionTask:
    dtype = next(model.parameters()).dtype

    def loss(params: State, data_target_pair: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = data_target_pair
        return F.cross_entropy(functional_call(model, params, (images.to(dtype),)), labels)

    return AttributionTask(loss_func=loss, model=model, checkpoints=states)


def _loader(data: Dataset, size: int) -> DataLoader:
    return DataLoader(data, batch_size=size)
