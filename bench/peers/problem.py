"""A trained model, its data and the ground truth, in a file that every method's process reads."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Subset, TensorDataset

from bench.peers.networks import Recipe, State, accuracy, seeded, train
from eigentrace.data.row_numbers import draw
from eigentrace.disk.atomic import replacing
from eigentrace.numeric.seeding import generator_of


@dataclass(frozen=True)
class Examples:
    """Training and test examples of a problem."""

    images: Tensor  # (N, ...)
    labels: Tensor  # (N,) as given to the network
    test_images: Tensor
    test_labels: Tensor
    is_wrong: Tensor | None = None  # (N,) bool
    num_queries: int = 0
    """Number of test examples that are queries."""


@dataclass(frozen=True, kw_only=True)
class Spec:
    """The definition of a problem: data, network, training, and settings shared by all methods."""

    name: str
    """Name on the command line."""
    title: str
    """Name on the page."""
    load: Callable[[Path | None], Examples]
    """Reads the data, from a folder unless it is embedded."""
    build: Callable[[], nn.Module]
    """Makes the network."""
    recipe: Recipe
    """The hyperparameters of its training."""
    steps: int = 100
    """Number of products with the curvature."""
    keeps: tuple[int, ...] = (50,)
    """Numbers of eigenpairs to keep; the first is K of all low-rank methods."""
    sample: int | None = None
    """Number of examples for the curvature; None for all."""
    checkpoints: int = 10
    """Number of checkpoints of the training."""
    models: int = 1
    """Number of networks trained from different seeds, for averaging."""
    proj_dim: int = 512
    """Dimension of random projections."""
    batch: int = 256
    """Batch size."""

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that all numbers of one table must share."""
        names = ("steps", "keeps", "sample", "checkpoints", "models", "proj_dim")
        return asdict(self.recipe) | {name: _plain(getattr(self, name)) for name in names}


@dataclass(frozen=True)
class Problem:
    """A problem as methods receive it."""

    spec: Spec
    examples: Examples
    states: list[State]
    """One trained network per seed; the first is the one that is scored."""
    checkpoints: list[State]
    """Checkpoints of the training of the first network, the last one at its end."""
    device: torch.device

    @property
    def train(self) -> tuple[Tensor, Tensor]:
        """The training data, on the device."""
        return self.examples.images.to(self.device), self.examples.labels.to(self.device)

    @property
    def queries(self) -> tuple[Tensor, Tensor]:
        """The queries, on the device."""
        count = self.examples.num_queries
        return self.examples.test_images[:count].to(self.device), self.examples.test_labels[:count].to(self.device)

    @property
    def train_set(self) -> TensorDataset:
        """The training data as a dataset."""
        return TensorDataset(*self.train)

    @property
    def query_set(self) -> TensorDataset:
        """The queries as a dataset."""
        return TensorDataset(*self.queries)

    @property
    def num_train(self) -> int:
        """N."""
        return len(self.examples.labels)

    @property
    def keep(self) -> int:
        """K of all low-rank methods."""
        return self.spec.keeps[0]

    def model(self, state: State | None = None) -> nn.Module:
        """Return a fresh copy of the network, in eval mode on the device."""
        model = self.spec.build()
        model.load_state_dict(self.states[0] if state is None else state)
        return model.to(self.device).eval()

    def at(self, index: int) -> "Problem":
        """Return the problem with only one of its networks."""
        return Problem(self.spec, self.examples, [self.states[index]], self.checkpoints, self.device)

    @property
    def num_parameters(self) -> int:
        """P."""
        return sum(p.numel() for p in self.spec.build().parameters())

    @property
    def curvature_set(self) -> TensorDataset | Subset:
        """The examples for the curvature, the same that eigentrace's methods sample."""
        if self.spec.sample is None or self.spec.sample >= self.num_train:
            return self.train_set
        return Subset(self.train_set, draw(self.num_train, self.spec.sample, generator_of(0)).tolist())

    def even_batch(self, most: int = 512) -> int:
        """Return the largest batch size up to `most` that leaves no smaller last batch; N itself if there is none."""
        found = max(size for size in range(1, most + 1) if self.num_train % size == 0)
        return found if found > 16 else self.num_train


def make_problem(spec: Spec, data: Path | None, cache: Path, device: torch.device) -> Problem:
    """Read the data and train the networks, or reuse those of an earlier run with the same settings."""
    examples = spec.load(data)
    path = cache / f"{spec.name}.pt"
    settings = repr((spec.settings, tuple(examples.images.shape), int(examples.labels.sum())))
    if path.exists():
        held = torch.load(path, weights_only=True)
        if held["settings"] == settings:
            return Problem(spec, examples, held["states"], held["checkpoints"], device)
    images, labels = examples.images.to(device), examples.labels.to(device)
    states: list[State] = []
    checkpoints: list[State] = []
    for seed in range(spec.models):
        model = seeded(spec.build, seed).to(device)
        kept = train(model, images, labels, spec.recipe, seed, 1 if seed else spec.checkpoints)
        states.append(kept[-1])
        checkpoints = checkpoints or kept
    cache.mkdir(parents=True, exist_ok=True)
    with replacing(path) as unfinished:
        torch.save({"settings": settings, "states": states, "checkpoints": checkpoints}, unfinished)
    return Problem(spec, examples, states, checkpoints, device)


def described(problem: Problem) -> dict[str, float]:
    """Return the percentages of labels that the network predicts."""
    model = problem.model()
    examples = problem.examples
    test = accuracy(model, examples.test_images.to(problem.device), examples.test_labels.to(problem.device))
    return {"train_accuracy": accuracy(model, *problem.train), "test_accuracy": test}


def random_labels(labels: Tensor, fraction: float, seed: int) -> tuple[Tensor, Tensor]:
    """Change the labels of a fraction of the examples; return the labels, and which are wrong."""
    from eigentrace.demo.digits import relabel

    noisy = relabel(labels, fraction, 10, torch.Generator().manual_seed(seed))
    return noisy.labels, noisy.is_wrong


def as_tensor(values: np.ndarray) -> Tensor:
    """Convert an array to a tensor; integers become int64 classes."""
    return torch.from_numpy(np.ascontiguousarray(values)).to(torch.float32 if values.dtype.kind == "f" else torch.int64)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
