"""Data from whatever torch users have at hand."""

from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
)

from eigentrace.data.ordered import Data
from eigentrace.data.sources import is_map_style
from eigentrace.errors import DataError

_SHUFFLING = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
# How many indices of an unknown sampler are drawn twice to see whether its order is stable.
_SAMPLER_PROBE = 10_000


def as_data(data: Any) -> Data:
    """Accept what users have: `Data`, a dataset, a `DataLoader`, a list of batches, or one batch (tuple or dict).

    A `DataLoader` that reads in order stands for its whole dataset, whether or not it drops the last batch. An
    `IterableDataset`, or a loader of one, is read as `Data.stream` reads it.
    """
    if isinstance(data, Data):
        return data
    if isinstance(data, DataLoader):
        return _from_loader(data)
    if isinstance(data, IterableDataset):
        return Data.stream(data)
    if isinstance(data, Mapping | tuple | list):
        return Data.from_batches(_several_batches(data) if isinstance(data, list) else [_one_batch(data)])
    if data is None or isinstance(data, Tensor | nn.Module | str | bytes | int | float):
        raise DataError(
            f"Expected data, got {type(data).__name__}. Give an eigentrace.Data, a map-style dataset, a DataLoader "
            "without shuffling, or a list of batches."
        )
    return Data(data)


def _one_batch(data: tuple | Mapping) -> tuple | Mapping:
    if isinstance(data, tuple) and not any(isinstance(item, Tensor) for item in data):
        kinds = ", ".join(type(item).__name__ for item in data[:3])
        raise DataError(
            f"A tuple is read as one batch such as (inputs, labels), and this one holds no tensor: ({kinds}). Give "
            "several batches as a list, arrays as tensors, and single examples as eigentrace.Data(examples)."
        )
    parts = data.values() if isinstance(data, Mapping) else data
    if any(_is_number(part) and not isinstance(part, bool) for part in parts):
        raise DataError(
            f"A {type(data).__name__} is read as one batch, and this one holds a single number, as one example does. "
            "Give one example as eigentrace.Data([example]), and a batch with a number that belongs to all of its "
            "examples as eigentrace.Data.from_batches([batch])."
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
    if isinstance(loader.dataset, IterableDataset):
        return _from_stream_loader(loader)
    if not is_map_style(loader.dataset):
        raise DataError(
            f"The DataLoader reads a dataset of type {type(loader.dataset).__name__}, whose examples have no row "
            "numbers. Give a map-style dataset, or the batches as a list: `list(loader)`."
        )
    _refuse_shuffling(loader)
    in_order = type(loader.sampler) is SequentialSampler and loader.batch_size is not None
    if in_order and loader.worker_init_fn is None:
        return Data(loader.dataset, _collate_of(loader), loader.batch_size or 1, workers=loader.num_workers)
    return Data.from_batches(loader)


def _from_stream_loader(loader: DataLoader) -> Data:
    """Read the loader's stream in one process: several would give its examples in another order, or several times."""
    if loader.batch_size is not None:
        stream: Any = loader.dataset
        return Data.stream(stream, _collate_of(loader), loader.batch_size, workers=loader.num_workers)
    alone = DataLoader(
        loader.dataset, batch_size=None, collate_fn=loader.collate_fn, num_workers=min(loader.num_workers, 1)
    )
    return Data.from_batches(alone)


def _collate_of(loader: DataLoader) -> Callable[[list], Any] | None:
    return None if loader.collate_fn is default_collate else loader.collate_fn


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
