"""Small training sets with some wrong labels, and networks of which hundreds can be trained."""

from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor, nn

from eigentrace.demo.digits import load_digits, relabel
from eigentrace.evaluate import SGD
from experiments.images.parts.cifar import Images, load
from experiments.shared.frame import Session

NUM_CLASSES = 10
VEHICLES = (0, 1, 8, 9)
"""Airplane, automobile, ship and truck, which people confuse with each other."""
_STRIDES = (1, 1, 2, 1, 2, 1, 1, 1)


@dataclass(frozen=True)
class Size:
    """Sizes of one problem."""

    examples: int
    networks: int
    """Number of random subsets, with a network each."""
    sgd: SGD
    fraction: float = 0.7
    """Share of the examples in a subset, as in Feldman and Zhang."""
    trainings: int = 3
    """Networks trained on all examples, on which the scores are computed."""
    checkpoints: int = 10
    steps: int = 100
    keeps: tuple[int, ...] = (10, 50)
    """K of Arnoldi."""
    width: int = 0
    """Channels of the first convolutions."""
    is_cut: bool = False
    """Whether to take the four vehicles only, at half the resolution."""


@dataclass(frozen=True)
class Problem:
    """Training examples with given labels, and the network to train on them."""

    title: str
    inputs: Tensor
    labels: Tensor  # (N,), as given
    is_wrong: Tensor  # (N,) bool
    test_inputs: Tensor
    test_labels: Tensor  # true labels
    model: nn.Module = field(repr=False)


DIGITS = Size(1000, 400, SGD(epochs=30, batch_size=25, lr=0.05, momentum=0.9, weight_decay=1e-4))
CIFAR = Size(10_000, 1000, SGD(epochs=50, batch_size=100, lr=0.02, momentum=0.9, weight_decay=1e-4), width=32)
CIFAR_CUT = Size(
    600, 120, SGD(epochs=50, batch_size=25, lr=0.01, momentum=0.9, weight_decay=1e-4), width=8, is_cut=True
)
SMALL = Size(
    60,
    12,
    SGD(epochs=10, batch_size=15, lr=0.05, momentum=0.9, weight_decay=1e-4),
    trainings=2,
    checkpoints=2,
    steps=6,
    keeps=(2, 4),
    width=4,
    is_cut=True,
)
_FRACTION_WRONG = 0.1


def digits(session: Session, size: Size) -> Problem:
    """The embedded digits, a tenth of them relabeled, and a multilayer perceptron."""
    found = load_digits()
    noisy = relabel(found.train_labels[: size.examples], _FRACTION_WRONG, NUM_CLASSES, torch.Generator().manual_seed(0))
    widths = (784, 128, 64)
    layers = [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.ReLU())]
    device = session.device
    return Problem(
        title="Digits, a tenth relabeled",
        inputs=found.train_images[: size.examples].flatten(1).to(device),
        labels=noisy.labels.to(device),
        is_wrong=noisy.is_wrong,
        test_inputs=found.test_images.flatten(1).to(device),
        test_labels=found.test_labels.to(device),
        model=nn.Sequential(*layers, nn.Linear(widths[-1], NUM_CLASSES)),
    )


def cifar(session: Session, size: Size) -> Problem:
    """CIFAR-10 with human labels (the worst of three where one is wrong), and a network of eight convolutions."""
    images = load(session, 15_000, 5000)
    human, true = images.human_labels(), images.labels
    test_inputs, test_labels, inputs = images.test, images.test_labels, images.train
    classes, title = NUM_CLASSES, f"{images.title}, human labels"
    if size.is_cut:
        images, human = _vehicles(images.every(2), human)
        inputs, true, test_inputs, test_labels = images.train, images.labels, images.test, images.test_labels
        classes, title = len(VEHICLES), f"{images.title}, four vehicles at 16 × 16 pixels, human labels"
    count = size.examples
    return Problem(
        title=title,
        inputs=inputs[:count],
        labels=human[:count],
        is_wrong=(human != true)[:count].cpu(),
        test_inputs=test_inputs,
        test_labels=test_labels,
        model=convolutional(size.width, classes),
    )


def convolutional(width: int, num_classes: int) -> nn.Sequential:
    """Build a network of eight convolutions with group normalisation, which keeps no statistics between batches."""
    layers: list[nn.Module] = []
    channels = 3
    for place, stride in enumerate(_STRIDES):
        wide = width * (1, 1, 2, 2, 4, 4, 4, 4)[place]
        layers += [nn.Conv2d(channels, wide, 3, stride=stride, padding=1), nn.GroupNorm(wide // 4, wide), nn.ReLU()]
        channels = wide
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes))


def _vehicles(images: Images, human: Tensor) -> tuple[Images, Tensor]:
    """Return the images that show a vehicle and are labelled as one, with classes numbered from 0."""
    number = torch.full((NUM_CLASSES,), -1, device=human.device)
    number[list(VEHICLES)] = torch.arange(len(VEHICLES), device=human.device)
    true, given, test = number[images.labels], number[human], number[images.test_labels]
    there, tested = (true >= 0) & (given >= 0), test >= 0
    return Images(images.title, images.train[there], true[there], None, images.test[tested], test[tested]), given[there]
