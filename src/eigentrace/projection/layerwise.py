"""Layerwise reverse mode: one forward and one backward pass per batch, without full per-example gradients.

Each use of a parameter yields the gradients of all examples in a compact form, which is multiplied by the parameter's
part of the directions and freed before the backward pass continues. Parameters without a rule use another engine.
"""

import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
from eigentrace.gradients.watch import Watched
from eigentrace.projection.compiled_pass import CompiledPass
from eigentrace.projection.directions import DensePart, NarrowedDirections, Part, apply
from eigentrace.projection.engine import Engine, Gather, Job, Projection
from eigentrace.task.task import Values

# Number of examples used for planning: at first, and again when a later batch deviates from the plan.
_PLANNED_ON, _REPLANNED_ON = 3, 32
# Maximum difference from ordinary gradients, relative to the parameter's gradient or to its share of the full one.
_CHECK_TOL = {torch.float64: 1e-6, torch.float32: 1e-2}
_BF16_CHECK_TOL = 0.2
_SMALL_SHARE = 1e-2
# Tolerances for rounding differences between an example in its batch and alone, for gradients and for losses.
_AUDIT_TOL, _BF16_AUDIT_TOL = {torch.float64: 1e-6, torch.float32: 1e-3}, 0.05
_SAME_LOSS = 1e-2
# Bytes of small gradients that are collected to be multiplied together: 256 MiB.
_MOST_COLLECTED = 2**28
# Several examples are audited in the first batches, and in the first batch of each of the first traces; then one.
_THOROUGH_BATCHES, _THOROUGH_TRACES = 2, 8
# Other batches are audited at random, as long as audits take at most this share of the time.
_AUDIT_SHARE = 0.03


@dataclass
class Accumulator:
    """Features, squared norms and gathered gradients of a batch, accumulated during one backward pass."""

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
        """Multiply a gradient by its part of the directions; keep it only if its norm needs other uses too."""
        for name, own in parameter_gradients(watched, form):
            if name in self.skipped:
                continue
            if self.gather is not None:
                self.gather.receive(name, own)
            if isinstance(own, Direct) and self.uses[name] == 1:
                self._collect(name, own)
            elif self.squares is not None and self.uses[name] == 1 and isinstance(own, Outer):
                self._multiply_and_square(own, list(self.job.directions.parts(name)))
            else:
                self._multiply(own, self.job.directions.parts(name))
                if self.squares is not None:
                    self._add_norms_when_complete(name, own)

    def finish(self) -> None:
        """Multiply what is collected, and add the norms of parameters with fewer gradients than planned."""
        self._multiply_collected()
        if self.gather is not None:
            self.gather.finish()
        for name in list(self.waiting):
            self._add_norms(name)

    def _collect(self, name: str, form: Direct) -> None:
        """Collect a small gradient: a hundred of them are then multiplied by one matrix product."""
        self.small[name] = form.value
        if sum(value.nbytes for value in self.small.values()) > min(self.budget, _MOST_COLLECTED):
            self._multiply_collected()

    def _multiply_collected(self) -> None:
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
            concatenated = Direct(torch.cat(list(self.small.values()), dim=1))
            self.squares += concatenated.square_norms(self.budget).to(self.squares.dtype)
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

    def _add_norms_when_complete(self, name: str, form: LayerGradients) -> None:
        forms = self.waiting.setdefault(name, [])
        forms.append(form)
        if len(forms) == self.uses[name]:
            self._add_norms(name)

    def _add_norms(self, name: str) -> None:
        self.squares += square_norms(self.waiting.pop(name), self.budget).to(self.squares.dtype)  # type: ignore[operator,union-attr]


