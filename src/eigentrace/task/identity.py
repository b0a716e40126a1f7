"""Tell one model or loss from another: sums of the weights, losses of a few examples, and a hash of all weights."""

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from eigentrace.errors import MismatchError
from eigentrace.numeric.hashing import hash_arrays
from eigentrace.progress import track

# Sums in another order (more threads, say) differ by rounding; a step of training moves them by far more.
_TOL = 1e-9


# How far rounding may move losses, of the largest of those compared.
_SAME_LOSS = 0.1


@dataclass(frozen=True)
class WeightSums:
    """Two sums of each tensor of a model: cheap to take again, and moved by any training.

    Storage addresses and version counters would be cheaper still, but writes through `.data` leave them alone.
    """

    sums: Mapping[str, tuple[float, float, int]]

    @staticmethod
    def of(model: nn.Module) -> "WeightSums":
        """Sum up the tensors of a model as it is."""
        return WeightSums({name: _sums(tensor) for name, tensor in _tensors(model).items()})

    def check(self, model: nn.Module) -> None:
        """Stop if the model holds other numbers now."""
        tensors = _tensors(model)
        changed = [n for n, sums in self.sums.items() if n not in tensors or not _close(_sums(tensors[n]), sums)]
        if changed:
            raise MismatchError(
                f"The model has changed since this fit was made ({len(changed)} of {len(self.sums)} tensors, first: "
                f"{changed[0]!r}): it was trained further or reloaded. Make a new task and fit again, or put the "
                "weights of the fit back."
            )


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters()) | dict(model.named_buffers())


def _sums(tensor: Tensor) -> tuple[float, float, int]:
    flat = tensor.detach()
    flat = (torch.view_as_real(flat) if flat.is_complex() else flat).double()
    return float(flat.sum().nan_to_num()), float(flat.square().sum().nan_to_num()), flat.numel()


def _close(a: tuple[float, float, int], b: tuple[float, float, int]) -> bool:
    size = (b[1] * b[2]) ** 0.5  # the largest a sum can be at this sum of squares
    return abs(a[0] - b[0]) <= _TOL * size and abs(a[1] - b[1]) <= _TOL * b[1] and a[2] == b[2]


@dataclass
class LossFingerprint:
    """Losses of the first examples of a fit, with their digests and the form of their batch."""

    form: str
    """What batches are made of, in words."""
    losses: Tensor  # (n,) float64
    digests: np.ndarray | None  # (n,) uint64
    """None where examples cannot be told from others."""
    is_checked: bool = True
    """Whether the task at hand is known to give these losses; that of a loaded fit is not at first."""

    @staticmethod
    def read(record: dict[str, Any] | None) -> "LossFingerprint | None":
        """Read what `record` wrote; fits of earlier versions have none."""
        if record is None:
            return None
        losses = torch.tensor(record["losses"], dtype=torch.float64, device="cpu")
        digests = None if record["digests"] is None else np.array(record["digests"], dtype=np.uint64)
        return LossFingerprint(str(record["form"]), losses, digests, is_checked=False)

    def record(self) -> dict[str, Any]:
        """Say the same in JSON."""
        digests = None if self.digests is None else self.digests.tolist()
        return {"form": self.form, "losses": self.losses.tolist(), "digests": digests}

    def elsewhere(self) -> "LossFingerprint":
        """Return what is the same at other parameters: the form."""
        return LossFingerprint(self.form, self.losses[:0], None)

    def held(self, digests: np.ndarray) -> Tensor:  # (B,) -> (B,)
        """Return the loss that each of these examples had, NaN for one that was not among them."""
        own = [] if self.digests is None else self.digests.tolist()
        known = dict(zip(own, self.losses[: len(own)].tolist(), strict=True))
        found = [known.get(digest, torch.nan) for digest in digests.tolist()]
        return torch.tensor(found, dtype=torch.float64, device="cpu")


def another_loss(held: Tensor, here: Tensor) -> int | None:  # (B,), (B,)
    """Return where losses differ most from those held, if by more than rounding; NaN is one that is not known."""
    gaps = (here - held).abs().nan_to_num()
    if not len(gaps) or float(gaps.max()) <= _SAME_LOSS * max(float(held.nan_to_num().abs().max()), 1e-3):
        return None
    return int(gaps.argmax())


def fingerprint(tensors: Mapping[str, Tensor], selected: Container[str]) -> str:
    """Hash the names, shapes, types and numbers that a task computes with, and which of them are selected."""
    names = track(sorted(tensors), "Fingerprint")
    labels = ((f"{n} {tuple(tensors[n].shape)} {tensors[n].dtype} {n in selected};", tensors[n]) for n in names)
    return hash_arrays(labels)
