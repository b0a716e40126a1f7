"""The problems: digits with wrong labels, with and without memorisation, CIFAR-10N, and counterfactuals."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn

from bench.peers.networks import Recipe, logistic, mlp, resnet, small_cnn
from bench.peers.problem import Examples, Spec, as_tensor, random_labels
from eigentrace.demo.cnn import make_cnn
from eigentrace.demo.digits import load_digits
from eigentrace.errors import InputError
from harness.cifar import read_cifar_shard

FRACTION_WRONG = 0.2


def embedded_digits(folder: Path | None, size: int = 6000) -> Examples:
    """Read the digits embedded in the package, a fifth of them relabeled."""
    digits = load_digits()
    labels, is_wrong = random_labels(digits.train_labels[:size], FRACTION_WRONG, seed=0)
    return Examples(digits.train_images[:size], labels, digits.test_images, digits.test_labels, is_wrong)


def sklearn_digits(folder: Path | None, size: int = 1437) -> Examples:
    """Read scikit-learn's 8 × 8 digits, 1,437 for training, a fifth of them relabeled."""
    from sklearn.datasets import load_digits as load

    pixels, classes = load(return_X_y=True)
    images, labels = as_tensor(pixels / 16.0).reshape(-1, 1, 8, 8), as_tensor(classes)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    images, labels = images[order], labels[order]
    noisy, is_wrong = random_labels(labels[:size], FRACTION_WRONG, seed=0)
    return Examples(images[:size], noisy, images[1437:], labels[1437:], is_wrong)


def mnist_queries(folder: Path | None, size: int = 5000, num_queries: int = 500) -> Examples:
    """Read clean digits: the first 5,000 of the embedded ones for training, and 500 queries."""
    digits = load_digits()
    images, labels = digits.train_images[:size], digits.train_labels[:size]
    return Examples(images, labels, digits.test_images, digits.test_labels, num_queries=num_queries)


def cifar10n(folder: Path | None, size: int = 15_000) -> Examples:
    """Read CIFAR-10 with the "worst" human labels of CIFAR-10N."""
    if folder is None:
        raise InputError("cifar10n is not embedded: give the folder of its files as --data.")
    shards = [read_cifar_shard(folder / f"cifar10_train_{start:05d}.npz") for start in range(0, size, 5000)]
    test_images, test_labels = read_cifar_shard(folder / "cifar10_test_00000.npz")
    with np.load(folder / "cifar10n_labels_00000_14999.npz") as given:
        worse, clean = given["worse_label"][:size], given["clean_label"][:size]
    images = torch.cat([images for images, _ in shards])[:size]
    return Examples(images, as_tensor(worse), test_images, test_labels, torch.from_numpy(worse != clean))


def _demo_cnn() -> nn.Module:
    return make_cnn(torch.initial_seed())


_DIGITS = Recipe(epochs=10, batch=128, lr=0.1)
_MNIST = Recipe(epochs=50, batch=64, lr=0.01)
_CIFAR = Recipe(epochs=30, batch=256, lr=0.1, weight_decay=5e-4, cosine=True, augment=True)

_ALL = (
    Spec(
        name="digits",
        title="scikit-learn digits, 20% relabeled, a small CNN",
        load=sklearn_digits,
        build=small_cnn,
        recipe=Recipe(epochs=15, batch=64, lr=0.05),
        keeps=(20,),
        batch=512,
    ),
    Spec(
        name="mnist",
        title="MNIST sample, 20% relabeled, trained 10 epochs",
        load=embedded_digits,
        build=_demo_cnn,
        recipe=_DIGITS,
        sample=512,
    ),
    Spec(
        name="mnist-memorised",
        title="MNIST sample, 20% relabeled, trained to memorisation",
        load=embedded_digits,
        build=_demo_cnn,
        recipe=replace(_DIGITS, epochs=100, lr=0.05),
        sample=512,
    ),
    Spec(
        name="mnist-lr",
        title="MNIST, logistic regression, counterfactuals",
        load=mnist_queries,
        build=logistic,
        recipe=_MNIST,
        steps=400,
        keeps=(100, 200),
        checkpoints=1,
        models=10,
        batch=1000,
    ),
    Spec(
        name="mnist-mlp",
        title="MNIST, 784-128-64-10, counterfactuals",
        load=mnist_queries,
        build=mlp,
        recipe=_MNIST,
        steps=400,
        keeps=(100, 200),
        checkpoints=1,
        models=10,
        proj_dim=2048,
        batch=1000,
    ),
    Spec(
        name="cifar10n",
        title="CIFAR-10, human noise, a small ResNet trained with augmentation",
        load=cifar10n,
        build=resnet,
        recipe=_CIFAR,
        sample=1024,
        batch=250,
    ),
    Spec(
        name="cifar10n-memorised",
        title="CIFAR-10, human noise, a small ResNet trained to memorisation",
        load=cifar10n,
        build=resnet,
        recipe=replace(_CIFAR, epochs=60, weight_decay=0.0, augment=False),
        sample=1024,
        batch=250,
    ),
)
PROBLEMS: dict[str, Spec] = {spec.name: spec for spec in _ALL}
"""All problems by name, in the order of the page."""

EMBEDDED = tuple(spec.name for spec in _ALL if spec.load is not cifar10n)
"""The problems that need no data files."""


def _less(spec: Spec, **options: int) -> Spec:
    load: Callable[[Path | None], Examples] = partial(spec.load, **options)
    recipe = replace(spec.recipe, epochs=min(4, spec.recipe.epochs))
    return replace(
        spec, load=load, recipe=recipe, steps=20, keeps=(5,), sample=100, checkpoints=min(2, spec.checkpoints),
        models=min(2, spec.models), proj_dim=128, batch=32,
    )  # fmt: skip


SMALL: dict[str, Spec] = {
    name: _less(spec, size=200, num_queries=10) if spec.load is mnist_queries else _less(spec, size=200)
    for name, spec in PROBLEMS.items()
}
"""The same problems with 200 examples and a few steps, to check that everything runs."""
