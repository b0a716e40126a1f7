"""The linear datamodelling score: rank correlation of summed influences with the outputs of retrained models."""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from eigentrace.errors import InputError
from eigentrace.evaluate.arrays import checked, summed
from eigentrace.evaluate.retrain import Retrained
from eigentrace.numeric.rank_correlation import RowRanks, correlation
from eigentrace.settings import check_counts

Resample = Literal["queries", "subsets", "both"]


@dataclass(frozen=True, eq=False)
class LDS:
    """Linear datamodelling score: rank correlation between predicted and actual outputs over subsets."""

    mean: float
    """Mean over the queries whose outputs vary between subsets."""
    interval: tuple[float, float]
    """Bootstrap confidence interval of the mean, over queries, subsets or both, as in `resampled`."""
    per_query: np.ndarray
    """(Q,); NaN for a query whose output is the same in all subsets, 0 if only the prediction does not vary."""
    resampled: Resample
    """What the bootstrap resampled."""
    level: float
    """Confidence level of the interval."""

    def __repr__(self) -> str:
        return f"<{self}>"

    def __str__(self) -> str:
        low, high = self.interval
        return f"LDS {self.mean:.3f} ({low:.3f} to {high:.3f}, {self.level:.0%}, over {self.resampled})"


def lds(
    scores: Any,
    retrained: Retrained,
    *,
    resample: Resample = "both",
    num_bootstrap: int = 1000,
    level: float = 0.95,
    seed: int = 0,
) -> LDS:
    """Measure how well scores predict retraining: Spearman's correlation over the subsets, averaged over queries.

    A subset's predicted output is minus the sum of its examples' scores, because scores are positive for proponents,
    which lower a query's loss (plus the sum for outputs that rise as models get better). Only ranks matter: a positive
    factor or a constant per query does not change the result.

    Args:
        scores: (Q, N), the result of `fitted.influence(train, queries)`.
        retrained: Outputs of models trained on subsets, for the same queries and training examples in the same order.
        resample: What the bootstrap of the interval resamples: "queries", "subsets" or "both". With "queries", the
            interval covers the choice of queries, for these models; "subsets" includes the noise of training. "both" is
            conservative: in simulations, 95% intervals contained the true value in 97 to 100% of cases.
        num_bootstrap: Number of bootstrap samples.
        level: Confidence level of the interval, which has equal tails.
        seed: Seed of the bootstrap.

    Raises:
        InputError: If shapes do not match, a score is NaN or infinite, or no query's output varies between subsets.
    """
    values = _checked(scores, retrained)
    check_counts(1, num_bootstrap=num_bootstrap)
    if resample not in ("queries", "subsets", "both"):
        raise InputError(f"resample must be 'queries', 'subsets' or 'both', got {resample!r}.")
    if not 0 < level < 1:
        raise InputError(f"level must be between 0 and 1, got {level!r}.")
    predicted, actual = RowRanks(subset_predictions(values, retrained)), RowRanks(retrained.mean.T)
    per_query = _correlations(predicted, actual, None)
    judged = ~np.isnan(per_query)
    if not judged.any():
        raise InputError(
            f"The outputs of each of {len(per_query)} queries are the same in all {len(retrained.masks)} subsets, so "
            "there is nothing to predict. Check how the queries are measured."
        )
    rng = np.random.default_rng(seed)
    num_queries, num_subsets = values.shape[0], len(retrained.masks)
    means = []
    for _ in range(num_bootstrap):
        own = per_query
        if resample != "queries":
            counts = np.bincount(rng.integers(num_subsets, size=num_subsets), minlength=num_subsets).astype(np.float64)
            own = _correlations(predicted, actual, counts)
        picked = own if resample == "subsets" else own[rng.integers(num_queries, size=num_queries)]
        picked = picked[~np.isnan(picked)]
        means.append(picked.mean() if len(picked) else 0.0)  # if no query's output varies on the drawn subsets
    mean, tail = float(per_query[judged].mean()), (1 - level) / 2
    # A subset drawn twice ties with itself, which lowers rank correlations. This shift is a bias, not uncertainty.
    low, high = np.clip(np.quantile(means, [tail, 1 - tail]) + mean - np.mean(means), -1.0, 1.0)
    return LDS(mean, (float(low), float(high)), per_query, resample, level)


def subset_predictions(scores: np.ndarray, retrained: Retrained) -> np.ndarray:  # (Q, N) -> (Q, m)
    """Predict each query's output on each subset, up to a positive factor and a constant per query."""
    sums = summed(scores, retrained.masks)
    return -sums if retrained.higher_is_worse else sums


def _correlations(predicted: RowRanks, actual: RowRanks, counts: np.ndarray | None) -> np.ndarray:  # (Q,)
    """Correlate ranks: 0 if only the prediction does not vary, NaN if the actual output does not vary."""
    forecast, truth = predicted.ranks(counts), actual.ranks(counts)
    found = correlation(forecast, truth, counts)
    there = slice(None) if counts is None else counts > 0
    return np.where(np.isnan(found) & (np.ptp(truth[:, there], axis=1) > 0), 0.0, found)


def _checked(scores: Any, retrained: Retrained) -> np.ndarray:
    values = checked(scores, "scores", 2)
    (num_subsets, _, num_queries), num_train = retrained.outputs.shape, retrained.masks.shape[1]
    if values.shape != (num_queries, num_train):
        transposed = values.shape == (num_train, num_queries)
        hint = "The array seems transposed: pass scores.T." if transposed else "Score the same queries and examples."
        raise InputError(
            f"scores have shape {values.shape}, but retraining measured {num_queries} queries on subsets of "
            f"{num_train} examples: expected ({num_queries}, {num_train}). {hint}"
        )
    if not np.isfinite(values).all():
        num_infinite = int((~np.isfinite(values)).sum())
        raise InputError(
            f"{num_infinite} of {values.size} scores are infinite and cannot be summed over a subset. Look for "
            "examples with an infinite loss."
        )
    if num_subsets < 3:
        raise InputError(
            f"A rank correlation over {num_subsets} subsets is meaningless: retrain on at least 3, preferably 100."
        )
    return values
