"""From scores to decisions: which share of the examples to drop, and which labels to look at again."""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from eigentrace.decisions import Decisions, Rule, check_decisions_file, suggestions
from eigentrace.errors import EigentraceWarning, InputError

Amount = str | float | int
By = str | np.ndarray | Sequence[float]


class Table(Protocol):
    """What decisions are made from: a run, or anything with columns of N values."""

    @property
    def num_rows(self) -> int:
        """N, the number of examples."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns there are."""

    @property
    def ids(self) -> Any:
        """One id per example, or None."""

    def column(self, name: str) -> np.ndarray:  # (N,)
        """Return a column in row order."""


def clean(
    run: Table,
    *,
    drop: Amount | None = None,
    keep: Amount | None = None,
    above: float | None = None,
    below: float | None = None,
    by: By = "self_influence",
    per_class: bool = False,
    out: str | Path | None = None,
) -> Decisions:
    """Decide which examples to drop. Exactly one of `drop`, `keep`, `above` and `below` says how many.

    A share of n rows is ⌊share·n + ½⌋ of them. Rows of equal score are taken in their order. A row whose score is NaN
    counts among the n and is never dropped; a warning says how many there are.

    Args:
        run: The run, or anything with its columns.
        drop: How many of the highest scores to drop: a share ("5%", 0.05) or a number of rows (300).
        keep: How many of the lowest scores to keep, dropping all others.
        above: Drop scores above this number.
        below: Drop scores below this number.
        by: A numeric column of the run ("self_influence", "loss", "gradient_norm", or one of your own), or N numbers.
        per_class: Take the share within every given label, so that no class is emptied because it is hard.
        out: A new Parquet or CSV file to write the decisions to.
    """
    asked = {"drop": drop, "keep": keep, "above": above, "below": below}
    given = [name for name, value in asked.items() if value is not None]
    if out is not None:
        check_decisions_file(out)
    if len(given) != 1:
        raise InputError(f"Exactly one of drop, keep, above and below says what goes, got {given or 'none of them'}.")
    name, scores = scores_of(run, by)
    labels, predictions = (whole_numbers(run, column) for column in ("label", "prediction"))
    ranks = ranks_of(scores, lowest=below is not None)
    if given[0] in ("above", "below"):
        mask, thresholds = _beyond(scores, given[0], asked[given[0]], per_class)
        words = f"{given[0]} {thresholds[0]:.4g}" if len(thresholds) else given[0]
        rule = Rule(name, words, f"not {words}", is_share=False)
    else:
        amount = Amounts.of(given[0], asked[given[0]])
        mask, thresholds = _share(run, scores, ranks, labels, amount, per_class)
        words = f"among the {'highest' if amount.drops else 'lowest'} {amount}"
        drops, keeps = (words, f"not {words}") if amount.drops else (f"not {words}", words)
        rule = Rule(name, drops, keeps, is_share=True, per_class=per_class)
    decisions = Decisions(mask, scores, ranks, thresholds, rule, labels, predictions, run.ids)
    tell_unscored(scores, name, "they are kept, and their reason says so")
    if out is not None:
        decisions.write(out)
    return decisions


def find_label_issues(
    run: Table, *, by: By = "self_influence", share: Amount | None = None, return_indices: bool = False
) -> np.ndarray:
    """Find examples whose label is probably wrong. A high score is bad.

    Args:
        run: The run, or anything with its columns.
        by: The score that ranks them, as in `clean`.
        share: How many of the highest scores to take: a share ("5%", 0.05) or a number of rows. If not given, take the
            examples for which the model predicts something else than their label.
        return_indices: Give the rows, most suspicious first, in place of one boolean per row. Rows without a score
            come last.

    Returns:
        True for each suspicious row (N,), or the rows themselves.
    """
    name, scores = scores_of(run, by)
    ranks = ranks_of(scores)
    if share is not None:
        amount = Amounts.of("share", share)
        mask = (ranks > 0) & (ranks <= amount.counts(np.array([len(scores)]))[0])
    else:
        labels, predictions = (whole_numbers(run, column) for column in ("label", "prediction"))
        if labels is None or predictions is None:
            raise InputError(
                "Without a share, suspicious rows are those whose prediction differs from the label, and the run has "
                f"no {'label' if labels is None else 'prediction'} column. Say how many rows to take: share='5%'."
            )
        mask = suggestions(labels, predictions, len(scores)) >= 0
    tell_unscored(scores, name, "they are ranked last")
    if not return_indices:
        return mask
    rows = np.flatnonzero(mask)
    return rows[np.argsort(np.where(ranks[rows] > 0, ranks[rows], len(ranks) + 1), kind="stable")]


@dataclass(frozen=True)
class Amounts:
    """How much of the data was asked for: a share of it, or a number of rows."""

    name: str
    written: str
    share: Fraction | None
    count: int = 0

    def __str__(self) -> str:
        return self.written

    @property
    def drops(self) -> bool:
        """Tell whether it counts what goes, and not what stays."""
        return self.name != "keep"

    @staticmethod
    def of(name: str, value: Any) -> "Amounts":
        """Read "5%", 0.05, 300 or their strings."""
        text = str(value).strip()
        number = text.removesuffix("%").strip()
        if isinstance(value, bool) or not isinstance(value, str | Real):
            raise _wrong(name, value)
        if text == number and (isinstance(value, Integral) or (isinstance(value, str) and number.isdecimal())):
            if int(number) < 0:
                raise _wrong(name, value)
            return Amounts(name, f"{int(number):,} rows", None, int(number))
        try:
            # 0.145 means the decimal that was written, and not the binary number next to it.
            share = Fraction(number) / (100 if text != number else 1)
        except ValueError:
            raise _wrong(name, value) from None
        if not 0 <= share <= 1:
            raise _wrong(name, value)
        return Amounts(name, f"{float(share * 100):.12g}%", share)

    def counts(self, sizes: np.ndarray) -> np.ndarray:  # (c,) -> (c,)
        """Return how many rows it is of groups of the given sizes: shares rounded to the nearest, halves up."""
        if self.share is None:
            if self.count > sizes.sum():
                raise InputError(f"{self.name}={self.count} asks for more than the {sizes.sum():,} rows there are.")
            return np.array([self.count])
        return np.array([math.floor(self.share * int(size) + Fraction(1, 2)) for size in sizes], dtype=np.int64)


