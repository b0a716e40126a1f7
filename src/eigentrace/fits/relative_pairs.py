"""Eigenpairs of the curvature relative to a metric, which correct the inverse of the metric."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from eigentrace.errors import NumericalError
from eigentrace.fits.kronecker_metric import KroneckerMetric
from eigentrace.krylov.eigenpairs import Spectrum, orthonormal, with_fixed_signs
from eigentrace.krylov.iterate import Ending, Krylov, ritz
from eigentrace.krylov.solve import Rows

# Smallest μ by which is divided. Rounding of a product is a larger share of smaller ones.
_FLOOR = 1e-3
# Share of the longest combination of vectors below which one is rounding.
_DEPENDENT = 1e-6
_FEWER = "Use fewer steps, or Basis(dtype='fp32')."
# Number of directions that are converted at a time.
_AT_ONCE = 16


@dataclass(frozen=True)
class RelativePairs:
    """Pairs (H + δ)u = μ(M + δ)u of the curvature H, a metric M and a damping δ, with ⟨u, (M + δ)u⟩ = 1.

    Where M is right, μ is 1. So (M + δ)⁻¹ + Σ (1/μ − 1) u uᵀ is the inverse of H + δ along the directions u, and that
    of the metric along all others.
    """

    directions: Tensor = field(repr=False)  # U (K, P), in the type and place of the basis of the iteration
    spectrum: Spectrum
    """The eigenvalues μ (K,), by descending |log μ|, and how the iteration ended."""
    device: torch.device
    """Where the model is."""

    @property
    def weights(self) -> Tensor:  # (K,) float64
        """The weight of each direction in the inverse."""
        return 1 / self.spectrum.eigenvalues.clamp_min(_FLOOR) - 1

    def first(self, keep: int) -> "RelativePairs":
        """Return the pairs that differ most from the metric."""
        return self._of(self.directions[:keep], self.spectrum.eigenvalues[:keep], slice(keep))

    def correction(self, rows: Tensor) -> Tensor:  # (q, P) -> (q, P)
        """Multiply rows by the correction of the inverse of the metric."""
        total = torch.zeros_like(rows)
        for part, weights in zip(self._blocks(rows), self.weights.to(rows).split(_AT_ONCE), strict=True):
            total += (rows @ part.T * weights) @ part
        return total

    def damped(self, metric: KroneckerMetric, damping: float, other: float) -> "RelativePairs":
        """Return the pairs in the same span for another damping.

        Args:
            metric: M.
            damping: δ of the pairs.
            other: The other one.
        """
        matrix = torch.diag(self.spectrum.eigenvalues) + (other - damping) * self._products(lambda rows: rows).cpu()
        return self._solved(matrix, self._products(lambda rows: metric.times(rows, other)).cpu())

    def preconditioner(self, metric: KroneckerMetric, damping: float, extra: Tensor) -> Rows:
        """Return the multiplication by an approximate inverse of H + D, for a diagonal D.

        Args:
            metric: M + D, of which the diagonal in the basis of the metric is kept.
            damping: δ of the pairs.
            extra: D (P,).
        """
        matrix = torch.diag(self.spectrum.eigenvalues) + self._products(lambda rows: (extra - damping) * rows).cpu()
        found = self._solved(matrix, self._products(lambda rows: metric.times(rows, 0.0)).cpu())
        return lambda rows: metric.inverse(rows, 0.0) + found.correction(rows)

    def _products(self, multiply: Rows) -> Tensor:  # (K, K) float64
        """Return U A Uᵀ of a symmetric matrix A, which multiplies rows."""
        like = self._like
        rows = []
        for part in self._blocks(like):
            images = multiply(part)
            rows.append(torch.cat([images @ other.T for other in self._blocks(like)], dim=1).double())
        found = torch.cat(rows)
        return (found + found.T) / 2

    @property
    def _like(self) -> Tensor:
        """An empty tensor of the type to compute in."""
        return torch.empty(0, dtype=torch.promote_types(self.directions.dtype, torch.float32), device=self.device)

    def _blocks(self, like: Tensor) -> Iterator[Tensor]:  # (k, P)
        """Yield the directions in the type and place of a tensor, some at a time: all may not fit in memory twice."""
        for part in self.directions.split(_AT_ONCE):
            yield part.to(like.device, like.dtype)

    def _solved(self, matrix: Tensor, metric: Tensor) -> "RelativePairs":
        """Return the pairs of the projections of two matrices on the span."""
        lower, failed = torch.linalg.cholesky_ex(metric)
        if int(failed):
            raise NumericalError(f"The directions of the fit are not independent to their precision. {_FEWER}")
        half = torch.linalg.solve_triangular(lower, matrix, upper=False)
        whitened = torch.linalg.solve_triangular(lower, half.T, upper=False)
        values, vectors = torch.linalg.eigh((whitened + whitened.T) / 2)
        order = _strength(values).argsort(descending=True)
        mix = torch.linalg.solve_triangular(lower.T, vectors[:, order], upper=True).T  # (K, K)
        like = self._like
        rows = torch.zeros(self.directions.shape, dtype=like.dtype, device=like.device)
        for part, columns in zip(self._blocks(like), mix.to(like).split(_AT_ONCE, dim=1), strict=True):
            rows += columns @ part
        return self._of(with_fixed_signs(rows.to(self.directions)), values[order].cpu(), None)

    def _of(self, directions: Tensor, values: Tensor, index: slice | None) -> "RelativePairs":
        residuals = None if index is None or self.spectrum.residuals is None else self.spectrum.residuals[index]
        return replace(
            self, directions=directions, spectrum=replace(self.spectrum, eigenvalues=values, residuals=residuals)
        )

    def record(self) -> dict[str, Any]:
        """Return how the iteration ended, as JSON values."""
        return {"ending": self.spectrum.ending.name, "num_products": self.spectrum.num_products}

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors to save."""
        found = {"directions": self.directions, "eigenvalues": self.spectrum.eigenvalues}
        return found if self.spectrum.residuals is None else found | {"residuals": self.spectrum.residuals}


