"""The Kronecker eigenbasis of each parameter's gradient, and the gradient energy along each of its coordinates.

The gradient of a matrix is Σₜ leftₜ ⊗ rightₜ. Rotated into the eigenbases of Σ left leftᵀ and Σ right rightᵀ, most of
its energy is in a few coordinates, which are worth storing. Parameters without this form keep the standard basis.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from itertools import chain
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from eigentrace.data import Data
from eigentrace.gradients.layer_gradients import LayerGradients
from eigentrace.gradients.outer_products import Factor, OneHot, Outer, rotated
from eigentrace.krylov.eigenpairs import with_fixed_signs
from eigentrace.numeric.accumulate import wide, wide_type
from eigentrace.projection import Job, gradients, project
from eigentrace.projection.directions import DenseDirections, RotatedDirections, Rotation, matrix_shape
from eigentrace.projection.engine import Compute, Gather, Projection
from eigentrace.projection.layerwise import narrowed
from eigentrace.task.layout import Layout
from eigentrace.task.task import Task

# Wider sides (a vocabulary) keep the standard basis: 8192 × 8192 is the largest covariance that is diagonalised.
WIDEST_SIDE = 8192
# Maximum number of leading eigenvectors per side: the others have very little energy and need memory.
_MOST_COLUMNS = 1024
# Maximum number of evenly spaced tokens per example in a covariance: neighbouring tokens are similar.
_MOST_TOKENS = 64

# Difference up to which a bias counts as an input of its matrix, relative to its gradient: of sums in at least float32,
# and of sums rounded to half precision.
_JOINED_TOL, _JOINED_TOL_HALF = 1e-3, 2e-2

Bases = dict[str, tuple[Tensor | None, Tensor | None]]  # {name: (L, r), (R, s)}; None for the standard basis


@dataclass(frozen=True)
class Joined:
    """A bias that is treated as another row or column of its matrix: its gradient is that of a constant input of 1."""

    bias: str
    side: Literal["left", "right"]
    """The side of the matrix's inputs."""

    def augmented(self, form: Outer) -> Outer:
        """Return the gradients of the matrix and its bias, as those of one matrix."""
        if self.side == "left":
            return replace(form, left=WithOne(form.left))
        return replace(form, right=WithOne(form.right))

    def sums(self, form: Outer) -> Tensor:  # (B, w)
        """Return what the gradient of the bias is if it belongs to the matrix: the token sums of the other side."""
        other = form.right if self.side == "left" else form.left
        tokens = other.take(0, form.examples)
        return tokens.sum(dim=2, dtype=wide_type(tokens.dtype)).flatten(1)


def is_bias_of(gap: Tensor, gradients: Tensor, dtype: torch.dtype) -> Tensor:  # (B, w), (B, w) -> ()
    """Return whether gradients of a bias, computed in `dtype`, are sums of a matrix from which they differ by `gap`."""
    tol = _JOINED_TOL_HALF if dtype.itemsize < 4 else _JOINED_TOL
    return gap.norm() <= tol * gradients.norm()


