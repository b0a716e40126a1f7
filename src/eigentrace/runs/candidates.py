"""Who may answer a question about a run: the strongest by the features that it stores, which are read once."""

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

MayAnswer = Callable[[int, int], Tensor | None] | None
"""Tells for n rows from a first one which may answer which query, (Q, n); None, or giving None, if all may."""

# Tails of two examples are taken to be this much alike when candidates are named. Measured cosines spread by .05 to .2.
_ALIKE = 0.1
_LEAST = 1e-30  # the score of an example without a gradient is 0


@dataclass(frozen=True)
class Asked:
    """Queries, and what is known of them."""

    count: int
    rows: np.ndarray | None  # (Q,) if they are rows of the run
    features: Tensor | None  # (Q, K)
    data: Data | None
    labels: np.ndarray | None
    digests: np.ndarray | None
    square_norms: np.ndarray | None
    self_influence: np.ndarray | None


def by_features(run: RunReader, asked: Asked, k: int, allowed: MayAnswer, normalize: Normalize, device: Any) -> Ranked:
    """Rank by stored features alone.

    Where they lack the tail, gradients are normalised without it too: by their length along the kept directions, or in
    the metric there, so that an example is as close to itself as can be.
    """
    phi: Tensor = asked.features  # type: ignore[assignment]
    weighted = phi.double() * run.weights
    if normalize is None:
        return search(run.feature_chunks(), weighted.float(), k, allowed=allowed, device=device)
    if run.holds_everything:
        of_queries, scale = _whole_sizes(run, asked, normalize)
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
    """One number per row, kept from when a chunk is read until the search has passed it."""

    def __init__(self) -> None:
        self.held: deque[tuple[int, Tensor]] = deque()

    def add(self, first: int, values: Tensor) -> None:
        self.held.append((first, values))

    def of(self, first: int, count: int) -> Tensor:  # (n,)
        """Return the numbers of n rows from a first one on; earlier ones are not asked for again."""
        while self.held[0][0] + len(self.held[0][1]) <= first:
            self.held.popleft()
        start, values = self.held[0][0], torch.cat([part for _, part in self.held])
        return values[first - start : first - start + count]


def candidates(
    run: RunReader, asked: Asked, half: int, allowed: MayAnswer, normalize: Normalize, device: Any
) -> Tensor:  # (Q, 2·half), -1 where there are fewer
    """Name those whose scores by the model may be among the strongest: so many proponents, and as many opponents.

    What the tail of two gradients adds is at most √(t(x)·t(z)), t being the part of self-influence that features do not
    hold. A tenth of it is credited, to either side: large tails would be overlooked without, and rule with all of it.
    """
    if run.holds_everything:
        found = by_features(run, asked, half, allowed, normalize, device)
        return torch.cat([found.proponents, found.opponents], dim=1)
    phi: Tensor = asked.features  # type: ignore[assignment]
    of_queries = torch.from_numpy(asked.self_influence)

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
        sizes, scale = _whole_sizes(run, asked, normalize)
        questions = questions / sizes.repeat(2, 1)

    def twice(first: int, count: int) -> Tensor | None:
        may = None if allowed is None else allowed(first, count)
        return None if may is None else may.repeat(2, 1)

    found = search(chunks(), questions.float(), half, allowed=twice, scale=scale, device=device, both=False)
    return torch.cat(found.proponents.split(asked.count), dim=1)


def _whole_sizes(run: RunReader, asked: Asked, normalize: Normalize) -> tuple[Tensor, Scale]:  # (Q, 1)
    """Return by what scores are divided that are normalised with all there is: of queries, and of examples."""
    if normalize == "gradient":
        of_queries = torch.from_numpy(asked.square_norms)
        return _root(of_queries)[:, None], lambda first, count: _lengths(run, first, count)
    of_queries = torch.from_numpy(asked.self_influence)
    return _root(of_queries)[:, None], lambda first, count: _root(_column(run, "self_influence", first, count))


def _lengths(run: RunReader, first: int, count: int) -> Tensor:  # (n,)
    return _column(run, "gradient_norm", first, count).double().clamp_min(_LEAST)


def _column(run: RunReader, name: str, first: int, count: int) -> Tensor:  # (n,)
    return torch.from_numpy(run.column(name, range(first, first + count)))


def _squares(features: Tensor, metric: Tensor) -> Tensor:  # (n, K), (K,) -> (n,)
    return features.double().square() @ metric.double()


def _root(squares: Tensor) -> Tensor:
    if (squares < 0).any():
        raise UnsupportedError("Self-influence is negative for some examples, so it gives no cosine: use 'gradient'.")
    return squares.double().sqrt().clamp_min(_LEAST)
