"""Handwritten digits included in the package, and a function that makes some of their labels wrong."""

from dataclasses import dataclass
from importlib import resources

import numpy as np
import torch
from torch import Tensor

from eigentrace.errors import InputError

NUM_CLASSES = 10


@dataclass(frozen=True)
class Digits:
    """A tenth of MNIST, with grey values in [0, 1] and the published labels."""

    train_images: Tensor  # (6000, 1, 28, 28)
    train_labels: Tensor  # (6000,)
    test_images: Tensor  # (1000, 1, 28, 28)
    test_labels: Tensor  # (1000,)


@dataclass(frozen=True)
class Relabeled:
    """Noisy labels, with a mask of the wrong ones."""

    labels: Tensor  # (N,)
    is_wrong: Tensor  # (N,) bool


def load_digits() -> Digits:
    """Load the digits from the package's data file."""
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
    """Change the labels of a fraction of the examples, each to a random other class.

    Args:
        labels: Classes from 0 to `num_classes` - 1; not modified.
        fraction: Share of the labels to change: exactly round(fraction · N) of them.
        num_classes: Number of classes.
        generator: Source of randomness.

    Raises:
        InputError: If the fraction, the number of classes or a label is out of range.
    """
    if not 0.0 <= fraction <= 1.0:
        raise InputError(f"fraction must be between 0 and 1, got {fraction}: use 0.2 to change 20% of the labels.")
    if num_classes < 2:
        raise InputError(
            f"num_classes must be at least 2, got {num_classes}: with one class, no label can be changed to another."
        )
    if labels.ndim != 1 or (len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < num_classes):
        raise InputError(
            f"labels must have shape (N,) and values from 0 to {num_classes - 1}, got shape {tuple(labels.shape)} with "
            f"values from {labels.min()} to {labels.max()}: number the classes from 0."
        )
    chosen = torch.randperm(len(labels), generator=generator)[: round(fraction * len(labels))]
    # Adding 1 to num_classes - 1, modulo num_classes, gives every other class with equal probability.
    shift = torch.randint(1, num_classes, (len(chosen),), generator=generator)
    changed = labels.clone()
    changed[chosen] = (labels[chosen] + shift) % num_classes
    return Relabeled(labels=changed, is_wrong=changed != labels)


def _as_images(pixels: np.ndarray) -> Tensor:  # (N, 28, 28) uint8 -> (N, 1, 28, 28) float32
    return torch.from_numpy(pixels).unsqueeze(1).float() / 255
