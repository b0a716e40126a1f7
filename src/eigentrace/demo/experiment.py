"""The network that the demo explains, trained on digits of which some have a wrong label."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from eigentrace.demo.cnn import accuracy, make_cnn, train
from eigentrace.demo.digits import NUM_CLASSES, Digits, load_digits, relabel

FRACTION_WRONG = 0.2


@dataclass(frozen=True)
class Accuracy:
    """Accuracy of the trained network, in percent."""

    train_noisy: float
    """On the training digits, with their given labels."""
    test_noisy: float
    """On the test digits, with a fifth of the labels changed."""
    test_true: float
    """On the test digits, with the true labels."""


@dataclass(frozen=True)
class Trained:
    """A trained network with its training data, and a mask of the wrong labels."""

    model: nn.Sequential
    checkpoints: list[dict[str, Tensor]]
    images: Tensor  # (N, 1, 28, 28)
    labels: Tensor  # (N,) as used in training
    true_labels: Tensor  # (N,)
    is_wrong: Tensor  # (N,) bool
    accuracy: Accuracy

    @property
    def num_parameters(self) -> int:
        """P, the number of parameters."""
        return sum(p.numel() for p in self.model.parameters())


def train_on_wrong_labels(seed: int, epochs: int, size: int, on_message: Callable[[str], None]) -> Trained:
    """Change a fifth of the training and of the test labels, then train the CNN.

    Args:
        seed: Seed of the changed labels, the initial weights and the order of the examples.
        epochs: Number of passes over the data.
        size: Number of training images to use.
        on_message: Called with progress messages.
    """
    digits = _first(load_digits(), size)
    generator = torch.Generator().manual_seed(seed)
    noisy = relabel(digits.train_labels, FRACTION_WRONG, NUM_CLASSES, generator)
    test_noisy = relabel(digits.test_labels, FRACTION_WRONG, NUM_CLASSES, generator)
    on_message(f"{len(noisy.labels):,} digits, {int(noisy.is_wrong.sum()):,} of them with a wrong label.")

    model = make_cnn(seed)
    checkpoints = train(
        model,
        digits.train_images,
        noisy.labels,
        epochs=epochs,
        generator=generator,
        checkpoint_epochs=_spread(epochs),
        on_epoch=lambda epoch, loss: on_message(f"Training: epoch {epoch} of {epochs}, loss {loss:.3f}"),
    )
    percent = Accuracy(
        train_noisy=accuracy(model, digits.train_images, noisy.labels),
        test_noisy=accuracy(model, digits.test_images, test_noisy.labels),
        test_true=accuracy(model, digits.test_images, digits.test_labels),
    )
    on_message(
        f"Test accuracy: {percent.test_true:.1f}% with the true labels, {percent.test_noisy:.1f}% with a fifth of them "
        "wrong."
    )
    return Trained(
        model=model,
        checkpoints=checkpoints,
        images=digits.train_images,
        labels=noisy.labels,
        true_labels=digits.train_labels,
        is_wrong=noisy.is_wrong,
        accuracy=percent,
    )


def _first(digits: Digits, size: int) -> Digits:
    return Digits(digits.train_images[:size], digits.train_labels[:size], digits.test_images, digits.test_labels)


def _spread(epochs: int) -> set[int]:
    """Return up to three evenly spaced epochs, including the last: 3, 7 and 10 of ten."""
    return {max(1, round(epochs * share / 3)) for share in (1, 2, 3)}
