"""Where examples come from when their number is known: datasets, batches somebody made, and some rows of these."""

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


@dataclass(frozen=True)
class Batch:
    """Some examples, ready for the loss, and the rows of the data they are."""

    rows: np.ndarray  # (B,)
    values: Any
    digests: np.ndarray | None = None  # (B,)
    """64 bits of each example's content before it was collated, where they were asked for and exist."""

    def __len__(self) -> int:
        return len(self.rows)


class Source(Protocol):
    """Examples in order, readable by row."""

    can_rebatch: bool
    """Whether batches are collated here, so that their size is ours to choose."""
    is_seekable: bool
    """Whether a row can be read without reading all that comes before it."""
    is_counted: bool
    """Whether the number of examples is known without a pass over them."""

    def __len__(self) -> int: ...

    def read(self, rows: Rows, digests: bool = False, before: int | None = None) -> Iterator[Batch]:
        """Yield batches of the rows, cut as in a pass that began `before` rows earlier."""
        ...

    def boundary(self, row: int) -> int:
        """Return the first row at or after this one with which a batch of a full pass begins, or the end."""
        ...

    def rebatched(self, batch_size: int) -> "Source":
        """Return the same examples in batches of another size, where batches are collated here."""
        ...

    def held(self) -> Sequence[Any] | None:
        """Return batches of all examples, in order, with their labels at least; None where that takes reading."""
        ...


@runtime_checkable
class Labelled(Protocol):
    """A dataset that knows every label without reading an example."""

    def all_labels(self) -> np.ndarray | None:
        """Return the label of every row; None where rows have none."""
        ...


def is_map_style(dataset: Any) -> bool:
    """Tell whether a dataset has a length and gives any of its examples when asked."""
    return (
        hasattr(dataset, "__len__")
        and hasattr(dataset, "__getitem__")
        and not isinstance(dataset, IterableDataset | str | bytes | Mapping | nn.Module)
    )


@dataclass(frozen=True)
class Collate:
    """Turns examples into a batch and, if asked, digests them before: in whichever process loads them."""

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
            f"Examples of type {type(examples[0]).__name__} cannot be stacked into a batch: {error} | Give "
            "Data(dataset, collate=...) a function that pads them, or turns what they hold into tensors."
        ) from None


class _Lists:
    """The rows of each batch as the lists a loader wants, one at a time."""

    def __init__(self, rows: Rows, size: int, before: int | None) -> None:
        self.rows, self.size, self.before = rows, size, before

    def __iter__(self) -> Iterator[list[int]]:
        return (chunk.tolist() for chunk in cut(self.rows, self.size, self.before))


class Examples:
    """A map-style dataset, collated here."""

    can_rebatch = is_seekable = is_counted = True

    def __init__(self, dataset: Any, collate: Callable[[list], Any] | None, batch_size: int, workers: int) -> None:
        self.dataset, self.collate, self.batch_size, self.workers = dataset, collate, batch_size, workers

    def __len__(self) -> int:
        return len(self.dataset)

    def read(self, rows: Rows, digests: bool = False, before: int | None = None) -> Iterator[Batch]:
        """Collate the examples of the rows, batch by batch, in worker processes if there are any."""
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
        """Return the tensors of a dataset of tensors, or the labels that a dataset says it knows."""
        if type(self.dataset) is TensorDataset and self.collate is None:
            return [self.dataset.tensors]
        labels = self.dataset.all_labels() if isinstance(self.dataset, Labelled) else None
        return None if labels is None else [{"labels": torch.from_numpy(labels)}]


def own_generator() -> torch.Generator:
    """A loader without its own generator draws its worker seed from the caller's global random state."""
    return torch.Generator(torch.get_default_device())


UNBATCHED = "The DataLoader has batch_size=None, so what its dataset gives is read as batches"
"""How every message about such a loader begins."""
NOT_SINGLE = "pass the dataset itself, or give the loader a batch size."


