"""Decisions from scores: which examples to drop, and which labels are suspicious."""

import math
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np

from eigentrace.cleaning.decisions import Decisions, Rule, check_decisions_file, suggestions
from eigentrace.errors import InputError
from eigentrace.runs.ranking import Amount, Amounts, By, Table, ranks_of, scores_of, tell_unscored, whole_numbers


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
    """Return decisions to drop examples by score. Pass exactly one of `drop`, `keep`, `above` and `below`.

    A share of n rows is ⌊share·n + ½⌋ rows. Ties are taken in row order. Rows whose score is NaN count among the n rows
    and are never dropped; a warning gives their number.

    Args:
        run: The run, or any object with its columns.
        drop: How many of the highest scores to drop: a share ("5%", 0.05) or a number of rows (300).
        keep: How many of the lowest scores to keep; all others are dropped.
        above: Drop scores above this number.
        below: Drop scores below this number.
        by: A numeric column of the run ("self_influence", "loss", "gradient_norm", or a user column), or N numbers.
        per_class: Apply the share within each label, so that hard classes do not lose most of their examples.
        out: A new Parquet or CSV file to write the decisions to.
    """
    asked = {"drop": drop, "keep": keep, "above": above, "below": below}
    given = [name for name, value in asked.items() if value is not None]
    if out is not None:
        check_decisions_file(out)
    if len(given) != 1:
        raise InputError(f"Pass exactly one of drop, keep, above and below, got {given or 'none of them'}.")
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
    tell_unscored(scores, name, "they are kept, as their reason states")
    if out is not None:
        decisions.write(out)
    return decisions


def find_label_issues(
    run: Table, *, by: By = "self_influence", share: Amount | None = None, return_indices: bool = False
) -> np.ndarray:
    """Return examples whose label is probably wrong. Higher scores are more suspicious.

    Args:
        run: The run, or any object with its columns.
        by: The score that ranks examples, as in `clean`.
        share: How many of the highest scores to return: a share ("5%", 0.05) or a number of rows. If not given, return
            the examples whose label differs from the model's prediction.
        return_indices: Return rows, most suspicious first, instead of one boolean per row. Rows without a score come
            last.

    Returns:
        A boolean array (N,), True for suspicious examples, or the rows of these.
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
                "Without share, suspicious rows are those whose prediction differs from their label, but the run has "
                f"no {'label' if labels is None else 'prediction'} column. Pass a number of rows, such as share='5%'."
            )
        mask = suggestions(labels, predictions, len(scores)) >= 0
    tell_unscored(scores, name, "they are ranked last")
    if not return_indices:
        return mask
    rows = np.flatnonzero(mask)
    return rows[np.argsort(np.where(ranks[rows] > 0, ranks[rows], len(ranks) + 1), kind="stable")]


def _beyond(scores: np.ndarray, side: str, threshold: Any, per_class: bool) -> tuple[np.ndarray, np.ndarray]:
    if isinstance(threshold, bool) or not isinstance(threshold, Real) or math.isnan(threshold):
        raise InputError(f"{side} must be a number, got {threshold!r}.")
    if per_class:
        raise InputError(
            f"{side}={threshold!r} cannot be combined with per_class=True. Use drop or keep with a share instead."
        )
    mask = scores > float(threshold) if side == "above" else scores < float(threshold)
    return mask, np.broadcast_to(float(threshold), scores.shape)


def _share(
    run: Table, scores: np.ndarray, ranks: np.ndarray, labels: np.ndarray | None, amount: Amounts, per_class: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Return the mask of rows to drop, and for each row the lowest dropped score (in its class, if per class)."""
    if not per_class:
        (count,) = amount.counts(np.array([len(scores)]))
        limit = count if amount.drops else len(scores) - count
        mask = (ranks > 0) & (ranks <= limit)
        mildest = scores[mask].min() if mask.any() else np.nan
        return mask, np.broadcast_to(mildest, scores.shape)
    if amount.share is None:
        raise InputError(f"per_class=True needs a share, got {amount.name} = {amount}. Pass a percentage.")
    if labels is None:
        raise InputError(f"per_class=True needs the column 'label', but the run only has {', '.join(run.columns)}.")
    _, classes, sizes = np.unique(labels, return_inverse=True, return_counts=True)
    counts = amount.counts(sizes)
    limits = counts if amount.drops else sizes - counts
    # Sorted by class, and within a class by rank, rows without a rank last.
    order = np.lexsort((np.where(ranks > 0, ranks, len(ranks) + 1), classes))
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order)) - (np.cumsum(sizes) - sizes)[classes[order]]
    mask = (ranks > 0) & (place < limits[classes])
    mildest = np.full(len(sizes), np.inf)
    np.minimum.at(mildest, classes[mask], scores[mask])
    mildest[np.bincount(classes[mask], minlength=len(sizes)) == 0] = np.nan
    return mask, mildest[classes]
