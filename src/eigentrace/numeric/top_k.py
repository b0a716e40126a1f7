"""Exact top-k search over features that are read once, in pieces, and merging of ranked lists."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from eigentrace.errors import InputError, NumericalError
from eigentrace.numeric.accumulate import wide
from eigentrace.settings import check_counts

Chunks = Iterable[tuple[int, Tensor]]
"""Pairs of a first row and the features from there on, (n, K), in the order of the rows."""


Allowed = Callable[[int, int], Tensor | None]
"""Tells for n rows from a first one which may be found: (n,) for all queries, (Q, n) for each, or None for all rows."""


Scale = Callable[[int, int], Tensor]
"""Gives for n rows from a first one what their scores are divided by: (n,)."""


# Scores whose extremes are taken together. Only where an extreme beats what is held are single scores looked at.
_GROUP = 64


# Scores held at a time: 4 MiB for each of some threads stay in a processor's cache; a GPU has to be kept busy instead.
_SCORES, _MOST_THREADS, _SCORES_ON_GPU = 2**20, 8, 2**26


_LEAST_ROWS, _MOST_ROWS, _MOST_ROWS_ON_GPU = 512, 2**16, 2**20


# Beyond this part of all groups, a piece is first cut down to the best k of each query.
_CROWDED = 0.25


@dataclass(frozen=True)
class Ranked:
    """For each query the k examples of highest score and the k of lowest, strongest first.

    Where fewer were found, row -1 and the score NaN stand at the end.
    """

    proponents: Tensor  # (Q, k) rows of the training data
    proponent_scores: Tensor  # (Q, k), falling
    opponents: Tensor  # (Q, k) rows of the training data
    opponent_scores: Tensor  # (Q, k), rising

    def __post_init__(self) -> None:
        shapes = {tuple(t.shape) for t in (self.proponents, self.proponent_scores)}
        shapes |= {tuple(t.shape) for t in (self.opponents, self.opponent_scores)}
        if len(shapes) != 1:
            raise InputError(f"Rows and scores of a ranking have one shape (Q, k), got {sorted(shapes)}.")


@torch.no_grad()
def search(
    chunks: Chunks,
    asked: Tensor,  # (Q, K)
    k: int,
    *,
    allowed: Allowed | None = None,
    scale: Scale | None = None,
    device: torch.device | str | None = None,
    both: bool = True,
) -> Ranked:
    """Find the k highest and the k lowest of `asked @ features.T` for each query.

    Nothing is approximated. Scores are computed in float32, or in float64 where `asked` is. Of equal scores that of the
    smaller row comes first, and the answer does not depend on how rows are cut into chunks. Scores that are not finite,
    because a feature is NaN or has overflowed, are never found. Memory grows with k·Q and with the chunks, not with N.

    Args:
        chunks: Features of the training examples, of any floating type, by their first rows and in rising order. Rows
            may be left out. On a GPU the next chunk is read while one is being searched.
        asked: The queries' features times the weights, so that products are scores.
        k: How many on either side. Where fewer may be found, row -1 and the score NaN fill up at the end.
        allowed: Which rows may be found at all, or by which query: those of its class, or all but its own.
        scale: Divides each example's scores, for instance by the norm of its features.
        device: Where to multiply; where `asked` lies if None. The answer is brought back to where `asked` lies.
        both: Look for the lowest too. If not, opponents are all -1 and NaN.
    """
    check_counts(1, k=k)
    if asked.ndim != 2 or not asked.is_floating_point():
        raise InputError(f"Queries are a floating (Q, K) matrix, got {asked.dtype} of shape {tuple(asked.shape)}.")
    where = torch.device(asked.device if device is None else device)
    queries = wide(asked).to(where)
    high, low = (_Best(queries, k, largest=largest) for largest in (True, False))
    sides = (high, low) if both else (high,)
    for first, features in _moved(_blocks(chunks, _rows_at_once(len(asked), where), asked.shape[1]), where):
        scores = queries @ features.to(queries.dtype).T
        if scale is not None:
            scores /= _scale_of(scale, first, scores)
        forbidden = None if allowed is None else _forbidden_by(allowed, first, scores)
        for side in sides:
            if forbidden is not None:
                scores.masked_fill_(forbidden, side.worst)
            side.offer(first, scores)
    found = [tensor.to(asked.device) for side in (high, low) for tensor in side.ranking()]
    return Ranked(*found)


class _Best:
    """The best k of each query so far, on one side, and those that may join them.

    Scores are kept as strengths, which are the scores of proponents and the negative scores of opponents.
    """

    def __init__(self, queries: Tensor, k: int, *, largest: bool) -> None:
        self.largest, self.k = largest, k
        self.worst = -torch.inf if largest else torch.inf
        shape = (len(queries), k)
        self.rows = torch.full(shape, -1, device=queries.device)
        self.strengths = torch.full(shape, -torch.inf, dtype=queries.dtype, device=queries.device)
        self.waiting: list[tuple[Tensor, Tensor, Tensor]] = []  # queries, rows, strengths: (m,) each

    def offer(self, first: int, scores: Tensor) -> None:  # (Q, n)
        """Take the scores of the rows from a first one on, which come after all rows seen before."""
        missing = -scores.shape[1] % _GROUP
        if missing:
            scores = torch.nn.functional.pad(scores, (0, missing), value=self.worst)
        groups = scores.unflatten(1, (-1, _GROUP))
        # A later row of equal score loses: only what is strictly stronger counts. NaN hides what stands beside it.
        floor = self.strengths[:, -1]
        weak = groups.amax(dim=2) <= floor[:, None] if self.largest else groups.amin(dim=2) >= -floor[:, None]
        hits = weak.logical_not_().flatten().nonzero().squeeze(1)
        if len(hits) > _CROWDED * weak.numel():
            self._take_crowd(first, scores, floor)
        elif len(hits):
            query = hits // weak.shape[1]
            strengths = self._strength(groups.flatten(0, 1).index_select(0, hits))
            at, offset = (strengths > floor[query, None]).nonzero(as_tuple=True)
            self._add(query[at], first + (hits % weak.shape[1])[at] * _GROUP + offset, strengths[at, offset])

    def _take_crowd(self, first: int, scores: Tensor, floor: Tensor) -> None:
        """Take of many strong scores the best k of each query alone, so that few have to be put in order."""
        strengths = self._strength(scores).nan_to_num(-torch.inf, posinf=-torch.inf, neginf=-torch.inf)
        query, column = _first_best(strengths, floor, self.k).nonzero(as_tuple=True)
        self._add(query, first + column, strengths[query, column])

    def ranking(self) -> tuple[Tensor, Tensor]:  # (Q, k), (Q, k)
        """Return rows and scores, strongest first."""
        self._merge()
        return self.rows, self._strength(self.strengths).masked_fill(self.rows < 0, torch.nan)

    def _strength(self, scores: Tensor) -> Tensor:
        return scores if self.largest else -scores

    def _add(self, query: Tensor, rows: Tensor, strengths: Tensor) -> None:
        finite = strengths < torch.inf
        self.waiting.append((query[finite], rows[finite], strengths[finite]))
        if sum(len(rows) for _, rows, _ in self.waiting) >= self.rows.numel():
            self._merge()

    def _merge(self) -> None:
        """Let those that wait take their places; a stable order by strength, then by query, keeps rows rising."""
        num = len(self.rows)
        held = torch.arange(num, device=self.rows.device).repeat_interleave(self.k)
        parts = [(held, self.rows.flatten(), self.strengths.flatten()), *self.waiting]
        self.waiting = []
        query, rows, strengths = (torch.cat(part) for part in zip(*parts, strict=True))
        order = strengths.argsort(descending=True, stable=True)
        order = order[query[order].argsort(stable=True)]
        counts = query.bincount(minlength=num)
        places = (counts.cumsum(0) - counts)[:, None] + torch.arange(self.k, device=rows.device)
        self.rows, self.strengths = rows[order[places]], strengths[order[places]]


def _first_best(strengths: Tensor, floor: Tensor, k: int) -> Tensor:  # (Q, n), (Q,) -> (Q, n)
    """Mark the best k of each query above its floor; of equal ones the first."""
    least = strengths.topk(min(k, strengths.shape[1]), dim=1).values[:, -1:].maximum(floor[:, None])
    above, level = strengths > least, strengths == least
    level &= least > floor[:, None]
    left = k - above.sum(dim=1, keepdim=True)
    return above | (level & (level.cumsum(dim=1) <= left))


def _rows_at_once(num_queries: int, device: torch.device) -> int:
    on_cpu = device.type == "cpu"
    scores = _SCORES * min(torch.get_num_threads(), _MOST_THREADS) if on_cpu else _SCORES_ON_GPU
    rows = 2 ** (max(1, scores // max(1, num_queries)).bit_length() - 1)
    # A power of two, and on a CPU at most what readers give at once: chunks of 65,536 rows need not be joined.
    return max(_LEAST_ROWS, min(_MOST_ROWS if on_cpu else _MOST_ROWS_ON_GPU, rows))


def _blocks(chunks: Chunks, size: int, width: int) -> Iterator[tuple[int, Tensor]]:
    """Cut chunks anew, at multiples of a size: a product may differ in its last bit with the shape of the factors."""
    parts: list[Tensor] = []
    start = end = 0
    for first, features in chunks:
        _check_chunk(first, features, end, width)
        if parts and first != end:
            yield start, torch.cat(parts)
            parts = []
        row, end = first, first + len(features)
        while row < end:
            start = start if parts else row
            stop = min(end, (row // size + 1) * size)
            parts.append(features[row - first : stop - first])
            row = stop
            if row % size == 0:
                yield start, parts[0] if len(parts) == 1 else torch.cat(parts)
                parts = []
        if parts:
            parts[-1] = parts[-1].clone()  # whoever reads chunks may use their memory again
    if parts:
        yield start, torch.cat(parts)


def _check_chunk(first: int, features: Tensor, end: int, width: int) -> None:
    if features.ndim != 2 or features.shape[1] != width or not features.is_floating_point():
        got = f"{features.dtype} of shape {tuple(features.shape)}"
        raise InputError(f"Queries have {width} features: chunks are floating (n, {width}) matrices, got {got}.")
    if first < end:
        raise InputError(f"A chunk begins at row {first} after one that ended before row {end}: give them in order.")


def _moved(blocks: Iterator[tuple[int, Tensor]], device: torch.device) -> Iterator[tuple[int, Tensor]]:
    """Bring blocks to a device; to a GPU through pinned memory, one ahead, while the one before it is searched."""
    if device.type != "cuda":
        yield from ((first, block.to(device)) for first, block in blocks)
        return
    copying, ahead = torch.cuda.Stream(device), None
    for first, block in blocks:
        with torch.cuda.stream(copying):
            moved = (block if block.is_cuda else block.pin_memory()).to(device, non_blocking=True)
        here = (first, moved, copying.record_event())
        if ahead is not None:
            yield _arrived(*ahead, device)
        ahead = here
    if ahead is not None:
        yield _arrived(*ahead, device)


def _arrived(first: int, block: Tensor, copied: torch.cuda.Event, device: torch.device) -> tuple[int, Tensor]:
    stream = torch.cuda.current_stream(device)
    stream.wait_event(copied)
    block.record_stream(stream)
    return first, block


def _scale_of(scale: Scale, first: int, scores: Tensor) -> Tensor:  # -> (n,)
    found = scale(first, scores.shape[1])
    if found.shape != scores.shape[1:]:
        raise InputError(f"A scale has one number for each of {scores.shape[1]} rows, got {tuple(found.shape)}.")
    return found.to(scores)


def _forbidden_by(allowed: Allowed, first: int, scores: Tensor) -> Tensor | None:  # -> (n,) or (Q, n)
    found = allowed(first, scores.shape[1])
    if found is None:
        return None
    shapes = (tuple(scores.shape[1:]), tuple(scores.shape))
    if found.dtype != torch.bool or tuple(found.shape) not in shapes:
        got = f"{found.dtype} of shape {tuple(found.shape)}"
        raise InputError(f"Allowed rows are truth values of shape {shapes[0]} or {shapes[1]}, got {got}.")
    return ~found.to(scores.device)


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


def shortlist_rows(train: Tensor, asked: Tensor, count: int) -> Tensor:  # (N, K), (Q, K) -> (Q, n) ascending
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


def merged(scores: Tensor, rows: Tensor, k: int, before: Ranked | None = None) -> Ranked:
    """Take the k highest and lowest of what has a row, and of what was found before; equal scores in row order."""
    held: list[tuple[Tensor, Tensor]] = [(rows[:, :0], scores[:, :0])] * 2
    if before is not None:
        held = [(before.proponents, before.proponent_scores), (before.opponents, before.opponent_scores)]
    sides = []
    for sign, (old_rows, old_scores) in zip((-1.0, 1.0), held, strict=True):
        every, values = torch.cat([old_rows, rows], dim=1), torch.cat([old_scores, scores], dim=1)
        order = (sign * values).masked_fill(every < 0, torch.inf).sort(dim=1, stable=True).indices[:, :k]
        found = every.gather(1, order)
        sides += [found, values.gather(1, order).masked_fill(found < 0, torch.nan)]
    return Ranked(*sides)
