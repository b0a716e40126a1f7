"""Identification of models and losses: weight sums, losses of a few examples, and a hash of all weights."""

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from eigentrace.errors import MismatchError
from eigentrace.numeric.hashing import hash_arrays
from eigentrace.progress import track

# Sums in another order (with more threads, for instance) differ by rounding; a training step changes them far more.
_TOL = 1e-9


# Tolerance for the rounding of losses, relative to the largest of those compared.
_SAME_LOSS = 0.1


@dataclass(frozen=True)
class WeightSums:
    """Two sums of each tensor of a model, which are cheap to compute and changed by any training.

    Storage addresses and version counters would be cheaper, but writes through `.data` do not change them.
    """

    sums: Mapping[str, tuple[float, float, int]]

    @staticmethod
    def of(model: nn.Module) -> "WeightSums":
        """Compute the sums of a model's current tensors."""
        return WeightSums.of_tensors(_tensors(model))

    @staticmethod
    def of_tensors(tensors: Mapping[str, Tensor]) -> "WeightSums":
        """Compute the sums of tensors."""
        return WeightSums({name: _sums(tensor) for name, tensor in tensors.items()})

    def changed(self, tensors: Mapping[str, Tensor]) -> list[str]:
        """Return the names of tensors that are missing or have other sums."""
        return [n for n, sums in self.sums.items() if n not in tensors or not _close(_sums(tensors[n]), sums)]

    def check(self, model: nn.Module) -> None:
        """Raise MismatchError if the model's tensors have changed."""
        changed = self.changed(_tensors(model))
        if changed:
            raise MismatchError(
                f"The model has changed since this fit was made ({len(changed)} of {len(self.sums)} tensors, first: "
                f"{changed[0]!r}): it was trained further or reloaded. Create a new task and fit again, or "
                "restore the weights of the fit."
            )


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters()) | dict(model.named_buffers())


def _sums(tensor: Tensor) -> tuple[float, float, int]:
    flat = tensor.detach()
    flat = (torch.view_as_real(flat) if flat.is_complex() else flat).double()
    return float(flat.sum().nan_to_num()), float(flat.square().sum().nan_to_num()), flat.numel()


def _close(a: tuple[float, float, int], b: tuple[float, float, int]) -> bool:
    size = (b[1] * b[2]) ** 0.5  # the largest possible sum with this sum of squares
    return abs(a[0] - b[0]) <= _TOL * size and abs(a[1] - b[1]) <= _TOL * b[1] and a[2] == b[2]


@dataclass
class LossFingerprint:
    """Losses of the first examples of a fit, with their digests and the form of their batch."""

    form: str
    """Dtypes and shapes of a batch, as text."""
    losses: Tensor  # (n,) float64
    digests: np.ndarray | None  # (n,) uint64
    """None if examples have no digests."""
    is_checked: bool = True
    """Whether the task is known to have these losses; False at first for a loaded fit."""

    @staticmethod
    def read(record: dict[str, Any] | None) -> "LossFingerprint | None":
        """Restore a fingerprint from the output of `record`; fits of earlier versions have none.

        Raises:
            TypeError, ValueError or OverflowError: If an entry has another type than `record` writes.
        """
        if record is None:
            return None
        losses = torch.tensor(record["losses"], dtype=torch.float64, device="cpu")
        digests = None if record["digests"] is None else np.array(record["digests"], dtype=np.uint64)
        if losses.ndim != 1 or (digests is not None and digests.shape != tuple(losses.shape)):
            raise ValueError(f"trial has {tuple(losses.shape)} losses, and digests of another number")
        return LossFingerprint(str(record["form"]), losses, digests, is_checked=False)

    def record(self) -> dict[str, Any]:
        """Return the fingerprint as JSON values."""
        digests = None if self.digests is None else self.digests.tolist()
        return {"form": self.form, "losses": self.losses.tolist(), "digests": digests}

    def elsewhere(self) -> "LossFingerprint":
        """Return the fingerprint at other parameters, which has only the form."""
        return LossFingerprint(self.form, self.losses[:0], None)

    def held(self, digests: np.ndarray) -> Tensor:  # (B,) -> (B,)
        """Return the stored loss of each of these examples; NaN for examples without one."""
        own = [] if self.digests is None else self.digests.tolist()
        known = dict(zip(own, self.losses[: len(own)].tolist(), strict=True))
        found = [known.get(digest, torch.nan) for digest in digests.tolist()]
        return torch.tensor(found, dtype=torch.float64, device="cpu")


def another_loss(held: Tensor, here: Tensor) -> int | None:  # (B,), (B,)
    """Return the index of the largest difference of losses, None if it is only rounding; NaN is ignored."""
    gaps = (here - held).abs().nan_to_num()
    if not len(gaps) or float(gaps.max()) <= _SAME_LOSS * max(float(held.nan_to_num().abs().max()), 1e-3):
        return None
    return int(gaps.argmax())


def fingerprint(tensors: Mapping[str, Tensor], selected: Container[str]) -> str:
    """Hash the names, shapes, types and values of a task's tensors, and which of them are selected."""
    names = track(sorted(tensors), "Fingerprint")
    labels = ((f"{n} {tuple(tensors[n].shape)} {tensors[n].dtype} {n in selected};", tensors[n]) for n in names)
    return hash_arrays(labels)
