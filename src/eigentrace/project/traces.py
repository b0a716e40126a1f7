"""Where a tensor comes from: nothing of the batch, the batch, or the batch with its examples moved about.

A rule may count on the examples lying where planning found them only while nothing that depends on the numbers of a
batch (a mask, a sort by length, a router) has picked among them.
"""

from collections.abc import Callable, Iterator, Mapping
from enum import IntEnum
from typing import Any

from torch import Tensor


class Trace(IntEnum):
    """How a tensor depends on the batch."""

    APART = 0
    BATCH = 1
    MOVED = 2


# Functions that take examples, or parts of them, to places that an index tensor names, by the argument that names the
# dimension; those without one move across all of them.
_BY_DIM = {
    "gather": 1,
    "take_along_dim": 2,
    "sort": 1,
    "topk": 2,
}
_EVERYWHERE = frozenset(
    {
        "masked_select",
        "take",
        "repeat_interleave",
        "_pack_padded_sequence",
        "split_with_sizes",
    }
)


# Functions that write some rows into others. What was picked out returns home; what was not is moved.
_WRITE = frozenset(
    {
        *("scatter", "scatter_", "scatter_add", "scatter_add_", "scatter_reduce", "index_add", "index_add_"),
        *("index_copy", "index_copy_", "masked_scatter", "masked_scatter_", "index_put", "index_put_", "__setitem__"),
    }
)


# Functions that hand numbers of a tensor to Python, one or many: what the model does next may depend on them.
READ_ONE = frozenset({"item", "__bool__", "__int__", "__float__", "__index__", "is_nonzero", "equal", "allclose"})
READ_MANY = frozenset({"tolist", "numpy", "__array__"})


def trace_of(tensor: Tensor) -> Trace:
    """Return what is known of a tensor."""
    return getattr(tensor, "_eigentrace", Trace.APART)


def mark(tensor: Tensor, trace: Trace) -> None:
    """Write a tensor's origin on it: on the object, so that it goes when the tensor goes."""
    tensor._eigentrace = trace  # type: ignore[attr-defined]


def follow(func: Callable, args: tuple, kwargs: Mapping[str, Any], output: Any) -> None:
    """Mark what a function gave by what it was given."""
    inputs = list(tensors_in(args, kwargs))
    trace = max((trace_of(t) for t in inputs), default=Trace.APART)
    if trace is Trace.APART:
        return
    if func.__name__ in _WRITE:
        base, *others = inputs
        written = max((trace_of(t) for t in others if t.is_floating_point()), default=Trace.APART)
        moved = written is Trace.BATCH and any(trace_of(t) for t in others if not t.is_floating_point())
        trace = Trace.MOVED if moved or trace_of(base) is Trace.MOVED else Trace.BATCH
        mark(base, max(trace, trace_of(base)))
    elif trace is Trace.BATCH and _moves(func.__name__, args, kwargs):
        trace = Trace.MOVED
    for result in tensors_in((output,)):
        if not any(result is t for t in inputs) or trace is Trace.MOVED:
            mark(result, trace)


def _moves(name: str, args: tuple, kwargs: Mapping[str, Any]) -> bool:
    """Tell whether a function picks among examples by numbers of the batch, or may."""
    if not args or not isinstance(args[0], Tensor) or trace_of(args[0]) is Trace.APART:
        return False  # a table that is looked up, not examples
    if name in _BY_DIM:
        place = _BY_DIM[name]
        dim = args[place] if len(args) > place else kwargs.get("dim", -1)
        return dim in (0, -args[0].ndim)
    if name == "__getitem__":
        return _picks(args[1])
    if name == "index_select":
        return any(trace_of(t) for t in tensors_in(args[1:], kwargs))
    sizes = args[1] if len(args) > 1 else kwargs.get("split_size_or_sections")
    return name in _EVERYWHERE or (name == "split" and isinstance(sizes, list | tuple))


def _picks(index: Any) -> bool:
    """Tell whether an index chooses among examples by numbers of the batch.

    The first tensor of an index decides: in `x[arange(B), last]` each example picks within itself.
    """
    items = index if isinstance(index, tuple) else (index,)
    first = next((item for item in items if isinstance(item, Tensor) and item.ndim > 0), None)
    return first is not None and trace_of(first) is not Trace.APART


def tensors_in(args: Any, kwargs: Mapping[str, Any] | None = None) -> Iterator[Tensor]:
    """Yield the tensors among a function's arguments or results, those in lists included."""
    for value in (*args, *(kwargs or {}).values()):
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from (item for item in value if isinstance(item, Tensor))
