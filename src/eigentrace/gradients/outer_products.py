"""Per-example gradients Σₜ leftₜ ⊗ rightₜ of a matrix that meets T tokens.

They are multiplied with directions, normed and rotated from their factors: numbers per token, lookups, and what a
kernel of a convolution sees. They are written out only a chunk at a time, and only where that is cheaper.
"""

import math
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from eigentrace.gradients.layer_gradients import LayerGradients, Written
from eigentrace.numeric.accumulate import times, wide, wide_type


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


# Floating-point operations that take as long as moving one byte. H200: 600 TFLOP/s in bf16, 50 in fp32, against
# 3.3 TB/s through a batched product and back; a CPU core: some 50 GFLOP/s against 6 GB/s.
_INTENSITY = {("cuda", 2): 180.0, ("cuda", 4): 15.0}
_CPU_INTENSITY = 8.0
# Carrying directions through tokens runs at 450 to 700 TFLOP/s, the products of written-out gradients at full speed.
_CARRYING = 1.2
# Written-out gradients at a time. A GPU wants long products; on a CPU a chunk should stay in the cache.
_LARGEST_CHUNK = {"cuda": 2**30, "cpu": 2**24}
_LARGEST_GATHER = {"cuda": 2**30, "cpu": 2**20}
# Share of a grid of rotated coordinates from which on all of it is computed: picking runs that much slower per number.
_GRID_SHARE = 8
# Examples of a chunk: enough to reuse each piece of the directions, few enough to leave room for long pieces.
_EXAMPLES_AT_ONCE = 512
# Pieces of a matrix begin at multiples of this many numbers: matrix units read what lies otherwise at half the speed.
_ALIGNED = 64


class Whole(Protocol):
    """Stands for the products of outer forms while a pass is traced: each is one operation, however it is chunked."""

    def dot(self, form: "Outer", directions: Tensor, budget: int) -> Tensor:
        """Multiply with dense directions."""
        ...

    def square_norms(self, form: "Outer", budget: int) -> Tensor:
        """Sum the squares."""
        ...


WHOLE: ContextVar[Whole | None] = ContextVar("whole", default=None)


