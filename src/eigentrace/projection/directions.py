"""Directions that gradients are projected on: dense vectors, coordinates, rotated coordinates, or several stacked."""

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
    """Those of the directions, or that piece of them, which meet one parameter."""

    def add(self, form: LayerGradients, out: Tensor, budget: int) -> None:  # (B, K)
        """Add what one parameter's gradients contribute to the features."""
        ...


class Directions(Protocol):
    """K linear functions of the parameter vector."""

    @property
    def count(self) -> int:
        """K."""
        ...

    def dense(self, start: int, stop: int) -> Tensor:  # (stop - start, P)
        """Write some of the directions out."""
        ...

    def parts(self, name: str, offset: int = 0) -> Iterator[Part]:
        """Yield what meets one parameter; the first of these directions stands in column `offset` of the features."""
        ...


def apply(directions: Directions, gradients: Mapping[str, Tensor]) -> Tensor:  # {name: (B, *s)} -> (B, K)
    """Multiply written-out gradients, parameter by parameter so that they are never copied side by side."""
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
    """A block of columns of dense directions."""

    matrix: Tensor  # (K, p)
    offset: int

    def add(self, form: LayerGradients, out: Tensor, budget: int) -> None:
        """Add the products with the directions."""
        self.put(form.dot(self.matrix, budget), out)

    def put(self, products: Tensor, out: Tensor) -> None:  # (B, k) -> (B, K)
        """Add products that were computed elsewhere."""
        out[:, self.offset : self.offset + len(self.matrix)] += products.to(out.dtype)


@dataclass(frozen=True)
class DenseDirections:
    """Directions given as a matrix, in any floating type, on any device."""

    matrix: Tensor  # (K, P)
    layout: Layout

    @property
    def count(self) -> int:
        """K."""
        return self.matrix.shape[0]

    def dense(self, start: int, stop: int) -> Tensor:
        """Write some of the directions out."""
        return self.matrix[start:stop].to(self.layout.device, self.layout.dtype)

    def parts(self, name: str, offset: int = 0) -> Iterator[Part]:
        """Yield the columns of one parameter."""
        if self.count:
            yield DensePart(self.matrix[:, self.layout.span(name)], offset)


@dataclass(frozen=True)
class CoordinatePart:
    """Directions that pick coordinates of one parameter."""

    index: Tensor  # (k,) within the parameter
    columns: Tensor  # (k,)

    def add(self, form: LayerGradients, out: Tensor, budget: int) -> None:
        """Copy the coordinates."""
        out[:, self.columns] += form.pick(self.index).to(out.dtype)


@dataclass(frozen=True)
class CoordinateDirections:
    """Directions that each pick one coordinate: K numbers instead of K × P."""

    index: Tensor  # (K,) positions in the flat vector
    layout: Layout

    @property
    def count(self) -> int:
        """K."""
        return len(self.index)

    def dense(self, start: int, stop: int) -> Tensor:
        """Write some of the directions out."""
        index = self.index[start:stop].to(self.layout.device)
        directions = torch.zeros(len(index), self.layout.numel, dtype=self.layout.dtype, device=self.layout.device)
        return directions.scatter_(1, index[:, None], 1.0)

    def parts(self, name: str, offset: int = 0) -> Iterator[Part]:
        """Yield the coordinates that lie in one parameter."""
        span = self.layout.span(name)
        here = ((self.index >= span.start) & (self.index < span.stop)).nonzero().squeeze(1)
        if len(here):
            device = self.layout.device
            yield CoordinatePart((self.index[here] - span.start).to(device), here.to(device) + offset)


def none(layout: Layout) -> CoordinateDirections:
    """Return no directions."""
    return CoordinateDirections(torch.empty(0, dtype=torch.long), layout)


@dataclass(frozen=True)
class Rotation:
    """Which coordinates of one parameter's gradient to take, after turning both of its sides.

    A matrix parameter is read as (L, R): its first dimension, and all others together. A direction is
    left[:, i] ⊗ right[:, j]; None stands for the natural basis of that side.
    """

    left: Tensor | None  # (L, r)
    right: Tensor | None  # (R, s)
    pairs: Tensor  # (2, k) columns of left and of right

    def trimmed(self) -> "Rotation":
        """Return the same coordinates without the columns that none of them uses."""
        left, i = _used(self.left, self.pairs[0])
        right, j = _used(self.right, self.pairs[1])
        return Rotation(left, right, torch.stack([i, j]))

    def picked(self, index: Tensor) -> "Rotation":
        """Return some of the coordinates."""
        return Rotation(self.left, self.right, self.pairs[:, index]).trimmed()


