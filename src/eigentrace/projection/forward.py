"""Forward mode, as in the paper: one Jacobian-vector product per direction, without gradients in memory."""

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.func import jvp, vmap

from eigentrace.data.batch import select
from eigentrace.errors import UnsupportedError
from eigentrace.projection.directions import apply
from eigentrace.projection.engine import Job, Projection
from eigentrace.projection.reverse import single_gradients
from eigentrace.task.company import precision_of

# Tangents per pass through the model; each needs its own copy of the activations.
_MOST_DIRECTIONS_AT_ONCE = 8
# Relative difference from the features of an ordinary gradient above which the two modes differ by more than rounding.
# A model may round to a smaller type inside.
_REVERSE_TOL, _BF16_REVERSE_TOL = 0.03, 0.3


class CheckedForward:
    """Forward mode that is compared with the ordinary gradient of one example in the first batch of a job.

    Forward mode calls no hooks of the backward pass, and an operation may have another derivative in it.
    """

    __name__ = "forward"

    def __init__(self) -> None:
        self._is_checked = False

    def __call__(self, job: Job, batch: Any, size: int) -> Projection:
        """Project every example of the batch."""
        found = forward(job, batch, size)
        if not self._is_checked and job.directions.count:
            with suppress(torch.OutOfMemoryError):  # there may be room for forward mode only
                self._check(job, batch, size, found.features)
            self._is_checked = True
        return found

    def _check(self, job: Job, batch: Any, size: int, features: Tensor) -> None:
        at = int(features.norm(dim=1).argmax())
        (alone,) = single_gradients(job, select(batch, slice(at, at + 1), size), 1)
        expected = apply(job.directions, alone.by_name)[0].to(features.dtype)
        scale = max(float(expected.norm()), float(features[at].norm()))
        gap = float((expected - features[at]).norm()) / scale if scale else 0.0
        if gap > (_BF16_REVERSE_TOL if precision_of(job.task) == "bf16" else _REVERSE_TOL):
            raise UnsupportedError(
                f"forward mode differs by {gap:.0%} from the gradient of an ordinary backward pass: a hook changes "
                "gradients, or an operation has inconsistent derivative rules"
            )


def forward(job: Job, batch: Any, size: int) -> Projection:
    """Project by Jacobian-vector products of the per-example function with each direction."""
    if job.norms:
        raise UnsupportedError(
            "Forward mode computes no gradient norms: use Compute(engine='auto'), 'layerwise' or 'reverse'."
        )
    task, directions, layout = job.task, job.directions, job.task.layout
    at_once = min(_MOST_DIRECTIONS_AT_ONCE, job.vectors_at_once)
    losses, outputs = job.evaluate(task.params, batch)
    columns = [
        _push(job, directions.dense(start, min(start + at_once, directions.count)), batch)
        for start in range(0, directions.count, at_once)
    ]
    features = torch.cat(columns).T if columns else losses.new_zeros(size, 0)
    return Projection(features.to(layout.dtype), None, losses, outputs=outputs, is_whole=True)


def _push(job: Job, tangents: Tensor, batch: Any) -> Tensor:  # (k, P) -> (k, B)
    task = job.task

    def one(tangent: Tensor) -> Tensor:
        found = jvp(lambda p: job.function(p, batch), (task.params,), (task.layout.unflatten(tangent),))[1]
        return found.detach()  # from the graph of tensors that the user's function holds, such as another model's

    if len(tangents) > 1:
        try:
            return vmap(one)(tangents)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # an operation without a batching rule: one direction at a time
            pass
    return torch.stack([one(tangent) for tangent in tangents])
