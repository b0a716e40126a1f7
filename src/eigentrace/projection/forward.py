"""Forward mode, as in the paper: one Jacobian-vector product per direction, without gradients in memory."""

from typing import Any

import torch
from torch import Tensor
from torch.func import jvp, vmap

from eigentrace.errors import UnsupportedError
from eigentrace.projection.engine import Job, Projection

# Tangents per pass through the model; each needs its own copy of the activations.
_MOST_DIRECTIONS_AT_ONCE = 8


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
        return jvp(lambda p: job.function(p, batch), (task.params,), (task.layout.unflatten(tangent),))[1]

    if len(tangents) > 1:
        try:
            return vmap(one)(tangents)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # an operation without a batching rule: one direction at a time
            pass
    return torch.stack([one(tangent) for tangent in tangents])
