"""Mark how tensors depend on the batch: not at all, with the examples at their positions, or moved by its values."""

from collections.abc import Callable, Hashable, Iterator, Mapping
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor


class Dependence(IntEnum):
    """How a tensor depends on the batch."""

    NONE = 0
    """Not at all."""
    IN_PLACE = 1
    """It does, with the examples at their positions."""
    MOVED = 2
    """It does, and examples may have been moved or selected by values of the batch."""


# Functions that move examples, or parts of them, along one dimension: the position of the `dim` argument, its default.
_BY_DIM: dict[str, tuple[int, int | None]] = {
    "gather": (1, -1),
    "take_along_dim": (2, None),
    "sort": (1, -1),
    "topk": (2, -1),
}
# Functions that move examples if one of their other arguments depends on the batch, along whatever dimension.
_BY_POSITION = frozenset({"index_select", "select", "roll", "tensor_split"})
# Functions that may move examples along any dimension.
_EVERYWHERE = frozenset(
    {
        "masked_select",
        "take",
        "msort",
        "repeat_interleave",
        "_pack_padded_sequence",
        "split_with_sizes",
    }
)


# Functions that write into selected positions. Selected examples return to their positions; others are moved.
_WRITE = frozenset(
    {
        *("scatter", "scatter_", "scatter_add", "scatter_add_", "scatter_reduce", "index_add", "index_add_"),
        *("index_copy", "index_copy_", "masked_scatter", "masked_scatter_", "index_put", "index_put_", "__setitem__"),
    }
)

# Products that sum over a dimension of both factors. All but the first have no further dimension in common; those of
# the third kind have another argument before the factors.
_BATCHED = frozenset({"matmul", "__matmul__", "__rmatmul__", "bmm", "baddbmm"})
_UNBATCHED = frozenset(
    {"mm", "mv", "dot", "vdot", "inner", "linear", "tensordot", "addmm", "addmm_", "addmv", "addmv_"}
)
_ADDING = frozenset({"baddbmm", "addmm", "addmm_", "addmv", "addmv_"})


def dependence_of(tensor: Tensor) -> Dependence:
    """Return how a tensor is marked; unmarked ones do not depend on the batch."""
    return getattr(tensor, "_eigentrace", Dependence.NONE)


def mark(tensor: Tensor, dependence: Dependence) -> None:
    """Set the dependence of a tensor, as an attribute, which lives no longer than the tensor."""
    tensor._eigentrace = dependence  # type: ignore[attr-defined]


def propagate(func: Callable, args: tuple, kwargs: Mapping[str, Any], output: Any, size: int | None = None) -> None:
    """Mark the outputs of a function according to its inputs, given the number of examples if it is known."""
    inputs, name = list(tensors_in(args, kwargs)), func.__name__
    dependence = max((dependence_of(t) for t in inputs), default=Dependence.NONE)
    if dependence is Dependence.NONE:
        return
    if name in _WRITE:
        base, *others = inputs
        written = max((dependence_of(t) for t in others if t.is_floating_point()), default=Dependence.NONE)
        positions = [t for t in others if not t.is_floating_point()]
        if name == "__setitem__":
            positions += _positions(args[1])
        moved = written is Dependence.IN_PLACE and any(map(dependence_of, positions))
        dependence = Dependence.MOVED if moved or dependence_of(base) is Dependence.MOVED else Dependence.IN_PLACE
        mark(base, max(dependence, dependence_of(base)))
    elif dependence is Dependence.IN_PLACE and (
        _moves(name, args, kwargs, size) or _sums_over_examples(name, args, kwargs, size)
    ):
        dependence = Dependence.MOVED
    for result in tensors_in((output,)):
        if not any(result is t for t in inputs) or dependence is Dependence.MOVED:
            mark(result, dependence)


def _moves(name: str, args: tuple, kwargs: Mapping[str, Any], size: int | None) -> bool:
    """Return whether a function may move or select examples by values of the batch."""
    base = args[0] if args else kwargs.get("input")
    if not isinstance(base, Tensor) or dependence_of(base) is Dependence.NONE:
        return False  # a lookup table, not examples
    if name in _BY_DIM:
        position, default = _BY_DIM[name]
        return _may_hold_examples(base, _argument(args, kwargs, position, "dim", default), size)
    if name == "__getitem__":
        return _selects_by_values(args[1])
    if name in _BY_POSITION:
        return any(dependence_of(t) for t in tensors_in((*args, *kwargs.values())) if t is not base)
    if name == "narrow":  # from a start that is fixed, it truncates every batch to a length
        dim, start, length = (_argument(args, kwargs, 1 + i, key) for i, key in enumerate(("dim", "start", "length")))
        return _depends(start) or (dim in (0, -base.ndim) and _depends(length))
    sizes = _argument(args, kwargs, 1, "split_size_or_sections")
    return name in _EVERYWHERE or (name == "split" and isinstance(sizes, list | tuple))


