"""Hash the calls of a model after it read values of its batch into Python.

Values that were read (by `item`, `tolist`, a comparison in an `if`) no longer have a tensor that could be followed, but
what the model does with them is visible: the functions it calls, on which tensors and at which indices. Passes with
equal hashes treat their examples alike, so a check of one of them covers the others.
"""

import hashlib
from collections.abc import Iterator, Mapping
from numbers import Number
from typing import Any

import numpy as np
import torch
from torch import Tensor

# Functions that return one or many values of a tensor to Python: what the model does next may depend on them.
READ_ONE = frozenset(
    {
        *("item", "is_nonzero", "equal", "allclose"),
        *("__bool__", "__int__", "__float__", "__index__", "__complex__", "__contains__"),
    }
)
CUDA_ARRAY = "__cuda_array_interface__"
READ_MANY = frozenset(
    {
        *("tolist", "numpy", "__array__", "__dlpack__", CUDA_ARRAY, "untyped_storage", "data_ptr"),
        *("__format__", "__repr__"),  # as text
        *("apply_", "map_", "map2_"),  # by a function of Python that is called with every value
    }
)
READING = READ_ONE | READ_MANY
# Functions whose output has a length that depends on values, which Python can read from its shape.
_MEASURING = frozenset({"nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount"})

# Functions that select, move or combine parts of tensors by their other arguments.
_MOVING = frozenset(
    {
        *("__getitem__", "__setitem__", "select", "index_select", "narrow", "take", "take_along_dim", "gather"),
        *("embedding", "one_hot", "where", "as_strided", "unfold", "diagonal", "pad"),
        *("masked_select", "masked_scatter"),
        *("roll", "flip", "fliplr", "flipud", "rot90", "repeat", "repeat_interleave", "tile", "__reversed__"),
        *("permute", "transpose", "movedim", "moveaxis", "swapaxes", "swapdims", "t", "unbind"),
        *("split", "split_with_sizes", "chunk", "tensor_split", "hsplit", "vsplit", "dsplit"),
        *("cat", "concat", "concatenate", "stack", "hstack", "vstack", "dstack", "row_stack", "column_stack"),
        *("index_add", "index_add_", "index_copy", "index_copy_", "index_put", "index_put_", "index_fill"),
        *("scatter", "scatter_", "scatter_add", "scatter_add_", "scatter_reduce", "select_scatter", "slice_scatter"),
        *("pad_sequence", "pack_sequence", "block_diag"),
    }
)
# Functions that make tensors of values of Python.
_CREATING = frozenset(
    {
        *("tensor", "as_tensor", "asarray", "from_numpy", "frombuffer", "from_dlpack", "new_tensor"),
        "__array_wrap__",  # the result of a function of NumPy
    }
)
# Numbers that leave out what they multiply or divide, next to numbers between them.
_SMALL, _LARGE = 1e-6, 1e6
_JOINING = frozenset({"cat", "concat", "concatenate", "hstack", "vstack", "row_stack", "column_stack"})