class Batches:
    """Batches somebody else made: a list, or a loader with its own way of grouping."""

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
        """Yield what the batches hold of the rows; a list is entered where they begin, a loader read from its start."""
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
                f"{UNBATCHED}, and {describe_batch(batch)} is none: no tensor of it has a first dimension. If this is "
                f"a single example, {NOT_SINGLE}"
            ) from error

    def _from(self, first: int) -> Iterator[tuple[int, Any]]:
        """Yield batches with their numbers: a list's from the first that is wanted on, a loader's from its start."""
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
            f"The batch from row {start} on has {now} examples, and had {stop - start} when it was counted: the "
            "loader gives other batches every time. Build it without random sampling or filtering."
        )

    def boundary(self, row: int) -> int:
        """Return the next end of a batch."""
        return int(self.ends[np.searchsorted(self.ends[:-1], row)])

    def rebatched(self, batch_size: int) -> "Batches":
        """Return the batches as they are."""
        return self

    def held(self) -> Sequence[Any] | None:
        """Return the batches, if they lie in a list."""
        return self.batches if isinstance(self.batches, list | tuple) else None


def _between(rows: Rows, start: int, stop: int) -> Rows:
    if isinstance(rows, range):
        return range(max(start, rows.start), min(stop, rows.stop))
    low, high = np.searchsorted(rows, [start, stop])
    return rows[low:high]


def _selected(values: Any, index: np.ndarray | slice, size: int) -> Any:
    return select(values, index if isinstance(index, slice) else torch.from_numpy(index), size)


class Taken:
    """Some of the rows of a source, numbered anew."""

    is_counted = True

    def __init__(self, source: Source, rows: Rows) -> None:
        self.source, self.rows = source, rows
        self.can_rebatch, self.is_seekable = source.can_rebatch, source.is_seekable

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, rows: Rows, digests: bool = False, before: int | None = None) -> Iterator[Batch]:
        """Read the rows' counterparts, and number what comes back."""
        rows = within(rows, len(self))
        if before is None:
            before = rows.start if isinstance(rows, range) else 0
        start = 0
        for batch in self.source.read(pick(self.rows, rows), digests, before):
            yield Batch(written(rows[start : start + len(batch)]), batch.values, batch.digests)
            start += len(batch)

    def boundary(self, row: int) -> int:
        """Return the next row whose predecessor is read in another batch."""
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
        """Return nothing: some of the rows are not worth it."""


class Compared:
    """A source whose examples are compared, whenever they are read, with the digests they are known to have.

    Args:
        source: The examples.
        known: Gives the digests (N,) when they are first needed, as uint64; None where there are none.
        refusal: Makes the error to raise for a row that is another one.
    """

    def __init__(
        self, source: Source, known: Callable[[], np.ndarray | None], refusal: Callable[[int], Exception]
    ) -> None:
        self.source, self.known, self.refusal = source, known, refusal
        self.can_rebatch, self.is_seekable, self.is_counted = source.can_rebatch, source.is_seekable, source.is_counted

    def __len__(self) -> int:
        return len(self.source)

    def read(self, rows: Rows, digests: bool = False, before: int | None = None) -> Iterator[Batch]:
        """Read the rows, and stop at the first that holds something else."""
        known = self.known()
        for batch in self.source.read(rows, digests or known is not None, before):
            if known is not None and batch.digests is not None:
                differs = batch.digests != known[batch.rows]
                if differs.any():
                    raise self.refusal(int(batch.rows[differs.argmax()]))
            yield batch

    def boundary(self, row: int) -> int:
        """Return what the source does."""
        return self.source.boundary(row)

    def rebatched(self, batch_size: int) -> "Compared":
        """Return the same comparison of the rebatched source."""
        return Compared(self.source.rebatched(batch_size), self.known, self.refusal)

    def held(self) -> Sequence[Any] | None:
        """Return what the source does."""
        return self.source.held()
