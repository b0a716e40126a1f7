"""Fits that score how well the other examples support each label."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from eigentrace.data import Batch, Data
from eigentrace.errors import TaskError, UnsupportedError
from eigentrace.fits.fitted import Fitted
from eigentrace.fits.weighted_directions import Norm
from eigentrace.numeric.accumulate import over
from eigentrace.projection import Job, project
from eigentrace.projection.directions import DenseDirections, Directions
from eigentrace.projection.engine import Compute
from eigentrace.task.checks import check_losses
from eigentrace.task.task import Task, Values

# For cross-entropy, the loss follows from the margin up to rounding; the tolerance covers bfloat16 parameters.
_CROSS_ENTROPY_TOL = 1e-2


def labels_of(task: Task, logits: Tensor, batch: Any) -> Tensor:  # (B, classes) -> (B,)
    """Return the labels, computed from the loss: at logits 0, 1, 2, …, cross-entropy is a constant minus the label.

    A task has losses, not labels. No derivative is needed, so this works inside every transform. The result is -1 if
    a label is not a class.
    """
    classes = logits.shape[-1]
    ramp = torch.arange(classes, dtype=torch.float64, device=logits.device)
    found = ramp.logsumexp(0) - task.output_losses(ramp.expand(logits.shape[0], classes), batch)
    return torch.where(found.isfinite(), found, -1.0).round().long()


def margins(task: Task, values: Values, batch: Any) -> Tensor:  # (B,)
    """Return each example's margin: the logit of its label minus the log-sum-exp of all other logits.

    Cross-entropy is log(1 + exp(−margin)), so the gradients of both are parallel; that of the margin does not vanish
    when the example is fitted.
    """
    logits = _wide(task.outputs(values, batch))
    labels = labels_of(task, logits, batch)
    own = torch.arange(logits.shape[-1], device=logits.device) == labels[:, None]
    chosen = torch.where(own, logits, 0.0).sum(dim=1)
    others = logits.masked_fill(own, -torch.inf).logsumexp(dim=1)
    # NaN for an unknown label, which is then reported with its row, like any loss that is not finite.
    return (chosen - others) * torch.where(labels >= 0, 1.0, torch.nan).to(logits.dtype)


def check_classifier(task: Task, data: Data, what: str) -> int:
    """Return the number of classes; raise UnsupportedError unless the loss is cross-entropy of (B, classes) outputs."""
    if not task.has_outputs:
        raise UnsupportedError(
            f"{what} needs the logits of a classifier, but this task has only `loss`. Use "
            "eigentrace.classification(model), or Task(model, outputs=, output_loss=)."
        )
    first = data.first(8)
    batch = task.place(first.values)
    logits = task.outputs(task.params, batch)
    if not isinstance(logits, Tensor) or logits.ndim != 2 or logits.shape[1] < 2:
        shape = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise UnsupportedError(
            f"{what} needs outputs of shape (B, classes) with at least two classes, got {shape}. Use a task whose "
            "outputs are the logits of a classifier, or another method."
        )
    try:
        expected = torch.nn.functional.softplus(-margins(task, task.params, batch))
    except RuntimeError as error:
        raise TaskError(
            f"The task's output_loss failed on float64 outputs: {error} | Make it use the dtype of the outputs."
        ) from error
    losses = task.losses(task.params, batch).to(expected.dtype)
    if not torch.allclose(expected, losses, rtol=_CROSS_ENTROPY_TOL, atol=_CROSS_ENTROPY_TOL):
        raise UnsupportedError(
            f"{what} needs plain cross-entropy, but this task's loss of row {first.rows[0]} is {losses[0]:.4g} and "
            f"cross-entropy is {expected[0]:.4g}. Use a loss without class weights and label smoothing."
        )
    return logits.shape[1]


def job_of(task: Task, function: Any, directions: Directions | None, norms: bool, compute: Compute) -> Job:
    """Create a job that differentiates `function(task, values, batch)`, with the task in the precision of `compute`."""
    job = Job.of(task, "losses", directions, norms, compute)
    return Job(job.task, partial(function, job.task), job.directions, norms, compute)


@dataclass(frozen=True, repr=False)
class SupportFit(Fitted):
    """The sum of the unit margin gradients of all training examples, with which each example is compared."""

    task: Task
    total: Tensor  # (P,)
    method: dict[str, Any]
    num_train: int
    has_curvature: bool = False

    def _self(self, data: Data, *, queries: bool, norm: Norm, compute: Compute) -> Tensor:
        """Score training examples; each is assumed to be part of the sum, and its own share is subtracted."""
        scores = torch.empty(len(data), dtype=self.task.layout.dtype, device="cpu")
        with self.task.session():
            total = DenseDirections(self.total[None], self.task.layout)
            for batch, found in project(job_of(self.task, margins, total, True, compute), data, "Support"):
                norms = found.squares().sqrt()
                along = over(found.features[:, 0], norms) - (norms > 0).to(norms)
                scores[batch.rows] = (-along / self.num_train).to(scores)
        return scores


@dataclass(frozen=True)
class Features:
    """Features of examples: projected gradients of functions of the logits, concatenated and scaled to unit norm."""

    task: Task
    directions: DenseDirections
    functions: Tensor  # (F, classes)

    def of(self, data: Data, compute: Compute) -> Iterator[tuple[Batch, Tensor, Tensor]]:
        """Yield batches with features (B, F·K) and centred one-hot labels (B, classes), both float64."""
        # All passes run in step, so they need the same batches.
        compute = replace(compute, batch="data") if compute.batch == "auto" else compute
        passes = [
            project(
                job_of(self.task, partial(_combined, weights), self.directions, False, compute), data, "Logit gradients"
            )
            for weights in self.functions.to(self.task.layout.device)
        ]
        for found in zip(*passes, strict=True):
            batch: Batch = found[0][0]
            psi = torch.cat([projection.features for _, projection in found], dim=1).double()
            yield batch, over(psi, psi.norm(dim=1, keepdim=True)), self._targets(batch)

    def _targets(self, batch: Batch) -> Tensor:  # (B, classes)
        classes = self.functions.shape[1]
        like = torch.zeros(len(batch), classes, device=self.task.layout.device)
        values = self.task.place(batch.values)
        check_losses(self.task.output_losses(like, values), batch.rows, task=self.task, batch=values)
        labels = labels_of(self.task, like, values)
        return (torch.arange(classes, device=labels.device) == labels[:, None]).double() - 1 / classes


@dataclass(frozen=True, repr=False)
class TangentFit(Fitted):
    """A ridge regression of labels on features, with the matrices for leave-one-out predictions."""

    task: Task
    described: Features
    inverse: Tensor  # (F·K, F·K) (ΨᵀΨ/N + λ)⁻¹ / N
    weights: Tensor  # (F·K, classes)
    method: dict[str, Any]
    num_train: int
    has_curvature: bool = False

    def _self(self, data: Data, *, queries: bool, norm: Norm, compute: Compute) -> Tensor:
        """Score training examples; each is assumed to be part of the regression, and is left out of its prediction."""
        scores = torch.empty(len(data), dtype=self.task.layout.dtype, device="cpu")
        with self.task.session():
            for batch, psi, targets in self.described.of(data, compute):
                without = left_out(psi @ self.weights, targets, leverage(psi, self.inverse))
                own = targets > 0
                others = without.masked_fill(own, -torch.inf).max(dim=1).values
                scores[batch.rows] = (others - torch.where(own, without, 0.0).sum(dim=1)).to(scores)
        return scores


def leverage(psi: Tensor, inverse: Tensor) -> Tensor:  # (B, D), (D, D) -> (B,)
    """Return the leverage of each example, its weight in its own prediction, between 0 and 1."""
    return ((psi @ inverse) * psi).sum(dim=1)


def left_out(predicted: Tensor, targets: Tensor, own: Tensor) -> Tensor:  # (B, classes)
    """Return the leave-one-out prediction of each example, (ŷ − h·y)/(1 − h) with the leverage h in `own`."""
    return (predicted - own[:, None] * targets) / (1 - own[:, None]).clamp_min(torch.finfo(own.dtype).eps)


def _combined(weights: Tensor, task: Task, values: Values, batch: Any) -> Tensor:  # (B,)
    logits = task.outputs(values, batch)
    return logits @ weights.to(logits.dtype)


def _wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()
