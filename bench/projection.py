"""Measure the throughput and peak memory of projecting per-example gradients, compared with a training step.

python -m bench.projection --models vit_l_32,vit_b_32    # on a GPU, in pieces: results merge
python -m bench.projection --small                       # on a CPU, in a minute
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

import eigentrace as et
from bench.per_model import Benchmark, main, options
from bench.projection_page import FORWARD_K, ROTATED, ROTATED_CELL, layerwise_cell, render
from eigentrace.projection import Job, project
from eigentrace.projection.directions import DenseDirections, Directions, RotatedDirections, Rotation, StackedDirections
from eigentrace.projection.engine import Compute
from eigentrace.projection.streamed import aligned
from harness.command import choices, say
from harness.measure import Cell, Precision, Run, Subject, attempt, release, timed
from harness.models import Batch, cross_entropy
from harness.record import Recorder

# Repetitions of the batch, more than any measurement needs.
_MANY_BATCHES = 20_000
# The engine checks single examples of batches 1, 2, 4, 8, …, which slows down short measurements but not long runs.
_WARM_UP = 5
# Forward mode needs K times the memory for activations, so a part of the batch is used to measure its throughput.
_FORWARD_SHARE = 8
# Number of columns of each rotation: the leading ones, which contain the largest coordinates.
_DIRECTIONS = 32
# Largest share of the free memory for directions; the forward and backward passes need the rest.
_DIRECTIONS_SHARE = 0.6


def measure(subject: Subject, recorder: Recorder, settings: argparse.Namespace) -> None:
    """Measure a training step, forward mode, and layerwise mode at every K of one model."""
    run = recorder.run

    def cell(name: str, work: Callable[[], Cell]) -> Cell:
        found = recorder.add(name, attempt(work))
        say(f"{subject.entry.title:18} {name:24} " + _line(found))
        return found

    if "train" not in settings.skip:
        cell("train", partial(training, subject, run, compiles=not run.small))
    if "rotated" not in settings.skip:
        cell(ROTATED_CELL, partial(rotated_mode, subject, run))
    ks = [] if "layerwise" in settings.skip else settings.ks
    forward = [] if "forward" in settings.skip else [FORWARD_K]
    if not ks + forward:
        return
    pool = DirectionPool.draw(subject.task, [*ks, *forward], run)
    for k in forward:
        cell(f"forward/{k}", partial(forward_mode, subject, pool, k, run))
    for k in ks:
        for compiles in (False, True) if settings.compile else (False,):
            cell(layerwise_cell(k, compiles), partial(layerwise, subject, pool, k, run, compiles=compiles))


def training(subject: Subject, run: Run, *, compiles: bool) -> Cell:
    """Time a training step: model and loss in one compiled graph, backward, and a fused AdamW step.

    The model stays in eval mode, so that the same function is differentiated as for projections. The learning rate is
    zero: the step costs the same and does not change the weights.
    """
    model = subject.model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True)

    def mean_loss(*batch: Tensor) -> Tensor:
        return cross_entropy(model(*batch[:-1]), batch[-1]).mean()

    loss = torch.compile(mean_loss) if compiles else mean_loss

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(run.device.type, torch.bfloat16, enabled=run.precision == "bf16"):
            value = loss(*subject.batch)
        value.backward()
        optimizer.step()

    try:
        timing = timed(step, run, compiles=compiles)
    finally:
        model.zero_grad(set_to_none=True)
    return timing.numbers | {"rate": subject.size / timing.seconds, "compiled": compiles}


@dataclass(frozen=True)
class DirectionPool:
    """One matrix of random directions, whose first K are used for every K."""

    matrix: Tensor  # (most, P)
    task: et.Task

    @staticmethod
    def draw(task: et.Task, ks: Sequence[int], run: Run) -> "DirectionPool":
        """Draw directions for the largest K, or for the largest that fits in memory with the model."""
        layout = task.layout
        dtype = torch.bfloat16 if run.precision == "bf16" else layout.dtype
        fitting = int(_DIRECTIONS_SHARE * _free_memory(run.device)) // (layout.numel * dtype.itemsize)
        count = max((k for k in ks if k <= fitting), default=max(1, fitting))
        matrix = aligned(count, layout.numel, dtype, run.device)  # laid out as the directions of a fit
        generator = torch.Generator(run.device).manual_seed(3)
        for direction in matrix:  # one at a time: some kernels support at most 2³¹ elements
            direction.normal_(generator=generator)
        return DirectionPool(matrix, task)

    def directions(self, k: int) -> Directions:
        """Return K directions, repeating the first ones if there are fewer."""
        full, rest = divmod(k, len(self.matrix))
        parts = [self.matrix] * full + ([self.matrix[:rest]] if rest else [])
        dense = tuple(DenseDirections(part, self.task.layout) for part in parts)
        return dense[0] if len(dense) == 1 else StackedDirections(dense)

    def remarks(self, k: int) -> list[str]:
        """Return a note if directions were repeated."""
        count = len(self.matrix)
        return [f"The first {count} directions repeated: {k} do not fit beside the model."] if k > count else []

    def unused(self, k: int) -> int:
        """Return the bytes of the matrix that are unused at K."""
        return self.matrix[k:].nbytes


def _free_memory(device: torch.device) -> int:
    if device.type == "cuda":
        release(device)
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def forward_mode(subject: Subject, pool: DirectionPool, k: int, run: Run) -> Cell:
    """Time forward mode, the paper's algorithm, in the precision of the others if the model supports it."""
    batch = subject.part(max(1, subject.size // _FORWARD_SHARE))
    precisions: tuple[Precision, ...] = ("bf16", "fp32") if run.precision == "bf16" else ("fp32",)
    found: Cell = {}
    for precision in precisions:
        compute = Compute(engine="forward", precision=precision, batch="data")
        before = found.get("failed")
        found = attempt(partial(projecting, make_job(pool, k, compute, norms=False), batch, pool, run))
        if "failed" not in found:
            note = {} if before is None else {"note": f"In float32: {before}"}
            return found | note
    return found


def layerwise(subject: Subject, pool: DirectionPool, k: int, run: Run, *, compiles: bool) -> Cell:
    """Time layerwise reverse mode, including squared norms."""
    compute = Compute(engine="layerwise", precision=run.precision, batch="data", compile=compiles)
    found = projecting(make_job(pool, k, compute, norms=True), subject.batch, pool, run)
    remarks = pool.remarks(k)
    slower = subject.task.coverage.without_rule
    if slower:
        remarks.append(f"{len(slower)} tensors without a rule went by a slower engine, among them {min(slower)}.")
    return found | ({"note": " ".join(remarks)} if remarks else {})


def rotated_mode(subject: Subject, run: Run) -> Cell:
    """Time layerwise reverse mode on coordinates in rotated bases, distributed over the matrices."""
    task, device = subject.task, run.device
    shapes = dict(zip(task.layout.names, task.layout.shapes, strict=True))
    matrices = [name for name, shape in shapes.items() if len(shape) > 1]
    generator = torch.Generator(device).manual_seed(0)
    rotations = {}
    for number, name in enumerate(matrices):
        share = ROTATED * (number + 1) // len(matrices) - ROTATED * number // len(matrices)
        # Embeddings are not rotated on the side of words, since their vectors are looked up.
        words = shapes[name][0] if name.startswith("embedding") else None
        sides = [_directions(n, generator) for n in (shapes[name][0], shapes[name][1:].numel())]
        limits = [words or sides[0].shape[1], sides[1].shape[1]]
        pairs = torch.stack([torch.randint(0, n, (share,), generator=generator, device=device) for n in limits])
        rotations[name] = Rotation(None if words else sides[0], sides[1], pairs)
    compute = Compute(engine="layerwise", precision=run.precision, batch="data")
    job = Job.of(task, "losses", RotatedDirections(rotations, task.layout), norms=True, compute=compute)
    return projecting(job, subject.batch, None, run)


def _directions(size: int, generator: torch.Generator) -> Tensor:
    count = min(size, _DIRECTIONS)
    return torch.randn(size, count, generator=generator, device=generator.device) / size**0.5


def make_job(pool: DirectionPool, k: int, compute: Compute, *, norms: bool) -> Job:
    """Create the job that projects the gradients of the losses on the first K directions."""
    return Job.of(pool.task, "losses", pool.directions(k), norms=norms, compute=compute)


def projecting(job: Job, batch: Batch, pool: DirectionPool | None, run: Run) -> Cell:
    """Time a job on one batch, repeated."""
    data = et.Data.from_batches([batch] * _MANY_BATCHES)
    with job.task.session():
        steps = project(job, data)
        try:
            timing = timed(lambda: next(steps), run, compiles=job.compute.compile, warm_up=_WARM_UP)
        finally:
            steps.close()  # type: ignore[attr-defined]
    size = len(batch[-1])
    found = timing.numbers | {"rate": size / timing.seconds, "batch": size, "precision": job.compute.precision}
    if timing.peak is not None:
        found["peak"] = timing.peak - (pool.unused(job.directions.count) if pool is not None else 0)
    return found


def _line(cell: Cell) -> str:
    if "failed" in cell:
        return cell["failed"]
    peak = "" if cell["peak"] is None else f", {cell['peak'] / 2**30:.1f} GiB"
    return f"{cell['rate']:,.1f} examples/s{peak}, warm-up {cell['warm_up_seconds']:.1f} s"


def _parser() -> argparse.ArgumentParser:
    parser = options("Examples per second of projecting per-example gradients, beside a training step.")
    parser.add_argument("--ks", type=_numbers, default=[10, 20, 50, 100, 200], help="values of K; 10,20,50,100,200")
    parser.add_argument("--compile", action="store_true", help="measure compiled layerwise mode as well")
    parser.add_argument(
        "--skip", type=choices("train", "forward", "layerwise", "rotated"), default=[], help="what not to measure"
    )
    return parser


def _numbers(text: str) -> list[int]:
    return sorted({int(part) for part in text.split(",")})


BENCHMARK = Benchmark("projection", _parser(), lambda entry: entry.batch, measure, render)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK, sys.argv[1:]))
