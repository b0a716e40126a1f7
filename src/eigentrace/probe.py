"""Checks made before any expensive work: wrong numbers must stop here, with the likely cause named."""

import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import grad

from eigentrace.batch import select, tensors_of
from eigentrace.curvature import Curvature, working_form
from eigentrace.data import Batch, Data
from eigentrace.errors import DeterminismError, NumericalError, PrecisionWarning, TaskError
from eigentrace.task import Task, Values

# Relative differences above which two evaluations of the same thing count as different. Rounding in float64, in
# float32 with the atomics of a GPU, and in bfloat16 stays well below; dropout or a shuffled loader is of order one.
_SAME_TOL = {"fp64": 1e-8, "fp32": 1e-3, "bf16": 5e-2}
# Finite differences of float32 gradients are good to about a percent; a wrong derivative rule is off by more.
_FINITE_DIFFERENCE_TOL = 0.1
_FINITE_DIFFERENCE_STEPS = (1e-2, 1e-3, 1e-4)


def check_task(task: Task, data: Data) -> None:
    """Check that the loss is per example, finite, repeatable, and that evaluating it leaves the model alone."""
    first, again = _first(data), _first(data)
    if not _same_batch(first, again):
        raise DeterminismError(
            "Reading the first batch twice gave different numbers: the dataset augments or shuffles at random. Give "
            "the examples as the model should be asked about them, without random transforms."
        )
    batch = task.place(first.values)
    losses = _losses_leaving_model_alone(task, batch)
    if len(losses) != len(first):
        raise TaskError(
            f"The loss returned {len(losses)} numbers for a batch of {len(first)} examples. It must return one per "
            "example: sum over tokens or pixels inside an example, never over examples."
        )
    if not losses.isfinite().all():
        bad = first.rows[~losses.isfinite().cpu().numpy()]
        raise NumericalError(
            f"The loss is not finite for {len(bad)} examples of the first batch (first: row {bad[0]}). Check the "
            "inputs and labels of that row, and that the model was loaded with its trained weights."
        )
    _check_repeatable(task, batch, losses)
    _check_independent(task, batch, losses)
    _check_gradient(task, batch, losses)
    if any(dtype == torch.bfloat16 for dtype in task.layout.dtypes):
        warnings.warn(
            "Some selected parameters are stored in bfloat16, so gradients carry about two digits. Load the model in "
            "float32 and pass precision='bf16' to compute fast with full-precision parameters.",
            PrecisionWarning,
            stacklevel=3,
        )


def check_curvature(curvature: Curvature, generator: torch.Generator) -> Curvature:
    """Settle how H is differentiated and check it: twice the same, and equal to a finite difference of gradients."""
    batch = next(curvature.batches())
    curvature = replace(curvature, form=working_form(curvature, batch))
    layout = curvature.task.layout
    v = torch.randn(layout.numel, generator=generator, dtype=layout.dtype).to(layout.device)
    v /= v.norm()
    first, second = curvature.product_on(v, batch), curvature.product_on(v, batch)
    if not first.isfinite().all():
        raise NumericalError(
            "The curvature of the first batch is not finite although its loss is. Look for square roots or divisions "
            "at zero in the model or the loss."
        )
    gap = (first - second).norm() / first.norm().clamp_min(torch.finfo(layout.dtype).tiny)
    tol = _SAME_TOL["bf16" if curvature.precision == "bf16" else _precision(curvature.task)]
    if gap > tol:
        raise DeterminismError(
            f"Multiplying the curvature with the same vector twice differs by {gap:.2g} of its size (allowed {tol:g}). "
            "Something draws random numbers: dropout called as a function with training=True, or noise in the loss."
        )
    if curvature.kind == "hessian" and first.norm() > 0:
        _warn_unless_difference(curvature, first / first.norm(), batch)
    return curvature


def _first(data: Data) -> Batch:
    # A generator with workers must be closed at once, not whenever it is collected.
    batches = data.batches(np.arange(min(len(data), 8)))
    try:
        return next(batches)
    finally:
        batches.close()  # type: ignore[attr-defined]


def _same_batch(a: Batch, b: Batch) -> bool:
    pairs = zip(tensors_of(a.values), tensors_of(b.values), strict=True)
    return all(x.shape == y.shape and torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in pairs)


