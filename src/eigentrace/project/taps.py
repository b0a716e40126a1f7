"""Watch the functions a model calls on its parameters, and tap the gradients that flow back to them.

Functions are watched rather than modules, so that tied weights, functional calls, adapters and bare parameters all come
by. Whatever is made of parameters alone (a cast, a slice, a transposed view, `1 + weight`) is watched in turn.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from eigentrace.forms import Form, Written
from eigentrace.outer import Outer
from eigentrace.project.rules import RULES, Call, Uses

# Functions that autocast runs in the smaller type: casting their input here keeps one cast copy instead of two.
_CAST = frozenset({"linear", "matmul", "mm", "__matmul__", "addmm", "conv1d", "conv2d", "conv3d"})
# Functions that may turn a matrix over ("__get__" reads the attribute T), and those that change its type at most.
_TURNS = frozenset({"t", "transpose", "permute", "swapaxes", "swapdims", "__get__"})
_CASTS = frozenset({"to", "float", "double", "bfloat16", "type", "type_as", "contiguous"})
_SIGNATURES = {name: inspect.signature(rule) for name, rule in RULES.items()}

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


@dataclass(frozen=True)
class Seen:
    """A call as it came by while planning."""

    function: str
    shapes: tuple[torch.Size, ...]


Receive = Callable[[Watched, Form], None]


class UnplannedError(RuntimeError):
    """The model did something with a parameter that it did not do while planning."""


@dataclass(frozen=True)
class Plan:
    """Where the examples of a batch lie in what each use of a parameter gives."""

    batch_dims: Mapping[Key, int | None]
    functions: Mapping[Key, str]
    without_rule: Mapping[str, str] = field(default_factory=dict)
    """Parameters that no rule covers, with the reason."""
    uses: Mapping[str, int] = field(default_factory=dict)
    """How often each of the others sends a gradient."""

    @staticmethod
    def of(few: Mapping[Key, Seen], more: Mapping[Key, Seen], num_few: int, num_more: int) -> "Plan":
        """Compare what came by for two sizes of batch: what grew with it holds the examples."""
        dims: dict[Key, int | None] = {}
        for key in few.keys() & more.keys():
            a, b = few[key], more[key]
            if a.function == b.function and len(a.shapes) == len(b.shapes):
                found = {_grown(s, t, num_few, num_more) for s, t in zip(a.shapes, b.shapes, strict=True)}
                if len(found) == 1 and (dim := found.pop()) != _UNCLEAR:
                    dims[key] = dim
        return Plan(dims, {key: few[key].function for key in dims})


_UNCLEAR = -1


def _grown(few: torch.Size, more: torch.Size, num_few: int, num_more: int) -> int | None:
    """Return the one dimension that grew in proportion, None if none did, or _UNCLEAR."""
    if few == more:
        return None
    if len(few) != len(more):
        return _UNCLEAR
    grown = [d for d, (a, b) in enumerate(zip(few, more, strict=True)) if a != b]
    return grown[0] if len(grown) == 1 and few[grown[0]] * num_more == more[grown[0]] * num_few else _UNCLEAR


class Watch(TorchFunctionMode):
    """Follows parameters through the functions called under it.

    Args:
        params: The parameters, as the very tensors the model will meet.
        visit: Takes a call that involves watched tensors and returns its output, or None to let the output be
            watched as something made of parameters alone.
        batch: Tensors to follow too, if given: `touched` then tells what was computed from them.
    """

    def __init__(
        self, params: Mapping[str, Tensor], visit: Callable[["Visit"], Any], batch: Iterable[Tensor] | None = None
    ) -> None:
        super().__init__()
        self.visit = visit
        self.watched: dict[int, Watched] = {}
        self._alive: list[Any] = []  # what ids stand for must not be collected
        self._touched: set[int] | None = None
        if batch is not None:
            self._alive.extend(batch)
            self._touched = {id(t) for t in self._alive}
        for name, value in params.items():
            with torch.enable_grad():
                leaf = value.detach().requires_grad_()
            self.watched[id(value)] = Watched(name, leaf, {name: leaf})

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        output = self._call(func, args, kwargs)
        if self._touched is not None and any(id(t) in self._touched for t in tensors_in(args, kwargs)):
            self._alive.append(output)
            self._touched.update(id(t) for t in tensors_in((output,)))
        return output

    def touched(self, visit: "Visit") -> bool:
        """Tell whether a call involves something computed from the batch."""
        return any(id(t) in (self._touched or ()) for t in tensors_in(visit.args, visit.kwargs))

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

    def _derive(self, visit: "Visit") -> Any:
        """Compute a function of parameters once more on their shadows, and watch what comes out."""
        with torch.enable_grad():
            args, kwargs = _swapped(visit.args, visit.kwargs, {key: w.shadow for key, w in visit.found.items()})
            shadow = visit.function(*args, **kwargs)
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
    def output(self) -> Any:
        """Call the function, once."""
        if self._output is None:
            self._cast_input()
            self._output = self.function(*self.args, **self.kwargs)
        return self._output

    def _cast_input(self) -> None:
        first = next((t for t in tensors_in(self.args, self.kwargs) if t.ndim > 1 and id(t) not in self.found), None)
        if first is None or not torch.is_autocast_enabled(first.device.type):
            return
        small = first.to(torch.get_autocast_dtype(first.device.type))
        self.args, self.kwargs = _swapped(self.args, self.kwargs, {id(first): small})

    def uses(self, call: Call) -> Uses:
        """Ask the function's rule, if it has one that takes these arguments and covers every watched one."""
        rule = RULES.get(self.name)
        if rule is None:
            return None
        try:
            bound = _SIGNATURES[self.name].bind(call, *self.args, **self.kwargs)
        except TypeError:
            return None
        uses = rule(*bound.args, **bound.kwargs)
        if uses is None or not self.found.keys() <= {id(value) for value, _ in uses}:
            return None
        return [(value, make) for value, make in uses if id(value) in self.found]


