"""Checks of curvature products before an iteration: repeatable, symmetric, equal to finite differences."""

import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from eigentrace.curvature.operator import Curvature, working_form
from eigentrace.curvature.products import output_product
from eigentrace.errors import (
    DeterminismError,
    NumericalError,
    PrecisionWarning,
    TaskError,
)
from eigentrace.numeric.memory import free_memory
from eigentrace.progress import track
from eigentrace.task.checks import check_losses
from eigentrace.task.company import SAME_TOL, CompanyCheck, precision_of
from eigentrace.task.derivatives import LACKING, gradient
from eigentrace.task.task import Task

# Finite differences of float32 gradients are good to about a percent; a wrong derivative rule is off by more.
_FINITE_DIFFERENCE_TOL = 0.1
# Lengths of steps relative to that of the parameters, in lower precision and in float64.
_FINITE_DIFFERENCE_STEPS = (1e-2, 1e-3, 1e-4), (1e-3, 1e-5, 1e-7)

# Vectors of P numbers that a product in float64 takes, generously.
_DOUBLE_VECTORS = 12

# Relative error above which products are reported as wrong; rounding in a float32 model that is not saturated is far
# below.
_WRONG = 0.05


def check_curvature(curvature: Curvature, generator: torch.Generator) -> Curvature:
    """Choose how to differentiate H, and check that products are repeatable and match finite differences."""
    _check_sample(curvature)
    batch = curvature.first_batch()
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
    product = curvature.matvec(u)
    one, other = float(v @ product), float(u @ first)
    # Rounding in ⟨v, Hu⟩ is relative to ‖Hu‖, which for a random v is larger by up to the square root of P.
    is_symmetric = abs(one - other) <= max(50 * tol, _WRONG) * max(abs(one), abs(other))
    gap = _gap_to_difference(curvature, u, batch) if curvature.kind == "hessian" else 0.0
    is_different = gap > _FINITE_DIFFERENCE_TOL
    # What looks wrong in float32 is computed again in float64, which tells rounding from a wrong rule.
    double = _in_float64(curvature, u) if curvature.kind == "hessian" and (is_different or not is_symmetric) else None
    if _warn_if_saturated(curvature, u, product, double, is_symmetric=is_symmetric):
        return curvature
    if not is_symmetric:
        warnings.warn(
            f"The curvature is not symmetric (⟨v, Hu⟩ = {one:.4g}, ⟨u, Hv⟩ = {other:.4g}): some operation of the model "
            "has inconsistent derivative rules. Scores may depend on the engine; replace custom or unusual operations.",
            PrecisionWarning,
            stacklevel=3,
        )
    if is_different and double is not None:
        gap = _gap_to_difference(double, u.double(), double.first_batch())
    if gap > _FINITE_DIFFERENCE_TOL:
        warnings.warn(
            f"The Hessian product differs by {gap:.0%} from a finite difference of gradients. This is expected for "
            "models with kinks (ReLU, max pooling) or in low precision. With smooth activations in float32 it "
            "indicates a wrong derivative rule; curvature='gauss-newton' is safer.",
            PrecisionWarning,
            stacklevel=3,
        )
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


def _warn_if_saturated(
    curvature: Curvature, u: Tensor, product: Tensor, double: Curvature | None, *, is_symmetric: bool
) -> bool:
    """Warn if rounding in the loss makes products wrong, and return whether it does.

    Args:
        curvature: The operator.
        u: A vector (P,).
        product: Its product with the operator.
        double: The operator in float64, if products look wrong.
        is_symmetric: Whether the operator is symmetric.
    """
    what, error = "the second derivatives of the loss in the model's outputs", 0.0
    # In a Hessian, other terms hide those of a saturated loss. Gauss-Newton products have no others.
    if not is_symmetric or curvature.kind == "gauss-newton":
        error = _asymmetry_of_loss(curvature)
    if error <= _WRONG and double is not None:
        batch = curvature.first_batch()
        single, size = curvature.product_on(u, batch), curvature.task.losses(curvature.task.params, batch).numel()
        off = float((double.product_on(u.double(), double.first_batch()) - single.double()).norm()) / size
        # Relative to the product of the whole sample: a saturated batch matters little if others are larger.
        scale = max(float(product.norm()), float(single.norm()) / size)
        what, error = "products of the Hessian", off / scale if scale else 0.0
    if error <= _WRONG:
        return False
    dtype = str(curvature.task.layout.dtype).removeprefix("torch.")
    remedy = "Fit task.double(), which computes in float64, or an" if dtype != "float64" else "Fit an"
    warnings.warn(
        f"In {dtype}, {what} are off by about {error:.0%}, and so are eigenvalues and scores. This happens if the "
        f"loss is saturated: probabilities round to exactly 0 or 1. {remedy} earlier checkpoint. If the outputs are "
        "not that large, a custom operation of the loss has inconsistent derivative rules.",
        PrecisionWarning,
        stacklevel=4,
    )
    return True


