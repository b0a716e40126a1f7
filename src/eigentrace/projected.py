"""Fits that score by rows: a list of blocks, each a parameter state with rows and one weight per row."""

import warnings
from dataclasses import dataclass, replace
from numbers import Integral
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from eigentrace import artifact, saved
from eigentrace.blocks import (
    Block,
    What,
    cross_scores,
    features_of,
    from_features,
    recut,
    self_from_features,
    self_scores,
)
from eigentrace.chance import generator_of
from eigentrace.compute import Compute
from eigentrace.coordinates import Coordinates, check_wanted, gather
from eigentrace.data import Data, as_data
from eigentrace.distill import DELTA_FLOOR, Cut, Distilled, Spectrum, Tail, Weights, kept_index, weigh
from eigentrace.errors import InputError, MismatchError, PrecisionWarning, UnsupportedError
from eigentrace.fitted import Fitted, Unit, checked_compute
from eigentrace.probe import check_trial
from eigentrace.rows import DenseRows, StackedRows
from eigentrace.settings import check_counts
from eigentrace.shortlist import Ranked, best_of, by_features
from eigentrace.task import Task
from eigentrace.trial import Trial
from eigentrace.version import __version__

Same = Literal["same"]


@dataclass(frozen=True)
class ProjectedFit(Fitted):
    """A fit that scores by rows. Store, search and reports need not know which method made it."""

    task: Task
    blocks: tuple[Block, ...]
    method: dict[str, Any]
    """The settings that made this fit, for the record."""
    num_train: int
    has_curvature: bool = False
    distilled: Distilled | None = None
    cut: Cut | None = None
    coordinates: Coordinates | None = None
    """What stands for the tail in stored features and gives a shaped tail its shape; see `with_coordinates`."""

    @staticmethod
    def of(task: Task, distilled: Distilled, cut: Cut, method: dict[str, Any], num_train: int) -> "ProjectedFit":
        """Turn eigenpairs of the curvature into a fit."""
        fit = ProjectedFit(task, (), method, num_train, has_curvature=True, distilled=distilled, cut=cut)
        return fit.distill()

    @property
    def spectrum(self) -> Spectrum:
        """Eigenvalues, residual bounds and how the iteration ended, of the directions in use."""
        if self.distilled is None or self.cut is None:
            raise UnsupportedError(f"{self.method['name']} has no spectrum: it keeps no eigenpairs of the curvature.")
        spectrum, index = self.distilled.spectrum, kept_index(self.distilled.spectrum.eigenvalues, self.cut)
        residuals = None if spectrum.residuals is None else spectrum.residuals[index]
        return replace(spectrum, eigenvalues=spectrum.eigenvalues[index], residuals=residuals)

    @property
    def delta(self) -> float | None:
        """δ, what stands for the curvature of the directions that were not kept; None without a tail."""
        if self.distilled is None or self.cut is None:
            return None
        return weigh(self.distilled.spectrum.eigenvalues, self.cut).delta

    @property
    def positive_metric(self) -> bool:
        """Tell whether every self-influence is positive by construction."""
        return all(bool((block.weights + block.identity > 0).all()) for block in self.blocks)

    def distill(
        self,
        keep: int | None = None,
        tail: Tail | Same = "same",
        positive_only: bool | None = None,
        *,
        delta: float | None = None,
    ) -> "ProjectedFit":
        """Return another cut of the same fit; nothing is computed again. What is not given stays as it is.

        Args:
            keep: How many directions, at most as many as the fit kept. The dropped ones join the tail.
            tail: "auto" for δ = |λ_K|, "shaped" for 1/(energy + δ) along the coordinates of `with_coordinates`, a
                number for δ, None for the paper's truncation.
            positive_only: Drop directions of negative curvature after taking the top `keep`.
            delta: δ of a shaped tail; |λ_K| if not given.
        """
        if self.distilled is None or self.cut is None:
            raise UnsupportedError(f"{self.method['name']} has no eigenpairs to cut: distill is for curvature methods.")
        available = len(self.distilled.spectrum.eigenvalues)
        if keep is not None and keep > available:
            raise InputError(
                f"This fit holds {available} directions, so keep={keep} is too many. Fit with a larger `keep`."
            )
        tail_now = self.cut.tail if tail == "same" else tail
        return self._with(
            replace(
                self.cut,
                keep=self.cut.keep if keep is None else keep,
                tail=tail_now,
                stored=self.cut.stored and tail_now is not None,
                positive_only=self.cut.positive_only if positive_only is None else positive_only,
                delta=self.cut.delta if tail == "same" and delta is None else delta,
            )
        )

    def _with(self, cut: Cut) -> "ProjectedFit":
        """Make the one block of a cut."""
        distilled, used = self.distilled, self._used(cut)
        index = kept_index(distilled.spectrum.eigenvalues, cut)  # type: ignore[union-attr]
        energies = None if used is None else used.residual(index)
        weights = weigh(distilled.spectrum.eigenvalues, cut, energies)  # type: ignore[union-attr]
        if not cut.stored:
            self._warn_of_small_delta(weights)
        directions, count = distilled.directions, len(index)  # type: ignore[union-attr]
        # The leading rows are a view; only directions dropped from between cost a copy.
        leading = count == 0 or int(index[-1]) == count - 1
        kept = DenseRows(directions[:count] if leading else directions[index.to(directions.device)], self.task.layout)
        if used is None:
            return replace(self, blocks=(Block(kept, weights.row, weights.identity),), cut=cut)
        every = torch.cat([weights.row, weights.coordinate])
        overlap = used.overlap[:, index].to(self.task.layout.device)
        block = Block(StackedRows((kept, used.rows)), every, weights.identity, overlap=overlap)
        return replace(self, blocks=(block,), cut=cut)

    def _used(self, cut: Cut) -> Coordinates | None:
        """Pick the coordinates that a cut scores by, if it does by any."""
        if not (cut.stored or cut.tail == "shaped"):
            return None
        if self.coordinates is None:
            raise InputError(
                "This fit holds no coordinates of its tail yet, and a stored or shaped tail needs them: use "
                "fitted.with_coordinates(data), or fit with Arnoldi(coordinates=...)."
            )
        return self.coordinates.first(cut.coordinates)

    def with_coordinates(
        self, data: Any, coordinates: float = 1024, *, sample: int | None = None, compute: Compute | None = None
    ) -> "ProjectedFit":
        """Return the same fit with coordinates that stand for its tail, chosen over a sample; scores stay as they are.

        Args:
            data: The training examples.
            coordinates: R, how many; or, as a fraction, which share of the tail's energy they should hold.
            sample: Examples they are chosen on; as many, and the same ones, as the fit took its curvature on if None.
            compute: Precision, memory and batch size of the passes.
        """
        if self.distilled is None or self.cut is None:
            raise UnsupportedError(f"{self.method['name']} keeps no eigenpairs, so there is no tail to them.")
        check_wanted(coordinates)
        if sample is not None:
            check_counts(1, sample=sample)
        data, compute = as_data(data), checked_compute(compute)
        size = self.method.get("sample") if sample is None else sample
        rows = data.sample(size or len(data), generator_of(self.method.get("seed", 0)))
        directions = DenseRows(self.distilled.directions, self.task.layout)
        check_trial(self.task, data)
        with self.task.session():
            found = gather(self.task, data.take(rows), directions, self._cut_index(), coordinates, compute)
        return replace(self, coordinates=found)._with(replace(self.cut, coordinates=None))

    def stored(
        self, data: Any = None, coordinates: float | None = None, *, compute: Compute | None = None
    ) -> "ProjectedFit":
        """Return the fit that scores by features alone: K + R numbers per example stand for its gradient.

        Args:
            data: The training examples, to choose coordinates on (1024 if not told); not needed by a fit that holds
                coordinates already.
            coordinates: R, or the share of the tail's energy to hold; all coordinates at hand if None.
            compute: Precision, memory and batch size of the passes.
        """
        if coordinates is not None:
            check_wanted(coordinates)
        fit = self
        if data is not None:
            fit = self.with_coordinates(data, 1024 if coordinates is None else coordinates, compute=compute)
        if fit.cut is None:
            raise UnsupportedError(f"{self.method['name']} keeps no eigenpairs, so it has no tail to store.")
        held = 0 if fit.coordinates is None else fit.coordinates.count
        if isinstance(coordinates, Integral) and data is None and 0 < held < coordinates:
            raise InputError(
                f"This fit holds {held} coordinates, so {coordinates} are too many: give data to find more."
            )
        count = None
        if coordinates is not None and fit.coordinates is not None:
            count = fit.coordinates.needed(coordinates, fit._cut_index())
        return fit._with(replace(fit.cut, stored=True, coordinates=count))

    def unstored(self) -> "ProjectedFit":
        """Return the fit with its whole tail again, which needs the gradients of queries and examples."""
        return self if self.cut is None else self._with(replace(self.cut, stored=False, coordinates=None))

    def _warn_of_small_delta(self, weights: Weights) -> None:
        largest = float(self.distilled.spectrum.eigenvalues[0].abs())  # type: ignore[union-attr]
        single = self.task.layout.dtype == torch.float32
        if single and weights.delta is not None and weights.delta < 0.99 * DELTA_FLOOR * largest:
            warnings.warn(
                f"tail={weights.delta:.3g} is below {DELTA_FLOOR:g} of the largest eigenvalue ({largest:.3g}): scores "
                "in float32 become differences of much larger numbers. Use a larger δ, 'auto', or a float64 model.",
                PrecisionWarning,
                stacklevel=3,
            )

    def features(self, data: Any, *, queries: bool = False, compute: Compute | None = None) -> Tensor:  # (N, K)
        """Project each example's gradient on the rows of every block, side by side."""
        data, compute = as_data(data), checked_compute(compute)
        if not sum(block.rows.count for block in self.blocks):
            raise UnsupportedError(
                f"{self.method['name']} scores by full gradients and has no features. Use RandProj over the same "
                "parameters for K numbers per example."
            )
        what: What = "measurements" if queries else "losses"
        return features_of(self.task, self.blocks, data, what, compute)

    @property
    def bytes_per_example(self) -> int:
        """What the features of one example take in the type they come in."""
        return sum(block.rows.count for block in self.blocks) * self.task.layout.dtype.itemsize

    @property
    def captured(self) -> float | None:
        """Share of the tail's energy, over the curvature sample, that the coordinates in use hold; None without any."""
        if self.cut is None or self.distilled is None or (used := self._used(self.cut)) is None:
            return None
        index = kept_index(self.distilled.spectrum.eigenvalues, self.cut)
        outside = used.outside(index)
        return float(used.residual(index).sum()) / outside if outside else 1.0

    def from_features(self, train: Tensor, queries: Tensor) -> Tensor:  # (N, K), (Q, K) -> (Q, N)
        """Score stored features against each other, without model or data.

        Args:
            train: `features(data)` of training examples.
            queries: `features(data, queries=True)` of the examples asked about.
        """
        return from_features(self.blocks, train, queries)

    def self_from_features(self, features: Tensor, square_norms: Tensor | None = None) -> Tensor:  # (N, K) -> (N,)
        """Score stored features against themselves.

        Args:
            features: `features(data)`.
            square_norms: ‖g(x)‖² of the same examples (N,), such as `TracIn().fit(...).self_influence(data)`: with
                them a stored fit answers as if it had its whole tail.
        """
        if self.cut is None or square_norms is None or not self.cut.stored:
            return self_from_features(self.blocks, features, square_norms)
        whole = self._with(replace(self.cut, stored=False)).blocks[0]
        missing = len(self.blocks[0].weights) - len(whole.weights)
        # A flat tail that is not stored has no use for the coordinates.
        weights = torch.cat([whole.weights, torch.zeros(missing, dtype=torch.float64, device="cpu")])
        return self_from_features((replace(whole, weights=weights),), features, square_norms)

    def recut_features(self, features: Tensor, source: "ProjectedFit") -> Tensor:  # (N, K'+R) -> (N, K+R)
        """Turn features stored with a larger cut of this fit into this one's: dropped directions join the tail."""
        return recut(self.blocks[0], self._cut_index(), features, source.blocks[0], source._cut_index())

    def _cut_index(self) -> Tensor:
        if self.distilled is None or self.cut is None:
            raise UnsupportedError(f"{self.method['name']} keeps no eigenpairs, so there are no cuts of its features.")
        return kept_index(self.distilled.spectrum.eigenvalues, self.cut)

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
        """Find each query's strongest proponents and opponents: shortlisted by features, rescored with the whole tail.

        Args:
            train: The training examples; only those on the shortlist go through the model where features are given.
            queries: The examples asked about.
            k: How many on either side.
            features: `features(train)` of this fit, if they are stored; computed if not.
            shortlist: Candidates per query, half of them on either side. All examples: the exact ranking.
            unit: None, or "nats".
            compute: Engine, precision, memory and batch size of the passes.
        """
        check_counts(1, k=k)
        data, asked, compute = as_data(train), as_data(queries), checked_compute(compute)
        if shortlist < 2 * k and shortlist < len(data):
            raise InputError(f"A shortlist of {shortlist} cannot give {k} on either side: make it at least {2 * k}.")
        stored = self if all(block.identity == 0 for block in self.blocks) else self.stored()
        if features is None:
            features = stored.features(data, compute=compute)
        if len(features) != len(data):
            raise InputError(f"Got features of {len(features)} examples for {len(data)} training examples.")
        of_queries = stored.features(asked, queries=True, compute=compute)
        # Checks the shapes on the way.
        from_features(stored.blocks, features[:0], of_queries)
        weights = torch.cat([block.weights for block in stored.blocks])
        # Each query is ranked on its own list, so that it gets the same answer in any company.
        lists = by_features(features, of_queries * weights.to(of_queries), shortlist)
        rows, place = lists.unique(return_inverse=True)
        scores = self.unstored().influence(data.take(rows.numpy()), asked, unit=unit, compute=compute)
        return best_of(scores.gather(1, place), lists, min(k, len(data)))

    def save(self, path: str | Path) -> None:
        """Write the fit to a new directory, to be read back by `eigentrace.load`."""
        self.task.check_unchanged()
        artifact.write(Path(path), self.manifest(), self._on_disk()[1])

    def manifest(self) -> dict[str, Any]:
        """Say what the fit is and which model it belongs to, as `save` writes it."""
        manifest: dict[str, Any] = {
            "kind": "fit",
            "format": 1,
            "versions": {"eigentrace": __version__, "torch": torch.__version__},
            "fingerprint": artifact.fingerprint(self.task),
            "coverage": str(self.task.coverage),
            "l2": self.task.l2,
            "method": self.method,
            "num_train": self.num_train,
            "has_curvature": self.has_curvature,
            "double": self.task.is_double_copy,
            "trial": None if self.task.trial is None else self.task.trial.record(),
        }
        return manifest | self._on_disk()[0]

    def _on_disk(self) -> saved.OnDisk:
        if self.distilled is None or self.cut is None:
            return saved.blocks_on_disk(self.blocks, self.task)
        return saved.cut_on_disk(self.distilled, self.cut, self.coordinates)

    def _self(self, data: Data, *, queries: bool, unit_gradients: bool, compute: Compute) -> Tensor:
        what: What = "measurements" if queries else "losses"
        return self_scores(self.task, self.blocks, data, what, unit_gradients, compute)

    def _cross(self, train: Data, queries: Data, *, unit_gradients: bool, compute: Compute) -> Tensor:
        return cross_scores(self.task, self.blocks, train, queries, unit_gradients, compute)


