"""The strongest proponents and opponents of a query: shortlisted by stored features, then scored exactly."""

import torch
from torch import Tensor

from eigentrace.errors import NumericalError
from eigentrace.search import Ranked, search
from eigentrace.settings import check_counts

# Examples whose features are read at a time while a shortlist is drawn up.
_AT_ONCE = 65_536


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
    chunks = ((start, train[start : start + _AT_ONCE]) for start in range(0, len(train), _AT_ONCE))
    found = search(chunks, asked, half)
    lists = torch.cat([found.proponents, found.opponents], dim=1).sort(dim=1).values
    if (lists < 0).any():
        raise NumericalError(
            f"For some query fewer than {half} of {len(train)} scores are finite: its features, or those stored, hold "
            "NaN or infinity. Compute them again, in a wider precision if these were stored in float16."
        )
    return lists
