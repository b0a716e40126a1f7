"""Which of two scores is ahead, and whether their seeds tell them apart."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

APART = 2.78
"""The smallest number of standard errors of a difference that is told apart: 5% for five seeds (t, 4 degrees)."""
RULE = (
    "Two scores are told apart if their difference has one sign for every seed of the noise and exceeds "
    f"{APART} standard errors, to which seeds of the noise (paired) and fits or draws contribute."
)


@dataclass(frozen=True)
class Difference:
    """How far a score is ahead of another."""

    mean: float
    error: float
    """Standard error, from the seeds of the noise and from fits or draws."""
    one_sign: bool
    """Whether the same score is ahead for every seed of the noise."""

    @property
    def is_apart(self) -> bool:
        """Whether the two are told apart."""
        return self.one_sign and abs(self.mean) > APART * self.error


def difference(first: Sequence[Sequence[float]], second: Sequence[Sequence[float]]) -> Difference:
    """Compare two scores by their numbers for each fit or draw (rows) and seed of the noise (columns).

    Columns of both belong to the same noise and are compared pairwise; rows are independent.

    >>> difference([[5.0, 7.0, 6.0]], [[4.0, 5.0, 6.5]])
    Difference(mean=0.8333333333333334, error=0.7264831572567789, one_sign=False)
    """
    gaps = np.mean(first, axis=0) - np.mean(second, axis=0)
    squares = [_squared_error(gaps), *(_squared_error(np.mean(each, axis=1)) for each in (first, second))]
    signs = set(np.sign(gaps).tolist())
    return Difference(float(gaps.mean()), math.sqrt(sum(squares)), len(signs) == 1 and signs != {0.0})


def _squared_error(values: np.ndarray) -> float:
    """Return the squared standard error of a mean; 0 for a single value, whose spread is not known."""
    return float(values.var(ddof=1) / len(values)) if len(values) > 1 else 0.0
