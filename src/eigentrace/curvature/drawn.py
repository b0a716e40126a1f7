"""Random gradients whose second moment is the Gauss-Newton matrix of an example.

With S the Hessian of a loss in the model's outputs and r a random vector with E[r rᵀ] = S, the gradient of ⟨r, outputs⟩
has E[g gᵀ] = JᵀSJ. Gradients of the data's own labels do not: they vanish on a network that fits its data.

For a softmax with probabilities p, S = w (diag(p) − p pᵀ) and r = ±√(w p/q) (p − y), with the label y drawn with the
probability q ∝ p ‖p − y‖ and a random sign. Labels drawn with the probability p itself would do, but a model that fits
its data would draw those that carry its curvature too rarely. For any other loss, r = S^½ε with random signs ε,
computed by Lanczos iteration in the space of the outputs.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from eigentrace.curvature.products import output_product
from eigentrace.data import Data
from eigentrace.errors import UnsupportedError
from eigentrace.numeric.accumulate import wide
from eigentrace.numeric.seeding import generator_of
from eigentrace.settings import counted
from eigentrace.task.task import Task, Values

# Relative error up to which the Hessian of a loss counts as that of a softmax.
_SAME, _SAME_HALF = {torch.float64: 1e-8, torch.float32: 1e-2}, 0.1
# Steps of the Lanczos iteration for S^½ε; exact for as many outputs.
_ROOT_STEPS = 32


@dataclass(frozen=True)
class DrawnGradients:
    """The function whose gradients are random, and the preparation of its batches."""

    task: Task
    seed: int = 0

    def prepare(self, values: Any, rows: np.ndarray) -> tuple[Any, ...]:
        """Add what is drawn to a placed batch: a label and ±√(w p/q) for each softmax, or else r for each example."""
        outputs = self.task.outputs(self.task.params, values)
        if not isinstance(outputs, Tensor):
            raise UnsupportedError(
                f"Outputs of type {type(outputs).__name__} cannot be drawn from: return one tensor from `outputs`, or "
                "use labels='data'."
            )
        outputs = outputs.detach()
        if not outputs.ndim or len(outputs) != len(rows):
            raise UnsupportedError(
                f"Outputs of shape {tuple(outputs.shape)} for {counted(len(rows), 'example')} cannot be drawn from: "
                "expected one slice per example along the first dimension. Return them so from `outputs` "
                "(outputs.transpose(0, 1) or outputs.unflatten(0, (B, -1))), or use labels='data'."
            )
        for dim in dict.fromkeys((outputs.ndim - 1, 1)) if outputs.ndim > 1 else ():
            weights = _softmax_weights(self.task, outputs, values, dim)
            if weights is not None:
                logits = wide(outputs.movedim(dim, -1))
                # Two numbers for each position: the point of the label, and the sign.
                points = uniform(rows, 2 * logits[0, ..., 0].numel(), self.seed).to(logits)
                point, sign = (part.reshape(logits.shape[:-1]) for part in (points[:, ::2], points[:, 1::2]))
                labels, ratios = _labels_at(logits, point)
                return values, labels, torch.where(sign < 0.5, -1.0, 1.0) * (weights.to(ratios) * ratios).sqrt(), dim
        signs = 2.0 * (uniform(rows, outputs[0].numel(), self.seed) < 0.5) - 1
        return values, _root_times(self.task, outputs, signs.view(outputs.shape).to(outputs), values)

    def positions(self, data: Data) -> int:
        """Return the number of draws that the first example has: one for each token that counts, or for each output."""
        batch = data.first(1)
        _, *drawn = self.prepare(self.task.place(batch.values), batch.rows)
        return max(1, int((drawn[-2] if len(drawn) > 1 else drawn[0])[0].count_nonzero()))

    def __call__(self, params: Values, batch: tuple[Any, ...]) -> Tensor:  # (B,)
        """Return the function of each example whose gradient is the random one."""
        values, *drawn = batch
        outputs = self.task.outputs(params, values)
        if len(drawn) == 1:
            return (outputs * drawn[0]).reshape(len(outputs), -1).sum(dim=1)
        labels, roots, dim = drawn
        logits = outputs.movedim(dim, -1)
        losses = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none").view(labels.shape)
        return (roots.to(losses) * losses).reshape(len(losses), -1).sum(dim=1)


def _softmax_weights(task: Task, outputs: Tensor, batch: Any, dim: int) -> Tensor | None:  # (B, ...)
    """Return w of each position if S = w (diag(p) − p pᵀ) along a dimension, with p the softmax; None if it is not."""
    v = torch.randn(outputs.shape, generator=generator_of(0), device="cpu").to(outputs)
    found = output_product(task, outputs, v, batch).movedim(dim, -1)
    p, v = outputs.softmax(dim=dim).movedim(dim, -1), v.movedim(dim, -1)
    expected = p * (v - (p * v).sum(dim=-1, keepdim=True))
    size = expected.square().sum(dim=-1)
    weights = torch.where(size > 0, (found * expected).sum(dim=-1) / size.clamp_min(torch.finfo(size.dtype).tiny), 0.0)
    if float((found - weights[..., None] * expected).norm()) > _SAME.get(v.dtype, _SAME_HALF) * float(found.norm()):
        return None
    return weights.clamp_min(0)


def _labels_at(logits: Tensor, points: Tensor) -> tuple[Tensor, Tensor]:  # (..., C), (...) -> (...), (...)
    """Return the class at a point in [0, 1) of the distribution function of q, for each position, and p/q of it."""
    p = logits.softmax(dim=-1)
    # ‖p − y‖² = ‖p‖² − 2p_y + 1; of a class that is certain, from what is left to the others.
    distances = ((1 - p).square() + p.square().sum(dim=-1, keepdim=True) - p.square()).sqrt()
    sums = (p * distances).cumsum(dim=-1)
    total = sums[..., -1]
    labels = torch.searchsorted(sums, (points * total)[..., None], right=True).clamp_max(p.shape[-1] - 1)
    nearest = distances.gather(-1, labels)[..., 0]
    return labels[..., 0], total / nearest.clamp_min(torch.finfo(p.dtype).tiny)


def uniform(rows: np.ndarray, count: int, seed: int) -> Tensor:  # (B,) -> (B, count) float64
    """Return uniform random numbers that depend on the row only, not on the batch that an example is in."""
    first = np.uint64(generator_of(seed).initial_seed())
    # Two rounds of the finaliser of SplitMix64 (Steele, Lea and Flood, 2014) on a counter.
    state = rows.astype(np.uint64)[:, None] * np.uint64(0x9E3779B97F4A7C15) + first
    state = _mixed(state) + np.arange(count, dtype=np.uint64) * np.uint64(0xD1342543DE82EF95)
    return torch.from_numpy((_mixed(_mixed(state)) >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def _mixed(state: np.ndarray) -> np.ndarray:  # uint64
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def _root_times(task: Task, outputs: Tensor, noise: Tensor, batch: Any) -> Tensor:
    """Return S^½ε for each example, with negative eigenvalues of S counted as 0."""
    flat, size = noise.reshape(len(noise), -1).double(), noise[0].numel()
    tiny = torch.finfo(torch.float64).tiny
    start = flat.norm(dim=1)
    basis, steps = [flat / start.clamp_min(tiny)[:, None]], min(size, _ROOT_STEPS)
    projected = torch.zeros(len(flat), steps, steps, dtype=torch.float64, device=flat.device)
    for step in range(steps):
        image = output_product(task, outputs, basis[step].view_as(noise).to(noise.dtype), batch)
        image = image.reshape(flat.shape).double()
        for _ in range(2):
            for row, vector in enumerate(basis):
                dots = (vector * image).sum(dim=1)
                projected[:, row, step] += dots
                image = image - dots[:, None] * vector
        norms = image.norm(dim=1)
        # Rounding is no new direction.
        is_new = norms > 1e-6 * projected[:, : step + 1, : step + 1].flatten(1).norm(dim=1)
        basis.append(torch.where(is_new[:, None], image / norms.clamp_min(tiny)[:, None], 0.0))
        if step + 1 < steps:
            projected[:, step + 1, step] = torch.where(is_new, norms, 0.0)
    values, vectors = torch.linalg.eigh((projected + projected.mT) / 2)
    first = vectors * values.clamp_min(0).sqrt()[:, None]
    coefficients = (first @ vectors.mT)[:, :, 0] * start[:, None]  # (B, steps)
    total = sum(coefficients[:, i, None] * basis[i] for i in range(steps))
    return total.view_as(noise).to(noise.dtype)
