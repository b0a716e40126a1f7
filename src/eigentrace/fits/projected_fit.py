"""Fits that project gradients on directions, and score by weighted products of the resulting features."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eigentrace.data import Data, as_data
from eigentrace.errors import InputError
from eigentrace.fits.fitted import Capabilities, Fitted, Unit, checked_compute
from eigentrace.fits.on_disk import block_files, block_records, fit_manifest
from eigentrace.fits.weighted_directions import (
    Block,
    Norm,
    Term,
    What,
    cross_scores,
    features_of,
    from_features,
    self_from_features,
    self_scores,
)
from eigentrace.numeric.top_k import Ranked, best_of, shortlist_rows
from eigentrace.projection.engine import Compute
from eigentrace.settings import check_counts, counted
from eigentrace.task.task import Task


class ProjectedFit(Fitted):
    """A fit whose scores are sums over blocks of weighted directions, each at one checkpoint of the parameters."""

    blocks: tuple[Block, ...]
    """One block per checkpoint."""

    def _described(self) -> list[str]:
        parameters, *others = super()._described()
        size = [f"{counted(self.num_features, 'direction')} of {parameters}" if self.num_features else parameters]
        return size + others + ([f"{len(self.blocks)} checkpoints"] if len(self.blocks) > 1 else [])

    @property
    def num_features(self) -> int:
        """The number of features per example, K."""
        return sum(block.directions.count for block in self.blocks)

    @property
    def bytes_per_example(self) -> int:
        """The size of the features of one example, in bytes."""
        return self.num_features * self.task.layout.dtype.itemsize

    @property
    def positive_metric(self) -> bool:
        """Whether every self-influence is positive by construction."""
        return all(bool((block.weights + block.identity > 0).all()) for block in self.blocks)

    def terms(self) -> tuple[Term, ...]:
        """Return the blocks with their task."""
        return tuple(Term(self.task, block) for block in self.blocks)

    def from_features(self, train: Tensor, queries: Tensor) -> Tensor:  # (N, K), (Q, K) -> (Q, N)
        """Compute influences from stored features, without model or data.

        Args:
            train: `features(data)` of the training examples.
            queries: `features(data, queries=True)` of the queries.
        """
        return from_features(self.blocks, train, queries)

    def self_from_features(self, features: Tensor, square_norms: Tensor | None = None) -> Tensor:  # (N, K) -> (N,)
        """Compute self-influence from stored features.

        Args:
            features: `features(data)`.
            square_norms: ‖g(x)‖² of the same examples (N,), such as `TracIn().fit(...).self_influence(data)`: with
                them, a stored fit scores with its full tail.
        """
        return self_from_features(
            self._whole_blocks() if square_norms is not None else self.blocks, features, square_norms
        )

    def influence_topk(
        self,
        train: Any,
        queries: Any,
        k: int = 20,
        *,
        features: Tensor | None = None,
        shortlist: int = 200,
        unit: Unit = None,
        compute: Compute | None = None,
    ) -> Ranked:
        """Find the top-k proponents and opponents of each query: shortlisted by features, rescored with the full tail.

        Args:
            train: The training examples; if features are passed, only shortlisted ones go through the model.
            queries: The queries.
            k: Number of proponents, and of opponents.
            features: `features(train)` of this fit, if they are stored; computed by default.
            shortlist: Candidates per query, half of them on either side. With all examples the ranking is exact.
            unit: None, or "nats".
            compute: Engine, precision, memory and batch size of the passes.
        """
        check_counts(1, k=k)
        data, query_data, compute = as_data(train), as_data(queries), checked_compute(compute)
        if shortlist < 2 * k and shortlist < len(data):
            raise InputError(f"shortlist={shortlist} is too small for k={k} on either side: use at least {2 * k}.")
        self._require("features")
        stored = self._by_features()
        if features is None:
            features = stored.features(data, compute=compute)
        if len(features) != len(data):
            raise InputError(
                f"Got features of {len(features)} examples for {len(data)} training examples: pass features(train) "
                "of the same examples."
            )
        of_queries = stored.features(query_data, queries=True, compute=compute)
        # This checks the shapes.
        from_features(stored.blocks, features[:0], of_queries)
        weights = torch.cat([block.weights for block in stored.blocks])
        # Each query is ranked on its own list, so that its result does not depend on the other queries.
        lists = shortlist_rows(features, of_queries * weights.to(of_queries), shortlist)
        rows, place = lists.unique(return_inverse=True)
        scores = self.unstored().influence(data.take(rows.numpy()), query_data, unit=unit, compute=compute)
        return best_of(scores.gather(1, place), lists, min(k, len(data)))

    def _by_features(self) -> "ProjectedFit":
        """Return the fit that scores by features alone."""
        return self

    def _whole_blocks(self) -> tuple[Block, ...]:
        """Return the blocks that score with features and gradient norms."""
        return self.blocks

    def _features(self, data: Data, *, queries: bool, compute: Compute) -> Tensor:
        what: What = "measurements" if queries else "losses"
        return features_of(self.task, self.blocks, data, what, compute)

    def _self(self, data: Data, *, queries: bool, norm: Norm, compute: Compute) -> Tensor:
        what: What = "measurements" if queries else "losses"
        return self_scores(self.task, self.blocks, data, what, norm, compute)

    def _cross(self, train: Data, queries: Data, *, norm: Norm, compute: Compute) -> Tensor:
        return cross_scores(self.task, self.blocks, train, queries, norm, compute)


@dataclass(frozen=True, repr=False)
class DirectionsFit(ProjectedFit):
    """A fit by directions other than eigenvectors: random vectors, single parameters, or whole gradients."""

    task: Task
    blocks: tuple[Block, ...]
    method: dict[str, Any]
    num_train: int
    has_curvature: bool = False

    @property
    def can(self) -> Capabilities:
        """Influence, saving, unit gradients; and features, unless it scores by whole gradients."""
        return Capabilities(influence=True, features=self.num_features > 0, save=True, unit_gradients=True)

    def _manifest(self) -> dict[str, Any]:
        return fit_manifest(self) | block_records(self.blocks)

    def _files(self) -> dict[str, dict[str, Tensor]]:
        return block_files(self.blocks, self.task)
