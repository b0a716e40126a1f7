"""Koh and Liang's small network for digits, 2,616 parameters, trained until its gradient vanishes."""

from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from eigentrace.demo.digits import NUM_CLASSES
from eigentrace.errors import NumericalError
from experiments.shared.kept import keep
from harness.files import made_once

State = dict[str, Tensor]
_STRIDES = (1, 2, 1, 2, 1)


@dataclass(frozen=True)
class Recipe:
    """Adam with the paper's batch size, then L-BFGS on all examples in float64, instead of 500,000 steps."""

    width: int = 8
    """Channels of the five convolutions."""
    l2: float = 5e-3
    """λ of a penalty (λ/2)·‖w‖² on weights, not on biases."""
    epochs: int = 250
    batch_size: int = 500
    lr: float = 1e-2
    """Learning rate of Adam, decaying linearly to a hundredth."""
    num_checkpoints: int = 25
    """Number of checkpoints, evenly spread over the epochs."""
    iterations: int = 1000
    """Largest number of L-BFGS iterations."""
    tolerance: float = 1e-7
    """L-BFGS stops when no component of the gradient is larger than this."""

    @property
    def penalised(self) -> dict[str, float]:
        """The penalty in the form that a task takes."""
        return {"*.weight": self.l2}


@dataclass(frozen=True)
class Training:
    """The result of a training."""

    checkpoints: list[State]
    """Weights along the epochs of Adam."""
    final: State
    """Weights after L-BFGS, in float64."""
    iterations: int
    """Number of L-BFGS iterations."""


def make_network(seed: int, width: int = 8) -> nn.Sequential:
    """Build the network with initial weights from `seed`; with 8 channels it has 2,616 parameters."""
    layers: list[nn.Module] = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for number, stride in enumerate(_STRIDES):
            layers += [nn.Conv2d(width if number else 1, width, 3, stride=stride), nn.Tanh()]
        layers += [nn.Conv2d(width, NUM_CLASSES, 1), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        return nn.Sequential(*layers, nn.Linear(NUM_CLASSES, NUM_CLASSES))


def objective(model: nn.Module, images: Tensor, labels: Tensor, l2: float) -> Tensor:  # ()
    """Return the training objective: mean loss plus penalty."""
    weights = [p for name, p in model.named_parameters() if name.endswith("weight")]
    return cross_entropy(model(images), labels) + l2 / 2 * sum(w.square().sum() for w in weights)


def gradient_norm(model: nn.Module, images: Tensor, labels: Tensor, l2: float) -> float:
    """Return the norm of the objective's gradient, which is zero at a minimum."""
    gradients = torch.autograd.grad(objective(model, images, labels, l2), list(model.parameters()))
    return torch.cat([g.flatten() for g in gradients]).norm().item()


def train(images: Tensor, labels: Tensor, recipe: Recipe, seed: int) -> Training:
    """Train on the device of the images; the seed determines initial weights and the order of the examples."""
    model = make_network(seed, recipe.width).to(images.device)
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=recipe.lr)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01, recipe.epochs)
    kept = {round(recipe.epochs * k / recipe.num_checkpoints) for k in range(1, recipe.num_checkpoints + 1)}
    checkpoints = []
    for epoch in range(1, recipe.epochs + 1):
        for rows in torch.randperm(len(labels), generator=generator).to(images.device).split(recipe.batch_size):
            optimizer.zero_grad()
            objective(model, images[rows], labels[rows], recipe.l2).backward()
            optimizer.step()
        schedule.step()
        if epoch in kept:
            checkpoints.append(_copied(model))
    iterations = _converge(model.double(), images.double(), labels, recipe)
    return Training(checkpoints, _copied(model), iterations)


def trained(images: Tensor, labels: Tensor, recipe: Recipe, seed: int, cache: Path) -> Training:
    """Return a training on noisy digits, from the cache if it exists.

    Raises:
        NumericalError: If the final weights are not finite. Nothing is cached then.
    """
    path = cache / f"{stem(recipe, len(labels), seed)}.pt"

    def make() -> None:
        made = train(images, labels, recipe, seed)
        if not all(value.isfinite().all() for value in made.final.values()):
            raise NumericalError(f"Training with {recipe} diverged: lower the step size.")
        keep(path, vars(made))

    made_once(path, make)
    return Training(**torch.load(path, weights_only=True))


def stem(recipe: Recipe, size: int, seed: int) -> str:
    """Return the first part of the file names of one training in the cache."""
    return f"mnist_small-{size}-{seed}-" + "-".join(f"{value:g}" for value in asdict(recipe).values())


def network(training: Training, recipe: Recipe, device: torch.device) -> nn.Sequential:
    """Build the trained network, in float64."""
    model = make_network(0, recipe.width).double()
    model.load_state_dict(training.final)
    return model.to(device).eval()


def _converge(model: nn.Module, images: Tensor, labels: Tensor, recipe: Recipe) -> int:
    optimizer = torch.optim.LBFGS(
        model.parameters(),
        max_iter=recipe.iterations,
        max_eval=2 * recipe.iterations,
        history_size=100,
        tolerance_grad=recipe.tolerance,
        tolerance_change=0.0,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = objective(model, images, labels, recipe.l2)
        value.backward()
        return value

    optimizer.step(closure)
    optimizer.zero_grad()
    return int(next(iter(optimizer.state.values()))["n_iter"])


def _copied(model: nn.Module) -> State:
    return {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}