def load(path: str | Path, task: Task) -> ProjectedFit:
    """Read a saved fit back for the task it was made with."""
    if not isinstance(task, Task):
        raise InputError(f"load takes the Task the fit was made with, got {type(task).__name__}.")
    path = Path(path)
    manifest = artifact.read_manifest(path, "fit")
    try:
        if manifest["double"]:
            task = task.double()
        if manifest["fingerprint"] != artifact.fingerprint(task):
            raise MismatchError(
                f"The fit at {path} was made for {manifest['coverage']} of another model, other weights, or another "
                f"selection than this task's {task.coverage}. Load the same checkpoint and give the same `params`."
            )
        return _assemble(path, manifest, task.sealed(Trial.read(manifest.get("trial"))))
    except (KeyError, TypeError) as error:
        raise MismatchError(f"{path} is incomplete or was edited ({error!r}). Save the fit again.") from None


def _assemble(path: Path, manifest: dict[str, Any], task: Task) -> ProjectedFit:
    shared = {key: manifest[key] for key in ("method", "num_train", "has_curvature")}
    if "cut" in manifest:
        distilled = saved.read_eigenpairs(path, manifest, task.layout)
        coordinates = None
        if "coordinates" in manifest:
            tensors = artifact.read_tensors(path / "coordinates.safetensors")
            coordinates = Coordinates.of_tensors(tensors, len(distilled.spectrum.eigenvalues), task.layout)
        cut = Cut(**manifest["cut"])
        return ProjectedFit(task, (), **shared, distilled=distilled, cut=cut, coordinates=coordinates).distill()
    blocks = [saved.read_block(path, n, record, task.layout) for n, record in enumerate(manifest["blocks"])]
    return ProjectedFit(task, tuple(blocks), **shared)