def _used(basis: Tensor | None, columns: Tensor) -> tuple[Tensor | None, Tensor]:
    if basis is None:
        return None, columns
    used, place = columns.unique(return_inverse=True)
    return basis[:, used].contiguous(), place


def matrix_shape(layout: Layout, name: str) -> tuple[int, int]:
    """Read a parameter as a matrix: its first dimension, and all others together."""
    shape = layout.shapes[layout.names.index(name)]
    length = shape[0] if shape else 1
    return length, shape.numel() // max(length, 1)


@dataclass(frozen=True)
class RotatedPart:
    """Rotated coordinates of one parameter."""

    rotation: Rotation
    shape: tuple[int, int]
    offset: int

    def add(self, form: LayerGradients, out: Tensor, budget: int) -> None:
        """Turn the factors and take the coordinates, some examples at a time where gradients come written out."""
        rotation, count = self.rotation, self.rotation.pairs.shape[1]
        if isinstance(form, Outer) and form.groups == 1:
            found = form.rotate(rotation.left, rotation.right, rotation.pairs, budget)
        elif rotation.left is None and rotation.right is None:
            found = form.pick(rotation.pairs[0] * self.shape[1] + rotation.pairs[1])
        else:
            # Gradients, what turning one side makes of them, and both sides; in at least four bytes each.
            at_once = max(1, budget // (24 * max(self.shape[0] * self.shape[1], 1)))
            starts = range(0, form.examples, at_once)
            written = [self._of_written(form.write(i, min(i + at_once, form.examples))) for i in starts]
            found = torch.cat(written)
        out[:, self.offset : self.offset + count] += found.to(out.dtype)

    def _of_written(self, gradients: Tensor) -> Tensor:  # (n, p) -> (n, k)
        turned = gradients.unflatten(1, self.shape)
        if self.rotation.left is not None:
            turned = self.rotation.left.to(turned.dtype).T @ turned
        if self.rotation.right is not None:
            turned = turned @ self.rotation.right.to(turned.dtype)
        i, j = self.rotation.pairs
        return turned[:, i, j]


@dataclass(frozen=True)
class RotatedDirections:
    """Coordinates of gradients in a two-sided rotated basis, parameter after parameter.

    A direction costs two vectors instead of P numbers, and a thousand of them little more than the rotation.
    """

    rotations: Mapping[str, Rotation]
    layout: Layout

    def __post_init__(self) -> None:
        unknown = sorted(set(self.rotations) - set(self.layout.names))
        if unknown:
            raise InputError(f"Rotations are given for {unknown}, which are not among the selected parameters.")

    @property
    def count(self) -> int:
        """K."""
        return sum(self.rotations[name].pairs.shape[1] for name in self._names)

    @property
    def _names(self) -> list[str]:
        return [name for name in self.layout.names if name in self.rotations]

    def dense(self, start: int, stop: int) -> Tensor:
        """Write some of the directions out."""
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
        """Yield the coordinates of one parameter."""
        for other in self._names:
            rotation = self.rotations[other]
            if other == name:
                yield RotatedPart(rotation, matrix_shape(self.layout, name), offset)
            offset += rotation.pairs.shape[1]

    def picked(self, index: Tensor) -> "RotatedDirections":  # (k,) ascending
        """Return some of the directions."""
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
    """Several kinds of directions, one after the other."""

    stacked: Sequence[Directions]

    @property
    def count(self) -> int:
        """K."""
        return sum(directions.count for directions in self.stacked)

    def dense(self, start: int, stop: int) -> Tensor:
        """Write some of the directions out."""
        pieces, offset = [], 0
        for directions in self.stacked:
            low, high = max(start - offset, 0), min(stop - offset, directions.count)
            if low < high:
                pieces.append(directions.dense(low, high))
            offset += directions.count
        return torch.cat(pieces)

    def parts(self, name: str, offset: int = 0) -> Iterator[Part]:
        """Yield what meets one parameter, of every kind."""
        for directions in self.stacked:
            yield from directions.parts(name, offset)
            offset += directions.count


@dataclass(frozen=True)
class NarrowedDirections:
    """Directions seen by some of the parameters only."""

    directions: Directions
    whole: Layout
    layout: Layout

    @property
    def count(self) -> int:
        """K."""
        return self.directions.count

    def dense(self, start: int, stop: int) -> Tensor:
        """Write some of the directions out, without the columns of other parameters."""
        directions = self.directions.dense(start, stop)
        return torch.cat([directions[:, self.whole.span(name)] for name in self.layout.names], dim=1)

    def parts(self, name: str, offset: int = 0) -> Iterator[Part]:
        """Yield what meets one parameter."""
        return self.directions.parts(name, offset)