def _argument(args: tuple, kwargs: Mapping[str, Any], position: int, name: str, default: Any = None) -> Any:
    return args[position] if len(args) > position else kwargs.get(name, default)


def _may_hold_examples(tensor: Tensor, dim: int | None, size: int | None) -> bool:
    """Return whether a dimension is the first, is meant by None, or is the only one of both to have their number."""
    if dim is None or dim in (0, -tensor.ndim):
        return True
    return size is not None and tensor.shape[dim] == size != tensor.shape[0]


def _selects_by_values(index: Any) -> bool:
    """Return whether an index selects examples by values of the batch.

    The first tensor of the index decides: `x[arange(B), last]` only selects within each example. Single numbers and
    the start of a slice select from all examples, and so does the end of a slice of the first dimension.
    """
    items = index if isinstance(index, tuple) else (index,)
    first = next((item for item in items if isinstance(item, Tensor) and item.ndim > 0), None)
    chosen = [*_positions(index)] + ([] if first is None else [first])
    return any(map(dependence_of, chosen)) or (bool(items) and isinstance(items[0], slice) and _depends(items[0].stop))


def _positions(index: Any) -> list[Tensor]:
    """Return the tensors of one number by which an index selects, alone, in lists or as the start of a slice."""
    found: list[Tensor] = []
    for item in index if isinstance(index, tuple) else (index,):
        if isinstance(item, list):
            found += _positions(tuple(item))
        else:
            value = item.start if isinstance(item, slice) else item
            if isinstance(value, Tensor) and value.ndim == 0 and value.dtype != torch.bool:
                found.append(value)
    return found


def _depends(value: Any) -> bool:
    return isinstance(value, Tensor) and dependence_of(value) is not Dependence.NONE


def _sums_over_examples(name: str, args: tuple, kwargs: Mapping[str, Any], size: int | None) -> bool:
    """Return whether a product sums over the examples, as one with a permutation matrix does.

    Each factor that depends on the batch has the examples along one of its dimensions. Unless the factors share it, and
    the product keeps it, examples have moved.
    """
    factors = [kept for tensor, kept in _kept_dims(name, args, kwargs) if _depends(tensor)]
    if len(factors) < 2:
        return False
    shared = set.intersection(*({dim for dim, length in kept.items() if length > 1 or size == 1} for kept in factors))
    return not shared


def _kept_dims(name: str, args: tuple, kwargs: Mapping[str, Any]) -> Iterator[tuple[Tensor, dict[Hashable, int]]]:
    """Yield the factors of a product, with the lengths of their dimensions that the product shares and keeps."""
    if name == "einsum" and isinstance(args[0], str):
        left, arrow, right = args[0].replace(" ", "").partition("->")
        factors = args[1] if len(args) == 2 and isinstance(args[1], list | tuple) else args[1:]
        kept = set(right) if arrow else {letter for letter in left if left.count(letter) == 1 or letter == "."}
        for term, factor in zip(left.split(","), factors, strict=True):
            before, dots, after = term.partition("...")
            rest = range(-(factor.ndim - len(before) - len(after)), 0) if dots else ()
            lengths = dict(zip((*before, *rest, *after), factor.shape, strict=True))
            yield factor, {dim: n for dim, n in lengths.items() if ("." if isinstance(dim, int) else dim) in kept}
    elif name in _BATCHED or name in _UNBATCHED:
        factors = list(tensors_in(args, kwargs))[name in _ADDING :][:2]
        for factor in factors:
            dims = range(-factor.ndim, -2) if name in _BATCHED else ()
            yield factor, {dim: factor.shape[dim] for dim in dims}


def tensors_in(args: Any, kwargs: Mapping[str, Any] | None = None) -> Iterator[Tensor]:
    """Yield the tensors among the arguments or outputs of a function, including those in lists and tuples."""
    for value in (*args, *(kwargs or {}).values()):
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from (item for item in value if isinstance(item, Tensor))
