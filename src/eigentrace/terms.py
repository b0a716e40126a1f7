"""The terms that a fit's scores are the sum of, and what every one of them says about a batch of examples."""

from collections.abc import Generator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eigentrace.blocks import Block, What, at_state
from eigentrace.compute import Compute
from eigentrace.data import Batch, Data
from eigentrace.ensemble import Ensemble
from eigentrace.errors import TaskError, UnsupportedError
from eigentrace.fitted import Fitted
from eigentrace.probe import check_trial
from eigentrace.project import Job, Projection, project
from eigentrace.projected import ProjectedFit
from eigentrace.task import Task

FEATURES = "features"
EXPONENTS = "feature_exponents"
"""Of rows in half precision: the power of two that each was scaled by."""


@dataclass(frozen=True)
class Term:
    """One block of a fit, the task it belongs to, and its share of the score."""

    task: Task
    block: Block
    share: float


def terms_of(fitted: Fitted) -> tuple[Term, ...]:
    """Take a fit apart into the terms that its scores are the sum of."""
    if isinstance(fitted, Ensemble):
        members = len(fitted.members)
        return tuple(Term(t.task, t.block, t.share / members) for m in fitted.members for t in terms_of(m))
    if isinstance(fitted, ProjectedFit):
        return tuple(Term(fitted.task, block, 1.0) for block in fitted.blocks)
    raise UnsupportedError(
        f"{type(fitted).__name__} has no features to store in a run. Score with fitted.self_influence(data), and hand "
        "the numbers to eigentrace.score(another_fit, data, out, columns={'my_score': scores}) to clean by them."
    )


def held_part(terms: tuple[Term, ...]) -> str:
    """Say how much of a score the stored features hold."""
    if not any(term.block.rows.count for term in terms):
        return "nothing"
    return "everything" if all(term.block.identity == 0 for term in terms) else "kept directions"


def weights_of(terms: tuple[Term, ...]) -> Tensor:  # (K,)
    """Weigh features for scores of their own: what the identity adds along kept directions is part of theirs."""
    return torch.cat([(term.block.weights + term.block.identity) * term.share for term in terms])


def scored(
    terms: tuple[Term, ...], data: Data, compute: Compute, rows: range | None = None, what: What = "losses"
) -> Generator[dict[str, Tensor]]:
    """Yield, batch by batch and on the CPU, what is known of the examples: features, norms, scores, classes."""
    for term in terms:
        check_trial(term.task, data)
    with ExitStack() as stack:
        here = [stack.enter_context(at_state(term.task, term.block)) for term in terms]
        passes = [
            project(Job.of(task, what, term.block.rows, True, compute), data, "Scoring", rows, digests=number == 0)
            for number, (task, term) in enumerate(zip(here, terms, strict=True))
        ]
        for found in zip(*passes, strict=True):
            batch = found[0][0]
            yield _kept(terms, batch, [projection for _, projection in found]) | _described(terms[0], batch)


def _kept(terms: tuple[Term, ...], batch: Batch, found: list[Projection]) -> dict[str, Tensor]:
    total: Tensor | None = None
    features = []
    for term, projection in zip(terms, found, strict=True):
        phi = term.block.settled(projection.features)
        own = phi.square() @ term.block.weights.to(phi) + term.block.identity * projection.squares()
        total = own * term.share if total is None else total + own * term.share
        features.append(phi)
    kept = {
        "loss": found[0].losses,
        "square_norm": found[0].squares(),
        "self_influence": total,
        FEATURES: torch.cat(features, dim=1),
    }
    result = {name: tensor.cpu() for name, tensor in kept.items() if tensor is not None and tensor.numel()}
    if batch.digests is not None:
        result["digest"] = torch.from_numpy(batch.digests.view(np.int64).copy())
    return result


def _described(term: Term, batch: Batch) -> dict[str, Tensor]:
    """Ask the model itself what it makes of the examples: the loss where features are taken elsewhere, and classes."""
    task = term.task
    values = task.place(batch.values)
    found: dict[str, Tensor] = {}
    if term.block.state is not None:
        found["loss"] = task.losses(task.params, values)
    if task.has_labels:
        found |= _classes(task, values)
    return {name: tensor.cpu() for name, tensor in found.items()}


def _classes(task: Task, values: Any) -> dict[str, Tensor]:
    labels, outputs = task.labels(values).long(), task.outputs(task.params, values)
    shape = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
    if not isinstance(outputs, Tensor) or outputs.ndim != 2 or len(outputs) != len(labels) or outputs.shape[1] < 2:
        raise TaskError(
            f"A task with `labels` must have one output per class, shape ({len(labels)}, classes) for this batch, got "
            f"{shape}. Leave `labels` out, or give two outputs for two classes."
        )
    confidence, prediction = outputs.float().softmax(dim=1).max(dim=1)
    return {"label": labels, "prediction": prediction, "confidence": confidence}


def measured(fitted: Fitted, queries: Data, compute: Compute) -> dict[str, Tensor]:
    """Say the same of queries, all at once, by what queries are measured by."""
    parts = list(scored(terms_of(fitted), queries, compute, what="measurements"))
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
