"""Layerwise reverse mode: one forward and one backward pass per batch, and never a whole per-example gradient.

Each use of a parameter yields the gradients of all examples as a form; the form is multiplied with the parameter's
piece of the directions and dropped before the backward pass continues. Parameters without a rule use another engine.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from eigentrace.data.batch import select
from eigentrace.errors import NumericalError, UnsupportedError
from eigentrace.gradients.layer_gradients import Direct, LayerGradients
from eigentrace.gradients.outer_products import Outer, square_norms
from eigentrace.gradients.taps import Plan, Taps, UnplannedError, parameter_gradients, survey
from eigentrace.gradients.watch import READ_MANY, Watched
from eigentrace.projection.compiled_pass import CompiledPass
from eigentrace.projection.directions import DensePart, NarrowedDirections, Part, apply
from eigentrace.projection.engine import Engine, Gather, Job, Projection
from eigentrace.task.task import Values

# Examples that planning looks at, at first and when a later batch shows something new.
_LOOKED_AT, _LOOKED_AT_AGAIN = 3, 32
# Largest disagreement with ordinary gradients, relative to the parameter's own or to its share of the whole.
_CHECK_TOL = {torch.float64: 1e-6, torch.float32: 1e-2}
_BF16_CHECK_TOL = 0.2
_SMALL_SHARE = 1e-2
# What rounding may do between a batch and one of its examples by itself, to gradients and to losses.
_AUDIT_TOL, _BF16_AUDIT_TOL = {torch.float64: 1e-6, torch.float32: 1e-3}, 0.05
_SAME_LOSS = 1e-2
# Small gradients that are put aside to be multiplied together: 256 MiB.
_MOST_HELD = 2**28
# The first batches, all of which are audited.
_ALL_AUDITED = 2


@dataclass
class Collected:
    """What one pass gathers for a batch."""

    job: Job
    features: Tensor  # (B, K)
    squares: Tensor | None  # (B,)
    budget: int
    uses: Mapping[str, int]
    skipped: Mapping[str, str]
    gather: Gather | None = None
    waiting: dict[str, list[LayerGradients]] = field(default_factory=dict)
    small: dict[str, Tensor] = field(default_factory=dict)

    def receive(self, watched: Watched, form: LayerGradients) -> None:
        """Multiply a gradient with its piece of the directions; keep it only while it waits for others."""
        for name, own in parameter_gradients(watched, form):
            if name in self.skipped:
                continue
            if self.gather is not None:
                self.gather.receive(name, own)
            if isinstance(own, Direct) and self.uses[name] == 1:
                self._hold(name, own)
            elif self.squares is not None and self.uses[name] == 1 and isinstance(own, Outer):
                self._multiply_and_square(own, list(self.job.directions.parts(name)))
            else:
                self._multiply(own, self.job.directions.parts(name))
                if self.squares is not None:
                    self._wait(name, own)

    def finish(self) -> None:
        """Multiply what is held, and take the norms of what never got all the gradients it was waiting for."""
        self._release()
        if self.gather is not None:
            self.gather.finish()
        for name in list(self.waiting):
            self._settle(name)

    def _hold(self, name: str, form: Direct) -> None:
        """Put a small gradient aside: a hundred of them side by side are one product instead of a hundred."""
        self.small[name] = form.value
        if sum(value.nbytes for value in self.small.values()) > min(self.budget, _MOST_HELD):
            self._release()

    def _release(self) -> None:
        groups: dict[int, list[tuple[Tensor, Tensor]]] = {}
        for name, value in self.small.items():
            for part in self.job.directions.parts(name):
                if isinstance(part, DensePart):
                    groups.setdefault(part.offset, []).append((value, part.matrix))
                else:
                    part.add(Direct(value), self.features, self.budget)
        for offset, pairs in groups.items():
            values, directions = (torch.cat(side, dim=1) for side in zip(*pairs, strict=True))
            DensePart(directions, offset).add(Direct(values), self.features, self.budget)
        if self.squares is not None and self.small:
            everything = Direct(torch.cat(list(self.small.values()), dim=1))
            self.squares += everything.square_norms(self.budget).to(self.squares.dtype)
        self.small.clear()

    def _multiply(self, form: LayerGradients, parts: Iterable[Part]) -> None:
        for part in parts:
            part.add(form, self.features, self.budget)

    def _multiply_and_square(self, form: Outer, parts: list[Part]) -> None:
        if len(parts) == 1 and isinstance(parts[0], DensePart):
            found, squares = form.dot_and_square_norms(parts[0].matrix, self.budget)
            parts[0].put(found, self.features)
        else:
            self._multiply(form, parts)
            squares = form.square_norms(self.budget)
        self.squares += squares.to(self.squares.dtype)  # type: ignore[operator,union-attr]

    def _wait(self, name: str, form: LayerGradients) -> None:
        together = self.waiting.setdefault(name, [])
        together.append(form)
        if len(together) == self.uses[name]:
            self._settle(name)

    def _settle(self, name: str) -> None:
        self.squares += square_norms(self.waiting.pop(name), self.budget).to(self.squares.dtype)  # type: ignore[operator,union-attr]


@dataclass
class Way:
    """One way in which the model was seen to treat its batches, and what follows from it."""

    plan: Plan
    rest: Engine | None
    """For the parameters without a rule, if there are any."""
    compiled: CompiledPass

    def __call__(self, job: Job, batch: Any, size: int) -> Projection:
        """Project every example of the batch on the parameters that have rules."""
        run = self.compiled if job.compute.compile else self.plainly
        return run(job, batch, size)

    def plainly(self, job: Job, batch: Any, size: int) -> Projection:
        """Do so without compiling anything."""
        return tapped(self.plan, job, batch, size)

    def with_rest(self, job: Job, batch: Any, size: int, found: Projection) -> Projection:
        """Add what the other parameters contribute."""
        if self.rest is None:
            return found
        other = self.rest(narrowed(job, list(self.plan.without_rule)), batch, size)
        squares = found.squares() + other.squares() if job.norms else None
        features = found.features + other.features
        return replace(found, features=features, square_norms=squares, losses=other.losses, is_whole=other.is_whole)


class Layerwise:
    """The engine for one job: it plans on the first batch it sees, and again whenever the model does something new.

    Args:
        rest: Makes the engine for a job of the parameters without a rule.
    """

    __name__ = "layerwise"

    def __init__(self, rest: Callable[[Job], Engine]) -> None:
        self._make_rest = rest
        self._batches = 0
        self._all_audited = True
        self._ways: list[Way] = []

    def __call__(self, job: Job, batch: Any, size: int) -> Projection:
        """Project every example of the batch."""
        for way in list(self._ways):
            if way.plan.distinct >= min(size, _LOOKED_AT):
                try:
                    found = way(job, batch, size)
                except UnplannedError:
                    continue
                self._ways.remove(way)
                self._ways.insert(0, way)
                break
        else:
            found = self._in_a_new_way(job, batch, size)
        self._audit(job, batch, size, found)
        return self._ways[0].with_rest(job, batch, size, found)

    def _in_a_new_way(self, job: Job, batch: Any, size: int) -> Projection:
        """Plan on this batch; what its examples do not show while planning is left to another engine."""
        known: dict[str, str] = {}
        while True:
            way = self._plan(job, batch, size, known)
            try:
                found = way(job, batch, size)
            except UnplannedError as error:
                if known.keys() >= set(error.roots):
                    raise UnsupportedError(error.message) from None
                known.update(dict.fromkeys(error.roots, error.message))
            else:
                self._ways.insert(0, way)
                return found

    def _plan(self, job: Job, batch: Any, size: int, known: Mapping[str, str]) -> Way:
        try:
            plan = make_plan(job, batch, size, known, _LOOKED_AT_AGAIN if self._ways else _LOOKED_AT)
        except torch.OutOfMemoryError:
            if size > 1:
                raise
            raise UnsupportedError("planning needs room for two examples at a time") from None
        job.task.note_engines(plan.without_rule)
        if plan.without_rule.keys() >= job.task.params.keys():
            reasons = sorted(set(plan.without_rule.values()))
            raise UnsupportedError(f"no parameter has a layer rule ({'; '.join(reasons)})")
        rest = self._make_rest(narrowed(job, list(plan.without_rule))) if plan.without_rule else None
        return Way(plan, rest, CompiledPass(lambda job, batch, size: tapped(plan, job, batch, size)))

    def _audit(self, job: Job, batch: Any, size: int, found: Projection) -> None:
        """Compare examples of the 1st, 2nd, 4th, 8th, … batch with themselves alone, where nothing can be confused."""
        self._batches += 1
        # A model that reads lists of numbers out of its batch may sort by them, unseen: every batch is looked at then.
        due = not self._batches & (self._batches - 1) or bool(found.read & READ_MANY)
        if size == 1:
            return
        if not due:
            self._all_audited = False
            return
        listed = bool(found.read & READ_MANY)
        several = listed or self._batches <= _ALL_AUDITED
        for example in {0, size - 1, self._batches % size} if several else {self._batches % size}:
            # Among copies of itself an example meets the same shapes and kernels: what rounding did is the same, too.
            if (
                not self._is_as_trained(job, batch, size, found, example)
                and self._differs(job, batch, size, found, example, 1)
                and self._differs(job, batch, size, found, example, size)
            ):
                self._give_up(
                    f"example {example} of batch {self._batches} has other gradients among the {size} than by itself: "
                    "the model moves examples in a way that rules cannot follow"
                )

    def _is_as_trained(self, job: Job, batch: Any, size: int, found: Projection, example: int) -> bool:
        """Tell whether an example's numbers are those of its gradient alone, taken as in training.

        That is the whole truth about an example and costs less than a tapped pass. Where it says no, rounding may be
        the reason (bfloat16 and TF32 round both in their own ways), and tapped passes decide.
        """
        task, without = job.task, self._ways[0].plan.without_rule
        if task.is_bf16 or 2 * task.layout.numel * task.layout.dtype.itemsize > job.budget:
            return False
        alone = _gradients(job, select(batch, slice(example, example + 1), size))
        # Last ones first, as a backward pass meets them: directions that are streamed come in that order.
        ruled = {name: alone[name][None] for name in reversed(alone) if name not in without}
        if not ruled:
            return False
        norm = torch.stack([torch.linalg.vector_norm(g, dtype=task.layout.dtype) for g in ruled.values()]).norm()
        features = apply(job.directions, ruled)[0].to(task.layout.dtype)
        mine = features if found.square_norms is None else torch.cat([features, norm[None]])
        return not _is_other(mine, found, example, _AUDIT_TOL[task.layout.dtype])

    def _differs(self, job: Job, batch: Any, size: int, found: Projection, example: int, copies: int) -> bool:
        """Tell whether copies of an example by themselves give other numbers than it got in its batch."""
        job = replace(job, gather=None)
        try:
            own = self._ways[0].plainly(job, select(batch, torch.full((copies,), example), size), copies)
        except UnplannedError:
            return False  # by itself it is treated in another way
        if float((own.losses[0] - found.losses[example]).abs()) > _SAME_LOSS * float(found.losses.abs().max()):
            return False  # something that all examples share was cut up with them: this is another example
        tol = _BF16_AUDIT_TOL if job.task.is_bf16 else _AUDIT_TOL[job.task.layout.dtype]
        return _is_other(_with_norms(own)[0], found, example, tol)

    def _give_up(self, why: str) -> NoReturn:
        """Leave the job to other engines while every batch so far was looked at; later, nothing less than stop."""
        if self._all_audited:
            raise UnsupportedError(why)
        raise NumericalError(f"{why}. Earlier batches may be wrong, too: use Compute(engine='reverse').")


def _with_norms(found: Projection) -> Tensor:  # (B, K + 1)
    if found.square_norms is None:
        return found.features
    return torch.cat([found.features, found.square_norms.sqrt()[:, None]], dim=1)


def _is_other(mine: Tensor, found: Projection, example: int, tol: float) -> bool:  # (K + 1,)
    """Compare an example's numbers with those it got in its batch."""
    everything = _with_norms(found)
    scale = float(everything.abs().max()) if everything.numel() else 0.0
    return float((mine - everything[example]).norm()) > tol * max(float(mine.norm()), _SMALL_SHARE * scale)


