"""Sources of a known number of examples: datasets, ready-made batches, and selections of their rows."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate

from eigentrace.data.batch import describe_batch, length_of, select
from eigentrace.data.digest import digest_rows, digests
from eigentrace.data.row_numbers import Rows, boundary, cut, pick, within, written
from eigentrace.errors import DataError
from eigentrace.progress import track
from eigentrace.settings import counted


@dataclass(frozen=True)
class Batch:
    """Collated examples for the loss, with their rows in the data."""

    rows: np.ndarray  # (B,)
    values: Any
    digests: np.ndarray | None = None  # (B,)
    """The digest of each example before collation, if requested and defined."""

    def __repr__(self) -> str:
        extent = f", rows {self.rows[0]} to {self.rows[-1]}" if len(self) else ""
        return f"<Batch: {counted(len(self), 'example')}{extent}>"

    def __len__(self) -> int:
        return len(self.rows)


class Source(Protocol):
    """Examples in order, readable by row."""

    can_rebatch: bool
    """Whether batches are collated by eigentrace, so that their size can be changed."""
    is_seekable: bool
    """Whether any row can be read without reading those before it."""
    is_counted: bool
    """Whether the number of examples is known without a pass over them."""

    def __len__(self) -> int: ...

    def read(self, rows: Rows, digests: bool = False, before: int | None = None) -> Iterator[Batch]:
        """Yield batches of the rows, divided as in a pass that began `before` rows earlier."""
        ...

    def boundary(self, row: int) -> int:
        """Return the first row ≥ `row` at which a batch of a full pass begins, or the end."""
        ...

    def rebatched(self, batch_size: int) -> "Source":
        """Return the same examples in batches of another size, if `can_rebatch`."""
        ...

    def held(self) -> Sequence[Any] | None:
        """Return in-memory batches of all examples, with at least their labels; None if there are none."""
        ...


@runtime_checkable
class Labelled(Protocol):
    """A dataset that can return all labels without reading its examples."""

    def all_labels(self) -> np.ndarray | None:
        """Return the label of every row; None if rows have no labels."""
        ...


def is_map_style(dataset: Any) -> bool:
    """Return whether a dataset has a length and random access."""
    return (
        hasattr(dataset, "__len__")
        and hasattr(dataset, "__getitem__")
        and not isinstance(dataset, IterableDataset | str | bytes | Mapping | nn.Module)
    )


@dataclass(frozen=True)
class Collate:
    """A collate function that can also return digests, computed in the process that loads the examples."""

    function: Callable[[list], Any] | None
    digests: bool = False

    def __call__(self, examples: list) -> tuple[Any, np.ndarray | None]:
        """Return the batch and the digests of its examples."""
        found = digests(examples) if self.digests else None
        return (_stack if self.function is None else self.function)(examples), found


def _stack(examples: list) -> Any:
    try:
        return default_collate(examples)
    except (RuntimeError, TypeError) as error:
        raise DataError(
            f"Examples of type {type(examples[0]).__name__} cannot be stacked into a batch: {error} | Pass "
            "Data(dataset, collate=...) a function that pads them, or converts their contents to tensors."
        ) from None


class _Lists:
    """A batch sampler for a loader: yields the rows of each batch as a list."""

    def __init__(self, rows: Rows, size: int, before: int | None) -> None:
        self.rows, self.size, self.before = rows, size, before

    def __iter__(self) -> Iterator[list[int]]:
        return (chunk.tolist() for chunk in cut(self.rows, self.size, self.before))


class Examples:
    """A map-style dataset whose examples are collated by eigentrace."""

    can_rebatch = is_seekable = is_counted = True

    def __init__(self, dataset: Any, collate: Callable[[list], Any] | None, batch_size: int, workers: int) -> None:
        self.dataset, self.collate, self.batch_size, self.workers = dataset, collate, batch_size, workers

    def __len__(self) -> int:
        return len(self.dataset)

    def read(self, rows: Rows, digests: bool = False, before: int | None = None) -> Iterator[Batch]:
        """Yield collated batches of the rows, loaded in worker processes if there are any."""
        rows = within(rows, len(self))
        chunks = cut(rows, self.batch_size, before)
        if type(self.dataset) is TensorDataset and self.collate is None:
            for chunk in chunks:
                index = torch.from_numpy(chunk)
                values = tuple(t[index] for t in self.dataset.tensors)
                yield Batch(chunk, values, digest_rows(values, len(chunk)) if digests else None)
            return
        loader = DataLoader(
            self.dataset,
            batch_sampler=_Lists(rows, self.batch_size, before),
            collate_fn=Collate(self.collate, digests),
            num_workers=self.workers,
            generator=own_generator(),
        )
        for chunk, (values, found) in zip(chunks, loader, strict=True):
            yield Batch(chunk, values, found)

    def boundary(self, row: int) -> int:
        """Return the next multiple of the batch size."""
        return boundary(row, self.batch_size, len(self))

    def rebatched(self, batch_size: int) -> "Examples":
        """Return the same dataset in batches of another size."""
        return Examples(self.dataset, self.collate, batch_size, self.workers)

    def held(self) -> Sequence[Any] | None:
        """Return the tensors of a TensorDataset, or all labels of a `Labelled` dataset; else None."""
        if type(self.dataset) is TensorDataset and self.collate is None:
            return [self.dataset.tensors]
        labels = self.dataset.all_labels() if isinstance(self.dataset, Labelled) else None
        return None if labels is None else [{"labels": torch.from_numpy(labels)}]


def own_generator() -> torch.Generator:
    """Return a generator for a loader, which would otherwise draw from the caller's global random state."""
    return torch.Generator(torch.get_default_device())


