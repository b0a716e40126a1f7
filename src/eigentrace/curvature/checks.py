"""Checks of curvature products before an iteration: repeatable, symmetric, equal to finite differences."""

import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from eigentrace.curvature.operator import Curvature, working_form
from eigentrace.curvature.products import output_product
from eigentrace.data.batch import to_double
from eigentrace.errors import (
    DeterminismError,
    NumericalError,
    PrecisionWarning,
    TaskError,
)
from eigentrace.progress import track
from eigentrace.task.checks import check_losses
from eigentrace.task.company import SAME_TOL, CompanyCheck, precision_of
from eigentrace.task.derivatives import LACKING, gradient
from eigentrace.task.task import Task

# Finite differences of float32 gradients are good to about a percent; a wrong derivative rule is off by more.
_FINITE_DIFFERENCE_TOL = 0.1


_FINITE_DIFFERENCE_STEPS = (1e-2, 1e-3, 1e-4)

# Relative error above which products are reported as wrong; rounding in a sound float32 model stays well below.
_WRONG = 0.05
# Outputs of a batch up to this many numbers are also evaluated in float64, which takes eight bytes for each.
_MAX_DOUBLED = 2**24


def check_curvature(curvature: Curvature, generator: torch.Generator) -> Curvature:
    """Choose how to differentiate H, and check that products are repeatable and match finite differences."""
    _check_sample(curvature)
    batches = curvature.batches()
    batch = next(batches)
    batches.close()  # type: ignore[attr-defined]
    curvature = replace(curvature, form=working_form(curvature, batch))
    layout = curvature.task.layout
    v = torch.randn(layout.numel, generator=generator, dtype=layout.dtype, device="cpu").to(layout.device)
    v = _off_padding(curvature.task, v / v.norm())
    first, second = curvature.matvec(v), curvature.matvec(v)
    if not first.isfinite().all():
        raise NumericalError(
            "The curvature is not finite, although the losses are. Look for square roots, norms or "
            "divisions at zero in the model or the loss."
        )
    gap = (first - second).norm() / first.norm().clamp_min(torch.finfo(layout.dtype).tiny)
    tol = SAME_TOL["bf16" if curvature.precision == "bf16" else precision_of(curvature.task)]
    if gap > tol:
        raise DeterminismError(
            f"Two products of the curvature with the same vector differ by {gap:.2g} (relative; allowed {tol:g}). "
            "Something draws random numbers: dropout called as a function with training=True, noise in the loss, or "
            "data that differs when it is read again."
        )
    # A vector of large curvature: along a random one, rounding would dominate a difference of gradients.
    u = _off_padding(curvature.task, first / first.norm() if first.any() else v)
    _warn_unless_symmetric(curvature, float(v @ curvature.matvec(u)), float(u @ first), tol)
    if curvature.kind == "hessian":
        _warn_unless_difference(curvature.task, u, curvature.product_on(u, batch), batch)
    return curvature


def _check_sample(curvature: Curvature) -> None:
    """Check every loss of the curvature sample: one bad row would otherwise only make the product NaN."""
    task, start = curvature.task, 0
    rows = np.arange(len(curvature.data)) if curvature.rows is None else curvature.rows
    in_company = CompanyCheck(task, task.losses)
    for batch in track(curvature.batches(), "Checking losses"):
        losses = task.losses(task.params, batch)
        check_losses(losses, rows[start : start + len(losses)], task=task, batch=batch)
        in_company(batch, rows[start : start + len(losses)], losses)
        start += len(losses)
    if start != len(rows):
        raise TaskError(f"The loss returned {start} numbers for {len(rows)} examples. It must return one per example.")


def _off_padding(task: Task, v: Tensor) -> Tensor:  # (P,) -> (P,)
    """Set a vector to 0 at the padding entries of embeddings, which are constant in derivatives."""
    parts = {name: part.clone() for name, part in task.layout.unflatten(v).items()}
    padded = [m for m in task.model.modules() if isinstance(m, nn.Embedding) and m.padding_idx is not None]
    entries = {id(module.weight): module.padding_idx for module in padded}
    for name, parameter in task.model.named_parameters():
        if name in parts and id(parameter) in entries:
            parts[name][entries[id(parameter)]] = 0
    return task.layout.flatten(parts)


