"""Ordered, random-access batches with stable row numbers, from whatever torch users have at hand."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
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
            collate_fn=self.collate or default_collate,
            num_workers=self.workers,
            # A loader without its own generator draws its worker seed from the caller's global random state.
            generator=torch.Generator(),
        )
        for chunk, values in zip(chunks, loader, strict=True):
            yield Batch(chunk, values)


class _Batches:
    """Batches somebody else made: a list, or a loader with its own way of grouping."""

    def __init__(self, batches: Sequence[Any] | DataLoader) -> None:
        self.batches = batches
        self.sizes = [length_of(batch) for batch in batches]

    def __len__(self) -> int:
        return sum(self.sizes)

    def read(self, rows: np.ndarray | None) -> Iterator[Batch]:
        start = 0
        for size, values in zip(self.sizes, self.batches, strict=True):
            here = np.arange(start, start + size)
            if rows is not None:
                here = rows[(rows >= start) & (rows < start + size)]
                values = select(values, torch.from_numpy(here - start), size)  # noqa: PLW2901
            start += size
            if len(here):
                yield Batch(here, values)


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
        if isinstance(dataset, IterableDataset) or not (
            hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
        ):
            raise DataError(
                f"{type(dataset).__name__} has no length or no random access, so its examples have no stable row "
                "numbers. Give a map-style dataset, or a list of batches (for instance `list(loader)`)."
            )
        if batch_size < 1:
            raise DataError(f"batch_size must be at least 1, got {batch_size}.")
        self._set(_Examples(dataset, collate, batch_size, workers), ids)

    @classmethod
    def from_batches(cls, batches: Sequence[Any] | DataLoader, ids: Sequence[Any] | None = None) -> "Data":
        """Take batches as they are; rows are numbered in the order they come."""
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

    def sample(self, size: int, generator: torch.Generator) -> np.ndarray:
        """Draw `size` different rows (all of them if there are fewer), ascending."""
        if size >= len(self):
            return np.arange(len(self))
        return torch.randperm(len(self), generator=generator)[:size].sort().values.numpy()


def as_data(data: Any) -> Data:
    """Accept what users have: `Data`, a dataset, a `DataLoader`, a list of batches, or one batch (tuple or dict)."""
    if isinstance(data, Data):
        return data
    if isinstance(data, DataLoader):
        return _from_loader(data)
    if isinstance(data, Mapping) or (isinstance(data, tuple) and data and isinstance(data[0], Tensor)):
        return Data.from_batches([data])
    if isinstance(data, list):
        if not data:
            raise DataError("The list of batches is empty: at least one example is needed.")
        if all(isinstance(item, Tensor) for item in data):
            raise DataError(
                f"A list of {len(data)} bare tensors may be one batch or several. Write `[batch]` for one batch, or "
                "`Data.from_batches(batches)` if every tensor is a batch of its own."
            )
        return Data.from_batches(data)
    if isinstance(data, Tensor) or data is None or isinstance(data, str | bytes | int | float):
        raise DataError(
            f"Expected data, got {type(data).__name__}. Give an eigentrace.Data, a map-style dataset, a DataLoader "
            "without shuffling, or a list of batches."
        )
    return Data(data)


def _from_loader(loader: DataLoader) -> Data:
    if isinstance(loader.dataset, IterableDataset):
        raise DataError(
            "The DataLoader reads an IterableDataset, whose examples have no row numbers. Give a map-style dataset, "
            "or the batches as a list: `list(loader)`."
        )
    _refuse_shuffling(loader)
    if type(loader.sampler) is SequentialSampler and loader.batch_size is not None:
        return Data(loader.dataset, loader.collate_fn, loader.batch_size, workers=loader.num_workers)
    return Data.from_batches(loader)


def _refuse_shuffling(loader: DataLoader) -> None:
    """Stop at a loader whose order changes: row numbers, and so every answer, would be meaningless."""
    sampler = loader.sampler if loader.batch_size is not None else (loader.batch_sampler or loader.sampler)
    shuffles = isinstance(sampler, _SHUFFLING) or isinstance(getattr(sampler, "sampler", None), _SHUFFLING)
    if not shuffles:
        first, second = (list(islice(iter(sampler), _SAMPLER_PROBE)) for _ in range(2))
        shuffles = first != second
    if shuffles:
        raise DataError(
            f"The DataLoader shuffles (its sampler is a {type(sampler).__name__}), so row numbers would mean nothing. "
            "Build it with shuffle=False, or pass the dataset itself."
        )