@dataclass
class BiasCheck:
    """Checks in every pass that joined biases belong to their matrices: a model may treat later batches differently."""

    joined: Mapping[str, Joined]
    uses: Mapping[str, int]
    missing: dict[str, int] = field(default_factory=dict)
    """Number of gradients of a matrix and its bias that the pass has not yet reached."""
    gaps: dict[str, Tensor] = field(default_factory=dict)
    totals: dict[str, Tensor] = field(default_factory=dict)
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    good: dict[str, Tensor] = field(default_factory=dict)
    refuted: set[str] = field(default_factory=set)
    """Matrices whose bias was used in another way."""

    def __post_init__(self) -> None:
        self.matrices = {one.bias: name for name, one in self.joined.items()}

    def augmented(self, name: str, form: LayerGradients) -> LayerGradients | None:
        """Return the gradients with those of the bias; None for a bias, whose gradients are part of its matrix."""
        if name in self.matrices:
            value = form.write(0, form.examples)
            self._add(self.matrices[name], -wide(value), value.dtype)
            return None
        if name not in self.joined:
            return form
        one = self.joined[name]
        if not isinstance(form, Outer) or isinstance(form.right if one.side == "left" else form.left, OneHot):
            self.refuted.add(name)
            return form if not isinstance(form, Outer) else one.augmented(form)
        self._add(name, one.sums(form), None)
        return one.augmented(form)

    def finish(self) -> None:
        """Compare what is left of parameters that received fewer gradients than planned."""
        for name in list(self.gaps):
            self._compare(name)
        if self.good:
            matches = torch.stack(list(self.good.values())).tolist()
            self.refuted |= {name for name, match in zip(self.good, matches, strict=True) if not match}

    def _add(self, name: str, value: Tensor, dtype: torch.dtype | None) -> None:
        self.gaps[name] = self.gaps[name] + value if name in self.gaps else value
        if dtype is not None:
            self.totals[name] = self.totals[name] + value if name in self.totals else value
            self.dtypes[name] = dtype
        expected = self.uses.get(name, 0) + self.uses.get(self.joined[name].bias, 0)
        self.missing[name] = self.missing.get(name, expected) - 1
        if not self.missing[name]:
            self._compare(name)

    def _compare(self, name: str) -> None:
        gap = self.gaps.pop(name)
        total = self.totals.pop(name, torch.zeros_like(gap))
        self.good[name] = is_bias_of(gap, total, self.dtypes.get(name, gap.dtype))


@dataclass(frozen=True)
class WithOne:
    """A factor with another number, which is always 1."""

    factor: Factor

    @property
    def examples(self) -> int:
        """The number of examples, B."""
        return self.factor.examples

    @property
    def tokens(self) -> int:
        """The number of tokens per example, T."""
        return self.factor.tokens

    @property
    def width(self) -> int:
        """The length of the vector of one token."""
        return self.factor.width + 1

    def take(self, start: int, stop: int) -> Tensor:  # (n, g, T, width)
        """Return the examples from `start` to `stop`."""
        return F.pad(self.factor.take(start, stop), (0, 1), value=1.0)


def shape_of(layout: Layout, name: str, joined: Mapping[str, Joined]) -> tuple[int, int]:
    """Return the shape of a parameter viewed as a matrix, with its bias if that is joined."""
    length, width = matrix_shape(layout, name)
    side = joined[name].side if name in joined else None
    return length + (side == "left"), width + (side == "right")