def _warn_unless_symmetric(curvature: Curvature, one: float, other: float, tol: float) -> None:
    """Warn unless ⟨v, Hu⟩ equals ⟨u, Hv⟩, or if a saturated loss makes both of them wrong.

    They differ if forward and reverse derivative rules disagree.
    """
    # Rounding in ⟨v, Hu⟩ is relative to ‖Hu‖, which for a random v is larger by up to the square root of P.
    differ = abs(one - other) > max(50 * tol, _WRONG) * max(abs(one), abs(other))
    # A saturated loss hides behind the other terms of a Hessian, which are not small: ask only if something is wrong.
    error = _saturation(curvature) if differ or curvature.kind == "gauss-newton" else 0.0
    if error > _WRONG:
        warnings.warn(
            f"The loss is saturated: in float32, products with its second derivatives in the outputs are off by "
            f"{error:.0%}, because probabilities round to exactly 0 or 1. Eigenvalues and scores are as wrong. Fit "
            "with task.double(), which computes in float64, or at an earlier checkpoint.",
            PrecisionWarning,
            stacklevel=4,
        )
    elif differ:
        warnings.warn(
            f"The curvature is not symmetric (⟨v, Hu⟩ = {one:.4g}, ⟨u, Hv⟩ = {other:.4g}): some operation of the model "
            "has inconsistent derivative rules, or loses its digits (probabilities next to 0 or 1). Scores may depend "
            "on the engine; replace custom or unusual operations, or fit with task.double().",
            PrecisionWarning,
            stacklevel=4,
        )


def _saturation(curvature: Curvature) -> float:
    """Return the relative error of float32 in second derivatives of the loss in the outputs; 0 if it is not known.

    Compared with float64 at the same outputs, on batch after batch until the error is small: batches of well-fitted
    examples do not matter if others have more curvature.
    """
    task = curvature.task
    if not task.has_outputs or task.layout.dtype != torch.float32:
        return 0.0
    wrong, size, error = 0.0, 0.0, 0.0
    batches = curvature.batches()
    for batch in batches:
        outputs = task.outputs(task.params, batch)
        if not isinstance(outputs, Tensor) or outputs.dtype != torch.float32 or outputs.numel() > _MAX_DOUBLED:
            return 0.0
        draw = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(0), device="cpu").to(outputs.device)
        try:
            exact = output_product(task, outputs.double(), draw.double(), to_double(batch))
        except LACKING:  # a loss that only runs in float32
            return 0.0
        wrong += float((output_product(task, outputs, draw, batch).double() - exact).square().sum())
        size += float(exact.square().sum())
        error = (wrong / size) ** 0.5 if size else 0.0
        if error <= _WRONG:
            break
    batches.close()  # type: ignore[attr-defined]
    return error


def _warn_unless_difference(task: Task, v: Tensor, exact: Tensor, batch: Any) -> None:
    """Warn unless Hv is close to (g(θ+εv) − g(θ−εv)) / 2ε for the best of a few ε."""
    layout, center = task.layout, task.vector
    gaps = []
    for step in _FINITE_DIFFERENCE_STEPS:
        epsilon = step * float(center.norm().clamp_min(1.0))
        ends = [layout.flatten(gradient(task, layout.unflatten(center + e * v), batch)) for e in (epsilon, -epsilon)]
        difference = (ends[0] - ends[1]) / (2 * epsilon)
        size = max(float(exact.norm()), float(difference.norm()))
        gaps.append(float((difference - exact).norm()) / size if size else 0.0)
    if min(gaps) > _FINITE_DIFFERENCE_TOL:
        warnings.warn(
            f"The Hessian product differs by {min(gaps):.0%} from a finite difference of gradients. This is expected "
            "for models with kinks (ReLU, max pooling) or in low precision. With smooth activations in float32 it "
            "indicates a wrong derivative rule; curvature='gauss-newton' is safer.",
            PrecisionWarning,
            stacklevel=4,
        )
