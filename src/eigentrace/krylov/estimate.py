"""Estimate the time of a fit before it begins, besides the memory and disk space that its plan knows."""

import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from eigentrace.krylov.plan import IterationPlan
from eigentrace.krylov.vectors import Basis, Vectors
from eigentrace.numeric.memory import as_text
from eigentrace.progress import as_duration

# Number of vectors whose multiplication is timed.
_TIMED = 4
# Every product is orthogonalised twice against all vectors, by as many dot products and a linear combination.
_PASSES = 2


@dataclass(frozen=True)
class FitEstimate:
    """What a fit is expected to take, estimated before it begins."""

    seconds: float
    """Time of all products with the curvature and of their orthogonalisation."""
    num_products: int
    """Number of products: the steps, and those of the checks and the calibration."""
    product_seconds: float
    """Time of a product with the curvature."""
    memory: int
    """Bytes of the vectors and of temporary ones, where the vectors are stored; the model and a batch come on top."""
    place: str
    """The device where the vectors are stored."""
    saved: int
    """Bytes of the saved fit on disk."""
    resumable: int
    """Bytes on disk of a fit that can be resumed, while it runs."""
    basis: Basis
    """How vectors will be stored."""

    def __str__(self) -> str:
        return (
            f"about {as_duration(self.seconds)} ({self.num_products:,} products with the curvature of "
            f"{as_duration(self.product_seconds)} each, and their orthogonalisation), {as_text(self.memory)} of memory "
            f"({self.place}), {as_text(self.saved)} on disk for the saved fit and {as_text(self.resumable)} while a "
            "fit that can be resumed runs"
        )

    def record(self) -> dict[str, Any]:
        """Return the numbers for JSON."""
        return {
            "seconds": self.seconds,
            "num_products": self.num_products,
            "product_seconds": self.product_seconds,
            "memory_bytes": self.memory,
            "place": self.place,
            "saved_bytes": self.saved,
            "resumable_bytes": self.resumable,
            "basis": self.basis.record(),
        }


def estimate_of(plan: IterationPlan, like: Tensor, product_seconds: float, others: int = 0) -> FitEstimate:
    """Estimate an iteration with a chosen basis.

    Args:
        plan: The iteration.
        like: A vector of the parameters (P,).
        product_seconds: The measured time of a product.
        others: Number of products besides the steps.
    """
    steps = min(plan.steps, plan.size)
    held = _mean_vectors(steps, plan.num_vectors - 1, plan.basis)
    orthogonalising = steps * held * _PASSES * _seconds_per_vector(like, plan.basis)
    return FitEstimate(
        seconds=(steps + others) * product_seconds + orthogonalising,
        num_products=steps + others,
        product_seconds=product_seconds,
        memory=plan.memory,
        place=str(plan.home),
        saved=plan.saved,
        resumable=plan.disk,
        basis=replace(plan.basis, memory=None),
    )


def _mean_vectors(steps: int, most: int, basis: Basis) -> float:
    """Return the mean number of vectors that a product is orthogonalised against."""
    if steps <= most:
        return (steps + 1) / 2
    filling, later = most * (most + 1) / 2, (steps - most) * (basis.carried + most) / 2
    return (filling + later) / steps


def _seconds_per_vector(like: Tensor, basis: Basis) -> float:
    """Measure the time of a dot product with a stored vector and of its share of a linear combination."""
    vectors = Vectors(_TIMED, like, basis)
    vectors.store.zero_()
    took = 0.0
    for _ in range(2):  # the first time includes the start of libraries
        _synchronize(like)
        began = time.perf_counter()
        vectors.combine(vectors.dots(_TIMED, like))
        _synchronize(like)
        took = time.perf_counter() - began
    return took / _TIMED


def _synchronize(like: Tensor) -> None:
    if like.device.type == "cuda":
        torch.cuda.synchronize(like.device)