def survey(params: Mapping[str, Tensor], batch: Iterable[Tensor], run: Callable[[], Any]) -> dict[Key, Seen]:
    """Write down what every use of a parameter gives, taking nothing."""
    seen: dict[Key, Seen] = {}

    def visit(visit: Visit) -> Any:
        shapes = tuple(t.shape for t in tensors_in((visit.output,)))
        seen.update(dict.fromkeys(visit.keys, Seen(visit.name, shapes)))
        return visit.output if watch.touched(visit) else None

    watch = Watch(params, visit, batch)
    with torch.enable_grad(), watch:
        run()
    return seen


class Taps:
    """Visits calls of a planned model and sends the gradient of each use on its way back to a receiver."""

    def __init__(self, plan: Plan, size: int, device: torch.device, receive: Receive) -> None:
        self.plan, self.size, self.receive = plan, size, receive
        self.anchor = torch.zeros((), device=device, requires_grad=True)
        self.without_rule: dict[str, str] = {}
        self.sent: dict[str, int] = {}

    def run(self, params: Mapping[str, Tensor], function: Callable[[], Tensor]) -> Tensor:  # (B,)
        """Evaluate losses under the taps, and differentiate their sum."""
        with torch.enable_grad():
            with Watch(params, self._visit):
                losses = function()
            if losses.requires_grad:
                torch.autograd.grad(losses.sum(), self.anchor, allow_unused=True)
        return losses.detach()

    def _visit(self, visit: Visit) -> Tensor | None:
        if all(root in self.plan.without_rule for w in visit.found.values() for root in w.leaves):
            return visit.output
        if visit.key not in self.plan.batch_dims or self.plan.functions[visit.key] != visit.name:
            if visit.key in self.plan.functions or self.plan.uses:
                raise UnplannedError(f"{visit.key[0]} went through {visit.name}, which planning did not see.")
            return self._refuse(visit, "does not keep the examples of a batch apart")
        dim = self.plan.batch_dims[visit.key]
        if dim is None:
            return None
        output = visit.output
        if not isinstance(output, Tensor) or output.shape[dim] % self.size:
            return self._refuse(visit, "gives several results")
        uses = visit.uses(Call(output.detach(), dim, self.size))
        if uses is None:
            return self._refuse(visit, "has no rule")
        return self._tap(visit, output, uses)

    def _refuse(self, visit: Visit, why: str) -> Any:
        for watched in visit.found.values():
            self.without_rule.update({root: f"{visit.name} {why}" for root in watched.leaves})
        return visit.output

    def _tap(self, visit: Visit, output: Tensor, uses: list) -> Tensor:
        if not output.requires_grad:
            output = _Root.apply(output, self.anchor)
        inputs = [t for t in tensors_in(visit.args, visit.kwargs) if id(t) not in visit.found]
        versions = [t._version for t in inputs]
        targets = [(visit.found[id(value)], make) for value, make in uses]
        name = visit.name
        for watched, _ in targets:
            self.sent.update({root: self.sent.get(root, 0) + 1 for root in watched.leaves})

        # It must not refer to the visit, which holds the output, which holds this hook: nothing would free the circle.
        def send(gradient: Tensor) -> None:
            if [t._version for t in inputs] != versions:
                raise UnplannedError(f"{name} met an input that was overwritten after it was used.")
            for watched, make in targets:
                self.receive(watched, make(gradient))
            targets.clear()
            inputs.clear()
            versions.clear()

        output.register_hook(send)
        return output


class _Root(torch.autograd.Function):
    """Gives a tensor that depends on no differentiated number a place where the backward pass can end."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, anchor: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:  # type: ignore[override]
        return None, None


def returned(watched: Watched, form: Form) -> Iterator[tuple[str, Form]]:
    """Pass a gradient of something made of parameters back to the parameters it was made of."""
    if watched.turned is not None and not (watched.turned and not _is_flat_outer(form)):
        (root,) = watched.leaves
        yield root, form.transposed() if watched.turned else form  # type: ignore[attr-defined]
        return
    shadow = watched.shadow
    for root, leaf in watched.leaves.items():

        def write(start: int, stop: int, leaf: Tensor = leaf) -> Tensor:
            gradients = form.write(start, stop).reshape(stop - start, *shadow.shape).to(shadow.dtype)
            with torch.enable_grad():
                (found,) = torch.autograd.grad(shadow, leaf, gradients, is_grads_batched=True, retain_graph=True)
            return found.reshape(stop - start, leaf.numel())

        yield root, Written(write, form.examples, leaf.nbytes + shadow.nbytes)


def _is_flat_outer(form: Form) -> bool:
    return isinstance(form, Outer) and form.groups == 1


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


def tensors_in(args: Any, kwargs: Mapping[str, Any] | None = None) -> Iterator[Tensor]:
    """Yield the tensors among a function's arguments or results, those in lists included."""
    for value in (*args, *(kwargs or {}).values()):
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from (item for item in value if isinstance(item, Tensor))


def _swapped(args: tuple, kwargs: dict[str, Any], by_id: Mapping[int, Tensor]) -> tuple[tuple, dict[str, Any]]:
    def swap(value: Any) -> Any:
        if isinstance(value, Tensor):
            return by_id.get(id(value), value)
        if type(value) in (tuple, list):
            return type(value)(swap(item) for item in value)
        return value

    return tuple(swap(value) for value in args), {key: swap(value) for key, value in kwargs.items()}
