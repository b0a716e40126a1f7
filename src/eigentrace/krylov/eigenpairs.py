"""Kept eigenpairs of the curvature, computed from a Krylov basis."""

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from eigentrace.errors import ConvergenceWarning, EigentraceWarning, NumericalError
from eigentrace.krylov.iterate import Ending, Krylov, ritz
from eigentrace.settings import counted

# A kept pair counts as converged if its residual is at most this share of its eigenvalue.
_SETTLED = 0.1


# Deviation from orthonormality above which vectors are corrected: far above float32 rounding, far below bf16's.
_GRAM_TOL = 1e-5


# How far rounding, in bfloat16 too, may make eigenvalues negative, as a share of the largest.
_ROUNDED = 0.05


@dataclass(frozen=True)
class Spectrum:
    """Kept eigenvalues of H with error bounds, and how the iteration ended."""

    eigenvalues: Tensor  # (K,) float64, by descending |λ|
    residuals: Tensor | None  # (K,) bounds on |λ − nearest eigenvalue of H| (see `krylov.ritz`); None under `spread`
    ending: Ending
    num_products: int

    def __repr__(self) -> str:
        values = self.eigenvalues.tolist()
        extent = f" from {values[0]:.3g} to {values[-1]:.3g}" if values else ""
        last = {None: "", True: ", converged", False: ", the last not converged"}[self.converged]
        return (
            f"<Spectrum: {counted(len(values), 'eigenvalue')}{extent}, {counted(self.num_products, 'product')}, "
            f"{self.ending.value}{last}>"
        )

    @property
    def converged(self) -> bool | None:
        """Whether the last kept pair has converged; None if there are no residuals."""
        if self.residuals is None or not len(self.eigenvalues):
            return None
        return bool(self.residuals[-1] <= _SETTLED * self.eigenvalues[-1].abs())


@dataclass(frozen=True)
class Eigenpairs:
    """The kept eigenvectors (K, P), with their spectrum."""

    directions: Tensor  # G (K, P), orthonormal, with the dtype and place of the basis
    spectrum: Spectrum

    def __repr__(self) -> str:
        count, size = self.directions.shape
        return f"<Eigenpairs: {counted(count, 'direction')} of {counted(size, 'parameter')}, {self.spectrum!r}>"

    @property
    def is_complete(self) -> bool:
        """Whether the eigenvectors span the whole parameter space, and all eigenvalues are positive."""
        count, size = self.directions.shape
        return count == size and bool((self.spectrum.eigenvalues > 0).all())


def top_eigenpairs(krylov: Krylov, keep: int) -> Eigenpairs:
    """Return the `keep` Ritz pairs of largest |λ| (fewer if the matrix has a smaller rank).

    The basis is overwritten: its vectors are replaced by the eigenvectors in place, because those of a large model do
    not fit in memory twice.
    """
    theta, S, residuals = ritz(krylov)
    # Pairs at rounding level of the largest are zero eigenvalues: dividing by them would amplify noise.
    zero = 10 * torch.finfo(krylov.vectors.working).eps * theta[0].abs()
    count = min(keep, int((theta.abs() > zero).sum()))
    if count == 0:
        raise NumericalError(
            "The curvature is zero to working precision: the model fits every example of the sample exactly, or the "
            "loss is linear in the selected parameters, or all labels are ignored (all of them -100, or texts of one "
            "token). Check the labels, use more examples, fit task.double() if probabilities round to exactly 0 or 1, "
            "or use a gradient method such as TracIn."
        )
    vectors = krylov.vectors
    vectors.mix(orthonormal(S[:, :count].T, vectors.gram(krylov.size)))
    directions = with_fixed_signs(vectors.release(count))
    spectrum = Spectrum(
        eigenvalues=theta[:count].clone(),
        residuals=None if residuals is None else residuals[:count].clone(),
        ending=krylov.ending,
        num_products=krylov.num_products,
    )
    return Eigenpairs(directions, spectrum)


def with_fixed_signs(directions: Tensor) -> Tensor:  # (K, P) -> (K, P), in place
    """Make the largest component of each eigenvector positive, so that equal fits give equal features."""
    for direction in directions:  # one by one: a copy of all may not fit in memory
        direction.mul_(direction[direction.abs().argmax()].sign())
    return directions


def orthonormal(coefficients: Tensor, gram: Tensor) -> Tensor:  # (K, m), (m, m) -> (K, m)
    """Correct the coefficients of combinations of vectors, given their Gram matrix, to be orthonormal."""
    products = coefficients @ gram @ coefficients.T
    if (products - torch.eye(len(products), dtype=gram.dtype)).abs().max() < _GRAM_TOL:
        return coefficients
    # Symmetric (Löwdin) orthonormalisation: the nearest orthonormal vectors, so no eigenvector is favoured.
    values, vectors = torch.linalg.eigh(products)
    return (vectors / values.sqrt()) @ vectors.T @ coefficients


def warn_unless_converged(spectrum: Spectrum) -> None:
    """Warn if the smallest kept eigenvalue has not converged: δ and the last directions depend on it."""
    # A complete decomposition has converged: its residuals are rounding.
    if spectrum.converged is False and spectrum.ending is Ending.ALL_STEPS:
        last, bound = float(spectrum.eigenvalues[-1].abs()), float(spectrum.residuals[-1])  # type: ignore[index]
        warnings.warn(
            f"The last of {len(spectrum.eigenvalues)} kept eigenvalues has not converged after {spectrum.num_products} "
            f"products: |λ| = {last:.3g} with residual {bound:.3g}. Raise `steps` or lower `keep`.",
            ConvergenceWarning,
            stacklevel=3,
        )


def warn_unless_convex(spectrum: Spectrum) -> None:
    """Warn if Gauss-Newton curvature has a negative eigenvalue: the loss is not convex in the outputs."""
    lowest, largest = float(spectrum.eigenvalues.min()), float(spectrum.eigenvalues.abs().max())
    if lowest < -_ROUNDED * largest:
        warnings.warn(
            f"The Gauss-Newton curvature has a negative eigenvalue, {lowest:.3g} (largest |λ|: {largest:.3g}). "
            "`output_loss` is not convex in the outputs. Return outputs in which it is (logits, not values computed "
            "from them), or use curvature='hessian'.",
            EigentraceWarning,
            stacklevel=3,
        )
