"""One rule that chooses the engine, and the loop over data that every score goes through."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eigentrace.batch import is_per_example, select, tensors_of
from eigentrace.data import Batch, Data
from eigentrace.errors import NumericalError, TaskError, UnsupportedError
from eigentrace.fallback import LACKING, first_supported
from eigentrace.probe import check_losses, name_loader, note_batch
from eigentrace.progress import track
from eigentrace.project.engine import Engine, Job, Projection
from eigentrace.project.forward import forward
from eigentrace.project.layerwise import Layerwise
from eigentrace.project.portions import Portions, largest_batch
from eigentrace.project.reverse import one_by_one, single_gradients, vmapped, vmapped_gradients
from eigentrace.streams import placed
from eigentrace.task import Task

# A batch of fewer examples than this no longer fills the machine: per-example passes lose that factor.
_FULL_BATCH = 8
# Cost of a pass in units of one forward pass: a JVP carries two, a gradient about three.
_JVP_COST, _GRADIENT_COST = 2, 3
# Losses of one example alone and in its batch agree to rounding, in bfloat16 parameters too.
_SPLIT_TOL = 5e-2
_PLURAL = {"loss": "losses", "measurement": "measurements"}


def preferred(job: Job) -> tuple[Engine, ...]:
    """Order the engines for this work, the best first.

    Layerwise reverse mode costs a few training steps, almost whatever the number of rows. Without it, forward mode
    costs a JVP per row whatever the number of parameters, and per-example reverse mode one gradient per example
    whatever the number of rows, but few examples at a time when the model is large. Forward mode gives no norms.
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
    if _GRADIENT_COST * slowdown <= _JVP_COST * job.rows.count:
        return (vmapped, forward, one_by_one)
    return (forward, vmapped, one_by_one)


def fitting_batch(job: Job, data: Data) -> int | None:
    """Return the batch size that `project` would choose, or None where batches are not ours to choose."""
    if not data.can_rebatch:
        return None
    if not isinstance(job.compute.batch, str):
        return int(job.compute.batch)
    job = replace(job, rows=placed(job.rows, job.task.layout.device, job.compute))
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
    job = replace(job, rows=placed(job.rows, job.task.layout.device, job.compute))
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
            for found, losses in take(job, values, len(batch)):
                start = sum(map(len, taken))
                here, rows = slice(start, start + len(losses)), batch.rows[start:][: len(losses)]
                taken.append(losses)
                check_losses(losses, rows, job.name, task=task, batch=select(values, here, len(batch)))
                flat = task.layout.flatten(found, batch_dims=1)
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
        for row in part.split(1):
            if held and (len(held) + 1) * row.nbytes > budget:
                yield torch.cat(held)
                held = []
            held.append(row)
    yield torch.cat(held)
