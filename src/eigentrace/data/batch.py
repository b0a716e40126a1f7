"""Operations on batches (nested containers of tensors): length, selection, device and dtype conversion."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from eigentrace.errors import DataError


def map_tensors(function: Callable[[Tensor], Tensor], batch: Any) -> Any:
    """Apply `function` to every tensor of a nested batch.

    Mappings of any class, such as a Hugging Face `BatchEncoding`, are returned as plain dicts, which every torch
    transform supports.
    """
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        return {key: map_tensors(function, value) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(function, value) for value in batch))
    if isinstance(batch, list | tuple):
        # A list rather than a generator, as the named results of torch functions such as `max` require.
        return type(batch)([map_tensors(function, value) for value in batch])
    return batch


def tensors_of(batch: Any) -> Iterator[Tensor]:
    """Yield the tensors of a nested batch, in order."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from tensors_of(value)
    elif isinstance(batch, list | tuple):
        for value in batch:
            yield from tensors_of(value)


def length_of(batch: Any) -> int:
    """Return B, the leading dimension shared by the tensors of a batch."""
    sizes = [t.shape[0] for t in tensors_of(batch) if t.ndim > 0]
    if not sizes:
        raise DataError(
            f"A batch of type {type(batch).__name__} contains no tensor with a first dimension, so the number of "
            "its examples is unknown. Pass batches of tensors with the examples along the first dimension, in tuples, "
            "lists or dicts; arrays and other objects are not searched."
        )
    return sizes[0]


def describe_batch(batch: Any) -> str:
    """Return a text with the dtypes and shapes of a batch, in its own containers."""
    if isinstance(batch, Tensor):
        return f"{str(batch.dtype).removeprefix('torch.')} {tuple(batch.shape)}"
    if isinstance(batch, Mapping):
        return "{" + ", ".join(f"{key!r}: {describe_batch(value)}" for key, value in batch.items()) + "}"
    if isinstance(batch, list | tuple):
        return f"{type(batch).__name__}({', '.join(map(describe_batch, batch))})"
    return type(batch).__name__


def looks_single(batch: Any) -> bool:
    """Return whether a batch contains a number or tensors of different lengths, like a single example."""
    return len({t.shape[0] for t in tensors_of(batch) if t.ndim > 0}) != 1 or _holds_number(batch)


def _holds_number(item: Any) -> bool:
    if isinstance(item, Mapping | list | tuple):
        return any(map(_holds_number, item.values() if isinstance(item, Mapping) else item))
    if isinstance(item, Tensor):
        return item.ndim == 0
    return isinstance(item, int | float) and not isinstance(item, bool)


def kept_whole(batch: Any, size: int) -> list[str]:
    """Describe the parts of a batch of `size` examples that are shared by all of them, probably unintentionally.

    Numbers, text and tensors with a first dimension of 1 are assumed to be shared intentionally.
    """
    if isinstance(batch, Tensor):
        shared = batch.ndim == 0 or batch.shape[0] in (1, size)
        return [] if shared else [f"a tensor of shape {tuple(batch.shape)}"]
    if isinstance(batch, Mapping):
        return [text for value in batch.values() for text in kept_whole(value, size)]
    if isinstance(batch, list | tuple):
        return [text for value in batch for text in kept_whole(value, size)]
    if batch is None or isinstance(batch, str | bytes | bool | int | float | complex):
        return []
    return [f"an object of type {type(batch).__name__}"]


def select(batch: Any, index: Tensor | slice, size: int) -> Any:
    """Return some of the `size` examples of a batch.

    Tensors whose first dimension is not `size` (a scalar, a mask shared by all examples) are kept whole.
    """
    return map_tensors(lambda t: t[index] if is_per_example(t, size) else t, batch)


def is_per_example(tensor: Tensor, size: int) -> bool:
    """Return whether a tensor of a batch of `size` examples has one slice per example."""
    return tensor.ndim > 0 and tensor.shape[0] == size


def to_device(batch: Any, device: torch.device) -> Any:
    """Move every tensor of a batch to `device`."""
    return map_tensors(lambda t: t.to(device, non_blocking=True), batch)


def to_double(batch: Any) -> Any:
    """Cast the floating-point tensors of a batch to float64, and the complex ones to complex128."""
    return map_tensors(doubled, batch)


def doubled(tensor: Tensor) -> Tensor:
    """Convert a floating-point or complex tensor to double precision; return any other unchanged."""
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.is_floating_point() else tensor


def split(batch: Any, size: int) -> tuple[list[Tensor], Callable[[list[Tensor]], Any]]:
    """Return the per-example tensors of a batch, and a function that rebuilds the batch from others."""
    taken = [t for t in tensors_of(batch) if is_per_example(t, size)]

    def rebuild(tensors: list[Tensor]) -> Any:
        remaining = iter(tensors)
        return map_tensors(lambda t: next(remaining) if is_per_example(t, size) else t, batch)

    return taken, rebuild
