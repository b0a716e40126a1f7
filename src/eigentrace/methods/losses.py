"""Scores without gradients: the loss, its mean over checkpoints, or its mean over random changes of the inputs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from eigentrace.data import Data
from eigentrace.data.batch import map_tensors, tensors_of
from eigentrace.errors import InputError
from eigentrace.fits.fitted import Fitted
from eigentrace.fits.weighted_directions import Norm
from eigentrace.methods.method import ready
from eigentrace.progress import track
from eigentrace.projection.engine import Compute
from eigentrace.settings import check_counts, settings_of, settings_repr
from eigentrace.task.checkpoints import Checkpoint, Source, find_checkpoints
from eigentrace.task.checks import check_losses, name_loader, note_batch
from eigentrace.task.company import CompanyCheck
from eigentrace.task.task import Task

Change = Callable[[Any, np.ndarray], Any]
"""A function of a placed batch and the rows of its examples that returns a changed batch."""


def losses_of(task: Task, data: Data, change: Change | None = None, first: int = 0) -> Tensor:  # (N,) float64
    """Evaluate the loss of every example, within a session of the task that the caller has opened.

    Args:
        task: The task, at the parameters to evaluate.
        data: The examples.
        change: Applied to each batch before the model, if given.
        first: Row of the first example, if `data` is part of a larger dataset; passed to `change`.
    """
    losses = torch.empty(len(data), dtype=torch.float64, device="cpu")
    in_company = CompanyCheck(task, task.losses, has_gradients=False)
    for batch in track(data.batches(), "Losses", len(data), len):
        placed = task.place(batch.values)
        placed = placed if change is None else change(placed, batch.rows + first)
        try:
            found = task.losses(task.params, placed)
        except Exception as error:
            note_batch(error, task, placed)
            name_loader(error, data, batch.values)
            raise
        check_losses(found, batch.rows, task=task, batch=placed)
        in_company(placed, batch.rows, found)
        losses[batch.rows] = found.to(losses)
    return losses


@dataclass(frozen=True, repr=False)
class LossFit(Fitted):
    """Losses as scores, averaged over checkpoints of the model and over changes of the inputs."""

    task: Task
    method: dict[str, Any]
    num_train: int
    states: tuple[Checkpoint | None, ...] = (None,)
    """Checkpoints to average over; None is the model's own parameters."""
    changes: tuple[Change | None, ...] = (None,)
    """Changes of the inputs to average over; None is the inputs as they are."""
    has_curvature: bool = False

    @property
    def is_loss(self) -> bool:
        """Whether the score is the loss itself, instead of a mean over checkpoints or changes."""
        return self.states == (None,) and self.changes == (None,)

    def _self(self, data: Data, *, queries: bool, norm: Norm, compute: Compute) -> Tensor:
        return self._mean(data, 0)

    def scores_of_rows(self, data: Data, rows: range, compute: Compute) -> Tensor:  # (n,)
        """Score consecutive rows; the change of an example depends on its row in the whole data."""
        return self._mean(data.take(rows), rows.start)

    def _mean(self, data: Data, first: int) -> Tensor:  # (N,)
        total = torch.zeros(len(data), dtype=torch.float64, device="cpu")
        for state in self.states:
            with self.task.session():
                task = self.task if state is None else self.task.at(state.load())
                for change in self.changes:
                    total += losses_of(task, data, change, first)
        return (total / (len(self.states) * len(self.changes))).to(self.task.layout.dtype)


@dataclass(frozen=True)
class Loss:
    """The loss of each example: a baseline that finds easy label noise better than any influence method."""

    def fit(self, task: Task, data: Any, *, num_train: int | None = None) -> LossFit:
        """Check the task; see `Method.fit` for the arguments."""
        task, data, size = ready(task, data, num_train)
        return LossFit(task, settings_of(self), size)


@dataclass(frozen=True)
class MeanLoss:
    """The loss of each example, averaged over checkpoints of its training: high for what was learned late.

    The final loss does not show noise that was memorised, but the mean over training does. It needs early checkpoints,
    from before the last examples were fitted. `eigentrace.LossTracker` records the same number while training, without
    storing checkpoints.
    """

    checkpoints: Source | Sequence[Source]
    """The checkpoints: state dicts, files, or folders written by Hugging Face or Lightning; one, or a list."""

    __repr__ = settings_repr

    def fit(self, task: Task, data: Any, *, num_train: int | None = None) -> LossFit:
        """Check every checkpoint against the model; see `Method.fit` for the arguments."""
        task, data, size = ready(task, data, num_train)
        states = find_checkpoints(self.checkpoints)
        for state in track(states, "Checking checkpoints", len(states)):
            task.canonical(state.load())
        return LossFit(task, settings_of(self), size, states)


