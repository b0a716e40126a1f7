"""The flat parameter vector and its per-parameter views.

Legend of shapes, used in every comment of the package: N training examples, Q queries, B batch, P parameters,
M Krylov steps, K kept directions, C checkpoints, T tokens.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from eigentrace.settings import counted


def normal(shape: tuple[int, ...], generator: torch.Generator, like: "Layout") -> Tensor:
    """Draw Gaussian numbers on the CPU, so that a seed gives the same numbers on every device."""
    return torch.randn(shape, generator=generator, dtype=like.dtype, device="cpu").to(like.device)


@dataclass(frozen=True)
class Layout:
    """Positions of the selected parameters in one flat vector of P numbers."""

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    dtypes: tuple[torch.dtype, ...]
    device: torch.device

    @staticmethod
    def of(params: Mapping[str, Tensor]) -> "Layout":
        """Create the layout of named tensors, in their order."""
        tensors = list(params.values())
        return Layout(
            names=tuple(params),
            shapes=tuple(t.shape for t in tensors),
            dtypes=tuple(t.dtype for t in tensors),
            device=tensors[0].device,
        )

    def __repr__(self) -> str:
        return f"<Layout: {self.numel:,} parameters in {counted(len(self.names), 'tensor')}, on {self.device}>"

    @property
    def sizes(self) -> list[int]:
        """Number of elements of each parameter."""
        return [math.prod(shape) for shape in self.shapes]

    @property
    def numel(self) -> int:
        """P, the length of the flat vector."""
        return sum(self.sizes)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of flat vectors: float64 if any parameter is float64, else float32; never half precision."""
        return torch.float64 if torch.float64 in self.dtypes else torch.float32

    def span(self, name: str) -> slice:
        """Return the slice of the flat vector that contains a parameter."""
        return self._spans[name]

    @cached_property
    def _spans(self) -> dict[str, slice]:
        stops = list(accumulate(self.sizes))
        return {n: slice(stop - size, stop) for n, size, stop in zip(self.names, self.sizes, stops, strict=True)}

    def flatten(self, tensors: Mapping[str, Tensor], batch_dims: int = 0) -> Tensor:  # {name: (*b, *s)} -> (*b, P)
        """Concatenate named tensors into one flat vector (or one per leading index)."""
        # Explicit sizes: neither flatten nor reshape(-1) supports both scalar and empty parameters.
        parts = [
            tensors[name].reshape((*tensors[name].shape[:batch_dims], size)).to(self.dtype)
            for name, size in zip(self.names, self.sizes, strict=True)
        ]
        return torch.cat(parts, dim=-1)

    def unflatten(self, flat: Tensor) -> dict[str, Tensor]:  # (*b, P) -> {name: (*b, *s)}
        """Split a flat vector into named tensors, each in the dtype of its parameter."""
        leading = flat.shape[:-1]
        pieces = flat.split(self.sizes, dim=-1)
        return {
            name: piece.reshape((*leading, *shape)).to(dtype)
            for name, piece, shape, dtype in zip(self.names, pieces, self.shapes, self.dtypes, strict=True)
        }
