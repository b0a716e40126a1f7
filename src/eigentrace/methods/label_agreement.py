"""Fits that hold one example against all others: do they back its label?"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from eigentrace.data import Batch, Data
from eigentrace.errors import TaskError, UnsupportedError
from eigentrace.fits.fitted import Fitted
from eigentrace.numeric.accumulate import over
from eigentrace.projection import Job, project
from eigentrace.projection.directions import DenseDirections, Directions
from eigentrace.projection.engine import Compute
from eigentrace.task.checks import check_losses
from eigentrace.task.task import Task, Values

# Losses and margins of one example agree to rounding if the loss is cross-entropy, in bfloat16 parameters too.
_CROSS_ENTROPY_TOL = 1e-2


def labels_of(task: Task, logits: Tensor, batch: Any) -> Tensor:  # (B, classes) -> (B,)
    """Read the labels off the loss: where logits are 0, 1, 2, …, it is a constant less the number of the class.

    Tasks know losses, not labels. This asks for no derivative, so that it works inside every transform; -1 stands for
    a label that is no class.
    """
    classes = logits.shape[-1]
    ramp = torch.arange(classes, dtype=torch.float64, device=logits.device)
    found = ramp.logsumexp(0) - task.output_losses(ramp.expand(logits.shape[0], classes), batch)
    return torch.where(found.isfinite(), found, -1.0).round().long()


def margins(task: Task, values: Values, batch: Any) -> Tensor:  # (B,)
    """Take each example's margin: the logit of its label above the log-sum-exp of all others.

    Cross-entropy is log(1 + exp(−margin)), so both have gradients along one line; the margin's does not vanish when
    the example is fitted.
    """
    logits = _wide(task.outputs(values, batch))
    labels = labels_of(task, logits, batch)
    own = torch.arange(logits.shape[-1], device=logits.device) == labels[:, None]
    chosen = torch.where(own, logits, 0.0).sum(dim=1)
    others = logits.masked_fill(own, -torch.inf).logsumexp(dim=1)
    # Times NaN, so that an unknown label is reported with its row as everywhere else.
    return (chosen - others) * torch.where(labels >= 0, 1.0, torch.nan).to(logits.dtype)


def check_classifier(task: Task, data: Data, what: str) -> int:
    """Refuse tasks whose loss is not the cross-entropy of (B, classes) outputs; return the number of classes."""
    if not task.has_outputs:
        raise UnsupportedError(
            f"{what} needs the logits of a classifier, and this task gives only `loss`. Use "
            "eigentrace.classification(model), or Task(model, outputs=, output_loss=)."
        )
    first = data.first(8)
    batch = task.place(first.values)
    logits = task.outputs(task.params, batch)
    if not isinstance(logits, Tensor) or logits.ndim != 2 or logits.shape[1] < 2:
        shape = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise UnsupportedError(f"{what} needs outputs of shape (B, classes), at least two classes, and got {shape}.")
    try:
        expected = torch.nn.functional.softplus(-margins(task, task.params, batch))
    except RuntimeError as error:
        raise TaskError(
            f"The task's output_loss does not take float64 outputs: {error} | Let it follow their type."
        ) from error
    losses = task.losses(task.params, batch).to(expected.dtype)
    if not torch.allclose(expected, losses, rtol=_CROSS_ENTROPY_TOL, atol=_CROSS_ENTROPY_TOL):
        raise UnsupportedError(
            f"{what} needs plain cross-entropy, and this task's loss of row {first.rows[0]} is {losses[0]:.4g} where "
            f"cross-entropy is {expected[0]:.4g}. Leave out class weights and label smoothing."
        )
    return logits.shape[1]


def job_of(task: Task, function: Any, directions: Directions | None, norms: bool, compute: Compute) -> Job:
    """Make a job that differentiates `function(task, values, batch)` of the task in the precision asked for."""
    job = Job.of(task, "losses", directions, norms, compute)
    return Job(job.task, partial(function, job.task), job.directions, norms, compute)


@dataclass(frozen=True)
class SupportFit(Fitted):
    """The sum of everybody's unit margin gradients, against which each example is held."""

    task: Task
    total: Tensor  # (P,)
    method: dict[str, Any]
    num_train: int
    has_curvature: bool = False

    def _self(self, data: Data, *, queries: bool, unit_gradients: bool, compute: Compute) -> Tensor:
        """Score training examples: each is taken to be one of those summed up, and taken out again."""
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
    """What examples are described by: gradients of functions of the logits, projected, side by side, at unit length."""

    task: Task
    directions: DenseDirections
    functions: Tensor  # (F, classes)

    def of(self, data: Data, compute: Compute) -> Iterator[tuple[Batch, Tensor, Tensor]]:
        """Yield batches with features (B, F·K) and centred one-hot labels (B, classes), both float64."""
        # One size of batch for all passes, which go side by side.
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


@dataclass(frozen=True)
class TangentFit(Fitted):
    """A ridge regression of labels on features, with what leaving one example out needs."""

    task: Task
    described: Features
    inverse: Tensor  # (F·K, F·K) (ΨᵀΨ/N + λ)⁻¹ / N
    weights: Tensor  # (F·K, classes)
    method: dict[str, Any]
    num_train: int
    has_curvature: bool = False

    def _self(self, data: Data, *, queries: bool, unit_gradients: bool, compute: Compute) -> Tensor:
        """Score training examples: each is taken to be one of those regressed on, and left out again."""
        scores = torch.empty(len(data), dtype=self.task.layout.dtype, device="cpu")
        with self.task.session():
            for batch, psi, targets in self.described.of(data, compute):
                without = left_out(psi @ self.weights, targets, leverage(psi, self.inverse))
                own = targets > 0
                others = without.masked_fill(own, -torch.inf).max(dim=1).values
                scores[batch.rows] = (others - torch.where(own, without, 0.0).sum(dim=1)).to(scores)
        return scores


def leverage(psi: Tensor, inverse: Tensor) -> Tensor:  # (B, D), (D, D) -> (B,)
    """Return how far each example determines its own prediction, between 0 and 1."""
    return ((psi @ inverse) * psi).sum(dim=1)


def left_out(predicted: Tensor, targets: Tensor, own: Tensor) -> Tensor:  # (B, classes)
    """Predict each example by a regression without it: (ŷ − h·y)/(1 − h)."""
    return (predicted - own[:, None] * targets) / (1 - own[:, None]).clamp_min(torch.finfo(own.dtype).eps)


def _combined(weights: Tensor, task: Task, values: Values, batch: Any) -> Tensor:  # (B,)
    logits = task.outputs(values, batch)
    return logits @ weights.to(logits.dtype)


def _wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()
