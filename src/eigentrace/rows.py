"""The rows that gradients are projected on: dense vectors, single coordinates, or both side by side."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from eigentrace.vector import Layout


class Rows(Protocol):
    """K linear functions of the parameter vector."""

    @property
    def count(self) -> int:
        """K."""
        ...

    def dense(self, start: int, stop: int) -> Tensor:  # (stop - start, P)
        """Write some of the rows out."""
        ...

    def apply(self, gradients: Mapping[str, Tensor]) -> Tensor:  # {name: (B, *s)} -> (B, K)
        """Multiply per-example gradients, parameter by parameter so that they are never copied side by side."""
        ...


@dataclass(frozen=True)
class DenseRows:
    """Rows given as a matrix."""

    matrix: Tensor  # (K, P)
    layout: Layout

    @property
    def count(self) -> int:
        """K."""
        return self.matrix.shape[0]

    def dense(self, start: int, stop: int) -> Tensor:
        """Write some of the rows out."""
        return self.matrix[start:stop]

    def apply(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """Multiply per-example gradients."""
        parts = self.matrix.split(self.layout.sizes, dim=1)
        products = (
            gradients[name].reshape(len(gradients[name]), -1).to(part.dtype) @ part.T
            for name, part in zip(self.layout.names, parts, strict=True)
        )
        first = next(products)
        return sum(products, first)


@dataclass(frozen=True)
class UnitRows:
    """Rows that each pick one coordinate: K numbers instead of K × P."""

    index: Tensor  # (K,) positions in the flat vector
    layout: Layout

    @property
    def count(self) -> int:
        """K."""
        return len(self.index)

    def dense(self, start: int, stop: int) -> Tensor:
        """Write some of the rows out."""
        index = self.index[start:stop].to(self.layout.device)
        rows = torch.zeros(len(index), self.layout.numel, dtype=self.layout.dtype, device=self.layout.device)
        return rows.scatter_(1, index[:, None], 1.0)

    def apply(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """Pick the coordinates out of per-example gradients."""
        first = gradients[self.layout.names[0]]
        result = torch.zeros(len(first), self.count, dtype=self.layout.dtype, device=first.device)
        offset = 0
        for name, size in zip(self.layout.names, self.layout.sizes, strict=True):
            here = ((self.index >= offset) & (self.index < offset + size)).nonzero().squeeze(1)
            picked = gradients[name].reshape(len(first), -1)[:, (self.index[here] - offset).to(first.device)]
            result[:, here.to(first.device)] = picked.to(result.dtype)
            offset += size
        return result


@dataclass(frozen=True)
class StackedRows:
    """Several kinds of rows, one after the other."""

    parts: tuple[Rows, ...]

    @property
    def count(self) -> int:
        """K."""
        return sum(part.count for part in self.parts)

    def dense(self, start: int, stop: int) -> Tensor:
        """Write some of the rows out."""
        pieces, offset = [], 0
        for part in self.parts:
            low, high = max(start - offset, 0), min(stop - offset, part.count)
            if low < high:
                pieces.append(part.dense(low, high))
            offset += part.count
        return torch.cat(pieces)

    def apply(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """Multiply per-example gradients with every part."""
        return torch.cat([part.apply(gradients) for part in self.parts], dim=1)
