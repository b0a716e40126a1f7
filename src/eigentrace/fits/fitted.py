"""The interface of all fits, and the sign, unit and normalisation of their scores."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch import Tensor

from eigentrace.data import Data, as_data
from eigentrace.disk.atomic import appearing
from eigentrace.disk.manifest import read_manifest, through_json, write_directory
from eigentrace.disk.room import check_room
from eigentrace.disk.tensors import begins_with
from eigentrace.errors import InputError, MismatchError, NumericalError, UnsupportedError
from eigentrace.fits.calibration import Calibration
from eigentrace.fits.file_names import MOMENTS
from eigentrace.fits.refine import Refine, Refined, refined
from eigentrace.fits.reliability import Reliability
from eigentrace.fits.weighted_directions import Norm, Term
from eigentrace.krylov.eigenpairs import Spectrum
from eigentrace.krylov.solve import Rows
from eigentrace.projection.engine import Compute
from eigentrace.settings import counted
from eigentrace.task.task import Task

Normalize = Literal["gradient", "features", "metric"] | None
Unit = Literal["nats"] | None


@dataclass(frozen=True)
class Capabilities:
    """What a fit supports in addition to scores of single examples."""

    influence: bool = False
    """Scores of pairs of an example and a query."""
    features: bool = False
    """K numbers per example, from which its scores can be computed."""
    save: bool = False
    """Saving to a directory that `eigentrace.load` reads."""
    spectrum: bool = False
    """Eigenvalues of the curvature."""
    distill: bool = False
    """Selecting another cut of the same eigenpairs."""
    coordinates: bool = False
    """Coordinates that represent the tail, by `with_coordinates` and `stored`."""
    unit_gradients: bool = False
    """`normalize="gradient"`, which scales every gradient to unit length first."""
    refine: bool = False
    """`influence(refine=...)`, which solves with the curvature, preconditioned by the fit."""


_REFUSALS = {
    "influence": "{} scores single examples, not pairs of an example and a query. Use Arnoldi, or TracIn (with "
    "normalize='gradient' for products of unit gradients).",
    "features": "{} has no directions to project on, and therefore no features. Use Arnoldi, or RandProj over the same "
    "parameters, for K numbers per example.",
    "save": "{} has nothing to save. Store its settings, and fit again instead of loading.",
    "spectrum": "{} has no spectrum: it has no eigenpairs of the curvature. Use Arnoldi; of an ensemble, use the "
    "spectrum of each member.",
    "distill": "{} has no eigenpairs of the curvature that could be cut, and no tail. Use Arnoldi.",
    "coordinates": "{} has no eigenpairs of its own, and therefore no tail that coordinates could represent. Use a "
    "fit of Arnoldi; of an ensemble, use each member.",
    "refine": "{} cannot precondition a solve with the curvature. Use EKFAC, or Arnoldi with a tail; of an ensemble, "
    "refine the scores of each member (fitted.members) and take their mean.",
    "unit_gradients": "{} uses no gradients of the loss, so normalize='gradient' is not supported. Use normalize=None.",
}


class Fitted(ABC):
    """A fitted method. It is immutable, and its methods change neither the task nor the model.

    Scores have the paper's sign. Positive: x is a **proponent** of z, removing it raises the loss at z. Negative: an
    **opponent**. Every fit scores single examples; `can` lists what else it supports.
    """

    task: Task
    method: dict[str, Any]
    """The settings of the fit."""
    num_train: int
    has_curvature: bool
    """Whether scores use curvature: only then do they estimate a change of loss and have a unit."""

    def __repr__(self) -> str:
        return f"<Fit by {self.method['name']}: {', '.join(self._described())}>"

    def _described(self) -> list[str]:
        """Return the size and the main settings of the fit, as phrases for `repr`."""
        examples = counted(self.num_train, "training example")
        return [counted(self.task.layout.numel, "parameter"), examples]

    @property
    def can(self) -> Capabilities:
        """What this fit supports in addition to `self_influence`."""
        return Capabilities()

    @property
    def positive_metric(self) -> bool:
        """Whether every self-influence is positive by construction."""
        return False

    @property
    def has_coordinates(self) -> bool:
        """Whether coordinates represent the tail, so that `stored` needs no data."""
        return False

    @property
    def is_loss(self) -> bool:
        """Whether the score of an example is its loss, so that a pass for losses yields it too."""
        return False

    def self_influence(
        self, data: Any, *, normalize: Normalize = None, unit: Unit = None, compute: Compute | None = None
    ) -> Tensor:  # (N,)
        """Score each example against itself: high for outliers, wrong labels and memorised examples.

        Args:
            data: The examples, in any of the forms `fit` takes.
            normalize: None; or "gradient" to scale each gradient to unit length first, "features" to scale its features
                to unit length.
            unit: None, or "nats" to divide by the number of training examples.
            compute: Engine, precision, memory and batch size of the pass.
        """
        data, compute = as_data(data), checked_compute(compute)
        self._check(normalize, unit)
        if normalize == "metric":
            raise InputError(
                "normalize='metric' makes every self-influence 1: use normalize='gradient', 'features' or None."
            )
        scores = self._self(data, queries=False, norm=None if normalize == "metric" else normalize, compute=compute)
        return scores / self._divisor(unit)

    def influence(
        self,
        train: Any,
        queries: Any,
        *,
        normalize: Normalize = None,
        unit: Unit = None,
        refine: Any = None,
        compute: Compute | None = None,
    ) -> Tensor:  # (Q, N)
        """Score every training example against every query, exactly.

        Args:
            train: The training examples.
            queries: The examples whose loss, or `measurement` if the task has one, is explained.
            normalize: None, "gradient" (every gradient to unit length), "features" (its projection on the directions to
                unit length) or "metric" (cosine in the H⁻¹ metric).
            unit: None, or "nats": the predicted change of the query's loss when the example is removed.
            refine: None for the fit's approximate inverse of the curvature; or a number of products with the curvature
                per query, by which it is refined, or "converged", or `eigentrace.Refine(...)`. See `refined`.
            compute: Engine, precision, memory and batch size of the passes.
        """
        self._require("influence")
        if refine is not None:
            return self.refined(train, queries, refine, normalize=normalize, unit=unit, compute=compute).scores
        train, queries, compute = as_data(train), as_data(queries), checked_compute(compute)
        self._check(normalize, unit)
        scores = self._cross(train, queries, norm=None if normalize == "metric" else normalize, compute=compute)
        if normalize == "metric":
            of_train = self._self(train, queries=False, norm=None, compute=compute)
            of_queries = self._self(queries, queries=True, norm=None, compute=compute)
            scores = _cosine(scores, of_queries, of_train)
        return scores / self._divisor(unit)

    def refined(
        self,
        train: Any,
        queries: Any,
        refine: Any = 3,
        *,
        normalize: Normalize = None,
        unit: Unit = None,
        curvature_data: Any = None,
        compute: Compute | None = None,
    ) -> Refined:
        """Score by solving with the curvature of the training examples, and report how far the scores have settled.

        All queries that fit in memory together share a Krylov space, preconditioned by this fit; those after them go on
        with it.

        Args:
            train: The training examples to score.
            queries: The examples whose loss, or `measurement` if the task has one, is explained.
            refine: Number of products per query, "converged", or `eigentrace.Refine(...)`.
            normalize: None, or "gradient" (every gradient to unit length).
            unit: None, or "nats".
            curvature_data: All training examples, if `train` is only part of them: the curvature is theirs.
            compute: Engine, precision, memory and batch size of the passes.
        """
        self._require("refine")
        train, queries, compute = as_data(train), as_data(queries), checked_compute(compute)
        settings = Refine.of(refine)
        self._check(normalize, unit)
        if normalize in ("metric", "features"):
            raise InputError(f"normalize={normalize!r} is not supported with refine: use None or 'gradient'.")
        norm: Norm = "gradient" if normalize == "gradient" else None
        mean = self._mean_eigenvalue()
        whole = train if curvature_data is None else as_data(curvature_data)
        found = refined(self.task, self._preconditioner, mean, whole, train, queries, settings, norm, compute)
        return replace(found, scores=found.scores / self._divisor(unit))

    def features(self, data: Any, *, queries: bool = False, compute: Compute | None = None) -> Tensor:  # (N, K)
        """Project each example's gradient on the directions: φ(x) = G·∇L(x)."""
        self._require("features")
        return self._features(as_data(data), queries=queries, compute=checked_compute(compute))

    @property
    def reliability(self) -> Reliability | None:
        """Rank agreement of two fits on halves of the curvature sample, if it was requested; see `Arnoldi`.

        It was measured with the settings of the fit, and is reported for other cuts of it too.
        """
        found = self.method.get("agreement")
        return None if found is None else Reliability(**found)

    @property
    def calibration(self) -> Calibration | None:
        """Mean self-influence under the measured curvature, relative to this fit; None if not measured."""
        return None

    @property
    def spectrum(self) -> Spectrum:
        """Eigenvalues and residual bounds of the directions in use, and the ending of the iteration."""
        self._require("spectrum")
        return self._spectrum()

    def distill(
        self,
        keep: int | None = None,
        tail: Any = "same",
        positive_only: bool | None = None,
        *,
        delta: float | None = None,
    ) -> Self:
        """Return another cut of the same fit, without recomputation. Arguments that are left out keep their value.

        Args:
            keep: Number of directions, at most that of the fit. Dropped ones become part of the tail.
            tail: "auto" for δ = |λ_K|, "shaped" for 1/(energy + δ) along the coordinates of `with_coordinates`, a
                number for δ, None for the paper's truncation.
            positive_only: Drop directions of negative curvature after taking the top `keep`.
            delta: δ of a shaped tail; |λ_K| by default.
        """
        self._require("distill")
        return self._distilled(keep, tail, positive_only, delta)

    def with_coordinates(
        self, data: Any, coordinates: float = 1024, *, sample: int | None = None, compute: Compute | None = None
    ) -> Self:
        """Return the same fit with coordinates that represent its tail, for methods with eigenpairs."""
        raise self._refusal("coordinates")

    def stored(self, data: Any = None, coordinates: float | None = None, *, compute: Compute | None = None) -> Self:
        """Return the fit that scores by features alone, including the tail, for methods with eigenpairs."""
        raise self._refusal("coordinates")

    def unstored(self) -> Self:
        """Return the fit that scores by whole gradients instead of stored features."""
        return self

    def terms(self) -> tuple[Term, ...]:
        """Return the terms whose sum is the score; none if scores are not sums over weighted directions."""
        return ()

    def parts(self) -> "dict[str, Fitted]":
        """Return the fits that this one consists of, by the names of their directories when saved."""
        return {}

    def leaves(self) -> "Iterator[Fitted]":
        """Yield the fits without parts: this one, or recursively those of its parts."""
        parts = self.parts()
        if not parts:
            yield self
        for part in parts.values():
            yield from part.leaves()

    def save(self, path: str | Path) -> None:
        """Save the fit to a new directory, which `eigentrace.load` reads."""
        self._require("save")
        for leaf in self.leaves():
            leaf.task.check_unchanged()
        with appearing(Path(path)) if self.parts() else nullcontext(Path(path)) as folder:
            self._write(folder)

    def _write(self, path: Path) -> None:
        files = self.files()
        size = sum(tensor.nbytes for tensors in files.values() for tensor in tensors.values())
        check_room(path, size, f"the directions and weights of {self.method['name']}")
        write_directory(path, self.manifest(), files)
        for name, part in self.parts().items():
            part._write(path / name)

    def check_saved(self, path: Path) -> None:
        """Raise MismatchError if a directory contains a different fit.

        Two fits with the same settings may still differ, for instance in the examples or the number of threads. Their
        features then have other signs, and must not be mixed in one run.
        """
        parts = self.parts()
        for name, part in parts.items():
            part.check_saved(path / name)
        if parts:
            return
        saved, own = read_manifest(path, "fit"), through_json(self.manifest())
        # Scores do not depend on the moments, which earlier versions did not save.
        files = {name: tensors for name, tensors in self.files().items() if name != MOMENTS}
        same = all(saved.get(key) == own.get(key) for key in ("fingerprint", "method", "cut", "num_train"))
        if not same or not all(begins_with(path / name, tensors) for name, tensors in files.items()):
            raise MismatchError(
                f"{path} contains another fit (of another model, with other settings or on other examples) than the "
                f"one passed. Score with the saved fit, eigentrace.load({str(path)!r}, task), or choose another "
                "directory. Nothing was changed."
            )

    def record(self) -> dict[str, Any]:
        """Return the settings that scores depend on, as JSON values."""
        return dict(self.method)

    def manifest(self) -> dict[str, Any]:
        """Return the manifest that `save` writes, which describes the fit and its model."""
        self._require("save")
        return self._manifest()

    def files(self) -> dict[str, dict[str, Tensor]]:
        """Return the tensors that `save` writes, by file name."""
        self._require("save")
        return self._files()

    @abstractmethod
    def _self(self, data: Data, *, queries: bool, norm: Norm, compute: Compute) -> Tensor: ...

    def scores_of_rows(self, data: Data, rows: range, compute: Compute) -> Tensor:  # (n,)
        """Return the self-influence of a range of rows, equal to that from a pass over all of the data."""
        part = data if rows == range(len(data)) else data.take(rows)
        return self._self(part, queries=False, norm=None, compute=compute)

    # The following methods are called only if `can` says that they are supported.

    def _cross(self, train: Data, queries: Data, *, norm: Norm, compute: Compute) -> Tensor:
        raise NotImplementedError

    def _features(self, data: Data, *, queries: bool, compute: Compute) -> Tensor:
        raise NotImplementedError

    def _preconditioner(self, damping: Tensor) -> Rows:
        raise NotImplementedError

    def _mean_eigenvalue(self) -> float:
        raise NotImplementedError

    def _spectrum(self) -> Spectrum:
        raise NotImplementedError

    def _distilled(self, keep: int | None, tail: Any, positive_only: bool | None, delta: float | None) -> Self:
        raise NotImplementedError

    def _manifest(self) -> dict[str, Any]:
        raise NotImplementedError

    def _files(self) -> dict[str, dict[str, Tensor]]:
        raise NotImplementedError

    def _require(self, what: str) -> None:
        if not getattr(self.can, what):
            raise self._refusal(what)

    def _refusal(self, what: str) -> UnsupportedError:
        return UnsupportedError(_REFUSALS[what].format(self.method["name"]))

    def _check(self, normalize: Normalize, unit: Unit) -> None:
        if normalize not in (None, "gradient", "features", "metric"):
            raise InputError(f"normalize must be None, 'gradient', 'features' or 'metric', got {normalize!r}.")
        if unit not in (None, "nats"):
            raise InputError(f"unit must be None or 'nats', got {unit!r}.")
        if unit == "nats" and not self.has_curvature:
            raise UnsupportedError(
                f"unit='nats' needs curvature, and {self.method['name']} has none: use unit=None, or a method with "
                "curvature such as Arnoldi."
            )
        if normalize == "gradient":
            self._require("unit_gradients")
        if normalize == "features":
            self._require("features")
        if unit == "nats" and normalize is not None:
            raise InputError(
                f"unit='nats' cannot be combined with normalize={normalize!r}: such scores have no unit. Use unit=None."
            )
        if normalize == "metric" and not self.positive_metric:
            raise NumericalError(
                "normalize='metric' needs a positive metric, and this fit has negative eigenvalues, or their signs are "
                "not known. For Arnoldi use fitted.distill(positive_only=True), a tail or curvature='gauss-newton'; "
                "for any method normalize='gradient'."
            )

    def _divisor(self, unit: Unit) -> int:
        return self.num_train if unit == "nats" else 1


def checked_compute(compute: Compute | None) -> Compute:
    """Return the compute settings of a pass, by default `Compute()`."""
    if compute is not None and not isinstance(compute, Compute):
        raise InputError(f"compute must be an eigentrace.Compute or None, got {compute!r}.")
    return compute or Compute()


def _cosine(scores: Tensor, of_queries: Tensor, of_train: Tensor) -> Tensor:
    scale = (of_queries.clamp_min(0).sqrt()[:, None] * of_train.clamp_min(0).sqrt()[None]).clamp_min(
        torch.finfo(scores.dtype).tiny
    )
    return torch.where(scores == 0, 0.0, scores / scale)
