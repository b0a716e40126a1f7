"""CIFAR-10 for the experiments: from shards of NumPy files, the public archive, or replaced by digits at toy size."""

import argparse
import pickle
import tarfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from eigentrace.demo.digits import load_digits, relabel
from eigentrace.errors import InputError
from experiments.shared.download import fetch
from experiments.shared.frame import Session
from experiments.shared.needed import Needed, Wanted
from harness.cifar import normalised, read_cifar_shard

NUM_CLASSES = 10
ARCHIVE = "cifar-10-python.tar.gz"
_URL, _MD5 = f"https://www.cs.toronto.edu/~kriz/{ARCHIVE}", "c58f30108f718f92721af3b95e74349a"
_HUMAN = "cifar10n_labels_00000_14999.npz"
IMAGES: list[Wanted] = [("cifar10_train_*.npz", ARCHIVE), ("cifar10_test_00000.npz", ARCHIVE)]
"""The files of the images."""


@dataclass(frozen=True)
class Images:
    """Normalised images of ten classes, for training and testing."""

    title: str
    train: Tensor  # (N, 3, 32, 32)
    labels: Tensor  # (N,), the published ones
    human: Tensor | None  # (N,), as one of three people labelled them, the worst wherever there is a wrong one
    test: Tensor
    test_labels: Tensor

    def first(self, num_train: int, num_test: int) -> "Images":
        """Return the first images only."""
        human = None if self.human is None else self.human[:num_train]
        train, labels = self.train[:num_train], self.labels[:num_train]
        return replace(
            self,
            train=train,
            labels=labels,
            human=human,
            test=self.test[:num_test],
            test_labels=self.test_labels[:num_test],
        )

    def every(self, stride: int) -> "Images":
        """Return images with every n-th pixel in both dimensions."""
        return replace(self, train=self.train[..., ::stride, ::stride], test=self.test[..., ::stride, ::stride])

    def to(self, device: torch.device) -> "Images":
        """Move all tensors to a device."""
        human = None if self.human is None else self.human.to(device)
        tensors = {name: getattr(self, name).to(device) for name in ("train", "labels", "test", "test_labels")}
        return replace(self, human=human, **tensors)

    def human_labels(self) -> Tensor:
        """Return the human labels.

        Raises:
            InputError: If the data came without them.
        """
        if self.human is None:
            raise InputError(
                f"The labels of CIFAR-10N are not in the public archive of CIFAR-10: give --data with {_HUMAN} and the "
                "shards cifar10_train_*.npz that it belongs to."
            )
        return self.human


def needed(
    has_human: Callable[[argparse.Namespace, str], bool], others: Mapping[str, Sequence[Wanted]] | None = None
) -> Needed:
    """Return the files that an experiment reads: images, and human labels if requested.

    Args:
        has_human: Tells whether a part reads people's labels, with the settings of the command line.
        others: What parts that read other files read.
    """

    def files(settings: argparse.Namespace, part: str) -> Sequence[Wanted]:
        if others and part in others:
            return others[part]
        return [*IMAGES, (_HUMAN,)] if has_human(settings, part) else IMAGES

    return Needed(files, public=frozenset([ARCHIVE]))


def load(session: Session, num_train: int, num_test: int) -> Images:
    """Read the images of an experiment to its device; embedded digits with --small without a folder."""
    if session.small and session.settings.data is None:
        images = digits()
    else:
        images = read(session.data("CIFAR-10"), download=session.settings.download)
    return images.first(num_train, num_test).to(session.device)


def read(folder: Path, *, download: bool = False) -> Images:
    """Read shards if they exist, otherwise the public archive.

    Raises:
        InputError: If the folder has neither and nothing is to be downloaded.
    """
    shards = sorted(folder.glob("cifar10_train_*.npz"))
    if shards:
        return _from_shards(folder, shards)
    archive = folder / ARCHIVE
    if download:
        fetch(_URL, _MD5, archive)
    if not archive.exists():
        raise InputError(f"{folder} holds neither cifar10_train_*.npz nor {ARCHIVE}: add --download to fetch it.")
    return _from_archive(archive)


def digits() -> Images:
    """Embedded digits with a black border and three equal colours; "human" labels have a third changed."""
    found = load_digits()
    train, test = (F.pad(x, (2, 2, 2, 2)).expand(-1, 3, -1, -1) for x in (found.train_images, found.test_images))
    changed = relabel(found.train_labels, 1 / 3, NUM_CLASSES, torch.Generator().manual_seed(0)).labels
    return Images("embedded digits", train, found.train_labels, changed, test, found.test_labels)


def _from_shards(folder: Path, shards: list[Path]) -> Images:
    parts = [read_cifar_shard(shard) for shard in shards]
    train, labels = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    test, test_labels = read_cifar_shard(folder / "cifar10_test_00000.npz")
    human = None
    if (folder / _HUMAN).exists():
        with np.load(folder / _HUMAN) as file:
            human = torch.from_numpy(file["worse_label"].astype(np.int64))[: len(labels)]
    return Images("CIFAR-10", train, labels, human, test, test_labels)


def _from_archive(path: Path) -> Images:
    with tarfile.open(path) as archive:
        batches = [_batch(archive, f"data_batch_{number}") for number in range(1, 6)]
        test, test_labels = _batch(archive, "test_batch")
    train, labels = (torch.cat(tensors) for tensors in zip(*batches, strict=True))
    return Images("CIFAR-10", train, labels, None, test, test_labels)


def _batch(archive: tarfile.TarFile, name: str) -> tuple[Tensor, Tensor]:
    file = archive.extractfile(f"cifar-10-batches-py/{name}")
    if file is None:
        raise InputError(f"{ARCHIVE} has no file {name}: it is not the archive of CIFAR-10 for Python.")
    found = _Arrays(BytesIO(file.read()), encoding="bytes").load()
    return normalised(found[b"data"].reshape(-1, 3, 32, 32)), torch.tensor(found[b"labels"])


class _Arrays(pickle.Unpickler):
    """An unpickler restricted to arrays, so that no code is executed."""

    def find_class(self, module: str, name: str) -> Any:
        allowed = {"_reconstruct": np.empty(0).__reduce__()[0], "ndarray": np.ndarray, "dtype": np.dtype}
        if module.partition(".")[0] == "numpy" and name in allowed:
            return allowed[name]
        raise InputError(f"{ARCHIVE} holds a pickled {module}.{name}, where only arrays belong: fetch it again.")
