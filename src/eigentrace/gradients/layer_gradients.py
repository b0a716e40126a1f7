"""Per-example gradients of one parameter, in the form in which a backward pass yields them.

Small ones come written out; those of a matrix that meets T tokens come as a sum of outer products (`outer.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from eigentrace.numeric.accumulate import wide


class LayerGradients(Protocol):
    """Gradients of B examples with respect to one parameter of p numbers."""

    @property
    def examples(self) -> int:
        """B."""
        ...

    def write(self, start: int, stop: int) -> Tensor:  # (n, p)
        """Write out the gradients of some examples."""
        ...

    def dot(self, directions: Tensor, budget: int) -> Tensor:  # (K, p) -> (B, K)
        """Multiply with dense directions."""
        ...

    def pick(self, index: Tensor) -> Tensor:  # (k,) -> (B, k)
        """Take single coordinates."""
        ...

    def square_norms(self, budget: int) -> Tensor:  # (B,)
        """Sum the squares of each example's gradient."""
        ...


@dataclass(frozen=True)
class Direct:
    """Gradients written out: biases, norms, and whatever else is small."""

    value: Tensor  # (B, p)

    @property
    def examples(self) -> int:
        """B."""
        return len(self.value)

    def write(self, start: int, stop: int) -> Tensor:
        """Return the gradients of some examples."""
        return self.value[start:stop]

    def dot(self, directions: Tensor, budget: int) -> Tensor:
        """Multiply with dense directions."""
        value = wide(self.value)
        return value @ directions.to(value.dtype).T

    def pick(self, index: Tensor) -> Tensor:
        """Take single coordinates."""
        return self.value[:, index]

    def square_norms(self, budget: int) -> Tensor:
        """Sum the squares."""
        return wide(self.value).square().sum(dim=1)


@dataclass(frozen=True)
class Written:
    """Gradients that can only be written out, some examples at a time: what a function of a parameter passes back."""

    write_out: Callable[[int, int], Tensor]  # (start, stop) -> (n, p)
    examples: int
    bytes_each: int

    def write(self, start: int, stop: int) -> Tensor:
        """Write out the gradients of some examples."""
        return self.write_out(start, stop)

    def dot(self, directions: Tensor, budget: int) -> Tensor:
        """Multiply with dense directions."""
        return self._over_chunks(lambda part: part.dot(directions, budget), budget)

    def pick(self, index: Tensor) -> Tensor:
        """Take single coordinates."""
        return self._over_chunks(lambda part: part.pick(index), self.bytes_each)

    def square_norms(self, budget: int) -> Tensor:
        """Sum the squares."""
        return self._over_chunks(lambda part: part.square_norms(budget), budget)

    def _over_chunks(self, function: Callable[[Direct], Tensor], budget: int) -> Tensor:
        at_once = max(1, budget // (2 * self.bytes_each))
        starts = range(0, self.examples, at_once)
        return torch.cat([function(Direct(self.write(s, min(s + at_once, self.examples)))) for s in starts])
