"""Per-example gradients Σₜ leftₜ ⊗ rightₜ of a matrix that is applied to T tokens.

Products with directions, norms and rotated coordinates are computed from the factors, which are dense values, the
indices of a lookup, or the windows of a convolution. Gradients are materialised only in chunks, where that is cheaper.
"""

import math
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from eigentrace.gradients.layer_gradients import LayerGradients, OnDemand
from eigentrace.numeric.accumulate import times, wide, wide_type


class Factor(Protocol):
    """One side of a sum of outer products: a vector of `width` numbers per token, example and group."""

    @property
    def examples(self) -> int:
        """The number of examples, B."""
        ...

    @property
    def tokens(self) -> int:
        """The number of tokens per example, T."""
        ...

    @property
    def width(self) -> int:
        """The length of the vector of one token."""
        ...

    def take(self, start: int, stop: int) -> Tensor:  # (n, g, T, width)
        """Return the examples from `start` to `stop` as a dense tensor."""
        ...


@dataclass(frozen=True)
class Dense:
    """A factor stored as a dense tensor."""

    value: Tensor  # (B, g, T, width)

    @property
    def examples(self) -> int:
        """The number of examples, B."""
        return len(self.value)

    @property
    def tokens(self) -> int:
        """The number of tokens per example, T."""
        return self.value.shape[2]

    @property
    def width(self) -> int:
        """The length of the vector of one token."""
        return self.value.shape[3]

    def take(self, start: int, stop: int) -> Tensor:
        """Return the examples from `start` to `stop`."""
        return self.value[start:stop]


@dataclass(frozen=True)
class OneHot:
    """A factor of one-hot vectors, as in an embedding lookup: one index below `width` per token."""

    index: Tensor  # (B, T)
    width: int

    @property
    def examples(self) -> int:
        """The number of examples, B."""
        return len(self.index)

    @property
    def tokens(self) -> int:
        """The number of tokens per example, T."""
        return self.index.shape[1]

    def take(self, start: int, stop: int) -> Tensor:
        """Return the examples from `start` to `stop` as a dense tensor."""
        return F.one_hot(self.index[start:stop], self.width)[:, None]


