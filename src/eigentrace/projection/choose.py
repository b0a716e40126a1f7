"""Choose an engine, split batches that do not fit in memory, and project a whole dataset."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eigentrace.data import Batch, Data
from eigentrace.data.batch import is_per_example, select, tensors_of
from eigentrace.errors import MemoryLimitError, NumericalError, TaskError, UnsupportedError
from eigentrace.progress import track
from eigentrace.projection.engine import Engine, Job, Projection, joined
from eigentrace.projection.forward import CheckedForward
from eigentrace.projection.layerwise import Layerwise
from eigentrace.projection.reverse import one_by_one, single_gradients, vmapped, vmapped_gradients
from eigentrace.projection.streamed import placed
from eigentrace.settings import counted
from eigentrace.task.checks import check_losses, name_loader, note_batch
from eigentrace.task.company import CompanyCheck, rounding_of_outputs
from eigentrace.task.derivatives import LACKING, first_supported
from eigentrace.task.task import Task

# Batch sizes at which memory is measured for a linear fit, and the largest useful batch.
_TRIED = (4, 16)
_MOST = 1024
# Share of the free memory that a pass may fill: lengths vary, and memory gets fragmented.
_FILLED = 0.7


class Portions:
    """Splits batches into portions that fit in memory, and remembers their size for the next batches.

    Args:
        limit: Maximum number of examples per portion; None for no limit.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.room: int | None = None
        """Maximum number of elements of a portion's largest tensor; None until a batch did not fit."""

    def __call__(self, engine: Engine, job: Job, values: Any, size: int) -> Projection:
        """Project a batch; when memory runs out, halve the portion and continue with the remaining examples."""
        done: list[Projection] = []
        start, width = 0, _width(values, size)
        while start < size:
            at_once = self.limit or size
            if self.room is not None:
                at_once = max(1, min(at_once, self.room // width))
            stop = min(size, start + at_once)
            whole = stop - start == size
            found = _attempt(engine, job, values if whole else select(values, slice(start, stop), size), stop - start)
            if found is not None:
                done.append(found if whole else replace(found, is_whole=False))
                start = stop
                continue
            if stop - start == 1:
                raise MemoryLimitError(
                    f"A single example does not fit in the memory of {job.task.layout.device} in addition to the model "
                    f"and {job.directions.count} directions. Keep fewer directions (fitted.distill), select fewer "
                    "parameters, use Compute(precision='bf16'), or store the directions in host memory "
                    "(Basis(place='host'))."
                )
            self.room = (stop - start) // 2 * width
            torch.cuda.empty_cache()
        return joined(done)


def _width(values: Any, size: int) -> int:
    """Return the number of elements per example of the largest tensor."""
    return max((t.numel() // size for t in tensors_of(values) if is_per_example(t, size)), default=1) or 1


def _attempt(engine: Engine, job: Job, values: Any, size: int) -> Projection | None:
    """Project, or return None if memory runs out: a traceback would keep the tensors of the failed pass alive."""
    try:
        return engine(job, values, size)
    except torch.OutOfMemoryError:
        return None
    except Exception as error:
        note_batch(error, job.task, values)
        raise


def largest_batch(engine: Engine, job: Job, data: Data) -> int | None:
    """Estimate how many examples fit on a GPU, from the peak memory of small batches; None if unknown."""
    device = job.task.layout.device
    if device.type != "cuda" or not data.can_rebatch or len(data) < 2 * _TRIED[-1]:
        return None
    peaks = []
    for count in _TRIED:
        first = data.rebatched(count).first(count)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        # What a job prepares may need more memory than the pass itself: drawing labels keeps several copies of logits.
        values = job.place(first.values, first.rows)
        if _attempt(engine, job, values, count) is None:
            return max(1, count // 2)
        peaks.append(torch.cuda.max_memory_allocated(device) - before)
    each = max(1.0, (peaks[1] - peaks[0]) / (_TRIED[1] - _TRIED[0]))
    # Temporary tensors that are computed in chunks may grow up to the budget at any batch size.
    room = _FILLED * job.compute.free(device) - job.budget - peaks[0]
    fitting = int(max(_TRIED[0], min(_MOST, room / each)))
    return 2 ** (fitting.bit_length() - 1)


# Smallest batch that uses the hardware fully: with n < 8 examples at a time, per-example passes are 8/n times slower.
_FULL_BATCH = 8
# Cost in units of one forward pass: a JVP costs two, a gradient about three.
_JVP_COST, _GRADIENT_COST = 2, 3
# Losses of an example alone and in its batch agree within this share, with bfloat16 parameters too.
_SPLIT_TOL = 5e-2
_PLURAL = {"loss": "losses", "measurement": "measurements"}


def preferred(job: Job) -> tuple[Engine, ...]:
    """Return the engines for a job, best first.

    Layerwise reverse mode costs a few training steps, almost regardless of the number of directions. Forward mode costs
    one JVP per direction and batch regardless of the number of parameters, and computes no norms. Per-example reverse
    mode costs one gradient per example regardless of the number of directions, but few examples fit at a time when the
    model is large.
    """
    others = _without_rules(job)
    if job.compute.engine == "forward":
        if job.norms:
            raise UnsupportedError(
                "Compute(engine='forward') computes no gradient norms, which normalize='gradient' and scores by whole "
                "gradients need. Use Compute(engine='auto'), 'layerwise' or 'reverse'."
            )
        return (CheckedForward(),)
    if job.compute.engine == "reverse":
        return (vmapped, one_by_one)
    layerwise = Layerwise(lambda rest: InTurn(_without_rules(rest)))
    return (layerwise,) if job.compute.engine == "layerwise" else (layerwise, *others)


def note_coverage(task: Task, data: Data) -> None:
    """Plan on a few examples, to record in the task which parameters need a slower engine."""
    batch = data.first(3)
    engine = Layerwise(lambda rest: InTurn(_without_rules(rest)))
    # If no rule applies, or memory does not suffice for three examples, the error is raised when projecting.
    with suppress(*LACKING):
        engine(Job.of(task, "losses"), task.place(batch.values), len(batch))


def _without_rules(job: Job) -> tuple[Engine, ...]:
    if job.norms:
        return (vmapped, one_by_one)
    slowdown = max(1.0, _FULL_BATCH / job.vectors_at_once)
    if _GRADIENT_COST * slowdown <= _JVP_COST * job.directions.count:
        return (vmapped, CheckedForward(), one_by_one)
    return (CheckedForward(), vmapped, one_by_one)


def fitting_batch(job: Job, data: Data) -> int | None:
    """Return the batch size that `project` would choose; None if the data cannot be rebatched."""
    if not data.can_rebatch:
        return None
    if not isinstance(job.compute.batch, str):
        return int(job.compute.batch)
    job = replace(job, directions=placed(job.directions, job.task.layout.device, job.compute))
    largest = largest_batch(InTurn(preferred(job)), job, data) if job.compute.batch == "auto" else None
    return largest or len(data.first(len(data)))


def project(
    job: Job,
    data: Data,
    description: str = "Projecting gradients",
    rows: range | None = None,
    digests: bool = False,
) -> Iterator[tuple[Batch, Projection]]:
    """Run a job on every example of the data, batch by batch, inside the caller's session.

    Args:
        job: What to project.
        data: The examples.
        description: The text of the progress bar.
        rows: Only these, in the same batches as in a pass over all of the data.
        digests: Whether batches include the digests of their examples.
    """
    job = replace(job, directions=placed(job.directions, job.task.layout.device, job.compute))
    batch_size = job.compute.batch
    if not isinstance(batch_size, str):
        data = data.rebatched(int(batch_size))
    engine = InTurn(preferred(job))
    portions = Portions(None if isinstance(batch_size, str) else int(batch_size))
    checked, in_company = SplitCheck(job), CompanyCheck(job.task, job.function, job.name)
    if batch_size == "auto":
        largest = largest_batch(engine, job, data)
        data = data if largest is None else data.rebatched(largest)
    batches = data.batches(rows, digests=digests) if rows is not None or digests else data.batches()
    for batch in track(batches, description, len(data) if rows is None else len(rows), len):
        values = job.place(batch.values, batch.rows)
        try:
            projection = portions(engine, job, values, len(batch))
            _check(batch, values, projection, job)
        except Exception as error:
            name_loader(error, data, batch.values)
            raise
        if not projection.is_whole:
            checked(values, batch, projection.losses)
        in_company(values, batch.rows, projection.losses)
        yield batch, projection


class InTurn:
    """An engine that uses the first of several candidates until it fails on a batch, then the next."""

    def __init__(self, candidates: Sequence[Engine]) -> None:
        self.candidates = list(candidates)
        self._failures: list[str] = []

    def __call__(self, job: Job, batch: Any, size: int) -> Projection:
        """Project every example of the batch."""
        while self.candidates:
            engine = self.candidates[0]
            try:
                return engine(job, batch, size)
            except torch.OutOfMemoryError:
                raise
            except LACKING as error:
                self._failures.append(f"{engine.__name__}: {error}")  # type: ignore[attr-defined]
                self.candidates.pop(0)
        raise UnsupportedError(f"No engine can differentiate this model per example: {' | '.join(self._failures)}")


def gradients(job: Job, data: Data) -> Iterator[Tensor]:  # each (b, P)
    """Yield full per-example gradients, chunk by chunk."""
    task = job.task
    function: Any = None
    checked, in_company = SplitCheck(job), CompanyCheck(task, job.function, job.name)
    for batch in track(data.batches(), "Gradients", len(data), len):
        values = job.place(batch.values, batch.rows)
        losses: list[Tensor] = []
        try:
            function = function or _gradient_function(job, values, len(batch))
            for found in function(job, values, len(batch)):
                start, size = sum(map(len, losses)), len(found.losses)
                here, rows = slice(start, start + size), batch.rows[start:][:size]
                losses.append(found.losses)
                check_losses(found.losses, rows, job.name, task=task, batch=select(values, here, len(batch)))
                flat = task.layout.flatten(found.by_name, batch_dims=1)
                _check_finite(flat.isfinite().all(dim=1), rows, job)
                yield flat
        except Exception as error:
            note_batch(error, task, values)
            name_loader(error, data, batch.values)
            raise
        checked(values, batch, torch.cat(losses))
        in_company(values, batch.rows, torch.cat(losses))


def _gradient_function(job: Job, values: Any, size: int) -> Any:
    """Return the first function that computes gradients of two examples without an error."""
    part = select(values, slice(0, 2), size)
    return first_supported(
        (vmapped_gradients, single_gradients),
        lambda function: list(function(job, part, min(2, size))),
        lambda function: function.__name__,
        "No engine can differentiate this model per example: {}",
    )


class SplitCheck:
    """A check that losses of single examples equal those of the batch, once per pattern of per-example tensors.

    A tensor is split into examples if its first dimension is the batch size. A tensor shared by all examples may have
    that size by coincidence (a T × T mask in a last batch of T examples); splitting it would give wrong gradients.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.seen: set[tuple[bool, ...]] = set()

    def __call__(self, values: Any, batch: Batch, losses: Tensor) -> None:
        """Check a batch unless one with the same pattern of per-example tensors was checked before."""
        pattern = tuple(is_per_example(tensor, len(batch)) for tensor in tensors_of(values))
        if pattern in self.seen:
            return
        self.seen.add(pattern)
        together = self.job.function(self.job.task.params, values)
        check_losses(together, batch.rows, self.job.name, task=self.job.task, batch=values)
        # Losses near zero have no accurate digits in bfloat16: compare on an absolute scale then.
        largest = float(together.abs().max().clamp_min(0.1 if self.job.task.is_bf16 else 1e-6))
        gap = float((losses - together).abs().max()) / largest
        if gap > _SPLIT_TOL and gap > _SPLIT_TOL + rounding_of_outputs(self.job.task, values) / largest:
            raise TaskError(
                f"The {_PLURAL[self.job.name]} of the batch starting at row {batch.rows[0]} differ by {gap:.2g} "
                f"(relative) when its {len(batch)} examples are evaluated one at a time. Expected the same values: "
                "either the examples depend on each other (as in batch normalisation in training mode), or a tensor "
                f"shared by all examples has first dimension {len(batch)}: give it a leading dimension of 1."
            )


def _check(batch: Batch, values: Any, projection: Projection, job: Job) -> None:
    check_losses(projection.losses, batch.rows, job.name, task=job.task, batch=values)
    good = projection.features.isfinite().all(dim=1)
    if projection.square_norms is not None:
        good &= projection.square_norms.isfinite()
    _check_finite(good, batch.rows, job)


def _check_finite(good: Tensor, rows: np.ndarray, job: Job) -> None:
    bad = rows[~good.cpu().numpy()]
    if len(bad):
        raise NumericalError(
            f"The gradient of the {job.name} is not finite for {counted(len(bad), 'example')} (first: row {bad[0]}), "
            f"although the {job.name} is. Check the inputs of that row."
        )


def in_chunks(parts: Iterator[Tensor], budget: int) -> Iterator[Tensor]:
    """Regroup gradients (b, P) into chunks of at most `budget` bytes, or of a single gradient."""
    held: list[Tensor] = []
    for part in parts:
        for gradient in part.split(1):
            if held and (len(held) + 1) * gradient.nbytes > budget:
                yield torch.cat(held)
                held = []
            held.append(gradient)
    yield torch.cat(held)
