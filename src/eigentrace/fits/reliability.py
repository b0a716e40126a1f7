"""An error bar without ground truth: do two fits on disjoint halves of the curvature sample rank examples alike?"""

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

# Fewer examples than this in a half say nothing about ranks.
_LEAST = 8


@dataclass(frozen=True)
class Reliability:
    """Rank agreement (Spearman) between two fits on disjoint halves of the curvature sample.

    1 means that the halves rank examples alike, 0 that their ranks have nothing to do with each other. The fit itself
    has seen both halves, so it is at least as reliable. None stands for scores that do not vary.
    """

    self_influence: float | None
    influence: float | None
    """Mean over the queries."""
    half: int
    """Examples in each half."""
    examples: int
    """Examples that were ranked."""
    queries: int

    def __str__(self) -> str:
        return (
            f"Rank agreement between fits on two halves of {self.half:,} examples each: "
            f"{_shown(self.self_influence)} for self-influence, {_shown(self.influence)} for influence "
            f"({self.examples:,} examples ranked, {self.queries} queries)."
        )


def rank_agreement(
    method: Any, task: Any, data: Any, *, examples: int = 512, queries: int = 8, seed: int | None = None
) -> Reliability:
    """Fit a curvature method twice, on disjoint halves of its sample, and compare the ranks.

    Args:
        method: Settings with a `sample`, such as `eigentrace.Arnoldi`.
        task: What was trained.
        data: The training examples; those ranked, and the queries, are drawn from them.
        examples: How many to rank.
        queries: How many to ask about.
        seed: Fixes the halves and draws; the method's own if not given.
    """
    check_counts(2, examples=examples)
    check_counts(1, queries=queries)
    if not hasattr(method, "sample") or not hasattr(method, "fit"):
        raise InputError(
            f"{type(method).__name__} takes its curvature on no sample of its own, so there is nothing to halve. Use "
            "eigentrace.Arnoldi."
        )
    data = as_data(data)
    generator = generator_of(getattr(method, "seed", 0) if seed is None else seed)
    halves = _halves(data, method.sample, generator)
    changes = {"sample": None} | ({"reliability": False} if hasattr(method, "reliability") else {})
    whole = dataclasses.replace(method, **changes)
    ranked = data.take(data.sample(examples, generator))
    asked = data.take(data.sample(queries, generator))
    with warnings.catch_warnings():
        # Said once already, by the fit that this stands beside.
        warnings.simplefilter("ignore", ConvergenceWarning)
        fits = [whole.fit(task, half) for half in halves]
    own = [fit.self_influence(ranked)[None] for fit in fits]
    pairs = [fit.influence(ranked, asked) for fit in fits]
    return Reliability(
        self_influence=_agreement(*own),
        influence=_agreement(*pairs),
        half=len(halves[0]),
        examples=len(ranked),
        queries=len(asked),
    )


def _halves(data: Data, sample: int | None, generator: torch.Generator) -> tuple[Data, Data]:
    rows = data.sample(len(data) if sample is None else sample, generator)
    half = len(rows) // 2
    if half < _LEAST:
        raise InputError(
            f"Reliability needs at least {2 * _LEAST} examples in the curvature sample, got {len(rows)}. Raise "
            "`sample`, give more data, or leave reliability out."
        )
    order = torch.randperm(len(rows), generator=generator, device="cpu").numpy()
    return tuple(data.take(np.sort(rows[part])) for part in (order[:half], order[half : 2 * half]))  # type: ignore[return-value]


def _agreement(first: Tensor, second: Tensor) -> float | None:  # (q, n) x 2
    """Average the rank correlations of the rows; None if no row varies in both."""
    found = spearman(first.double().numpy(), second.double().numpy())
    found = found[~np.isnan(found)]
    return float(found.mean()) if len(found) else None


def _shown(value: float | None) -> str:
    return "undefined" if value is None else f"{value:.3f}"