def _wrong(name: str, value: Any) -> InputError:
    return InputError(
        f'{name} must be a share such as "5%" or 0.05 (at most 100%), or a whole number of rows, got {value!r}.'
    )


def scores_of(run: Table, by: By) -> tuple[str, np.ndarray]:  # (N,) float64
    """Return the name and the numbers of a score: a column of the run, or numbers as they are."""
    if isinstance(by, str):
        if by not in run.columns:
            raise InputError(f"The run has no column {by!r}. It has {', '.join(run.columns)}.")
        name, values = by, as_numbers(run.column(by), by)
    else:
        name, values = "score", as_numbers(by, "by")
    if values.shape != (run.num_rows,):
        raise InputError(f"Expected one score for each of {run.num_rows:,} rows, got shape {values.shape}.")
    return name, values


def as_numbers(values: Any, name: str) -> np.ndarray:
    """Return numbers as float64, whatever holds them; None becomes NaN, and text is refused."""
    if hasattr(values, "detach"):  # a tensor, on any device and of any type
        values = values.detach().cpu().double().numpy()
    values = np.asarray(values)
    is_mixed = values.dtype.kind == "O" and not all(value is None or isinstance(value, Real) for value in values.flat)
    if is_mixed or values.dtype.kind not in "biufO":
        raise InputError(f"{name} holds {'text or objects' if is_mixed else values.dtype}, and not numbers alone.")
    return values.astype(np.float64, copy=False)


def whole_numbers(run: Table, name: str) -> np.ndarray | None:  # (N,) int64
    """Return a column of class numbers, -1 where one is missing; None if the run has no such column."""
    if name not in run.columns:
        return None
    values = np.asarray(run.column(name))
    if values.dtype.kind in "iu":
        return values.astype(np.int64, copy=False)
    return np.nan_to_num(as_numbers(values, name), nan=-1.0).astype(np.int64)


def ranks_of(scores: np.ndarray, *, lowest: bool = False) -> np.ndarray:  # (N,) -> (N,) int64
    """Rank scores from 1, the highest first (or the lowest), equal ones in the order of their rows; 0 for NaN."""
    order = np.argsort(scores if lowest else -scores, kind="stable")  # NaN last
    ranks = np.empty(len(scores), dtype=np.int64)
    ranks[order] = np.arange(1, len(scores) + 1)
    ranks[np.isnan(scores)] = 0
    return ranks


def _beyond(scores: np.ndarray, side: str, threshold: Any, per_class: bool) -> tuple[np.ndarray, np.ndarray]:
    if isinstance(threshold, bool) or not isinstance(threshold, Real) or math.isnan(threshold):
        raise InputError(f"{side} must be a number, got {threshold!r}.")
    if per_class:
        raise InputError(
            f"{side}={threshold!r} is the same in every class: per_class=True needs a share to drop or keep."
        )
    mask = scores > float(threshold) if side == "above" else scores < float(threshold)
    return mask, np.broadcast_to(float(threshold), scores.shape)


def _share(
    run: Table, scores: np.ndarray, ranks: np.ndarray, labels: np.ndarray | None, amount: Amounts, per_class: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Return which rows go, and the score of the mildest of them within their class."""
    if not per_class:
        (count,) = amount.counts(np.array([len(scores)]))
        limit = count if amount.drops else len(scores) - count
        mask = (ranks > 0) & (ranks <= limit)
        mildest = scores[mask].min() if mask.any() else np.nan
        return mask, np.broadcast_to(mildest, scores.shape)
    if amount.share is None:
        raise InputError(f"per_class=True takes a share of every class: give {amount.name} as a percentage.")
    if labels is None:
        raise InputError(f"per_class=True needs the given labels, and the run has {', '.join(run.columns)}.")
    _, classes, sizes = np.unique(labels, return_inverse=True, return_counts=True)
    counts = amount.counts(sizes)
    limits = counts if amount.drops else sizes - counts
    # Sorted by class, and within a class by rank with those that have none last.
    order = np.lexsort((np.where(ranks > 0, ranks, len(ranks) + 1), classes))
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order)) - (np.cumsum(sizes) - sizes)[classes[order]]
    mask = (ranks > 0) & (place < limits[classes])
    mildest = np.full(len(sizes), np.inf)
    np.minimum.at(mildest, classes[mask], scores[mask])
    mildest[np.bincount(classes[mask], minlength=len(sizes)) == 0] = np.nan
    return mask, mildest[classes]


def tell_unscored(scores: np.ndarray, name: str, outcome: str) -> None:
    """Warn about scores that are NaN, and say what becomes of their rows."""
    count = int(np.isnan(scores).sum())
    if count:
        warnings.warn(
            f"{count:,} of {len(scores):,} rows have no {name} (NaN): {outcome}.", EigentraceWarning, stacklevel=3
        )
