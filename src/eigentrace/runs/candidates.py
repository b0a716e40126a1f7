"""Selection of candidate examples for queries, in one pass over the stored features of a run."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eigentrace.data import Data
from eigentrace.errors import UnsupportedError
from eigentrace.fits.fitted import Normalize
from eigentrace.numeric.top_k import Ranked, Scale, search
from eigentrace.store.reader import RunReader

Eligible = Callable[[int, int], Tensor | None] | None
"""Returns for (first row, n) a mask (Q, n) of the rows eligible for each query; None, or returning None, for all."""

# Assumed cosine between the tails of two gradients when candidates are selected. Measured ones spread by .05 to .2.
_ALIKE = 0.1
_LEAST = 1e-30  # prevents division by zero: an example without a gradient gets the score 0


@dataclass(frozen=True)
class Queries:
    """Queries, with their features, labels and digests where available."""

    count: int
    rows: np.ndarray | None  # (Q,) if they are rows of the run
    features: Tensor | None  # (Q, K)
    data: Data | None
    labels: np.ndarray | None
    digests: np.ndarray | None
    square_norms: np.ndarray | None
    self_influence: np.ndarray | None


def by_features(
    run: RunReader, queries: Queries, k: int, allowed: Eligible, normalize: Normalize, device: Any
) -> Ranked:
    """Return the top k examples of each query, scored by stored features only.

    If the features lack the tail, "metric" normalises without it too: by the length in the metric within the kept
    directions, so that an example's cosine with itself is 1.
    """
    phi: Tensor = queries.features  # type: ignore[assignment]
    weighted = phi.double() * run.weights
    if normalize is None:
        return search(run.feature_chunks(), weighted.float(), k, allowed=allowed, device=device)
    if normalize == "gradient" or (normalize == "metric" and run.holds_everything):
        of_queries, scale = _whole_sizes(run, queries, normalize)
        weighted = weighted / of_queries
        return search(run.feature_chunks(), weighted.float(), k, allowed=allowed, scale=scale, device=device)
    metric = run.weights if normalize == "metric" else torch.ones_like(run.weights)
    weighted = weighted / _root(_squares(phi, metric))[:, None]
    sizes = _Passing()

    def chunks() -> Iterator[tuple[int, Tensor]]:
        for first, features in run.feature_chunks():
            sizes.add(first, _root(_squares(features, metric)))
            yield first, features

    return search(chunks(), weighted.float(), k, allowed=allowed, scale=sizes.of, device=device)


class _Passing:
    """A sliding window over one number per row, from when a chunk is read until the search has passed it."""

    def __init__(self) -> None:
        self.held: deque[tuple[int, Tensor]] = deque()

    def add(self, first: int, values: Tensor) -> None:
        self.held.append((first, values))

    def of(self, first: int, count: int) -> Tensor:  # (n,)
        """Return the numbers of rows `first` to `first + count`, and forget earlier rows."""
        while self.held[0][0] + len(self.held[0][1]) <= first:
            self.held.popleft()
        start, values = self.held[0][0], torch.cat([part for _, part in self.held])
        return values[first - start : first - start + count]


def candidates(
    run: RunReader, queries: Queries, half: int, allowed: Eligible, normalize: Normalize, device: Any
) -> Tensor:  # (Q, 2·half), -1 where there are fewer
    """Return the rows of `half` candidate proponents and `half` candidate opponents per query, to be rescored.

    The tail of two gradients contributes at most √(t(x)·t(z)) to their score, where t is the part of self-influence
    that the features do not contain. A tenth of this bound is added on either side: without it, examples with large
    tails would be missed, and with all of it they would dominate.
    """
    if run.holds_everything:
        found = by_features(run, queries, half, allowed, normalize, device)
        return torch.cat([found.proponents, found.opponents], dim=1)
    phi: Tensor = queries.features  # type: ignore[assignment]
    of_queries = torch.from_numpy(queries.self_influence)

    def unheld(features: Tensor, whole: Tensor) -> Tensor:  # (n, K), (n,) -> (n, 1)
        return (whole.double() - _squares(features, run.weights)).clamp_min(0).sqrt()[:, None]

    def chunks() -> Iterator[tuple[int, Tensor]]:
        for first, features in run.feature_chunks():
            tail = unheld(features, _column(run, "self_influence", first, len(features)))
            yield first, torch.cat([features.float(), tail.float()], dim=1)

    weighted = phi.double() * run.weights
    tail, scale = _ALIKE * unheld(phi, of_queries), None
    questions = torch.cat([torch.cat([sign * weighted, tail], dim=1) for sign in (1, -1)])
    if normalize is not None:
        sizes, scale = _whole_sizes(run, queries, normalize)
        questions = questions / sizes.repeat(2, 1)

    def twice(first: int, count: int) -> Tensor | None:
        may = None if allowed is None else allowed(first, count)
        return None if may is None else may.repeat(2, 1)

    found = search(chunks(), questions.float(), half, allowed=twice, scale=scale, device=device, both=False)
    return torch.cat(found.proponents.split(queries.count), dim=1)


def _whole_sizes(run: RunReader, queries: Queries, normalize: Normalize) -> tuple[Tensor, Scale]:  # (Q, 1)
    """Return the norms that scores are divided by, tail included: of queries, and a function for examples."""
    if normalize == "gradient":
        of_queries = torch.from_numpy(queries.square_norms)
        return _root(of_queries)[:, None], lambda first, count: _lengths(run, first, count)
    of_queries = torch.from_numpy(queries.self_influence)
    return _root(of_queries)[:, None], lambda first, count: _root(_column(run, "self_influence", first, count))


def _lengths(run: RunReader, first: int, count: int) -> Tensor:  # (n,)
    return _column(run, "gradient_norm", first, count).double().clamp_min(_LEAST)


def _column(run: RunReader, name: str, first: int, count: int) -> Tensor:  # (n,)
    return torch.from_numpy(run.column(name, range(first, first + count)))


def _squares(features: Tensor, metric: Tensor) -> Tensor:  # (n, K), (K,) -> (n,)
    return features.double().square() @ metric.double()


def _root(squares: Tensor) -> Tensor:
    if (squares < 0).any():
        raise UnsupportedError(
            "normalize='metric' needs non-negative self-influence, but some examples have a negative one. Use "
            "normalize='gradient'."
        )
    return squares.double().sqrt().clamp_min(_LEAST)
