"""Which eigenpairs a score uses and what stands for the others; without torch, so that a page can read it quickly."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal

from eigentrace.errors import InputError
from eigentrace.settings import check_counts

Tail = float | Literal["auto", "shaped"] | None

# An automatic δ never falls below this share of λ₁: beyond it 1/δ amplifies rounding more than it adds signal.
DELTA_FLOOR = 1e-4


@dataclass(frozen=True)
class Cut:
    """Which of the kept directions a score uses, and what stands for the others."""

    keep: int
    tail: Tail
    positive_only: bool
    delta: float | None = None
    """δ of a shaped tail, if it is not to choose itself."""
    stored: bool = False
    """Score by features alone: the tail counts where the stored coordinates see it."""
    coordinates: int | None = None
    """How many of the coordinates at hand are used; all of them if None."""

    def __post_init__(self) -> None:
        check_counts(1, keep=self.keep)
        if self.delta is not None:
            if self.tail != "shaped":
                raise InputError(
                    f"delta belongs to tail='shaped', and tail is {self.tail!r}: give δ itself as the tail."
                )
            _check_delta(self.delta, "delta")
        if self.tail is None and self.stored:
            raise InputError(
                "tail=None keeps no tail, so its K features are all there is to store: use them as they are."
            )
        if self.tail is not None and self.tail not in ("auto", "shaped"):
            _check_delta(self.tail, "tail")


def _check_delta(delta: Any, name: str) -> None:
    if isinstance(delta, bool) or not isinstance(delta, Real):
        expected = "'auto', 'shaped', None or a positive number" if name == "tail" else "a positive number"
        raise InputError(f"{name} must be {expected}, got {delta!r}.")
    if not 0 < float(delta) < math.inf:
        raise InputError(f"{name} is δ, a positive number in units of the eigenvalues, got {delta}.")


def delta_of(cut: Cut, sizes: Sequence[float]) -> float | None:
    """Return δ, the curvature that stands for all directions a cut does not keep; None without a tail.

    Args:
        cut: The cut.
        sizes: |λ| of all eigenpairs of the fit, falling. Unless δ is given it is the smallest that the cut keeps, with
            a floor relative to the largest.
    """
    if cut.tail is None:
        return None
    given = cut.delta if cut.tail == "shaped" else cut.tail
    if given is None or given == "auto":
        return max(sizes[: cut.keep][-1], DELTA_FLOOR * sizes[0])
    return float(given)
