"""What a report shows: plain values and arrays, checked once."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from eigentrace.errors import InputError


@dataclass(frozen=True)
class MethodRow:
    """How one method did."""

    method: str
    keep: int | None
    """K, the directions kept for each example; None where the method keeps none."""
    auc: float
    """Percent."""
    ap: float
    """Percent."""
    fit_seconds: float
    score_seconds: float


@dataclass(frozen=True)
class Example:
    """One training image with the label it was given and the one it should have."""

    row: int
    image: np.ndarray  # (H, W) uint8
    given: int
    true: int
    score: float

    @property
    def is_wrong(self) -> bool:
        """Tell whether the given label is not the true one."""
        return self.given != self.true


@dataclass(frozen=True)
class Fact:
    """A number worth reading first, and what it counts."""

    value: str
    label: str


@dataclass(frozen=True)
class Note:
    """A term of the page and its meaning."""

    term: str
    text: str


@dataclass(frozen=True)
class Report:
    """Everything on the page."""

    title: str
    lede: str
    facts: Sequence[Fact]
    methods: Sequence[MethodRow]
    eigenvalues: np.ndarray  # (K,)
    residuals: np.ndarray | None  # (K,), where the fit has error bounds
    scores: np.ndarray  # (N,) self-influence
    is_wrong: np.ndarray  # (N,) bool
    examples: Sequence[Example]
    notes: Sequence[Note]

    def __post_init__(self) -> None:
        if self.scores.shape != self.is_wrong.shape or self.scores.ndim != 1:
            raise InputError(
                f"scores has shape {self.scores.shape} and is_wrong {self.is_wrong.shape}: give one of each "
                "for every training example."
            )
