"""Orthonormal bases of Krylov subspaces: the paper's Arnoldi iteration, and Lanczos with thick restarts."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import torch
from torch import Tensor

from eigentrace.errors import InputError, NumericalError
from eigentrace.krylov.vectors import Basis, Vectors
from eigentrace.progress import track

Matvec = Callable[[Tensor], Tensor]


class Ending(Enum):
    """How an iteration ended; the value of a member is its description."""

    ALL_STEPS = "ran all its steps"
    WHOLE_SPACE = "the basis spans all P dimensions: the decomposition is complete"
    INVARIANT = "the rest of the space has no curvature: all nonzero eigenvalues were found, and more steps add nothing"


@dataclass(frozen=True)
class Krylov:
    """A finished iteration: A·Wᵀ = Wᵀ·T + β·w·eᵀ, with the m × P basis W and a unit vector w orthogonal to it."""

    vectors: Vectors
    size: int  # m
    projected: Tensor  # T (m, m), float64, as computed: symmetric up to rounding if A is
    beta: float
    rounding: Tensor  # (m,) norm of the rounding error of storing the next vector, times its coefficient
    ending: Ending
    symmetric: bool
    num_products: int


@dataclass(frozen=True)
class Snapshot:
    """The state of an iteration besides its vectors; both together are sufficient to resume it."""

    projected: Tensor  # (size + 1, size + 1) float64
    rounding: Tensor  # (size + 1,) float64
    generator: Tensor  # state of the generator of random vectors
    size: int  # number of vectors that have been multiplied
    count: int  # number of vectors: one more than `size`, unless nothing is left to multiply
    restarts: int
    num_products: int
    beta: float
    scale: float
    fresh: bool
    symmetric: bool
    ending: Ending | None  # None while it is running


class Memory(Protocol):
    """Storage for the state of an iteration, from which another process can resume it."""

    def recall(self, store: Tensor) -> Snapshot | None:  # (capacity, P)
        """Load the stored vectors into the start of `store`, and return the snapshot; None if nothing is stored."""
        ...

    def is_finished(self) -> bool:
        """Return whether a finished iteration is stored."""
        ...

    def is_due(self) -> bool:
        """Return whether the state should be stored again; that of a finished iteration is always stored."""
        ...

    def keep(self, store: Tensor, snapshot: Snapshot) -> None:  # (capacity, P)
        """Store the first `snapshot.count` vectors; those stored before do not change until the next restart."""
        ...


def arnoldi(
    matvec: Matvec, start: Tensor, steps: int, *, basis: Basis | None = None, memory: Memory | None = None
) -> Krylov:
    """Run the paper's Algorithm 1, without restarts; the matvec may change from step to step.

    Args:
        matvec: Multiplies the matrix with a vector of P numbers.
        start: The first vector (P,), of any nonzero norm.
        steps: n, the number of products.
        basis: How vectors are stored.
        memory: Storage for the state; an iteration that it contains is resumed.
    """
    basis = basis or Basis()
    if basis.max_vectors is not None:
        raise InputError(
            "Arnoldi cannot be restarted when the matrix changes between steps: use Basis(max_vectors=None), or fit "
            "on a fixed sample (spread=False)."
        )
    return _iterate(matvec, start, steps, basis, symmetric=False, memory=memory)


def lanczos(
    matvec: Matvec, start: Tensor, steps: int, *, basis: Basis | None = None, memory: Memory | None = None
) -> Krylov:
    """Run Lanczos iteration for a fixed symmetric matrix, with thick restarts at `basis.max_vectors` vectors.

    Every vector is orthogonalised against all others twice, so that T is computed, not assumed to be tridiagonal.
    """
    return _iterate(matvec, start, steps, basis or Basis(), symmetric=True, memory=memory)


def finished(memory: Memory, like: Tensor, steps: int, *, basis: Basis | None = None) -> Krylov | None:
    """Return the stored iteration if it is finished, without a product; `like` is any vector (P,)."""
    if not memory.is_finished():
        return None
    state = _State(like, min(int(steps), like.numel()), basis or Basis(), symmetric=False)
    return state.result() if state.recall(memory) else None


def _iterate(
    matvec: Matvec, start: Tensor, steps: int, basis: Basis, *, symmetric: bool, memory: Memory | None
) -> Krylov:
    steps = int(steps)
    if steps < 1:
        raise InputError(f"steps must be at least 1, got {steps}.")
    if not start.any():
        raise InputError("The start vector is zero: pass one with a nonzero norm.")
    state = _State(start, min(steps, start.numel()), basis, symmetric)
    if memory is None or not state.recall(memory):
        state.begin(start)
    ahead = 0 if state.ending else steps - state.num_products
    for _ in track(range(ahead), "Krylov iteration", ahead):
        if symmetric and state.full:
            state.restart(basis.carried)
        found_nothing = state.extend(matvec)
        if found_nothing:
            state.ending = Ending.INVARIANT
        elif state.size == start.numel():
            state.ending = Ending.WHOLE_SPACE
        elif state.num_products == steps:
            state.ending = Ending.ALL_STEPS
        if memory is not None and (state.ending or memory.is_due()):
            memory.keep(state.vectors.store, state.snapshot())
        if state.ending not in (None, Ending.ALL_STEPS):
            break
    return state.result()


class _State:
    """The state of a running iteration: `size` vectors have been multiplied, vector number `size` is next."""

    def __init__(self, like: Tensor, steps: int, basis: Basis, symmetric: bool) -> None:
        self.capacity = min(basis.max_vectors or steps, steps)
        self.vectors = Vectors(self.capacity + 1, like, basis)
        self.projected = torch.zeros(self.capacity + 1, self.capacity + 1, dtype=torch.float64, device="cpu")
        self.rounding = torch.zeros(self.capacity + 1, dtype=torch.float64, device="cpu")
        self.size, self.count, self.restarts, self.num_products = 0, 0, 0, 0
        self.beta, self.scale = 0.0, 0.0
        self.fresh = True  # whether the next vector is random rather than a residual
        # The rounding error of a product is a few units in the last place of its largest component.
        self.breakdown_tol = 10 * torch.finfo(like.dtype).eps
        self.generator = torch.Generator().manual_seed(0)
        self.symmetric = symmetric
        self.ending: Ending | None = None

    def begin(self, start: Tensor) -> None:
        """Store the start vector as the next to be multiplied."""
        self.vectors.put(0, start / start.norm())
        self.count = 1

    def snapshot(self) -> Snapshot:
        """Return a copy of everything besides the vectors that the next steps and the result depend on."""
        held = self.size + 1
        return Snapshot(
            projected=self.projected[:held, :held].clone(),
            rounding=self.rounding[:held].clone(),
            generator=self.generator.get_state(),
            size=self.size,
            count=self.count,
            restarts=self.restarts,
            num_products=self.num_products,
            beta=self.beta,
            scale=self.scale,
            fresh=self.fresh,
            symmetric=self.symmetric,
            ending=self.ending,
        )

    def recall(self, memory: Memory) -> bool:
        """Restore the state from a memory; return whether it contained one."""
        snapshot = memory.recall(self.vectors.store)
        if snapshot is None:
            return False
        held = snapshot.size + 1
        self.projected[:held, :held] = snapshot.projected
        self.rounding[:held] = snapshot.rounding
        self.generator.set_state(snapshot.generator)
        self.size, self.count, self.restarts = snapshot.size, snapshot.count, snapshot.restarts
        self.num_products, self.symmetric, self.ending = snapshot.num_products, snapshot.symmetric, snapshot.ending
        self.beta, self.scale, self.fresh = snapshot.beta, snapshot.scale, snapshot.fresh
        return True

    @property
    def full(self) -> bool:
        return self.size == self.capacity

    def extend(self, matvec: Matvec) -> bool:
        """Multiply the current vector and store the next; return whether no curvature is left to find."""
        j = self.size
        w = matvec(self.vectors.get(j))
        if not w.isfinite().all():
            raise NumericalError(
                f"The curvature product of step {j + 1} is not finite. An example drawn for it has a loss or gradient "
                "that is not finite. Check the losses of the data (eigentrace.Loss), or use precision='fp32'."
            )
        norm = float(w.norm())
        self.scale = max(self.scale, norm)
        null = norm <= self.breakdown_tol * self.scale
        coefficients, w = self._orthogonalise(w, j + 1)
        self.beta = float(w.norm())
        self.projected[: j + 1, j] = coefficients
        self.size = j + 1
        self.num_products += 1
        if null and self.fresh:
            # A random vector has a component in every remaining eigenspace: if its product is zero, none has curvature.
            return True
        if self.size == self.vectors.store.shape[1]:
            return False
        self._store_next(w)
        return False

    def _orthogonalise(self, w: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Orthogonalise w to the basis: twice, and again while a pass removes at least half of its norm."""
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
            # An invariant subspace: one start vector finds one copy of a repeated eigenvalue: continue from another.
            self.beta = 0.0
            w = torch.randn(w.shape, generator=self.generator, dtype=w.dtype, device="cpu").to(w.device)
            _, w = self._orthogonalise(w / w.norm(), j)
        lost = self.vectors.put(j, w / w.norm())
        self.count = j + 1
        self.rounding[j - 1] = self.beta * lost
        self.projected[j, j - 1] = self.beta

    def restart(self, keep: int) -> None:
        """Perform a thick restart: keep the leading Ritz vectors and the residual, discard the rest."""
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
        # Rounding errors from before the restart remain in the kept pairs, in proportion to their coefficients. Storing
        # the mixed vectors adds errors, which are multiplied by the eigenvalue.
        spread = (self.rounding[: m - 1, None] * S[: m - 1, order]).norm(dim=0)
        self.rounding.zero_()
        parts = torch.stack([spread, coupling.abs() * lost, theta[order].abs() * mixed_lost])
        self.rounding[:keep] = parts.norm(dim=0)
        self.size, self.count = keep, keep + 1
        self.restarts += 1

    def result(self) -> Krylov:
        m, ending = self.size, self.ending or Ending.ALL_STEPS
        complete = ending in (Ending.WHOLE_SPACE, Ending.INVARIANT)
        return Krylov(
            vectors=self.vectors,
            size=m,
            projected=self.projected[:m, :m].clone(),
            beta=0.0 if complete and m == self.vectors.store.shape[1] else self.beta,
            rounding=self.rounding[:m].clone(),
            ending=ending,
            symmetric=self.symmetric,
            num_products=self.num_products,
        )


def _eigh(T: Tensor) -> tuple[Tensor, Tensor]:
    """Diagonalise the symmetric part of the projected matrix."""
    return torch.linalg.eigh((T + T.T) / 2)


def ritz(krylov: Krylov) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return Ritz values by descending |θ|, their vectors in the basis as columns, and residuals (None for Arnoldi).

    The residual of a pair is β·|last component|: a bound on its distance from an eigenvalue. For a basis stored in a
    smaller type, an estimate of the rounding error is added, which assumes independent errors and is doubled.
    """
    theta, S = _eigh(krylov.projected)
    order = theta.abs().argsort(descending=True)
    theta, S = theta[order], S[:, order]
    if not krylov.symmetric:
        return theta, S, None
    rounding = (krylov.rounding[:-1, None] * S[:-1]).norm(dim=0)
    return theta, S, krylov.beta * S[-1].abs() + 2 * rounding
