"""Examples in a fixed order, with stable row numbers."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from eigentrace.data.digest import digest_rows
from eigentrace.data.row_numbers import Ids, Rows, as_rows, draw, ids_of, pick, spread
from eigentrace.data.sources import Batch, Batches, Compared, Examples, Source, Taken, is_map_style
from eigentrace.data.stream import Stream, refuse_unreadable
from eigentrace.errors import DataError
from eigentrace.numeric.hashing import hash_digests

# How many rows a fingerprint is taken of.
_FINGERPRINTED = 64


class Data:
    """Examples in a fixed order, each with a row number and, if given, an id.

    Args:
        dataset: Anything with `__len__` and `__getitem__` that gives single examples.
        collate: Turns a list of examples into a batch; torch's default if not given.
        batch_size: How many examples the model sees at once. Scores do not depend on it.
        ids: One name per example, in order, as a list, a numpy or pyarrow array, or anything else with a length and
            items; row numbers if not given.
        workers: Processes that load examples, as in a `DataLoader`.
    """

    ids: Ids | None

    def __init__(
        self,
        dataset: Any,
        collate: Callable[[list], Any] | None = None,
        batch_size: int = 256,
        ids: Ids | None = None,
        workers: int = 0,
    ) -> None:
        if isinstance(dataset, DataLoader):
            raise DataError(
                "Data(...) takes a dataset and got a DataLoader: pass the loader itself where data is asked for."
            )
        if not is_map_style(dataset):
            raise DataError(
                f"{type(dataset).__name__} has no length or no random access, so its examples have no stable row "
                "numbers. Give a map-style dataset, a list of batches (for instance `list(loader)`), or "
                "Data.stream(dataset) if every pass over it gives the same examples in the same order."
            )
        self._source: Source = Examples(dataset, collate, _checked_count(batch_size, "batch_size"), workers)
        self.ids = _checked_ids(ids, len(self._source))

    @classmethod
    def stream(
        cls,
        dataset: Iterable[Any],
        collate: Callable[[list], Any] | None = None,
        batch_size: int = 256,
        length: int | None = None,
        ids: Ids | None = None,
        workers: int = 0,
    ) -> "Data":
        """Take examples that can only be read in order; rows are numbered in the order they come.

        Every pass begins at the first example, and rows that are not wanted are read and dropped. A pass that begins
        with other examples, or gives another number of them, stops with an error.

        Args:
            dataset: An `IterableDataset`, or any object whose `__iter__` begins anew each time.
            collate: Turns a list of examples into a batch; torch's default if not given.
            batch_size: How many examples the model sees at once. Scores do not depend on it.
            length: How many examples there are; counted by one pass when it is needed and not given.
            ids: One name per example, in order; row numbers if not given.
            workers: 0 to read in this process, anything above to read in one process of its own. Never more than
                one: what several would give, and in which order, depends on how many they are.
        """
        refuse_unreadable(dataset)
        if length is not None:
            length = _checked_count(length, "length")
        ids = _checked_ids(ids, length)
        length = len(ids) if length is None and ids is not None else length
        return cls._of(Stream(dataset, collate, _checked_count(batch_size, "batch_size"), workers, length), ids)

    @classmethod
    def from_batches(cls, batches: Sequence[Any] | DataLoader, ids: Ids | None = None) -> "Data":
        """Take batches as they are; rows are numbered in the order they come."""
        if not isinstance(batches, Sequence | DataLoader):
            raise DataError(
                f"from_batches takes a list of batches or a DataLoader, got {type(batches).__name__}, which cannot be "
                "read again and again. Give `list(batches)`."
            )
        source = Batches(batches)
        return cls._of(source, _checked_ids(ids, len(source)))

    @classmethod
    def _of(cls, source: Source, ids: Ids | None) -> "Data":
        data = cls.__new__(cls)
        data._source, data.ids = source, ids
        return data

    def __len__(self) -> int:
        return len(self._source)

    def batches(self, rows: np.ndarray | Sequence[int] | slice | None = None, digests: bool = False) -> Iterator[Batch]:
        """Yield all examples in order, or those of the given ascending rows.

        Args:
            rows: An array, or a range or slice, which ends where the data does and is never written out. A range is
                cut into batches as a pass over all rows is; an array is filled into batches from its beginning on.
            digests: Give each batch the digests of its examples. Where an example holds what has none, this batch
                and those after it have none.
        """
        reading = self._source.read(as_rows(rows), digests)
        return _while_all_have(reading) if digests else reading

    def boundary(self, row: int) -> int:
        """Return the first row at or after this one with which a batch begins, or the end of the data."""
        return self._source.boundary(row)

    @property
    def is_seekable(self) -> bool:
        """Tell whether any row can be read without reading those before it."""
        return self._source.is_seekable

    @property
    def can_rebatch(self) -> bool:
        """Tell whether batches are collated here, so that their size is ours to choose."""
        return self._source.can_rebatch

    @property
    def is_unbatched(self) -> bool:
        """Tell whether a loader without a batch size gives what is read as batches, single examples perhaps."""
        return isinstance(self._source, Batches) and self._source.is_unbatched

    def rebatched(self, batch_size: int) -> "Data":
        """Return the same examples in batches of another size; batches that somebody else made stay as they are."""
        return self._of(self._source.rebatched(batch_size), self.ids) if self.can_rebatch else self

    def take(self, rows: Sequence[int] | np.ndarray) -> "Data":
        """Return the examples of the given ascending rows, numbered from 0."""
        if not (isinstance(rows, range) and rows.step == 1):
            rows = np.asarray(rows, dtype=np.int64)
        ascending = isinstance(rows, range) or (rows.ndim == 1 and (np.diff(rows) > 0).all())
        if not ascending or (len(rows) and not 0 <= rows[0] <= rows[-1] < len(self)):
            begin = np.asarray(rows[:5]).tolist()
            raise DataError(
                f"take needs different rows of 0 to {len(self) - 1} in ascending order, got {begin}... "
                "Sort them, and leave out what comes twice."
            )
        if not len(rows):
            raise DataError("The data is empty: at least one example is needed.")
        if isinstance(self._source, Taken):
            taken = Taken(self._source.source, pick(self._source.rows, rows))
        else:
            taken = Taken(self._source, rows)
        return self._of(taken, ids_of(self.ids, rows))

    def first(self, count: int, digests: bool = False) -> Batch:
        """Read the first examples, at most `count` of them and no more than come in one batch."""
        batches = self.batches(range(count), digests)
        try:
            return next(batches)
        finally:
            batches.close()  # type: ignore[attr-defined]  # workers must end at once, not whenever they are collected

    def sample(self, size: int, generator: torch.Generator) -> np.ndarray:
        """Draw `size` different rows (all of them if there are fewer), ascending."""
        if size >= len(self):
            return np.arange(len(self))
        return draw(len(self), size, generator)

    def held(self) -> Sequence[Any] | None:
        """Return batches of all examples, in order, that hold their labels at least; None where that takes reading."""
        return self._source.held()

    def compared(self, known: Callable[[], np.ndarray | None], refusal: Callable[[int], Exception]) -> "Data":
        """Return the same examples, each compared when it is read with the digest it should have.

        Args:
            known: Gives the digests (N,), uint64, when they are first needed; None where there are none.
            refusal: Makes the error for a row whose content is another.
        """
        source = self._source.source if isinstance(self._source, Compared) else self._source
        return self._of(Compared(source, known, refusal), self.ids)

    def fingerprint(self) -> str:
        """Return a SHA-256 over the number of examples and the content of 64 of them, from the first to the last.

        It depends neither on the batch size nor on the process. Of a stream, or a loader with batches of its own,
        only the first 64 examples count, and of a stream not their number: more would take a pass over all.
        """
        length = len(self) if self._source.is_counted else None
        rows: Rows = spread(len(self), _FINGERPRINTED) if self._source.is_seekable else range(_FINGERPRINTED)
        # A loader with batches of its own draws from the caller's global random state.
        with torch.random.fork_rng(devices=[]):
            found = [batch.digests for batch in self.batches(rows, digests=True)]
            if any(part is None for part in found):
                # One by one, so that what was collated with them has no say.
                found = [digest_rows(batch.values, len(batch)) for batch in self.rebatched(1).batches(rows)]
        return hash_digests(found, f"eigentrace data 1, {length} examples")


def _while_all_have(batches: Iterator[Batch]) -> Iterator[Batch]:
    """Take the digests off all batches after the first that has none."""
    have = True
    for batch in batches:
        have = have and batch.digests is not None
        yield batch if have else replace(batch, digests=None)


def _checked_count(value: Any, name: str) -> int:
    if not isinstance(value, Integral) or value < 1:
        raise DataError(f"{name} must be a whole number of at least 1, got {value!r}.")
    return int(value)


def _checked_ids(ids: Ids | None, count: int | None) -> Ids | None:
    if count == 0:
        raise DataError("The data is empty: at least one example is needed.")
    if ids is not None and count is not None and len(ids) != count:
        raise DataError(f"Got {len(ids)} ids for {count} examples: give one id per example, or none.")
    return ids
