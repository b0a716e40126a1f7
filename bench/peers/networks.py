"""The networks of the problems, and their training."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

State = dict[str, Tensor]

_EVAL_BATCH = 1000


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Stochastic gradient descent with momentum."""

    epochs: int
    """Number of epochs."""
    batch: int
    """Batch size."""
    lr: float
    """Learning rate, or the initial one of a schedule."""
    momentum: float = 0.9
    """Momentum."""
    weight_decay: float = 0.0
    """λ of a penalty (λ/2)·‖θ‖²."""
    cosine: bool = False
    """Decay the learning rate to zero along a cosine."""
    augment: bool = False
    """Shift images by up to four pixels and mirror them."""


def small_cnn() -> nn.Module:
    """Two convolutions and two linear layers for 8 × 8 digits, 29,914 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 48),
        nn.ReLU(),
        nn.Linear(48, 10),
    )


def logistic() -> nn.Module:
    """Logistic regression on 28 × 28 images."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))


def mlp() -> nn.Module:
    """Multilayer perceptron 784-128-64-10."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))


class _Residual(nn.Module):
    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        same = width_in == width and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(width_in, width, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


def resnet() -> nn.Module:
    """A residual network of three blocks, 32-64-128, for 32 × 32 images; 0.3M parameters."""
    blocks = [_Residual(a, b, 1 if a == b else 2) for a, b in pairwise((32, 32, 64, 128))]
    stem = [nn.Conv2d(3, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))


def seeded(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Build a network whose initial weights depend only on the seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()


def train(
    model: nn.Module, images: Tensor, labels: Tensor, recipe: Recipe, seed: int, num_checkpoints: int = 1
) -> list[State]:
    """Train in place and leave the model in eval mode.

    Args:
        model: Returns logits (B, classes); on the device of the data.
        images: Inputs, (N, ...).
        labels: Classes, (N,).
        recipe: The hyperparameters.
        seed: Determines the order of the examples and their augmentation.
        num_checkpoints: Number of states to keep, evenly spread over the epochs and ending with the last.

    Returns:
        The states, on the CPU, in order.
    """
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=recipe.lr, momentum=recipe.momentum, weight_decay=recipe.weight_decay
    )
    steps = recipe.epochs * -(-len(labels) // recipe.batch)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps) if recipe.cosine else None
    kept = {max(1, round(recipe.epochs * (i + 1) / num_checkpoints)) for i in range(num_checkpoints)}
    states = []
    model.train()
    for epoch in range(1, recipe.epochs + 1):
        for rows in torch.randperm(len(labels), generator=generator).to(labels.device).split(recipe.batch):
            batch = shaken(images[rows], generator) if recipe.augment else images[rows]
            optimizer.zero_grad()
            F.cross_entropy(model(batch), labels[rows]).backward()
            optimizer.step()
            if schedule is not None:
                schedule.step()
        if epoch in kept:
            states.append({name: value.detach().cpu().clone() for name, value in model.state_dict().items()})
    model.zero_grad(set_to_none=True)
    model.eval()
    return states


def shaken(images: Tensor, generator: torch.Generator, most: int = 4) -> Tensor:  # (B, C, H, W) -> (B, C, H, W)
    """Shift each image by up to `most` pixels, padding with zeros, and mirror half of the images."""
    size, _, height, width = images.shape
    padded = F.pad(images, (most,) * 4)
    down, right, mirrored = (torch.randint(high, (size, 1), generator=generator) for high in (2 * most + 1,) * 2 + (2,))
    y = down + torch.arange(height)  # (B, H)
    x = right + torch.arange(width)  # (B, W)
    x = torch.where(mirrored.bool(), x.flip(1), x)
    index = torch.arange(size)[:, None, None]
    moved = padded.permute(0, 2, 3, 1)[
        index.to(images.device), y[:, :, None].to(images.device), x[:, None].to(images.device)
    ]
    return moved.permute(0, 3, 1, 2).contiguous()


@torch.no_grad()
def logits_of(model: nn.Module, images: Tensor) -> Tensor:  # (N, ...) -> (N, classes)
    """Evaluate a model on any number of examples."""
    return torch.cat([model(batch) for batch in images.split(_EVAL_BATCH)])


def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return the percentage of examples whose predicted class is the label."""
    return 100 * (logits_of(model, images).argmax(1) == labels).double().mean().item()