UNBATCHED = "The DataLoader has batch_size=None, so each item of its dataset is read as a batch"
"""Beginning of every message about such a loader."""
NOT_SINGLE = "pass the dataset itself, or give the loader a batch size."


class Batches:
    """Ready-made batches: a list of batches, or a loader with its own batches."""

    can_rebatch, is_counted = False, True

    def __init__(self, batches: Sequence[Any] | DataLoader) -> None:
        self.batches = batches
        self.is_seekable = not isinstance(batches, DataLoader)
        self.is_unbatched = isinstance(batches, DataLoader) and batches.batch_sampler is None
        # Every pass over a loader draws a seed for its workers from the caller's global random state.
        with torch.random.fork_rng(devices=[]):
            sizes = [self._length(batch) for batch in track(batches, "Counting examples")]
        self.ends = np.cumsum(np.array([0, *sizes], dtype=np.int64))  # where batch i - 1 ends, and batch i begins

    def __len__(self) -> int:
        return int(self.ends[-1])

    def read(self, rows: Rows, digests: bool = False, before: int | None = None) -> Iterator[Batch]:
        """Yield the requested rows of each batch; a loader is always read from its start."""
        rows = within(rows, len(self))
        if not len(rows):
            return
        number, to_end = -1, isinstance(rows, range) and rows.stop == len(self)
        first = int(np.searchsorted(self.ends, rows[0], side="right")) - 1
        for number, values in self._from(first):
            size = self._checked(number, values)
            start, stop = self.ends[number : number + 2].tolist()
            here = _between(rows, start, stop)
            if not len(here):
                continue
            index = slice(here.start - start, here.stop - start) if isinstance(here, range) else here - start
            found = digest_rows(values, size, index) if digests else None
            whole = isinstance(here, range) and len(here) == size
            yield Batch(written(here), values if whole else _selected(values, index, size), found)
            if stop > rows[-1] and not to_end:
                return
        self._checked_end(number + 1)

    def _length(self, batch: Any) -> int:
        try:
            return length_of(batch)
        except DataError as error:
            if not self.is_unbatched:
                raise
            raise DataError(
                f"{UNBATCHED}, but no tensor of {describe_batch(batch)} has a first dimension. If this is a single "
                f"example, {NOT_SINGLE}"
            ) from error

    def _from(self, first: int) -> Iterator[tuple[int, Any]]:
        """Yield (number, batch): of a list from batch `first` on, of a loader from its start."""
        if isinstance(self.batches, DataLoader):
            yield from enumerate(self.batches)
        else:
            yield from ((number, self.batches[number]) for number in range(first, len(self.batches)))

    def _checked(self, number: int, values: Any) -> int:
        now = length_of(values)
        if number + 1 >= len(self.ends) or now != self.ends[number + 1] - self.ends[number]:
            raise self._changed(number, now)
        return now

    def _checked_end(self, number: int) -> None:
        if number + 1 < len(self.ends):
            raise self._changed(number, 0)

    def _changed(self, number: int, now: int) -> DataError:
        start, stop = self.ends[number], self.ends[min(number + 1, len(self.ends) - 1)]
        return DataError(
            f"The batch that begins at row {start} has {now} examples, but had {stop - start} when it was counted. The "
            "loader yields different batches on each pass: build it without random sampling or filtering."
        )

    def boundary(self, row: int) -> int:
        """Return the first row ≥ `row` at which a batch begins, or the end."""
        return int(self.ends[np.searchsorted(self.ends[:-1], row)])

    def rebatched(self, batch_size: int) -> "Batches":
        """Return the batches unchanged."""
        return self

    def held(self) -> Sequence[Any] | None:
        """Return the batches if they are in a list or tuple; else None."""
        return self.batches if isinstance(self.batches, list | tuple) else None


