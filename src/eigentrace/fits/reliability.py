"""Reliability of scores without ground truth: rank agreement of two fits on halves of the curvature sample."""

import dataclasses
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eigentrace.data import Data, as_data
from eigentrace.errors import ConvergenceWarning, InputError
from eigentrace.numeric.rank_correlation import spearman
from eigentrace.numeric.seeding import generator_of
from eigentrace.settings import check_counts

# Minimum number of examples in a half, for a meaningful rank agreement.
_MIN_HALF = 8


@dataclass(frozen=True)
class Reliability:
    """Rank agreement (Spearman) between two fits on disjoint halves of the curvature sample.

    1 means that both halves rank examples equally, 0 that their ranks are unrelated. The fit itself uses both halves,
    so it is at least as reliable. None means that scores do not vary.
    """

    self_influence: float | None
    influence: float | None
    """Mean over the queries."""
    half: int
    """Number of examples in each half."""
    examples: int
    """Number of ranked examples."""
    queries: int

    def __str__(self) -> str:
        return (
            f"Rank agreement between fits on two halves of {self.half:,} examples each: "
            f"{_formatted(self.self_influence)} for self-influence, {_formatted(self.influence)} for influence "
            f"({self.examples:,} examples ranked, {self.queries} queries)."
        )


def rank_agreement(
    method: Any, task: Any, data: Any, *, examples: int = 512, queries: int = 8, seed: int | None = None
) -> Reliability:
    """Fit a curvature method twice, on disjoint halves of its sample, and compare the ranks.

    Args:
        method: A method with a `sample`, such as `eigentrace.Arnoldi`.
        task: The model and its loss.
        data: The training examples, from which ranked examples and queries are drawn.
        examples: Number of examples to rank.
        queries: Number of queries.
        seed: Seed of the halves and draws; that of the method by default.
    """
    check_counts(2, examples=examples)
    check_counts(1, queries=queries)
    if not hasattr(method, "sample") or not hasattr(method, "fit"):
        raise InputError(
            f"{type(method).__name__} has no curvature sample that could be halved: expected a method with `sample` "
            "and `fit`. Use eigentrace.Arnoldi."
        )
    data = as_data(data)
    generator = generator_of(getattr(method, "seed", 0) if seed is None else seed)
    halves = _halves(data, method.sample, generator)
    changes = {"sample": None} | ({"reliability": False} if hasattr(method, "reliability") else {})
    whole = dataclasses.replace(method, **changes)
    ranked = data.take(data.sample(examples, generator))
    query_data = data.take(data.sample(queries, generator))
    with warnings.catch_warnings():
        # The fit of the whole sample already gives this warning.
        warnings.simplefilter("ignore", ConvergenceWarning)
        fits = [whole.fit(task, half) for half in halves]
    own = [fit.self_influence(ranked)[None] for fit in fits]
    pairs = [fit.influence(ranked, query_data) for fit in fits]
    return Reliability(
        self_influence=_agreement(*own),
        influence=_agreement(*pairs),
        half=len(halves[0]),
        examples=len(ranked),
        queries=len(query_data),
    )


def _halves(data: Data, sample: int | None, generator: torch.Generator) -> tuple[Data, Data]:
    rows = data.sample(len(data) if sample is None else sample, generator)
    half = len(rows) // 2
    if half < _MIN_HALF:
        raise InputError(
            f"Reliability needs at least {2 * _MIN_HALF} examples in the curvature sample, got {len(rows)}. Raise "
            "`sample`, give more data, or leave reliability out."
        )
    order = torch.randperm(len(rows), generator=generator, device="cpu").numpy()
    return tuple(data.take(np.sort(rows[part])) for part in (order[:half], order[half : 2 * half]))  # type: ignore[return-value]


def _agreement(first: Tensor, second: Tensor) -> float | None:  # (q, n) x 2
    """Return the mean rank correlation over queries; None if no query has varying scores in both."""
    found = spearman(first.double().numpy(), second.double().numpy())
    found = found[~np.isnan(found)]
    return float(found.mean()) if len(found) else None


def _formatted(value: float | None) -> str:
    return "undefined" if value is None else f"{value:.3f}"
