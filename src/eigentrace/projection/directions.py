"""Directions on which gradients are projected: dense vectors, coordinates, rotated coordinates, or several kinds."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Protocol

import torch
from torch import Tensor

from eigentrace.errors import InputError
from eigentrace.gradients.layer_gradients import Direct, LayerGradients
from eigentrace.gradients.outer_products import Outer
from eigentrace.task.layout import Layout


class Part(Protocol):
    """The components of directions along one parameter, for those directions that have any."""

    def add(self, form: LayerGradients, out: Tensor, budget: int) -> None:  # (B, K)
        """Add the contribution of the parameter's gradients to the features."""
        ...


class Directions(Protocol):
    """K vectors in parameter space, on which gradients are projected."""

    @property
    def count(self) -> int:
        """The number of directions, K."""
        ...

    def dense(self, start: int, stop: int) -> Tensor:  # (stop - start, P)
        """Return the directions from `start` to `stop` as a matrix."""
        ...

    def parts(self, name: str, offset: int = 0) -> Iterator[Part]:
        """Yield the parts along one parameter; the first direction writes to column `offset` of the features."""
        ...


def apply(directions: Directions, gradients: Mapping[str, Tensor]) -> Tensor:  # {name: (B, *s)} -> (B, K)
    """Multiply dense gradients by the directions, parameter by parameter to avoid concatenating them."""
    first = next(iter(gradients.values()))
    wide = reduce(torch.promote_types, (gradient.dtype for gradient in gradients.values()), torch.float32)
    out = torch.zeros(len(first), directions.count, dtype=wide, device=first.device)
    for name, gradient in gradients.items():
        form = Direct(gradient.reshape(len(first), gradient[0].numel()))
        for part in directions.parts(name):
            part.add(form, out, budget=out.nbytes)
    return out


@dataclass(frozen=True)
class DensePart:
    """The columns of dense directions that belong to one parameter."""

    matrix: Tensor  # (K, p)
    offset: int

    def add(self, form: LayerGradients, out: Tensor, budget: int) -> None:
        """Add the products of gradients and directions."""
        self.put(form.dot(self.matrix, budget), out)

    def put(self, products: Tensor, out: Tensor) -> None:  # (B, k) -> (B, K)
        """Add products that are already computed."""
        out[:, self.offset : self.offset + len(self.matrix)] += products.to(out.dtype)


@dataclass(frozen=True)
class DenseDirections:
    """Directions stored as a matrix, of any floating-point type, on any device."""

    matrix: Tensor  # (K, P)
    layout: Layout

    @property
    def count(self) -> int:
        """The number of directions, K."""
        return self.matrix.shape[0]

    def dense(self, start: int, stop: int) -> Tensor:
        """Return the directions from `start` to `stop` as a matrix."""
        return self.matrix[start:stop].to(self.layout.device, self.layout.dtype)

    def parts(self, name: str, offset: int = 0) -> Iterator[Part]:
        """Yield the columns of one parameter, if there are any directions."""
        if self.count:
            yield DensePart(self.matrix[:, self.layout.span(name)], offset)


@dataclass(frozen=True)
class CoordinatePart:
    """Directions that each select one coordinate of a parameter."""

    index: Tensor  # (k,) within the parameter
    columns: Tensor  # (k,)

    def add(self, form: LayerGradients, out: Tensor, budget: int) -> None:
        """Add the coordinates to their columns."""
        out[:, self.columns] += form.pick(self.index).to(out.dtype)


