"""The formula of scores: one weight per direction and a weight of the identity, at one checkpoint."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from eigentrace.data import Data
from eigentrace.errors import InputError, NumericalError, UnsupportedError
from eigentrace.fits.cut import Cut, delta_of
from eigentrace.numeric.accumulate import over
from eigentrace.projection import Job, gradients, in_chunks, project
from eigentrace.projection.directions import DenseDirections, Directions, StackedDirections, apply
from eigentrace.projection.engine import Compute, Projection
from eigentrace.settings import counted
from eigentrace.task.checkpoints import Checkpoint
from eigentrace.task.checks import check_loss_fingerprint
from eigentrace.task.task import Task

What = Literal["losses", "measurements"]
Norm = Literal["gradient", "features"] | None
"""What gradients are divided by: their length, the length of their features, or nothing."""


@dataclass(frozen=True)
class Weights:
    """score = Σ directionₖ · φₖ(x) φₖ(z) + Σ coordinate_c · s_c(x) s_c(z) + identity · ⟨g(x), g(z)⟩."""

    index: Tensor  # (k,) the directions in use
    direction: Tensor  # (k,) float64
    identity: float
    delta: float | None
    coordinate: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64, device="cpu"))  # (r,)


def kept_index(eigenvalues: Tensor, cut: Cut) -> Tensor:  # (k,)
    """Return the indices of the eigenpairs that a cut uses."""
    kept = eigenvalues[: cut.keep]
    index = torch.arange(len(kept), device="cpu")
    if cut.positive_only:
        index = index[kept > 0]
        if not len(index):
            raise NumericalError(
                f"positive_only=True leaves no directions: all of the top {len(kept)} eigenvalues are negative, so the "
                "model is far from a minimum. Train it further, or use curvature='gauss-newton'."
            )
    return index


def weigh(eigenvalues: Tensor, cut: Cut, energies: Tensor | None = None) -> Weights:
    """Return the weights of the inverse curvature: 1/λ on the kept directions, and with a tail 1/δ on all others.

    With a tail, H⁻¹ ≈ Gᵀ(Λ+δ)⁻¹G + (I − GᵀG)/δ, negative λ counted as 0. The truncated form (`tail=None`) is the
    paper's; `positive_only` drops negative λ, which occur at saddle points, after selecting the top `keep`.

    A shaped tail has the weights 1/(E + δ) on the residual coordinates s, and 1/δ on the remainder. All of its terms
    are positive: with S⊥ = S(I − GᵀG) the last is (I − GᵀG)(I − SᵀS)(I − GᵀG)/δ. A stored cut leaves out the last term.
    So does a cut that uses all directions there are, for which I − GᵀG = 0.

    Args:
        eigenvalues: All eigenvalues of the fit, by descending |λ|.
        cut: The cut.
        energies: E[s²] of the coordinates in use (r,), if there are any.
    """
    index = kept_index(eigenvalues, cut)
    values = eigenvalues[index]
    delta = delta_of(cut, eigenvalues.abs().tolist())
    if delta is None:
        return Weights(index, 1 / values, 0.0, None)
    beyond = 0.0 if cut.stored or cut.uses_all(len(eigenvalues)) else 1 / delta
    direction = 1 / (values.clamp_min(0) + delta) - beyond
    if energies is None or not (cut.stored or cut.tail == "shaped"):
        return Weights(index, direction, beyond, delta)
    coordinate = 1 / (energies + delta) if cut.tail == "shaped" else torch.full_like(energies, 1 / delta)
    return Weights(index, direction, beyond, delta, coordinate - beyond)


@dataclass(frozen=True)
class Block:
    """One part of a score: Σ weightₖ φₖ(x) φₖ(z) + identity · ⟨g(x), g(z)⟩, with gradients at one checkpoint."""

    directions: Directions
    weights: Tensor  # (K,) float64
    identity: float = 0.0
    state: Checkpoint | None = None
    """The checkpoint; None for the model's current parameters."""
    overlap: Tensor | None = None  # (R, k)
    """S·Gᵀ, for directions [G; S]: the last R features minus this times the first k are those without the kept part."""

    def __repr__(self) -> str:
        place = "" if self.state is None else f", at {self.state}"
        return f"<Block: {counted(self.directions.count, 'direction')}, identity weight {self.identity:.3g}{place}>"

    def settled(self, features: Tensor) -> Tensor:  # (B, K) -> (B, K), in place
        """Subtract the kept part from the coordinates of the tail."""
        if self.overlap is not None:
            k = self.overlap.shape[1]
            features[:, k:] -= features[:, :k] @ self.overlap.to(features).T
        return features

    def own_scores(self, features: Tensor, squares: Tensor | None) -> Tensor:  # (B, K), (B,) -> (B,)
        """Return self-influences from `settled` features and, if there is an identity term, ‖g(x)‖²."""
        scores = features.square() @ self.weights.to(features)
        return scores if squares is None or self.identity == 0 else scores + self.identity * squares

    def weighted(self, features: Tensor) -> Tensor:  # (Q, K) -> (Q, K)
        """Weight settled features of queries such that products with unsettled features of examples are scores."""
        weighted = features * self.weights.to(features)
        if self.overlap is not None:
            k = self.overlap.shape[1]
            weighted[:, :k] -= weighted[:, k:] @ self.overlap.to(features)
        return weighted


