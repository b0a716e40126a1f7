"""Watch the functions that a model calls on its parameters.

Functions are watched rather than modules, which covers tied weights, functional calls, adapters and bare parameters.
Tensors computed from parameters alone (a cast, a slice, a transposed view, `1 + weight`) are watched in turn.

Tensors are marked with how they depend on the batch (`eigentrace.gradients.dependence`). A rule relies on the examples
being at the positions found while planning, which no longer holds after a selection that depends on values of the batch
(a mask, a sort by length, a router).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from eigentrace.data.batch import map_tensors
from eigentrace.gradients.call_trace import CUDA_ARRAY, READING, CallTrace
from eigentrace.gradients.dependence import Dependence, dependence_of, mark, propagate, tensors_in
from eigentrace.gradients.rules import RULES, Call, Uses

# Functions that autocast runs in the smaller type: casting their input here keeps one copy of it instead of two.
_CAST = frozenset({"linear", "matmul", "mm", "__matmul__", "addmm", "conv1d", "conv2d", "conv3d"})
# Functions that may transpose a matrix ("__get__" reads the attribute T), and those that change at most its type.
_TRANSPOSES = frozenset({"t", "transpose", "permute", "swapaxes", "swapdims", "__get__"})
_CASTS = frozenset({"to", "float", "double", "bfloat16", "type", "type_as", "contiguous"})
# Up to this many tokens memory-efficient attention is faster than flash attention. On an H200, in µs per example: 0.70
# against 1.91 at 50 tokens and 16 heads, 0.31 against 0.92 at 32 and 8, but 7.6 against 6.0 at 256 and 12.
_SHORT = 128

Key = tuple[str, int]


@dataclass
class Watched:
    """A parameter, or a tensor computed from parameters alone, identified by the calls that led to it."""

    path: str
    shadow: Tensor
    """The same values, as the output of a separate graph that propagates gradients back to the parameters."""
    leaves: Mapping[str, Tensor]
    """The parameters, as the inputs of that graph."""
    transposed: bool | None = False
    """True for a transposed parameter, False for a parameter itself (in any type), None for anything else."""
    uses: int = 0


@dataclass
class Visit:
    """One call of a function on watched tensors."""

    function: Callable
    args: tuple
    kwargs: dict[str, Any]
    found: dict[int, Watched]
    """By the id of the tensor."""
    _output: Any

    def __post_init__(self) -> None:
        for watched in self.found.values():
            watched.uses += 1
        self.keys: list[Key] = [(watched.path, watched.uses) for watched in self.found.values()]

    @property
    def key(self) -> Key:
        """The watched tensor (the first, if there are several) and the number of this use of it."""
        return self.keys[0]

    @property
    def name(self) -> str:
        """The name of the function."""
        return self.function.__name__

    @property
    def roots(self) -> list[str]:
        """The parameters that are used."""
        return [root for watched in self.found.values() for root in watched.leaves]

    @property
    def inputs(self) -> list[Tensor]:
        """The tensors that are not watched."""
        return [t for t in tensors_in(self.args, self.kwargs) if id(t) not in self.found]

    @property
    def dependence(self) -> Dependence:
        """How the other tensors depend on the batch."""
        return max((dependence_of(t) for t in self.inputs), default=Dependence.NONE)

    @property
    def output(self) -> Any:
        """The output of the function, which is called on first access."""
        if self._output is None:
            self._cast_input()
            self._output = self.function(*self.args, **self.kwargs)
        return self._output

    def call_with(self, by_id: Mapping[int, Tensor]) -> Any:
        """Call the function with some tensors replaced, by id."""
        args, kwargs = _substituted(self.args, self.kwargs, by_id)
        return self.function(*args, **kwargs)

    def _cast_input(self) -> None:
        first = next((t for t in self.inputs if t.ndim > 1), None)
        # Autocast leaves float64 alone.
        if first is None or first.dtype != torch.float32 or not torch.is_autocast_enabled(first.device.type):
            return
        small = first.to(torch.get_autocast_dtype(first.device.type))
        mark(small, dependence_of(first))
        self.args, self.kwargs = _substituted(self.args, self.kwargs, {id(first): small})

    def uses(self, call: Call) -> Uses:
        """Apply the rule of the function; None if no rule accepts these arguments and covers all watched tensors."""
        rule = RULES.get(self.name)
        if rule is None:
            return None
        try:
            uses = rule(call, *self.args, **self.kwargs)
        except TypeError:  # arguments that the rule does not accept
            return None
        if uses is None or not self.found.keys() <= {id(value) for value, _ in uses}:
            return None
        return [(value, make) for value, make in uses if id(value) in self.found]


class Watch(TorchFunctionMode):
    """A mode that watches the parameters, and marks what depends on the batch, in all functions called under it.

    Args:
        params: The parameters, as the tensor objects that the model uses.
        visit: Called with each call on watched tensors; returns its output, or None to have the output watched as
            computed from parameters alone.
        fused: Whether attention may use a fused kernel; the fastest one for its length is then chosen.
        trace: Receives all calls, if the model may move examples by values that it reads.
    """

    def __init__(
        self,
        params: Mapping[str, Tensor],
        visit: Callable[[Visit], Any],
        fused: bool,
        trace: CallTrace | None = None,
    ) -> None:
        super().__init__()
        self.visit, self.fused, self.trace = visit, fused, trace
        self.watched: dict[int, Watched] = {}
        self.read: set[str] = set()
        """Names of the functions by which the model read values of the batch into Python."""
        self.ends: list[Tensor] = []
        """Tensors on which the model called `requires_grad_`: the backward pass must reach them too."""
        self._alive: list[Any] = []  # tensors whose ids are used must not be garbage-collected
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
        propagate(func, args, kwargs, output, None if self.trace is None else self.trace.size)
        name = CUDA_ARRAY if func == Tensor.__cuda_array_interface__.__get__ else func.__name__
        if self.trace is not None:
            self.trace.note(name, args, kwargs, output)
        if name in READING and any(dependence_of(t) for t in tensors_in(args)):
            self.read.add(name)
        if name == "requires_grad_":
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
                return output  # the tensor itself, a shape or a type
        visit = Visit(func, args, kwargs, found, output)
        result = self.visit(visit)
        return self._derive(visit) if result is None else result

    def _derive(self, visit: Visit) -> Any:
        """Repeat a function of parameters on their shadows, and watch its output."""
        with torch.enable_grad():
            shadow = visit.call_with({key: w.shadow for key, w in visit.found.items()})
        leaves = {root: leaf for w in visit.found.values() for root, leaf in w.leaves.items()}
        parts = shadow if isinstance(shadow, tuple | list) else (shadow,)
        plain = []
        for number, part in enumerate(parts):
            value = part.detach() if isinstance(part, Tensor) else part
            self._alive.append(value)
            if isinstance(part, Tensor) and part.requires_grad:
                path = f"{visit.key[0]}/{visit.key[1]}.{number}"  # named by its origin
                self.watched[id(value)] = Watched(path, part, leaves, _transposition(visit, part))
            plain.append(value)
        return type(shadow)(plain) if isinstance(shadow, tuple | list) else plain[0]


def marked(batch: Any) -> Any:
    """Return a copy of a batch that shares its memory, with tensors marked as the batch; the original is unchanged."""

    def alias(tensor: Tensor) -> Tensor:
        other = tensor.detach()
        mark(other, Dependence.IN_PLACE)
        return other

    return map_tensors(alias, batch)


def _attention(args: tuple, kwargs: Mapping[str, Any]) -> Any:
    query = args[0] if args else kwargs["query"]
    fused = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    if query.shape[-2] <= _SHORT:
        fused.reverse()
    return sdpa_kernel([*fused, SDPBackend.MATH], set_priority=True)


def _transposition(visit: Visit, shadow: Tensor) -> bool | None:
    """Return whether a new tensor is a parameter transposed (True), a parameter (False), or neither (None)."""
    before = next(iter(visit.found.values()))
    if len(visit.found) != 1 or before.transposed is None:
        return None
    if visit.name in _CASTS:
        return before.transposed
    reversed_dims = shadow.ndim == 2 and shadow.stride() == before.shadow.stride()[::-1]
    is_transpose = visit.name in _TRANSPOSES and reversed_dims and shadow.shape == before.shadow.shape[::-1]
    return not before.transposed if is_transpose else None


def _substituted(args: tuple, kwargs: dict[str, Any], by_id: Mapping[int, Tensor]) -> tuple[tuple, dict[str, Any]]:
    return tuple(_substitute(value, by_id) for value in args), {
        key: _substitute(value, by_id) for key, value in kwargs.items()
    }


def _substitute(value: Any, by_id: Mapping[int, Tensor]) -> Any:
    if isinstance(value, Tensor):
        return by_id.get(id(value), value)
    if type(value) in (tuple, list):
        return type(value)(_substitute(item, by_id) for item in value)
    return value
