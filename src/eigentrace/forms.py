"""Per-example gradients of one parameter, in the form in which a backward pass yields them.

A matrix that meets T tokens has the gradient Σₜ leftₜ ⊗ rightₜ. That sum is multiplied with rows, normed and rotated
from its factors; it is written out only a chunk at a time, and only where that is cheaper.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

# Floating-point operations that take as long as moving one byte. H200: 600 TFLOP/s in bf16, 50 in fp32, against
# 3.3 TB/s through a batched product and back; a CPU core: some 50 GFLOP/s against 6 GB/s.
_INTENSITY = {("cuda", 2): 180.0, ("cuda", 4): 15.0}
_CPU_INTENSITY = 8.0
# Written-out gradients at a time. A GPU wants long products; on a CPU a chunk should stay in the cache.
_LARGEST_CHUNK = {"cuda": 2**30, "cpu": 2**23}
# Examples of a chunk: enough to reuse each piece of the rows, few enough to leave room for long pieces.
_EXAMPLES_AT_ONCE = 256


class Factor(Protocol):
    """One side of a sum of outer products: `width` numbers for each of `tokens` terms of each example and group."""

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
        for axis, (k, s, d) in enumerate(zip(self.kernel, self.stride, self.dilation, strict=True)):
            x = x.unfold(2 + axis, (k - 1) * d + 1, s)[..., ::d]
        x = x.reshape(stop - start, merged, self.groups, -1, *x.shape[2:])  # (n, m, g, c, *positions, *kernel)
        order = (0, 2, 1, *range(4, 4 + dims), 3, *range(4 + dims, 4 + 2 * dims))
        return x.permute(order).reshape(stop - start, self.groups, self.tokens, self.width)


class Form(Protocol):
    """Gradients of B examples with respect to one parameter of p numbers."""

    @property
    def examples(self) -> int:
        """B."""
        ...

    def write(self, start: int, stop: int) -> Tensor:  # (n, p)
        """Write out the gradients of some examples."""
        ...

    def dot(self, rows: Tensor, budget: int) -> Tensor:  # (K, p) -> (B, K)
        """Multiply with dense rows."""
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

    def dot(self, rows: Tensor, budget: int) -> Tensor:
        """Multiply with dense rows."""
        wide = _wide(self.value)
        return wide @ rows.to(wide.dtype).T

    def pick(self, index: Tensor) -> Tensor:
        """Take single coordinates."""
        return self.value[:, index]

    def square_norms(self, budget: int) -> Tensor:
        """Sum the squares."""
        return _wide(self.value).square().sum(dim=1)


@dataclass(frozen=True)
class Written:
    """Gradients that can only be written out, some examples at a time: what a function of a parameter passes back."""

    write_out: Callable[[int, int], Tensor]  # (start, stop) -> (n, p)
    examples: int
    bytes_each: int

    def write(self, start: int, stop: int) -> Tensor:
        """Write out the gradients of some examples."""
        return self.write_out(start, stop)

    def dot(self, rows: Tensor, budget: int) -> Tensor:
        """Multiply with dense rows."""
        return self._over_chunks(lambda part: part.dot(rows, budget), budget)

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


@dataclass(frozen=True)
class Outer:
    """Gradients Σₜ leftₜ ⊗ rightₜ of a matrix (g, L, R), flattened: never written out for the whole batch."""

    left: Factor
    right: Factor
    examples: int
    groups: int = 1

    @property
    def numel(self) -> int:
        """p."""
        return self.groups * self.left.width * self.right.width

    def transposed(self) -> "Outer":
        """Return the gradients of the transposed matrix."""
        return Outer(self.right, self.left, self.examples)

    def write(self, start: int, stop: int) -> Tensor:
        """Write out the gradients of some examples."""
        return self._write(start, stop, slice(None)).reshape(stop - start, self.numel)

    def dot(self, rows: Tensor, budget: int) -> Tensor:
        """Multiply with dense rows, the cheapest way."""
        if isinstance(self.left, OneHot):
            return self._look_up(rows, budget)
        if self.groups == 1 and self._contracting_pays(rows):
            return self._contract(rows, budget)
        return self._materialise(rows, budget)

    def pick(self, index: Tensor) -> Tensor:
        """Take single coordinates: a product of two numbers per token."""
        group, rest = index // (self.left.width * self.right.width), index % (self.left.width * self.right.width)
        row, column = rest // self.right.width, rest % self.right.width
        return self._pairs(group, row, column, self.left, self.right)

    def rotate(self, left: Tensor | None, right: Tensor | None, pairs: Tensor) -> Tensor:  # (2, k) -> (B, k)
        """Take coordinates in a rotated basis: ⟨left[:, i] ⊗ right[:, j], gradient⟩ for each pair (i, j).

        Rotating the factors costs T·(L·r + R·s) where dense rows cost at least k·L·R. None stands for no rotation.
        """
        row, column = pairs
        zero = torch.zeros_like(row)
        a, b = _rotated(self.left, left, self.examples), _rotated(self.right, right, self.examples)
        return self._pairs(zero, row, column, a, b)

    def square_norms(self, budget: int) -> Tensor:
        """Sum the squares: by the T × T products between tokens, or by writing gradients out, whichever is cheaper."""
        tokens, left, right = self.left.tokens, self.left.width, self.right.width
        by_tokens = 2 * tokens * tokens * (1 / left + 1 / right)
        if isinstance(self.left, OneHot) or by_tokens < 2 * tokens + _intensity(_sample(self.right)):
            return self.inner(self, budget)
        chunks = self._chunks(budget)
        squares = [_wide(self._write(s, e, slice(None))).square().sum(dim=(1, 2, 3)) for s, e in chunks]
        return torch.cat(squares)

    def inner(self, other: "Outer", budget: int) -> Tensor:  # (B,)
        """Multiply gradients with another form's of the same matrix: Σ over pairs of tokens (left·left')(right·right')."""
        bytes_each = 8 * self.groups * self.left.tokens * other.left.tokens
        at_once = max(1, budget // max(bytes_each, 1))
        results = []
        for start in range(0, self.examples, at_once):
            stop = min(start + at_once, self.examples)
            left = _token_products(self.left, other.left, start, stop)
            right = _token_products(self.right, other.right, start, stop)
            results.append((left * right).sum(dim=(1, 2, 3)))
        return torch.cat(results)

    def _contracting_pays(self, rows: Tensor) -> bool:
        """Compare operations per parameter: write out and multiply, or carry every row through every token."""
        tokens, count = self.left.tokens, len(rows)
        traffic = 2 * rows.element_size() * _intensity(rows)
        wide = max(self.left.width, self.right.width)
        return 2 * tokens * count + traffic * tokens * count / wide < 2 * (tokens + count) + traffic

    def _contract(self, rows: Tensor, budget: int) -> Tensor:
        """Multiply rows with the wider factor of each token first, then with the other."""
        count, width, other = len(rows), self.left.width, self.right.width
        cube = rows.unflatten(1, (width, other))  # (K, L, R)
        wide, narrow = (self.left, self.right) if width >= other else (self.right, self.left)
        cube = cube if width >= other else cube.transpose(1, 2)  # (K, wide, narrow)
        at_once = max(1, budget // (count * narrow.tokens * narrow.width * rows.element_size()))
        results = []
        for start in range(0, self.examples, at_once):
            stop = min(start + at_once, self.examples)
            a = wide.take(start, stop).to(rows.dtype).reshape(-1, wide.width)  # (n·T, wide)
            half = torch.matmul(a[None], cube).view(count, stop - start, -1)  # (K, n, T·narrow)
            b = narrow.take(start, stop).to(rows.dtype).reshape(stop - start, -1, 1)
            results.append(_bmm(half.transpose(0, 1), b).squeeze(2))
        return torch.cat(results)

    def _materialise(self, rows: Tensor, budget: int) -> Tensor:
        """Write out a chunk of gradients, multiply it with the rows' chunk, and go on."""
        wide, size = _wide_type(rows.dtype), self.left.width * self.right.width
        out = torch.zeros(len(rows), self.examples, dtype=wide, device=rows.device)
        # Chunks of whole groups, or of the left factor's coordinates: contiguous in the rows either way.
        units, unit = (self.groups, size) if self.groups > 1 else (self.left.width, self.right.width)
        largest = min(budget, _LARGEST_CHUNK.get(rows.device.type, 2**30)) // (unit * rows.element_size())
        for start, stop in self._spans(self.examples, min(_EXAMPLES_AT_ONCE, max(1, largest))):
            left, right = (f.take(start, stop).to(rows.dtype) for f in (self.left, self.right))
            for low, high in self._spans(units, max(1, largest // (stop - start))):
                part = left[:, low:high] if self.groups > 1 else left[..., low:high]
                other = right[:, low:high] if self.groups > 1 else right
                written = (part.transpose(2, 3) @ other).reshape(stop - start, -1)
                # Rows first: the result's long side then is the examples, which suits the matrix units at any K.
                out[:, start:stop] += _mm(rows[:, low * unit : high * unit], written.T)
        return out.T

    def _look_up(self, rows: Tensor, budget: int) -> Tensor:
        """Gather the rows' entries of each token."""
        index, width = self.left.index, self.right.width  # type: ignore[attr-defined]
        cube = rows.unflatten(1, (self.left.width, width))  # (K, L, R)
        bytes_each = 2 * len(rows) * self.left.tokens * width * rows.element_size()
        results = []
        for start, stop in self._spans(self.examples, max(1, budget // max(bytes_each, 1))):
            picked = cube.index_select(1, index[start:stop].reshape(-1)).view(len(rows), stop - start, -1)
            right = self.right.take(start, stop).to(rows.dtype).reshape(stop - start, -1, 1)
            results.append(_bmm(picked.transpose(0, 1), right).squeeze(2))
        return torch.cat(results)

    def _pairs(self, group: Tensor, row: Tensor, column: Tensor, left: Factor, right: Factor) -> Tensor:
        b = right.take(0, self.examples)
        if isinstance(left, OneHot):
            hit = left.index[:, :, None] == row  # (B, T, k)
            return (hit * b[:, 0][:, :, column]).sum(dim=1)
        a = left.take(0, self.examples)
        # (k, B, T): the advanced indices stand apart, so they come first.
        return (a[:, group, :, row] * b[:, group, :, column]).sum(dim=2).T

    def _write(self, start: int, stop: int, rows: slice) -> Tensor:  # (n, g, l, R)
        left, right = self.left.take(start, stop), self.right.take(start, stop)
        dtype = torch.promote_types(left.dtype, right.dtype)
        return left[..., rows].transpose(2, 3).to(dtype) @ right.to(dtype)

    def _chunks(self, budget: int) -> list[tuple[int, int]]:
        return self._spans(self.examples, max(1, budget // (8 * self.numel)))

    @staticmethod
    def _spans(total: int, at_once: int) -> list[tuple[int, int]]:
        return [(start, min(start + at_once, total)) for start in range(0, total, at_once)]


def square_norms(forms: Sequence[Form], budget: int) -> Tensor:  # (B,)
    """Sum the squares of gradients that are sums of several forms: a parameter used more than once."""
    if len(forms) == 1:
        return forms[0].square_norms(budget)
    if all(isinstance(form, Outer) and form.groups == 1 for form in forms):
        outers: Sequence[Outer] = forms  # type: ignore[assignment]
        crossed = [a.inner(b, budget) for i, a in enumerate(outers) for b in outers[i + 1 :]]
        return sum((f.square_norms(budget) for f in outers), 2 * sum(crossed))  # type: ignore[return-value]
    first = forms[0].write(0, 1)
    whole = Written(
        lambda start, stop: sum(_wide(form.write(start, stop)) for form in forms),  # type: ignore[arg-type,return-value]
        forms[0].examples,
        first.shape[1] * 4 * (len(forms) + 1),
    )
    return whole.square_norms(budget)


def _rotated(factor: Factor, basis: Tensor | None, examples: int) -> Factor:
    if basis is None:
        return factor
    if isinstance(factor, OneHot):
        return Dense(basis[factor.index][:, None])
    whole = factor.take(0, examples)
    return Dense(whole @ basis.to(whole.dtype))


def _token_products(a: Factor, b: Factor, start: int, stop: int) -> Tensor:  # (n, g, T, T')
    if isinstance(a, OneHot) and isinstance(b, OneHot):
        return (a.index[start:stop, :, None] == b.index[start:stop, None, :])[:, None].to(torch.float32)
    if isinstance(a, OneHot):
        index = a.index[start:stop, :, None].expand(-1, -1, b.tokens)
        return _wide(b.take(start, stop)[:, 0].transpose(1, 2).gather(1, index))[:, None]
    if isinstance(b, OneHot):
        return _token_products(b, a, start, stop).transpose(2, 3)
    left, right = a.take(start, stop), b.take(start, stop)
    groups = left.shape[1]
    products = _bmm(left.flatten(0, 1), right.flatten(0, 1).transpose(1, 2))
    return products.unflatten(0, (-1, groups))


def _sample(factor: Factor) -> Tensor:
    return factor.take(0, 1)


def _intensity(like: Tensor) -> float:
    return _INTENSITY.get((like.device.type, like.element_size()), _CPU_INTENSITY)


def _wide_type(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(_wide_type(tensor.dtype))


def _mm(a: Tensor, b: Tensor) -> Tensor:
    """Multiply with sums in at least float32, without copying the factors where the device can."""
    if a.is_cuda and a.dtype == b.dtype == torch.bfloat16:
        return torch.mm(a, b, out_dtype=torch.float32)
    return _wide(a @ b)


def _bmm(a: Tensor, b: Tensor) -> Tensor:
    if a.is_cuda and a.dtype == b.dtype == torch.bfloat16:
        return torch.bmm(a, b, out_dtype=torch.float32)
    return _wide(a) @ _wide(b)
