"""Per-example gradients of one parameter, in the form in which a backward pass yields them.

Small gradients are stored as a matrix (B, p); those of a matrix that is applied to T tokens are stored as the factors
of a sum of outer products (`outer_products.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from eigentrace.numeric.accumulate import wide


class LayerGradients(Protocol):
    """The gradients of B examples with respect to one parameter with p elements."""

    @property
    def examples(self) -> int:
        """The number of examples, B."""
        ...

    def write(self, start: int, stop: int) -> Tensor:  # (n, p)
        """Return the gradients of the examples from `start` to `stop` as a matrix."""
        ...

    def dot(self, directions: Tensor, budget: int) -> Tensor:  # (K, p) -> (B, K)
        """Multiply the gradients by dense directions, with temporary tensors of about `budget` bytes."""
        ...

    def pick(self, index: Tensor) -> Tensor:  # (k,) -> (B, k)
        """Return single coordinates of the gradients."""
        ...

    def square_norms(self, budget: int) -> Tensor:  # (B,)
        """Return the squared norm of each example's gradient."""
        ...


@dataclass(frozen=True)
class Direct:
    """Gradients stored as a matrix: of biases, normalisation layers, and other small parameters."""

    value: Tensor  # (B, p)

    @property
    def examples(self) -> int:
        """The number of examples, B."""
        return len(self.value)

    def write(self, start: int, stop: int) -> Tensor:
        """Return the gradients of the examples from `start` to `stop`."""
        return self.value[start:stop]

    def dot(self, directions: Tensor, budget: int) -> Tensor:
        """Multiply the gradients by dense directions."""
        value = wide(self.value)
        return value @ directions.to(value.dtype).T

    def pick(self, index: Tensor) -> Tensor:
        """Return single coordinates of the gradients."""
        return self.value[:, index]

    def square_norms(self, budget: int) -> Tensor:
        """Return the squared norm of each gradient."""
        return wide(self.value).square().sum(dim=1)


@dataclass(frozen=True)
class OnDemand:
    """Gradients computed on demand, some examples at a time: those of a parameter behind a function such as a slice."""

    write_out: Callable[[int, int], Tensor]  # (start, stop) -> (n, p)
    examples: int
    bytes_each: int

    def write(self, start: int, stop: int) -> Tensor:
        """Return the gradients of the examples from `start` to `stop`."""
        return self.write_out(start, stop)

    def dot(self, directions: Tensor, budget: int) -> Tensor:
        """Multiply the gradients by dense directions."""
        return self._over_chunks(lambda part: part.dot(directions, budget), budget)

    def pick(self, index: Tensor) -> Tensor:
        """Return single coordinates of the gradients."""
        return self._over_chunks(lambda part: part.pick(index), self.bytes_each)

    def square_norms(self, budget: int) -> Tensor:
        """Return the squared norm of each gradient."""
        return self._over_chunks(lambda part: part.square_norms(budget), budget)

    def _over_chunks(self, function: Callable[[Direct], Tensor], budget: int) -> Tensor:
        at_once = max(1, budget // (2 * self.bytes_each))
        starts = range(0, self.examples, at_once)
        return torch.cat([function(Direct(self.write(s, min(s + at_once, self.examples)))) for s in starts])
