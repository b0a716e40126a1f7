"""Baselines without curvature: similarity of whole, projected or subsampled gradients."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch

from eigentrace.errors import InputError
from eigentrace.fits.projected_fit import DirectionsFit
from eigentrace.fits.weighted_directions import Block
from eigentrace.methods.method import ready
from eigentrace.numeric.memory import check_fits
from eigentrace.numeric.seeding import generator_of
from eigentrace.progress import track
from eigentrace.projection.directions import CoordinateDirections, DenseDirections
from eigentrace.settings import check_counts, check_not_negative, settings_of, settings_repr
from eigentrace.task.checkpoints import Source, find_checkpoints
from eigentrace.task.layout import normal
from eigentrace.task.task import Task


@dataclass(frozen=True)
class RandProj:
    """Gradient similarity in K random Gaussian directions: an unbiased estimate of ⟨g(x), g(z)⟩."""

    keep: int = 50
    """K, the number of directions to project gradients on; each example gets K features."""
    seed: int = 0
    """Seed of the directions."""

    __repr__ = settings_repr

    def __post_init__(self) -> None:
        check_counts(1, keep=self.keep)
        check_counts(0, seed=self.seed)

    def fit(self, task: Task, data: Any, *, num_train: int | None = None) -> DirectionsFit:
        """Draw the directions; see `Method.fit` for the arguments."""
        task, data, size = ready(task, data, num_train)
        layout = task.layout
        each = layout.numel * layout.dtype.itemsize
        check_fits(
            self.keep * each,
            layout.device,
            f"{self.keep} directions of {layout.numel:,} parameters",
            "Lower keep, or select fewer parameters (params= of the task)",
        )
        generator = generator_of(self.seed)
        matrix = normal((self.keep, task.layout.numel), generator, task.layout)
        weights = torch.full((self.keep,), 1 / self.keep, dtype=torch.float64, device="cpu")
        block = Block(DenseDirections(matrix, task.layout), weights)
        return DirectionsFit(task, (block,), settings_of(self), size)


@dataclass(frozen=True)
class RandSelect:
    """Gradient similarity in K randomly selected components of the parameter vector."""

    keep: int = 50
    """K, the number of components; at most the number of selected parameters."""
    seed: int = 0
    """Seed of the selection."""

    __repr__ = settings_repr

    def __post_init__(self) -> None:
        check_counts(1, keep=self.keep)
        check_counts(0, seed=self.seed)

    def fit(self, task: Task, data: Any, *, num_train: int | None = None) -> DirectionsFit:
        """Select the components; see `Method.fit` for the arguments."""
        task, data, size = ready(task, data, num_train)
        if self.keep > task.layout.numel:
            raise InputError(f"keep={self.keep} is more than the {task.layout.numel} selected parameters: lower keep.")
        generator = generator_of(self.seed)
        index = torch.randperm(task.layout.numel, generator=generator, device="cpu")[: self.keep].sort().values
        block = Block(
            CoordinateDirections(index, task.layout), torch.ones(self.keep, dtype=torch.float64, device="cpu")
        )
        return DirectionsFit(task, (block,), settings_of(self), size)


@dataclass(frozen=True)
class TracIn:
    """Similarity of whole gradients, averaged over checkpoints of the training: (1/C) Σ ⟨g_c(x), g_c(z)⟩."""

    checkpoints: Source | Sequence[Source] | None = None
    """The checkpoints: state dicts, files, or folders written by Hugging Face or Lightning; one, or a list. None uses
    the model's current parameters."""
    learning_rates: Sequence[float] | None = None
    """Weights of the checkpoints, one for each, such as the learning rates at their steps; None weighs each 1/C."""

    __repr__ = settings_repr

    def fit(self, task: Task, data: Any, *, num_train: int | None = None) -> DirectionsFit:
        """Check every checkpoint against the model; see `Method.fit` for the arguments."""
        task, data, size = ready(task, data, num_train)
        states = (None,) if self.checkpoints is None else find_checkpoints(self.checkpoints)
        for state in track(states, "Checking checkpoints", len(states)):
            if state is not None:
                task.canonical(state.load())
        weights = [1 / len(states)] * len(states) if self.learning_rates is None else _numbers(self.learning_rates)
        if len(weights) != len(states):
            raise InputError(
                f"Got {len(weights)} learning_rates for {len(states)} checkpoints: pass one for each checkpoint."
            )
        check_not_negative(**{f"learning_rates[{i}]": weight for i, weight in enumerate(weights)})
        empty = DenseDirections(task.vector.new_zeros(0, task.layout.numel), task.layout)
        no_weights = torch.zeros(0, dtype=torch.float64, device="cpu")
        blocks = tuple(
            Block(empty, no_weights, float(weight), state) for weight, state in zip(weights, states, strict=True)
        )
        return DirectionsFit(task, blocks, settings_of(self), size)


def _numbers(given: Any) -> list[Any]:
    if isinstance(given, Real):
        return [given]
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise InputError(f"learning_rates must be a list of numbers, one for each checkpoint, got {given!r}.")
    return list(given)
