"""Which eigenpairs a score uses, and its tail. This module does not import torch, so that the page loads it fast."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal

from eigentrace.errors import InputError
from eigentrace.settings import check_counts, plain

Tail = float | Literal["auto", "shaped"] | None

# Minimum of an automatic δ, relative to λ₁: with a smaller one, 1/δ amplifies rounding errors more than the signal.
DELTA_FLOOR = 1e-4


@dataclass(frozen=True)
class Cut:
    """Which of the kept directions a score uses, and its tail for the others."""

    keep: int
    tail: Tail
    positive_only: bool
    delta: float | None = None
    """δ of a shaped tail; None to choose it automatically."""
    stored: bool = False
    """Whether to score by features alone, with the tail restricted to the stored coordinates."""
    coordinates: int | None = None
    """Number of available coordinates to use; all if None."""
    is_complete: bool = False
    """Whether the eigenpairs of the fit span the whole parameter space, all with positive eigenvalues."""

    def __post_init__(self) -> None:
        check_counts(1, keep=self.keep)
        if self.delta is not None:
            if self.tail != "shaped":
                raise InputError(
                    f"delta={self.delta!r} is only used with tail='shaped', got tail={self.tail!r}: pass δ as the tail."
                )
            _check_delta(self.delta, "delta")
        if self.tail is None and self.stored:
            raise InputError(
                "stored=True needs a tail, got tail=None: without one, scores already follow from the K features."
            )
        if self.tail is not None and self.tail not in ("auto", "shaped"):
            _check_delta(self.tail, "tail")

    def uses_all(self, available: int) -> bool:
        """Return whether no direction is left for the tail, if the cut selects from `available` eigenpairs."""
        return self.is_complete and self.keep >= available

    def record(self) -> dict[str, Any]:
        """Return the cut as JSON values; what earlier versions did not have is only recorded if it applies."""
        found = {name: plain(value) for name, value in vars(self).items()}
        return found if self.is_complete else {name: value for name, value in found.items() if name != "is_complete"}


def _check_delta(delta: Any, name: str) -> None:
    if isinstance(delta, bool) or not isinstance(delta, Real):
        expected = "'auto', 'shaped', None or a positive number" if name == "tail" else "a positive number"
        raise InputError(f"{name} must be {expected}, got {delta!r}.")
    if not 0 < float(delta) < math.inf:
        raise InputError(
            f"{name} is δ, in units of the eigenvalues, and must be a positive finite number, got {delta}."
        )


def delta_of(cut: Cut, sizes: Sequence[float]) -> float | None:
    """Return δ, the eigenvalue assumed for all directions that a cut does not keep; None without a tail.

    Args:
        cut: The cut.
        sizes: |λ| of all eigenpairs of the fit, descending. By default δ is the smallest one kept by the cut, but at
            least a fixed share of the largest. If no direction is left for the tail, it is that share.
    """
    if cut.tail is None:
        return None
    delta = cut.delta if cut.tail == "shaped" else cut.tail
    if delta is None or delta == "auto":
        floor = DELTA_FLOOR * sizes[0]
        return floor if cut.uses_all(len(sizes)) else max(sizes[: cut.keep][-1], floor)
    return float(delta)
