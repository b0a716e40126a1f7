"""Scores of examples by solutions of a linear system for the gradients of queries."""

from collections.abc import Callable

import torch
from torch import Tensor

from eigentrace.data import Data
from eigentrace.fits.weighted_directions import Norm
from eigentrace.numeric.accumulate import over
from eigentrace.projection import Job, gradients, in_chunks, project
from eigentrace.projection.directions import DenseDirections
from eigentrace.projection.engine import Compute
from eigentrace.task.task import Task


def solved_scores(
    task: Task,
    solve: Callable[[Tensor], Tensor],
    train: Data,
    queries: Data,
    *,
    norm: Norm,
    compute: Compute,
    each: int = 1,
    most: int | None = None,
) -> Tensor:  # (each, Q, N)
    """Return the products of the gradients of examples with the solutions for the gradients of queries.

    As many queries as fit in memory share a pass over the examples.

    Args:
        task: The task.
        solve: Returns `each` solutions for each gradient: (q, P) -> (each · q, P), the first of all, then the second.
        train: The examples.
        queries: The queries.
        norm: Whether gradients are scaled to unit length.
        compute: Engine, precision, memory and batch size of the passes.
        each: Number of solutions per query.
        most: Bytes of the gradients of the queries that share a pass; a quarter of the budget if None.
    """
    total = torch.zeros(each, len(queries), len(train), dtype=task.layout.dtype, device="cpu")
    start = 0
    with task.session():
        query_job = Job.of(task, "measurements", compute=compute)
        for g in in_chunks(gradients(query_job, queries), query_job.budget // 4 if most is None else most):
            solved = solve(over(g, g.norm(dim=1, keepdim=True)) if norm else g)
            job = Job.of(task, "losses", DenseDirections(solved, task.layout), norm is not None, compute)
            for batch, found in project(job, train):
                scores = found.features
                if norm:
                    scores = over(scores, found.squares().sqrt()[:, None])
                total[:, start : start + len(g), batch.rows] = scores.T.unflatten(0, (each, len(g))).cpu()
            start += len(g)
    return total
