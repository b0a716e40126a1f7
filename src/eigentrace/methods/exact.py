"""The exact inverse Hessian, for models small enough to store it."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eigentrace.curvature.checks import check_curvature
from eigentrace.curvature.operator import Curvature, Kind, resolve_kind
from eigentrace.data import Data
from eigentrace.errors import InputError, NumericalError, TaskError
from eigentrace.fits.cut import Cut
from eigentrace.fits.eigen_fit import EigenFit
from eigentrace.krylov.eigenpairs import Eigenpairs, Spectrum, with_fixed_signs
from eigentrace.krylov.iterate import Ending
from eigentrace.methods.method import ready
from eigentrace.progress import track
from eigentrace.settings import check_counts, check_not_negative, settings_of, settings_repr
from eigentrace.task.task import Task

# Products computed between two updates of the progress bar.
_COLUMNS_AT_ONCE = 256


@dataclass(frozen=True)
class ExactHessian:
    """Influence computed with the whole Hessian in float64: the reference that other methods are compared with."""

    damping: float = 0.0
    """Number to add to every eigenvalue before inverting."""
    curvature: Kind = "hessian"
    """The matrix to invert: "hessian"; "gauss-newton", which needs a task with outputs; or "auto" for Gauss-Newton if
    the task has outputs, else the Hessian."""
    max_params: int = 10_000
    """Largest number of selected parameters P to accept: the matrix takes 8·P² bytes, the eigensolver about P³
    operations."""

    __repr__ = settings_repr

    def __post_init__(self) -> None:
        check_not_negative(damping=self.damping)
        check_counts(1, max_params=self.max_params)

    def fit(self, task: Task, data: Any, *, num_train: int | None = None) -> EigenFit:
        """Compute the Hessian of the mean loss of all of `data` and diagonalise it; see `Method.fit` for arguments."""
        size = task.layout.numel if isinstance(task, Task) else 0
        if size > self.max_params:
            raise InputError(
                f"The exact Hessian of {size:,} parameters takes {8 * size**2 / 2**30:.3g} GiB, and several times that "
                f"to diagonalise; at most max_params={self.max_params:,} are accepted. Select fewer parameters with "
                "Task(params=), raise max_params, or use Arnoldi."
            )
        task, data, num_train = ready(task, data, num_train)
        task = task.double()
        with task.session():
            _check_double(task, data)
            curvature = Curvature(task, data, None, resolve_kind(self.curvature, task))
            H = _dense(check_curvature(curvature, torch.Generator().manual_seed(0)))
        values, vectors = torch.linalg.eigh((H + H.T) / 2)
        values = values + self.damping
        if values.abs().min() <= 1e-12 * values.abs().max():
            raise NumericalError(
                f"The Hessian is singular: its smallest |eigenvalue| is {values.abs().min():.2g}, its largest "
                f"{values.abs().max():.2g}. Set damping, or pass Task the l2 that the model was trained with."
            )
        order = values.abs().argsort(descending=True)
        spectrum = Spectrum(
            values[order].cpu(), torch.zeros(size, dtype=values.dtype, device="cpu"), Ending.WHOLE_SPACE, size
        )
        eigenpairs = Eigenpairs(with_fixed_signs(vectors[:, order].T.contiguous()), spectrum)
        return EigenFit(task, eigenpairs, Cut(size, None, False), settings_of(self), num_train)


def _check_double(task: Task, data: Data) -> None:
    batch = next(data.batches(np.arange(1)))
    try:
        task.losses(task.params, task.place(batch.values))
    except RuntimeError as error:
        raise TaskError(
            f"The model does not run in float64: {error} | Something in the model or the loss is fixed to float32, "
            "such as x.float() or class weights. Use the dtype of the parameters (x.to(weight.dtype)), or pass a "
            "float64 model."
        ) from error


def _dense(curvature: Curvature) -> Tensor:  # (P, P)
    size = curvature.task.layout.numel
    eye = torch.eye(size, dtype=torch.float64, device=curvature.task.layout.device)
    return torch.cat(
        [curvature.matmat(part) for part in track(eye.split(_COLUMNS_AT_ONCE), "Exact Hessian", size, len)]
    )
