"""ResNet-20 for CIFAR-10 with published weights; a narrow one, trained on digits, in its place at toy size."""

import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eigentrace.errors import InputError
from experiments.images.parts.cifar import IMAGES, NUM_CLASSES, Images, load
from experiments.images.parts.noise_problems import Problem, Recipe, accuracy, train
from experiments.shared.frame import Session
from experiments.shared.kept import kept, name_of
from experiments.shared.needed import Wanted
from harness.cifar import MEAN, STD

WEIGHTS = "cifar10_resnet20_weights.npz"
FILES: list[Wanted] = [*IMAGES, (WEIGHTS,)]
"""What an experiment with this network reads."""
ORIGIN = (
    f"{WEIGHTS} holds the tensors of resnet20-12fca82f.th from github.com/akamaster/pytorch_resnet_cifar10, by name."
)
ACCURACY = 0.9173
"""Share of the 10,000 test images that the published weights predict."""
_FARTHEST = 4.0
"""Largest accepted distance from that accuracy, in standard errors of the share on the images at hand."""
# The network was trained on images with the mean and the standard deviation of ImageNet's colours.
_TRAINED_MEAN, _TRAINED_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_STAND_IN = Recipe(epochs=15, batch_size=30, lr=0.1, cosine=True)
_STAND_IN_WIDTH = 4


class Block(nn.Module):
    """Two convolutions; the shortcut takes every second pixel and pads the new channels with zeros."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.stride = 1 if before == after else 2
        self.padding = (after - before) // 2
        self.conv1 = nn.Conv2d(before, after, 3, self.stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102 - what it does is the class's description
        h = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        if self.stride == 2:
            x = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.padding, self.padding))
        return F.relu(h + x)


class ResNet20(nn.Module):
    """Three stages of three blocks: twenty weight layers, 269,722 parameters at width 16."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.layer1 = _stage(width, width)
        self.layer2 = _stage(width, 2 * width)
        self.layer3 = _stage(2 * width, 4 * width)
        self.linear = nn.Linear(4 * width, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102 - what it does is the class's description
        h = self.layer3(self.layer2(self.layer1(F.relu(self.bn1(self.conv1(x))))))
        return self.linear(h.mean(dim=(2, 3)))


def _stage(before: int, after: int) -> nn.Sequential:
    return nn.Sequential(Block(before, after), Block(after, after), Block(after, after))


@dataclass(frozen=True)
class Trained:
    """A trained network in eval mode, with images as it takes them."""

    model: nn.Module
    images: Images
    accuracy: float
    """Share of the test images that it predicts as published."""


def trained(session: Session, num_train: int, num_test: int) -> Trained:
    """Read the images and the network; digits and a narrow network trained on them with --small without a folder.

    Raises:
        InputError: If the weights are missing, or predict another share of the test images than they should.
    """
    images = load(session, num_train, num_test)
    if session.settings.data is None:
        images = replace(images, train=F.avg_pool2d(images.train, 2), test=F.avg_pool2d(images.test, 2))
        model = _stand_in(images, session.settings.cache)
        return Trained(model, images, accuracy(model, images.test, images.test_labels))
    images = as_trained(images)
    model = read_weights(session.settings.data).to(session.device)
    share = accuracy(model, images.test, images.test_labels)
    check_accuracy(share, len(images.test_labels))
    return Trained(model, images, share)


def read_weights(folder: Path) -> ResNet20:
    """Read the published weights.

    Raises:
        InputError: If the file is missing, or holds other tensors.
    """
    path = folder / WEIGHTS
    if not path.exists():
        raise InputError(f"{folder} does not hold {WEIGHTS}. {ORIGIN} Put it there.")
    with np.load(path) as file:
        arrays = {name: torch.from_numpy(file[name]) for name in file.files}
    model = ResNet20().eval()
    wanted = {name: t.shape for name, t in model.state_dict().items() if not name.endswith("num_batches_tracked")}
    wrong = [
        name for name in sorted(wanted.keys() | arrays) if wanted.get(name) != getattr(arrays.get(name), "shape", None)
    ]
    if wrong:
        raise InputError(
            f"{path} does not fit a ResNet-20 of width 16: {len(wrong)} tensors are missing, unexpected or of another "
            f"shape, the first is {wrong[0]!r}. {ORIGIN} Fetch it again."
        )
    model.load_state_dict(arrays, strict=False)
    return model


def check_accuracy(share: float, num_test: int) -> None:
    """Refuse a network that predicts another share of the test images than the published weights.

    Raises:
        InputError: If the share is off by more than four standard errors.
    """
    allowed = _FARTHEST * math.sqrt(ACCURACY * (1 - ACCURACY) / num_test)
    if abs(share - ACCURACY) > allowed:
        raise InputError(
            f"The network of {WEIGHTS} predicts {share:.1%} of {num_test:,} test images as labelled; expected was "
            f"{ACCURACY:.1%} ± {allowed:.1%}. Weights or images are not the published ones: fetch both again."
        )


def as_trained(images: Images) -> Images:
    """Replace the normalisation of images by the one that the network was trained with."""
    return replace(images, train=_renormalised(images.train), test=_renormalised(images.test))


def _renormalised(images: Tensor) -> Tensor:  # (N, 3, h, w) -> (N, 3, h, w)
    mean, std, trained_mean, trained_std = (
        torch.tensor(values, device=images.device).reshape(3, 1, 1)
        for values in (MEAN, STD, _TRAINED_MEAN, _TRAINED_STD)
    )
    return (images * std + mean - trained_mean) / trained_std


def _stand_in(images: Images, cache: Path) -> nn.Module:
    unknown = torch.zeros_like(images.labels, dtype=torch.bool)
    network = ResNet20(_STAND_IN_WIDTH).to(images.train.device)

    def fit(model: nn.Module) -> None:
        problem = Problem(
            *("digits", images.train, images.labels, unknown, images.test, images.test_labels),
            lambda: ResNet20(_STAND_IN_WIDTH),
            _STAND_IN,
        )
        model.load_state_dict(train(problem, torch.arange(len(images.labels)), seed=0).state_dict())

    return kept(cache / f"{name_of('resnet20', _STAND_IN, images.train, images.labels)}.pt", network, fit)
