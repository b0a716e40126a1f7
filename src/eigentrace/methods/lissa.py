"""LiSSA: the inverse Hessian of one gradient at a time by a truncated Neumann series over small batches."""

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
from eigentrace.settings import check_counts, check_not_negative, settings_of
from eigentrace.task.layout import normal
from eigentrace.task.task import Task

# Batches, and Lanczos steps on each, from which "auto" learns how large the curvature of a batch gets.
_SCALE_BATCHES, _SCALE_STEPS, _SCALE_MARGIN = 4, 8, 1.1


@dataclass(frozen=True)
class Lissa:
    """h ← v + (1 − damping)·h − H·h/scale, `depth` times, H on new examples each time; H⁻¹v ≈ h/scale."""

    depth: int = 100
    """r, the number of iterations."""
    damping: float = 0.01
    """Shrinks the earlier estimate at each step."""
    scale: float | Literal["auto"] = "auto"
    """Must exceed the largest eigenvalue of H on any batch; "auto" measures it on a few."""
    batch_size: int = 32
    """Examples H is taken on at each iteration."""
    repeats: int = 1
    """Independent runs that are averaged."""
    curvature: Kind = "auto"
    """"hessian", "gauss-newton" or "auto"."""
    seed: int = 0
    """Fixes the batches, which are the same for every gradient."""

    def __post_init__(self) -> None:
        check_counts(1, depth=self.depth, batch_size=self.batch_size, repeats=self.repeats)
        check_counts(0, seed=self.seed)
        check_not_negative(damping=self.damping)
        if self.damping >= 1:
            raise InputError(f"damping must be below 1, got {self.damping}.")
        if self.scale != "auto" and not (isinstance(self.scale, Real) and 0 < self.scale < math.inf):
            raise InputError(f"scale must be positive or 'auto', got {self.scale!r}.")

    def fit(self, task: Task, data: Any, *, num_train: int | None = None) -> SolvedFit:
        """Draw the batches and settle the scale; see `Method.fit` for the arguments."""
        task, data, size = ready(task, data, num_train)
        generator = generator_of(self.seed)
        draws = [data.sample(self.batch_size, generator) for _ in range(self.depth * self.repeats)]
        with task.session():
            kind = resolve_kind(self.curvature, task)
            probe = check_curvature(Curvature(task, data, draws[0], kind), generator)
            # Held batches add up over the iterations; beyond the limit each is read again when its turn comes.
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
            # A convergent series stays below v times the number of its terms.
            if not h.norm() <= 10 * (step + 1) * v.norm():
                raise NumericalError(
                    f"LiSSA diverged at iteration {step} of {len(curvatures)} with scale={scale:.3g}. Raise scale "
                    "above the largest eigenvalue of H on one batch, use larger batches, or curvature='gauss-newton'."
                )
        return h / scale


def _largest(curvatures: list[Curvature]) -> float:
    """Estimate the largest |eigenvalue| that any of the batches has."""
    layout = curvatures[0].task.layout
    start = normal((layout.numel,), torch.Generator().manual_seed(0), layout)
    values = [float(ritz(lanczos(c.matvec, start, _SCALE_STEPS))[0][0].abs()) for c in curvatures]
    if max(values) == 0:
        raise NumericalError("The curvature of the sampled batches is zero, so it cannot be inverted.")
    return _SCALE_MARGIN * max(values)
