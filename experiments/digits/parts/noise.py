"""Digits with a fifth of wrong labels, and the larger network trained on them, shared by three experiments.

The digits are those embedded in the package, a tenth of MNIST. With all of MNIST in a folder, as `mnist.npz` or the
published files, each seed draws another tenth.
"""

import argparse
import gzip
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import eigentrace as et
from eigentrace.demo.cnn import accuracy
from eigentrace.demo.digits import NUM_CLASSES, Digits, load_digits, relabel
from experiments.digits.parts.large_network import Recipe, State, network, stream, trained
from experiments.shared.download import fetch
from experiments.shared.frame import Session
from experiments.shared.needed import Needed

FRACTION_WRONG = 0.2
_PART = 10  # a tenth of all digits
_URL = "https://ossci-datasets.s3.amazonaws.com/mnist/"
_FILES = {
    "x_train": ("train-images-idx3-ubyte.gz", "f68b3c2dcbeaaa9fbdd348bbdeb94873"),
    "y_train": ("train-labels-idx1-ubyte.gz", "d53e105ee54ea40749a09fcbcd1e9432"),
    "x_test": ("t10k-images-idx3-ubyte.gz", "9fb629c4189551a2d022fa330f9573f3"),
    "y_test": ("t10k-labels-idx1-ubyte.gz", "ec29112dd5afa0611ce80d1b7f02629c"),
}
# On a CPU, large enough for the samples of curvature to be one batch. A GPU takes all digits at once: to launch the few
# hundred kernels of a product takes about as long as 6,000 digits do.
BATCH = 512


@dataclass(frozen=True)
class NoisyDigits:
    """Training and test digits with given and true labels."""

    images: Tensor  # (N, 1, 28, 28)
    labels: Tensor  # (N,) as given
    true_labels: Tensor  # (N,)
    test_images: Tensor  # (T, 1, 28, 28)
    test_labels: Tensor  # (T,) as given
    test_true_labels: Tensor  # (T,)

    @property
    def is_wrong(self) -> Tensor:  # (N,) bool
        """Which training labels were changed."""
        return self.labels != self.true_labels

    @property
    def data(self) -> et.Data:
        """The training examples as a dataset."""
        return dataset(self.images, self.labels)


@dataclass(frozen=True)
class Subject:
    """A trained network, its data and the seed of both."""

    digits: NoisyDigits
    model: nn.Sequential
    checkpoints: list[State]
    recipe: Recipe
    seed: int
    shared: Tensor | None = None
    """Rows of digits on which every method is judged a second time, so that slow methods can be compared."""

    def sharing(self, count: int) -> "Subject":
        """Return the same subject with random digits that all methods share, drawn by its seed."""
        rows = torch.randperm(len(self.digits.labels), generator=stream(self.seed, "rows of LiSSA"))[:count]
        return replace(self, shared=rows.to(self.digits.labels.device))

    @property
    def task(self) -> et.Task:
        """The task, including the penalty of the training."""
        return et.classification(self.model, l2=self.recipe.l2)

    @property
    def accuracies(self) -> dict[str, float]:
        """Percentages of labels that the network predicts."""
        digits, model = self.digits, self.model
        return {
            "accuracy_train_given": accuracy(model, digits.images, digits.labels),
            "accuracy_test_given": accuracy(model, digits.test_images, digits.test_labels),
            "accuracy_test_true": accuracy(model, digits.test_images, digits.test_true_labels),
        }


NEEDED = Needed(
    lambda settings, part: [("mnist.npz", file) for file, _ in _FILES.values()],
    is_embedded=True,
    public=frozenset(file for file, _ in _FILES.values()),
)


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of these experiments."""
    parser.add_argument("--cache", type=Path, default=Path("runs/experiments"), help="folder of trained networks")


def subject(session: Session, recipe: Recipe, seed: int, size: int | None = None) -> Subject:
    """Train the network with a seed, or load it from the cache; on the first `size` digits if given."""
    if session.device.type == "cuda":
        # Losses of memorised digits and small eigenvalues need full float32 precision.
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    digits = noisy(_digits(session, seed), seed, session.device, size)
    what = "embedded" if session.settings.data is None else "mnist"
    states = trained(digits.images, digits.labels, recipe, seed, session.settings.cache, what)
    return Subject(digits, network(states[-1], session.device), states, recipe, seed)


def source_name(session: Session) -> str:
    """Return a description of the digits of a run."""
    return "embedded" if session.settings.data is None else "a tenth of MNIST for each seed"


def noisy(digits: Digits, seed: int, device: torch.device, size: int | None = None) -> NoisyDigits:
    """Relabel a fifth of the training and of the test digits, and move all to a device."""
    generator = stream(seed, "noise")
    train, test = digits.train_labels[:size], digits.test_labels
    given, test_given = (relabel(labels, FRACTION_WRONG, NUM_CLASSES, generator).labels for labels in (train, test))
    parts = (digits.train_images[:size], given, train, digits.test_images, test_given, test)
    return NoisyDigits(*(part.to(device) for part in parts))


def dataset(images: Tensor, labels: Tensor) -> et.Data:
    """Return examples on the device as a dataset."""
    batch = len(labels) if images.is_cuda else BATCH
    return et.Data(torch.utils.data.TensorDataset(images, labels), batch_size=batch)


def read_mnist(folder: Path, *, download: bool) -> Digits:
    """Read all of MNIST from `mnist.npz`, or else from the four published files.

    Raises:
        InputError: If a download fails.
        FileNotFoundError: If files are missing and should not be downloaded.
    """
    packed = folder / "mnist.npz"
    if packed.exists():
        with np.load(packed) as arrays:
            found = {name: arrays[name] for name in _FILES}
    else:
        if download:
            for name, md5 in _FILES.values():
                fetch(_URL + name, md5, folder / name)
        found = {name: _read_idx(folder / file) for name, (file, _) in _FILES.items()}
    pixels = {name: torch.from_numpy(found[name]).unsqueeze(1).float() / 255 for name in ("x_train", "x_test")}
    labels = {name: torch.from_numpy(found[name].astype(np.int64)) for name in ("y_train", "y_test")}
    return Digits(pixels["x_train"], labels["y_train"], pixels["x_test"], labels["y_test"])


def tenth(digits: Digits, seed: int) -> Digits:
    """Draw a tenth of the training and of the test digits."""
    generator = stream(seed, "tenth")
    train, test = (
        torch.randperm(len(labels), generator=generator)[: len(labels) // _PART]
        for labels in (digits.train_labels, digits.test_labels)
    )
    return replace(
        digits,
        train_images=digits.train_images[train],
        train_labels=digits.train_labels[train],
        test_images=digits.test_images[test],
        test_labels=digits.test_labels[test],
    )


def _digits(session: Session, seed: int) -> Digits:
    settings = session.settings
    if settings.data is None and not settings.download:
        return load_digits()
    return tenth(read_mnist(session.data("The whole of MNIST"), download=settings.download), seed)


def _read_idx(path: Path) -> np.ndarray:
    """Read an IDX file: two zeros, a type (8 for bytes), the dimensions, then the values."""
    content = gzip.decompress(path.read_bytes())
    dimensions = content[3]
    shape = np.frombuffer(content, ">i4", dimensions, offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * dimensions).reshape(shape).copy()
