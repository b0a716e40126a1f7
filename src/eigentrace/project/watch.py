"""Watch the functions a model calls on its parameters.

Functions are watched rather than modules, so that tied weights, functional calls, adapters and bare parameters all come
by. Whatever is made of parameters alone (a cast, a slice, a transposed view, `1 + weight`) is watched in turn.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from eigentrace.batch import map_tensors
from eigentrace.project.rules import RULES, Call, Uses
from eigentrace.project.traces import READ_MANY, READ_ONE, Trace, follow, mark, tensors_in, trace_of

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
