"""Fits whose scores use the inverse of a Kronecker metric."""

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from eigentrace.data import Data
from eigentrace.fits.file_names import METRIC
from eigentrace.fits.fitted import Capabilities, Fitted
from eigentrace.fits.kronecker_metric import KroneckerMetric
from eigentrace.fits.on_disk import fit_manifest
from eigentrace.fits.solved_scores import solved_scores
from eigentrace.fits.weighted_directions import Norm
from eigentrace.krylov.solve import Rows
from eigentrace.numeric.accumulate import over
from eigentrace.projection import Job
from eigentrace.projection.engine import Compute
from eigentrace.settings import check_above_zero, counted
from eigentrace.task.checks import check_loss_fingerprint
from eigentrace.task.task import Task


@dataclass(frozen=True, repr=False)
class EKFACFit(Fitted):
    """Scores ⟨g(z), (M + δ)⁻¹g(x)⟩, with M the metric and δ the damping."""

    task: Task
    metric: KroneckerMetric
    damping: float
    """δ."""
    method: dict[str, Any]
    num_train: int
    has_curvature: bool = True

    def _described(self) -> list[str]:
        size = counted(self.task.layout.numel, "parameter")
        return [size, f"damping δ={self.damping:.3g}", f"curvature on {counted(self.method['examples'], 'example')}"]

    @property
    def can(self) -> Capabilities:
        """Influence, refined or not, unit gradients and saving."""
        return Capabilities(influence=True, unit_gradients=True, save=True, refine=True)

    @property
    def positive_metric(self) -> bool:
        """Whether every self-influence is positive: always, since the diagonal is a mean of squares."""
        return True

    def damped(self, damping: float) -> "EKFACFit":
        """Return the same fit with another damping, without recomputation."""
        check_above_zero(damping=damping)
        return replace(self, damping=float(damping), method=self.method | {"damping": float(damping)})

    def _self(self, data: Data, *, queries: bool, norm: Norm, compute: Compute) -> Tensor:
        check_loss_fingerprint(self.task, data)
        with self.task.session():
            job = Job.of(self.task, "measurements" if queries else "losses", compute=compute)
            scores, squares = self.metric.own_scores(job, data, self.damping, norm is not None)
        return scores if norm is None or squares is None else over(scores, squares)

    def _cross(self, train: Data, queries: Data, *, norm: Norm, compute: Compute) -> Tensor:
        check_loss_fingerprint(self.task, train)

        def solve(gradients: Tensor) -> Tensor:
            return self.metric.inverse(gradients, self.damping)

        return solved_scores(self.task, solve, train, queries, norm=norm, compute=compute)[0]

    def _preconditioner(self, damping: Tensor) -> Rows:
        metric = self.metric.plus(damping)
        return lambda rows: metric.inverse(rows, 0.0)

    def _mean_eigenvalue(self) -> float:
        return self.metric.mean

    def _manifest(self) -> dict[str, Any]:
        return fit_manifest(self) | {"metric": self.metric.record(), "damping": self.damping}

    def _files(self) -> dict[str, dict[str, Tensor]]:
        return {METRIC: self.metric.tensors()}
