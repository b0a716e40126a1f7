"""Tap the gradients that flow back to each use of a parameter, with the examples along the planned dimension."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from eigentrace.gradients.call_trace import CallTrace
from eigentrace.gradients.dependence import Dependence, tensors_in
from eigentrace.gradients.layer_gradients import Direct, LayerGradients, OnDemand
from eigentrace.gradients.outer_products import Outer
from eigentrace.gradients.rules import Call
from eigentrace.gradients.watch import Key, Visit, Watch, Watched, marked

# Functions whose rules do not use their other input, which may therefore be modified in place afterwards.
_INPUT_UNUSED = frozenset({"add", "add_", "__iadd__", "__radd__", "sub", "sub_", "expand", "repeat", "where"})

Receive = Callable[[Watched, LayerGradients], None]


class UnplannedError(RuntimeError):
    """The model used parameters in a way that it did not while planning."""

    def __init__(self, message: str, roots: Sequence[str]) -> None:
        super().__init__(message)
        self.message, self.roots = message, roots


@dataclass(frozen=True)
class ObservedCall:
    """A call observed while planning."""

    function: str
    """Its name."""
    shapes: tuple[torch.Size, ...]
    """Of its outputs."""


@dataclass(frozen=True)
class Plan:
    """The dimension of the examples in the output of each use of a parameter."""

    batch_dims: Mapping[Key, int | None]
    """None for uses whose output does not depend on the number of examples."""
    functions: Mapping[Key, str]
    unmerged: frozenset[Key]
    """Uses whose dimension has length 1 per example: with a greater length, the order would not have been checked."""
    distinct: int
    """Number of different examples that the plan was checked on."""
    without_rule: Mapping[str, str] = field(default_factory=dict)
    """Parameters that no rule covers, with the reasons."""
    uses: Mapping[str, int] = field(default_factory=dict)
    """Number of gradients that each other parameter receives in one pass."""
    checked: bool = False
    """Whether the rules were compared with ordinary gradients."""

    @staticmethod
    def of(
        few: Mapping[Key, ObservedCall],
        more: Mapping[Key, ObservedCall],
        num_few: int,
        num_more: int,
        distinct: int,
    ) -> "Plan":
        """Compare the calls for two batch sizes: the examples are along the dimension that grew in proportion."""
        dims: dict[Key, int | None] = {}
        for key in few.keys() & more.keys():
            a, b = few[key], more[key]
            if a.function == b.function and len(a.shapes) == len(b.shapes):
                found = {_grown(s, t, num_few, num_more) for s, t in zip(a.shapes, b.shapes, strict=True)}
                if len(found) == 1 and (dim := found.pop()) != _UNCLEAR:
                    dims[key] = dim
        unmerged = {key for key, dim in dims.items() if dim is not None and few[key].shapes[0][dim] == num_few}
        return Plan(dims, {key: few[key].function for key in dims}, frozenset(unmerged), distinct)


_UNCLEAR = -1


def _grown(few: torch.Size, more: torch.Size, num_few: int, num_more: int) -> int | None:
    """Return the only dimension that grew, in proportion to the batch; None if none grew; otherwise _UNCLEAR."""
    if few == more:
        return None
    if len(few) != len(more):
        return _UNCLEAR
    grown = [d for d, (a, b) in enumerate(zip(few, more, strict=True)) if a != b]
    return grown[0] if len(grown) == 1 and few[grown[0]] * num_more == more[grown[0]] * num_few else _UNCLEAR


def survey(params: Mapping[str, Tensor], batch: Any, run: Callable[[Any], Any], fused: bool) -> dict[Key, ObservedCall]:
    """Run the model and record the shapes of the outputs of every use of a parameter."""
    seen: dict[Key, ObservedCall] = {}

    def visit(visit: Visit) -> Any:
        shapes = tuple(t.shape for t in tensors_in((visit.output,)))
        seen.update(dict.fromkeys(visit.keys, ObservedCall(visit.name, shapes)))
        return None if visit.dependence is Dependence.NONE else visit.output

    with torch.enable_grad(), Watch(params, visit, fused):
        run(marked(batch))
    return seen


class Taps:
    """Hooks on the calls of a planned model, which pass the gradient of each use to `receive` in the backward pass."""

    def __init__(self, plan: Plan, size: int, device: torch.device, receive: Receive) -> None:
        self.plan, self.size, self.receive = plan, size, receive
        self.anchor = torch.zeros((), device=device, requires_grad=True)
        self.without_rule: dict[str, str] = {}
        self.sent: dict[str, int] = {}
        self.read: frozenset[str] = frozenset()
        self.trace: bytes | None = None

    def run(
        self, params: Mapping[str, Tensor], batch: Any, function: Callable[[Any], Tensor], fused: bool
    ) -> Tensor:  # (B,)
        """Evaluate the losses under the taps, and differentiate their sum."""
        with torch.enable_grad():
            trace = CallTrace(self.size)
            watch = Watch(params, self._visit, fused, trace)
            with watch:
                losses = function(marked(batch))
            self.read, self.trace = frozenset(watch.read), trace.value
            if losses.requires_grad:
                ends = [self.anchor, *(t for t in watch.ends if t.is_leaf and t.requires_grad)]
                torch.autograd.grad(losses.sum(), ends, allow_unused=True)
        return losses.detach()

    def _visit(self, visit: Visit) -> Any:
        if all(root in self.plan.without_rule for root in visit.roots):
            return visit.output
        reason = self._deviation(visit)
        if reason is not None:
            return self._reject(visit, reason)
        dim = self.plan.batch_dims[visit.key]
        if dim is None:
            return None
        if visit.name == "scaled_dot_product_attention":
            return self._expand_mask(visit)
        uses = visit.uses(Call(visit.output.detach(), dim, self.size))
        if uses is None:
            return self._reject(visit, "has no rule")
        return self._tap(visit, visit.output, uses, [] if visit.name in _INPUT_UNUSED else visit.inputs)

    def _deviation(self, visit: Visit) -> str | None:
        """Return how a call deviates from the plan, in words that follow the function's name; None if it does not."""
        if self.plan.functions.get(visit.key) != visit.name:
            return "has an output in which the examples of the batch could not be located"
        if visit.dependence is Dependence.MOVED:
            return "receives examples that were moved or selected by values of the batch"
        dim = self.plan.batch_dims[visit.key]
        if dim is None:
            return None if visit.dependence is Dependence.NONE else "receives only some examples of the batch"
        if not isinstance(visit.output, Tensor):
            return "returns several outputs"
        length = visit.output.shape[dim]
        if length % self.size or (visit.key in self.plan.unmerged and length != self.size):
            return "returns an output of another length per example than while planning"
        return None

    def _reject(self, visit: Visit, reason: str) -> Any:
        """Leave the parameters of a call to another engine; if the plan was checked already, raise UnplannedError."""
        if self.plan.checked:
            raise UnplannedError(f"{visit.name} {reason}", visit.roots)
        self.without_rule.update(dict.fromkeys(visit.roots, f"{visit.name} {reason}"))
        return visit.output

    def _expand_mask(self, visit: Visit) -> Any:
        """Expand a learned attention bias over the examples, and tap the expanded tensor."""
        (key,) = visit.found
        mask = next(t for t in tensors_in(visit.args, visit.kwargs) if id(t) == key)
        shape = (self.size, *(1,) * (3 - mask.ndim), *mask.shape[max(0, mask.ndim - 3) :])
        if mask.ndim > 4 or (mask.ndim == 4 and len(mask) != 1) or len(visit.inputs[0]) != self.size:
            return self._reject(visit, "has no rule")
        expanded = mask.expand(shape)
        call = Call(expanded, 0, self.size)
        expanded = self._tap(visit, expanded, [(mask, lambda b: Direct(call.sum_to(b, mask.shape)))], [])
        return visit.call_with({key: expanded})

    def _tap(self, visit: Visit, output: Tensor, uses: list, reads: list[Tensor]) -> Tensor:
        if not output.requires_grad:
            output = _Root.apply(output, self.anchor)
        versions = [t._version for t in reads]
        targets = [(visit.found[id(value)], make) for value, make in uses]
        name, roots, receive = visit.name, visit.roots, self.receive
        for root in roots:
            self.sent[root] = self.sent.get(root, 0) + 1

        # A reference to the visit would be a cycle (visit, output, hook) that the garbage collector cannot free.
        def send(gradient: Tensor) -> None:
            if [t._version for t in reads] != versions:
                raise UnplannedError(f"{name} has an input that was modified in place after the call", roots)
            for watched, make in targets:
                receive(watched, make(gradient))
            for held in (targets, reads, versions):
                held.clear()

        output.register_hook(send)
        return output


class _Root(torch.autograd.Function):
    """Identity that makes a tensor require gradients, by a dummy input at which the backward pass ends."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, anchor: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        return None, None


def parameter_gradients(watched: Watched, form: LayerGradients) -> Iterator[tuple[str, LayerGradients]]:
    """Yield the gradients of the parameters that a watched tensor was computed from."""
    is_matrix = isinstance(form, Outer) and form.groups == 1
    if watched.transposed is False or (watched.transposed and is_matrix):
        (root,) = watched.leaves
        yield root, form.transposed() if watched.transposed else form  # type: ignore[attr-defined]
        return
    shadow = watched.shadow
    for root, leaf in watched.leaves.items():

        def write(start: int, stop: int, leaf: Tensor = leaf) -> Tensor:
            gradients = form.write(start, stop).reshape(stop - start, *shadow.shape).to(shadow.dtype)
            with torch.enable_grad():
                (found,) = torch.autograd.grad(shadow, leaf, gradients, is_grads_batched=True, retain_graph=True)
            return found.reshape(stop - start, leaf.numel())

        yield root, OnDemand(write, form.examples, leaf.nbytes + shadow.nbytes)
