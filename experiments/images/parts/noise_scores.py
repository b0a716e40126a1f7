"""The scores that are compared on memorised noise: those of eigentrace, and experimental variants."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import eigentrace as et
from eigentrace.methods.label_agreement import margins
from eigentrace.projection import Job, gradients
from experiments.images.parts.noise_problems import Problem, cross_validated, losses

# Ridges, as shares of the mean squared norm, from strong to weak.
RIDGES = (1e-1, 1e-2, 1e-3, 1e-4)
# Relative standard deviations of the noise added to weights.
WEIGHT_NOISE = (0.1, 0.2, 0.3, 0.5)
_DRAWS = 16


@dataclass(frozen=True)
class Trained:
    """A trained network with the checkpoints of its training."""

    problem: Problem
    model: nn.Module
    checkpoints: list[dict[str, Tensor]]
    history: et.LossHistory
    seed: int
    small: bool

    @property
    def data(self) -> et.Data:
        """The training examples."""
        return et.Data(torch.utils.data.TensorDataset(self.problem.inputs, self.problem.labels), batch_size=500)

    def score(self, method: Any) -> Tensor:
        """Fit a method to the final checkpoint and score every training example."""
        return method.fit(et.classification(self.model), self.data).self_influence(self.data)


Scores = Iterator[tuple[str, Callable[[], Tensor]]]


def from_checkpoints(trained: Trained) -> Scores:
    """Scores that need several checkpoints."""
    values = trained.history.values
    epochs = len(values)
    spread = sorted({round(epochs ** (k / 9)) for k in range(10)})  # 1, 2, 3, 5, 8, …: dense where learning is fast
    yield "mean loss over 10 checkpoints", lambda: trained.score(et.MeanLoss(trained.checkpoints))
    yield "mean loss over all epochs (tracker)", trained.history.mean
    yield "mean loss, epochs in geometric steps", lambda: values[[e - 1 for e in spread]].mean(dim=0)
    yield "mean loss, first half of the epochs", lambda: values[: epochs // 2].mean(dim=0)
    yield "mean 1 − probability over all epochs", lambda: (1 - (-values).exp()).mean(dim=0)
    yield "TracIn over 10 checkpoints", lambda: trained.score(et.TracIn(trained.checkpoints))


def from_folds(trained: Trained) -> Scores:
    """The score that needs other trainings: each example's loss under a network not trained on it."""
    yield "5-fold cross-validated loss", lambda: cross_validated(trained.problem, 5, trained.seed)


def from_one_checkpoint(trained: Trained) -> Scores:
    """Scores of the final checkpoint only."""
    steps, keep = (30, 10) if trained.small else (120, 50)
    rows = 16 if trained.small else 64
    arnoldi = et.Arnoldi(steps, keep, sample=2048)
    fitted = _Lazy(lambda: arnoldi.fit(et.classification(trained.model), trained.data))
    yield "final loss", lambda: trained.score(et.Loss())
    yield "gradient norm", lambda: trained.score(et.TracIn())
    yield "support of the others", lambda: trained.score(et.Support())
    yield (
        "loss under flips and shifts" if trained.problem.inputs.ndim == 4 else "loss under input noise",
        lambda: _under_changed_inputs(trained),
    )
    for size in WEIGHT_NOISE:
        yield f"loss under weight noise {size}", lambda size=size: _under_weight_noise(trained, size)  # type: ignore[misc]
    yield f"tangent ridge, {rows} rows", lambda: trained.score(et.TangentRidge(keep=rows))
    yield f"self-influence, tail, K={keep}", lambda: fitted().self_influence(trained.data)
    yield (
        f"self-influence, truncated, K={keep}",
        lambda: fitted().distill(tail=None, positive_only=True).self_influence(trained.data),
    )


def dense_variants(trained: Trained) -> Scores:
    """Variants based on the Gram matrix of unit margin gradients, and regressions on inputs and activations."""
    kernel = _Lazy(lambda: _margin_products(trained))
    yield "support, dense check", lambda: -(kernel().sum(dim=1) - 1)
    yield "support within the class", lambda: _support_within(kernel(), trained.problem.labels)
    for ridge in RIDGES:
        yield f"whitened support, ridge {ridge:g}", lambda ridge=ridge: _whitened(kernel(), ridge)  # type: ignore[misc]
        yield f"leave-one-out margin, ridge {ridge:g}", lambda ridge=ridge: _left_out(kernel(), ridge)  # type: ignore[misc]
    inputs = trained.problem.inputs.flatten(1)
    yield "ridge on inputs (no network)", lambda: _label_ridge(_cosines(inputs), trained.problem.labels)
    yield (
        "ridge on the last activations",
        lambda: _label_ridge(_cosines(_last_activations(trained)), trained.problem.labels),
    )