def relative_pairs(krylov: Krylov, metric: KroneckerMetric, damping: float, keep: int) -> RelativePairs:
    """Return the pairs of largest |log μ| from an iteration with (M + δ)^-½ (H + δ) (M + δ)^-½ − 1.

    The basis is overwritten by the directions.
    """
    theta, S, residuals = ritz(krylov)
    theta = theta + 1
    order = _strength(theta).argsort(descending=True)[:keep]
    vectors = krylov.vectors
    coefficients, gram = S[:, order].T, vectors.gram(krylov.size)
    lengths = torch.linalg.eigvalsh(coefficients @ gram @ coefficients.T)
    if not lengths.min() > _DEPENDENT * lengths.max():
        raise NumericalError(f"The vectors of the iteration are not independent to their precision. {_FEWER}")
    vectors.mix(orthonormal(coefficients, gram))
    directions = vectors.release(len(order))
    for row in directions:  # one by one: a copy of all may not fit in memory
        whole = row[None].to(vectors.device, vectors.working)
        row.copy_(metric.root(whole, damping)[0])
    bounds = None if residuals is None else residuals[order].clone()
    spectrum = Spectrum(theta[order].clone(), bounds, krylov.ending, krylov.num_products)
    return RelativePairs(with_fixed_signs(directions), spectrum, vectors.device)


def read_pairs(tensors: dict[str, Tensor], record: dict[str, Any], device: torch.device) -> RelativePairs:
    """Restore pairs from `tensors` and `record`."""
    ending, products = Ending[record["ending"]], int(record["num_products"])
    spectrum = Spectrum(tensors["eigenvalues"], tensors.get("residuals"), ending, products)
    return RelativePairs(tensors["directions"], spectrum, device)


def _strength(values: Tensor) -> Tensor:
    """Return |log μ|: how much a pair differs from what the metric says."""
    return values.clamp_min(_FLOOR).log().abs()