def tapped(plan: Plan, job: Job, batch: Any, size: int) -> Projection:
    """Project every example of a batch by one forward and one backward pass, as planned."""
    layout = job.task.layout
    features = torch.zeros(size, job.directions.count, dtype=layout.dtype, device=layout.device)
    squares = torch.zeros(size, dtype=layout.dtype, device=layout.device) if job.norms else None
    gather = None if job.gather is None else job.gather(plan.uses, plan.without_rule)
    collected = Collected(job, features, squares, job.budget, plan.uses, plan.without_rule, gather)
    taps = Taps(plan, size, layout.device, collected.receive)
    values, outputs = job.task.detached(), list[Tensor | None]()

    def function(part: Any) -> Tensor:
        losses, found = job.evaluate(values, part)
        outputs.append(found)
        return losses

    with kernels(job):
        losses = taps.run(job.task.params, batch, function, job.task.is_bf16)
    collected.finish()
    gathered = () if gather is None else (gather,)
    return Projection(features, squares, losses, taps.read, gathered, outputs[0], is_whole=True)


def kernels(job: Job) -> AbstractContextManager[None]:
    """Allow fused attention where rounding is coarse anyway: one derivative is all this engine needs."""
    if not job.task.is_bf16:
        return nullcontext()
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


def narrowed(job: Job, names: list[str]) -> Job:
    """Return the same job for some of the parameters, the others held where they are."""
    task = job.task.narrowed(names)
    everything = job.task.params

    def function(values: Values, batch: Any) -> Tensor:
        return job.function({**everything, **values}, batch)

    directions = NarrowedDirections(job.directions, job.task.layout, task.layout)
    return replace(job, task=task, function=function, directions=directions, outputs=False)


