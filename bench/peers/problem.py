"""A trained model, its data and what is known about them, in a file that every method's process reads."""

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
    """What a network is trained on, and what it is asked about."""

    images: Tensor  # (N, ...)
    labels: Tensor  # (N,) as given to the network
    test_images: Tensor
    test_labels: Tensor
    is_wrong: Tensor | None = None  # (N,) bool
    num_queries: int = 0
    """How many of the test examples are queries."""


@dataclass(frozen=True, kw_only=True)
class Spec:
    """How a problem is made, and the settings that all methods share on it."""

    name: str
    """What it is called on the command line."""
    title: str
    """What it is called on the page."""
    load: Callable[[Path | None], Examples]
    """Reads the data, from a folder if it is not embedded."""
    build: Callable[[], nn.Module]
    """Makes the network."""
    recipe: Recipe
    """How it is trained."""
    steps: int = 100
    """Products with the curvature."""
    keeps: tuple[int, ...] = (50,)
    """Eigenpairs kept; the first is what all low-rank methods keep."""
    sample: int | None = None
    """Examples that the curvature is taken on; None for all."""
    checkpoints: int = 10
    """States kept along the training."""
    models: int = 1
    """Networks trained from different seeds, for methods that are averaged."""
    proj_dim: int = 512
    """Numbers to an example in random projections."""
    batch: int = 256
    """Examples that go through a model at a time."""

    @property
    def settings(self) -> dict[str, Any]:
        """What numbers must share to stand in one table."""
        names = ("steps", "keeps", "sample", "checkpoints", "models", "proj_dim")
        return asdict(self.recipe) | {name: _plain(getattr(self, name)) for name in names}


@dataclass(frozen=True)
class Problem:
    """A problem as a method meets it."""

    spec: Spec
    examples: Examples
    states: list[State]
    """One trained network per seed; the first is the one that scores are about."""
    checkpoints: list[State]
    """States along the training of the first network, the last of them its end."""
    device: torch.device

    @property
    def train(self) -> tuple[Tensor, Tensor]:
        """The training data, on the device."""
        return self.examples.images.to(self.device), self.examples.labels.to(self.device)

    @property
    def queries(self) -> tuple[Tensor, Tensor]:
        """The examples that are asked about, on the device."""
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
        """Return the problem with another of its networks in first place, and no others."""
        return Problem(self.spec, self.examples, [self.states[index]], self.checkpoints, self.device)

    @property
    def num_parameters(self) -> int:
        """P."""
        return sum(p.numel() for p in self.spec.build().parameters())

    @property
    def curvature_set(self) -> TensorDataset | Subset:
        """The examples that the curvature is taken on: those that our own methods draw."""
        if self.spec.sample is None or self.spec.sample >= self.num_train:
            return self.train_set
        return Subset(self.train_set, draw(self.num_train, self.spec.sample, generator_of(0)).tolist())

    def even_batch(self, most: int = 512) -> int:
        """Return the largest batch size up to `most` that leaves no smaller last batch; N itself if there is none."""
        found = max(size for size in range(1, most + 1) if self.num_train % size == 0)
        return found if found > 16 else self.num_train


def make_problem(spec: Spec, data: Path | None, cache: Path, device: torch.device) -> Problem:
    """Read the data and train the networks, or take these from an earlier run with the same settings."""
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
    """Return the percentages of labels that the network agrees with."""
    model = problem.model()
    examples = problem.examples
    test = accuracy(model, examples.test_images.to(problem.device), examples.test_labels.to(problem.device))
    return {"train_accuracy": accuracy(model, *problem.train), "test_accuracy": test}


def random_labels(labels: Tensor, fraction: float, seed: int) -> tuple[Tensor, Tensor]:
    """Give a fraction of the examples another label; return the labels, and which are wrong."""
    from eigentrace.demo.digits import relabel

    noisy = relabel(labels, fraction, 10, torch.Generator().manual_seed(seed))
    return noisy.labels, noisy.is_wrong


def as_tensor(values: np.ndarray) -> Tensor:
    """Take an array over into torch; integers become classes."""
    return torch.from_numpy(np.ascontiguousarray(values)).to(torch.float32 if values.dtype.kind == "f" else torch.int64)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
