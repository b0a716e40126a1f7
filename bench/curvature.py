"""Measure the time and peak memory of one curvature product, and of a complete fit.

python -m bench.curvature --models vit_l_32          # on a GPU, in pieces: results merge
python -m bench.curvature --models vit_l_32 --fit    # the fit instead of the products
python -m bench.curvature --small                    # on a CPU, in a minute
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product

import torch

import eigentrace as et
from bench.curvature_page import KINDS, MODES, PRECISIONS, fit_cell, product_cell, render
from bench.per_model import Benchmark, main, options
from eigentrace.curvature.operator import Curvature, working_form
from harness.command import choices, positive, say
from harness.fits import FIT, Kind, fit
from harness.measure import Cell, Precision, Run, Subject, attempt, random_unit, timed
from harness.record import Recorder

SMALL_FIT = et.Arnoldi(steps=20, keep=5, sample=32, basis=et.Basis(dtype="bf16", max_vectors=12))


def measure(subject: Subject, recorder: Recorder, settings: argparse.Namespace) -> None:
    """Measure the products of one model, or a fit."""
    run = recorder.run

    def cell(name: str, work: Callable[[], Cell]) -> None:
        found = recorder.add(name, attempt(work))
        say(f"{subject.entry.title:18} {name:32} " + _line(found))

    if settings.fit:
        for mode in settings.modes or ("auto",):
            method = chosen_fit(run.small, settings.steps, mode)
            cell(fit_cell(method.steps, mode), partial(fit, subject, method, run))
        return
    v = random_unit(subject.task.vector)
    for kind, precision, mode in product(settings.kinds, settings.precisions, settings.modes or ("eager",)):
        work = partial(one_product, subject, v, run, kind, precision, compiles=mode == "compiled")
        cell(product_cell(kind, precision, mode), work)


def make_curvature(subject: Subject, kind: Kind, precision: Precision, *, compiles: bool) -> Curvature:
    """Return the curvature on the batch, with the differentiation that the model supports."""
    curvature = Curvature(subject.task, et.Data.from_batches([subject.batch]), None, kind, precision)
    curvature = replace(curvature, form=working_form(curvature, subject.part(2)))
    return replace(curvature, compile=True) if compiles else curvature


def one_product(
    subject: Subject, v: torch.Tensor, run: Run, kind: Kind, precision: Precision, *, compiles: bool
) -> Cell:
    """Time the product of one batch's curvature with a vector."""
    with subject.task.session():
        curvature = make_curvature(subject, kind, precision, compiles=compiles)
        timing = timed(lambda: curvature.matvec(v), run, compiles=compiles)
    return timing.numbers | {"form": curvature.form.value, "compiled": compiles}


def chosen_fit(small: bool, steps: int | None, mode: str) -> et.Arnoldi:
    """Return the settings of a fit, with the number of steps and the mode of the command line."""
    method = SMALL_FIT if small else FIT
    if steps is not None:
        method = replace(method, steps=steps, keep=min(method.keep, steps))
    return method if mode == "auto" else replace(method, compile=mode == "compiled")


def _line(cell: Cell) -> str:
    if "failed" in cell:
        return cell["failed"]
    peak = "" if cell["peak"] is None else f", {cell['peak'] / 2**30:.1f} GiB"
    if "parts" in cell:
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in cell["parts"].items())
        return f"{cell['seconds']:.1f} s ({parts}){peak}"
    return f"{cell['milliseconds']:.1f} ms{peak}, warm-up {cell['warm_up_seconds']:.1f} s"


def _parser() -> argparse.ArgumentParser:
    parser = options("Milliseconds and memory of curvature products, or a whole fit.")
    parser.add_argument("--kinds", type=choices(*KINDS), default=list(KINDS), help=",".join(KINDS))
    parser.add_argument("--precisions", type=choices(*PRECISIONS), default=list(PRECISIONS), help=",".join(PRECISIONS))
    modes = "eager,compiled; default: eager, and for a fit chosen automatically"
    parser.add_argument("--modes", type=choices(*MODES), help=modes)
    parser.add_argument("--fit", action="store_true", help="measure a complete Arnoldi fit instead of products")
    parser.add_argument("--steps", type=positive, help="number of products of the fit: 200, or 20 with --small")
    return parser


BENCHMARK = Benchmark("curvature", _parser(), lambda entry: entry.curvature_batch, measure, render)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK, sys.argv[1:]))
