"""Conversion of datasets, loaders, streams and batches to `Data`."""

from collections.abc import Callable, Mapping
from itertools import chain, islice
from numbers import Integral
from typing import Any

import numpy as np
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
# How many indices of an unknown sampler are drawn twice to check that its order is stable.
_SAMPLER_PROBE = 10_000


def as_data(data: Any) -> Data:
    """Convert a dataset, a `DataLoader`, a list of batches or one batch (tuple or dict) to `Data`.

    A `DataLoader` that reads in order represents its whole dataset, with or without `drop_last`. So does one that reads
    the whole dataset in another fixed order: rows are those of the dataset, not positions in the loader. An
    `IterableDataset`, or a loader of one, is read like `Data.stream`. `Data` is returned unchanged.
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
            f"Expected data, got {type(data).__name__}. Pass an eigentrace.Data, a map-style dataset, a DataLoader "
            "without shuffling, or a list of batches."
        )
    return Data(data)


def _one_batch(data: tuple | Mapping) -> tuple | Mapping:
    if isinstance(data, tuple) and not any(isinstance(item, Tensor) for item in data):
        kinds = ", ".join(type(item).__name__ for item in data[:3])
        raise DataError(
            f"A tuple is read as one batch such as (inputs, labels), but this one contains no tensor: ({kinds}). Pass "
            "several batches as a list, arrays as tensors, and single examples as eigentrace.Data(examples)."
        )
    parts = data.values() if isinstance(data, Mapping) else data
    if any(_is_number(part) and not isinstance(part, bool) for part in parts):
        raise DataError(
            f"A {type(data).__name__} is read as one batch, but this one contains a single number, like one example. "
            "Pass one example as eigentrace.Data([example]). Pass a batch with a number shared by all its examples as "
            "eigentrace.Data.from_batches([batch])."
        )
    return data


def _several_batches(data: list) -> list:
    if not data:
        raise DataError("The list of batches is empty: got [], at least one batch is needed.")
    if all(isinstance(item, Tensor) for item in data):
        raise DataError(
            f"A list of {len(data)} tensors may be one batch or several. Pass `[batch]` for one batch, or "
            "`Data.from_batches(batches)` if every tensor is a batch."
        )
    parts = data[0].values() if isinstance(data[0], Mapping) else data[0]
    if isinstance(data[0], Mapping | list | tuple) and any(_is_number(part) for part in parts):
        raise DataError(
            f"A list is read as batches, but its first item, a {type(data[0]).__name__}, contains a single number, "
            "like one example. Pass a list of examples as eigentrace.Data(examples)."
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
            "numbers. Pass a map-style dataset, or the batches as a list: `list(loader)`."
        )
    _refuse_shuffling(loader)
    in_order = type(loader.sampler) is SequentialSampler and loader.batch_size is not None
    is_plain = loader.worker_init_fn is None
    if in_order and is_plain:
        return Data(loader.dataset, _collate_of(loader), loader.batch_size or 1, workers=loader.num_workers)
    order = None if in_order else _order(loader)
    if in_order or (order is not None and np.array_equal(order, np.arange(len(order)))):
        return Data.from_batches(loader)
    if order is not None and is_plain and loader.batch_sampler is not None and _is_whole(order, loader.dataset):
        size = loader.batch_size or max(len(batch) for batch in loader.batch_sampler)
        return Data(loader.dataset, _collate_of(loader), size, workers=loader.num_workers)
    raise _other_rows(loader, order)


def _order(loader: DataLoader) -> np.ndarray | None:
    """Return the dataset indices in the order of the loader's sampler; None if it yields other keys."""
    entries: Any = loader.sampler if loader.batch_size is not None else (loader.batch_sampler or loader.sampler)
    named = chain.from_iterable(map(_names, entries))
    count = len(loader.dataset)  # type: ignore[arg-type]
    with torch.random.fork_rng(devices=[]):
        found = list(islice(named, count + 1))  # one more, to detect repetition or an endless sampler
    if not all(isinstance(name, Integral) or _is_number(name) for name in found):
        return None
    return np.fromiter(map(int, found), dtype=np.int64, count=len(found))


def _names(entry: Any) -> Any:
    if isinstance(entry, np.ndarray | Tensor) and entry.ndim:
        return entry.tolist()
    return entry if isinstance(entry, list | tuple) else (entry,)


def _is_whole(order: np.ndarray, dataset: Any) -> bool:
    return len(order) == len(dataset) and np.array_equal(np.sort(order), np.arange(len(order)))


def _other_rows(loader: DataLoader, order: np.ndarray | None) -> DataError:
    sampler = loader.sampler if loader.batch_size is not None else (loader.batch_sampler or loader.sampler)
    what = f"The DataLoader uses a {type(sampler).__name__}, "
    if order is None:
        what += "which does not yield indices of the dataset"
    else:
        at = int((order != np.arange(len(order))).argmax())
        total = len(loader.dataset)  # type: ignore[arg-type]
        what += f"so its example {at} is example {order[at]} of the {total} in its dataset"
    return DataError(
        f"{what}. Rows of the loader would not be rows of the dataset. Pass the dataset itself, "
        "torch.utils.data.Subset(dataset, indices) for a part of it, or list(loader) to use the order of the loader."
    )


def _from_stream_loader(loader: DataLoader) -> Data:
    """Read the loader's stream in one process; several processes would reorder or repeat its examples."""
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
    """Raise DataError if the loader's order changes between passes, because rows would not be stable."""
    sampler = loader.sampler if loader.batch_size is not None else (loader.batch_sampler or loader.sampler)
    shuffles = isinstance(sampler, _SHUFFLING) or isinstance(getattr(sampler, "sampler", None), _SHUFFLING)
    if not shuffles:
        with torch.random.fork_rng(devices=[]):
            first, second = (list(islice(iter(sampler), _SAMPLER_PROBE)) for _ in range(2))
        shuffles = first != second
    if shuffles:
        raise DataError(
            f"The DataLoader shuffles (its sampler is a {type(sampler).__name__}), so its rows have no stable numbers. "
            "Build it with shuffle=False, or pass the dataset itself."
        )
