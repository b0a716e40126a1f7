"""Handwritten digits that travel with the package, and a way to make some of their labels wrong."""

from dataclasses import dataclass
from importlib import resources

import numpy as np
import torch
from torch import Tensor

from eigentrace.errors import InputError

NUM_CLASSES = 10


@dataclass(frozen=True)
class Digits:
    """A tenth of MNIST. Images are grey values in [0, 1], labels the digits as published."""

    train_images: Tensor  # (6000, 1, 28, 28)
    train_labels: Tensor  # (6000,)
    test_images: Tensor  # (1000, 1, 28, 28)
    test_labels: Tensor  # (1000,)


@dataclass(frozen=True)
class Relabeled:
    """Labels of which some are wrong, and which these are."""

    labels: Tensor  # (N,)
    is_wrong: Tensor  # (N,) bool


def load_digits() -> Digits:
    """Read the embedded digits."""
    with (
        resources.files("eigentrace.demo").joinpath("digits.npz").open("rb") as file,
        np.load(file) as arrays,
    ):
        return Digits(
            train_images=_as_images(arrays["x_train"]),
            train_labels=torch.from_numpy(arrays["y_train"]).long(),
            test_images=_as_images(arrays["x_test"]),
            test_labels=torch.from_numpy(arrays["y_test"]).long(),
        )


def relabel(labels: Tensor, fraction: float, num_classes: int, generator: torch.Generator) -> Relabeled:
    """Give a fraction of the examples another label, chosen uniformly among the other classes.

    Args:
        labels: Classes from 0 to `num_classes` - 1; left as they are.
        fraction: How many labels change: exactly round(fraction · N).
        num_classes: How many classes there are.
        generator: Source of randomness.

    Raises:
        InputError: If the fraction, the number of classes or a label is out of range.
    """
    if not 0.0 <= fraction <= 1.0:
        raise InputError(f"fraction must be between 0 and 1, got {fraction}: write 0.2 to change 20% of the labels.")
    if num_classes < 2:
        raise InputError(f"num_classes must be at least 2, got {num_classes}: one class leaves no other to change to.")
    if labels.ndim != 1 or (len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < num_classes):
        raise InputError(
            f"labels must be one class from 0 to {num_classes - 1} for each example, got values from "
            f"{labels.min()} to {labels.max()} of shape {tuple(labels.shape)}: number the classes from 0."
        )
    chosen = torch.randperm(len(labels), generator=generator)[: round(fraction * len(labels))]
    # A shift of 1 to num_classes - 1, around the clock, reaches every other class equally often, not its own.
    shift = torch.randint(1, num_classes, (len(chosen),), generator=generator)
    changed = labels.clone()
    changed[chosen] = (labels[chosen] + shift) % num_classes
    return Relabeled(labels=changed, is_wrong=changed != labels)


def _as_images(pixels: np.ndarray) -> Tensor:  # (N, 28, 28) uint8 -> (N, 1, 28, 28) float32
    return torch.from_numpy(pixels).unsqueeze(1).float() / 255