def _in_float64(curvature: Curvature, v: Tensor) -> Curvature | None:
    """Return a float32 operator in float64, tested on a vector; None if there is none or if it does not fit."""
    task = curvature.task
    numbers = sum(value.numel() for value in task.tensors().values()) + _DOUBLE_VECTORS * task.layout.numel
    is_float32 = precision_of(task) == "fp32" and curvature.precision == "fp32"
    if not is_float32 or numbers * torch.float64.itemsize > free_memory(task.layout.device):
        return None
    double = Curvature(task.double(), curvature.data, curvature.rows, curvature.kind, form=curvature.form)
    try:
        double.product_on(v.double(), double.first_batch())
    except LACKING:
        return None
    return double


def _asymmetry_of_loss(curvature: Curvature) -> float:
    """Return by how much the Hessian of the loss in the outputs deviates from a symmetric one; 0 if it is unknown.

    Where softmax rounds to exactly 1, the product of that class is lost, and those of the others are not. Batches are
    added up until the deviation is small: saturated ones do not matter if others have more curvature.
    """
    gaps, sizes = 0.0, 0.0
    batches = curvature.batches() if curvature.task.has_outputs else iter(())
    for batch in batches:
        outputs = curvature.task.outputs(curvature.task.params, batch)
        if not isinstance(outputs, Tensor) or not outputs.is_floating_point():
            return 0.0
        try:
            one, other = _products_both_ways(curvature.task, outputs, batch)
        except LACKING:  # a loss that supports forward mode only
            return 0.0
        gaps += float((one - other).abs().sum())
        sizes += float(torch.maximum(one.abs(), other.abs()).sum())
        if gaps <= _WRONG * sizes:
            break
    return gaps / sizes if sizes else 0.0


def _products_both_ways(task: Task, outputs: Tensor, batch: Any) -> tuple[Tensor, Tensor]:  # (B,), (B,)
    """Return ⟨a, Sb⟩ and ⟨b, Sa⟩ of each example, for the Hessian S of its loss in the outputs and random a, b."""
    # Drawn on the device: the outputs of a language model have many numbers.
    generator = torch.Generator(outputs.device).manual_seed(0)
    a, b = torch.randn((2, *outputs.shape), generator=generator, dtype=outputs.dtype, device=outputs.device)

    def product(left: Tensor, right: Tensor) -> Tensor:
        found = left * output_product(task, outputs, right, batch)
        return found.reshape(len(found), -1).sum(dim=1, dtype=torch.float64)

    return product(a, b), product(b, a)


def _gap_to_difference(curvature: Curvature, v: Tensor, batch: Any) -> float:
    """Return the relative difference of Hv and (g(θ+εv) − g(θ−εv)) / 2ε on a batch, for the best of a few ε."""
    task, exact = curvature.task, curvature.product_on(v, batch)
    layout, center = task.layout, task.vector
    gaps = []
    for step in _FINITE_DIFFERENCE_STEPS[layout.dtype == torch.float64]:
        epsilon = step * float(center.norm().clamp_min(1.0))
        ends = [layout.flatten(gradient(task, layout.unflatten(center + e * v), batch)) for e in (epsilon, -epsilon)]
        difference = (ends[0] - ends[1]) / (2 * epsilon)
        size = max(float(exact.norm()), float(difference.norm()))
        gaps.append(float((difference - exact).norm()) / size if size else 0.0)
    return min(gaps)
