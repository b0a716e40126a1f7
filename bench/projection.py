"""Examples per second and peak memory of projecting per-example gradients, beside a training step.

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

# A batch repeated this often outlasts any measurement.
_MANY_BATCHES = 20_000
# The engine takes single examples of batches 1, 2, 4, 8, … again: three batches notice, a run of thousands hardly.
_WARM_UP = 5
# Forward mode carries K times the activations: a part of the batch is enough to see its speed.
_FORWARD_SHARE = 8
# Columns of each rotation: the leading directions, among which the largest coordinates are found.
_DIRECTIONS = 32
# Directions may take this share of the free memory; the model's pass and the engine need the rest.
_DIRECTIONS_SHARE = 0.6


def measure(subject: Subject, recorder: Recorder, settings: argparse.Namespace) -> None:
    """Measure one model: a training step, forward mode, and layerwise mode at every K."""
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

    The model stays in eval mode, so that the function differentiated is the one gradients are projected of. The step is
    of length zero: it costs the same, and leaves the weights alone.
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
    """One matrix of random directions, of which every K takes its first."""

    matrix: Tensor  # (most, P)
    task: et.Task

    @staticmethod
    def draw(task: et.Task, ks: Sequence[int], run: Run) -> "DirectionPool":
        """Draw as many directions as the largest K, or the largest K whose directions fit beside the model."""
        layout = task.layout
        dtype = torch.bfloat16 if run.precision == "bf16" else layout.dtype
        fitting = int(_DIRECTIONS_SHARE * _free_memory(run.device)) // (layout.numel * dtype.itemsize)
        count = max((k for k in ks if k <= fitting), default=max(1, fitting))
        matrix = aligned(count, layout.numel, dtype, run.device)  # as the directions of a fit are
        generator = torch.Generator(run.device).manual_seed(3)
        for direction in matrix:  # one at a time: some kernels cannot count to more than 2³¹ numbers
            direction.normal_(generator=generator)
        return DirectionPool(matrix, task)

    def directions(self, k: int) -> Directions:
        """Return K directions, the first ones again where there are fewer."""
        full, rest = divmod(k, len(self.matrix))
        parts = [self.matrix] * full + ([self.matrix[:rest]] if rest else [])
        dense = tuple(DenseDirections(part, self.task.layout) for part in parts)
        return dense[0] if len(dense) == 1 else StackedDirections(dense)

    def remarks(self, k: int) -> list[str]:
        """Say where directions were repeated."""
        count = len(self.matrix)
        return [f"The first {count} directions repeated: {k} do not fit beside the model."] if k > count else []

    def unused(self, k: int) -> int:
        """Bytes of the matrix that a measurement at K does not touch."""
        return self.matrix[k:].nbytes


def _free_memory(device: torch.device) -> int:
    if device.type == "cuda":
        release(device)
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def forward_mode(subject: Subject, pool: DirectionPool, k: int, run: Run) -> Cell:
    """Time the paper's way, in the precision of the others where the model allows it."""
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
    """Time layerwise reverse mode, squared norms included."""
    compute = Compute(engine="layerwise", precision=run.precision, batch="data", compile=compiles)
    found = projecting(make_job(pool, k, compute, norms=True), subject.batch, pool, run)
    remarks = pool.remarks(k)
    slower = subject.task.coverage.without_rule
    if slower:
        remarks.append(f"{len(slower)} tensors without a rule went by a slower engine, among them {min(slower)}.")
    return found | ({"note": " ".join(remarks)} if remarks else {})


def rotated_mode(subject: Subject, run: Run) -> Cell:
    """Time layerwise reverse mode on coordinates in a rotated basis, shared out among the matrices."""
    task, device = subject.task, run.device
    shapes = dict(zip(task.layout.names, task.layout.shapes, strict=True))
    matrices = [name for name, shape in shapes.items() if len(shape) > 1]
    generator = torch.Generator(device).manual_seed(0)
    rotations = {}
    for number, name in enumerate(matrices):
        share = ROTATED * (number + 1) // len(matrices) - ROTATED * number // len(matrices)
        # An embedding keeps its words: its rows are looked up, not rotated.
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
    """Describe the work: the gradients of the losses, on the first K directions."""
    return Job.of(pool.task, "losses", pool.directions(k), norms=norms, compute=compute)


def projecting(job: Job, batch: Batch, pool: DirectionPool | None, run: Run) -> Cell:
    """Time a job on one batch, given again and again."""
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