class CallTrace:
    """The hash of a pass: of all functions that were called after values were first read, and on what.

    Args:
        size: B. Truncation along a dimension that does not hold the examples (`h[:, :length]`) is left out, so that a
            model which truncates every batch to its longest example has few different hashes.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._calls = 0
        self._hash: Any = None
        self._indices: dict[int, tuple[Tensor, str]] = {}  # with the tensors, so that ids stay unique

    @property
    def value(self) -> bytes | None:
        """The hash; None if no values were read."""
        return None if self._hash is None else self._hash.digest()

    def note(self, name: str, args: tuple, kwargs: Mapping[str, Any], output: Any) -> None:
        """Add one call, and number its outputs, so that later calls on them can be told apart."""
        if self._hash is not None:
            self._hash.update(repr((name, *self._described(name, args, kwargs))).encode())
            if name in _CREATING and isinstance(output, Tensor) and output.numel():  # it may be a permutation
                described = _content(output) if output.numel() > 1 else repr(_kind(output.item()))
                self._hash.update(described.encode())
        elif name in READING or name in _MEASURING or (name == "__getitem__" and _is_mask(args[1])):
            self._hash = hashlib.blake2b(digest_size=16)
        self._calls += 1
        if isinstance(output, Tensor):
            if not any(output is value for value in args):
                _number(output, (self._calls, 0))
        elif isinstance(output, tuple | list):
            for position, part in enumerate(output):
                if isinstance(part, Tensor):
                    _number(part, (self._calls, position))

    def _described(self, name: str, args: tuple, kwargs: Mapping[str, Any]) -> Iterator[Any]:
        values = (*args, *kwargs.values())
        if name not in _MOVING:
            for value in _flat(values):
                if isinstance(value, Tensor):
                    yield _number_of(value)
                elif isinstance(value, Number | np.bool_):  # it may be the weight of an example
                    yield _kind(value)
            return
        if name in ("__getitem__", "__setitem__"):
            yield _number_of(args[0])
            yield from self._selected(args[0].shape, args[1])
            values = args[2:]
        for value in _flat(values):
            yield self._index(value)
        if name in _JOINING and args and isinstance(args[0], tuple | list):
            yield from self._lengths(args[0], args[1] if len(args) > 1 else kwargs.get("dim", 0))

    def _selected(self, shape: torch.Size, index: Any) -> Iterator[Any]:
        """Describe an index, except for slices along dimensions that do not hold the examples."""
        items = index if isinstance(index, tuple) else (index,)
        dim = 0
        for position, item in enumerate(items):
            if item is Ellipsis:
                dim = len(shape) - sum(_consumed(later) for later in items[position + 1 :])
            elif not isinstance(item, slice):
                yield from map(self._index, _flat((item,)))
                dim += _consumed(item)
            else:
                if dim == 0 or (dim < len(shape) and shape[dim] == self.size):
                    yield (dim, *map(_integer, (item.start, item.stop, item.step)))
                dim += 1

    def _index(self, value: Any) -> Any:
        """Describe an argument: a tensor by its number and, if it holds integers of Python, by its values."""
        if isinstance(value, Tensor):
            return _number_of(value), self._values(value)
        return _kind(value) if isinstance(value, float) else value if isinstance(value, int | str) else repr(value)

    def _values(self, tensor: Tensor) -> str | None:
        if tensor.is_floating_point() or tensor.is_complex():
            return None
        if getattr(tensor, "_eigentrace", 0):
            return None  # it depends on the batch: its use is followed
        if id(tensor) not in self._indices:
            self._indices[id(tensor)] = tensor, _content(tensor)
        return self._indices[id(tensor)][1]

    def _lengths(self, parts: tuple | list, dim: int) -> list[int]:
        """Return the lengths of the parts if together they may be the examples."""
        if any(not isinstance(part, Tensor) or not -part.ndim <= dim < part.ndim for part in parts):
            return []
        lengths = [part.shape[dim] for part in parts]
        return [] if sum(lengths) % self.size else lengths


def _content(tensor: Tensor) -> str:
    whole = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return hashlib.blake2b(whole.numpy().tobytes(), digest_size=16).hexdigest()


def _kind(number: Any) -> Any:
    """Describe a number of Python: does it leave out what it multiplies, or keep it as it is? Others vary freely."""
    size = abs(number)
    return number if size in (0, 1) else "small" if size < _SMALL else "large" if size > _LARGE else None


def _number(tensor: Tensor, number: tuple[int, int]) -> None:
    tensor._eigentrace_number = number  # type: ignore[attr-defined]


def _number_of(tensor: Tensor) -> tuple[int, int] | None:
    return getattr(tensor, "_eigentrace_number", None)


def _flat(values: tuple | list) -> Iterator[Any]:
    for value in values:
        if isinstance(value, tuple | list):
            yield from _flat(value)
        else:
            yield value


def _integer(value: Any) -> Any:
    return int(value) if isinstance(value, Tensor) else value


def _consumed(item: Any) -> int:
    """Return how many dimensions an item of an index consumes."""
    if item is None or item is Ellipsis or isinstance(item, bool):
        return 0
    return item.ndim if isinstance(item, Tensor) and item.dtype == torch.bool else 1


def _is_mask(index: Any) -> bool:
    return any(isinstance(item, Tensor) and item.dtype == torch.bool for item in _flat((index,)))