@dataclass
class PlannedPass:
    """A pass by a plan for one way in which the model processes its batches, compiled if requested."""

    plan: Plan
    rest: Engine | None
    """The engine for the parameters without a rule, if there are any."""
    compiled: CompiledPass

    def __call__(self, job: Job, batch: Any, size: int) -> Projection:
        """Project every example of the batch on the parameters that have rules."""
        run = self.compiled if job.compute.compile else self.eager
        return run(job, batch, size)

    def eager(self, job: Job, batch: Any, size: int) -> Projection:
        """Project without compilation."""
        return tapped(self.plan, job, batch, size)

    def add_rest(self, job: Job, batch: Any, size: int, found: Projection) -> Projection:
        """Add the contributions of the parameters without a rule."""
        if self.rest is None:
            return found
        other = self.rest(narrowed(job, list(self.plan.without_rule)), batch, size)
        squares = found.squares() + other.squares() if job.norms else None
        features = found.features + other.features
        return replace(found, features=features, square_norms=squares, losses=other.losses, is_whole=other.is_whole)


class Layerwise:
    """The layerwise engine for one job: plans on the first batch, and again if the model deviates from all plans.

    Args:
        rest: Returns the engine for a job on the parameters without a rule.
    """

    __name__ = "layerwise"

    def __init__(self, rest: Callable[[Job], Engine]) -> None:
        self._make_rest = rest
        self._passes: list[PlannedPass] = []
        self._audits = Audits()

    def __call__(self, job: Job, batch: Any, size: int) -> Projection:
        """Project every example of the batch."""
        for planned in list(self._passes):
            if planned.plan.distinct >= min(size, _PLANNED_ON):
                try:
                    found = planned(job, batch, size)
                except UnplannedError:
                    continue
                self._passes.remove(planned)
                self._passes.insert(0, planned)
                break
        else:
            found = self._with_new_plan(job, batch, size)
        self._audit(job, batch, size, found)
        return self._passes[0].add_rest(job, batch, size, found)

    def _with_new_plan(self, job: Job, batch: Any, size: int) -> Projection:
        """Plan on this batch and project it; parameters that deviate even so are left to another engine."""
        known: dict[str, str] = {}
        while True:
            planned = self._plan(job, batch, size, known)
            try:
                found = planned(job, batch, size)
            except UnplannedError as error:
                if known.keys() >= set(error.roots):
                    raise UnsupportedError(error.message) from None
                known.update(dict.fromkeys(error.roots, error.message))
            else:
                self._passes.insert(0, planned)
                return found

    def _plan(self, job: Job, batch: Any, size: int, known: Mapping[str, str]) -> PlannedPass:
        try:
            plan = make_plan(job, batch, size, known, _REPLANNED_ON if self._passes else _PLANNED_ON)
        except torch.OutOfMemoryError:
            if size > 1:
                raise
            raise UnsupportedError("planning needs memory for two examples at a time") from None
        job.task.note_engines(plan.without_rule)
        if plan.without_rule.keys() >= job.task.params.keys():
            reasons = sorted(set(plan.without_rule.values()))
            raise UnsupportedError(f"no parameter has a layer rule ({'; '.join(reasons)})")
        rest = self._make_rest(narrowed(job, list(plan.without_rule))) if plan.without_rule else None
        return PlannedPass(plan, rest, CompiledPass(lambda job, batch, size: tapped(plan, job, batch, size)))

    def _audit(self, job: Job, batch: Any, size: int, found: Projection) -> None:
        """Compare some examples with the same examples alone, in the batches that `Audits` chooses."""
        with self._audits.of(found, size, job.task.layout.device) as examples:
            for example in examples:
                # A batch of copies of the example has the same shapes and kernels, and therefore the same rounding
                # errors.
                if (
                    not self._equals_own_gradient(job, batch, size, found, example)
                    and self._differs_from_copies(job, batch, size, found, example, 1)
                    and self._differs_from_copies(job, batch, size, found, example, size)
                ):
                    self._audits.stop(
                        f"example {example} of batch {self._audits.batches} has other gradients in its batch of {size} "
                        "than alone: the model moves examples in a way that the layer rules cannot follow"
                    )

    def _equals_own_gradient(self, job: Job, batch: Any, size: int, found: Projection, example: int) -> bool:
        """Return whether the projection of an example is that of its gradient alone, computed as in training.

        This is the definitive check and costs less than a tapped pass. If it fails, the reason may be rounding
        (bfloat16 and TF32 round the two differently), and tapped passes decide.
        """
        task, without = job.task, self._passes[0].plan.without_rule
        if task.is_bf16 or 2 * task.layout.numel * task.layout.dtype.itemsize > job.budget:
            return False
        alone = _gradients(job, select(batch, slice(example, example + 1), size))
        # In reverse, the order of a backward pass, in which streamed directions are prefetched.
        with_rule = {name: alone[name][None] for name in reversed(alone) if name not in without}
        if not with_rule:
            return False
        norm = torch.stack([torch.linalg.vector_norm(g, dtype=task.layout.dtype) for g in with_rule.values()]).norm()
        features = apply(job.directions, with_rule)[0].to(task.layout.dtype)
        own = features if found.square_norms is None else torch.cat([features, norm[None]])
        return not _is_different(own, found, example, _AUDIT_TOL[task.layout.dtype])

    def _differs_from_copies(
        self, job: Job, batch: Any, size: int, found: Projection, example: int, copies: int
    ) -> bool:
        """Return whether a batch of copies of an example gives another projection than its own batch."""
        job = replace(job, gather=None)
        try:
            own = self._passes[0].eager(job, select(batch, torch.full((copies,), example), size), copies)
        except UnplannedError:
            return False  # alone, the model processes it differently
        if float((own.losses[0] - found.losses[example]).abs()) > _SAME_LOSS * float(found.losses.abs().max()):
            return False  # a tensor shared by all examples was split with them, so this is not the same example
        tol = _BF16_AUDIT_TOL if job.task.is_bf16 else _AUDIT_TOL[job.task.layout.dtype]
        return _is_different(_with_norms(own)[0], found, example, tol)


