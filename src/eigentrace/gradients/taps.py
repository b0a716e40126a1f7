"""Tap the gradients that flow back to each use of a parameter, where planning has found the examples to lie."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from eigentrace.gradients.layer_gradients import Direct, LayerGradients, Written
from eigentrace.gradients.outer_products import Outer
from eigentrace.gradients.rules import Call
from eigentrace.gradients.watch import Key, Trace, Visit, Watch, Watched, tensors_in, traced

# Functions whose rules do not read their other input, which may be overwritten afterwards.
_READ_NOTHING = frozenset({"add", "add_", "__iadd__", "__radd__", "sub", "sub_", "expand", "repeat", "where"})

Receive = Callable[[Watched, LayerGradients], None]


class UnplannedError(RuntimeError):
    """The model did something with parameters that it did not do while planning."""

    def __init__(self, message: str, roots: Sequence[str]) -> None:
        super().__init__(message)
        self.message, self.roots = message, roots


@dataclass(frozen=True)
class Seen:
    """A call as it came by while planning."""

    function: str
    shapes: tuple[torch.Size, ...]


@dataclass(frozen=True)
class Plan:
    """Where the examples of a batch lie in what each use of a parameter gives."""

    batch_dims: Mapping[Key, int | None]
    functions: Mapping[Key, str]
    alone: frozenset[Key]
    """Uses in which each example had one row: more may then lie in an order that was not checked."""
    distinct: int
    """Different examples the plan was checked on."""
    without_rule: Mapping[str, str] = field(default_factory=dict)
    """Parameters that no rule covers, with the reason."""
    uses: Mapping[str, int] = field(default_factory=dict)
    """How often each of the others sends a gradient."""
    checked: bool = False

    @staticmethod
    def of(few: Mapping[Key, Seen], more: Mapping[Key, Seen], num_few: int, num_more: int, distinct: int) -> "Plan":
        """Compare what came by for two sizes of batch: what grew with it holds the examples."""
        dims: dict[Key, int | None] = {}
        for key in few.keys() & more.keys():
            a, b = few[key], more[key]
            if a.function == b.function and len(a.shapes) == len(b.shapes):
                found = {_grown(s, t, num_few, num_more) for s, t in zip(a.shapes, b.shapes, strict=True)}
                if len(found) == 1 and (dim := found.pop()) != _UNCLEAR:
                    dims[key] = dim
        alone = {key for key, dim in dims.items() if dim is not None and few[key].shapes[0][dim] == num_few}
        return Plan(dims, {key: few[key].function for key in dims}, frozenset(alone), distinct)


_UNCLEAR = -1


def _grown(few: torch.Size, more: torch.Size, num_few: int, num_more: int) -> int | None:
    """Return the one dimension that grew in proportion, None if none did, or _UNCLEAR."""
    if few == more:
        return None
    if len(few) != len(more):
        return _UNCLEAR
    grown = [d for d, (a, b) in enumerate(zip(few, more, strict=True)) if a != b]
    return grown[0] if len(grown) == 1 and few[grown[0]] * num_more == more[grown[0]] * num_few else _UNCLEAR


def survey(params: Mapping[str, Tensor], batch: Any, run: Callable[[Any], Any], fused: bool) -> dict[Key, Seen]:
    """Write down what every use of a parameter gives, taking nothing."""
    seen: dict[Key, Seen] = {}

    def visit(visit: Visit) -> Any:
        shapes = tuple(t.shape for t in tensors_in((visit.output,)))
        seen.update(dict.fromkeys(visit.keys, Seen(visit.name, shapes)))
        return None if visit.trace is Trace.APART else visit.output

    with torch.enable_grad(), Watch(params, visit, fused):
        run(traced(batch))
    return seen


class Taps:
    """Visits calls of a planned model and sends the gradient of each use on its way back to a receiver."""

    def __init__(self, plan: Plan, size: int, device: torch.device, receive: Receive) -> None:
        self.plan, self.size, self.receive = plan, size, receive
        self.anchor = torch.zeros((), device=device, requires_grad=True)
        self.without_rule: dict[str, str] = {}
        self.sent: dict[str, int] = {}
        self.read: frozenset[str] = frozenset()

    def run(
        self, params: Mapping[str, Tensor], batch: Any, function: Callable[[Any], Tensor], fused: bool
    ) -> Tensor:  # (B,)
        """Evaluate losses under the taps, and differentiate their sum."""
        with torch.enable_grad():
            watch = Watch(params, self._visit, fused)
            with watch:
                losses = function(traced(batch))
            self.read = frozenset(watch.read)
            if losses.requires_grad:
                ends = [self.anchor, *(t for t in watch.ends if t.is_leaf and t.requires_grad)]
                torch.autograd.grad(losses.sum(), ends, allow_unused=True)
        return losses.detach()

    def _visit(self, visit: Visit) -> Any:
        if all(root in self.plan.without_rule for root in visit.roots):
            return visit.output
        why = self._objection(visit)
        if why is not None:
            return self._refuse(visit, why)
        dim = self.plan.batch_dims[visit.key]
        if dim is None:
            return None
        if visit.name == "scaled_dot_product_attention":
            return self._spread_mask(visit)
        uses = visit.uses(Call(visit.output.detach(), dim, self.size))
        if uses is None:
            return self._refuse(visit, "has no rule")
        return self._tap(visit, visit.output, uses, [] if visit.name in _READ_NOTHING else visit.inputs)

    def _objection(self, visit: Visit) -> str | None:
        """Say why the plan does not hold for a call, if it does not."""
        if self.plan.functions.get(visit.key) != visit.name:
            return "does not keep the examples of a batch apart"
        if visit.trace is Trace.MOVED:
            return "meets examples that were picked by numbers of the batch"
        dim = self.plan.batch_dims[visit.key]
        if dim is None:
            return None if visit.trace is Trace.APART else "takes single examples"
        if not isinstance(visit.output, Tensor):
            return "gives several results"
        length = visit.output.shape[dim]
        if length % self.size or (visit.key in self.plan.alone and length != self.size):
            return "gives another number of rows per example than before"
        return None

    def _refuse(self, visit: Visit, why: str) -> Any:
        if self.plan.checked:
            raise UnplannedError(f"{visit.name} {why}", visit.roots)
        self.without_rule.update(dict.fromkeys(visit.roots, f"{visit.name} {why}"))
        return visit.output

    def _spread_mask(self, visit: Visit) -> Any:
        """Hand a bias of attention scores to each example, and tap it there."""
        (key,) = visit.found
        mask = next(t for t in tensors_in(visit.args, visit.kwargs) if id(t) == key)
        shape = (self.size, *(1,) * (3 - mask.ndim), *mask.shape[max(0, mask.ndim - 3) :])
        if mask.ndim > 4 or (mask.ndim == 4 and len(mask) != 1) or len(visit.inputs[0]) != self.size:
            return self._refuse(visit, "has no rule")
        spread = mask.expand(shape)
        call = Call(spread, 0, self.size)
        spread = self._tap(visit, spread, [(mask, lambda b: Direct(call.broadcast(b, mask.shape)))], [])
        return visit.with_swapped({key: spread})

    def _tap(self, visit: Visit, output: Tensor, uses: list, reads: list[Tensor]) -> Tensor:
        if not output.requires_grad:
            output = _Root.apply(output, self.anchor)
        versions = [t._version for t in reads]
        targets = [(visit.found[id(value)], make) for value, make in uses]
        name, roots, receive = visit.name, visit.roots, self.receive
        for root in roots:
            self.sent[root] = self.sent.get(root, 0) + 1

        # It must not refer to the visit, which holds the output, which holds this hook: nothing would free the circle.
        def send(gradient: Tensor) -> None:
            if [t._version for t in reads] != versions:
                raise UnplannedError(f"{name} met an input that was overwritten after it was used", roots)
            for watched, make in targets:
                receive(watched, make(gradient))
            for held in (targets, reads, versions):
                held.clear()

        output.register_hook(send)
        return output


class _Root(torch.autograd.Function):
    """Gives a tensor that depends on no differentiated number a place where the backward pass can end."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, anchor: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        return None, None


def returned(watched: Watched, form: LayerGradients) -> Iterator[tuple[str, LayerGradients]]:
    """Pass a gradient of something made of parameters back to the parameters it was made of."""
    is_matrix = isinstance(form, Outer) and form.groups == 1
    if watched.turned is False or (watched.turned and is_matrix):
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