class _Lazy:
    """A value shared by several scores, computed on first use."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make, self.made = make, None

    def __call__(self) -> Any:
        if self.made is None:
            self.made = self.make()
        return self.made


def _margin_products(trained: Trained) -> Tensor:  # (N, N)
    task = et.classification(trained.model)
    with task.session():
        job = Job(task, lambda values, batch: margins(task, values, batch), Job.of(task, "losses").directions)
        # Preallocated: concatenating pieces at the end would need twice the memory.
        phi = torch.empty(len(trained.problem), task.layout.numel, device=task.layout.device)
        start = 0
        for part in gradients(job, trained.data):
            phi[start : start + len(part)] = F.normalize(part)
            start += len(part)
    return phi @ phi.T


def _cosines(features: Tensor) -> Tensor:
    unit = F.normalize(features)
    return unit @ unit.T


def _support_within(kernel: Tensor, labels: Tensor) -> Tensor:
    same = labels[:, None] == labels
    return -((kernel * same).sum(dim=1) - 1) / same.sum(dim=1)


def _whitened(kernel: Tensor, ridge: float) -> Tensor:
    """⟨φᵢ, (C + λ)⁻¹ Σφⱼ⟩/N with C = Σφφᵀ/N: regression of the number 1 on the margins' gradients."""
    solved = torch.linalg.solve(_ridged(kernel, ridge), torch.ones(len(kernel), 1, device=kernel.device).double())
    return -(kernel.double() @ solved)[:, 0]


def _left_out(kernel: Tensor, ridge: float) -> Tensor:
    """The same regression without the example itself: 1 minus its prediction."""
    inverse = torch.linalg.inv(_ridged(kernel, ridge))
    return inverse.sum(dim=1) / inverse.diagonal()


def _label_ridge(kernel: Tensor, labels: Tensor, ridge: float = 1e-3) -> Tensor:
    """Leave-one-out regression of one-hot labels: the best other class minus the given one."""
    own = F.one_hot(labels).bool()
    targets = own.double() - own.double().mean()
    inverse = torch.linalg.inv(_ridged(kernel, ridge))
    left_out = targets - inverse @ targets / inverse.diagonal()[:, None]
    return left_out.masked_fill(own, -torch.inf).max(dim=1).values - torch.where(own, left_out, 0.0).sum(dim=1)


def _ridged(kernel: Tensor, ridge: float) -> Tensor:
    eye = torch.eye(len(kernel), dtype=torch.float64, device=kernel.device)
    return kernel.double() + ridge * len(kernel) * eye


@torch.no_grad()
def _last_activations(trained: Trained) -> Tensor:
    held: list[Tensor] = []
    head = [module for module in trained.model.modules() if isinstance(module, nn.Linear)][-1]
    hook = head.register_forward_pre_hook(lambda module, args: held.append(args[0]))
    try:
        losses(trained.model, trained.problem.inputs, trained.problem.labels)
    finally:
        hook.remove()
    return torch.cat(held)


def _under_changed_inputs(trained: Trained) -> Tensor:
    """Average the final loss over random changes of the inputs, to which memorised examples are sensitive."""
    if trained.problem.inputs.ndim == 4:
        return trained.score(et.AugmentedLoss(draws=_DRAWS, seed=trained.seed))

    def noisy(batch: Any, rows: Any, seed: int) -> Any:
        generator = torch.Generator(batch[0].device).manual_seed(int(rows[0]) + 1_000_003 * seed)
        return batch[0] + 0.3 * torch.randn(batch[0].shape, generator=generator, device=batch[0].device), batch[1]

    return trained.score(et.AugmentedLoss(noisy, draws=_DRAWS, seed=trained.seed))


def _under_weight_noise(trained: Trained, size: float) -> Tensor:
    """Average 1 − probability over weights with Gaussian noise, relative to each tensor's root mean square."""
    problem, model = trained.problem, trained.model
    generator = torch.Generator(problem.device).manual_seed(trained.seed)

    def shaken(p: Tensor) -> Tensor:
        return p + size * p.square().mean().sqrt() * torch.randn(p.shape, generator=generator, device=p.device)

    total = torch.zeros(len(problem), device=problem.device)
    for _ in range(_DRAWS):
        state = {name: shaken(p.detach()) for name, p in model.named_parameters()}
        noisy = _Called(model, state)
        total += 1 - (-losses(noisy, problem.inputs, problem.labels)).exp()
    return total / _DRAWS


class _Called(nn.Module):
    """A model called with other values of its parameters."""

    def __init__(self, model: nn.Module, state: dict[str, Tensor]) -> None:
        super().__init__()
        self.model, self.state = model, state

    def forward(self, inputs: Tensor) -> Tensor:
        return functional_call(self.model, self.state, (inputs,))
