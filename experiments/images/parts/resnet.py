"""A residual network of eight layers, and its training in a few seconds on a GPU."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from experiments.images.parts.noise_problems import Problem, ResNet, train
from experiments.images.parts.noise_problems import Recipe as Training


@dataclass(frozen=True)
class Recipe:
    """Size and training: SGD with momentum, warm-up for a tenth of the steps, then a cosine to zero."""

    width: int = 32
    epochs: int = 20
    batch_size: int = 750
    """Batch size; it divides the number of images left of 15,000 for every dropped share."""
    lr: float = 0.3
    weight_decay: float = 5e-4
    augment: bool = True
    """Random flips, and shifts by up to four pixels."""


def train_resnet(images: Tensor, labels: Tensor, rows: Tensor, recipe: Recipe, seed: int) -> nn.Module:
    """Train on some rows, in bfloat16 and channels last on a GPU, with all randomness from the seed.

    The training loop is that of the experiment on memorised noise.
    """
    training = Training(
        recipe.epochs, recipe.batch_size, recipe.lr, recipe.weight_decay, augment=recipe.augment, cosine=True
    )
    unknown = torch.zeros_like(labels, dtype=torch.bool)
    problem = Problem("", images, labels, unknown, images[:0], labels[:0], lambda: ResNet(recipe.width), training)
    return train(problem, rows, seed)
