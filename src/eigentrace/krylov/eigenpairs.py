"""From a Krylov basis to the kept eigenpairs of the curvature."""

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from eigentrace.errors import ConvergenceWarning, EigentraceWarning, NumericalError
from eigentrace.krylov.iterate import Ending, Krylov, ritz

# A kept pair counts as settled while its residual is below this share of its eigenvalue.
_SETTLED = 0.1


# Orthonormality of the directions beyond which they are corrected: far above float32 rounding, far below bf16's.
_GRAM_TOL = 1e-5


# Eigenvalues that rounding, in bfloat16 too, may push below zero, as a share of the largest.
_ROUNDED = 0.05


@dataclass(frozen=True)
class Spectrum:
    """What is known of H's eigenvalues."""

    eigenvalues: Tensor  # (K,) float64, by falling |λ|
    residuals: Tensor | None  # (K,) bounds on |λ − nearest eigenvalue of H| (see `krylov.ritz`); None under `spread`
    ending: Ending
    num_products: int

    @property
    def converged(self) -> bool | None:
        """Tell whether the last kept pair has settled; None where no bound exists."""
        if self.residuals is None or not len(self.eigenvalues):
            return None
        return bool(self.residuals[-1] <= _SETTLED * self.eigenvalues[-1].abs())


@dataclass(frozen=True)
class Eigenpairs:
    """The kept eigenvectors as directions, with their spectrum."""

    directions: Tensor  # G (K, P), orthonormal, in the type and place of the basis
    spectrum: Spectrum


def top_eigenpairs(krylov: Krylov, keep: int) -> Eigenpairs:
    """Keep the `keep` Ritz pairs of largest |λ| (fewer if the matrix has a smaller rank).

    The basis is used up: its vectors are turned into the eigenvectors where they lie, since a large model's do not fit
    in memory twice.
    """
    theta, S, residuals = ritz(krylov)
    # Pairs at rounding level of the largest are zero eigenvalues: dividing by them would amplify noise.
    zero = 10 * torch.finfo(krylov.vectors.working).eps * theta[0].abs()
    count = min(keep, int((theta.abs() > zero).sum()))
    if count == 0:
        raise NumericalError(
            "The curvature is zero to working precision: the model fits every example of the sample exactly, or the "
            "loss does not bend in the selected parameters, or no label counts (all of them -100, or texts of one "
            "token). Look at the labels, and use more examples, or a gradient method such as TracIn."
        )
    vectors = krylov.vectors
    vectors.mix(_orthonormal(S[:, :count].T, vectors.gram(krylov.size)))
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
    for direction in directions:  # one by one: a copy of all of them may not fit beside them
        direction.mul_(direction[direction.abs().argmax()].sign())
    return directions


def _orthonormal(coefficients: Tensor, gram: Tensor) -> Tensor:  # (K, m), (m, m) -> (K, m)
    """Correct combinations of vectors, whose inner products are given, so that they come out orthonormal."""
    products = coefficients @ gram @ coefficients.T
    if (products - torch.eye(len(products), dtype=gram.dtype)).abs().max() < _GRAM_TOL:
        return coefficients
    # Symmetric (Löwdin) orthonormalisation: the nearest orthonormal vectors, so no eigenvector is favoured.
    values, vectors = torch.linalg.eigh(products)
    return (vectors / values.sqrt()) @ vectors.T @ coefficients


def warn_unless_converged(spectrum: Spectrum) -> None:
    """Say when the smallest kept eigenvalue is not settled, since δ and the last directions hang on it."""
    # A complete decomposition has nothing left to settle: what is uncertain there is rounding.
    if spectrum.converged is False and spectrum.ending is Ending.ALL_STEPS:
        last, bound = float(spectrum.eigenvalues[-1].abs()), float(spectrum.residuals[-1])  # type: ignore[index]
        warnings.warn(
            f"The last of {len(spectrum.eigenvalues)} kept eigenvalues has not settled after {spectrum.num_products} "
            f"products: |λ| = {last:.3g} with residual {bound:.3g}. Raise `steps` or lower `keep`.",
            ConvergenceWarning,
            stacklevel=3,
        )


def warn_unless_convex(spectrum: Spectrum) -> None:
    """Say when Gauss-Newton curvature bends downwards, as under a loss that is convex in the outputs it cannot."""
    lowest, largest = float(spectrum.eigenvalues.min()), float(spectrum.eigenvalues.abs().max())
    if lowest < -_ROUNDED * largest:
        warnings.warn(
            f"The Gauss-Newton curvature has a negative eigenvalue, {lowest:.3g} beside {largest:.3g}: `output_loss` "
            "is not convex in the outputs. Give outputs in which it is (logits rather than what is made of them), or "
            "use curvature='hessian'.",
            EigentraceWarning,
            stacklevel=3,
        )