@dataclass(frozen=True)
class Term:
    """A block with its task and its share of the scores of a fit."""

    task: Task
    block: Block
    share: float = 1.0


def self_scores(
    task: Task, blocks: Sequence[Block], data: Data, what: What, norm: Norm, compute: Compute
) -> Tensor:  # (N,)
    """Return the self-influence of each example."""
    if compute.engine == "forward" and any(block.identity and block.directions.count for block in blocks):
        raise UnsupportedError(
            "Compute(engine='forward') cannot compute self-influence with the tail of this fit: the tail needs the "
            "norms of gradients, and forward mode only computes their products with directions. Use "
            "Compute(engine='auto'), 'layerwise' or 'reverse'; or leave out the tail (fitted.distill(tail=None)), or "
            "represent it by stored features (fitted.stored(data))."
        )
    _check_norm(blocks, norm)
    check_loss_fingerprint(task, data)
    total = torch.zeros(len(data), dtype=task.layout.dtype, device="cpu")
    for block in blocks:
        with at_state(task, block) as here:
            norms = norm == "gradient" or block.identity != 0
            job = Job.of(here, what, block.directions, norms, compute)
            for batch, found in project(job, data, "Self-influence"):
                features = block.settled(found.features)
                scores = block.own_scores(features, found.squares() if norms else None)
                if norm:
                    scores = over(scores, _length(found, features, norm).square())
                total[batch.rows] += scores.cpu()
    return total


def cross_scores(
    task: Task, blocks: Sequence[Block], train: Data, queries: Data, norm: Norm, compute: Compute
) -> Tensor:  # (Q, N)
    """Return the influence of every training example on every query."""
    _check_norm(blocks, norm)
    check_loss_fingerprint(task, train)
    total = torch.zeros(len(queries), len(train), dtype=task.layout.dtype, device="cpu")
    for block in blocks:
        with at_state(task, block) as here:
            start = 0
            for group in _weighted_queries(block, here, queries, norm, compute):
                stop = start + len(group.left)
                job = Job.of(here, "losses", group.directions, norm == "gradient", compute)
                for batch, found in project(job, train, "Influence"):
                    scores = group.left @ found.features.T
                    if norm == "gradient":
                        scores = over(scores, found.squares().sqrt())
                    elif norm == "features":
                        scores = over(scores, block.settled(found.features).norm(dim=1))
                    total[start:stop, batch.rows] += scores.cpu()
                start = stop
    return total


def _check_norm(blocks: Sequence[Block], norm: Norm) -> None:
    if norm == "features" and any(block.identity for block in blocks):
        raise UnsupportedError(
            "normalize='features' divides by the length of the features, but the tail of this fit needs whole "
            "gradients, which have another length. Leave out the tail (fitted.distill(tail=None)), represent it by "
            "stored features (fitted.stored(data)), or use normalize='gradient'."
        )


def _length(found: Projection, features: Tensor, norm: Norm) -> Tensor:  # (B,)
    """Return the length of each gradient, or of its settled features."""
    return features.norm(dim=1) if norm == "features" else found.squares().sqrt()


@dataclass(frozen=True)
class _WeightedQueries:
    """Queries as coefficients of directions: their scores are left @ features(train)ᵀ."""

    left: Tensor  # (q, k)
    directions: Directions


def _weighted_queries(
    block: Block, task: Task, queries: Data, norm: Norm, compute: Compute
) -> Iterator[_WeightedQueries]:
    """Yield groups of queries that can be scored by one pass over the training data each.

    Without an identity term, K numbers per query suffice, and all queries form one group. With one, the gradients of
    the queries become directions too, as many at a time as fit in memory.
    """
    if block.identity == 0:
        lefts = []
        job = Job.of(task, "measurements", block.directions, norm == "gradient", compute)
        for _, found in project(job, queries):
            features = block.settled(found.features)
            left = block.weighted(features)
            lefts.append(over(left, _length(found, features, norm)[:, None]) if norm else left)
        yield _WeightedQueries(torch.cat(lefts), block.directions)
        return
    job = Job.of(task, "measurements", compute=compute)
    for chunk in in_chunks(gradients(job, queries), job.budget):
        if norm:
            chunk = over(chunk, chunk.norm(dim=1, keepdim=True))  # noqa: PLW2901
        phi = apply(block.directions, task.layout.unflatten(chunk))
        eye = torch.eye(len(chunk), dtype=chunk.dtype, device=chunk.device)
        left = torch.cat([block.weighted(block.settled(phi)), block.identity * eye], dim=1)
        yield _WeightedQueries(left, StackedDirections((block.directions, DenseDirections(chunk, task.layout))))