@dataclass
class _Covariances:
    """Σ left leftᵀ and Σ right rightᵀ of every parameter whose gradients are sums of outer products."""

    layout: Layout
    budget: int
    joined: Mapping[str, Joined]
    tokens: int
    """Maximum number of tokens per example."""
    uses: Mapping[str, int]
    skipped: Mapping[str, str]
    sides: dict[str, tuple[Tensor | None, Tensor | None]] = field(default_factory=dict)  # (g, l, l), (1, r, r)

    def receive(self, name: str, form: LayerGradients) -> None:
        """Add the products of the factors of one use."""
        if not isinstance(form, Outer) or not form.left.tokens or not form.numel:
            return
        if (form.groups * form.left.width, form.right.width) != matrix_shape(self.layout, name):
            return
        outer = self.joined[name].augmented(form) if name in self.joined else form
        found = (
            self._products(outer.left, form.right, form.groups),
            self._products(outer.right, form.left, form.groups),
        )
        found = found[0], None if found[1] is None else found[1].sum(dim=0, keepdim=True)
        self.sides[name] = _added(self.sides[name], found) if name in self.sides else found

    def finish(self) -> None:
        """Do nothing: every gradient was added when it was received."""

    def _products(self, factor: Factor, other: Factor, groups: int) -> Tensor | None:  # (g, width, width)
        if isinstance(factor, OneHot) or groups * factor.width > WIDEST_SIDE:
            return None
        step = -(-factor.tokens // self.tokens)
        width = factor.width + (0 if isinstance(other, OneHot) else other.width)
        at_once = max(1, self.budget // (8 * groups * factor.tokens * width))
        total: Tensor | None = None
        for start in range(0, factor.examples, at_once):
            stop = min(start + at_once, factor.examples)
            tokens = wide(factor.take(start, stop)[:, :, ::step])
            if not isinstance(other, OneHot):
                # Tokens that add nothing to the gradient do not count: padding must not determine the basis.
                tokens = tokens * other.take(start, stop)[:, :, ::step].any(dim=-1, keepdim=True)
            flat = tokens.transpose(0, 1).flatten(1, 2)  # (g, n·T, width)
            products = flat.transpose(1, 2) @ flat
            total = products if total is None else total + products
        return total


def _added(
    first: tuple[Tensor | None, Tensor | None], second: tuple[Tensor | None, Tensor | None]
) -> tuple[Tensor | None, Tensor | None]:
    """Add the covariances of each side; a side without one in either argument keeps the standard basis."""
    pairs = zip(first, second, strict=True)
    left, right = (None if a is None or b is None or a.shape != b.shape else a + b for a, b in pairs)
    return left, right


def eigenbases(task: Task, data: Data, compute: Compute) -> Bases:
    """Return the leading eigenvectors of both sides of every matrix, from some tokens of each example."""
    return bases_of([Job.of(task, "losses", compute=compute)], data, {}, _MOST_COLUMNS, _MOST_TOKENS)


def bases_of(jobs: Sequence[Job], data: Data, joined: Mapping[str, Joined], columns: int, tokens: int) -> Bases:
    """Return the eigenvectors of the covariances of both sides of every matrix, summed over the data.

    Args:
        jobs: The functions whose gradients are used, for the same parameters.
        data: The examples.
        joined: The biases that belong to a matrix, by the name of the matrix.
        columns: Maximum number of eigenvectors per side.
        tokens: Maximum number of tokens per example.
    """
    layout = jobs[0].task.layout
    totals: dict[str, tuple[Tensor | None, Tensor | None]] = {}
    standard: set[str] = set()
    made = [replace(job, gather=partial(_Covariances, layout, job.budget, joined, tokens)) for job in jobs]
    for _, found in chain.from_iterable(project(job, data, "Covariances") for job in made):
        standard |= without_rule(found, layout)
        for gather in found.gathered:
            for name, sides in gather.sides.items():  # type: ignore[attr-defined]
                totals[name] = _added(totals[name], sides) if name in totals else sides
    bases: Bases = {}
    for name in [name for name in totals if name not in standard]:
        left, right = totals.pop(name)  # freed once it is diagonalised: of a large model, half of the memory
        bases[name] = _eigenvectors(left, columns), _eigenvectors(right, columns)
    return bases


def without_rule(found: Projection, layout: Layout) -> set[str]:
    """Return the names of the parameters that the layerwise engine left to another engine."""
    if not found.gathered:
        return set(layout.names)
    return {name for gather in found.gathered for name in gather.skipped}  # type: ignore[attr-defined]


def _eigenvectors(covariances: Tensor | None, columns: int) -> Tensor | None:  # (g, w, w) -> (g·w, g·columns)
    if covariances is None or covariances.shape[1] == 1:
        return None
    each = max(1, columns // len(covariances))
    try:
        vectors = torch.linalg.eigh(covariances).eigenvectors
    except torch.linalg.LinAlgError:
        # Inputs that are always zero give repeated eigenvalues, for which float32 fails to converge on some processors.
        vectors = torch.linalg.eigh(covariances.double()).eigenvectors.to(covariances.dtype)
    leading = vectors.flip(-1)[..., :each]
    basis = leading[0] if len(leading) == 1 else torch.block_diag(*leading)
    return with_fixed_signs(basis.T.contiguous()).T.contiguous()


@dataclass
class SquaredCoordinates(ABC):
    """Squares the coordinates of the gradients of a pass, each parameter once all of its uses are there to be summed.

    Subclasses add up the squares, in the form in which they come.
    """

    bases: Bases
    joined: Mapping[str, Joined]
    layout: Layout
    budget: int
    uses: Mapping[str, int]
    skipped: Mapping[str, str]
    waiting: dict[str, list[LayerGradients]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.biases = BiasCheck(self.joined, self.uses)

    @abstractmethod
    def of_one_token(self, name: str, left: Tensor, right: Tensor) -> None:  # (B, r), (B, s)
        """Add the squares left ⊗ right of each example."""
        ...

    @abstractmethod
    def of_lookup(self, name: str, keys: Tensor, squares: Tensor, examples: int) -> None:  # (u,), (u, s)
        """Add the squares of single entries of a lookup table; for the keys see `_lookup_sums`."""
        ...

    @abstractmethod
    def of_chunks(self, name: str, chunks: Iterator[Tensor]) -> None:  # each (n, r, s)
        """Add the squares of all examples, some at a time."""
        ...

    def receive(self, name: str, form: LayerGradients) -> None:
        """Receive the gradients of a parameter from one of its uses."""
        whole = self.biases.augmented(name, form)
        if whole is None or name in self.biases.refuted:
            return
        forms = self.waiting.setdefault(name, [])
        forms.append(whole)
        if len(forms) == self.uses[name]:
            self._square(name)

    def finish(self) -> None:
        """Square the coordinates of parameters that received fewer gradients than planned."""
        self.biases.finish()
        for name in [name for name in self.waiting if name not in self.biases.refuted]:
            self._square(name)

    def _square(self, name: str) -> None:
        forms = self.waiting.pop(name)
        left, right = self.bases.get(name, (None, None))
        form = forms[0]
        if len(forms) == 1 and isinstance(form, Outer) and form.groups == 1:
            if form.left.tokens == 1 and not isinstance(form.left, OneHot):
                sides = (rotated(f, u).take(0, form.examples) for f, u in ((form.left, left), (form.right, right)))
                self.of_one_token(name, *(wide(side[:, 0, 0]).square() for side in sides))
                return
            if isinstance(form.left, OneHot) and left is None:
                keys, sums = _lookup_sums(form, right)
                self.of_lookup(name, keys, sums.square(), form.examples)
                return
        self.of_chunks(name, self._chunks(forms, left, right, shape_of(self.layout, name, self.joined)))

    def _chunks(
        self, forms: Sequence[LayerGradients], left: Tensor | None, right: Tensor | None, shape: tuple[int, int]
    ) -> Iterator[Tensor]:
        # Memory of the factors, the rotated factors, and their product; a lookup becomes a dense integer tensor.
        tokens = max((form.left.tokens for form in forms if isinstance(form, Outer)), default=0)
        each = 16 * (shape[0] * shape[1] + tokens * (shape[0] + shape[1]))
        at_once = max(1, self.budget // max(each, 1))
        for start in range(0, forms[0].examples, at_once):
            stop = min(start + at_once, forms[0].examples)
            coordinates = sum(_rotated_gradients(form, left, right, shape, start, stop) for form in forms)
            yield coordinates.square()  # type: ignore[union-attr]


@dataclass
class _Energies(SquaredCoordinates):
    """Sums over examples of the squared coordinates of every parameter with a layer rule."""

    sums: dict[str, Tensor] = field(default_factory=dict)  # (r, s)

    def of_one_token(self, name: str, left: Tensor, right: Tensor) -> None:
        """Add the squares left ⊗ right of each example, by one matrix product."""
        self.sums[name] = left.T @ right

    def of_lookup(self, name: str, keys: Tensor, squares: Tensor, examples: int) -> None:
        """Add the squares of single entries of a lookup table."""
        entries = shape_of(self.layout, name, self.joined)[0]
        self.sums[name] = squares.new_zeros(entries, squares.shape[1]).index_add_(0, keys % entries, squares)

    def of_chunks(self, name: str, chunks: Iterator[Tensor]) -> None:
        """Add the squares of all examples, some at a time."""
        self.sums[name] = reduce(torch.add, (chunk.sum(dim=0) for chunk in chunks))


def _lookup_sums(form: Outer, right: Tensor | None) -> tuple[Tensor, Tensor]:  # (u,), (u, s)
    """Add the tokens of an example that share an entry of a lookup table, and return the sums in the rotated basis.

    The keys are example · entries + entry.
    """
    index, width = form.left.index, form.left.width  # type: ignore[attr-defined]
    b = wide(rotated(form.right, right).take(0, form.examples)[:, 0])  # (B, T, s)
    keys = torch.arange(len(index), device=index.device)[:, None] * width + index
    keys, place = keys.flatten().unique(return_inverse=True)
    return keys, b.new_zeros(len(keys), b.shape[-1]).index_add_(0, place, b.flatten(0, 1))


def _rotated_gradients(
    form: LayerGradients, left: Tensor | None, right: Tensor | None, shape: tuple[int, int], start: int, stop: int
) -> Tensor:  # (n, r, s)
    """Return the coordinates of the gradients of some examples."""
    if isinstance(form, Outer) and form.groups == 1:
        sides = rotated(form.left, left, start, stop), rotated(form.right, right, start, stop)
        a, b = (wide(side.take(0, stop - start)[:, 0]) for side in sides)
        dtype = torch.promote_types(a.dtype, b.dtype)  # a dense lookup is an integer tensor
        return a.to(dtype).transpose(1, 2) @ b.to(dtype)
    return in_bases(wide(form.write(start, stop)).unflatten(1, shape), left, right)


def in_bases(matrices: Tensor, left: Tensor | None, right: Tensor | None) -> Tensor:  # (n, L, R) -> (n, r, s)
    """Return the coordinates of dense matrices; None keeps the standard basis of a side."""
    matrices = matrices if left is None else left.to(matrices.dtype).T @ matrices
    return matrices if right is None else matrices @ right.to(matrices.dtype)


@dataclass(frozen=True)
class Energies:
    """Sums of squared coordinates over examples, and second moments of the kept features over the same examples."""

    bases: Bases
    sums: Mapping[str, Tensor]  # {name: (r, s)}
    moments: Tensor  # (K, K) float64, Σ φ φᵀ


def energies(task: Task, data: Data, bases: Bases, kept: DenseDirections, compute: Compute) -> Energies:
    """Sum squared per-example gradients per coordinate, and the moments of the kept features, in one pass.

    Without bases, the sums are N × the diagonal empirical Fisher.
    """
    moments = torch.zeros(kept.count, kept.count, dtype=torch.float64, device=task.layout.device)
    sums, without, _ = square_sums(Job.of(task, "losses", kept, compute=compute), data, bases, {}, moments)
    return Energies({name: sides for name, sides in bases.items() if name not in without}, sums, moments)


def square_sums(
    job: Job, data: Data, bases: Bases, joined: Mapping[str, Joined], moments: Tensor | None = None
) -> tuple[dict[str, Tensor], list[str], set[str]]:  # {name: (r, s)}
    """Sum the squared coordinates of all gradients of a job; add the second moments of its features to `moments`.

    Also returns the names of the parameters without a layer rule, whose coordinates are in the standard basis, and of
    the matrices to which their joined bias does not belong after all, whose sums are wrong.
    """
    layout = job.task.layout
    gathering = replace(job, gather=partial(_Energies, bases, joined, layout, job.budget))
    sums: dict[str, Tensor] = {}
    missing: set[str] = set()
    refuted: set[str] = set()
    for _, found in project(gathering, data, "Energies"):
        missing |= without_rule(found, layout)
        refuted |= refuted_in(found)
        _add(sums, found.gathered)
        if moments is not None:
            phi = found.features.double()
            moments += phi.T @ phi
    rest = [name for name in layout.names if name in missing]
    if rest:
        part = narrowed(job, rest)
        totals = torch.zeros(part.task.layout.numel, dtype=layout.dtype, device=layout.device)
        for flat in gradients(part, data):
            totals += flat.square().sum(dim=0)
        shapes = {name: matrix_shape(layout, name) for name in rest}
        pieces = totals.split(part.task.layout.sizes)
        sums |= {name: piece.view(shapes[name]) for name, piece in zip(rest, pieces, strict=True)}
    return sums, rest, refuted


def refuted_in(found: Projection) -> set[str]:
    """Return the names of the matrices to which their joined bias does not belong in a batch."""
    return {name for gather in found.gathered for name in gather.biases.refuted}  # type: ignore[attr-defined]


def _add(sums: dict[str, Tensor], gathered: Iterable[Gather]) -> None:
    for gather in gathered:
        for name, value in gather.sums.items():  # type: ignore[attr-defined]
            if name in sums:
                sums[name] += value
            else:
                sums[name] = value.clone()


def estimates(found: Energies, directions: DenseDirections, kept: Tensor) -> dict[str, Tensor]:  # {name: (r, s)}
    """Estimate each coordinate's energy without the kept directions: Σ (u·g)² − cᵀ(Σ φφᵀ)c with c = G·u.

    This is exact if the remainder of a coordinate is uncorrelated with the kept features.
    """
    layout, chosen = directions.layout, kept.to(found.moments.device)
    values, vectors = torch.linalg.eigh(found.moments[chosen][:, chosen])
    scaled = (vectors * values.clamp_min(0).sqrt()).T.to(layout.dtype)  # √ψⱼ·vⱼ, which decorrelate φ
    result = {}
    for name, sums in found.sums.items():
        total = sums.to(layout.dtype).clone()
        columns = directions.matrix[:, layout.span(name)][kept.to(directions.matrix.device)]
        left, right = found.bases.get(name, (None, None))
        for mixed in (scaled @ columns.to(scaled)).unflatten(1, matrix_shape(layout, name)):
            total -= in_bases(mixed, left, right).square()
        result[name] = total.clamp_min_(0)
    return result


def leading(found: Energies, directions: DenseDirections, kept: Tensor, count: int) -> RotatedDirections:
    """Return `count` candidate coordinates with the most energy outside the kept directions, as directions.

    Half of them are selected by the estimated energy and half by the total energy, in case the estimate is wrong.
    """
    remaining = estimates(found, directions, kept)
    names = [name for name in directions.layout.names if name in found.sums]
    flat = [torch.cat([values[name].flatten() for name in names]) for values in (remaining, found.sums)]
    chosen = _highest(flat[0], flat[1], count)
    rotations, offset = {}, 0
    for name in names:
        size, width = found.sums[name].numel(), found.sums[name].shape[1]
        here = chosen[(chosen >= offset) & (chosen < offset + size)] - offset
        offset += size
        if len(here):
            pairs = torch.stack([here // width, here % width])
            rotations[name] = Rotation(*found.bases.get(name, (None, None)), pairs).trimmed()
    return RotatedDirections(rotations, directions.layout)


def _highest(first: Tensor, second: Tensor, count: int) -> Tensor:  # (n,), (n,) -> (count,) ascending
    """Return the indices of the highest values, half by the first ranking, the rest by the second."""
    count = min(count, len(second))
    leaders = first.topk(-(-count // 2)).indices
    rest = second.clone()
    rest[leaders] = -1.0
    return torch.cat([leaders, rest.topk(count - len(leaders)).indices]).sort().values
