"""The linear datamodelling score: do influences, summed over a subset, rank what training on it gives?"""

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
    """Rank correlation between predicted and measured outputs over subsets."""

    mean: float
    """Over the queries that can be judged."""
    interval: tuple[float, float]
    """Where the mean lies when it is measured on other queries, subsets or both, as `resampled` says."""
    per_query: np.ndarray
    """(Q,); NaN for a query whose output is the same in all subsets, 0 where only the prediction does not vary."""
    resampled: Resample
    """What the bootstrap drew again."""
    level: float
    """Chance that the interval is meant to have."""

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

    A subset's predicted output is minus the sum of its examples' scores, since scores are positive for proponents,
    which keep a query's loss down (plus the sum for outputs that rise as models get better). Only ranks matter: neither
    a factor nor a constant per query changes anything.

    Args:
        scores: (Q, N), as `fitted.influence(train, queries)` gives them.
        retrained: What training on subsets gave, for the same queries and training examples in the same order.
        resample: What the interval's bootstrap draws again: "queries", "subsets" or "both". Queries alone say how the
            mean moves with other queries, given these models; subsets include the noise of the models themselves. Both
            together are on the safe side: in simulations 95% intervals held the truth 97 to 100 times of 100.
        num_bootstrap: How often it draws.
        level: Chance the interval is to have, between its equal tails.
        seed: Fixes the draws.

    Raises:
        InputError: If shapes do not belong together, a score is NaN, or no query can be judged.
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
            "The outputs of every query are the same in all subsets, so there is nothing to predict: look at how the "
            "queries are measured."
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
        means.append(picked.mean() if len(picked) else 0.0)  # nothing was drawn that could be predicted
    mean, tail = float(per_query[judged].mean()), (1 - level) / 2
    # A subset drawn twice ties with itself, which lowers rank correlations: that part of the shift is no uncertainty.
    low, high = np.clip(np.quantile(means, [tail, 1 - tail]) + mean - np.mean(means), -1.0, 1.0)
    return LDS(mean, (float(low), float(high)), per_query, resample, level)


def subset_predictions(scores: np.ndarray, retrained: Retrained) -> np.ndarray:  # (Q, N) -> (Q, m)
    """Predict each query's output on each subset, up to a factor and a constant per query."""
    sums = summed(scores, retrained.masks)
    return -sums if retrained.higher_is_worse else sums


def _correlations(predicted: RowRanks, actual: RowRanks, counts: np.ndarray | None) -> np.ndarray:  # (Q,)
    """Correlate ranks; a prediction that does not vary is worth 0, a truth that does not vary says nothing."""
    forecast, truth = predicted.ranks(counts), actual.ranks(counts)
    found = correlation(forecast, truth, counts)
    there = slice(None) if counts is None else counts > 0
    return np.where(np.isnan(found) & (np.ptp(truth[:, there], axis=1) > 0), 0.0, found)


def _checked(scores: Any, retrained: Retrained) -> np.ndarray:
    values = checked(scores, "scores", 2)
    (num_subsets, _, num_queries), num_train = retrained.outputs.shape, retrained.masks.shape[1]
    if values.shape != (num_queries, num_train):
        hint = " It looks transposed: give scores.T." if values.shape == (num_train, num_queries) else ""
        raise InputError(
            f"scores have shape {values.shape}, and retraining measured {num_queries} queries on subsets of "
            f"{num_train} examples: expected ({num_queries}, {num_train}).{hint}"
        )
    if not np.isfinite(values).all():
        raise InputError("Infinite scores cannot be summed over a subset: look for examples with an infinite loss.")
    if num_subsets < 3:
        raise InputError(f"Ranks of {num_subsets} subsets say nothing: retrain on at least 3, better 100.")
    return values
