"""Watch the functions a model calls on its parameters.

Functions are watched rather than modules, so that tied weights, functional calls, adapters and bare parameters all come
by. Whatever is made of parameters alone (a cast, a slice, a transposed view, `1 + weight`) is watched in turn.

Tensors carry a trace of the batch along. A rule may count on the examples lying where planning found them only while
nothing that depends on the numbers of a batch (a mask, a sort by length, a router) has picked among them.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from eigentrace.data.batch import map_tensors
from eigentrace.gradients.rules import RULES, Call, Uses


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


# Functions that autocast runs in the smaller type: casting their input here keeps one cast copy instead of two.
_CAST = frozenset({"linear", "matmul", "mm", "__matmul__", "addmm", "conv1d", "conv2d", "conv3d"})
# Functions that may turn a matrix over ("__get__" reads the attribute T), and those that change its type at most.
_TURNS = frozenset({"t", "transpose", "permute", "swapaxes", "swapdims", "__get__"})
_CASTS = frozenset({"to", "float", "double", "bfloat16", "type", "type_as", "contiguous"})
# Up to this many tokens memory-efficient attention is faster than flash attention: on an H200 .70 against 1.91 µs an
# example at 50 tokens and 16 heads, .31 against .92 at 32 and 8, but 7.6 against 6.0 at 256 and 12.
_SHORT = 128

_READING = READ_ONE | READ_MANY

Key = tuple[str, int]


@dataclass
class Watched:
    """A parameter, or something made of parameters alone, by the path that led to it."""

    path: str
    shadow: Tensor
    """The same numbers at the end of a graph of their own, along which gradients return to the roots."""
    leaves: Mapping[str, Tensor]
    """The roots at the beginning of that graph."""
    turned: bool | None = False
    """Whether it is its root transposed (or, False, the root itself in another type); None for anything else."""
    uses: int = 0


@dataclass
class Visit:
    """One call of a function on watched tensors."""

    function: Callable
    args: tuple
    kwargs: dict[str, Any]
    found: dict[int, Watched]
    _output: Any

    def __post_init__(self) -> None:
        for watched in self.found.values():
            watched.uses += 1
        self.keys: list[Key] = [(watched.path, watched.uses) for watched in self.found.values()]

    @property
    def key(self) -> Key:
        """Which use of which watched tensor this is."""
        return self.keys[0]

    @property
    def name(self) -> str:
        """What the function is called."""
        return self.function.__name__

    @property
    def roots(self) -> list[str]:
        """The parameters involved."""
        return [root for watched in self.found.values() for root in watched.leaves]

    @property
    def inputs(self) -> list[Tensor]:
        """The tensors that are not watched."""
        return [t for t in tensors_in(self.args, self.kwargs) if id(t) not in self.found]

    @property
    def trace(self) -> Trace:
        """Where the other tensors come from."""
        return max((trace_of(t) for t in self.inputs), default=Trace.APART)

    @property
    def output(self) -> Any:
        """Call the function, once."""
        if self._output is None:
            self._cast_input()
            self._output = self.function(*self.args, **self.kwargs)
        return self._output

    def with_swapped(self, by_id: Mapping[int, Tensor]) -> Any:
        """Call the function with other tensors in the place of some."""
        args, kwargs = _swapped(self.args, self.kwargs, by_id)
        return self.function(*args, **kwargs)

    def _cast_input(self) -> None:
        first = next((t for t in self.inputs if t.ndim > 1), None)
        # Autocast leaves float64 alone.
        if first is None or first.dtype != torch.float32 or not torch.is_autocast_enabled(first.device.type):
            return
        small = first.to(torch.get_autocast_dtype(first.device.type))
        mark(small, trace_of(first))
        self.args, self.kwargs = _swapped(self.args, self.kwargs, {id(first): small})

    def uses(self, call: Call) -> Uses:
        """Ask the function's rule, if it has one that takes these arguments and covers every watched one."""
        rule = RULES.get(self.name)
        if rule is None:
            return None
        try:
            uses = rule(call, *self.args, **self.kwargs)
        except TypeError:  # called with arguments that the rule does not know
            return None
        if uses is None or not self.found.keys() <= {id(value) for value, _ in uses}:
            return None
        return [(value, make) for value, make in uses if id(value) in self.found]