Augment = Callable[[Any, np.ndarray, int], Any]


@dataclass(frozen=True)
class FlipsAndShifts:
    """Random changes of images: mirror with probability 1/2, then shift by a few pixels, padding with zeros.

    The change of an example depends on its row and the seed only, not on its batch.
    """

    flip: bool = True
    """Mirror images left to right; turn it off for digits or text."""
    pixels: int = 4
    """Largest shift, in each direction and axis."""

    def __post_init__(self) -> None:
        check_counts(0, pixels=self.pixels)

    def __call__(self, batch: Any, rows: np.ndarray, seed: int) -> Any:
        """Change all image tensors (B, C, H, W) of a batch, with the same changes for each tensor."""
        if not any(_are_images(t, len(rows)) for t in tensors_of(batch)):
            shapes = [f"{t.dtype} {tuple(t.shape)}" for t in tensors_of(batch)]
            raise InputError(
                f"Flips and shifts need images, floating-point tensors of shape (B, C, H, W), but the batch contains "
                f"{shapes}. Pass AugmentedLoss(augment=...) a function of batch, rows and seed that returns a changed "
                "batch."
            )
        mirrored = _drawn(rows, seed, 0) % 2 == 1
        down, right = (_drawn(rows, seed, which) % (2 * self.pixels + 1) for which in (1, 2))
        return map_tensors(lambda t: self._moved(t, mirrored, down, right) if _are_images(t, len(rows)) else t, batch)

    def _moved(self, images: Tensor, mirrored: np.ndarray, down: np.ndarray, right: np.ndarray) -> Tensor:
        flip, y, x = (torch.from_numpy(a.astype(np.int64)).to(images.device) for a in (mirrored, down, right))
        if self.flip:
            images = torch.where(flip[:, None, None, None] == 1, images.flip(-1), images)
        height, width = images.shape[-2:]
        padded = F.pad(images, (self.pixels,) * 4).permute(0, 2, 3, 1)
        index = torch.arange(len(images), device=images.device)[:, None, None]
        vertical = (y[:, None] + torch.arange(height, device=images.device))[:, :, None]
        horizontal = (x[:, None] + torch.arange(width, device=images.device))[:, None]
        return padded[index, vertical, horizontal].permute(0, 3, 1, 2).contiguous()


FLIPS_AND_SHIFTS = FlipsAndShifts()


@dataclass(frozen=True)
class AugmentedLoss:
    """The loss of each example, averaged over random changes of its inputs: high for what was memorised.

    Even if a network fits all training examples, the loss of those that it memorised rises when, for example, an image
    is shifted by a few pixels. Use it for networks that were trained without such augmentation; with it, the final
    loss is as good.
    """

    augment: Augment = FLIPS_AND_SHIFTS
    """Function `augment(batch, rows, seed)` that returns a changed batch; by default, images are mirrored and shifted.
    The change of an example should depend on its row and the seed only."""
    draws: int = 16
    """Number of changes of each example to average over, with one pass over the data for each."""
    seed: int = 0
    """Seed of the changes."""

    __repr__ = settings_repr

    def __post_init__(self) -> None:
        check_counts(1, draws=self.draws)
        check_counts(0, seed=self.seed)
        if not callable(self.augment):
            raise InputError(
                f"augment must be a function of batch, rows and seed, got {type(self.augment).__name__}. Pass one that "
                "returns a changed batch."
            )

    def fit(self, task: Task, data: Any, *, num_train: int | None = None) -> LossFit:
        """Check the task, and call `augment` on a first batch; see `Method.fit` for the arguments."""
        task, data, size = ready(task, data, num_train)
        first = data.first(8)
        self.augment(task.place(first.values), first.rows, int(self.seed))
        first_seed = int(self.seed) * int(self.draws)
        changes = tuple(partial(_changed, self.augment, first_seed + draw) for draw in range(self.draws))
        return LossFit(task, settings_of(self), size, changes=changes)


def _changed(augment: Augment, seed: int, batch: Any, rows: np.ndarray) -> Any:
    return augment(batch, rows, seed)


def _are_images(tensor: Tensor, size: int) -> bool:
    return tensor.ndim == 4 and len(tensor) == size and tensor.is_floating_point()


def _drawn(rows: np.ndarray, seed: int, which: int) -> np.ndarray:  # (B,) uint64
    """Hash row, seed and purpose to uniform random bits (the finaliser of SplitMix64)."""
    with np.errstate(over="ignore"):
        bits = rows.astype(np.uint64) + np.uint64(1)
        for salt in (np.uint64(seed), np.uint64(which)):
            bits = (bits + salt) * np.uint64(0x9E3779B97F4A7C15)
            bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            bits ^= bits >> np.uint64(31)
    return bits >> np.uint64(1)
