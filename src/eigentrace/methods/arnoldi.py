"""The paper's method: diagonalise the curvature once in a Krylov subspace, then score examples by K features each."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from eigentrace.curvature.checks import check_curvature
from eigentrace.curvature.compiled import COMPILED_SHARE
from eigentrace.curvature.operator import (
    Curvature,
    Kind,
    compiling_pays,
    product_seconds,
    resolve_kind,
    working_form,
)
from eigentrace.curvature.products import Precision
from eigentrace.data import Data
from eigentrace.errors import InputError
from eigentrace.fits.calibration import GradientMoments, gradient_moments, num_products
from eigentrace.fits.cut import Cut, Tail
from eigentrace.fits.eigen_fit import EigenFit
from eigentrace.fits.ekfac_fit import EKFACFit
from eigentrace.fits.refine import recorded_damping, scalar_damping
from eigentrace.fits.relative_pairs import relative_pairs
from eigentrace.fits.reliability import rank_agreement
from eigentrace.fits.tail_coordinates import check_wanted
from eigentrace.krylov.eigenpairs import Eigenpairs, top_eigenpairs, warn_unless_converged, warn_unless_convex
from eigentrace.krylov.estimate import FitEstimate, estimate_of
from eigentrace.krylov.iterate import Krylov, Matvec, arnoldi, finished, lanczos
from eigentrace.krylov.plan import IterationPlan, check_disk, fitted_basis
from eigentrace.krylov.resume import SavedIteration, begun_with, opened
from eigentrace.krylov.vectors import Basis
from eigentrace.methods.ekfac import EKFAC
from eigentrace.methods.method import ready
from eigentrace.numeric.seeding import generator_of
from eigentrace.progress import tell
from eigentrace.projection.directions import DenseDirections
from eigentrace.settings import check_counts, settings_of, settings_repr
from eigentrace.task.layout import normal
from eigentrace.task.task import Task

# Default number of coordinates of a shaped tail: the energies of further ones are far below δ (docs/tail.md).
SHAPED_COORDINATES = 1024
# Settings that the iteration depends on, besides the basis and the curvature. The others only affect its result.
_OF_ITERATION = ("steps", "sample", "spread", "seed", "precision", "compile")
# Products of the checks before an iteration; and how much longer a fit takes with those on two halves of the sample.
_CHECKS, _WITH_HALVES = 4, 2.0
# The estimate of a fit is printed if it takes longer than this.
_TOLD_SECONDS = 60.0
# Number of examples whose losses are compared, to check that an iteration is resumed with the same data and loss.
_COMPARED_ROWS = 64


@dataclass(frozen=True)
class Arnoldi:
    """Influence computed from the top K eigenpairs of the curvature, with one eigenvalue δ for all other directions.

    Args:
        steps: n, the number of products with the curvature in the Krylov iteration. More steps give more accurate
            eigenpairs; four times `keep` is a good start.
        keep: K (the paper's p̃), the number of eigenpairs to keep, those of largest |λ|; at most `steps`. Each example
            gets K features.
        curvature: The matrix to invert: "hessian"; "gauss-newton", which is positive semi-definite at any point of
            training and needs a task with outputs; or "auto" for Gauss-Newton if the task has outputs, else the
            Hessian.
        tail: δ, the eigenvalue that is assumed for all directions that are not kept: "auto" for |λ_K|, or a positive
            number. "shaped" adds the mean squared gradient along each of `coordinates` to δ. "ekfac" takes the metric
            of `EKFAC` for these directions: the pairs are those of the curvature relative to that metric, and correct
            it where it is most wrong. Its damping is that of the training, if the task has a record of it. None
            ignores these directions, as the paper does.
        coordinates: R, the number of coordinates stored per example for the tail: a count, or a fraction of the tail's
            energy to cover. None is 1024 for a shaped tail, and no coordinates otherwise.
        positive_only: Drop eigenpairs with negative eigenvalues after taking the top K, as the paper does at saddle
            points.
        sample: Number of examples that the curvature is averaged over, drawn once; None for all of the data.
        spread: Draw `sample` new examples at every step, as the paper does, instead of one fixed sample.
        seed: Seed of the sample and the start vector.
        precision: "fp32", or "bf16" for products under autocast: faster on a GPU, accurate to about two digits.
        basis: Dtype and device of the Krylov vectors, and how many are stored before a restart; by default, so that
            they fit in memory. See `Basis`.
        compile: Compile the products with torch.compile: takes a minute or more, then about doubles the speed. "auto"
            compiles on a GPU if the time saved is expected to exceed the time of compiling.
        reliability: Also fit on two disjoint halves of the sample, and report their rank agreement as
            `fitted.reliability`. This takes about as long as another fit.
    """

    steps: int = 200
    keep: int = 50
    curvature: Kind = "auto"
    tail: Tail | Literal["ekfac"] = "auto"
    coordinates: int | float | None = None
    positive_only: bool = False
    sample: int | None = 8192
    spread: bool = False
    seed: int = 0
    precision: Precision = "fp32"
    basis: Basis = field(default_factory=Basis)
    compile: bool | Literal["auto"] = "auto"
    reliability: bool = False

    __repr__ = settings_repr

    @classmethod
    def as_published(
        cls,
        steps: int = 200,
        keep: int = 10,
        batch: int = 512,
        *,
        positive_only: bool = False,
        seed: int = 0,
        basis: Basis | None = None,
        precision: Precision = "fp32",
        compile: bool | Literal["auto"] = "auto",
    ) -> "Arnoldi":
        """Return the estimator of *Scaling Up Influence Functions*: Algorithm 1, for comparisons with the paper.

        It uses the Hessian, new examples for every product, one random start vector, and no tail. One thing differs:
        the symmetric part of the projected matrix is diagonalised, so that eigenvalues are real and eigenvectors
        orthonormal. With one fixed batch that matrix is symmetric already.

        Args:
            steps: n, the number of products.
            keep: p̃, the number of eigenpairs of largest |λ|.
            batch: Number of examples for each product.
            positive_only: Drop eigenpairs with negative eigenvalues, as the paper does for image classifiers.
            seed: Seed of the batches and of the start vector.
            basis: See `Arnoldi`.
            precision: See `Arnoldi`.
            compile: See `Arnoldi`.
        """
        return cls(
            steps,
            keep,
            "hessian",
            tail=None,
            positive_only=positive_only,
            sample=batch,
            spread=True,
            seed=seed,
            basis=basis or Basis(),
            precision=precision,
            compile=compile,
        )

    def __post_init__(self) -> None:
        check_counts(1, steps=self.steps, keep=self.keep)
        check_counts(0, seed=self.seed)
        if not isinstance(self.reliability, bool):
            raise InputError(f"reliability must be True or False, got {self.reliability!r}.")
        if not isinstance(self.compile, bool) and self.compile != "auto":
            raise InputError(f"compile must be True, False or 'auto', got {self.compile!r}.")
        if self.sample is not None:
            check_counts(1, sample=self.sample)
        if not isinstance(self.basis, Basis):
            raise InputError(f"basis must be an eigentrace.Basis, got {self.basis!r}.")
        if self.keep > self.steps:
            raise InputError(
                f"keep={self.keep} eigenpairs cannot be computed from steps={self.steps} products: keep must be at "
                "most steps. Raise steps (four times keep is a good start), or lower keep."
            )
        if self.tail == "ekfac":
            self._check_metric()
        else:
            Cut(self.keep, self.tail, self.positive_only)
        if self.coordinates is not None:
            check_wanted(self.coordinates)
        if self.basis.max_vectors is not None and self.keep > self.basis.carried:
            raise InputError(
                f"Restarts that keep {self.basis.carried} vectors cannot find keep={self.keep} eigenpairs. Raise "
                "max_vectors or restart_keep of Basis, or lower keep."
            )

    def _check_metric(self) -> None:
        """Check that the other settings go with a tail by EK-FAC."""
        if self.curvature == "hessian" or self.spread or self.positive_only or self.coordinates is not None:
            raise InputError(
                "tail='ekfac' needs the Gauss-Newton curvature of one sample, and has no coordinates: leave "
                "curvature, spread, positive_only and coordinates at their defaults, or choose another tail."
            )

    def fit(
        self, task: Task, data: Any, *, num_train: int | None = None, resume: str | Path | None = None
    ) -> EigenFit | EKFACFit:
        """Compute the top eigenpairs of the curvature of the training loss; see `Method.fit` for the first arguments.

        Args:
            task: The model and its loss.
            data: Training examples.
            num_train: N, if `data` is only part of the training set.
            resume: Directory for the state of the iteration. After a crash, the same call resumes from it and returns
                the same eigenpairs. It takes as much disk space as the basis (1.6 times as much with restarts), which
                is checked at the start, and is not deleted at the end: remove it once the fit is saved.
        """
        task, data, size = ready(task, data, num_train)
        generator = generator_of(self.seed)
        planned = replace(self, basis=self._basis(task, data, resume))
        if self.tail == "ekfac":
            return planned._fit_in_metric(task, data, size, generator, resume)
        with task.session(), planned._opened(resume, task, data, size, generator) as saved:
            eigenpairs = top_eigenpairs(planned._krylov(task, data, generator, saved), self.keep)
            moments = None if self.tail is None else planned._moments(task, data, eigenpairs, saved)
        warn_unless_converged(eigenpairs.spectrum)
        if resolve_kind(self.curvature, task) == "gauss-newton" and not self.spread:
            warn_unless_convex(eigenpairs.spectrum)
        wanted = SHAPED_COORDINATES if self.coordinates is None and self.tail == "shaped" else self.coordinates
        tail = self.tail if self.tail != "shaped" else "auto"
        cut = Cut(self.keep, tail, self.positive_only, is_complete=eigenpairs.is_complete)
        settings = settings_of(self) | {"basis": planned.basis.record()}
        if self.reliability:
            settings["agreement"] = asdict(rank_agreement(self, task, data))
        fitted = EigenFit(task, eigenpairs, cut, settings, size, moments=moments)
        return fitted if wanted is None else fitted.with_coordinates(data, wanted).distill(tail=self.tail)

    def _fit_in_metric(
        self, task: Task, data: Data, size: int, generator: torch.Generator, resume: str | Path | None
    ) -> EKFACFit:
        """Iterate with (M + δ)^-½ (H + δ) (M + δ)^-½ − 1, where M is the metric of EK-FAC."""
        whole = EKFAC(self.sample, seed=self.seed).fit(task, data, num_train=size)
        metric = whole.metric
        damping = scalar_damping(task, metric.mean, "this fit", "use fitted.damped(...)")

        def whitened(multiply: Matvec) -> Matvec:
            def matvec(v: Tensor) -> Tensor:
                x = metric.root(v[None], damping)[0]
                # Less the identity: where EK-FAC is right nothing is left, and the iteration ends instead of amplifying
                # rounding.
                return metric.root((multiply(x) + damping * x)[None], damping)[0] - v

            return matvec

        with task.session(), self._opened(resume, task, data, size, generator) as saved:
            krylov = self._krylov(task, data, generator, saved, whitened)
            pairs = relative_pairs(krylov, metric, damping, self.keep)
        warn_unless_convex(pairs.spectrum)
        settings = settings_of(self) | {"basis": self.basis.record()}
        settings |= {name: whole.method[name] for name in ("examples", "draws", "unrotated")} | {"damping": damping}
        if self.reliability:
            settings["agreement"] = asdict(rank_agreement(self, task, data))
        return replace(whole, method=settings, pairs=pairs, damping=damping)

    def estimate(self, task: Task, data: Any) -> FitEstimate:
        """Estimate time, memory and disk space of a fit from a product on one batch; nothing is fitted.

        Args:
            task: The model and its loss.
            data: Training examples.
        """
        task, data, _ = ready(task, data, None)
        plan = self._plan(task, data)
        with task.session():
            rows = None if self.sample is None else data.sample(self.sample, generator_of(self.seed))
            curvature = Curvature(task, data, rows, resolve_kind(self.curvature, task), self.precision)
            curvature = replace(curvature, form=working_form(curvature, curvature.first_batch()))
            return self._estimated(replace(plan, basis=fitted_basis(plan)), curvature, product_seconds(curvature))

    def _estimated(self, plan: IterationPlan, curvature: Curvature, seconds: float) -> FitEstimate:
        """Return the estimate of a fit, given the time of an eager product."""
        others = _CHECKS + (0 if self.tail is None else num_products(self.steps))
        wanted = compiling_pays(curvature, self.steps, seconds) if self.compile == "auto" else self.compile
        found = estimate_of(plan, curvature.task.vector, seconds * (COMPILED_SHARE if wanted else 1.0), others)
        return replace(found, seconds=_WITH_HALVES * found.seconds) if self.reliability else found

    def _basis(self, task: Task, data: Data, resume: str | Path | None) -> Basis:
        """Return the basis of an iteration that is resumed, or one that fits in memory."""
        plan, begun = self._plan(task, data), {} if resume is None else begun_with(resume)
        if not begun:
            return fitted_basis(plan)
        record = {name: begun.get(f"basis {name}") for name in self.basis.record()}
        return fitted_basis(replace(plan, basis=self.basis.as_begun(record)), is_begun=True)

    def _plan(self, task: Task, data: Data) -> IterationPlan:
        layout, restarts = task.layout, not self._redraws(data)
        return IterationPlan(
            layout.numel, layout.dtype, layout.device, self.steps, self.keep, self.basis, can_restart=restarts
        )

    def _redraws(self, data: Data) -> bool:
        """Return whether every step draws new examples, so that the curvature changes."""
        return self.spread and self.sample is not None and self.sample < len(data)

    def _opened(
        self, path: str | Path | None, task: Task, data: Data, size: int, generator: torch.Generator
    ) -> AbstractContextManager[SavedIteration | None]:
        return nullcontext() if path is None else opened(path, self._identity(task, data, size), generator)

    def _identity(self, task: Task, data: Data, size: int) -> dict[str, Any]:
        """Describe everything the iteration depends on, so that it is never resumed with different inputs."""
        settings = settings_of(self)
        basis = {f"basis {name}": value for name, value in self.basis.record().items() if name != "name"}
        return {
            "model": task.fingerprint(),
            "l2": {name: float(value) for name, value in task.l2.items() if value},
            "device": task.layout.device.type,
            "examples": len(data),
            "num_train": size,
            "losses": _some_losses(task, data),
            "curvature": resolve_kind(self.curvature, task),
            **{name: settings[name] for name in _OF_ITERATION},
            **(_metric_identity(task) if self.tail == "ekfac" else {}),
            **basis,
        }

    def _krylov(
        self,
        task: Task,
        data: Data,
        generator: torch.Generator,
        saved: SavedIteration | None,
        around: Callable[[Matvec], Matvec] = lambda multiply: multiply,
    ) -> Krylov:
        """Run or resume the iteration; a finished one is loaded without checks or products."""
        done = None if saved is None else finished(saved, task.vector, self.steps, basis=self.basis)
        if done is not None:
            return done
        if saved is not None:
            check_disk(self._plan(task, data), saved.path)
        curvature = self._curvature(task, data, generator, saved)
        # Always drawn, even if a resumed iteration does not use it, so that later draws stay the same.
        start = start_vector(task, generator)
        if saved is not None:
            saved.begin(compile=curvature.compile)
        if self._redraws(data):
            matvec = _spread(curvature, int(self.sample or 0), generator)
            return arnoldi(matvec, start, self.steps, basis=self.basis, memory=saved)
        return lanczos(around(curvature.matvec), start, self.steps, basis=self.basis, memory=saved)

    def _moments(self, task: Task, data: Data, eigenpairs: Eigenpairs, saved: SavedIteration | None) -> GradientMoments:
        """Measure the gradients of the curvature sample, to calibrate scores in nats, or load what was measured."""
        count = len(eigenpairs.directions)
        name = f"moments-of-{count}-directions"
        found = None if saved is None else saved.recall_result(name)
        if found is not None:
            return GradientMoments.of_tensors(found, count)
        moments = self._measured_moments(task, data, eigenpairs)
        if saved is not None:
            saved.keep_result(name, moments.tensors())
        return moments

    def _measured_moments(self, task: Task, data: Data, eigenpairs: Eigenpairs) -> GradientMoments:
        rows = None if self.sample is None else data.sample(self.sample, generator_of(self.seed))
        curvature = Curvature(task, data, rows, resolve_kind(self.curvature, task), self.precision)
        curvature = replace(curvature, form=working_form(curvature, curvature.first_batch()))
        sample = data if rows is None else data.take(rows)
        directions = DenseDirections(eigenpairs.directions, task.layout)
        return gradient_moments(task, sample, curvature.matvec, directions, self.steps, self.seed)

    def _curvature(self, task: Task, data: Data, generator: torch.Generator, saved: SavedIteration | None) -> Curvature:
        rows = None if self.sample is None else data.sample(self.sample, generator)
        curvature = Curvature(task, data, rows, resolve_kind(self.curvature, task), self.precision)
        curvature = check_curvature(curvature, generator)
        seconds = product_seconds(curvature)
        if saved is None or saved.is_new:
            estimated = self._estimated(self._plan(task, data), curvature, seconds)
            if estimated.seconds > _TOLD_SECONDS:
                tell(f"The fit will take {estimated}.")
        # "auto" decides by measured times: a resumed iteration reuses the decision from its start.
        wanted = self.compile if saved is None else saved.chosen("compile", self.compile)
        compiles = compiling_pays(curvature, self.steps, seconds) if wanted == "auto" else wanted
        return replace(curvature, compile=compiles)


def start_vector(task: Task, generator: torch.Generator) -> Tensor:  # (P,)
    """Draw the start vector of an iteration."""
    return normal((task.layout.numel,), generator, task.layout)


def _metric_identity(task: Task) -> dict[str, Any]:
    """Describe the metric that an iteration depends on; a guess of its damping follows from the curvature."""
    recorded = recorded_damping(task)
    damping = "guess" if recorded is None else f"{float(recorded.double().mean()):.6g}"
    return {"metric": "ekfac", "metric damping": damping}


def _some_losses(task: Task, data: Data) -> list[float]:
    """Return the losses of a few examples at even distances in the data."""
    rows = np.unique(np.linspace(0, len(data) - 1, _COMPARED_ROWS).astype(np.int64))
    batches = (task.place(batch.values) for batch in data.batches(rows))
    # Non-finite losses become 0, which JSON can store; if they matter, the task's checks report them.
    found = [task.losses(task.params, batch).double().nan_to_num(0.0, 0.0, 0.0).tolist() for batch in batches]
    return [loss for losses in found for loss in losses]


def _spread(curvature: Curvature, sample: int, generator: torch.Generator) -> Callable[[Tensor], Tensor]:
    def matvec(v: Tensor) -> Tensor:
        rows = curvature.data.sample(sample, generator)
        # `_held` contains the examples of `rows`: a new draw needs a new list.
        return replace(curvature, rows=rows, hold=False).matvec(v)

    return matvec
