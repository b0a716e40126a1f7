"""Row-wise Pearson and Spearman correlation, optionally with a count per column."""

import numpy as np

from eigentrace.errors import InputError


class RowRanks:
    """Ranks within each row; sorted once, then computed for any column counts.

    Args:
        values: One row per query, one column per subset; no NaN.
    """

    def __init__(self, values: np.ndarray) -> None:  # (Q, m)
        size = values.shape[1]
        self._order = np.argsort(values, axis=1, kind="stable")
        ascending = np.take_along_axis(values, self._order, axis=1)
        steps = ascending[:, 1:] != ascending[:, :-1]
        edge = np.ones((len(values), 1), dtype=bool)
        # A run of equal values goes from `first` to just before `after`.
        first = np.maximum.accumulate(np.where(np.hstack([edge, steps]), np.arange(size), 0), axis=1)
        after = np.where(np.hstack([steps, edge]), np.arange(1, size + 1), size)
        after = np.minimum.accumulate(after[:, ::-1], axis=1)[:, ::-1]
        place = np.empty_like(self._order)
        np.put_along_axis(place, self._order, np.broadcast_to(np.arange(size), place.shape), axis=1)
        self._first = np.take_along_axis(first, place, axis=1)
        self._after = np.take_along_axis(after, place, axis=1)

    def ranks(self, counts: np.ndarray | None = None) -> np.ndarray:  # (m,) -> (Q, m)
        """Return ranks from 1, with the mean rank for ties and column j repeated `counts[j]` times."""
        if counts is None:
            return (self._first + self._after + 1) / 2
        passed = np.zeros((len(self._order), self._order.shape[1] + 1))
        np.cumsum(counts[self._order], axis=1, out=passed[:, 1:])
        below, through = (np.take_along_axis(passed, at, axis=1) for at in (self._first, self._after))
        return (below + through + 1) / 2


def correlation(a: np.ndarray, b: np.ndarray, counts: np.ndarray | None = None) -> np.ndarray:  # (Q, m) x 2 -> (Q,)
    """Return the Pearson correlation of each pair of rows; NaN if one of them is constant."""
    counts = np.ones(a.shape[1]) if counts is None else counts
    there = counts > 0
    still = np.ptp(a[:, there], axis=1) * np.ptp(b[:, there], axis=1) == 0
    a, b = (t - (t @ counts / counts.sum())[:, None] for t in (a, b))
    with np.errstate(divide="ignore", invalid="ignore"):
        found = (a * b) @ counts / np.sqrt((a * a) @ counts * ((b * b) @ counts))
    return np.where(still, np.nan, np.clip(found, -1.0, 1.0))


def pearson(a: np.ndarray, b: np.ndarray) -> np.ndarray:  # (Q, m) x 2 -> (Q,)
    """Return the Pearson correlation of each pair of rows.

    >>> pearson(np.array([[1.0, 2.0, 3.0]]), np.array([[2.0, 4.0, 6.0]]))
    array([1.])
    """
    _check(a, b)
    # Scale each row by its maximum, so that squares neither underflow nor overflow.
    a, b = (t / np.maximum(np.abs(t).max(axis=1, keepdims=True), np.finfo(np.float64).tiny) for t in (a, b))
    return correlation(a, b)


def spearman(a: np.ndarray, b: np.ndarray) -> np.ndarray:  # (Q, m) x 2 -> (Q,)
    """Return the Spearman correlation of each pair of rows, with the mean rank for ties.

    >>> spearman(np.array([[1.0, 2.0, 3.0]]), np.array([[1.0, 10.0, 100.0]]))
    array([1.])
    """
    _check(a, b)
    return correlation(RowRanks(a).ranks(), RowRanks(b).ranks())


def _check(a: np.ndarray, b: np.ndarray) -> None:
    if a.ndim != 2 or a.shape != b.shape or not a.size:
        raise InputError(f"Correlations need two non-empty matrices of the same shape, got {a.shape} and {b.shape}.")
    if np.isnan(a).any() or np.isnan(b).any():
        raise InputError("Correlations are undefined for NaN. Leave out the rows or columns with NaN.")
