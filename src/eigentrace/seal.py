"""A seal on a model's numbers: a fit answers for the parameters it was made at, not for whatever they became."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from eigentrace.errors import MismatchError


@dataclass(frozen=True)
class Seal:
    """What the tensors of a model were: where they lay, how often they had been written to, and two sums of each."""

    marks: Mapping[str, tuple[int, int]]
    sums: Mapping[str, tuple[float, float]]

    @staticmethod
    def of(model: nn.Module) -> "Seal":
        """Seal a model as it is."""
        tensors = _tensors(model)
        return Seal({n: _mark(t) for n, t in tensors.items()}, {n: _sums(t) for n, t in tensors.items()})

    def check(self, model: nn.Module) -> None:
        """Stop if the model holds other numbers now. Writing the same numbers again is no change."""
        tensors = _tensors(model)
        moved = [name for name, mark in self.marks.items() if name not in tensors or _mark(tensors[name]) != mark]
        changed = [name for name in moved if name not in tensors or _sums(tensors[name]) != self.sums[name]]
        if changed:
            raise MismatchError(
                f"The model has changed since this fit was made ({len(changed)} of {len(self.marks)} tensors, first: "
                f"{changed[0]!r}): it was trained further, reloaded or moved. Make a new task and fit again, or put "
                "the weights of the fit back."
            )


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters()) | dict(model.named_buffers())


def _mark(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor._version


def _sums(tensor: Tensor) -> tuple[float, float]:
    flat = tensor.detach().double()
    return float(flat.sum().nan_to_num()), float(flat.square().sum().nan_to_num())