def _between(rows: Rows, start: int, stop: int) -> Rows:
    if isinstance(rows, range):
        return range(max(start, rows.start), min(stop, rows.stop))
    low, high = np.searchsorted(rows, [start, stop])
    return rows[low:high]


def _selected(values: Any, index: np.ndarray | slice, size: int) -> Any:
    return select(values, index if isinstance(index, slice) else torch.from_numpy(index), size)


class Taken:
    """Some rows of a source, renumbered from 0."""

    is_counted = True

    def __init__(self, source: Source, rows: Rows) -> None:
        self.source, self.rows = source, rows
        self.can_rebatch, self.is_seekable = source.can_rebatch, source.is_seekable

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, rows: Rows, digests: bool = False, before: int | None = None) -> Iterator[Batch]:
        """Yield batches of the given rows, which are numbered within this selection."""
        rows = within(rows, len(self))
        if before is None:
            before = rows.start if isinstance(rows, range) else 0
        start = 0
        for batch in self.source.read(pick(self.rows, rows), digests, before):
            yield Batch(written(rows[start : start + len(batch)]), batch.values, batch.digests)
            start += len(batch)

    def boundary(self, row: int) -> int:
        """Return the first row ≥ `row` whose predecessor is read in another batch, or the end."""
        if self.can_rebatch:
            return min(self.source.boundary(row), len(self))
        if row <= 0 or row >= len(self):
            return max(0, min(row, len(self)))
        after = self.source.boundary(int(self.rows[row - 1]) + 1)
        if isinstance(self.rows, range):
            return min(after - self.rows.start, len(self))
        return int(np.searchsorted(self.rows, after))

    def rebatched(self, batch_size: int) -> "Taken":
        """Return the same rows of the rebatched source."""
        return Taken(self.source.rebatched(batch_size), self.rows)

    def held(self) -> None:
        """Return None: batches of a selection are not kept in memory."""


class Compared:
    """A source that compares each example with its expected digest when it is read.

    Args:
        source: The source to read.
        known: Returns the expected digests (N,) as uint64, or None if there are none; called when data is read.
        refusal: Returns the exception to raise for a row whose digest differs.
    """

    def __init__(
        self, source: Source, known: Callable[[], np.ndarray | None], refusal: Callable[[int], Exception]
    ) -> None:
        self.source, self.known, self.refusal = source, known, refusal
        self.can_rebatch, self.is_seekable, self.is_counted = source.can_rebatch, source.is_seekable, source.is_counted

    def __len__(self) -> int:
        return len(self.source)

    def read(self, rows: Rows, digests: bool = False, before: int | None = None) -> Iterator[Batch]:
        """Yield batches of the rows; raise `refusal(row)` for the first example that differs."""
        known = self.known()
        for batch in self.source.read(rows, digests or known is not None, before):
            if known is not None and batch.digests is not None:
                differs = batch.digests != known[batch.rows]
                if differs.any():
                    raise self.refusal(int(batch.rows[differs.argmax()]))
            yield batch

    def boundary(self, row: int) -> int:
        """Return the boundary of the source."""
        return self.source.boundary(row)

    def rebatched(self, batch_size: int) -> "Compared":
        """Return the rebatched source with the same comparison."""
        return Compared(self.source.rebatched(batch_size), self.known, self.refusal)

    def held(self) -> Sequence[Any] | None:
        """Return the in-memory batches of the source, if any."""
        return self.source.held()