@dataclass(frozen=True)
class CoordinateDirections:
    """Directions that each select one coordinate, stored as K indices instead of K × P numbers."""

    index: Tensor  # (K,) positions in the flat vector
    layout: Layout

    @property
    def count(self) -> int:
        """The number of directions, K."""
        return len(self.index)

    def dense(self, start: int, stop: int) -> Tensor:
        """Return the directions from `start` to `stop` as a matrix."""
        index = self.index[start:stop].to(self.layout.device)
        directions = torch.zeros(len(index), self.layout.numel, dtype=self.layout.dtype, device=self.layout.device)
        return directions.scatter_(1, index[:, None], 1.0)

    def parts(self, name: str, offset: int = 0) -> Iterator[Part]:
        """Yield the coordinates of one parameter, if there are any."""
        span = self.layout.span(name)
        here = ((self.index >= span.start) & (self.index < span.stop)).nonzero().squeeze(1)
        if len(here):
            device = self.layout.device
            yield CoordinatePart((self.index[here] - span.start).to(device), here.to(device) + offset)


def none(layout: Layout) -> CoordinateDirections:
    """Return an empty set of directions."""
    return CoordinateDirections(torch.empty(0, dtype=torch.long), layout)


@dataclass(frozen=True)
class Rotation:
    """Coordinates of one parameter's gradient in a two-sided rotated basis.

    A parameter is viewed as a matrix (L, R): its first dimension, and all others flattened. A direction is
    left[:, i] ⊗ right[:, j]; None means the standard basis on that side.
    """

    left: Tensor | None  # (L, r)
    right: Tensor | None  # (R, s)
    pairs: Tensor  # (2, k) columns of left and of right

    def trimmed(self) -> "Rotation":
        """Return the same coordinates without unused columns of the bases."""
        left, i = _used(self.left, self.pairs[0])
        right, j = _used(self.right, self.pairs[1])
        return Rotation(left, right, torch.stack([i, j]))

    def picked(self, index: Tensor) -> "Rotation":
        """Return the coordinates with these indices."""
        return Rotation(self.left, self.right, self.pairs[:, index]).trimmed()


def _used(basis: Tensor | None, columns: Tensor) -> tuple[Tensor | None, Tensor]:
    if basis is None:
        return None, columns
    used, place = columns.unique(return_inverse=True)
    return basis[:, used].contiguous(), place


def matrix_shape(layout: Layout, name: str) -> tuple[int, int]:
    """Return the shape of a parameter viewed as a matrix: its first dimension, and all others flattened."""
    shape = layout.shapes[layout.names.index(name)]
    length = shape[0] if shape else 1
    return length, shape.numel() // max(length, 1)