def features_of(task: Task, blocks: Sequence[Block], data: Data, what: What, compute: Compute) -> Tensor:  # (N, K)
    """Return the features of each example: its projections on the directions of all blocks, concatenated."""
    check_loss_fingerprint(task, data)
    found = []
    for block in blocks:
        result = torch.empty(len(data), block.directions.count, dtype=task.layout.dtype, device="cpu")
        with at_state(task, block) as here:
            for batch, projection in project(Job.of(here, what, block.directions, compute=compute), data):
                result[batch.rows] = block.settled(projection.features).cpu()
        found.append(result)
    return torch.cat(found, dim=1)


def from_features(blocks: Sequence[Block], train: Tensor, queries: Tensor) -> Tensor:  # (N, K), (Q, K) -> (Q, N)
    """Return influences from stored features, without model or data."""
    weights = _weights(blocks, train, queries)
    if any(block.identity for block in blocks):
        raise UnsupportedError(
            "The scores of this fit need whole gradients, because its features do not include its tail. Use "
            "fitted.stored(data), whose features represent the tail, or a cut with tail=None."
        )
    return (queries * weights.to(queries)) @ train.to(queries).T


def self_from_features(
    blocks: Sequence[Block], features: Tensor, square_norms: Tensor | None
) -> Tensor:  # (N, K), (N,) -> (N,)
    """Return self-influences from stored features and, for blocks with an identity term, ‖g(x)‖²."""
    _weights(blocks, features)
    if any(block.identity for block in blocks) and (
        square_norms is None or square_norms.shape != features.shape[:1] or len({block.state for block in blocks}) > 1
    ):
        got = "None" if square_norms is None else f"shape {tuple(square_norms.shape)}"
        raise InputError(
            f"The tail of this fit needs one squared gradient norm for each of {len(features)} examples, all at the "
            f"same parameters, got square_norms of {got}. Pass "
            "square_norms=eigentrace.TracIn().fit(task, data).self_influence(data)."
        )
    squares = None if square_norms is None else square_norms.to(features)
    parts = features.split([len(block.weights) for block in blocks], dim=1)
    found = [block.own_scores(part, squares) for block, part in zip(blocks, parts, strict=True)]
    return torch.stack(found).sum(dim=0)


def recut(to: Block, kept: Tensor, features: Tensor, source: Block, held: Tensor) -> Tensor:  # (N, K'+R) -> (N, K+R)
    """Convert stored features of one cut into those of a smaller one, adding the part of dropped directions to s.

    Args:
        to: The block of the smaller cut.
        kept: Indices of the directions that the smaller cut uses.
        features: Features of the larger cut.
        source: The block of the larger cut.
        held: Indices of the directions that the larger cut uses.
    """
    _weights((source,), features)
    place = {int(n): i for i, n in enumerate(held)}
    if not {int(n) for n in kept} <= place.keys():
        raise InputError(
            f"The features contain {len(held)} directions, not all of the {len(kept)} that the cut uses. Use a smaller "
            "cut, or compute the features again."
        )
    here = torch.tensor([place[int(n)] for n in kept], dtype=torch.long, device=features.device)
    if to.overlap is None:
        return features[:, here]
    if source.overlap is None or not torch.equal(to.overlap, source.overlap[:, here.to(source.overlap.device)]):
        available = 0 if source.overlap is None else len(source.overlap)
        raise InputError(
            f"The features have {available} coordinates, which are not the {len(to.overlap)} that this cut uses. "
            "Compute the features again."
        )
    phi, s = features.split([len(held), len(source.overlap)], dim=1)
    dropped = torch.ones(len(held), dtype=torch.bool, device=features.device)
    dropped[here] = False
    back = phi[:, dropped] @ source.overlap.to(phi)[:, dropped].T
    return torch.cat([phi[:, here], s + back], dim=1)


def _weights(blocks: Sequence[Block], *features: Tensor) -> Tensor:  # (K,)
    weights = torch.cat([block.weights for block in blocks])
    for given in features:
        if not isinstance(given, Tensor) or given.ndim != 2 or given.shape[1] != len(weights):
            shape = tuple(given.shape) if isinstance(given, Tensor) else type(given).__name__
            raise InputError(
                f"Features of this fit must be matrices with {len(weights)} columns, got {shape}. Pass the result of "
                "fitted.features(data) for the same cut."
            )
    return weights


@contextmanager
def at_state(task: Task, block: Block) -> Iterator[Task]:
    """Open a session of the task, and yield the task at the checkpoint of a block."""
    with task.session():
        yield task if block.state is None else task.at(block.state.load())