@dataclass
class Audits:
    """The choice of the examples that are compared with themselves alone, in case a model moves examples unseen.

    Audited are the 1st, 2nd, 4th, 8th, … batch, every batch in which the model used values that it read in a new way
    (see `eigentrace.gradients.call_trace`), and others at random for a small share of the time.
    """

    batches: int = 0
    _traces: set[bytes | None] = field(default_factory=set)
    _all_known: bool = True
    """Whether all batches were audited, or had the same trace as an audited one."""
    _begun: float = field(default_factory=time.perf_counter)
    _seconds: float = 0.0
    _random: random.Random = field(default_factory=lambda: random.Random(0), repr=False)

    @contextmanager
    def of(self, found: Projection, size: int, device: torch.device) -> Iterator[list[int]]:
        """Choose examples of a batch to compare, and time the comparison."""
        self.batches += 1
        is_new = found.trace is not None and found.trace not in self._traces
        due = is_new or not self.batches & (self.batches - 1)
        if size == 1 or not (due or self._seconds < _AUDIT_SHARE * (time.perf_counter() - self._begun)):
            self._all_known &= size == 1 or found.trace is not None
            yield []
            return
        is_thorough = self.batches <= _THOROUGH_BATCHES or (is_new and len(self._traces) < _THOROUGH_TRACES)
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # so that the time of the pass is not counted
        started = time.perf_counter()
        examples = {self._random.randrange(size)} | ({0, size - 1} if is_thorough else set())
        yield sorted(examples)
        self._seconds += time.perf_counter() - started
        self._traces.add(found.trace)

    def stop(self, reason: str) -> NoReturn:
        """Raise UnsupportedError, to use another engine, if the batches before are right; otherwise NumericalError."""
        # An audit that found nothing may have missed examples if batches were treated in several ways.
        if self._all_known and len(self._traces) <= 1:
            raise UnsupportedError(reason)
        raise NumericalError(f"{reason}. Earlier batches may be wrong too: run again with Compute(engine='reverse').")


