"""Solve (A + D)x = g for several g together, in the block Krylov space of a preconditioner."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from eigentrace.errors import NumericalError

Rows = Callable[[Tensor], Tensor]  # (q, P) -> (q, P)

# Rounds in which the largest residual may stay above the lowest so far. Conjugate gradients have long plateaus; longer
# ones are rounding, as in bfloat16, which no further round makes smaller.
_MOST_STALLED = 100


# Number of rounds that vectors are stored for; more may need the space to be rebuilt.
PLANNED_ROUNDS = 8


@dataclass(frozen=True)
class Known:
    """Orthonormal vectors, and their products with the matrix."""

    basis: Tensor  # (r, P)
    images: Tensor  # (r, P)


@dataclass(frozen=True)
class Solution:
    """The solutions of a block of systems."""

    vectors: Tensor  # (q, P)
    before: Tensor  # (q, P) one round earlier; what the preconditioner alone gives if there was one round
    residuals: Tensor  # (q,) ‖g − (A + D)x‖ / ‖g‖
    rounds: int
    num_products: int
    known: Known
    """The space, in which systems with other right-hand sides may begin."""


def solve(
    multiply: Rows,
    precondition: Rows,
    right: Tensor,
    rounds: int,
    *,
    tolerance: float = 0.0,
    room: int = 2**62,
    known: Callable[[], Known | None] = lambda: None,
) -> Solution:
    """Find x in the span of all preconditioned residuals so far, such that the residual is orthogonal to that span.

    For one right-hand side, these are the iterates of preconditioned conjugate gradients. Several share the space, so
    that each also uses the products made for the others.

    Args:
        multiply: Multiplies rows with the matrix, which must be symmetric and positive definite.
        precondition: Multiplies rows with an approximate inverse, symmetric and positive definite.
        right: The right-hand sides g (q, P).
        rounds: Maximum number of rounds, each of at most q products; fewer if residuals stop to fall.
        tolerance: Relative residual at which to end.
        room: Number of vectors (P,) to store besides the right-hand sides; at fewer than needed, the space is rebuilt
            from the current residuals.
        known: Returns the space of an earlier solve with the same matrix, of which as much is used as there is room
            for, or None. Whoever keeps that space besides takes its memory twice.
    """
    sizes = right.norm(dim=1).clamp_min(torch.finfo(right.dtype).tiny)
    x, residual, before = torch.zeros_like(right), right, precondition(right)
    space = _Space(right)
    begun = known()
    if begun is not None and (most := held(room, rounds, len(right))) > 0:
        space.basis, space.images = begun.basis[:most], begun.images[:most]
        x, residual = space.solution()
        before = x
    del begun
    done = products = stalled = 0
    lowest = math.inf
    for _ in range(rounds):
        largest = float((residual.norm(dim=1) / sizes).max())
        stalled = 0 if largest < lowest else stalled + 1
        lowest = min(lowest, largest)
        if largest <= tolerance or stalled > _MOST_STALLED:
            break
        if 2 * (len(space.basis) + len(right)) > room and len(space.basis):
            space = _Space(residual, x)
        new = space.fresh(precondition(residual))
        if not len(new):
            break
        space.add(new, multiply(new))
        before = x if done else before
        x, residual = space.solution()
        done, products = done + 1, products + len(new)
    return Solution(x, before, residual.norm(dim=1) / sizes, done, products, Known(space.basis, space.images))


def held(room: int, rounds: int, systems: int) -> int:
    """Return the number of vectors of an earlier space that there is room for beside those of some rounds."""
    return max(0, room // 2 - (min(rounds, PLANNED_ROUNDS) + 1) * systems)


class _Space:
    """An orthonormal basis with its products, and the systems that are to be solved in its span."""

    def __init__(self, right: Tensor, start: Tensor | None = None) -> None:
        self.right, self.start = right, torch.zeros_like(right) if start is None else start
        self.basis = self.images = right[:0]

    def fresh(self, rows: Tensor) -> Tensor:  # (q, P) -> (r, P)
        """Return an orthonormal basis of what rows add to the span."""
        eps = max((10 * torch.finfo(rows.dtype).eps) ** 2, 100 * torch.finfo(torch.float64).eps)
        rows = rows / rows.norm(dim=1, keepdim=True).clamp_min(torch.finfo(rows.dtype).tiny)
        for _ in range(3):
            rows = rows - (rows @ self.basis.T) @ self.basis
            wide = rows.double()
            values, vectors = torch.linalg.eigh(wide @ wide.T)
            # What is left of rows that are in the span, or of repeated ones, is rounding.
            kept = values > eps * len(rows)
            mix = (vectors[:, kept] / values[kept].sqrt()).T.to(rows.dtype)
            rows = mix @ rows
        return rows

    def add(self, new: Tensor, images: Tensor) -> None:
        """Add vectors, which are orthonormal to the basis, with their products."""
        self.basis, self.images = torch.cat([self.basis, new]), torch.cat([self.images, images])

    def solution(self) -> tuple[Tensor, Tensor]:  # (q, P), (q, P)
        """Return the solutions in the span, and the residuals."""
        projected = (self.basis @ self.images.T).double()
        projected = (projected + projected.T) / 2
        factor, failed = torch.linalg.cholesky_ex(projected)
        if int(failed):
            raise NumericalError(
                "The curvature with its damping is not positive definite, so the system cannot be solved by conjugate "
                "gradients. Use a larger damping, or curvature='gauss-newton'; if it is that already, the damping is "
                "less than rounding: load the model in float32 or float64."
            )
        mix = torch.cholesky_solve((self.basis @ self.right.T).double(), factor).T.to(self.right.dtype)
        return self.start + mix @ self.basis, self.right - mix @ self.images