@dataclass(frozen=True)
class Windows:
    """The windows of a convolution: one token per output position, unfolded on demand."""

    value: Tensor  # (B·m, g·c, *spatial), padded
    examples: int
    groups: int
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]

    @property
    def positions(self) -> tuple[int, ...]:
        """The number of output positions along each spatial dimension."""
        sizes = zip(self.value.shape[2:], self.kernel, self.stride, self.dilation, strict=True)
        return tuple((size - (k - 1) * d - 1) // s + 1 for size, k, s, d in sizes)

    @property
    def tokens(self) -> int:
        """The number of output positions of an example, T."""
        return len(self.value) // self.examples * math.prod(self.positions)

    @property
    def width(self) -> int:
        """The number of inputs in a window, within one group."""
        return self.value.shape[1] // self.groups * math.prod(self.kernel)

    def take(self, start: int, stop: int) -> Tensor:
        """Unfold the examples from `start` to `stop`."""
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
        """Unfold by the fastest method, or return None if there is none; kernels of size 1 need no copy."""
        if math.prod(self.kernel) == 1:
            for axis, step in enumerate(self.stride):
                x = x.unfold(2 + axis, 1, step).squeeze(-1)
            return x.flatten(2)
        if x.device.type == "cpu":  # strided views and a single copy take half the time of im2col
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
    """Express the token vectors of some examples (default: all) in another basis; None keeps the standard basis."""
    stop = factor.examples if stop is None else stop
    if basis is None and (start, stop) == (0, factor.examples):
        return factor
    if isinstance(factor, OneHot):
        index = factor.index[start:stop]
        return OneHot(index, factor.width) if basis is None else Dense(basis[index][:, None])
    whole = factor.take(start, stop)
    return Dense(whole if basis is None else whole @ basis.to(whole.dtype))


def token_products(a: Factor, b: Factor, start: int, stop: int) -> Tensor:  # (n, g, T, T')
    """Return the inner products between all tokens of two factors, for each example."""
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


# Floating-point operations per byte moved, at equal time. H200: 600 TFLOP/s in bf16, 50 in fp32, against 3.3 TB/s for a
# batched product; a CPU core: about 50 GFLOP/s against 6 GB/s.
_INTENSITY = {("cuda", 2): 180.0, ("cuda", 4): 15.0}
_CPU_INTENSITY = 8.0
# Slowdown of contraction: it runs at 450 to 700 TFLOP/s, the products of materialised gradients at full speed.
_CONTRACTION_SLOWDOWN = 1.2
# Bytes of materialised gradients at a time. A GPU needs large products; on a CPU a chunk should stay in the cache.
_LARGEST_CHUNK = {"cuda": 2**30, "cpu": 2**24}
_LARGEST_GATHER = {"cuda": 2**30, "cpu": 2**20}
# With more than 1/8 of all rotated coordinates wanted, all are computed: picking is about 8 times slower per number.
_GRID_SHARE = 8
# Examples per chunk: enough to reuse each slice of the directions, few enough to leave memory for long slices.
_EXAMPLES_AT_ONCE = 512
# Slices of a matrix start at multiples of this many elements: matrix units read unaligned data at half the speed.
_ALIGNED = 64


class CustomOperations(Protocol):
    """The products of `Outer` gradients as single operations of a traced graph, which does not contain their chunks."""

    def dot(self, form: "Outer", directions: Tensor, budget: int) -> Tensor:
        """Multiply the gradients by dense directions."""
        ...

    def square_norms(self, form: "Outer", budget: int) -> Tensor:
        """Return the squared norm of each gradient."""
        ...


# Set while a pass is traced.
CUSTOM_OPERATIONS: ContextVar[CustomOperations | None] = ContextVar("custom_operations", default=None)


@dataclass(frozen=True)
class Outer:
    """Flattened gradients Σₜ leftₜ ⊗ rightₜ of a matrix (g, L, R), never materialised for the whole batch."""

    left: Factor
    right: Factor
    examples: int
    groups: int = 1

    @property
    def numel(self) -> int:
        """The number of elements of one gradient."""
        return self.groups * self.left.width * self.right.width

    def transposed(self) -> "Outer":
        """Return the gradients of the transposed matrix."""
        return Outer(self.right, self.left, self.examples)

    def write(self, start: int, stop: int) -> Tensor:
        """Return the gradients of the examples from `start` to `stop` as a matrix."""
        return self._write(start, stop, slice(None)).reshape(stop - start, self.numel)

    def dot(self, directions: Tensor, budget: int) -> Tensor:
        """Multiply the gradients by dense directions, by the cheapest method."""
        operations = CUSTOM_OPERATIONS.get()
        if operations is not None:
            return operations.dot(self, directions, budget)
        if not self.left.tokens or not self.numel:
            return torch.zeros(
                self.examples, len(directions), dtype=wide_type(directions.dtype), device=directions.device
            )
        if isinstance(self.left, OneHot):
            return self._look_up(directions, budget)
        if self.groups == 1 and self._contraction_is_cheaper(directions):
            return self._contract(directions, budget)
        return self._materialise(directions, budget)

    def dot_and_square_norms(self, directions: Tensor, budget: int) -> tuple[Tensor, Tensor]:
        """Return `dot` and `square_norms`, materialising gradients only once if both need them."""
        materialised = self.left.tokens and self.numel and not isinstance(self.left, OneHot)
        contracted = self.groups == 1 and self._contraction_is_cheaper(directions)
        if CUSTOM_OPERATIONS.get() is not None or not materialised or contracted or self._token_products_are_cheaper():
            return self.dot(directions, budget), self.square_norms(budget)
        squares = torch.zeros(self.examples, dtype=wide_type(directions.dtype), device=directions.device)
        return self._materialise(directions, budget, squares), squares

    def pick(self, index: Tensor) -> Tensor:
        """Return single coordinates, each a sum over tokens of the product of two numbers."""
        group, rest = index // (self.left.width * self.right.width), index % (self.left.width * self.right.width)
        i, j = rest // self.right.width, rest % self.right.width
        return self._products_at(group, i, j, self.left, self.right)

    def rotate(
        self, left: Tensor | None, right: Tensor | None, pairs: Tensor, budget: int = 2**28
    ) -> Tensor:  # (2, k) -> (B, k)
        """Return coordinates in a rotated basis: ⟨left[:, i] ⊗ right[:, j], gradient⟩ for each pair (i, j).

        Rotating the factors costs T·(L·r + R·s), dense directions at least k·L·R. A basis of None means no rotation.
        """
        i, j = pairs
        found = []
        taken = sum(side.width for side in (self.left, self.right) if not isinstance(side, OneHot))
        numbers = max(self.left.tokens, 1) * (4 * len(i) + taken + 1)
        for start, stop in self._spans(self.examples, max(1, budget // (8 * numbers))):
            a, b = rotated(self.left, left, start, stop), rotated(self.right, right, start, stop)
            part = Outer(a, b, stop - start)
            grid = a.width * b.width
            # Many coordinates of a small grid: compute the whole grid by one matrix product.
            if not isinstance(a, OneHot) and _GRID_SHARE * len(i) > grid and self.left.tokens > 1:
                found.append(part.write(0, stop - start)[:, i * b.width + j])
            else:
                found.append(part._products_at(torch.zeros_like(i), i, j, a, b))
        return torch.cat(found)

    def square_norms(self, budget: int) -> Tensor:
        """Return squared norms, from T × T token products or from materialised gradients, whichever is cheaper."""
        operations = CUSTOM_OPERATIONS.get()
        if operations is not None:
            return operations.square_norms(self, budget)
        if not self.left.tokens or not self.numel:
            return wide(_one_example(self.right)).new_zeros(self.examples)
        if isinstance(self.left, OneHot) or self._token_products_are_cheaper():
            return self.inner(self, budget)
        chunks = self._chunks(budget)
        squares = [wide(self._write(s, e, slice(None))).square().sum(dim=(1, 2, 3)) for s, e in chunks]
        return torch.cat(squares)

    def inner(self, other: "Outer", budget: int) -> Tensor:  # (B,)
        """Return inner products with other gradients of the matrix: Σ (left·left')(right·right') over token pairs."""
        bytes_each = 8 * self.groups * self.left.tokens * other.left.tokens
        at_once = max(1, budget // max(bytes_each, 1))
        results = []
        for start in range(0, self.examples, at_once):
            stop = min(start + at_once, self.examples)
            left = token_products(self.left, other.left, start, stop)
            right = token_products(self.right, other.right, start, stop)
            results.append((left * right).sum(dim=(1, 2, 3)))
        return torch.cat(results)

    def _token_products_are_cheaper(self) -> bool:
        """Compare the cost per parameter of T × T token products with that of materialising and squaring."""
        tokens = self.left.tokens
        by_tokens = 2 * tokens * tokens * (1 / self.left.width + 1 / self.right.width)
        return by_tokens < 2 * tokens + _intensity(_one_example(self.right))

    def _contraction_is_cheaper(self, directions: Tensor) -> bool:
        """Compare the cost per parameter of contracting directions token by token with that of materialising."""
        tokens, count = self.left.tokens, len(directions)
        traffic = 2 * directions.element_size() * _intensity(directions)
        longer = max(self.left.width, self.right.width)
        contracted = 2 * _CONTRACTION_SLOWDOWN * tokens * count + traffic * tokens * count / longer
        return contracted < 2 * (tokens + count) + traffic

    def _contract(self, directions: Tensor, budget: int) -> Tensor:
        """Contract the directions with the wider factor of each token, then with the other factor."""
        count, width, other = len(directions), self.left.width, self.right.width
        cube = directions.unflatten(1, (width, other))  # (K, L, R)
        wide, narrow = (self.left, self.right) if width >= other else (self.right, self.left)
        cube = cube if width >= other else cube.transpose(1, 2)  # (K, wide, narrow)
        at_once = max(1, budget // (count * narrow.tokens * narrow.width * directions.element_size()))
        results = []
        for start in range(0, self.examples, at_once):
            stop = min(start + at_once, self.examples)
            a = wide.take(start, stop).to(directions.dtype).reshape(-1, wide.width)  # (n·T, wide)
            half = torch.matmul(a[None], cube).view(count, stop - start, -1)  # (K, n, T·narrow)
            results.append(_elementwise_dot(half, narrow.take(start, stop)))
        return torch.cat(results)

    def _materialise(self, directions: Tensor, budget: int, squares: Tensor | None = None) -> Tensor:
        """Materialise gradients in chunks, multiply them by the directions, and add squared norms to `squares`."""
        dtype, size = wide_type(directions.dtype), self.left.width * self.right.width
        out = torch.zeros(len(directions), self.examples, dtype=dtype, device=directions.device)
        # Chunks of whole groups, or of coordinates of the left factor: both are contiguous in the directions.
        units, unit = (self.groups, size) if self.groups > 1 else (self.left.width, self.right.width)
        largest = min(budget, _LARGEST_CHUNK.get(directions.device.type, 2**30)) // (unit * directions.element_size())
        for start, stop in self._spans(self.examples, min(_EXAMPLES_AT_ONCE, max(1, largest))):
            left, right = (f.take(start, stop).to(directions.dtype) for f in (self.left, self.right))
            for low, high in self._spans(units, _aligned_length(largest // (stop - start))):
                part = left[:, low:high] if self.groups > 1 else _packed(left[..., low:high])
                other = right[:, low:high] if self.groups > 1 else right
                written = (part.transpose(2, 3) @ other).reshape(stop - start, -1)
                # Directions come first: the long side of the result is then the examples, which is fast at any K.
                out[:, start:stop] += times(directions[:, low * unit : high * unit], written.T)
                if squares is not None:
                    squares[start:stop] += torch.linalg.vector_norm(written, dim=1, dtype=dtype).square()
        return out.T

    def _look_up(self, directions: Tensor, budget: int) -> Tensor:
        """Gather the entries of the directions at each token, as many directions at a time as stay in the cache."""
        index, width = self.left.index, self.right.width  # type: ignore[attr-defined]
        cube = directions.unflatten(1, (self.left.width, width))  # (K, L, R)
        largest = min(budget, _LARGEST_GATHER.get(directions.device.type, 2**30)) // (width * directions.element_size())
        results = []
        for start, stop in self._spans(self.examples, max(1, largest // self.left.tokens)):
            flat, right = index[start:stop].reshape(-1), self.right.take(start, stop).to(directions.dtype)
            spans = self._spans(len(directions), max(1, largest // len(flat)))
            parts = (cube[low:high].index_select(1, flat).view(high - low, stop - start, -1) for low, high in spans)
            results.append(torch.cat([_elementwise_dot(part, right) for part in parts], dim=1))
        return torch.cat(results)

    def _products_at(self, group: Tensor, i: Tensor, j: Tensor, left: Factor, right: Factor) -> Tensor:
        """Return Σₜ left[group, t, i] · right[group, t, j] of each example, for each triple (group, i, j)."""
        b = right.take(0, self.examples)
        if isinstance(left, OneHot):
            hit = left.index[:, :, None] == i  # (B, T, k)
            return (hit * b[:, 0][:, :, j]).sum(dim=1)
        a = left.take(0, self.examples)
        # (k, B, T): separated advanced indices put their dimension first.
        return (a[:, group, :, i] * b[:, group, :, j]).sum(dim=2).T

    def _write(self, start: int, stop: int, span: slice) -> Tensor:  # (n, g, l, R)
        left, right = self.left.take(start, stop), self.right.take(start, stop)
        dtype = torch.promote_types(left.dtype, right.dtype)
        return left[..., span].transpose(2, 3).to(dtype) @ right.to(dtype)

    def _chunks(self, budget: int) -> list[tuple[int, int]]:
        return self._spans(self.examples, max(1, budget // (8 * self.numel)))

    @staticmethod
    def _spans(total: int, at_once: int) -> list[tuple[int, int]]:
        return [(start, min(start + at_once, total)) for start in range(0, total, at_once)]


def square_norms(forms: Sequence[LayerGradients], budget: int) -> Tensor:  # (B,)
    """Return the squared norms of gradients that are sums of several forms, of a parameter used more than once."""
    if len(forms) == 1:
        return forms[0].square_norms(budget)
    if all(isinstance(form, Outer) and form.groups == 1 for form in forms):
        outers: Sequence[Outer] = forms  # type: ignore[assignment]
        crossed = [a.inner(b, budget) for i, a in enumerate(outers) for b in outers[i + 1 :]]
        return sum((f.square_norms(budget) for f in outers), 2 * sum(crossed))  # type: ignore[return-value]
    first = forms[0].write(0, 1)
    whole = OnDemand(
        lambda start, stop: sum(wide(form.write(start, stop)) for form in forms),  # type: ignore[arg-type,return-value]
        forms[0].examples,
        first.shape[1] * 4 * (len(forms) + 1),
    )
    return whole.square_norms(budget)


def _elementwise_dot(half: Tensor, other: Tensor) -> Tensor:  # (K, n, m), (n, ...) of m numbers -> (n, K)
    """Multiply elementwise and sum, overwriting `half`: much faster than batched matrix-vector products."""
    half.mul_(other.reshape(len(other), -1))
    return half.sum(dim=2, dtype=wide_type(half.dtype)).T


def _aligned_length(count: int) -> int:
    """Round the length of a slice down so that the next slice starts aligned, if it is long enough."""
    return max(1, count // _ALIGNED * _ALIGNED or count)


def _packed(piece: Tensor) -> Tensor:
    """Copy columns of a matrix whose width breaks alignment, such as a vocabulary's, into an aligned matrix."""
    return piece.contiguous() if piece.is_cuda and piece.stride(-2) % 8 else piece


def _one_example(factor: Factor) -> Tensor:
    return factor.take(0, 1)


def _intensity(like: Tensor) -> float:
    return _INTENSITY.get((like.device.type, like.element_size()), _CPU_INTENSITY)
