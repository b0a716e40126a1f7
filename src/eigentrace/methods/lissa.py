"""LiSSA: products of the inverse Hessian with one gradient at a time, by a truncated Neumann series on batches."""

import math
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from eigentrace.curvature.checks import check_curvature
from eigentrace.curvature.operator import HELD_EXAMPLES, Curvature, Kind, resolve_kind
from eigentrace.errors import InputError, NumericalError
from eigentrace.fits.solver_fit import SolvedFit
from eigentrace.krylov.iterate import lanczos, ritz
from eigentrace.methods.method import ready
from eigentrace.numeric.seeding import generator_of
from eigentrace.progress import track
from eigentrace.settings import check_counts, check_not_negative, settings_of, settings_repr
from eigentrace.task.layout import normal
from eigentrace.task.task import Task

# For scale="auto": the number of batches, the Lanczos steps on each, and a factor on the largest eigenvalue found.
_SCALE_BATCHES, _SCALE_STEPS, _SCALE_MARGIN = 4, 8, 1.1


@dataclass(frozen=True)
class Lissa:
    """Influence by an iterative solve per gradient: h ← v + (1 − damping)·h − H·h/scale, and H⁻¹v ≈ h/scale.

    Each of the `depth` iterations uses H on a new batch of examples. Nothing is precomputed: every gradient takes
    `depth` products with H.
    """

    depth: int = 100
    """r, the number of iterations."""
    damping: float = 0.01
    """At least 0 and below 1. The series converges to the inverse of H + damping·scale, so damping·scale acts as a
    regulariser."""
    scale: float | Literal["auto"] = "auto"
    """Divisor of H, which must exceed its largest eigenvalue on any batch, or the series diverges; "auto" estimates it
    on a few batches."""
    batch_size: int = 32
    """Number of examples that H is averaged over at each iteration."""
    repeats: int = 1
    """Number of independent solves that are averaged."""
    curvature: Kind = "auto"
    """The matrix to invert: "hessian"; "gauss-newton", which needs a task with outputs; or "auto" for Gauss-Newton if
    the task has outputs, else the Hessian."""
    seed: int = 0
    """Seed of the batches, which are the same for every gradient."""

    __repr__ = settings_repr

    def __post_init__(self) -> None:
        check_counts(1, depth=self.depth, batch_size=self.batch_size, repeats=self.repeats)
        check_counts(0, seed=self.seed)
        check_not_negative(damping=self.damping)
        if self.damping >= 1:
            raise InputError(f"damping must be at least 0 and below 1, got {self.damping}.")
        if self.scale != "auto" and not (isinstance(self.scale, Real) and 0 < self.scale < math.inf):
            raise InputError(f"scale must be a positive finite number or 'auto', got {self.scale!r}.")

    def fit(self, task: Task, data: Any, *, num_train: int | None = None) -> SolvedFit:
        """Draw the batches and estimate the scale; see `Method.fit` for the arguments."""
        task, data, size = ready(task, data, num_train)
        generator = generator_of(self.seed)
        draws = [data.sample(self.batch_size, generator) for _ in range(self.depth * self.repeats)]
        with task.session():
            kind = resolve_kind(self.curvature, task)
            probe = check_curvature(Curvature(task, data, draws[0], kind), generator)
            # Batches of all iterations are kept in memory up to a limit; beyond it, each is read when it is needed.
            hold = sum(map(len, draws)) <= HELD_EXAMPLES
            curvatures = [Curvature(task, data, rows, kind, form=probe.form, hold=hold) for rows in draws]
            scale = _largest(curvatures[:_SCALE_BATCHES]) if self.scale == "auto" else float(self.scale)

        def solve(v: Tensor) -> Tensor:  # (q, P) -> (q, P)
            runs = np.array_split(np.arange(len(curvatures)), self.repeats)
            return torch.stack([self._run([curvatures[i] for i in run], v, scale) for run in runs]).mean(dim=0)

        return SolvedFit(task, solve, settings_of(self), size)

    def _run(self, curvatures: list[Curvature], v: Tensor, scale: float) -> Tensor:
        h = v
        for step, curvature in enumerate(track(curvatures, "LiSSA", len(curvatures)), start=1):
            h = v + (1 - self.damping) * h - curvature.matmat(h) / scale
            # In a convergent series, ‖h‖ is at most ‖v‖ times the number of terms.
            if not h.norm() <= 10 * (step + 1) * v.norm():
                raise NumericalError(
                    f"LiSSA diverged at iteration {step} of {len(curvatures)} with scale={scale:.3g}. Raise scale "
                    "above the largest eigenvalue of H on any batch, raise batch_size, or use "
                    "curvature='gauss-newton'."
                )
        return h / scale


def _largest(curvatures: list[Curvature]) -> float:
    """Estimate the largest |eigenvalue| of the curvature on any of the batches, with a margin."""
    layout = curvatures[0].task.layout
    start = normal((layout.numel,), torch.Generator().manual_seed(0), layout)
    values = [float(ritz(lanczos(c.matvec, start, _SCALE_STEPS))[0][0].abs()) for c in curvatures]
    if max(values) == 0:
        raise NumericalError(
            f"The curvature of the first {len(curvatures)} batches is zero, so it cannot be inverted. Check the losses "
            "of the data (eigentrace.Loss), or set scale."
        )
    return _SCALE_MARGIN * max(values)
