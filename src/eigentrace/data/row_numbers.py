"""Selections of rows, as ranges where possible: an array of a hundred million rows takes 0.8 GB."""

import sys
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, overload

import numpy as np
import torch
from torch import Tensor

from eigentrace.errors import DataError

Rows = range | np.ndarray
"""Ascending rows: a range of step 1, or an array."""

OPEN = sys.maxsize
"""End of a range that extends to the end of the data."""

# Up to this number of rows, a sample is taken from a permutation of all of them.
_PERMUTED = 10_000_000


class Ids(Protocol):
    """One name per row: a list, a numpy or pyarrow array, or another object with a length and items."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: Any, /) -> Any: ...


def as_rows(rows: np.ndarray | Sequence[int] | slice | None) -> Rows:
    """Convert rows (None means all) to a range of step 1 if possible, else to an array."""
    if rows is None:
        return range(OPEN)
    if isinstance(rows, slice):
        rows = range(rows.start or 0, OPEN if rows.stop is None else rows.stop, rows.step or 1)
    if isinstance(rows, range) and rows.step == 1:
        if rows.start < 0 or rows.stop < 0:
            raise DataError(
                f"Rows must not be negative, got {rows.start} to {rows.stop}. Count from the start: len(data) - 1 is "
                "the last row."
            )
        return rows
    if isinstance(rows, range) and OPEN in (rows.start, rows.stop):
        raise DataError(f"A slice of rows without an end must have step 1, got {rows.step}. Pass the rows as a range.")
    return np.asarray(rows)


def within(rows: Rows, count: int) -> Rows:
    """Limit a range to `count` rows; return an array unchanged."""
    return range(min(rows.start, count), min(rows.stop, count)) if isinstance(rows, range) else rows


def pick(rows: Rows, wanted: Rows) -> Rows:
    """Return the rows at the given positions."""
    if isinstance(wanted, range):
        return rows[wanted.start : wanted.stop]
    return wanted + rows.start if isinstance(rows, range) else rows[wanted]


def written(rows: Rows) -> np.ndarray:
    """Return rows as an array."""
    return np.arange(rows.start, rows.stop) if isinstance(rows, range) else rows


def cut(rows: Rows, size: int, before: int | None = None) -> Iterator[np.ndarray]:
    """Divide rows into batches, and yield the rows of each batch.

    Batches are divided as in a pass that began `before` rows earlier. By default, a range is part of a pass that began
    at row 0, and an array is a pass of its own.
    """
    if before is None:
        before = rows.start if isinstance(rows, range) else 0
    start, stop = 0, size - before % size
    while start < len(rows):
        yield written(rows[start:stop])
        start, stop = stop, stop + size


def boundary(row: int, size: int, count: int) -> int:
    """Return the first multiple of `size` that is ≥ `row`, at most `count`."""
    return min(-(-row // size) * size, count)


def spread(count: int, most: int) -> np.ndarray:
    """Return at most `most` evenly spaced rows, including the first and the last."""
    return np.unique(np.arange(most, dtype=np.int64) * (count - 1) // (most - 1))


def draw(count: int, size: int, generator: torch.Generator) -> np.ndarray:
    """Draw `size` distinct rows, ascending; for large `count`, memory grows with `size` only."""
    if count <= _PERMUTED or size > count // 4:
        return torch.randperm(count, generator=generator, device="cpu")[:size].sort().values.numpy()
    drawn = np.empty(0, dtype=np.int64)
    first = drawn
    while len(first) < size:
        more = torch.randint(count, (size - len(first) + size // 8 + 1,), generator=generator, device="cpu")
        drawn = np.concatenate([drawn, more.numpy()])
        first = np.unique(drawn, return_index=True)[1]
    # The first `size` distinct ones in the order drawn: keeping the smallest would favour early rows.
    return np.sort(drawn[np.sort(first)[:size]])


class Chosen(Sequence):
    """A lazy view of some items of a sequence."""

    def __init__(self, items: Ids, rows: Rows) -> None:
        self._items, self._rows = items, rows

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, place: int) -> Any: ...
    @overload
    def __getitem__(self, place: slice) -> "Chosen": ...
    def __getitem__(self, place: int | slice) -> Any:
        if isinstance(place, slice):
            return Chosen(self._items, self._rows[place])
        return self._items[int(self._rows[place])]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(mine == theirs for mine, theirs in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Chosen({len(self)} of {len(self._items)} items)"


def ids_of(ids: Ids | None, rows: Rows) -> Ids | None:
    """Return the ids of some rows, in the same array type if possible, else as a lazy view."""
    if ids is None:
        return None
    if isinstance(ids, np.ndarray | Tensor | range) and isinstance(rows, range):
        return ids[rows.start : rows.stop]
    if isinstance(ids, np.ndarray | Tensor):
        return ids[rows]
    if type(ids).__module__.split(".")[0] == "pyarrow":
        arrow: Any = ids
        return arrow.slice(rows.start, len(rows)) if isinstance(rows, range) else arrow.take(rows)
    return Chosen(ids, rows)
