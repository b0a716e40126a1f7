"""The score's formula: directions with one weight each, a weight for the identity, at one state of the parameters."""

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
from eigentrace.projection.engine import Compute
from eigentrace.task.checkpoints import Checkpoint
from eigentrace.task.checks import check_loss_fingerprint
from eigentrace.task.task import Task

What = Literal["losses", "measurements"]


@dataclass(frozen=True)
class Weights:
    """score = Σ directionₖ · φₖ(x) φₖ(z) + Σ coordinate_c · s_c(x) s_c(z) + identity · ⟨g(x), g(z)⟩."""

    index: Tensor  # (k,) the directions used
    direction: Tensor  # (k,) float64
    identity: float
    delta: float | None
    coordinate: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64, device="cpu"))  # (r,)


def kept_index(eigenvalues: Tensor, cut: Cut) -> Tensor:  # (k,)
    """Tell which of the eigenpairs a cut uses."""
    kept = eigenvalues[: cut.keep]
    index = torch.arange(len(kept), device="cpu")
    if cut.positive_only:
        index = index[kept > 0]
        if not len(index):
            raise NumericalError(
                f"positive_only=True leaves nothing: all of the top {len(kept)} eigenvalues are negative, so the model "
                "is far from a minimum. Train further, or use curvature='gauss-newton'."
            )
    return index


def weigh(eigenvalues: Tensor, cut: Cut, energies: Tensor | None = None) -> Weights:
    """Invert the diagonalised curvature: 1/λ on the kept directions, and 1/δ on all others under a tail.

    With a tail, H⁻¹ ≈ Gᵀ(Λ+δ)⁻¹G + (I − GᵀG)/δ, negative λ counted as 0. The truncated form (`tail=None`) is the
    paper's; `positive_only` drops negative λ after the top `keep` are taken, as it does at saddle points.

    A shaped tail weighs the coordinates s of the residual by 1/(E + δ) and 1/δ beyond them. All of its terms are
    positive: with S⊥ = S(I − GᵀG) the last is (I − GᵀG)(I − SᵀS)(I − GᵀG)/δ. A stored cut leaves the last term out.

    Args:
        eigenvalues: All those of the fit, by falling |λ|.
        cut: Which of them are used, and how.
        energies: E[s²] of the coordinates used (r,), where the cut uses any.
    """
    index = kept_index(eigenvalues, cut)
    values = eigenvalues[index]
    delta = delta_of(cut, eigenvalues.abs().tolist())
    if delta is None:
        return Weights(index, 1 / values, 0.0, None)
    beyond = 0.0 if cut.stored else 1 / delta
    direction = 1 / (values.clamp_min(0) + delta) - beyond
    if energies is None or not (cut.stored or cut.tail == "shaped"):
        return Weights(index, direction, beyond, delta)
    coordinate = 1 / (energies + delta) if cut.tail == "shaped" else torch.full_like(energies, 1 / delta)
    return Weights(index, direction, beyond, delta, coordinate - beyond)


@dataclass(frozen=True)
class Block:
    """One term of a score: Σ weightₖ φₖ(x) φₖ(z) + identity · ⟨g(x), g(z)⟩, gradients taken at one parameter state."""

    directions: Directions
    weights: Tensor  # (K,) float64
    identity: float = 0.0
    state: Checkpoint | None = None
    """Where Θ is taken; the model's own parameters if None."""
    overlap: Tensor | None = None  # (R, k)
    """S·Gᵀ, for directions [G; S]: the last R features minus this times the first k have the kept part removed."""

    def settled(self, features: Tensor) -> Tensor:  # (B, K) -> (B, K), in place
        """Take the kept part out of the tail's coordinates."""
        if self.overlap is not None:
            k = self.overlap.shape[1]
            features[:, k:] -= features[:, :k] @ self.overlap.to(features).T
        return features

    def own_scores(self, features: Tensor, squares: Tensor | None) -> Tensor:  # (B, K), (B,) -> (B,)
        """Score settled features against themselves; with an identity term they need ‖g(x)‖² beside them."""
        scores = features.square() @ self.weights.to(features)
        return scores if squares is None or self.identity == 0 else scores + self.identity * squares

    def asked(self, features: Tensor) -> Tensor:  # (Q, K) -> (Q, K)
        """Weigh the features of queries so that their product with unsettled features of examples is the score."""
        weighted = features * self.weights.to(features)
        if self.overlap is not None:
            k = self.overlap.shape[1]
            weighted[:, :k] -= weighted[:, k:] @ self.overlap.to(features)
        return weighted


@dataclass(frozen=True)
class Term:
    """A block, the task it belongs to, and its share of the score of a fit."""

    task: Task
    block: Block
    share: float = 1.0


def self_scores(
    task: Task, blocks: Sequence[Block], data: Data, what: What, unit_gradients: bool, compute: Compute
) -> Tensor:  # (N,)
    """Score each example against itself."""
    if compute.engine == "forward" and any(block.identity and block.directions.count for block in blocks):
        raise UnsupportedError(
            "Forward mode cannot count the tail of this fit in self-influence: the tail takes the norm of every "
            "gradient, and forward mode only multiplies gradients with directions. Use Compute(engine='auto'), "
            "'layerwise' or 'reverse'; or leave the tail out, fitted.distill(tail=None), or let stored features stand "
            "for it, fitted.stored(data)."
        )
    check_loss_fingerprint(task, data)
    total = torch.zeros(len(data), dtype=task.layout.dtype, device="cpu")
    for block in blocks:
        with at_state(task, block) as here:
            norms = unit_gradients or block.identity != 0
            job = Job.of(here, what, block.directions, norms, compute)
            for batch, found in project(job, data, "Self-influence"):
                scores = block.own_scores(block.settled(found.features), found.squares() if norms else None)
                if unit_gradients:
                    scores = over(scores, found.squares())
                total[batch.rows] += scores.cpu()
    return total


