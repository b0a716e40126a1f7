"""The paper's larger network for digits, Flax's MNIST example of 824,458 parameters, and its training."""

import math
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from eigentrace.demo.cnn import make_cnn
from eigentrace.errors import NumericalError
from experiments.shared.kept import keep
from harness.files import made_once

State = dict[str, Tensor]
_HIDDEN, _LAST = 7, 9  # positions of its two linear layers


@dataclass(frozen=True)
class Recipe:
    """The hyperparameters of stochastic gradient descent with momentum, from the example."""

    epochs: int = 10
    l2: float = 0.0
    """λ of a penalty (λ/2)·‖θ‖² on all parameters."""
    batch_size: int = 128
    lr: float = 0.1
    momentum: float = 0.9
    num_checkpoints: int = 10
    """Number of checkpoints, evenly spread over the training, the last at its end."""

    @property
    def checkpoint_epochs(self) -> set[int]:
        """Epochs of the checkpoints, counted from 1."""
        count = min(self.num_checkpoints, self.epochs)
        return {round(self.epochs * k / count) for k in range(1, count + 1)}


SMALL = Recipe(epochs=8, batch_size=32, lr=0.05, num_checkpoints=2)
"""The hyperparameters for a few hundred digits."""


def stream(seed: int, what: str) -> torch.Generator:
    """Return a generator for one purpose.

    With one seed for all purposes, permutations would be equal: the relabelled examples would be those that training
    sees first and that curvature is sampled on.
    """
    return torch.Generator().manual_seed(zlib.crc32(f"{what} {seed}".encode()))


def train(images: Tensor, labels: Tensor, recipe: Recipe, seed: int) -> list[State]:
    """Train on the device of the images, and return the checkpoints, the last at the end of training."""
    model = make_cnn(seed).to(images.device)
    generator = stream(seed, "order")
    optimizer = torch.optim.SGD(
        model.parameters(), lr=recipe.lr, momentum=recipe.momentum, weight_decay=recipe.l2, foreach=True
    )
    checkpoints = []
    for epoch in range(1, recipe.epochs + 1):
        order = torch.randperm(len(labels), generator=generator).to(images.device)
        for rows in order.split(recipe.batch_size):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[rows]), labels[rows]).backward()
            optimizer.step()
        if epoch in recipe.checkpoint_epochs:
            checkpoints.append({name: value.detach().clone() for name, value in model.state_dict().items()})
    return checkpoints


def trained(images: Tensor, labels: Tensor, recipe: Recipe, seed: int, cache: Path, what: str) -> list[State]:
    """Return the checkpoints of a training, from the cache if they exist.

    Args:
        images: (N, 1, 28, 28).
        labels: (N,).
        recipe: The hyperparameters.
        seed: Determines the initial weights and the order of the examples.
        cache: Folder of trained networks.
        what: Name of the data in the cache; other images or labels need another name.

    Raises:
        NumericalError: If the final weights are not finite. Nothing is cached then.
    """
    settings = "-".join(f"{value:g}" for value in asdict(recipe).values())
    path = cache / f"mnist_large-{what}-{len(labels)}-{seed}-{settings}.pt"

    def make() -> None:
        made = [_on_cpu(state) for state in train(images, labels, recipe, seed)]
        if not all(value.isfinite().all() for value in made[-1].values()):
            raise NumericalError(f"Training with {recipe} diverged: lower the step size.")
        keep(path, made)

    made_once(path, make)
    states: list[State] = torch.load(path, weights_only=True)
    return states


def network(state: State, device: torch.device) -> nn.Sequential:
    """Build the network with the weights of a checkpoint."""
    model = make_cnn(seed=0)
    model.load_state_dict(state)
    return model.to(device).eval()


class Halves(nn.Module):
    """A linear layer split in two along its outputs, so that a part of its weights can be selected by name."""

    def __init__(self, whole: nn.Linear, top: int) -> None:
        super().__init__()
        rest = whole.out_features - top
        self.rest = _taken(whole, slice(0, rest))
        self.top = _taken(whole, slice(rest, None))

    def forward(self, inputs: Tensor) -> Tensor:
        """Compute the outputs of both parts."""
        return torch.cat([self.rest(inputs), self.top(inputs)], dim=1)


def with_small_top(model: nn.Sequential) -> nn.Sequential:
    """Return the same network with its hidden layer split in two, of which "top 10%" selects the second part.

    One matrix has 97% of the parameters, so no selection of whole tensors has about a tenth of them. This one has the
    last layer and the weights into the last 26 of the 256 hidden units.
    """
    layers = list(model)
    hidden, last = layers[_HIDDEN], layers[_LAST]
    assert isinstance(hidden, nn.Linear)
    wanted = sum(p.numel() for p in model.parameters()) / 10 - sum(p.numel() for p in last.parameters())
    layers[_HIDDEN] = Halves(hidden, math.ceil(wanted / (hidden.in_features + 1)))
    return nn.Sequential(*layers).eval()


def _taken(layer: nn.Linear, units: slice) -> nn.Linear:
    weight, bias = layer.weight.detach()[units], layer.bias.detach()[units]
    piece = nn.Linear(weight.shape[1], weight.shape[0], device=weight.device)
    with torch.no_grad():
        piece.weight.copy_(weight)
        piece.bias.copy_(bias)
    return piece


def _on_cpu(state: State) -> State:
    return {name: value.cpu() for name, value in state.items()}
