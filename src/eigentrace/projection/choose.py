"""The rule that chooses the engine, portions that fit in memory, and the loop over data behind every score."""

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
from eigentrace.projection.forward import forward
from eigentrace.projection.layerwise import Layerwise
from eigentrace.projection.reverse import one_by_one, single_gradients, vmapped, vmapped_gradients
from eigentrace.projection.streamed import placed
from eigentrace.task.checks import check_losses, name_loader, note_batch
from eigentrace.task.derivatives import LACKING, first_supported
from eigentrace.task.task import Task

# Sizes at which memory is measured, to draw a line through; and the most examples worth taking at once.
_TRIED = (4, 16)
_MOST = 1024
# Share of the free memory that a pass may be expected to fill: lengths vary, and caches leave holes.
_FILLED = 0.7


class Portions:
    """Puts batches through an engine in portions that fit, and remembers how large these were.

    Args:
        limit: Examples of a portion at most; all of a batch if not given.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.room: int | None = None
        """Numbers of its widest tensor that a portion may have: more short examples than long ones fit."""

    def __call__(self, engine: Engine, job: Job, values: Any, size: int) -> Projection:
        """Project a batch; on running out of memory halve the portion and go on with what is left."""
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
                    f"One example does not fit in the memory of {job.task.layout.device} beside the model and "
                    f"{job.directions.count} directions. Keep fewer directions (fitted.distill), select fewer "
                    "parameters, use Compute(precision='bf16'), or store the directions in host memory "
                    "(Basis(place='host'))."
                )
            self.room = (stop - start) // 2 * width
            torch.cuda.empty_cache()
        return joined(done)


def _width(values: Any, size: int) -> int:
    """Return how many numbers an example has in its widest tensor."""
    return max((t.numel() // size for t in tensors_of(values) if is_per_example(t, size)), default=1) or 1


def _attempt(engine: Engine, job: Job, values: Any, size: int) -> Projection | None:
    """Return None instead of raising, so that no traceback keeps the failed pass's tensors alive."""
    try:
        return engine(job, values, size)
    except torch.OutOfMemoryError:
        return None
    except Exception as error:
        note_batch(error, job.task, values)
        raise


