"""Exact streaming top-k search over features, and merging of ranked lists."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from eigentrace.errors import InputError, NumericalError
from eigentrace.numeric.accumulate import wide
from eigentrace.settings import check_counts, counted

Chunks = Iterable[tuple[int, Tensor]]
"""Pairs (first row, features (n, K) of consecutive rows), in ascending order."""


Allowed = Callable[[int, int], Tensor | None]
"""Given (first row, n), returns a mask of eligible rows: (n,), or (Q, n) per query, or None if all are eligible."""


Scale = Callable[[int, int], Tensor]
"""Given (first row, n), returns the divisors of the rows' scores: (n,)."""


# Scores per group. Single scores are compared only in groups whose maximum exceeds the weakest score kept so far.
_GROUP = 64


# Scores in memory at a time. On a CPU 4 MiB for each thread, up to a limit, fit in its cache; a GPU needs large blocks.
_SCORES, _MOST_THREADS, _SCORES_ON_GPU = 2**20, 8, 2**26


_LEAST_ROWS, _MOST_ROWS, _MOST_ROWS_ON_GPU = 512, 2**16, 2**20


# Bytes of features in memory at a time: on a CPU the size of a chunk of the readers, which then need not be joined.
_BYTES, _BYTES_ON_GPU = 2**25, 2**30


# If more than this fraction of the groups has candidates, keep only the best k of each query before merging.
_CROWDED = 0.25


@dataclass(frozen=True)
class Ranked:
    """The k highest-scoring and the k lowest-scoring examples of each query, strongest first.

    If fewer were found, the rest is filled with row -1 and score NaN.
    """

    proponents: Tensor  # (Q, k) rows of the training data
    proponent_scores: Tensor  # (Q, k), descending
    opponents: Tensor  # (Q, k) rows of the training data
    opponent_scores: Tensor  # (Q, k), ascending

    def __repr__(self) -> str:
        queries, k = self.proponents.shape
        return f"<Ranked: the top {k} proponents and opponents of {counted(queries, 'query')}>"

    def __post_init__(self) -> None:
        shapes = {tuple(t.shape) for t in (self.proponents, self.proponent_scores)}
        shapes |= {tuple(t.shape) for t in (self.opponents, self.opponent_scores)}
        if len(shapes) != 1:
            raise InputError(f"Rows and scores of a ranking must have the same shape (Q, k), got {sorted(shapes)}.")


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

    The search is exact. Scores are computed in float32, or in float64 if `asked` is float64. Ties are broken by the
    smaller row, and the result does not depend on how rows are divided into chunks. Scores that are not finite, because
    a feature is NaN or has overflowed, are skipped. Memory grows with k·Q and the size of a chunk, not with N.

    Args:
        chunks: Pairs of a first row and the features from there on, of any floating-point type, in ascending order.
            Rows may be left out. On a GPU the next chunk is read while one is being searched.
        asked: The queries' features times the weights, so that products are scores.
        k: How many examples on either side. If fewer are eligible, the rest is filled with row -1 and score NaN.
        allowed: Which rows are eligible, for all queries or for each; for instance those of a query's class.
        scale: Divides each example's scores, for instance by the norm of its features.
        device: Where to multiply; the device of `asked` if None. The result is on the device of `asked`.
        both: Search for the lowest scores too. If False, opponents are all -1 and NaN.
    """
    check_counts(1, k=k)
    if asked.ndim != 2 or not asked.is_floating_point():
        raise InputError(
            f"Queries must be a floating-point (Q, K) matrix, got {asked.dtype} of shape {tuple(asked.shape)}."
        )
    where = torch.device(asked.device if device is None else device)
    queries = wide(asked).to(where)
    high, low = (_Best(queries, k, largest=largest) for largest in (True, False))
    sides = (high, low) if both else (high,)
    num_queries, width = asked.shape
    for first, features in _moved(_blocks(chunks, _rows_at_once(num_queries, width, where), width), where):
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
    """The best k examples of each query so far, on one side, and candidates not yet merged.

    Scores are stored as strengths: the scores of proponents, and the negated scores of opponents.
    """

    def __init__(self, queries: Tensor, k: int, *, largest: bool) -> None:
        self.largest, self.k = largest, k
        self.worst = -torch.inf if largest else torch.inf
        shape = (len(queries), k)
        self.rows = torch.full(shape, -1, device=queries.device)
        self.strengths = torch.full(shape, -torch.inf, dtype=queries.dtype, device=queries.device)
        self.waiting: list[tuple[Tensor, Tensor, Tensor]] = []  # queries, rows, strengths: (m,) each

    def offer(self, first: int, scores: Tensor) -> None:  # (Q, n)
        """Merge scores of consecutive examples starting at `first`; they must follow all earlier rows."""
        missing = -scores.shape[1] % _GROUP
        if missing:
            scores = torch.nn.functional.pad(scores, (0, missing), value=self.worst)
        groups = scores.unflatten(1, (-1, _GROUP))
        # Of equal scores the earlier row wins, so only strictly stronger scores count. The maximum of a group with NaN
        # is NaN, so such a group is never skipped.
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
        """Keep only the best k scores of each query, so that fewer have to be sorted."""
        strengths = self._strength(scores).nan_to_num(-torch.inf, posinf=-torch.inf, neginf=-torch.inf)
        query, column = _first_best(strengths, floor, self.k).nonzero(as_tuple=True)
        self._add(query, first + column, strengths[query, column])

    def ranking(self) -> tuple[Tensor, Tensor]:  # (Q, k), (Q, k)
        """Return the rows and scores of the best k, strongest first."""
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
        """Merge the waiting candidates; two stable sorts, by strength and by query, keep tied rows ascending."""
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
    """Return a mask of the best k strengths of each query above its floor; the first of ties."""
    least = strengths.topk(min(k, strengths.shape[1]), dim=1).values[:, -1:].maximum(floor[:, None])
    above, level = strengths > least, strengths == least
    level &= least > floor[:, None]
    left = k - above.sum(dim=1, keepdim=True)
    return above | (level & (level.cumsum(dim=1) <= left))


def _rows_at_once(num_queries: int, width: int, device: torch.device) -> int:
    on_cpu = device.type == "cpu"
    scores = _SCORES * min(torch.get_num_threads(), _MOST_THREADS) if on_cpu else _SCORES_ON_GPU
    num_bytes = _BYTES if on_cpu else _BYTES_ON_GPU
    rows = max(1, min(scores // max(1, num_queries), num_bytes // (4 * max(1, width))))
    # A power of two, and on a CPU at most 65,536 rows, as the readers have it: chunks need not be joined.
    return max(_LEAST_ROWS, min(_MOST_ROWS if on_cpu else _MOST_ROWS_ON_GPU, 2 ** (rows.bit_length() - 1)))


def _blocks(chunks: Chunks, size: int, width: int) -> Iterator[tuple[int, Tensor]]:
    """Cut chunks at multiples of `size`, because the last bit of a product may depend on the factors' shapes."""
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
            parts[-1] = parts[-1].clone()  # a reader may reuse the memory of its chunks
    if parts:
        yield start, torch.cat(parts)


