"""The strongest proponents and opponents of a query: shortlisted by stored features, then scored exactly."""

from dataclasses import dataclass

import torch
from torch import Tensor

from eigentrace.errors import InputError
from eigentrace.settings import check_counts

# Examples whose scores are held at a time while a shortlist is drawn up.
_AT_ONCE = 65_536


@dataclass(frozen=True)
class Ranked:
    """For each query the k examples of highest score and the k of lowest, strongest first."""

    proponents: Tensor  # (Q, k) rows of the training data
    proponent_scores: Tensor  # (Q, k), falling
    opponents: Tensor  # (Q, k) rows of the training data
    opponent_scores: Tensor  # (Q, k), rising

    def __post_init__(self) -> None:
        shapes = {tuple(t.shape) for t in (self.proponents, self.proponent_scores)}
        shapes |= {tuple(t.shape) for t in (self.opponents, self.opponent_scores)}
        if len(shapes) != 1:
            raise InputError(f"Rows and scores of a ranking have one shape (Q, k), got {sorted(shapes)}.")


def best_of(scores: Tensor, rows: Tensor, k: int) -> Ranked:  # (Q, n), (Q, n) or (n,) ascending
    """Take the k highest and the k lowest of each query's scores; equal ones in the order of their rows.

    A row that a query names twice counts once.
    """
    rows = rows.expand_as(scores)
    again = torch.zeros_like(scores, dtype=torch.bool)
    again[:, 1:] = rows[:, 1:] == rows[:, :-1]
    high = scores.masked_fill(again, -torch.inf).sort(dim=1, descending=True, stable=True).indices[:, :k]
    low = scores.masked_fill(again, torch.inf).sort(dim=1, stable=True).indices[:, :k]
    return Ranked(rows.gather(1, high), scores.gather(1, high), rows.gather(1, low), scores.gather(1, low))


def by_features(train: Tensor, asked: Tensor, count: int) -> Tensor:  # (N, K), (Q, K) -> (Q, n) ascending
    """Draw up a shortlist for each query: its strongest on either side, `count` in all.

    Args:
        train: Stored features of the training examples, read in pieces: they may be mapped from a file.
        asked: The queries' features times the weights, so that products are scores.
        count: Candidates per query, half of them proponents. Examples of equal score may stand on both sides.
    """
    check_counts(2, shortlist=count)
    if count >= len(train):
        return torch.arange(len(train)).expand(len(asked), -1)
    half = -(-count // 2)
    high: tuple[Tensor, Tensor] | None = None
    low: tuple[Tensor, Tensor] | None = None
    for start in range(0, len(train), _AT_ONCE):
        part = train[start : start + _AT_ONCE].to(asked)
        scores = asked @ part.T
        rows = torch.arange(start, start + len(part)).expand_as(scores)
        high = _leading(high, scores, rows, half, largest=True)
        low = _leading(low, scores, rows, half, largest=False)
    return torch.cat([high[1], low[1]], dim=1).sort(dim=1).values  # type: ignore[index]


def _leading(
    held: tuple[Tensor, Tensor] | None, scores: Tensor, rows: Tensor, count: int, *, largest: bool
) -> tuple[Tensor, Tensor]:
    if held is not None:
        scores, rows = torch.cat([held[0], scores], dim=1), torch.cat([held[1], rows], dim=1)
    found = scores.topk(min(count, scores.shape[1]), dim=1, largest=largest)
    return found.values, rows.gather(1, found.indices)
