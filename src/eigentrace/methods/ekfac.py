"""EK-FAC: the curvature as a matrix that is diagonal in a Kronecker eigenbasis of each layer (George et al., 2018)."""

from dataclasses import dataclass, replace
from typing import Any, Literal

from eigentrace.curvature.drawn import DrawnGradients
from eigentrace.data import Data
from eigentrace.errors import InputError, NumericalError
from eigentrace.fits.ekfac_fit import EKFACFit
from eigentrace.fits.kronecker_metric import KroneckerMetric, measured_metric
from eigentrace.methods.method import ready
from eigentrace.numeric.seeding import generator_of
from eigentrace.progress import tell
from eigentrace.projection import Job
from eigentrace.settings import check_above_zero, check_counts, counted, settings_of, settings_repr, short
from eigentrace.task.task import Task, penalty_of

# damping="auto" is this share of the mean of the diagonal: between .03 and .1 predicted retraining best on a language
# model, and on digits the results hardly depend on it (docs/results/fidelity.md).
_AUTO = 0.1


@dataclass(frozen=True)
class EKFAC:
    """Influence by an approximate inverse of the whole curvature, from two passes over a sample.

    In the eigenbases of the covariances of each layer's inputs and output gradients, the diagonal of the Gauss-Newton
    matrix is measured; the rest is ignored. Parameters without a layer rule, biases that belong to no matrix and
    normalisation layers are diagonal as they are. A side wider than 8,192 (a vocabulary) keeps the standard basis.
    """

    sample: int | None = 8192
    """Number of examples that the curvature is measured on, drawn once; None for all of the data."""
    damping: float | Literal["auto"] = "auto"
    """δ, which is added to the diagonal; "auto" for 0.1 × its mean over all parameters."""
    labels: Literal["drawn", "data"] = "drawn"
    """"drawn" from the model's own predictions, which gives the Gauss-Newton matrix and needs a task with outputs;
    "data" for the gradients of the losses, which vanish where the model fits its data (the empirical Fisher)."""
    seed: int = 0
    """Seed of the sample and of the drawn labels."""

    __repr__ = settings_repr

    def __post_init__(self) -> None:
        check_counts(0, seed=self.seed)
        if self.sample is not None:
            check_counts(1, sample=self.sample)
        if self.damping != "auto":
            check_above_zero(damping=self.damping)
        if self.labels not in ("drawn", "data"):
            raise InputError(f"labels must be 'drawn' or 'data', got {self.labels!r}.")

    def fit(self, task: Task, data: Any, *, num_train: int | None = None) -> EKFACFit:
        """Measure the eigenbases and the diagonal; see `Method.fit` for the arguments."""
        task, data, size = ready(task, data, num_train)
        if self.labels == "drawn" and not task.has_outputs:
            raise InputError(
                "Drawing labels needs a task with outputs: pass `outputs` and `output_loss` to Task, or use "
                "EKFAC(labels='data'), the gradients of the losses themselves."
            )
        part = data if self.sample is None else data.take(data.sample(self.sample, generator_of(self.seed)))
        with task.session():
            metric = self._metric(task, part)
        mean = metric.mean
        if not mean > 0:
            raise NumericalError(
                "The curvature of the sample is zero, so it cannot be inverted. Check the losses of the data "
                "(eigentrace.Loss)."
            )
        damping = _AUTO * mean if self.damping == "auto" else float(self.damping)
        unrotated = metric.unrotated
        if unrotated:
            names = short(", ".join(f"{name} ({' and '.join(sides)})" for name, sides in unrotated.items()), 300)
            tell(f"EK-FAC: {counted(len(unrotated), 'parameter')} with a side in the standard basis: {names}")
        settings = settings_of(self) | {"examples": len(part), "damping": damping, "unrotated": unrotated}
        return EKFACFit(task, metric, damping, settings, size)

    def _metric(self, task: Task, data: Data) -> KroneckerMetric:
        job = Job.of(task, "losses")
        if self.labels == "drawn":
            drawn = DrawnGradients(task, self.seed)
            job = replace(job, function=drawn, prepare=drawn.prepare)
        metric = measured_metric(job, data)
        return metric.plus(penalty_of(task)) if any(task.l2.values()) else metric
