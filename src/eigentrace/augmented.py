"""The loss under random changes of the inputs, which an example that was only memorised does not survive."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from eigentrace.batch import map_tensors, tensors_of
from eigentrace.compute import Compute
from eigentrace.data import Data
from eigentrace.errors import InputError, UnsupportedError
from eigentrace.settings import check_counts
from eigentrace.solved import LossFit, losses_of

Augment = Callable[[Any, np.ndarray, int], Any]


@dataclass(frozen=True)
class FlipsAndShifts:
    """Mirror images with even chances, and shift them by a few pixels, filling up with zeros.

    What happens to an example depends on its row and the seed alone, never on the batch it comes in.
    """

    flip: bool = True
    """Mirror left and right: not for digits or text."""
    pixels: int = 4
    """Shift by up to so many, both ways."""

    def __post_init__(self) -> None:
        check_counts(0, pixels=self.pixels)

    def __call__(self, batch: Any, rows: np.ndarray, seed: int) -> Any:
        """Change all images (B, C, H, W) of a batch alike."""
        if not any(_are_images(t, len(rows)) for t in tensors_of(batch)):
            shapes = [f"{t.dtype} {tuple(t.shape)}" for t in tensors_of(batch)]
            raise InputError(
                f"Flips and shifts need images, floating numbers of shape (B, C, H, W), and the batch holds {shapes}. "
                "Give AugmentedLoss(augment=...), a function of batch, rows and seed that returns a changed batch."
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
        rows = (y[:, None] + torch.arange(height, device=images.device))[:, :, None]
        columns = (x[:, None] + torch.arange(width, device=images.device))[:, None]
        return padded[index, rows, columns].permute(0, 3, 1, 2).contiguous()


FLIPS_AND_SHIFTS = FlipsAndShifts()


@dataclass(frozen=True)
class AugmentedFit(LossFit):
    """The loss of each example, averaged over random changes of it."""

    augment: Augment = FLIPS_AND_SHIFTS
    draws: int = 16
    seed: int = 0

    def _self(self, data: Data, *, queries: bool, unit_gradients: bool, compute: Compute) -> Tensor:
        if unit_gradients:
            raise UnsupportedError("AugmentedLoss uses no gradients, so normalize='gradient' has no meaning: use None.")
        total = torch.zeros(len(data), dtype=torch.float64, device="cpu")
        with self.task.session():
            for draw in range(self.draws):
                total += losses_of(self.task, data, self._change(self.seed * self.draws + draw))
        return (total / self.draws).to(self.task.layout.dtype)

    def _change(self, seed: int) -> Callable[[Any, np.ndarray], Any]:
        return lambda batch, rows: self.augment(batch, rows, seed)


def _are_images(tensor: Tensor, size: int) -> bool:
    return tensor.ndim == 4 and len(tensor) == size and tensor.is_floating_point()


def _drawn(rows: np.ndarray, seed: int, which: int) -> np.ndarray:  # (B,) uint64
    """Mix row, seed and purpose into even random bits (the finaliser of SplitMix64)."""
    with np.errstate(over="ignore"):
        bits = rows.astype(np.uint64) + np.uint64(1)
        for salt in (np.uint64(seed), np.uint64(which)):
            bits = (bits + salt) * np.uint64(0x9E3779B97F4A7C15)
            bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            bits ^= bits >> np.uint64(31)
    return bits >> np.uint64(1)
