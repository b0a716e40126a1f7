"""The exact inverse Hessian, for models small enough to write it down."""

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
from eigentrace.settings import check_counts, check_not_negative, settings_of
from eigentrace.task.task import Task

# Products that are computed between two looks at the progress bar.
_COLUMNS_AT_ONCE = 256


@dataclass(frozen=True)
class ExactHessian:
    """Influence with the whole Hessian in float64: the reference the others are measured by."""

    damping: float = 0.0
    """Added to every eigenvalue before inverting."""
    curvature: Kind = "hessian"
    """"hessian", "gauss-newton" or "auto"."""
    max_params: int = 10_000
    """Refuse above this many parameters: the matrix takes 8·P² bytes and the eigensolver P³ operations."""

    def __post_init__(self) -> None:
        check_not_negative(damping=self.damping)
        check_counts(1, max_params=self.max_params)

    def fit(self, task: Task, data: Any, *, num_train: int | None = None) -> EigenFit:
        """Write the Hessian of all of the data down and diagonalise it; see `Method.fit` for the arguments."""
        size = task.layout.numel if isinstance(task, Task) else 0
        if size > self.max_params:
            raise InputError(
                f"The exact Hessian of {size:,} parameters takes {8 * size**2 / 2**30:.3g} GiB, several times over "
                f"while it is diagonalised; this method stops at {self.max_params:,}. Select fewer with Task(params=), "
                "raise max_params, or use Arnoldi."
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
                f"The Hessian is singular: its smallest |eigenvalue| is {values.abs().min():.2g} against "
                f"{values.abs().max():.2g}. Give damping, or the l2 the model was trained with."
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
            "such as x.float() or class weights. Follow the parameters (x.to(weight.dtype)), or give a float64 model."
        ) from error


def _dense(curvature: Curvature) -> Tensor:  # (P, P)
    size = curvature.task.layout.numel
    eye = torch.eye(size, dtype=torch.float64, device=curvature.task.layout.device)
    return torch.cat(
        [curvature.matmat(part) for part in track(eye.split(_COLUMNS_AT_ONCE), "Exact Hessian", size, len)]
    )
