"""From a Krylov basis to rows, eigenvalues and the weights that turn features into scores."""

import math
import warnings
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Literal

import torch
from torch import Tensor

from eigentrace.errors import ConvergenceWarning, EigentraceWarning, InputError, NumericalError
from eigentrace.krylov import Ending, Krylov, ritz
from eigentrace.settings import check_counts

Tail = float | Literal["auto", "shaped"] | None

# An automatic δ never falls below this share of λ₁: beyond it 1/δ amplifies rounding more than it adds signal.
DELTA_FLOOR = 1e-4
# A kept pair counts as settled while its residual is below this share of its eigenvalue.
_SETTLED = 0.1
# Orthonormality of the rows beyond which they are corrected: far above float32 rounding, far below bf16's.
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
class Distilled:
    """The kept eigenvectors as rows, with their spectrum."""

    directions: Tensor  # G (K, P), orthonormal, in the type and place of the basis
    spectrum: Spectrum


def distill(krylov: Krylov, keep: int) -> Distilled:
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
    return Distilled(directions, spectrum)


def with_fixed_signs(directions: Tensor) -> Tensor:  # (K, P) -> (K, P), in place
    """Make the largest component of each eigenvector positive, so that equal fits give equal features."""
    for row in directions:  # one by one: a copy of all rows may not fit beside them
        row.mul_(row[row.abs().argmax()].sign())
    return directions


def _orthonormal(coefficients: Tensor, gram: Tensor) -> Tensor:  # (K, m), (m, m) -> (K, m)
    """Correct combinations of vectors, whose inner products are given, so that they come out orthonormal."""
    products = coefficients @ gram @ coefficients.T
    if (products - torch.eye(len(products), dtype=gram.dtype)).abs().max() < _GRAM_TOL:
        return coefficients
    # Symmetric (Löwdin) orthonormalisation: the nearest orthonormal rows, so no eigenvector is favoured.
    values, vectors = torch.linalg.eigh(products)
    return (vectors / values.sqrt()) @ vectors.T @ coefficients


@dataclass(frozen=True)
class Cut:
    """Which of the kept directions a score uses, and what stands for the others."""

    keep: int
    tail: Tail
    positive_only: bool
    delta: float | None = None
    """δ of a shaped tail, if it is not to choose itself."""
    stored: bool = False
    """Score by features alone: the tail counts where the stored coordinates see it."""
    coordinates: int | None = None
    """How many of the coordinates at hand are used; all of them if None."""

    def __post_init__(self) -> None:
        check_counts(1, keep=self.keep)
        if self.delta is not None:
            if self.tail != "shaped":
                raise InputError(
                    f"delta belongs to tail='shaped', and tail is {self.tail!r}: give δ itself as the tail."
                )
            _check_delta(self.delta, "delta")
        if self.tail is None and self.stored:
            raise InputError(
                "tail=None keeps no tail, so its K features are all there is to store: use them as they are."
            )
        if self.tail is not None and self.tail not in ("auto", "shaped"):
            _check_delta(self.tail, "tail")


def _check_delta(delta: Any, name: str) -> None:
    if isinstance(delta, bool) or not isinstance(delta, Real):
        expected = "'auto', 'shaped', None or a positive number" if name == "tail" else "a positive number"
        raise InputError(f"{name} must be {expected}, got {delta!r}.")
    if not 0 < float(delta) < math.inf:
        raise InputError(f"{name} is δ, a positive number in units of the eigenvalues, got {delta}.")


@dataclass(frozen=True)
class Weights:
    """score = Σ rowₖ · φₖ(x) φₖ(z) + Σ coordinate_c · s_c(x) s_c(z) + identity · ⟨g(x), g(z)⟩."""

    index: Tensor  # (k,) the rows used
    row: Tensor  # (k,) float64
    identity: float
    delta: float | None
    coordinate: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64, device="cpu"))  # (r,)


def kept_index(eigenvalues: Tensor, cut: Cut) -> Tensor:  # (k,)
    """Tell which of the eigenpairs a cut uses."""
    kept = eigenvalues[: cut.keep]
    index = torch.arange(len(kept), device="cpu")
    if cut.positive_only:
        index = index[kept > 0]
        if not len(index):
            raise NumericalError(
                f"positive_only=True leaves nothing: all of the top {len(kept)} eigenvalues are negative, so the model "
                "is far from a minimum. Train further, or use curvature='gauss-newton'."
            )
    return index


def weigh(eigenvalues: Tensor, cut: Cut, energies: Tensor | None = None) -> Weights:
    """Invert the diagonalised curvature: 1/λ on the kept directions, and 1/δ on all others under a tail.

    With a tail, H⁻¹ ≈ Gᵀ(Λ+δ)⁻¹G + (I − GᵀG)/δ, negative λ counted as 0. The truncated form (`tail=None`) is the
    paper's; `positive_only` drops negative λ after the top `keep` are taken, as it does at saddle points.

    A shaped tail weighs the coordinates s of the residual by 1/(E + δ) and 1/δ beyond them. All of its terms are
    positive: with S⊥ = S(I − GᵀG) the last is (I − GᵀG)(I − SᵀS)(I − GᵀG)/δ. A stored cut leaves the last term out.

    Args:
        eigenvalues: All those of the fit, by falling |λ|.
        cut: Which of them are used, and how.
        energies: E[s²] of the coordinates used (r,), where the cut uses any.
    """
    index = kept_index(eigenvalues, cut)
    values = eigenvalues[index]
    if cut.tail is None:
        return Weights(index, 1 / values, 0.0, None)
    delta = _delta(eigenvalues[: cut.keep], cut)
    beyond = 0.0 if cut.stored else 1 / delta
    row = 1 / (values.clamp_min(0) + delta) - beyond
    if energies is None or not (cut.stored or cut.tail == "shaped"):
        return Weights(index, row, beyond, delta)
    coordinate = 1 / (energies + delta) if cut.tail == "shaped" else torch.full_like(energies, 1 / delta)
    return Weights(index, row, beyond, delta, coordinate - beyond)


def _delta(kept: Tensor, cut: Cut) -> float:
    """Take δ as given, or |λ_K|, the smallest kept eigenvalue, with a floor relative to the largest."""
    given = cut.delta if cut.tail == "shaped" else cut.tail
    if given is None or given == "auto":
        return max(float(kept[-1].abs()), DELTA_FLOOR * float(kept[0].abs()))
    return float(given)


def warn_unless_converged(spectrum: Spectrum) -> None:
    """Say when the smallest kept eigenvalue is not settled, since δ and the last rows hang on it."""
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
