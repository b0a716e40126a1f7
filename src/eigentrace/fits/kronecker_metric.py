"""A matrix that is diagonal in the Kronecker eigenbasis of each parameter, and the scores by its inverse.

This is EK-FAC (George et al., 2018): each matrix, with its bias, is rotated into the eigenbases of the covariances of
its inputs and of the gradients of its outputs. There, the diagonal of the curvature is measured exactly.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor

from eigentrace.data import Data
from eigentrace.errors import MismatchError
from eigentrace.fits.kronecker import (
    WIDEST_SIDE,
    Bases,
    Joined,
    SquaredCoordinates,
    bases_of,
    in_bases,
    is_bias_of,
    refuted_in,
    shape_of,
    square_sums,
    without_rule,
)
from eigentrace.gradients.layer_gradients import Direct, LayerGradients
from eigentrace.gradients.outer_products import OneHot, Outer
from eigentrace.numeric.accumulate import wide
from eigentrace.projection import Job, gradients, project
from eigentrace.projection.directions import matrix_shape
from eigentrace.projection.layerwise import narrowed
from eigentrace.settings import counted
from eigentrace.task.layout import Layout

_ALL = torch.iinfo(torch.int64).max


@dataclass(frozen=True)
class KroneckerMetric:
    """The eigenbases of each parameter, and the diagonal of the curvature in them."""

    layout: Layout
    bases: Bases
    joined: Mapping[str, Joined]
    diagonal: Mapping[str, Tensor]  # {name: (r, s)}; a joined bias is part of its matrix

    def __repr__(self) -> str:
        rotated = counted(len(self.bases), "rotated parameter")
        return f"<KroneckerMetric: {counted(self.layout.numel, 'parameter')}, {rotated}, mean {self.mean:.3g}>"

    @property
    def mean(self) -> float:
        """The mean of the diagonal over all parameters."""
        return sum(float(values.sum(dtype=torch.float64)) for values in self.diagonal.values()) / self.layout.numel

    @property
    def unrotated(self) -> dict[str, list[str]]:
        """The sides of matrices in the standard basis, by parameter: vocabularies, and all without a layer rule."""
        found = {}
        for name in self.diagonal:
            sides = zip(
                ("left", "right"), self.bases.get(name, (None, None)), matrix_shape(self.layout, name), strict=True
            )
            kept = [side for side, basis, size in sides if basis is None and size > 1]
            if kept and min(matrix_shape(self.layout, name)) > 1:
                found[name] = kept
        return found

    def inverse(self, vectors: Tensor, damping: float) -> Tensor:  # (q, P) -> (q, P)
        """Multiply vectors by the inverse of the matrix plus `damping` times the identity."""
        return self._scaled(vectors, lambda values: 1 / (values + damping))

    def root(self, vectors: Tensor, damping: float) -> Tensor:  # (q, P) -> (q, P)
        """Multiply vectors by the root of that inverse."""
        return self._scaled(vectors, lambda values: (values + damping).rsqrt())

    def times(self, vectors: Tensor, damping: float) -> Tensor:  # (q, P) -> (q, P)
        """Multiply vectors by the matrix plus `damping` times the identity."""
        return self._scaled(vectors, lambda values: values + damping)

    def _scaled(self, vectors: Tensor, factor: Callable[[Tensor], Tensor]) -> Tensor:
        """Multiply the coordinates of vectors by a function of the diagonal."""
        pieces = {name: vectors[:, self.layout.span(name)] for name in self.layout.names}
        found: dict[str, Tensor] = {}
        for name, values in self.diagonal.items():
            matrix = self._matrix(pieces, name)
            coordinates = in_bases(matrix, *self.bases.get(name, (None, None)))
            back = _rotated_back(coordinates * factor(values), *self.bases.get(name, (None, None)))
            self._split(name, back, found)
        return torch.cat([found[name] for name in self.layout.names], dim=1)

    def _matrix(self, pieces: Mapping[str, Tensor], name: str) -> Tensor:  # (q, r, s)
        """Return parts of vectors as matrices, with the bias as another row or column."""
        matrix = pieces[name].unflatten(1, matrix_shape(self.layout, name))
        if name not in self.joined:
            return matrix
        bias, dim = pieces[self.joined[name].bias], 1 if self.joined[name].side == "left" else 2
        return torch.cat([matrix, bias.unsqueeze(dim)], dim=dim)

    def _split(self, name: str, matrix: Tensor, found: dict[str, Tensor]) -> None:
        """Undo `_matrix`."""
        if name in self.joined:
            dim = 1 if self.joined[name].side == "left" else 2
            found[self.joined[name].bias] = matrix.select(dim, -1).flatten(1)
            matrix = matrix.narrow(dim, 0, matrix.shape[dim] - 1)
        found[name] = matrix.flatten(1)

    def plus(self, added: Tensor) -> "KroneckerMetric":  # (P,)
        """Return the metric with a diagonal matrix added, of which the diagonal in the metric's basis is kept."""
        pieces = {name: added[None, self.layout.span(name)] for name in self.layout.names}
        total = {}
        for name, values in self.diagonal.items():
            left, right = (None if side is None else side.square() for side in self.bases.get(name, (None, None)))
            total[name] = values + in_bases(self._matrix(pieces, name), left, right)[0]
        return replace(self, diagonal=total)

    def own_scores(self, job: Job, data: Data, damping: float, norms: bool) -> tuple[Tensor, Tensor | None]:
        """Return ⟨g, M⁻¹g⟩ and, if requested, ‖g‖² of each example (N,), in one pass over the data."""
        weights = {name: 1 / (values + damping) for name, values in self.diagonal.items()}
        job = replace(job, norms=norms)
        own = partial(_OwnScores, self.bases, self.joined, self.layout, job.budget, weights=weights)
        gathering = replace(job, gather=own)
        total = torch.zeros(len(data), dtype=self.layout.dtype, device="cpu")
        squares = torch.zeros(len(data), dtype=self.layout.dtype, device="cpu") if norms else None
        without: set[str] | None = None
        for batch, found in project(gathering, data, "Self-influence"):
            missing = without_rule(found, self.layout)
            if refuted_in(found) or missing != (without := missing if without is None else without):
                return self._own_scores_of_whole(job, data, damping)
            parts = [gather.scores for gather in found.gathered]  # type: ignore[attr-defined]
            if parts:
                total[batch.rows] += torch.cat(parts).to(total)
            if squares is not None:
                squares[batch.rows] = found.squares().to(squares)
        if without:
            if without & (self.bases.keys() | self.joined.keys() | _biases(self.joined)):
                return self._own_scores_of_whole(job, data, damping)
            self._add_without_rule(job, data, sorted(without), weights, total)
        return total, squares

    def _add_without_rule(
        self, job: Job, data: Data, names: list[str], weights: Mapping[str, Tensor], total: Tensor
    ) -> None:
        """Add the part of parameters that the layerwise engine leaves to another one; their basis is the standard."""
        part, start = narrowed(replace(job, gather=None, norms=False), names), 0
        flat_weights = torch.cat([weights[name].flatten() for name in part.task.layout.names])
        for flat in gradients(part, data):
            total[start : start + len(flat)] += (flat.square() @ flat_weights).to(total)
            start += len(flat)

    def _own_scores_of_whole(self, job: Job, data: Data, damping: float) -> tuple[Tensor, Tensor]:
        """Compute the same from whole gradients."""
        scores, squares = [], []
        for flat in gradients(replace(job, gather=None, norms=False), data):
            scores.append((self.inverse(flat, damping) * flat).sum(dim=1).cpu())
            squares.append(flat.square().sum(dim=1).cpu())
        return torch.cat(scores), torch.cat(squares)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors to save."""
        found = {f"diagonal.{name}": values for name, values in self.diagonal.items()}
        for name, (left, right) in self.bases.items():
            found |= {} if left is None else {f"left.{name}": left}
            found |= {} if right is None else {f"right.{name}": right}
        return found

    def record(self) -> dict[str, dict[str, str]]:
        """Return the joined biases as JSON values."""
        return {name: {"bias": one.bias, "side": one.side} for name, one in self.joined.items()}

    @classmethod
    def of_tensors(cls, tensors: Mapping[str, Tensor], record: Mapping[str, Any], layout: Layout) -> Self:
        """Restore a metric from `tensors` and `record`."""
        joined = {name: Joined(one["bias"], one["side"]) for name, one in record.items()}
        diagonal: dict[str, Tensor] = {}
        bases: Bases = {}
        biases = {one.bias for one in joined.values()}
        for name in (name for name in layout.names if name not in biases):
            shape = shape_of(layout, name, joined)
            values, left, right = (tensors.get(f"{kind}.{name}") for kind in ("diagonal", "left", "right"))
            fits = values is not None and values.shape == shape
            fits &= left is None or left.shape == (shape[0], shape[0])
            fits &= right is None or right.shape == (shape[1], shape[1])
            if not fits:
                raise MismatchError(
                    f"The saved metric of parameter {name!r} does not fit its shape {shape}: fit again."
                )
            diagonal[name] = values.to(layout.device)  # type: ignore[union-attr]
            if left is not None or right is not None:
                sides = (None if side is None else side.to(layout.device) for side in (left, right))
                bases[name] = next(sides), next(sides)
        return cls(layout, bases, joined, diagonal)


def measured_metric(jobs: Sequence[Job], data: Data) -> KroneckerMetric:
    """Measure the metric of the gradients of jobs: the covariances in a pass each, the diagonal in another."""
    layout = jobs[0].task.layout
    joined = _joined_biases(jobs[0], data)
    standard: set[str] = set()
    while True:
        found = bases_of(jobs, data, joined, WIDEST_SIDE, _ALL)
        bases = {name: sides for name, sides in found.items() if name not in standard}
        sums: dict[str, Tensor] = {}
        changed: set[str] = set()
        for job in jobs:
            own, without, refuted = square_sums(job, data, bases, joined)
            # Later batches may show more parameters without a layer rule, or biases that belong to no matrix.
            changed |= refuted | {name for name in without if name in bases or name in joined}
            changed |= {name for name, one in joined.items() if one.bias in without}
            standard |= set(without)
            sums = {name: sums[name] + values if name in sums else values for name, values in own.items()}
        if not changed:
            break
        joined = {name: one for name, one in joined.items() if name not in changed}
    diagonal = {name: values.to(layout.dtype) / (len(data) * len(jobs)) for name, values in sums.items()}
    zeros = [name for name in layout.names if name not in diagonal and name not in _biases(joined)]
    shapes = {name: shape_of(layout, name, joined) for name in zeros}
    diagonal |= {name: torch.zeros(s, dtype=layout.dtype, device=layout.device) for name, s in shapes.items()}
    return KroneckerMetric(layout, bases, joined, diagonal)


def _biases(joined: Mapping[str, Joined]) -> set[str]:
    return {one.bias for one in joined.values()}


@dataclass
class _Pairs:
    """Compares the gradients of biases with token sums of the factors of matrices, to find which belong together."""

    layout: Layout
    uses: Mapping[str, int]
    skipped: Mapping[str, str]
    matrices: dict[str, Outer] = field(default_factory=dict)
    vectors: dict[str, Tensor] = field(default_factory=dict)
    joined: dict[str, Joined] = field(default_factory=dict)

    def receive(self, name: str, form: LayerGradients) -> None:
        """Keep the gradients of a parameter that is used once, until its partner is there."""
        if self.uses.get(name) != 1 or name in self.skipped:
            return
        if isinstance(form, Direct):
            self.vectors[name] = form.value
            self._compare(_with_ending(name, "bias", "weight"), name)
        elif isinstance(form, Outer) and not isinstance(form.left, OneHot) and form.left.tokens:
            self.matrices[name] = form
            self._compare(name, _with_ending(name, "weight", "bias"))

    def finish(self) -> None:
        """Do nothing: pairs were compared when they were complete."""

    def _compare(self, name: str, bias: str) -> None:
        if name not in self.matrices or bias not in self.vectors:
            return
        form, vector = self.matrices.pop(name), self.vectors.pop(bias)
        # Gradients of zero do not show where a bias belongs.
        if (form.groups * form.left.width, form.right.width) != matrix_shape(self.layout, name) or not vector.any():
            return
        for one in (Joined(bias, "right"), *([Joined(bias, "left")] if form.groups == 1 else [])):
            sums = one.sums(form)
            if sums.shape == vector.shape and is_bias_of(sums - vector, wide(vector), vector.dtype):
                self.joined[name] = one
                return


def _with_ending(name: str, ending: str, other: str) -> str:
    return f"{name.removesuffix(ending)}{other}" if name.endswith(ending) else ""


def _joined_biases(job: Job, data: Data) -> dict[str, Joined]:
    """Return the biases that belong to a matrix, by comparing gradients in the first batch."""
    batch = data.first(min(len(data), 32))
    first = data.take(batch.rows)
    joined: dict[str, Joined] = {}
    for _, found in project(replace(job, gather=partial(_Pairs, job.task.layout)), first, "Biases"):
        for gather in found.gathered:
            joined |= gather.joined  # type: ignore[attr-defined]
    return joined


@dataclass
class _OwnScores(SquaredCoordinates):
    """Adds up the squared coordinates of each example, with a weight for each coordinate."""

    weights: Mapping[str, Tensor] = field(kw_only=True)  # {name: (r, s)}
    scores: Tensor = field(default_factory=lambda: torch.zeros(()))  # (B,)

    def of_one_token(self, name: str, left: Tensor, right: Tensor) -> None:
        """Add the squares left ⊗ right of each example."""
        self._add(((left @ self.weights[name].to(left)) * right).sum(dim=1))

    def of_lookup(self, name: str, keys: Tensor, squares: Tensor, examples: int) -> None:
        """Add the squares of single entries of a lookup table."""
        weights = self.weights[name].to(squares)
        values = (squares * weights[keys % len(weights)]).sum(dim=1)
        self._add(values.new_zeros(examples).index_add_(0, keys // len(weights), values))

    def of_chunks(self, name: str, chunks: Iterator[Tensor]) -> None:
        """Add the squares of all examples, some at a time."""
        self._add(torch.cat([(chunk * self.weights[name]).flatten(1).sum(dim=1) for chunk in chunks]))

    def _add(self, scores: Tensor) -> None:
        self.scores = self.scores.to(scores) + scores


def _rotated_back(matrix: Tensor, left: Tensor | None, right: Tensor | None) -> Tensor:  # (q, r, s)
    matrix = matrix if left is None else left.to(matrix.dtype) @ matrix
    return matrix if right is None else matrix @ right.to(matrix.dtype).T