class Watch(TorchFunctionMode):
    """Follows parameters, and what comes of a batch, through the functions called under it.

    Args:
        params: The parameters, as the very tensors the model will meet.
        visit: Takes a call that involves watched tensors and returns its output, or None to let the output be
            watched as something made of parameters alone.
        fused: Whether attention may take a fused kernel; the fastest one for its length is then chosen.
    """

    def __init__(self, params: Mapping[str, Tensor], visit: Callable[[Visit], Any], fused: bool) -> None:
        super().__init__()
        self.visit, self.fused = visit, fused
        self.watched: dict[int, Watched] = {}
        self.read: set[str] = set()
        """Functions by which the model read numbers that came of the batch."""
        self.ends: list[Tensor] = []
        """Tensors the model itself wants gradients of: where the backward pass must go, too."""
        self._alive: list[Any] = []  # what ids stand for must not be collected
        for name, value in params.items():
            if value.numel():
                with torch.enable_grad():
                    leaf = value.detach().requires_grad_()
                self.watched[id(value)] = Watched(name, leaf, {name: leaf})

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.fused and func is F.scaled_dot_product_attention:
            with _attention(args, kwargs):
                output = self._call(func, args, kwargs)
        else:
            output = self._call(func, args, kwargs)
        follow(func, args, kwargs, output)
        if func.__name__ in _READING and any(trace_of(t) for t in tensors_in(args)):
            self.read.add(func.__name__)
        if func.__name__ == "requires_grad_":
            self.ends.append(output)
        return output

    def _call(self, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        found = {id(t): w for t in tensors_in(args, kwargs) if (w := self.watched.get(id(t))) is not None}
        if not found or not torch.is_grad_enabled():
            return func(*args, **kwargs)
        output = None
        if func.__name__ not in _CAST:
            output = func(*args, **kwargs)
            if id(output) in found or not any(t.is_floating_point() for t in tensors_in((output,))):
                return output  # a view that is the tensor itself, a shape, a type
        visit = Visit(func, args, kwargs, found, output)
        result = self.visit(visit)
        return self._derive(visit) if result is None else result

    def _derive(self, visit: Visit) -> Any:
        """Compute a function of parameters once more on their shadows, and watch what comes out."""
        with torch.enable_grad():
            shadow = visit.with_swapped({key: w.shadow for key, w in visit.found.items()})
        leaves = {root: leaf for w in visit.found.values() for root, leaf in w.leaves.items()}
        parts = shadow if isinstance(shadow, tuple | list) else (shadow,)
        plain = []
        for number, part in enumerate(parts):
            value = part.detach() if isinstance(part, Tensor) else part
            self._alive.append(value)
            if isinstance(part, Tensor) and part.requires_grad:
                path = f"{visit.key[0]}/{visit.key[1]}.{number}"  # where it comes from is its name
                self.watched[id(value)] = Watched(path, part, leaves, _turn(visit, part))
            plain.append(value)
        return type(shadow)(plain) if isinstance(shadow, tuple | list) else plain[0]


def traced(batch: Any) -> Any:
    """Return a batch of new tensors over the same numbers, marked as the batch; the caller's own stay as they are."""

    def alias(tensor: Tensor) -> Tensor:
        other = tensor.detach()
        mark(other, Trace.BATCH)
        return other

    return map_tensors(alias, batch)


def _attention(args: tuple, kwargs: Mapping[str, Any]) -> Any:
    query = args[0] if args else kwargs["query"]
    fused = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    if query.shape[-2] <= _SHORT:
        fused.reverse()
    return sdpa_kernel([*fused, SDPBackend.MATH], set_priority=True)


def _turn(visit: Visit, shadow: Tensor) -> bool | None:
    """Tell whether a new tensor is its root transposed, the root in another type, or neither."""
    before = next(iter(visit.found.values()))
    if len(visit.found) != 1 or before.turned is None:
        return None
    if visit.name in _CASTS:
        return before.turned
    reversed_dims = shadow.ndim == 2 and shadow.stride() == before.shadow.stride()[::-1]
    is_turn = visit.name in _TURNS and reversed_dims and shadow.shape == before.shadow.shape[::-1]
    return not before.turned if is_turn else None


def _swapped(args: tuple, kwargs: dict[str, Any], by_id: Mapping[int, Tensor]) -> tuple[tuple, dict[str, Any]]:
    return tuple(_swap(value, by_id) for value in args), {key: _swap(value, by_id) for key, value in kwargs.items()}


def _swap(value: Any, by_id: Mapping[int, Tensor]) -> Any:
    if isinstance(value, Tensor):
        return by_id.get(id(value), value)
    if type(value) in (tuple, list):
        return type(value)(_swap(item, by_id) for item in value)
    return value