def make_plan(job: Job, batch: Any, size: int, known: Mapping[str, str], most: int = _LOOKED_AT) -> Plan:
    """See on a few examples where the batch lies in each use of a parameter, and check every rule against gradients.

    Args:
        job: What is differentiated.
        batch: A placed batch of `size` examples.
        size: B.
        known: Parameters already known to have no rule.
        most: How many examples to look at. The same ones are seen once and twice over, so that a model which looks at
            its batch (are all masks full?) does the same for both.
    """
    params, values = job.task.params, job.task.detached()
    count = min(size, most)
    index = torch.arange(count) * (size - 1) // max(1, count - 1)
    part, twice = (select(batch, chosen, size) for chosen in (index, torch.cat([index, index])))
    with kernels(job):
        once = survey(params, part, lambda b: job.function(values, b), job.task.is_bf16)
        try:
            again = survey(params, twice, lambda b: job.function(values, b), job.task.is_bf16)
        except (ValueError, IndexError) as error:
            # Its examples lie elsewhere than along the first dimension: other engines need no batch of another size.
            raise UnsupportedError(f"the same examples twice over fail ({error})") from error
        plan = Plan.of(once, again, len(index), 2 * len(index), min(size, _LOOKED_AT))
        return _checked(job, replace(plan, without_rule=known), part, len(index))


