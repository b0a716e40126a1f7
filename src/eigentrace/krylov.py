"""Orthonormal bases of Krylov subspaces: the paper's Arnoldi iteration, and Lanczos with thick restarts."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Literal

import torch
from torch import Tensor

from eigentrace.errors import InputError, NumericalError
from eigentrace.progress import track

Matvec = Callable[[Tensor], Tensor]

# Chunks of the basis that are brought to the working precision (and device) at a time: 64 MiB of float32.
_CHUNK_NUMBERS = 1 << 24


class Ending(Enum):
    """How an iteration ended. Each value says what it means and what, if anything, to do about it."""

    ALL_STEPS = "ran all its steps"
    WHOLE_SPACE = "the basis spans all P dimensions: the decomposition is complete"
    INVARIANT = "the rest of the space has no curvature: every nonzero eigenvalue was found, more steps add nothing"


@dataclass(frozen=True, kw_only=True)
class Basis:
    """How the Krylov vectors are held."""

    dtype: Literal["fp32", "bf16"] = "fp32"
    """fp32 follows the parameters (fp64 for float64 models); bf16 halves the memory at about 1e-4 in eigenvalues."""
    place: Literal["device", "host"] = "device"
    """Where the vectors live: beside the model, or in host memory."""
    max_vectors: int | None = None
    """Restart when this many are held (Lanczos only); None holds one per step."""
    restart_keep: int | None = None
    """Ritz vectors carried over a restart; 60% of max_vectors if None."""

    def __post_init__(self) -> None:
        if self.dtype not in ("fp32", "bf16"):
            raise InputError(f"Basis dtype must be 'fp32' or 'bf16', got {self.dtype!r}.")
        if self.place not in ("device", "host"):
            raise InputError(f"Basis place must be 'device' or 'host', got {self.place!r}.")
        if self.max_vectors is not None and self.max_vectors < 3:
            raise InputError(f"Basis max_vectors must be at least 3, got {self.max_vectors}.")
        if self.restart_keep is not None and not 1 <= self.restart_keep < (self.max_vectors or 0):
            raise InputError(
                f"Basis restart_keep must lie between 1 and max_vectors - 1, got {self.restart_keep} with "
                f"max_vectors={self.max_vectors}."
            )

    @property
    def carried(self) -> int:
        """Ritz vectors kept at a restart."""
        limit = self.max_vectors or 0
        return self.restart_keep or max(1, min(limit - 2, round(0.6 * limit)))


class Vectors:
    """Rows of P numbers, stored in one type and place, multiplied in another.

    Dot products accumulate in the working type (float32 or float64) whatever the storage.
    """

    def __init__(self, count: int, like: Tensor, basis: Basis) -> None:
        self.working, self.device = like.dtype, like.device
        dtype = torch.bfloat16 if basis.dtype == "bf16" else like.dtype
        device = like.device if basis.place == "device" else torch.device("cpu")
        self.store = torch.empty(count, like.numel(), dtype=dtype, device=device)
        self._direct = dtype == like.dtype and device == like.device

    def get(self, index: int) -> Tensor:  # (P,)
        """Return one vector in the working type."""
        return self.store[index].to(self.device, self.working)

    def put(self, index: int, vector: Tensor) -> float:
        """Store a vector and return the norm of what rounding lost."""
        self.store[index] = vector.to(self.store.device, self.store.dtype)
        return 0.0 if self._direct else float((self.get(index) - vector).norm())

    def dots(self, count: int, w: Tensor) -> Tensor:  # (P,) -> (count,)
        """Multiply the first `count` vectors with w."""
        if self._direct:
            return self.store[:count] @ w
        total = torch.zeros(count, dtype=self.working, device=self.device)
        for start, stop in self._chunks(count):
            total += self._part(count, start, stop) @ w[start:stop]
        return total

    def combine(self, coefficients: Tensor) -> Tensor:  # (k, count) -> (k, P)
        """Form k linear combinations of the first `count` vectors."""
        coefficients = coefficients.to(self.device, self.working)
        count = coefficients.shape[-1]
        if self._direct:
            return coefficients @ self.store[:count]
        result = torch.empty(*coefficients.shape[:-1], self.store.shape[1], dtype=self.working, device=self.device)
        for start, stop in self._chunks(count):
            result[..., start:stop] = coefficients @ self._part(count, start, stop)
        return result

    def mix(self, coefficients: Tensor) -> Tensor:  # (k, count) -> (k,)
        """Replace the first k vectors by combinations of the first `count`; return the norms of what rounding lost."""
        k, count = coefficients.shape
        coefficients = coefficients.to(self.device, self.working)
        lost = torch.zeros(k, dtype=torch.float64, device="cpu")
        for start, stop in self._chunks(count):
            mixed = coefficients @ self._part(count, start, stop)
            self.store[:k, start:stop] = mixed.to(self.store.device, self.store.dtype)
            lost += (self._part(k, start, stop) - mixed).square().sum(dim=1).double().cpu()
        return lost.sqrt()

    def _chunks(self, count: int) -> list[tuple[int, int]]:
        total = self.store.shape[1]
        width = max(1, _CHUNK_NUMBERS // max(count, 1))
        return [(start, min(start + width, total)) for start in range(0, total, width)]

    def _part(self, count: int, start: int, stop: int) -> Tensor:
        return self.store[:count, start:stop].to(self.device, self.working)


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