def largest_batch(engine: Engine, job: Job, data: Data) -> int | None:
    """Estimate how many examples fit a GPU, from the peak memory of a few; None where there is nothing to go by."""
    device = job.task.layout.device
    if device.type != "cuda" or not data.can_rebatch or len(data) < 2 * _TRIED[-1]:
        return None
    peaks = []
    for count in _TRIED:
        values = job.task.place(data.rebatched(count).first(count).values)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        if _attempt(engine, job, values, count) is None:
            return max(1, count // 2)
        peaks.append(torch.cuda.max_memory_allocated(device) - before)
    each = max(1.0, (peaks[1] - peaks[0]) / (_TRIED[1] - _TRIED[0]))
    # What is written out in chunks grows up to the budget, whatever the batch.
    room = _FILLED * job.compute.free(device) - job.budget - peaks[0]
    fitting = int(max(_TRIED[0], min(_MOST, room / each)))
    return 2 ** (fitting.bit_length() - 1)


# A batch of fewer examples than this no longer fills the machine: per-example passes lose that factor.
_FULL_BATCH = 8
# Cost of a pass in units of one forward pass: a JVP carries two, a gradient about three.
_JVP_COST, _GRADIENT_COST = 2, 3
# Losses of one example alone and in its batch agree to rounding, in bfloat16 parameters too.
_SPLIT_TOL = 5e-2
_PLURAL = {"loss": "losses", "measurement": "measurements"}


def preferred(job: Job) -> tuple[Engine, ...]:
    """Order the engines for this work, the best first.

    Layerwise reverse mode costs a few training steps, almost regardless of the number of directions. Forward mode costs
    one JVP per direction and batch regardless of the number of parameters, and computes no norms. Per-example reverse
    mode costs one gradient per example regardless of the number of directions, but few examples fit at a time when the
    model is large.
    """
    others = _without_rules(job)
    if job.compute.engine == "forward":
        if job.norms:
            raise UnsupportedError(
                "Forward mode gives no norms of gradients, and this question takes them, as normalize='gradient' and "
                "scores by whole gradients do. Use Compute(engine='auto'), 'layerwise' or 'reverse'."
            )
        return (forward,)
    if job.compute.engine == "reverse":
        return (vmapped, one_by_one)
    layerwise = Layerwise(lambda rest: InTurn(_without_rules(rest)))
    return (layerwise,) if job.compute.engine == "layerwise" else (layerwise, *others)


def note_coverage(task: Task, data: Data) -> None:
    """Plan on a few examples, so that the task knows which of its parameters a slower engine must serve."""
    batch = data.first(3)
    engine = Layerwise(lambda rest: InTurn(_without_rules(rest)))
    # A model that no rule fits, or that lacks the memory for three examples, is told so when it is projected.
    with suppress(*LACKING):
        engine(Job.of(task, "losses"), task.place(batch.values), len(batch))


def _without_rules(job: Job) -> tuple[Engine, ...]:
    if job.norms:
        return (vmapped, one_by_one)
    slowdown = max(1.0, _FULL_BATCH / job.vectors_at_once)
    if _GRADIENT_COST * slowdown <= _JVP_COST * job.directions.count:
        return (vmapped, forward, one_by_one)
    return (forward, vmapped, one_by_one)


def fitting_batch(job: Job, data: Data) -> int | None:
    """Return the batch size that `project` would choose, or None where batches are not ours to choose."""
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
    """Do a job for every example of the data, batch by batch, inside the caller's session.

    Args:
        job: What to project.
        data: The examples.
        description: What the progress bar says.
        rows: Only these, in the batches that a pass over everything would put them in.
        digests: Whether batches carry the digests of their examples.
    """
    job = replace(job, directions=placed(job.directions, job.task.layout.device, job.compute))
    batch_size = job.compute.batch
    if not isinstance(batch_size, str):
        data = data.rebatched(int(batch_size))
    engine = InTurn(preferred(job))
    portions = Portions(None if isinstance(batch_size, str) else int(batch_size))
    checked = SplitCheck(job)
    if batch_size == "auto":
        largest = largest_batch(engine, job, data)
        data = data if largest is None else data.rebatched(largest)
    batches = data.batches(rows, digests=digests) if rows is not None or digests else data.batches()
    for batch in track(batches, description, len(data) if rows is None else len(rows), len):
        values = job.task.place(batch.values)
        try:
            projection = portions(engine, job, values, len(batch))
            _check(batch, values, projection, job)
        except Exception as error:
            name_loader(error, data, batch.values)
            raise
        if not projection.is_whole:
            checked(values, batch, projection.losses)
        elif job.name == "measurement":
            checked.first_alone(values, batch, projection.losses)
        yield batch, projection


class InTurn:
    """The first of several engines that the model supports; the next one when a later batch shows that it does not."""

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
        raise UnsupportedError(f"No engine can differentiate this model per example. {' | '.join(self._failures)}")


def gradients(job: Job, data: Data) -> Iterator[Tensor]:  # each (b, P)
    """Yield full per-example gradients: what queries travel as."""
    task = job.task
    take: Any = None
    checked = SplitCheck(job)
    for batch in track(data.batches(), "Gradients", len(data), len):
        values = task.place(batch.values)
        taken: list[Tensor] = []
        try:
            take = take or _way(job, values, len(batch))
            for found in take(job, values, len(batch)):
                start, size = sum(map(len, taken)), len(found.losses)
                here, rows = slice(start, start + size), batch.rows[start:][:size]
                taken.append(found.losses)
                check_losses(found.losses, rows, job.name, task=task, batch=select(values, here, len(batch)))
                flat = task.layout.flatten(found.by_name, batch_dims=1)
                _check_finite(flat.isfinite().all(dim=1), rows, job)
                yield flat
        except Exception as error:
            note_batch(error, task, values)
            name_loader(error, data, batch.values)
            raise
        checked(values, batch, torch.cat(taken))


def _way(job: Job, values: Any, size: int) -> Any:
    """Choose how gradients are taken, on two examples."""
    part = select(values, slice(0, 2), size)
    return first_supported(
        (vmapped_gradients, single_gradients),
        lambda way: list(way(job, part, min(2, size))),
        lambda way: way.__name__,
        "No engine can differentiate this model per example. {}",
    )


class SplitCheck:
    """Compares losses of examples taken apart with those of the whole batch, once per way of taking one apart.

    A tensor belongs to the examples if its first dimension is the batch's size. One that all examples share may have
    that size by chance (a T × T mask in a last batch of T examples), and cutting it up would give wrong gradients.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.seen: set[tuple[bool, ...]] = set()

    def __call__(self, values: Any, batch: Batch, losses: Tensor) -> None:
        """Check a batch unless its tensors are told apart in a way that has been checked."""
        ways = tuple(is_per_example(tensor, len(batch)) for tensor in tensors_of(values))
        if ways in self.seen:
            return
        self.seen.add(ways)
        together = self.job.function(self.job.task.params, values)
        check_losses(together, batch.rows, self.job.name, task=self.job.task, batch=values)
        self._compare(together, losses, batch)

    def first_alone(self, values: Any, batch: Batch, together: Tensor) -> None:
        """Check one example of the first batch alone: a fit looks at losses, and nobody at measurements before."""
        if self.seen or len(batch) == 1:
            return
        self.seen.add(())
        i = int(together.abs().argmax())
        part = select(values, slice(i, i + 1), len(batch))
        alone = self.job.function(self.job.task.params, part)
        check_losses(alone, batch.rows[i : i + 1], self.job.name, task=self.job.task, batch=part)
        self._compare(together[i : i + 1], alone, batch)

    def _compare(self, together: Tensor, apart: Tensor, batch: Batch) -> None:
        # Losses near zero keep no digits in bfloat16: then only those of another size tell.
        least = 0.1 if self.job.task.is_bf16 else 1e-6
        gap = float((apart - together).abs().max() / together.abs().max().clamp_min(least))
        if gap > _SPLIT_TOL:
            raise TaskError(
                f"The {_PLURAL[self.job.name]} of the batch from row {batch.rows[0]} on change by {gap:.2g} of their "
                f"size when its {len(batch)} examples are taken one at a time. Either they depend on each other, or a "
                f"tensor that all share has {len(batch)} as its first dimension: give it a leading dimension of 1."
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
            f"The {job.name} is finite but its gradient is not for {len(bad)} examples (first: row {bad[0]}). Check "
            "the inputs of that row."
        )


def in_chunks(parts: Iterator[Tensor], budget: int) -> Iterator[Tensor]:
    """Gather gradients (b, P) into pieces of at most `budget` bytes, at least one gradient each."""
    held: list[Tensor] = []
    for part in parts:
        for gradient in part.split(1):
            if held and (len(held) + 1) * gradient.nbytes > budget:
                yield torch.cat(held)
                held = []
            held.append(gradient)
    yield torch.cat(held)