def _check_chunk(first: int, features: Tensor, end: int, width: int) -> None:
    if features.ndim != 2 or features.shape[1] != width or not features.is_floating_point():
        got = f"{features.dtype} of shape {tuple(features.shape)}"
        raise InputError(
            f"Queries have {width} features, so chunks must be floating-point (n, {width}) matrices, got {got}."
        )
    if first < end:
        raise InputError(
            f"A chunk begins at row {first}, but the one before it ended before row {end}. Pass chunks in order."
        )


def _moved(blocks: Iterator[tuple[int, Tensor]], device: torch.device) -> Iterator[tuple[int, Tensor]]:
    """Move blocks to a device; to a GPU asynchronously through pinned memory, one block ahead."""
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
        raise InputError(
            f"`scale` must return one number for each of {scores.shape[1]} rows, got shape {tuple(found.shape)}."
        )
    return found.to(scores)


def _forbidden_by(allowed: Allowed, first: int, scores: Tensor) -> Tensor | None:  # -> (n,) or (Q, n)
    found = allowed(first, scores.shape[1])
    if found is None:
        return None
    shapes = (tuple(scores.shape[1:]), tuple(scores.shape))
    if found.dtype != torch.bool or tuple(found.shape) not in shapes:
        got = f"{found.dtype} of shape {tuple(found.shape)}"
        raise InputError(f"`allowed` must return a bool tensor of shape {shapes[0]} or {shapes[1]}, got {got}.")
    return ~found.to(scores.device)


# Examples whose features are read at a time to select a shortlist.
_AT_ONCE = 65_536


def best_of(scores: Tensor, rows: Tensor, k: int) -> Ranked:  # (Q, n), (Q, n) or (n,) ascending
    """Return the k highest and the k lowest scores of each query, with ties in row order.

    A row listed twice for a query counts once.
    """
    rows = rows.expand_as(scores)
    again = torch.zeros_like(scores, dtype=torch.bool)
    again[:, 1:] = rows[:, 1:] == rows[:, :-1]
    high = scores.masked_fill(again, -torch.inf).sort(dim=1, descending=True, stable=True).indices[:, :k]
    low = scores.masked_fill(again, torch.inf).sort(dim=1, stable=True).indices[:, :k]
    return Ranked(rows.gather(1, high), scores.gather(1, high), rows.gather(1, low), scores.gather(1, low))


def shortlist_rows(train: Tensor, asked: Tensor, count: int) -> Tensor:  # (N, K), (Q, K) -> (Q, n) ascending
    """Return the shortlist of each query: its strongest examples on either side, `count` in total.

    Args:
        train: Stored features of the training examples; read in chunks, so they may be memory-mapped.
        asked: The queries' features times the weights, so that products are scores.
        count: Candidates per query, half of them proponents. With ties an example may be on both sides.
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
            f"Fewer than {half} of {len(train)} scores are finite for at least one query: its features or the stored "
            "features contain NaN or infinity. Compute them again, in a wider precision if they were stored in float16."
        )
    return lists


def merged(scores: Tensor, rows: Tensor, k: int, before: Ranked | None = None) -> Ranked:
    """Return the k highest and lowest of new and earlier scores, with ties in row order; row -1 is ignored."""
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