@dataclass(frozen=True)
class Outer:
    """Gradients Σₜ leftₜ ⊗ rightₜ of a matrix (g, L, R), flattened: never written out for the whole batch."""

    left: Factor
    right: Factor
    examples: int
    groups: int = 1

    @property
    def numel(self) -> int:
        """Numbers of one example's gradient."""
        return self.groups * self.left.width * self.right.width

    def transposed(self) -> "Outer":
        """Return the gradients of the transposed matrix."""
        return Outer(self.right, self.left, self.examples)

    def write(self, start: int, stop: int) -> Tensor:
        """Write out the gradients of some examples."""
        return self._write(start, stop, slice(None)).reshape(stop - start, self.numel)

    def dot(self, directions: Tensor, budget: int) -> Tensor:
        """Multiply with dense directions, the cheapest way."""
        whole = WHOLE.get()
        if whole is not None:
            return whole.dot(self, directions, budget)
        if not self.left.tokens or not self.numel:
            return torch.zeros(
                self.examples, len(directions), dtype=wide_type(directions.dtype), device=directions.device
            )
        if isinstance(self.left, OneHot):
            return self._look_up(directions, budget)
        if self.groups == 1 and self._contracting_pays(directions):
            return self._contract(directions, budget)
        return self._materialise(directions, budget)

    def dot_and_square_norms(self, directions: Tensor, budget: int) -> tuple[Tensor, Tensor]:
        """Do both, writing gradients out only once where both would."""
        written_out = self.left.tokens and self.numel and not isinstance(self.left, OneHot)
        contracted = self.groups == 1 and self._contracting_pays(directions)
        if WHOLE.get() is not None or not written_out or contracted or self._tokens_are_few():
            return self.dot(directions, budget), self.square_norms(budget)
        squares = torch.zeros(self.examples, dtype=wide_type(directions.dtype), device=directions.device)
        return self._materialise(directions, budget, squares), squares

    def pick(self, index: Tensor) -> Tensor:
        """Take single coordinates: a product of two numbers per token."""
        group, rest = index // (self.left.width * self.right.width), index % (self.left.width * self.right.width)
        i, j = rest // self.right.width, rest % self.right.width
        return self._pairs(group, i, j, self.left, self.right)

    def rotate(
        self, left: Tensor | None, right: Tensor | None, pairs: Tensor, budget: int = 2**28
    ) -> Tensor:  # (2, k) -> (B, k)
        """Take coordinates in a rotated basis: ⟨left[:, i] ⊗ right[:, j], gradient⟩ for each pair (i, j).

        Rotating the factors costs T·(L·r + R·s); dense directions cost at least k·L·R. None means no rotation.
        """
        i, j = pairs
        found = []
        taken = sum(side.width for side in (self.left, self.right) if not isinstance(side, OneHot))
        numbers = max(self.left.tokens, 1) * (4 * len(i) + taken + 1)
        for start, stop in self._spans(self.examples, max(1, budget // (8 * numbers))):
            a, b = rotated(self.left, left, start, stop), rotated(self.right, right, start, stop)
            part = Outer(a, b, stop - start)
            grid = a.width * b.width
            # Many coordinates of a small grid: one product of matrices gives all of it.
            if not isinstance(a, OneHot) and _GRID_SHARE * len(i) > grid and self.left.tokens > 1:
                found.append(part.write(0, stop - start)[:, i * b.width + j])
            else:
                found.append(part._pairs(torch.zeros_like(i), i, j, a, b))
        return torch.cat(found)

    def square_norms(self, budget: int) -> Tensor:
        """Sum the squares: by the T × T products between tokens, or by writing gradients out, whichever is cheaper."""
        whole = WHOLE.get()
        if whole is not None:
            return whole.square_norms(self, budget)
        if not self.left.tokens or not self.numel:
            return wide(_sample(self.right)).new_zeros(self.examples)
        if isinstance(self.left, OneHot) or self._tokens_are_few():
            return self.inner(self, budget)
        chunks = self._chunks(budget)
        squares = [wide(self._write(s, e, slice(None))).square().sum(dim=(1, 2, 3)) for s, e in chunks]
        return torch.cat(squares)

    def inner(self, other: "Outer", budget: int) -> Tensor:  # (B,)
        """Multiply with the gradients of another form of the same matrix: Σ (left·left')(right·right') over tokens."""
        bytes_each = 8 * self.groups * self.left.tokens * other.left.tokens
        at_once = max(1, budget // max(bytes_each, 1))
        results = []
        for start in range(0, self.examples, at_once):
            stop = min(start + at_once, self.examples)
            left = token_products(self.left, other.left, start, stop)
            right = token_products(self.right, other.right, start, stop)
            results.append((left * right).sum(dim=(1, 2, 3)))
        return torch.cat(results)

    def _tokens_are_few(self) -> bool:
        """Compare operations per parameter: products between all tokens, or writing out and squaring."""
        tokens = self.left.tokens
        by_tokens = 2 * tokens * tokens * (1 / self.left.width + 1 / self.right.width)
        return by_tokens < 2 * tokens + _intensity(_sample(self.right))

    def _contracting_pays(self, directions: Tensor) -> bool:
        """Compare operations per parameter: write out and multiply, or carry every direction through every token."""
        tokens, count = self.left.tokens, len(directions)
        traffic = 2 * directions.element_size() * _intensity(directions)
        longer = max(self.left.width, self.right.width)
        carried = 2 * _CARRYING * tokens * count + traffic * tokens * count / longer
        return carried < 2 * (tokens + count) + traffic

    def _contract(self, directions: Tensor, budget: int) -> Tensor:
        """Multiply directions with the wider factor of each token first, then with the other."""
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
            results.append(_paired(half, narrow.take(start, stop)))
        return torch.cat(results)

    def _materialise(self, directions: Tensor, budget: int, squares: Tensor | None = None) -> Tensor:
        """Write out gradients chunk by chunk, multiply them with the directions, and sum their squares if asked."""
        dtype, size = wide_type(directions.dtype), self.left.width * self.right.width
        out = torch.zeros(len(directions), self.examples, dtype=dtype, device=directions.device)
        # Chunks of whole groups, or of the left factor's coordinates: contiguous in the directions either way.
        units, unit = (self.groups, size) if self.groups > 1 else (self.left.width, self.right.width)
        largest = min(budget, _LARGEST_CHUNK.get(directions.device.type, 2**30)) // (unit * directions.element_size())
        for start, stop in self._spans(self.examples, min(_EXAMPLES_AT_ONCE, max(1, largest))):
            left, right = (f.take(start, stop).to(directions.dtype) for f in (self.left, self.right))
            for low, high in self._spans(units, _rounded(largest // (stop - start))):
                part = left[:, low:high] if self.groups > 1 else _packed(left[..., low:high])
                other = right[:, low:high] if self.groups > 1 else right
                written = (part.transpose(2, 3) @ other).reshape(stop - start, -1)
                # Directions first: the result's long side then is the examples, which suits the matrix units at any K.
                out[:, start:stop] += times(directions[:, low * unit : high * unit], written.T)
                if squares is not None:
                    squares[start:stop] += torch.linalg.vector_norm(written, dim=1, dtype=dtype).square()
        return out.T

    def _look_up(self, directions: Tensor, budget: int) -> Tensor:
        """Gather the directions' entries of each token, few directions at a time where a cache is to hold them."""
        index, width = self.left.index, self.right.width  # type: ignore[attr-defined]
        cube = directions.unflatten(1, (self.left.width, width))  # (K, L, R)
        largest = min(budget, _LARGEST_GATHER.get(directions.device.type, 2**30)) // (width * directions.element_size())
        results = []
        for start, stop in self._spans(self.examples, max(1, largest // self.left.tokens)):
            flat, right = index[start:stop].reshape(-1), self.right.take(start, stop).to(directions.dtype)
            spans = self._spans(len(directions), max(1, largest // len(flat)))
            parts = (cube[low:high].index_select(1, flat).view(high - low, stop - start, -1) for low, high in spans)
            results.append(torch.cat([_paired(part, right) for part in parts], dim=1))
        return torch.cat(results)

    def _pairs(self, group: Tensor, i: Tensor, j: Tensor, left: Factor, right: Factor) -> Tensor:
        b = right.take(0, self.examples)
        if isinstance(left, OneHot):
            hit = left.index[:, :, None] == i  # (B, T, k)
            return (hit * b[:, 0][:, :, j]).sum(dim=1)
        a = left.take(0, self.examples)
        # (k, B, T): the advanced indices stand apart, so they come first.
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
    """Sum the squares of gradients that are sums of several forms: a parameter used more than once."""
    if len(forms) == 1:
        return forms[0].square_norms(budget)
    if all(isinstance(form, Outer) and form.groups == 1 for form in forms):
        outers: Sequence[Outer] = forms  # type: ignore[assignment]
        crossed = [a.inner(b, budget) for i, a in enumerate(outers) for b in outers[i + 1 :]]
        return sum((f.square_norms(budget) for f in outers), 2 * sum(crossed))  # type: ignore[return-value]
    first = forms[0].write(0, 1)
    whole = Written(
        lambda start, stop: sum(wide(form.write(start, stop)) for form in forms),  # type: ignore[arg-type,return-value]
        forms[0].examples,
        first.shape[1] * 4 * (len(forms) + 1),
    )
    return whole.square_norms(budget)


def _paired(half: Tensor, other: Tensor) -> Tensor:  # (K, n, m), (n, ...) of m numbers -> (n, K)
    """Multiply place by place and sum, overwriting `half`: many times faster than batched matrix-vector products."""
    half.mul_(other.reshape(len(other), -1))
    return half.sum(dim=2, dtype=wide_type(half.dtype)).T


def _rounded(count: int) -> int:
    """Make the length of a piece one that keeps the next piece aligned, where it is long enough."""
    return max(1, count // _ALIGNED * _ALIGNED or count)


def _packed(piece: Tensor) -> Tensor:
    """Copy columns out of a matrix of odd width, such as a vocabulary's, so that its rows are aligned again."""
    return piece.contiguous() if piece.is_cuda and piece.stride(-2) % 8 else piece


def _sample(factor: Factor) -> Tensor:
    return factor.take(0, 1)


def _intensity(like: Tensor) -> float:
    return _INTENSITY.get((like.device.type, like.element_size()), _CPU_INTENSITY)
