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

# damping="auto" is this share of the mean of the diagonal: 98% of the best LDS of a grid on the two problems of
# docs/results/fidelity.md, where 1 is better. Language models are usually given less, a tenth.
_AUTO = 0.5
# draws="auto" is as many for each example, divided by the number of its tokens.
_DRAWS = 4
# Distance between the seeds of further draws.
_FURTHER = 1_000_003


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
    """δ, which is added to the diagonal; "auto" for half of its mean over all parameters."""
    labels: Literal["drawn", "data"] = "drawn"
    """"drawn" from the model's own predictions, which gives the Gauss-Newton matrix and needs a task with outputs;
    "data" for the gradients of the losses, which vanish where the model fits its data (the empirical Fisher)."""
    draws: int | Literal["auto"] = "auto"
    """Draws of labels per example, each of which takes two passes; "auto" for 4, less if an example has several tokens,
    and 1 where nothing is drawn."""
    seed: int = 0
    """Seed of the sample and of the drawn labels."""

    __repr__ = settings_repr

    def __post_init__(self) -> None:
        check_counts(0, seed=self.seed)
        if self.draws != "auto":
            check_counts(1, draws=self.draws)
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
            metric, draws = self._metric(task, part)
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
        settings = settings_of(self) | {"examples": len(part), "damping": damping, "draws": draws}
        settings["unrotated"] = unrotated
        return EKFACFit(task, metric, damping, settings, size)

    def _metric(self, task: Task, data: Data) -> tuple[KroneckerMetric, int]:
        """Return the metric, and the number of draws per example."""
        jobs = [Job.of(task, "losses")]
        if self.labels == "drawn":
            positions = DrawnGradients(task).positions(data)
            draws = -(-_DRAWS // positions) if self.draws == "auto" else int(self.draws)
            functions = [DrawnGradients(task, self.seed + _FURTHER * number) for number in range(draws)]
            jobs = [replace(jobs[0], function=one, prepare=one.prepare) for one in functions]
        metric = measured_metric(jobs, data)
        return (metric.plus(penalty_of(task)) if any(task.l2.values()) else metric), len(jobs)
