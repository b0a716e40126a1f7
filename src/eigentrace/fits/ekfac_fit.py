"""Fits whose scores use the inverse of a Kronecker metric, with or without eigenpairs that correct it."""

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from eigentrace.data import Data
from eigentrace.errors import InputError
from eigentrace.fits.file_names import EIGENPAIRS, METRIC
from eigentrace.fits.fitted import Capabilities, Fitted
from eigentrace.fits.kronecker_metric import KroneckerMetric
from eigentrace.fits.on_disk import fit_manifest
from eigentrace.fits.relative_pairs import RelativePairs
from eigentrace.fits.solved_scores import solved_scores
from eigentrace.fits.weighted_directions import Norm
from eigentrace.krylov.eigenpairs import Spectrum
from eigentrace.krylov.solve import Rows
from eigentrace.numeric.accumulate import over
from eigentrace.projection import Job, project
from eigentrace.projection.directions import DenseDirections
from eigentrace.projection.engine import Compute
from eigentrace.settings import check_above_zero, check_counts, counted
from eigentrace.task.checks import check_loss_fingerprint
from eigentrace.task.task import Task


@dataclass(frozen=True, repr=False)
class EKFACFit(Fitted):
    """Scores ⟨g(z), (M + δ)⁻¹g(x)⟩, with M the metric and δ the damping, corrected by eigenpairs if there are any."""

    task: Task
    metric: KroneckerMetric
    damping: float
    """δ."""
    method: dict[str, Any]
    num_train: int
    has_curvature: bool = True
    pairs: RelativePairs | None = None

    def _described(self) -> list[str]:
        size = counted(self.task.layout.numel, "parameter")
        if self.pairs is not None:
            size = f"{counted(len(self.pairs.directions), 'direction')} of {size} in the metric of EK-FAC"
        return [size, f"damping δ={self.damping:.3g}", f"curvature on {counted(self.method['examples'], 'example')}"]

    @property
    def can(self) -> Capabilities:
        """Influence, refined or not, unit gradients and saving; and what follows from eigenpairs."""
        has_pairs = self.pairs is not None
        return Capabilities(
            influence=True, unit_gradients=True, save=True, refine=True, spectrum=has_pairs, distill=has_pairs
        )

    @property
    def positive_metric(self) -> bool:
        """Whether every self-influence is positive: always, since the diagonal is a mean of squares, and μ > 0."""
        return True

    def damped(self, damping: float) -> "EKFACFit":
        """Return the same fit with another damping, without recomputation."""
        check_above_zero(damping=damping)
        pairs = None if self.pairs is None else self.pairs.damped(self.metric, self.damping, float(damping))
        return replace(self, damping=float(damping), method=self.method | {"damping": float(damping)}, pairs=pairs)

    def _spectrum(self) -> Spectrum:
        return self._own_pairs.spectrum

    @property
    def _own_pairs(self) -> RelativePairs:
        if self.pairs is None:
            raise self._refusal("spectrum")
        return self.pairs

    def _distilled(self, keep: int | None, tail: Any, positive_only: bool | None, delta: float | None) -> "EKFACFit":
        if tail not in ("same", "ekfac") or positive_only or delta is not None:
            raise InputError(
                "The tail of this fit is the metric of EK-FAC: distill takes `keep`, and fitted.damped(δ) another "
                "damping. For another tail, fit Arnoldi with it."
            )
        available = len(self._own_pairs.directions)
        check_counts(1, keep=available if keep is None else keep)
        if keep is not None and keep > available:
            raise InputError(
                f"keep={keep} is too large: this fit has {available} directions. Use at most {available}, or fit again "
                "with a larger `keep`."
            )
        count = available if keep is None else keep
        return replace(self, pairs=self._own_pairs.first(count), method=self.method | {"keep": count})

    def _self(self, data: Data, *, queries: bool, norm: Norm, compute: Compute) -> Tensor:
        check_loss_fingerprint(self.task, data)
        with self.task.session():
            job = Job.of(self.task, "measurements" if queries else "losses", compute=compute)
            scores, squares = self.metric.own_scores(job, data, self.damping, norm is not None)
            if self.pairs is not None:
                directions = DenseDirections(self.pairs.directions, self.task.layout)
                weights = self.pairs.weights
                for batch, found in project(replace(job, directions=directions), data, "Corrections"):
                    scores[batch.rows] += (found.features.double().square().cpu() @ weights).to(scores)
        return scores if norm is None or squares is None else over(scores, squares)

    def _cross(self, train: Data, queries: Data, *, norm: Norm, compute: Compute) -> Tensor:
        check_loss_fingerprint(self.task, train)

        def solve(gradients: Tensor) -> Tensor:
            found = self.metric.inverse(gradients, self.damping)
            return found if self.pairs is None else found + self.pairs.correction(gradients)

        return solved_scores(self.task, solve, train, queries, norm=norm, compute=compute)[0]

    def _preconditioner(self, damping: Tensor) -> Rows:
        metric = self.metric.plus(damping)
        if self.pairs is not None:
            return self.pairs.preconditioner(metric, self.damping, damping)
        return lambda rows: metric.inverse(rows, 0.0)

    def _mean_eigenvalue(self) -> float:
        return self.metric.mean

    def _manifest(self) -> dict[str, Any]:
        found = fit_manifest(self) | {"metric": self.metric.record(), "damping": self.damping}
        return found if self.pairs is None else found | {"relative": self.pairs.record()}

    def _files(self) -> dict[str, dict[str, Tensor]]:
        found = {METRIC: self.metric.tensors()}
        return found if self.pairs is None else found | {EIGENPAIRS: self.pairs.tensors()}