def _with_norms(found: Projection) -> Tensor:  # (B, K + 1)
    if found.square_norms is None:
        return found.features
    return torch.cat([found.features, found.square_norms.sqrt()[:, None]], dim=1)


def _is_different(own: Tensor, found: Projection, example: int, tol: float) -> bool:  # (K + 1,)
    """Return whether an example's own features and norm differ from those in its batch."""
    of_batch = _with_norms(found)
    scale = float(of_batch.abs().max()) if of_batch.numel() else 0.0
    return float((own - of_batch[example]).norm()) > tol * max(float(own.norm()), _SMALL_SHARE * scale)


def tapped(plan: Plan, job: Job, batch: Any, size: int) -> Projection:
    """Project every example of a batch by one forward and one backward pass, according to the plan."""
    layout = job.task.layout
    features = torch.zeros(size, job.directions.count, dtype=layout.dtype, device=layout.device)
    squares = torch.zeros(size, dtype=layout.dtype, device=layout.device) if job.norms else None
    gather = None if job.gather is None else job.gather(plan.uses, plan.without_rule)
    accumulator = Accumulator(job, features, squares, job.budget, plan.uses, plan.without_rule, gather)
    taps = Taps(plan, size, layout.device, accumulator.receive)
    values, outputs = job.task.detached(), list[Tensor | None]()

    def function(part: Any) -> Tensor:
        losses, found = job.evaluate(values, part)
        outputs.append(found)
        return losses

    with kernels(job):
        losses = taps.run(job.task.params, batch, function, job.task.is_bf16)
    accumulator.finish()
    gathered = () if gather is None else (gather,)
    return Projection(features, squares, losses, taps.read, taps.trace, gathered, outputs[0], is_whole=True)


def kernels(job: Job) -> AbstractContextManager[None]:
    """Allow fused attention in bfloat16: it supports first derivatives, which suffice here."""
    if not job.task.is_bf16:
        return nullcontext()
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


def narrowed(job: Job, names: list[str]) -> Job:
    """Return the same job for some of the parameters, with the others held constant."""
    task = job.task.narrowed(names)
    all_params = job.task.params

    def function(values: Values, batch: Any) -> Tensor:
        return job.function({**all_params, **values}, batch)

    directions = NarrowedDirections(job.directions, job.task.layout, task.layout)
    return replace(job, task=task, function=function, directions=directions, outputs=False)


def make_plan(job: Job, batch: Any, size: int, known: Mapping[str, str], most: int = _PLANNED_ON) -> Plan:
    """Locate the examples in each use of a parameter by running a few of them, and check all rules against gradients.

    Args:
        job: The function to differentiate, and its task.
        batch: A batch of `size` examples that is on the device.
        size: B.
        known: Parameters already known to have no rule.
        most: Maximum number of examples to use. They are run once, and again repeated twice, so that a model that
            depends on its batch (are all masks full?) behaves the same in both runs.
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
            # The examples may not be along the first dimension; other engines do not change the batch size.
            raise UnsupportedError(f"the model fails on a batch with each example repeated ({error})") from error
        plan = Plan.of(once, again, len(index), 2 * len(index), min(size, _PLANNED_ON))
        return _checked(job, replace(plan, without_rule=known), part, len(index))


def _checked(job: Job, plan: Plan, part: Any, size: int) -> Plan:
    """Compare tapped gradients with ordinary ones; parameters that differ or have no rule are left to other engines."""
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
                without.setdefault(name, "it is used outside of the functions that can be watched")
            elif name in taps.sent and name not in without:
                gradient = gradients.get(name, torch.zeros_like(value))
                if not _agrees(job, forms[name], example, gradient, whole):
                    without[name] = "the layer rules disagree with its gradient"
    uses = {name: count for name, count in taps.sent.items() if name not in without}
    return replace(plan, without_rule=without, uses=uses, checked=True)


def _gradients(job: Job, one: Any) -> dict[str, Tensor]:
    """Differentiate the loss of one example as in training; unused parameters are left out."""
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
