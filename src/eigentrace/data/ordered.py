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
from eigentrace.settings import counted

# Number of examples that a fingerprint is computed from.
_FINGERPRINTED = 64


class Data:
    """Examples in a fixed order, each with a row number and, if given, an id.

    Args:
        dataset: A map-style dataset: any object with `__len__` and a `__getitem__` that returns one example.
        collate: Turns a list of examples into a batch; torch's default if not given.
        batch_size: Number of examples per batch. Scores do not depend on it.
        ids: One name per example, in order: a list, a numpy or pyarrow array, or another object with a length and
            items; row numbers if not given.
        workers: Number of processes that load examples, like `num_workers` of a `DataLoader`.
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
                "Data(...) expects a dataset, got a DataLoader. Pass the loader itself wherever data is expected."
            )
        if not is_map_style(dataset):
            raise DataError(
                f"{type(dataset).__name__} has no length or no random access, so its examples have no stable row "
                "numbers. Pass a map-style dataset, a list of batches (for instance `list(loader)`), or "
                "Data.stream(dataset) if every pass over it yields the same examples in the same order."
            )
        self._source: Source = Examples(dataset, collate, _checked_count(batch_size, "batch_size"), workers)
        self.ids = _checked_ids(ids, len(self._source), dataset)

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
        """Create data from examples that can only be read in order; rows are numbered in that order.

        Every pass begins at the first example; rows that are not requested are read and dropped. A pass raises
        DataError if its first examples or its number of examples differ from those of earlier passes.

        Args:
            dataset: An `IterableDataset`, or any object whose `__iter__` starts from the first example each time.
            collate: Turns a list of examples into a batch; torch's default if not given.
            batch_size: Number of examples per batch. Scores do not depend on it.
            length: Number of examples; counted in one pass when it is needed and not given.
            ids: One name per example, in order; row numbers if not given.
            workers: 0 to read in this process, any larger number to read in one worker process. With several
                workers, the examples and their order would depend on the number of workers.
        """
        refuse_unreadable(dataset)
        if length is not None:
            length = _checked_count(length, "length")
        ids = _checked_ids(ids, length, dataset)
        length = len(ids) if length is None and ids is not None else length
        return cls._of(Stream(dataset, collate, _checked_count(batch_size, "batch_size"), workers, length), ids)

    @classmethod
    def from_batches(cls, batches: Sequence[Any] | DataLoader, ids: Ids | None = None) -> "Data":
        """Create data from ready-made batches; rows are numbered in their order."""
        if not isinstance(batches, Sequence | DataLoader):
            raise DataError(
                f"from_batches expects a list of batches or a DataLoader, got {type(batches).__name__}, which cannot "
                "be read several times. Pass `list(batches)`."
            )
        source = Batches(batches)
        return cls._of(source, _checked_ids(ids, len(source), batches))

    @classmethod
    def _of(cls, source: Source, ids: Ids | None) -> "Data":
        data = cls.__new__(cls)
        data._source, data.ids = source, ids
        return data

    def __repr__(self) -> str:
        # The examples of a stream may not be counted yet, and `repr` must not read them.
        size = counted(len(self), "example") if self._source.is_counted else "a stream of examples"
        return f"<Data: {size}{'' if self.ids is None else ', with ids'}>"

    def __len__(self) -> int:
        return len(self._source)

    def batches(self, rows: np.ndarray | Sequence[int] | slice | None = None, digests: bool = False) -> Iterator[Batch]:
        """Yield batches of all examples in order, or of the given ascending rows.

        Args:
            rows: An array, a range or a slice; a range or slice is limited to the length of the data. A range is
                divided into batches as in a pass over all rows, an array from its own start.
            digests: Whether batches have the digests of their examples. From the first batch on that contains an
                example without a digest, batches have none.
        """
        reading = self._source.read(as_rows(rows), digests)
        return _while_all_have(reading) if digests else reading

    def boundary(self, row: int) -> int:
        """Return the first row ≥ `row` at which a batch begins, or the end of the data."""
        return self._source.boundary(row)

    @property
    def is_seekable(self) -> bool:
        """Whether any row can be read without reading those before it."""
        return self._source.is_seekable

    @property
    def can_rebatch(self) -> bool:
        """Whether batches are collated by eigentrace, so that their size can be changed."""
        return self._source.can_rebatch

    @property
    def is_unbatched(self) -> bool:
        """Whether the data is a loader without a batch size, whose batches may be single examples."""
        return isinstance(self._source, Batches) and self._source.is_unbatched

    def rebatched(self, batch_size: int) -> "Data":
        """Return the same examples in batches of another size; ready-made batches are left unchanged."""
        return self._of(self._source.rebatched(batch_size), self.ids) if self.can_rebatch else self

    def take(self, rows: Sequence[int] | np.ndarray) -> "Data":
        """Return data with only the given ascending rows, renumbered from 0."""
        if not (isinstance(rows, range) and rows.step == 1):
            rows = np.asarray(rows, dtype=np.int64)
        ascending = isinstance(rows, range) or (rows.ndim == 1 and (np.diff(rows) > 0).all())
        if not ascending or (len(rows) and not 0 <= rows[0] <= rows[-1] < len(self)):
            begin = np.asarray(rows[:5]).tolist()
            raise DataError(
                f"take expects distinct rows from 0 to {len(self) - 1} in ascending order, got {begin}... "
                "Sort them and remove duplicates."
            )
        if not len(rows):
            raise DataError("take got 0 rows, expected at least 1.")
        if isinstance(self._source, Taken):
            taken = Taken(self._source.source, pick(self._source.rows, rows))
        else:
            taken = Taken(self._source, rows)
        return self._of(taken, ids_of(self.ids, rows))

    def first(self, count: int, digests: bool = False) -> Batch:
        """Return the first batch, with at most `count` examples."""
        batches = self.batches(range(count), digests)
        try:
            return next(batches)
        finally:
            batches.close()  # type: ignore[attr-defined]  # workers must end at once, not whenever they are collected

    def sample(self, size: int, generator: torch.Generator) -> np.ndarray:
        """Draw `size` distinct rows (all rows if there are fewer), in ascending order."""
        if size >= len(self):
            return np.arange(len(self))
        return draw(len(self), size, generator)

    def held(self) -> Sequence[Any] | None:
        """Return in-memory batches of all examples, with at least their labels; None if there are none."""
        return self._source.held()

    def compared(self, known: Callable[[], np.ndarray | None], refusal: Callable[[int], Exception]) -> "Data":
        """Return a copy that verifies the digest of each example when it is read.

        Args:
            known: Returns the expected digests (N,) as uint64, or None if there are none; called when data is read.
            refusal: Returns the exception to raise for a row whose digest differs.
        """
        source = self._source.source if isinstance(self._source, Compared) else self._source
        return self._of(Compared(source, known, refusal), self.ids)

    def fingerprint(self) -> str:
        """Return a SHA-256 hash of the number of examples and the content of 64 evenly spaced ones.

        It depends neither on the batch size nor on the process. For a stream, or a loader with its own batches, only
        the first 64 examples are hashed, and for a stream not the number of examples, which may take a full pass.
        """
        length = len(self) if self._source.is_counted else None
        rows: Rows = spread(len(self), _FINGERPRINTED) if self._source.is_seekable else range(_FINGERPRINTED)
        # A loader with batches of its own draws from the caller's global random state.
        with torch.random.fork_rng(devices=[]):
            found = [batch.digests for batch in self.batches(rows, digests=True)]
            if any(part is None for part in found):
                # One by one, so that the result does not depend on the other examples of a batch.
                found = [digest_rows(batch.values, len(batch)) for batch in self.rebatched(1).batches(rows)]
        return hash_digests(found, f"eigentrace data 1, {length} examples")


def _while_all_have(batches: Iterator[Batch]) -> Iterator[Batch]:
    """Remove the digests of all batches after the first without digests."""
    have = True
    for batch in batches:
        have = have and batch.digests is not None
        yield batch if have else replace(batch, digests=None)


def _checked_count(value: Any, name: str) -> int:
    if not isinstance(value, Integral) or value < 1:
        raise DataError(f"{name} must be a whole number of at least 1, got {value!r}.")
    return int(value)


def _checked_ids(ids: Ids | None, count: int | None, dataset: Any) -> Ids | None:
    if count == 0:
        raise DataError(f"The data is empty: {type(dataset).__name__} has 0 examples, at least 1 is needed.")
    if ids is not None and count is not None and len(ids) != count:
        raise DataError(f"Got {len(ids)} ids for {count} examples. Pass one id per example, or none.")
    return ids
