"""Who may answer a question about a run: the strongest by the features that it stores, which are read once."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from eigentrace.data import Data
from eigentrace.errors import UnsupportedError
from eigentrace.fitted import Fitted, Normalize
from eigentrace.search import Ranked, Scale, search
from eigentrace.store.columns import Names

MayAnswer = Callable[[int, int], Tensor] | None
"""Tells for n rows from a first one which may answer which query, (Q, n); None if all may."""

# Tails of two examples are taken to be this much alike when candidates are named. Measured cosines spread by .05 to .2.
_ALIKE = 0.1
_LEAST = 1e-30  # the score of an example without a gradient is 0


class Scored(Protocol):
    """What a run offers to whoever asks it."""

    fitted: Fitted | None
    data: Data | None

    @property
    def manifest(self) -> dict[str, Any]: ...  # noqa: D102
    @property
    def num_rows(self) -> int: ...  # noqa: D102
    @property
    def num_features(self) -> int: ...  # noqa: D102
    @property
    def weights(self) -> Tensor: ...  # noqa: D102
    @property
    def columns(self) -> tuple[str, ...]: ...  # noqa: D102
    @property
    def names(self) -> Names | None: ...  # noqa: D102
    @property
    def digests(self) -> np.ndarray | None: ...  # noqa: D102
    def column(self, name: str) -> np.ndarray: ...  # noqa: D102
    def features_of(self, rows: np.ndarray) -> Tensor: ...  # noqa: D102
    def feature_chunks(self, rows_at_once: int = ...) -> Iterator[tuple[int, Tensor]]: ...  # noqa: D102


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


def lacks_tail(run: Scored) -> bool:
    """Tell whether scores have a part that the stored features hold nothing of."""
    return run.manifest["features"]["hold"] != "everything"


def by_features(run: Scored, asked: Asked, k: int, allowed: MayAnswer, normalize: Normalize, device: Any) -> Ranked:
    """Rank by stored features alone.

    Where they lack the tail, gradients are normalised without it too: by their length along the kept directions, or in
    the metric there, so that an example is as close to itself as can be.
    """
    phi: Tensor = asked.features  # type: ignore[assignment]
    weighted = phi.double() * run.weights
    if normalize is None:
        return search(run.feature_chunks(), weighted.float(), k, allowed=allowed, device=device)
    if not lacks_tail(run):
        of_queries, scale = _whole_sizes(run, asked, normalize)
        weighted = weighted / of_queries
        return search(run.feature_chunks(), weighted.float(), k, allowed=allowed, scale=scale, device=device)
    metric = run.weights if normalize == "metric" else torch.ones_like(run.weights)
    weighted = weighted / _root(_squares(phi, metric))[:, None]
    sizes = torch.empty(run.num_rows, dtype=torch.float64)

    def chunks() -> Iterator[tuple[int, Tensor]]:
        for first, features in run.feature_chunks():
            sizes[first : first + len(features)] = _root(_squares(features, metric))
            yield first, features

    return search(chunks(), weighted.float(), k, allowed=allowed, scale=_cut(sizes), device=device)


def candidates(
    run: Scored, asked: Asked, half: int, allowed: MayAnswer, normalize: Normalize, device: Any
) -> Tensor:  # (Q, 2·half), -1 where there are fewer
    """Name those whose scores by the model may be among the strongest: so many proponents, and as many opponents.

    What the tail of two gradients adds is at most √(t(x)·t(z)), t being the part of self-influence that features do not
    hold. A tenth of it is credited, to either side: large tails would be overlooked without, and rule with all of it.
    """
    if not lacks_tail(run):
        found = by_features(run, asked, half, allowed, normalize, device)
        return torch.cat([found.proponents, found.opponents], dim=1)
    phi: Tensor = asked.features  # type: ignore[assignment]
    of_train, of_queries = (torch.from_numpy(own) for own in (run.column("self_influence"), asked.self_influence))

    def unheld(features: Tensor, whole: Tensor) -> Tensor:  # (n, K), (n,) -> (n, 1)
        return (whole.double() - _squares(features, run.weights)).clamp_min(0).sqrt()[:, None]

    def chunks() -> Iterator[tuple[int, Tensor]]:
        for first, features in run.feature_chunks():
            tail = unheld(features, of_train[first : first + len(features)])
            yield first, torch.cat([features.float(), tail.float()], dim=1)

    weighted = phi.double() * run.weights
    tail, scale = _ALIKE * unheld(phi, of_queries), None
    questions = torch.cat([torch.cat([sign * weighted, tail], dim=1) for sign in (1, -1)])
    if normalize is not None:
        sizes, scale = _whole_sizes(run, asked, normalize)
        questions = questions / sizes.repeat(2, 1)
    twice = None if allowed is None else lambda first, count: allowed(first, count).repeat(2, 1)
    found = search(chunks(), questions.float(), half, allowed=twice, scale=scale, device=device, both=False)
    return torch.cat(found.proponents.split(asked.count), dim=1)


def _whole_sizes(run: Scored, asked: Asked, normalize: Normalize) -> tuple[Tensor, Scale]:  # (Q, 1)
    """Return by what scores are divided that are normalised with all there is: of queries, and of examples."""
    if normalize == "gradient":
        of_queries, of_train = asked.square_norms, run.column("gradient_norm") ** 2
    else:
        of_queries, of_train = asked.self_influence, run.column("self_influence")
    return _root(torch.from_numpy(of_queries))[:, None], _cut(_root(torch.from_numpy(of_train)))


def _squares(features: Tensor, metric: Tensor) -> Tensor:  # (n, K), (K,) -> (n,)
    return features.double().square() @ metric.double()


def _root(squares: Tensor) -> Tensor:
    if (squares < 0).any():
        raise UnsupportedError("Self-influence is negative for some examples, so it gives no cosine: use 'gradient'.")
    return squares.double().sqrt().clamp_min(_LEAST)


def _cut(sizes: Tensor) -> Scale:
    return lambda first, count: sizes[first : first + count]