def _checked(job: Job, plan: Plan, part: Any, size: int) -> Plan:
    """Compare tapped gradients with ordinary ones; a parameter that disagrees, or has no rule, is left to others."""
    forms: dict[str, list[LayerGradients]] = {name: [] for name in job.task.params}

    def receive(watched: Watched, form: LayerGradients) -> None:
        for name, own in parameter_gradients(watched, form):
            forms[name].append(own)

    taps = Taps(plan, size, job.task.layout.device, receive)
    values, function = job.task.detached(), job.function
    try:
        taps.run(job.task.params, part, lambda batch: function(values, batch), job.task.is_bf16)
    except UnplannedError as error:
        known = {**plan.without_rule, **taps.without_rule, **dict.fromkeys(error.roots, error.message)}
        return _checked(job, replace(plan, without_rule=known), part, size)
    without = dict(plan.without_rule) | taps.without_rule
    for example in sorted({0, size // 2, size - 1}):
        gradients = _gradients(job, select(part, slice(example, example + 1), size))
        whole = torch.stack([torch.zeros(()), *(g.float().norm().cpu() for g in gradients.values())]).norm()
        for name, value in job.task.params.items():
            if name in gradients and name not in taps.sent:
                without.setdefault(name, "it is used where no function shows it")
            elif name in taps.sent and name not in without:
                gradient = gradients.get(name, torch.zeros_like(value))
                if not _agrees(job, forms[name], example, gradient, whole):
                    without[name] = "the rules disagree with its gradient"
    uses = {name: count for name, count in taps.sent.items() if name not in without}
    return replace(plan, without_rule=without, uses=uses, checked=True)


def _gradients(job: Job, one: Any) -> dict[str, Tensor]:
    """Differentiate one example as in training; parameters that it does not reach are left out."""
    with torch.enable_grad():
        leaves = {name: value.detach().requires_grad_() for name, value in job.task.params.items() if value.numel()}
        loss = job.function({**job.task.params, **leaves}, one).sum()
        if not loss.requires_grad:
            return {}
        found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return {name: g for name, g in zip(leaves, found, strict=True) if g is not None}


def _agrees(job: Job, forms: list[LayerGradients], example: int, gradient: Tensor, whole: Tensor) -> bool:
    wide = torch.promote_types(gradient.dtype, torch.float32)
    expected = gradient.reshape(1, -1).to(wide)
    found = sum((form.write(example, example + 1).to(wide) for form in forms), torch.zeros_like(expected))
    tol = _BF16_CHECK_TOL if job.task.is_bf16 or gradient.dtype == torch.bfloat16 else _CHECK_TOL[wide]
    share = _SMALL_SHARE * whole * (expected.numel() / job.task.layout.numel) ** 0.5
    return float((found - expected).norm()) <= tol * max(float(expected.norm()), float(share))
