"""The two sides of a per-example gradient: numbers per token, lookups, and what a convolution's kernel sees."""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from eigentrace.wide import times, wide


class Factor(Protocol):
    """One side of a sum of outer products: `width` numbers for each of `tokens` terms of each example and group."""

    @property
    def examples(self) -> int:
        """B."""
        ...

    @property
    def tokens(self) -> int:
        """T."""
        ...

    @property
    def width(self) -> int:
        """Numbers per token."""
        ...

    def take(self, start: int, stop: int) -> Tensor:  # (n, g, T, width)
        """Write out some examples."""
        ...


@dataclass(frozen=True)
class Dense:
    """A factor given as numbers."""

    value: Tensor  # (B, g, T, width)

    @property
    def examples(self) -> int:
        """B."""
        return len(self.value)

    @property
    def tokens(self) -> int:
        """T."""
        return self.value.shape[2]

    @property
    def width(self) -> int:
        """Numbers per token."""
        return self.value.shape[3]

    def take(self, start: int, stop: int) -> Tensor:
        """Return some examples."""
        return self.value[start:stop]


@dataclass(frozen=True)
class OneHot:
    """A factor that picks one of `width` rows per token, as a lookup does."""

    index: Tensor  # (B, T)
    width: int

    @property
    def examples(self) -> int:
        """B."""
        return len(self.index)

    @property
    def tokens(self) -> int:
        """T."""
        return self.index.shape[1]

    def take(self, start: int, stop: int) -> Tensor:
        """Write out some examples."""
        return F.one_hot(self.index[start:stop], self.width)[:, None]


@dataclass(frozen=True)
class Windows:
    """What a convolution's kernel sees: one token per output position, unfolded only when it is asked for."""

    value: Tensor  # (B·m, g·c, *spatial), padded
    examples: int
    groups: int
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]

    @property
    def positions(self) -> tuple[int, ...]:
        """Output positions along each spatial dimension."""
        sizes = zip(self.value.shape[2:], self.kernel, self.stride, self.dilation, strict=True)
        return tuple((size - (k - 1) * d - 1) // s + 1 for size, k, s, d in sizes)

    @property
    def tokens(self) -> int:
        """T, all output positions of an example."""
        return len(self.value) // self.examples * math.prod(self.positions)

    @property
    def width(self) -> int:
        """Numbers under the kernel, within one group."""
        return self.value.shape[1] // self.groups * math.prod(self.kernel)

    def take(self, start: int, stop: int) -> Tensor:
        """Unfold some examples."""
        merged, dims = len(self.value) // self.examples, len(self.kernel)
        x = self.value[start * merged : stop * merged]
        columns = self._columns(x) if merged == 1 else None  # (n, g·width, T)
        if columns is not None:
            return columns.unflatten(1, (self.groups, self.width)).transpose(2, 3)
        for axis, (k, s, d) in enumerate(zip(self.kernel, self.stride, self.dilation, strict=True)):
            x = x.unfold(2 + axis, (k - 1) * d + 1, s)[..., ::d]
        x = x.reshape(stop - start, merged, self.groups, -1, *x.shape[2:])  # (n, m, g, c, *positions, *kernel)
        order = (0, 2, 1, *range(4, 4 + dims), 3, *range(4 + dims, 4 + 2 * dims))
        return x.permute(order).reshape(stop - start, self.groups, self.tokens, self.width)

    def _columns(self, x: Tensor) -> Tensor | None:
        """Unfold the quick way, if there is one: nothing is copied for kernels of one number."""
        if math.prod(self.kernel) == 1:
            for axis, step in enumerate(self.stride):
                x = x.unfold(2 + axis, 1, step).squeeze(-1)
            return x.flatten(2)
        if x.device.type == "cpu":  # views first and one copy: half the time of im2col
            for axis, (k, s, d) in enumerate(zip(self.kernel, self.stride, self.dilation, strict=True)):
                x = x.unfold(2 + axis, (k - 1) * d + 1, s)[..., ::d]
            dims = len(self.kernel)
            return x.permute(0, 1, *range(2 + dims, 2 + 2 * dims), *range(2, 2 + dims)).reshape(
                len(x), self.groups * self.width, -1
            )
        if len(self.kernel) == 2 and x.is_floating_point():
            return F.unfold(x, self.kernel, self.dilation, 0, self.stride)
        return None


def rotated(factor: Factor, basis: Tensor | None, start: int = 0, stop: int | None = None) -> Factor:
    """Turn the numbers of every token of some examples (all, if not told) into another basis; None leaves them."""
    stop = factor.examples if stop is None else stop
    if basis is None and (start, stop) == (0, factor.examples):
        return factor
    if isinstance(factor, OneHot):
        index = factor.index[start:stop]
        return OneHot(index, factor.width) if basis is None else Dense(basis[index][:, None])
    whole = factor.take(start, stop)
    return Dense(whole if basis is None else whole @ basis.to(whole.dtype))


def token_products(a: Factor, b: Factor, start: int, stop: int) -> Tensor:  # (n, g, T, T')
    """Multiply every token of one factor with every token of another, example by example."""
    if isinstance(a, OneHot) and isinstance(b, OneHot):
        return (a.index[start:stop, :, None] == b.index[start:stop, None, :])[:, None].to(torch.float32)
    if isinstance(a, OneHot):
        index = a.index[start:stop, :, None].expand(-1, -1, b.tokens)
        return wide(b.take(start, stop)[:, 0].transpose(1, 2).gather(1, index))[:, None]
    if isinstance(b, OneHot):
        return token_products(b, a, start, stop).transpose(2, 3)
    left, right = a.take(start, stop), b.take(start, stop)
    groups = left.shape[1]
    products = times(left.flatten(0, 1), right.flatten(0, 1).transpose(1, 2))
    return products.unflatten(0, (-1, groups))
