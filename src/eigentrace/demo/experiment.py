"""The network the demo explains: trained on digits some of which carry a wrong label."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from eigentrace.demo.cnn import accuracy, make_cnn, train
from eigentrace.demo.digits import NUM_CLASSES, Digits, load_digits, relabel

FRACTION_WRONG = 0.2


@dataclass(frozen=True)
class Accuracy:
    """Percent of labels the trained network agrees with."""

    train_noisy: float
    test_noisy: float
    test_true: float


@dataclass(frozen=True)
class Trained:
    """A trained network, the data it saw and what is wrong with it."""

    model: nn.Sequential
    checkpoints: list[dict[str, Tensor]]
    images: Tensor  # (N, 1, 28, 28)
    labels: Tensor  # (N,) as given to the network
    true_labels: Tensor  # (N,)
    is_wrong: Tensor  # (N,) bool
    accuracy: Accuracy

    @property
    def num_parameters(self) -> int:
        """P."""
        return sum(p.numel() for p in self.model.parameters())


def train_on_wrong_labels(seed: int, epochs: int, size: int, on_message: Callable[[str], None]) -> Trained:
    """Change a fifth of the training and of the test labels, then train the CNN.

    Args:
        seed: Decides on the changed labels, the first weights and the order of the examples.
        epochs: Passes over the data.
        size: How many of the training images to use.
        on_message: Told what is going on.
    """
    digits = _first(load_digits(), size)
    generator = torch.Generator().manual_seed(seed)
    noisy = relabel(digits.train_labels, FRACTION_WRONG, NUM_CLASSES, generator)
    test_noisy = relabel(digits.test_labels, FRACTION_WRONG, NUM_CLASSES, generator)
    on_message(f"{len(noisy.labels):,} digits, {int(noisy.is_wrong.sum()):,} of them given a wrong label.")

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
        f"Accuracy on test digits: {percent.test_true:.1f}% of true labels, {percent.test_noisy:.1f}% with a "
        "fifth of them wrong."
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
    """Return up to three epochs, evenly spread and ending with the last: 3, 7 and 10 of ten."""
    return {max(1, round(epochs * share / 3)) for share in (1, 2, 3)}
