"""A seal on a model's numbers: a fit answers for the parameters it was made at, not for whatever they became."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from eigentrace.errors import MismatchError

# Sums in another order (more threads, say) differ by rounding; a step of training moves them by far more.
_TOL = 1e-9


@dataclass(frozen=True)
class Seal:
    """Two sums of each tensor of a model: cheap to take again, and moved by any training.

    Storage addresses and version counters would be cheaper still, but writes through `.data` leave them alone.
    """

    sums: Mapping[str, tuple[float, float, int]]

    @staticmethod
    def of(model: nn.Module) -> "Seal":
        """Seal a model as it is."""
        return Seal({name: _sums(tensor) for name, tensor in _tensors(model).items()})

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