@dataclass(frozen=True)
class RotatedPart:
    """The rotated coordinates of one parameter."""

    rotation: Rotation
    shape: tuple[int, int]
    offset: int

    def add(self, form: LayerGradients, out: Tensor, budget: int) -> None:
        """Add the coordinates of the rotated factors, or of rotated dense gradients, some examples at a time."""
        rotation, count = self.rotation, self.rotation.pairs.shape[1]
        if isinstance(form, Outer) and form.groups == 1:
            found = form.rotate(rotation.left, rotation.right, rotation.pairs, budget)
        elif rotation.left is None and rotation.right is None:
            found = form.pick(rotation.pairs[0] * self.shape[1] + rotation.pairs[1])
        else:
            # Gradients as they are, rotated on one side, and on both sides; at most 8 bytes per number.
            at_once = max(1, budget // (24 * max(self.shape[0] * self.shape[1], 1)))
            starts = range(0, form.examples, at_once)
            dense = [self._of_dense(form.write(i, min(i + at_once, form.examples))) for i in starts]
            found = torch.cat(dense)
        out[:, self.offset : self.offset + count] += found.to(out.dtype)

    def _of_dense(self, gradients: Tensor) -> Tensor:  # (n, p) -> (n, k)
        rotated = gradients.unflatten(1, self.shape)
        if self.rotation.left is not None:
            rotated = self.rotation.left.to(rotated.dtype).T @ rotated
        if self.rotation.right is not None:
            rotated = rotated @ self.rotation.right.to(rotated.dtype)
        i, j = self.rotation.pairs
        return rotated[:, i, j]


@dataclass(frozen=True)
class RotatedDirections:
    """Directions that each select one coordinate of a two-sided rotated basis, in the order of the parameters.

    A direction is stored as two vectors instead of P numbers; a thousand of them cost little more than the rotation.
    """

    rotations: Mapping[str, Rotation]
    layout: Layout

    def __post_init__(self) -> None:
        unknown = sorted(set(self.rotations) - set(self.layout.names))
        if unknown:
            raise InputError(
                f"Got rotations for {unknown}, which are not among the selected parameters. Expected only names "
                "of selected parameters: leave the others out."
            )

    @property
    def count(self) -> int:
        """The number of directions, K."""
        return sum(self.rotations[name].pairs.shape[1] for name in self._names)

    @property
    def _names(self) -> list[str]:
        return [name for name in self.layout.names if name in self.rotations]

    def dense(self, start: int, stop: int) -> Tensor:
        """Return the directions from `start` to `stop` as a matrix."""
        directions = torch.zeros(stop - start, self.layout.numel, dtype=self.layout.dtype, device=self.layout.device)
        offset = 0
        for name in self._names:
            rotation, span = self.rotations[name], self.layout.span(name)
            for k, (i, j) in enumerate(rotation.pairs.T.tolist()):
                if start <= offset + k < stop:
                    L, R = matrix_shape(self.layout, name)
                    left = _column(rotation.left, i, L, directions)
                    right = _column(rotation.right, j, R, directions)
                    directions[offset + k - start, span] = torch.outer(left, right).flatten()
            offset += rotation.pairs.shape[1]
        return directions

    def parts(self, name: str, offset: int = 0) -> Iterator[Part]:
        """Yield the coordinates of one parameter, if there are any."""
        for other in self._names:
            rotation = self.rotations[other]
            if other == name:
                yield RotatedPart(rotation, matrix_shape(self.layout, name), offset)
            offset += rotation.pairs.shape[1]

    def picked(self, index: Tensor) -> "RotatedDirections":  # (k,) ascending
        """Return the directions with these indices."""
        rotations, offset = {}, 0
        for name in self._names:
            count = self.rotations[name].pairs.shape[1]
            here = index[(index >= offset) & (index < offset + count)] - offset
            if len(here):
                rotations[name] = self.rotations[name].picked(here.to(self.rotations[name].pairs.device))
            offset += count
        return RotatedDirections(rotations, self.layout)


def _column(basis: Tensor | None, index: int, size: int, like: Tensor) -> Tensor:
    if basis is not None:
        return basis[:, index].to(like)
    column = torch.zeros(size, dtype=like.dtype, device=like.device)
    column[index] = 1.0
    return column


@dataclass(frozen=True)
class StackedDirections:
    """Several sets of directions, concatenated."""

    stacked: Sequence[Directions]

    @property
    def count(self) -> int:
        """The number of directions, K."""
        return sum(directions.count for directions in self.stacked)

    def dense(self, start: int, stop: int) -> Tensor:
        """Return the directions from `start` to `stop` as a matrix."""
        pieces, offset = [], 0
        for directions in self.stacked:
            low, high = max(start - offset, 0), min(stop - offset, directions.count)
            if low < high:
                pieces.append(directions.dense(low, high))
            offset += directions.count
        return torch.cat(pieces)

    def parts(self, name: str, offset: int = 0) -> Iterator[Part]:
        """Yield the parts along one parameter of every set."""
        for directions in self.stacked:
            yield from directions.parts(name, offset)
            offset += directions.count


@dataclass(frozen=True)
class NarrowedDirections:
    """Directions restricted to some of the parameters."""

    directions: Directions
    whole: Layout
    layout: Layout

    @property
    def count(self) -> int:
        """The number of directions, K."""
        return self.directions.count

    def dense(self, start: int, stop: int) -> Tensor:
        """Return the directions from `start` to `stop` as a matrix, restricted to the selected parameters."""
        directions = self.directions.dense(start, stop)
        return torch.cat([directions[:, self.whole.span(name)] for name in self.layout.names], dim=1)

    def parts(self, name: str, offset: int = 0) -> Iterator[Part]:
        """Yield the parts along one parameter."""
        return self.directions.parts(name, offset)
