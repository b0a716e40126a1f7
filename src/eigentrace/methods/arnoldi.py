"""The paper's method: diagonalise the curvature once in its dominant Krylov subspace, then score by K numbers."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from eigentrace.curvature.checks import check_curvature
from eigentrace.curvature.operator import Curvature, Kind, compiling_pays, resolve_kind
from eigentrace.curvature.products import Precision
from eigentrace.data import Data
from eigentrace.errors import InputError
from eigentrace.fits.cut import Cut, Tail
from eigentrace.fits.eigen_fit import EigenFit
from eigentrace.fits.reliability import rank_agreement
from eigentrace.fits.tail_coordinates import check_wanted
from eigentrace.krylov.eigenpairs import top_eigenpairs, warn_unless_converged, warn_unless_convex
from eigentrace.krylov.iterate import Krylov, arnoldi, finished, lanczos
from eigentrace.krylov.resume import SavedIteration, opened
from eigentrace.krylov.vectors import Basis
from eigentrace.methods.method import ready
from eigentrace.numeric.seeding import generator_of
from eigentrace.settings import check_counts, settings_of
from eigentrace.task.layout import normal
from eigentrace.task.task import Task

# Coordinates along which a shaped tail has its shape, unless told: beyond them energies are far below δ (docs/tail.md).
SHAPED_COORDINATES = 1024
# Settings that the iteration depends on, beside the basis and the curvature; the others say what is made of it.
_OF_ITERATION = ("steps", "sample", "spread", "seed", "precision", "compile")
# Examples whose losses tell whether an iteration is continued with the data and the loss it was begun with.
_COMPARED_ROWS = 64


@dataclass(frozen=True)
class Arnoldi:
    """Influence from the top eigenpairs of the curvature, with what lies beyond them kept as one number."""

    steps: int = 200
    """n, the number of curvature products."""
    keep: int = 50
    """K (the paper's p̃), the eigenpairs kept."""
    curvature: Kind = "auto"
    """"hessian", "gauss-newton", or "auto": the latter where the task knows its outputs."""
    tail: Tail = "auto"
    """δ that stands for all directions not kept: "auto" is |λ_K|, "shaped" adds the gradients' energy along
    `coordinates` to it, None is the paper's truncation, or a number."""
    coordinates: int | float | None = None
    """R, coordinates that stand for the tail: a count, or a share of its energy. None: 1024 if it is shaped, else 0."""
    positive_only: bool = False
    """Drop directions of negative curvature after taking the top K, as the paper does at saddle points."""
    sample: int | None = 8192
    """Examples the curvature is taken on, drawn once; None for all of the data."""
    spread: bool = False
    """Draw `sample` new examples at every step, as the paper does, instead of one fixed sample."""
    seed: int = 0
    """Fixes the sample and the start vector."""
    precision: Precision = "fp32"
    """"bf16" multiplies under autocast: faster on a GPU, about two digits."""
    basis: Basis = field(default_factory=Basis)
    """Type, place and number of the Krylov vectors held."""
    compile: bool | Literal["auto"] = "auto"
    """Compile the products: a minute or more at first, then about twice the speed. "auto" where that pays on a GPU."""
    reliability: bool = False
    """Fit twice more, on disjoint halves of the sample, and keep how far their ranks agree as `fitted.reliability`."""

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
                f"keep={self.keep} eigenpairs cannot come from steps={self.steps} products. Raise steps (four times "
                "keep is a good start), or lower keep."
            )
        Cut(self.keep, self.tail, self.positive_only)
        if self.coordinates is not None:
            check_wanted(self.coordinates)
        if self.basis.max_vectors is not None and self.keep > self.basis.carried:
            raise InputError(
                f"Restarting with {self.basis.carried} carried vectors cannot settle keep={self.keep} pairs. Raise "
                "Basis(max_vectors, restart_keep), or lower keep."
            )

    def fit(self, task: Task, data: Any, *, num_train: int | None = None, resume: str | Path | None = None) -> EigenFit:
        """Diagonalise the curvature of the training loss; see `Method.fit` for the other arguments.

        Args:
            task: The model and its loss.
            data: Training examples.
            num_train: N, if `data` is only part of the training set.
            resume: A directory in which the iteration keeps its state, so that the same call goes on after a crash
                and ends with the same eigenpairs. It takes as much room as the basis (with restarts, 1.6 times as
                much), and stays when the fit is done: remove it once the fit is saved.
        """
        task, data, size = ready(task, data, num_train)
        generator = generator_of(self.seed)
        with task.session(), self._opened(resume, task, data, size, generator) as saved:
            eigenpairs = top_eigenpairs(self._krylov(task, data, generator, saved), self.keep)
        warn_unless_converged(eigenpairs.spectrum)
        if resolve_kind(self.curvature, task) == "gauss-newton" and not self.spread:
            warn_unless_convex(eigenpairs.spectrum)
        wanted = SHAPED_COORDINATES if self.coordinates is None and self.tail == "shaped" else self.coordinates
        cut = Cut(self.keep, self.tail if self.tail != "shaped" else "auto", self.positive_only)
        settings = settings_of(self) | (
            {"agreement": asdict(rank_agreement(self, task, data))} if self.reliability else {}
        )
        fitted = EigenFit(task, eigenpairs, cut, settings, size)
        return fitted if wanted is None else fitted.with_coordinates(data, wanted).distill(tail=self.tail)

    def _opened(
        self, path: str | Path | None, task: Task, data: Data, size: int, generator: torch.Generator
    ) -> AbstractContextManager[SavedIteration | None]:
        return nullcontext() if path is None else opened(path, self._identity(task, data, size), generator)

    def _identity(self, task: Task, data: Data, size: int) -> dict[str, Any]:
        """Describe all that the iteration depends on, so that it is never continued with something else."""
        settings = settings_of(self)
        basis = {f"basis {name}": value for name, value in settings_of(self.basis).items() if name != "name"}
        return {
            "model": task.fingerprint(),
            "l2": {name: float(value) for name, value in task.l2.items() if value},
            "device": task.layout.device.type,
            "examples": len(data),
            "num_train": size,
            "losses": _some_losses(task, data),
            "curvature": resolve_kind(self.curvature, task),
            **{name: settings[name] for name in _OF_ITERATION},
            **basis,
        }

    def _krylov(self, task: Task, data: Data, generator: torch.Generator, saved: SavedIteration | None) -> Krylov:
        """Iterate, or go on with a saved iteration; one that has ended needs neither checks nor products."""
        done = None if saved is None else finished(saved, task.vector, self.steps, basis=self.basis)
        if done is not None:
            return done
        curvature = self._curvature(task, data, generator, saved)
        # Drawn whether or not it is needed, so that what is drawn after it is the same.
        start = start_vector(task, generator)
        if saved is not None:
            saved.begin(compile=curvature.compile)
        if self.spread and self.sample is not None and self.sample < len(data):
            matvec = _spread(curvature, self.sample, generator)
            return arnoldi(matvec, start, self.steps, basis=self.basis, memory=saved)
        return lanczos(curvature.matvec, start, self.steps, basis=self.basis, memory=saved)

    def _curvature(self, task: Task, data: Data, generator: torch.Generator, saved: SavedIteration | None) -> Curvature:
        rows = None if self.sample is None else data.sample(self.sample, generator)
        curvature = Curvature(task, data, rows, resolve_kind(self.curvature, task), self.precision)
        curvature = check_curvature(curvature, generator)
        # Whether compiling pays is measured: an iteration goes on with what was found when it began.
        wanted = self.compile if saved is None else saved.chosen("compile", self.compile)
        return replace(curvature, compile=compiling_pays(curvature, self.steps) if wanted == "auto" else wanted)


def start_vector(task: Task, generator: torch.Generator) -> Tensor:  # (P,)
    """Draw where an iteration begins."""
    return normal((task.layout.numel,), generator, task.layout)


def _some_losses(task: Task, data: Data) -> list[float]:
    """Take the losses of a few rows spread over the data."""
    rows = np.unique(np.linspace(0, len(data) - 1, _COMPARED_ROWS).astype(np.int64))
    batches = (task.place(batch.values) for batch in data.batches(rows))
    # Losses that are not finite are told of by the checks if they matter; JSON has no place for them.
    found = [task.losses(task.params, batch).double().nan_to_num(0.0, 0.0, 0.0).tolist() for batch in batches]
    return [loss for losses in found for loss in losses]


def _spread(curvature: Curvature, sample: int, generator: torch.Generator) -> Callable[[Tensor], Tensor]:
    def matvec(v: Tensor) -> Tensor:
        rows = curvature.data.sample(sample, generator)
        # `_held` belongs to the rows: a new draw needs a new list.
        return replace(curvature, rows=rows, hold=False).matvec(v)

    return matvec
