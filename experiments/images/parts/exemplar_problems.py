"""Images with a network trained on them, and their rendering: CIFAR-10, and photos of ImageNet."""

import io
from base64 import b64encode
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eigentrace.demo.digits import relabel
from eigentrace.errors import InputError
from eigentrace.rendering.png import encode_png
from experiments.images.parts import photos, resnet
from experiments.images.parts.cifar import digits, load
from experiments.images.parts.noise_problems import ResNet, accuracy
from experiments.images.parts.resnet20 import trained
from experiments.shared.frame import Session
from experiments.shared.kept import kept, name_of

PHOTOS = "imagenette224_jpeg.npz"
CIFAR_CLASSES = ("plane", "car", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
PHOTO_CLASSES = ("tench", "springer", "cassette", "chainsaw", "church", "horn", "truck", "pump", "golf", "chute")
DIGITS = tuple("0123456789")
"""Short class names, which fit below an image."""
_DECODED, _THUMBNAIL = 96, 64


@dataclass(frozen=True)
class Pictures:
    """Training images with the network trained on them."""

    title: str
    model: nn.Module
    inputs: Tensor  # (N, 3, h, w)
    labels: Tensor  # (N,), as given
    is_bad: Tensor  # (N,) bool: whether the label is known or likely to be wrong
    classes: tuple[str, ...]
    uri: Callable[[int], str]
    """Returns the image of a row as a data URI."""
    settings: dict[str, Any]
    facts: dict[str, Any]

    def __len__(self) -> int:
        return len(self.labels)


def cifar(session: Session, *, noisy: bool) -> Pictures:
    """CIFAR-10 with published labels, or with the "worst" human labels."""
    small = session.small
    images = load(session, 300 if small else 15_000, 200 if small else 5_000)
    labels = images.human_labels() if noisy else images.labels
    recipe = resnet.Recipe(width=8, epochs=20, batch_size=30, lr=0.1) if small else resnet.Recipe(width=48, epochs=30)
    train, test = (F.avg_pool2d(x, 2) if small else x.contiguous() for x in (images.train, images.test))

    def fit(model: nn.Module) -> None:
        rows = torch.arange(len(train))
        model.load_state_dict(resnet.train_resnet(train, labels, rows, recipe, seed=0).state_dict())

    path = session.settings.cache / f"{name_of('exemplars_resnet', recipe, train, labels)}.pt"
    model = kept(path, ResNet(recipe.width).to(session.device), fit)
    is_digits = images.title != "CIFAR-10"
    return Pictures(
        title=f"{images.title}, {'labels of people' if noisy else 'published labels'}",
        model=model,
        inputs=train,
        labels=labels,
        is_bad=labels != images.labels,
        classes=DIGITS if is_digits else CIFAR_CLASSES,
        uri=lambda row: as_uri(pixels(train, row)),
        settings={"examples": len(train), "recipe": repr(recipe)},
        facts={
            "parameters": sum(p.numel() for p in model.parameters()),
            "accuracy_given": accuracy(model, train, labels),
            "accuracy_test": accuracy(model, test, images.test_labels),
            "num_test": len(images.test_labels),
        },
    )


def resnet20(session: Session) -> Pictures:
    """CIFAR-10 with published labels and the published ResNet-20, which was trained on all of the training images."""
    small = session.small
    network = trained(session, 300 if small else 15_000, 200 if small else 5_000)
    images, model = network.images, network.model
    is_digits = images.title != "CIFAR-10"
    return Pictures(
        title=f"{images.title}, published ResNet-20" if not is_digits else "embedded digits for a ResNet-20",
        model=model,
        inputs=images.train,
        labels=images.labels,
        is_bad=torch.zeros_like(images.labels, dtype=torch.bool),
        classes=DIGITS if is_digits else CIFAR_CLASSES,
        uri=lambda row: as_uri(pixels(images.train, row)),
        settings={"examples": len(images.labels), "network": "resnet20"},
        facts={
            "parameters": sum(p.numel() for p in model.parameters()),
            "accuracy_given": accuracy(model, images.train, images.labels),
            "accuracy_test": network.accuracy,
            "num_test": len(images.test_labels),
        },
    )


def pixels(images: Tensor, row: int) -> np.ndarray:  # (N, 3, h, w) -> (h, w, 3) uint8
    """Undo the normalisation of an image, scaling each colour of the whole dataset to the full range."""
    low, high = images.amin(dim=(0, 2, 3)), images.amax(dim=(0, 2, 3))
    shares = (images[row] - low[:, None, None]) / (high - low)[:, None, None]
    return (255 * shares).round().clamp(0, 255).to(torch.uint8).permute(1, 2, 0).cpu().numpy()


def as_uri(image: np.ndarray) -> str:  # (h, w, 3) uint8
    """Return pixels as a PNG data URI."""
    return "data:image/png;base64," + b64encode(encode_png(image)).decode()


@dataclass(frozen=True)
class Photos:
    """Photos and their labels as read from the file."""

    images: Tensor  # (N, 3, h, w), centred
    labels: Tensor
    is_val: Tensor  # (N,) bool
    is_bad: Tensor  # (N,) bool: fewer than three of five people chose the given label
    classes: tuple[str, ...]
    uri: Callable[[int], str]


def photo_pictures(session: Session) -> Pictures:
    """Photos of ten classes of ImageNet, 25 of each for training; digits instead with --small without a folder."""
    small = session.small
    found = _digits() if small and session.settings.data is None else read_photos(session.data("The set of photos"))
    is_val = found.is_val
    recipe = photos.Recipe(width=8, epochs=40, batch_size=25, side=16, least_area=0.6) if small else photos.Recipe()
    whole, labels = (t.to(session.device) for t in (found.images[~is_val], found.labels[~is_val]))
    test, test_labels = (t.to(session.device) for t in (found.images[is_val], found.labels[is_val]))
    path = session.settings.cache / f"{name_of('exemplars_photos', recipe, whole, labels)}.pt"
    network = photos.make_network(recipe).to(session.device)
    model = kept(path, network, lambda model: photos.train_photos(network, whole, labels, recipe))
    rows = (~is_val).nonzero()[:, 0].tolist()
    inputs = photos.seen(whole, recipe.side)
    return Pictures(
        title="embedded digits for photos" if small and session.settings.data is None else "photos of ImageNet",
        model=model,
        inputs=inputs,
        labels=labels,
        is_bad=found.is_bad[~is_val].to(session.device),
        classes=found.classes,
        uri=lambda row: found.uri(rows[row]),
        settings={"examples": len(labels), "recipe": repr(recipe)},
        facts={
            "parameters": sum(p.numel() for p in model.parameters()),
            "accuracy_given": accuracy(model, inputs, labels),
            "accuracy_test": accuracy(model, photos.seen(test, recipe.side), test_labels),
            "num_test": len(test_labels),
        },
    )


def read_photos(folder: Path) -> Photos:
    """Decode the photos.

    Raises:
        InputError: If the file is missing, or Pillow is not installed.
    """
    path = folder / PHOTOS
    if not path.exists():
        raise InputError(f"{folder} does not hold {PHOTOS}, the photos: leave the part out, or give their folder.")
    image = _pillow()
    with np.load(path) as file:
        stored, offset, labels = file["jpeg"], file["offset"], torch.from_numpy(file["y"].astype(np.int64))
        is_val, votes = torch.from_numpy(file["is_val"]), torch.from_numpy(file["mturk_votes"].astype(np.int64))

    def opened(row: int, side: int) -> Any:
        found = image.open(io.BytesIO(stored[offset[row] : offset[row + 1]].tobytes()))
        return found.convert("RGB").resize((side, side), image.Resampling.BILINEAR)

    def uri(row: int) -> str:
        file = io.BytesIO()
        opened(row, _THUMBNAIL).save(file, format="JPEG", quality=80)
        return "data:image/jpeg;base64," + b64encode(file.getvalue()).decode()

    values = np.stack([np.asarray(opened(row, _DECODED)) for row in range(len(labels))])
    images = torch.from_numpy(values).permute(0, 3, 1, 2).float() / 127.5 - 1
    return Photos(images, labels, is_val, (votes[:, 0] >= 0) & (votes[:, 0] < 3), PHOTO_CLASSES, uri)


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError:
        raise InputError('Photos are read by Pillow: pip install -e ".[images]".') from None
    return Image


def _digits() -> Photos:
    """Take 25 training and 6 test digits of each class, 20 of the former relabeled."""
    found = digits()
    chosen = torch.cat([(found.labels == digit).nonzero()[:31, 0] for digit in range(10)])
    is_val = torch.arange(len(chosen)) % 31 >= 25
    labels, images = found.labels[chosen].clone(), 2 * found.train[chosen] - 1
    wrong = relabel(labels[~is_val], 20 / 250, 10, torch.Generator().manual_seed(0))
    labels[~is_val] = wrong.labels
    is_bad = torch.zeros(len(chosen), dtype=torch.bool)
    is_bad[~is_val] = wrong.is_wrong
    return Photos(images, labels, is_val, is_bad, DIGITS, lambda row: as_uri(pixels(images, row)))
