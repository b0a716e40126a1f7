"""Ordered, random-access batches with stable row numbers, from whatever torch users have at hand."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
from numbers import Integral
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from eigentrace.batch import length_of, select
from eigentrace.errors import DataError
from eigentrace.progress import track

_SHUFFLING = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
# How many indices of an unknown sampler are drawn twice to see whether its order is stable.
_SAMPLER_PROBE = 10_000


@dataclass(frozen=True)
class Batch:
    """Some examples, ready for the loss, and the rows of the data they are."""

    rows: np.ndarray  # (B,)
    values: Any

    def __len__(self) -> int:
        return len(self.rows)


class _Source(Protocol):
    """Where examples come from: a known number of them, readable by row."""

    def __len__(self) -> int: ...

    def read(self, rows: np.ndarray | None) -> Iterator[Batch]: ...


class _Examples:
    """A map-style dataset, collated here."""

    def __init__(self, dataset: Any, collate: Callable[[list], Any] | None, batch_size: int, workers: int) -> None:
        self.dataset, self.collate, self.batch_size, self.workers = dataset, collate, batch_size, workers

    def __len__(self) -> int:
        return len(self.dataset)

    def read(self, rows: np.ndarray | None) -> Iterator[Batch]:
        rows = np.arange(len(self)) if rows is None else rows
        chunks = [rows[i : i + self.batch_size] for i in range(0, len(rows), self.batch_size)]
        if type(self.dataset) is TensorDataset and self.collate is None:
            for chunk in chunks:
                index = torch.from_numpy(chunk)
                yield Batch(chunk, tuple(t[index] for t in self.dataset.tensors))
            return
        loader = DataLoader(
            self.dataset,
            batch_sampler=[chunk.tolist() for chunk in chunks],
            collate_fn=self.collate or _stack,
            num_workers=self.workers,
            # A loader without its own generator draws its worker seed from the caller's global random state.
            generator=torch.Generator(torch.get_default_device()),
        )
        for chunk, values in zip(chunks, loader, strict=True):
            yield Batch(chunk, values)


def _stack(examples: list) -> Any:
    try:
        return default_collate(examples)
    except (RuntimeError, TypeError) as error:
        raise DataError(
            f"Examples of type {type(examples[0]).__name__} cannot be stacked into a batch: {error} | Give "
            "Data(dataset, collate=...) a function that pads them, or turns what they hold into tensors."
        ) from None


class _Batches:
    """Batches somebody else made: a list, or a loader with its own way of grouping."""

    def __init__(self, batches: Sequence[Any] | DataLoader) -> None:
        self.batches = batches
        # Every pass over a loader draws a seed for its workers from the caller's global random state.
        with torch.random.fork_rng(devices=[]):
            self.sizes = [length_of(batch) for batch in track(batches, "Counting examples")]

    def __len__(self) -> int:
        return sum(self.sizes)

    def read(self, rows: np.ndarray | None) -> Iterator[Batch]:
        start = 0
        for size, values in zip_longest(self.sizes, self.batches):
            now = 0 if values is None else length_of(values)
            if now != size:
                raise DataError(
                    f"The batch from row {start} on has {now} examples, and had {size or 0} when it was counted: the "
                    "loader gives other batches every time. Build it without random sampling or filtering."
                )
            here = np.arange(start, start + now)
            if rows is not None:
                here = rows[(rows >= start) & (rows < start + size)]
                values = select(values, torch.from_numpy(here - start), size)  # noqa: PLW2901
            start += size
            if len(here):
                yield Batch(here, values)
            if rows is not None and (not len(rows) or start > rows[-1]):
                return


class _Taken:
    """Some of the rows of a source, numbered anew."""

    def __init__(self, source: _Source, rows: np.ndarray) -> None:
        self.source, self.rows = source, rows

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, rows: np.ndarray | None) -> Iterator[Batch]:
        for batch in self.source.read(self.rows if rows is None else self.rows[rows]):
            yield Batch(np.searchsorted(self.rows, batch.rows), batch.values)


class Data:
    """Examples in a fixed order, each with a row number and, if given, an id.

    Args:
        dataset: Anything with `__len__` and `__getitem__` that gives single examples.
        collate: Turns a list of examples into a batch; torch's default if not given.
        batch_size: How many examples the model sees at once. Scores do not depend on it.
        ids: One name per example, in order; row numbers if not given.
        workers: Processes that load examples, as in a `DataLoader`.
    """

    def __init__(
        self,
        dataset: Any,
        collate: Callable[[list], Any] | None = None,
        batch_size: int = 256,
        ids: Sequence[Any] | None = None,
        workers: int = 0,
    ) -> None:
        if isinstance(dataset, DataLoader):
            raise DataError(
                "Data(...) takes a dataset and got a DataLoader: pass the loader itself where data is asked for."
            )
        if not _is_map_style(dataset):
            raise DataError(
                f"{type(dataset).__name__} has no length or no random access, so its examples have no stable row "
                "numbers. Give a map-style dataset, or a list of batches (for instance `list(loader)`)."
            )
        if not isinstance(batch_size, Integral) or batch_size < 1:
            raise DataError(f"batch_size must be a whole number of at least 1, got {batch_size!r}.")
        self._set(_Examples(dataset, collate, int(batch_size), workers), ids)

    @classmethod
    def from_batches(cls, batches: Sequence[Any] | DataLoader, ids: Sequence[Any] | None = None) -> "Data":
        """Take batches as they are; rows are numbered in the order they come."""
        if not isinstance(batches, Sequence | DataLoader):
            raise DataError(
                f"from_batches takes a list of batches or a DataLoader, got {type(batches).__name__}, which cannot be "
                "read again and again. Give `list(batches)`."
            )
        data = cls.__new__(cls)
        data._set(_Batches(batches), ids)
        return data

    def _set(self, source: _Source, ids: Sequence[Any] | None) -> None:
        if len(source) == 0:
            raise DataError("The data is empty: at least one example is needed.")
        if ids is not None and len(ids) != len(source):
            raise DataError(f"Got {len(ids)} ids for {len(source)} examples: give one id per example, or none.")
        self._source, self.ids = source, ids

    def __len__(self) -> int:
        return len(self._source)

    def batches(self, rows: np.ndarray | None = None) -> Iterator[Batch]:
        """Yield all examples in order, or those of the given ascending rows."""
        return self._source.read(rows)

    @property
    def can_rebatch(self) -> bool:
        """Tell whether batches are collated here, so that their size is ours to choose."""
        source = self._source.source if isinstance(self._source, _Taken) else self._source
        return isinstance(source, _Examples)

    def rebatched(self, batch_size: int) -> "Data":
        """Return the same examples in batches of another size; batches that somebody else made stay as they are."""
        if isinstance(self._source, _Taken) and self.can_rebatch:
            whole = Data.__new__(Data)
            whole._set(self._source.source, None)
            other = whole.rebatched(batch_size).take(self._source.rows)
            other.ids = self.ids
            return other
        if not isinstance(self._source, _Examples):
            return self
        other = Data.__new__(Data)
        other._set(_Examples(self._source.dataset, self._source.collate, batch_size, self._source.workers), self.ids)
        return other

    def take(self, rows: Sequence[int] | np.ndarray) -> "Data":
        """Return the examples of the given ascending rows, numbered from 0."""
        rows = np.asarray(rows, dtype=np.int64)
        if rows.ndim != 1 or (np.diff(rows) <= 0).any() or (len(rows) and not 0 <= rows[0] <= rows[-1] < len(self)):
            raise DataError(
                f"take needs different rows of 0 to {len(self) - 1} in ascending order, got {rows.tolist()[:5]}... "
                "Sort them, and leave out what comes twice."
            )
        other = Data.__new__(Data)
        other._set(_Taken(self._source, rows), None if self.ids is None else [self.ids[row] for row in rows])
        return other

    def first(self, count: int) -> Batch:
        """Read the first examples, at most `count` of them and no more than come in one batch."""
        batches = self.batches(np.arange(min(len(self), count)))
        try:
            return next(batches)
        finally:
            batches.close()  # type: ignore[attr-defined]  # workers must end at once, not whenever they are collected

    def sample(self, size: int, generator: torch.Generator) -> np.ndarray:
        """Draw `size` different rows (all of them if there are fewer), ascending."""
        if size >= len(self):
            return np.arange(len(self))
        return torch.randperm(len(self), generator=generator, device="cpu")[:size].sort().values.numpy()


def _is_map_style(dataset: Any) -> bool:
    return (
        hasattr(dataset, "__len__")
        and hasattr(dataset, "__getitem__")
        and not isinstance(dataset, IterableDataset | str | bytes | Mapping | nn.Module)
    )


def as_data(data: Any) -> Data:
    """Accept what users have: `Data`, a dataset, a `DataLoader`, a list of batches, or one batch (tuple or dict).

    A `DataLoader` that reads in order stands for its whole dataset, whether or not it drops the last batch.
    """
    if isinstance(data, Data):
        return data
    if isinstance(data, DataLoader):
        return _from_loader(data)
    if isinstance(data, Mapping):
        return Data.from_batches([data])
    if isinstance(data, tuple):
        return Data.from_batches([_one_batch(data)])
    if isinstance(data, list):
        return Data.from_batches(_several_batches(data))
    if data is None or isinstance(data, Tensor | nn.Module | str | bytes | int | float):
        raise DataError(
            f"Expected data, got {type(data).__name__}. Give an eigentrace.Data, a map-style dataset, a DataLoader "
            "without shuffling, or a list of batches."
        )
    return Data(data)


def _one_batch(data: tuple) -> tuple:
    if not any(isinstance(item, Tensor) for item in data):
        kinds = ", ".join(type(item).__name__ for item in data[:3])
        raise DataError(
            f"A tuple is read as one batch such as (inputs, labels), and this one holds no tensor: ({kinds}). Give "
            "several batches as a list, arrays as tensors, and single examples as eigentrace.Data(examples)."
        )
    return data


def _several_batches(data: list) -> list:
    if not data:
        raise DataError("The list of batches is empty: at least one example is needed.")
    if all(isinstance(item, Tensor) for item in data):
        raise DataError(
            f"A list of {len(data)} bare tensors may be one batch or several. Write `[batch]` for one batch, or "
            "`Data.from_batches(batches)` if every tensor is a batch of its own."
        )
    parts = data[0].values() if isinstance(data[0], Mapping) else data[0]
    if isinstance(data[0], Mapping | list | tuple) and any(_is_number(part) for part in parts):
        raise DataError(
            f"A list is read as batches, and the {type(data[0]).__name__} it begins with holds a single number, as "
            "one example does. Give a list of examples as eigentrace.Data(examples)."
        )
    return data


def _is_number(item: Any) -> bool:
    return isinstance(item, int | float) or (isinstance(item, Tensor) and item.ndim == 0)


def _from_loader(loader: DataLoader) -> Data:
    if not _is_map_style(loader.dataset):
        raise DataError(
            f"The DataLoader reads a dataset of type {type(loader.dataset).__name__}, whose examples have no row "
            "numbers. Give a map-style dataset, or the batches as a list: `list(loader)`."
        )
    _refuse_shuffling(loader)
    in_order = type(loader.sampler) is SequentialSampler and loader.batch_size is not None
    if in_order and loader.worker_init_fn is None:
        collate = None if loader.collate_fn is default_collate else loader.collate_fn
        return Data(loader.dataset, collate, loader.batch_size or 1, workers=loader.num_workers)
    return Data.from_batches(loader)


def _refuse_shuffling(loader: DataLoader) -> None:
    """Stop at a loader whose order changes: row numbers, and so every answer, would be meaningless."""
    sampler = loader.sampler if loader.batch_size is not None else (loader.batch_sampler or loader.sampler)
    shuffles = isinstance(sampler, _SHUFFLING) or isinstance(getattr(sampler, "sampler", None), _SHUFFLING)
    if not shuffles:
        with torch.random.fork_rng(devices=[]):
            first, second = (list(islice(iter(sampler), _SAMPLER_PROBE)) for _ in range(2))
        shuffles = first != second
    if shuffles:
        raise DataError(
            f"The DataLoader shuffles (its sampler is a {type(sampler).__name__}), so row numbers would mean nothing. "
            "Build it with shuffle=False, or pass the dataset itself."
        )