def _precision(task: Task) -> str:
    if torch.bfloat16 in task.layout.dtypes:
        return "bf16"
    return "fp64" if task.layout.dtype == torch.float64 else "fp32"


def _losses_leaving_model_alone(task: Task, batch: Any) -> Tensor:
    tensors = dict(task.model.named_parameters()) | dict(task.model.named_buffers())
    before = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    values = {name: value.clone() for name, value in task.params.items()}
    losses = task.losses(values, batch).detach()
    after = tensors | values
    changed = [
        n for n, old in (before | task.params).items() if not torch.equal(after[n].nan_to_num(), old.nan_to_num())
    ]
    if changed:
        for name in changed:
            tensors[name].detach().copy_(before[name])
        raise TaskError(
            f"Evaluating the loss changes {changed[0]!r} in place, even in eval mode. The changes were undone. Compute "
            "without writing to parameters or buffers inside forward."
        )
    return losses


def _relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max() / a.abs().max().clamp_min(1e-6))


def _check_repeatable(task: Task, batch: Any, losses: Tensor) -> None:
    gap = _relative(losses, task.losses(task.params, batch))
    if gap > _SAME_TOL[_precision(task)]:
        raise DeterminismError(
            f"Evaluating the loss of one batch twice differs by {gap:.2g} of its size, in eval mode. Something draws "
            "random numbers: dropout called as a function with training=True, random masking, or noise."
        )


def _check_independent(task: Task, batch: Any, losses: Tensor) -> None:
    if len(losses) < 2:
        return
    alone = task.losses(task.params, select(batch, slice(0, 1), len(losses)))
    gap = _relative(losses[:1], alone) if len(alone) == 1 else float("inf")
    if gap > max(_SAME_TOL[_precision(task)], 1e-3):
        raise TaskError(
            f"The loss of an example changes by {gap:.2g} of its size when it is alone in its batch, so losses are not "
            "per example. Look for a division by the batch's size or token count, batch statistics, or other examples."
        )


def _check_gradient(task: Task, batch: Any, losses: Tensor) -> None:
    try:
        gradient = task.layout.flatten(_gradient(task, task.params, batch))
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise TaskError(
            f"The loss cannot be differentiated: {error} | If an in-place operation is named, write it out of place "
            "(inplace=False); if a sparse gradient is, use sparse=False."
        ) from error
    if not gradient.isfinite().all():
        sizes = torch.cat([torch.full((n,), i) for i, n in enumerate(task.layout.sizes)])
        name = task.layout.names[int(sizes[~gradient.isfinite().cpu()][0])]
        raise NumericalError(
            f"The loss is finite but its gradient is not, first in {name!r}. Look for square roots, logarithms or "
            "norms at zero."
        )
    if not gradient.any() and losses.any():
        raise TaskError(
            "The gradient of the loss in the selected parameters is exactly zero: the loss does not depend on them. "
            "Look for .detach(), .item(), torch.no_grad() or argmax inside the loss, or select other parameters."
        )


def _gradient(task: Task, values: Values, batch: Any) -> Values:
    return grad(lambda p: task.losses(p, batch).sum())(values)


def _warn_unless_difference(curvature: Curvature, v: Tensor, batch: Any) -> None:
    """Compare Hv with (g(θ+εv) − g(θ−εv)) / 2ε along a direction of large curvature, at the best of a few ε."""
    task, layout = curvature.task, curvature.task.layout
    exact, center = curvature.product_on(v, batch), task.vector
    gaps = []
    for step in _FINITE_DIFFERENCE_STEPS:
        epsilon = step * float(center.norm().clamp_min(1.0))
        ends = [
            layout.flatten(_gradient(task, layout.unflatten(center + sign * epsilon * v), batch)) for sign in (1, -1)
        ]
        gaps.append(float(((ends[0] - ends[1]) / (2 * epsilon) - exact).norm() / exact.norm()))
    if min(gaps) > _FINITE_DIFFERENCE_TOL:
        warnings.warn(
            f"The Hessian product differs by {min(gaps):.0%} from a finite difference of gradients. Models with kinks "
            "(ReLU, max pooling) or in low precision do this; with smooth activations in float32 it points to a wrong "
            "derivative rule, and curvature='gauss-newton' is the safer choice.",
            PrecisionWarning,
            stacklevel=4,
        )
