"""Orthonormal bases of Krylov subspaces: the paper's Arnoldi iteration, and Lanczos with thick restarts."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from eigentrace.basis import Basis, Vectors
from eigentrace.errors import InputError, NumericalError
from eigentrace.progress import track

Matvec = Callable[[Tensor], Tensor]


class Ending(Enum):
    """How an iteration ended. Each value says what it means and what, if anything, to do about it."""

    ALL_STEPS = "ran all its steps"
    WHOLE_SPACE = "the basis spans all P dimensions: the decomposition is complete"
    INVARIANT = "the rest of the space has no curvature: every nonzero eigenvalue was found, more steps add nothing"


@dataclass(frozen=True)
class Krylov:
    """A finished iteration: A·Wᵀ = Wᵀ·T + β·w·eᵀ, W the m × P basis, w one unit vector orthogonal to it."""

    vectors: Vectors
    size: int  # m
    projected: Tensor  # T (m, m), float64, as measured: symmetric up to rounding if A is
    beta: float
    rounding: Tensor  # (m,) norm of what storing the next vector lost, times its coefficient
    ending: Ending
    symmetric: bool
    num_products: int


def arnoldi(matvec: Matvec, start: Tensor, steps: int, *, basis: Basis | None = None) -> Krylov:
    """Run the paper's Algorithm 1: right for a matvec that changes from step to step, hence no restart.

    Args:
        matvec: Multiplies the matrix with a vector of P numbers.
        start: The first vector (P,); any nonzero length.
        steps: n, the number of products.
        basis: How vectors are held.
    """
    basis = basis or Basis()
    if basis.max_vectors is not None:
        raise InputError(
            "Arnoldi cannot be restarted when the matrix changes between steps: leave Basis(max_vectors=None), or fit "
            "on a fixed sample (spread=False)."
        )
    return _iterate(matvec, start, steps, basis, symmetric=False)


def lanczos(matvec: Matvec, start: Tensor, steps: int, *, basis: Basis | None = None) -> Krylov:
    """Build the same subspace for a fixed symmetric matrix, restarting when `basis.max_vectors` are held.

    Reorthogonalisation is full and done twice, so the three-term recurrence is measured, never assumed.
    """
    return _iterate(matvec, start, steps, basis or Basis(), symmetric=True)


def _iterate(matvec: Matvec, start: Tensor, steps: int, basis: Basis, *, symmetric: bool) -> Krylov:
    steps = int(steps)
    if steps < 1:
        raise InputError(f"steps must be at least 1, got {steps}.")
    if not start.any():
        raise InputError("The start vector is zero: give one with a nonzero length.")
    state = _State(start, min(steps, start.numel()), basis)
    for product in track(range(steps), "Krylov iteration", steps):
        if symmetric and state.full:
            state.restart(basis.carried)
        found_nothing = state.extend(matvec)
        if found_nothing:
            return state.result(Ending.INVARIANT, symmetric, product + 1)
        if state.size == start.numel():
            return state.result(Ending.WHOLE_SPACE, symmetric, product + 1)
    return state.result(Ending.ALL_STEPS, symmetric, steps)


class _State:
    """The growing decomposition. `size` vectors have been multiplied; vector number `size` waits to be."""

    def __init__(self, start: Tensor, steps: int, basis: Basis) -> None:
        self.capacity = min(basis.max_vectors or steps, steps)
        self.vectors = Vectors(self.capacity + 1, start, basis)
        self.projected = torch.zeros(self.capacity + 1, self.capacity + 1, dtype=torch.float64, device="cpu")
        self.rounding = torch.zeros(self.capacity + 1, dtype=torch.float64, device="cpu")
        self.size, self.beta, self.scale = 0, 0.0, 0.0
        self.fresh = True  # whether the waiting vector is a random one rather than a residual
        # Rounding in one product is a few units in the last place of its largest part.
        self.breakdown_tol = 10 * torch.finfo(start.dtype).eps
        self.generator = torch.Generator().manual_seed(0)
        self.vectors.put(0, start / start.norm())

    @property
    def full(self) -> bool:
        return self.size == self.capacity

    def extend(self, matvec: Matvec) -> bool:
        """Multiply the waiting vector and store the next; return whether nothing is left to find."""
        j = self.size
        w = matvec(self.vectors.get(j))
        if not w.isfinite().all():
            raise NumericalError(
                f"The curvature product of step {j + 1} is not finite. An example drawn for it has a loss or gradient "
                "that is not: look at the losses of the data (eigentrace.Loss), or use precision='fp32'."
            )
        norm = float(w.norm())
        self.scale = max(self.scale, norm)
        null = norm <= self.breakdown_tol * self.scale
        coefficients, w = self._orthogonalise(w, j + 1)
        self.beta = float(w.norm())
        self.projected[: j + 1, j] = coefficients
        self.size = j + 1
        if null and self.fresh:
            # A random vector has a part in every eigenspace that is left; if it is annihilated, all of them are null.
            return True
        if self.size == self.vectors.store.shape[1]:
            return False
        self._store_next(w)
        return False

    def _orthogonalise(self, w: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Remove the basis from w: twice, and again while a pass still takes away half of what is left."""
        total, before = torch.zeros(count, dtype=torch.float64, device="cpu"), float(w.norm())
        for done in range(1, 5):
            dots = self.vectors.dots(count, w)
            w = w - self.vectors.combine(dots)
            total += dots.double().cpu()
            after = float(w.norm())
            if done >= 2 and after > 0.5 * before:
                break
            before = after
        return total, w

    def _store_next(self, w: Tensor) -> None:
        j = self.size
        self.fresh = self.beta <= self.breakdown_tol * self.scale
        if self.fresh:
            # An invariant subspace: one start vector sees one copy of a repeated eigenvalue, so go on from elsewhere.
            self.beta = 0.0
            w = torch.randn(w.shape, generator=self.generator, dtype=w.dtype, device="cpu").to(w.device)
            _, w = self._orthogonalise(w / w.norm(), j)
        lost = self.vectors.put(j, w / w.norm())
        self.rounding[j - 1] = self.beta * lost
        self.projected[j, j - 1] = self.beta

    def restart(self, keep: int) -> None:
        """Thick restart: keep the leading Ritz vectors and the residual, forget the rest."""
        m = self.size
        theta, S = _eigh(self.projected[:m, :m])
        order = theta.abs().argsort(descending=True)[:keep]
        last = self.vectors.get(m)
        mixed_lost = self.vectors.mix(S[:, order].T)
        lost = self.vectors.put(keep, last)
        coupling = self.beta * S[m - 1, order]
        self.projected.zero_()
        self.projected[range(keep), range(keep)] = theta[order]
        self.projected[keep, :keep] = coupling
        # What storage lost before the restart stays in the kept pairs, in the share each has of it; storing the
        # mixed vectors loses more, which their eigenvalue multiplies.
        spread = (self.rounding[: m - 1, None] * S[: m - 1, order]).norm(dim=0)
        self.rounding.zero_()
        parts = torch.stack([spread, coupling.abs() * lost, theta[order].abs() * mixed_lost])
        self.rounding[:keep] = parts.norm(dim=0)
        self.size = keep

    def result(self, ending: Ending, symmetric: bool, num_products: int) -> Krylov:
        m = self.size
        complete = ending in (Ending.WHOLE_SPACE, Ending.INVARIANT)
        return Krylov(
            vectors=self.vectors,
            size=m,
            projected=self.projected[:m, :m].clone(),
            beta=0.0 if complete and m == self.vectors.store.shape[1] else self.beta,
            rounding=self.rounding[:m].clone(),
            ending=ending,
            symmetric=symmetric,
            num_products=num_products,
        )


def _eigh(T: Tensor) -> tuple[Tensor, Tensor]:
    """Diagonalise the symmetric part of the projected matrix."""
    return torch.linalg.eigh((T + T.T) / 2)


def ritz(krylov: Krylov) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return Ritz values by falling |θ|, their coordinates as columns, and residual norms (None for Arnoldi).

    The residual of a pair is β·|last coordinate|: a bound on its distance from an eigenvalue. Storing the basis in a
    smaller type adds an estimate of what rounding did, the errors of the vectors taken as independent and doubled.
    """
    theta, S = _eigh(krylov.projected)
    order = theta.abs().argsort(descending=True)
    theta, S = theta[order], S[:, order]
    if not krylov.symmetric:
        return theta, S, None
    rounding = (krylov.rounding[:-1, None] * S[:-1]).norm(dim=0)
    return theta, S, krylov.beta * S[-1].abs() + 2 * rounding
