"""Per-example reverse mode: full gradients of a few examples at a time, the reference for other engines."""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from eigentrace.data.batch import select, split
from eigentrace.errors import UnsupportedError
from eigentrace.projection.directions import apply
from eigentrace.projection.engine import Job, Projection, joined
from eigentrace.task.autocast import SeenCasts
from eigentrace.task.task import Values


@dataclass(frozen=True)
class Gradients:
    """Full gradients of a few examples."""

    by_name: dict[str, Tensor]  # each (b, *s)
    losses: Tensor  # (b,) the function that was differentiated
    outputs: Tensor | None = None  # (b, ...)
    """The outputs of the model, if the job requests them and they are a single tensor."""


def vmapped(job: Job, batch: Any, size: int) -> Projection:
    """Project gradients computed by `vmap(grad)`, for as many examples at a time as fit in memory."""
    return _project(job, vmapped_gradients(job, batch, size))


def one_by_one(job: Job, batch: Any, size: int) -> Projection:
    """Project gradients computed one example at a time: slow, but correct for every model that can be trained."""
    return _project(job, single_gradients(job, batch, size))


def vmapped_gradients(job: Job, batch: Any, size: int) -> Iterator[Gradients]:
    """Yield per-example gradients of consecutive parts of the batch, by `vmap(grad)`."""
    tensors, rebuild = split(batch, size)
    if not tensors:
        raise UnsupportedError(f"no tensor of the batch has the {size} examples along its first dimension")

    def value(params: Values, example: list[Tensor]) -> tuple[Tensor, Tensor | tuple[()]]:
        losses, outputs = job.evaluate(params, rebuild_one(example))
        return losses[0], () if outputs is None else outputs[0]

    def rebuild_one(example: list[Tensor]) -> Any:
        return rebuild([t.unsqueeze(0) for t in example])

    at_once = job.vectors_at_once
    for start in range(0, size, at_once):
        part = [t[start : start + at_once] for t in tensors]
        with SeenCasts(job.task.layout.device.type) if job.task.is_bf16 else nullcontext():
            differentiate = vmap(grad_and_value(value, has_aux=True), in_dims=(None, 0))
            found, (losses, outputs) = differentiate(job.task.params, part)
        yield Gradients(found, losses, outputs if isinstance(outputs, Tensor) else None)


def single_gradients(job: Job, batch: Any, size: int) -> Iterator[Gradients]:
    """Yield the gradient of each example by an ordinary backward pass."""
    for i in range(size):
        with torch.enable_grad():
            leaves = {name: value.detach().requires_grad_() for name, value in job.task.params.items()}
            loss, outputs = job.evaluate(leaves, select(batch, slice(i, i + 1), size))
            found = torch.autograd.grad(loss.sum(), list(leaves.values()), materialize_grads=True)
        yield Gradients({name: g[None] for name, g in zip(leaves, found, strict=True)}, loss.detach(), outputs)


def _project(job: Job, parts: Iterator[Gradients]) -> Projection:
    found = []
    for gradients in parts:
        features = apply(job.directions, gradients.by_name)
        squares = total_square_norms(gradients.by_name).to(features.dtype) if job.norms else None
        found.append(Projection(features, squares, gradients.losses, outputs=gradients.outputs))
    return joined(found)


def total_square_norms(gradients: dict[str, Tensor]) -> Tensor:  # (b,)
    """Return the squared norm of each example's gradient over all parameters."""
    squares = [
        g.reshape(len(g), -1).float() if g.dtype.itemsize < 4 else g.reshape(len(g), -1) for g in gradients.values()
    ]
    return torch.stack([g.square().sum(dim=1) for g in squares]).sum(dim=0)