def cross_scores(
    task: Task, blocks: Sequence[Block], train: Data, queries: Data, unit_gradients: bool, compute: Compute
) -> Tensor:  # (Q, N)
    """Score every training example against every query."""
    check_loss_fingerprint(task, train)
    total = torch.zeros(len(queries), len(train), dtype=task.layout.dtype, device="cpu")
    for block in blocks:
        with at_state(task, block) as here:
            start = 0
            for asked in _questions(block, here, queries, unit_gradients, compute):
                stop = start + len(asked.left)
                job = Job.of(here, "losses", asked.directions, unit_gradients, compute)
                for batch, found in project(job, train, "Influence"):
                    scores = asked.left @ found.features.T
                    if unit_gradients:
                        scores = over(scores, found.squares().sqrt())
                    total[start:stop, batch.rows] += scores.cpu()
                start = stop
    return total


@dataclass(frozen=True)
class _Question:
    """Queries as coefficients over directions: their scores are left @ features(train)ᵀ."""

    left: Tensor  # (q, k)
    directions: Directions


def _questions(block: Block, task: Task, queries: Data, unit_gradients: bool, compute: Compute) -> Iterator[_Question]:
    """Put queries in a form that one pass over the training data answers.

    Without an identity term, K numbers per query do, whatever their number. With one, the gradients of the
    queries travel as directions themselves, as many at a time as fit in memory.
    """
    if block.identity == 0:
        lefts = []
        asked = Job.of(task, "measurements", block.directions, unit_gradients, compute)
        for _, found in project(asked, queries):
            left = block.asked(block.settled(found.features))
            lefts.append(over(left, found.squares().sqrt()[:, None]) if unit_gradients else left)
        yield _Question(torch.cat(lefts), block.directions)
        return
    asked = Job.of(task, "measurements", compute=compute)
    for chunk in in_chunks(gradients(asked, queries), asked.budget):
        if unit_gradients:
            chunk = over(chunk, chunk.norm(dim=1, keepdim=True))  # noqa: PLW2901
        phi = apply(block.directions, task.layout.unflatten(chunk))
        eye = torch.eye(len(chunk), dtype=chunk.dtype, device=chunk.device)
        left = torch.cat([block.asked(block.settled(phi)), block.identity * eye], dim=1)
        yield _Question(left, StackedDirections((block.directions, DenseDirections(chunk, task.layout))))


def features_of(task: Task, blocks: Sequence[Block], data: Data, what: What, compute: Compute) -> Tensor:  # (N, K)
    """Project each example's gradient on the directions of every block, side by side."""
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
    """Score stored features against each other, without model or data."""
    weights = _weights(blocks, train, queries)
    if any(block.identity for block in blocks):
        raise UnsupportedError(
            "The scores of this fit need whole gradients, since its tail reaches beyond its features. Use "
            "fitted.stored(data), whose features stand for the tail, or a cut with tail=None."
        )
    return (queries * weights.to(queries)) @ train.to(queries).T


def self_from_features(
    blocks: Sequence[Block], features: Tensor, square_norms: Tensor | None
) -> Tensor:  # (N, K), (N,) -> (N,)
    """Score stored features against themselves; blocks with an identity term need ‖g(x)‖² beside them."""
    _weights(blocks, features)
    if any(block.identity for block in blocks) and (
        square_norms is None or square_norms.shape != features.shape[:1] or len({block.state for block in blocks}) > 1
    ):
        got = "None" if square_norms is None else f"shape {tuple(square_norms.shape)}"
        raise InputError(
            f"The tail of this fit needs one squared gradient norm for each of {len(features)} examples, at one state "
            f"of the parameters, got square_norms of {got}. Give "
            "square_norms=eigentrace.TracIn().fit(task, data).self_influence(data)."
        )
    squares = None if square_norms is None else square_norms.to(features)
    parts = features.split([len(block.weights) for block in blocks], dim=1)
    found = [block.own_scores(part, squares) for block, part in zip(blocks, parts, strict=True)]
    return torch.stack(found).sum(dim=0)


def recut(to: Block, kept: Tensor, features: Tensor, source: Block, held: Tensor) -> Tensor:  # (N, K'+R) -> (N, K+R)
    """Turn stored features of one cut into those of a smaller one: s gets the part of dropped directions back.

    Args:
        to: The smaller cut's block.
        kept: Which of the fit's directions it uses.
        features: Features of the larger cut.
        source: The larger cut's block.
        held: Which of the fit's directions that one uses.
    """
    _weights((source,), features)
    place = {int(n): i for i, n in enumerate(held)}
    if not {int(n) for n in kept} <= place.keys():
        raise InputError(f"The features hold {len(held)} directions, not all of the {len(kept)} asked for.")
    here = torch.tensor([place[int(n)] for n in kept], dtype=torch.long, device=features.device)
    if to.overlap is None:
        return features[:, here]
    if source.overlap is None or not torch.equal(to.overlap, source.overlap[:, here.to(source.overlap.device)]):
        held_here = 0 if source.overlap is None else len(source.overlap)
        raise InputError(
            f"The features hold {held_here} other coordinates than the {len(to.overlap)} that this cut uses. Compute "
            "them again."
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
                f"Features of this fit are matrices with {len(weights)} columns, got {shape}. Give what "
                "fitted.features(data) returned for this very cut."
            )
    return weights


@contextmanager
def at_state(task: Task, block: Block) -> Iterator[Task]:
    """Hold the model ready, at the parameters that a block is taken at."""
    with task.session():
        yield task if block.state is None else task.at(block.state.load())
