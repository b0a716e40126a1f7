"""A source of examples that can only be read in order, from the first one on each pass."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from eigentrace.data.digest import digests
from eigentrace.data.row_numbers import OPEN, Rows, boundary, cut
from eigentrace.data.sources import Batch, Collate, own_generator
from eigentrace.errors import DataError
from eigentrace.progress import track

# How many examples at the start of every pass are compared with those of the first pass.
_HEAD = 64


@dataclass(frozen=True)
class _Head:
    """The digests of the buffered first examples of a stream."""

    digests: np.ndarray | None


@dataclass(frozen=True)
class _End:
    """The end of a stream, with the number of its examples."""

    count: int


@dataclass
class _Known:
    """Length and first digests of a stream; shared by streams of the same examples in other batches."""

    length: int | None
    head: np.ndarray | None = None


class _Pass(IterableDataset):
    """One pass over a stream: yields its head, batches of the requested rows and, if it is reached, its end.

    It is a dataset of batches, so that a worker process can read, collate and digest the examples.
    """

    def __init__(self, dataset: Iterable[Any], collate: Collate, rows: Rows, size: int, before: int | None) -> None:
        self.dataset, self.collate, self.rows, self.size, self.before = dataset, collate, rows, size, before

    def __iter__(self) -> Iterator[_Head | Batch | _End]:
        examples = iter(self.dataset)
        head = list(islice(examples, _HEAD))
        yield _Head(digests(head))
        chunks = cut(self.rows, self.size, self.before)
        chunk, row = next(chunks, None), -1
        taken: list[Any] = []
        if chunk is None:
            return
        for row, example in enumerate(chain(head, examples)):
            if row != chunk[len(taken)]:
                continue
            taken.append(example)
            if len(taken) == len(chunk):
                yield self._batch(chunk, taken)
                chunk, taken = next(chunks, None), []
                if chunk is None:
                    return
        if taken and isinstance(self.rows, range):
            yield self._batch(chunk[: len(taken)], taken)
        yield _End(row + 1)

    def _batch(self, chunk: np.ndarray, examples: list) -> Batch:
        return Batch(chunk, *self.collate(examples))


def _same(item: Any) -> Any:
    return item


def _drop(examples: list) -> None:
    return None


class Stream:
    """An iterable whose examples are read in order and collated by eigentrace.

    In a `DataLoader`, every worker iterates over the whole stream, so that examples are repeated, or their order
    depends on the number of workers. Therefore at most one process reads.
    """

    can_rebatch, is_seekable, is_counted = True, False, False

    def __init__(
        self, dataset: Iterable[Any], collate: Callable[[list], Any] | None, size: int, workers: int, length: int | None
    ) -> None:
        self.dataset, self.collate, self.batch_size, self.workers = dataset, collate, size, min(workers, 1)
        self.known = _Known(length)

    def __len__(self) -> int:
        if self.known.length is None:
            counting = _Pass(self.dataset, Collate(_drop), range(OPEN), self.batch_size, None)
            # Counting must not change the caller's global random state.
            with torch.random.fork_rng(devices=[]):
                for _ in track(self._checked(counting, counting.rows), "Counting examples", size=len):
                    pass
        return self.known.length or 0

    def read(self, rows: Rows, digests: bool = False, before: int | None = None) -> Iterator[Batch]:
        """Yield batches of the rows, reading from the first example."""
        length = self.known.length
        if isinstance(rows, range) and length is not None and rows.stop >= length:
            rows = range(rows.start, OPEN)  # read on, to check that the stream ends there
        reading = _Pass(self.dataset, Collate(self.collate, digests), rows, self.batch_size, before)
        loader = DataLoader(
            reading, batch_size=None, collate_fn=_same, num_workers=self.workers, generator=own_generator()
        )
        return self._checked(loader, rows)

    def _checked(self, items: Iterable[_Head | Batch | _End], rows: Rows) -> Iterator[Batch]:
        """Yield the batches of a pass; raise DataError if the pass differs from earlier ones."""
        for item in items:
            if isinstance(item, _Head):
                self._compare(item.digests)
            elif isinstance(item, _End):
                self._finish(item.count, rows)
            else:
                if self.known.length is not None and item.rows[-1] >= self.known.length:
                    raise self._other_length(f"more than {self.known.length}")
                yield item

    def _compare(self, head: np.ndarray | None) -> None:
        if self.known.head is None:
            self.known.head = head
        elif head is None or not np.array_equal(head, self.known.head):
            raise DataError(
                f"The first examples of the stream ({type(self.dataset).__name__}) differ from those of its first "
                "pass, so its rows have no stable numbers. It must yield the same examples in the same order on every "
                "pass: no shuffling, no random augmentation."
            )

    def _finish(self, count: int, rows: Rows) -> None:
        if count == 0:
            raise DataError(
                f"The data is empty: {type(self.dataset).__name__} yielded 0 examples, at least 1 is needed."
            )
        if self.known.length not in (None, count):
            raise self._other_length(str(count))
        self.known.length = count
        if not isinstance(rows, range) and len(rows) and rows[-1] >= count:
            raise DataError(f"Row {rows[-1]} was requested, but the stream has only {count} examples.")

    def _other_length(self, found: str) -> DataError:
        return DataError(
            f"The stream yielded {found} examples, expected {self.known.length} (counted before, or given by `length` "
            "or `ids`). It must yield the same examples on every pass. Correct `length`, or leave it out."
        )

    def boundary(self, row: int) -> int:
        """Return the next multiple of the batch size, or the end if it is known."""
        return boundary(row, self.batch_size, OPEN if self.known.length is None else self.known.length)

    def rebatched(self, batch_size: int) -> "Stream":
        """Return the same stream in batches of another size; both share the known length and first digests."""
        other = Stream(self.dataset, self.collate, batch_size, self.workers, None)
        other.known = self.known
        return other

    def held(self) -> None:
        """Return None: reading the labels takes a pass over the stream."""


def refuse_unreadable(dataset: Any) -> None:
    """Raise DataError unless `dataset` is an iterable of examples that can be read several times."""
    if not hasattr(dataset, "__iter__") or isinstance(dataset, str | bytes | dict | torch.Tensor | torch.nn.Module):
        raise DataError(
            f"Data.stream expects an iterable of examples, got {type(dataset).__name__}. Pass an IterableDataset, or "
            "an object whose __iter__ starts from the first example each time."
        )
    if isinstance(dataset, DataLoader):
        raise DataError(
            "Data.stream expects a dataset, got a DataLoader. Pass the loader itself wherever data is expected."
        )
    if isinstance(dataset, Iterator):
        raise DataError(
            f"A {type(dataset).__name__} yields its examples only once, but they are read several times: to count "
            "them, to fit, to score. Pass an object whose __iter__ starts from the first example each time, such as an "
            "IterableDataset."
        )
