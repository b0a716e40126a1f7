"""Eigenpairs of the curvature relative to a metric, which correct the inverse of the metric."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from eigentrace.fits.kronecker_metric import KroneckerMetric
from eigentrace.krylov.eigenpairs import Spectrum, with_fixed_signs
from eigentrace.krylov.iterate import Ending, Krylov, ritz
from eigentrace.krylov.solve import Rows

# Smallest μ by which is divided. Rounding of a product is a larger share of smaller ones.
_FLOOR = 1e-3


@dataclass(frozen=True)
class RelativePairs:
    """Pairs (H + δ)u = μ(M + δ)u of the curvature H, a metric M and a damping δ, with ⟨u, (M + δ)u⟩ = 1.

    Where M is right, μ is 1. So (M + δ)⁻¹ + Σ (1/μ − 1) u uᵀ is the inverse of H + δ along the directions u, and that
    of the metric along all others.
    """

    directions: Tensor  # U (K, P), in the type and place of the basis of the iteration
    spectrum: Spectrum
    """The eigenvalues μ (K,), by descending |log μ|, and how the iteration ended."""

    @property
    def weights(self) -> Tensor:  # (K,) float64
        """The weight of each direction in the inverse."""
        return 1 / self.spectrum.eigenvalues.clamp_min(_FLOOR) - 1

    def first(self, keep: int) -> "RelativePairs":
        """Return the pairs that differ most from the metric."""
        return self._of(self.directions[:keep], self.spectrum.eigenvalues[:keep], slice(keep))

    def correction(self, rows: Tensor) -> Tensor:  # (q, P) -> (q, P)
        """Multiply rows by the correction of the inverse of the metric."""
        directions = self.directions.to(rows)
        return (rows @ directions.T * self.weights.to(rows)) @ directions

    def damped(self, added: float) -> "RelativePairs":
        """Return the pairs in the same span for a damping that is larger by `added`."""
        gram = self._products(lambda rows: rows)
        identity = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
        matrix = torch.diag(self.spectrum.eigenvalues.to(gram)) + added * gram
        return self._solved(matrix, identity + added * gram)

    def preconditioner(self, metric: KroneckerMetric, damping: float, extra: Tensor) -> Rows:
        """Return the multiplication by an approximate inverse of H + D, for a diagonal D.

        Args:
            metric: M + D, of which the diagonal in the basis of the metric is kept.
            damping: δ of the pairs.
            extra: D (P,).
        """
        matrix = torch.diag(self.spectrum.eigenvalues.to(extra.device))
        matrix = matrix + self._products(lambda rows: (extra - damping) * rows)
        found = self._solved(matrix, self._products(lambda rows: metric.times(rows, 0.0)))
        return lambda rows: metric.inverse(rows, 0.0) + found.correction(rows)

    def _products(self, multiply: Rows) -> Tensor:  # (K, K) float64
        """Return U A Uᵀ of a symmetric matrix A, which multiplies rows."""
        working = torch.promote_types(self.directions.dtype, torch.float32)
        rows = [multiply(direction[None].to(working)) @ self.directions.to(working).T for direction in self.directions]
        found = torch.cat(rows).double()
        return (found + found.T) / 2

    def _solved(self, matrix: Tensor, metric: Tensor) -> "RelativePairs":
        """Return the pairs of the projections of two matrices on the span."""
        lower = torch.linalg.cholesky(metric)
        half = torch.linalg.solve_triangular(lower, matrix, upper=False)
        whitened = torch.linalg.solve_triangular(lower, half.T, upper=False)
        values, vectors = torch.linalg.eigh((whitened + whitened.T) / 2)
        order = _strength(values).argsort(descending=True)
        mix = torch.linalg.solve_triangular(lower.T, vectors[:, order], upper=True).T  # (K, K)
        working = torch.promote_types(self.directions.dtype, torch.float32)
        rows = mix.to(working) @ self.directions.to(mix.device, working)
        return self._of(with_fixed_signs(rows.to(self.directions)), values[order].cpu(), None)

    def _of(self, directions: Tensor, values: Tensor, index: slice | None) -> "RelativePairs":
        residuals = None if index is None or self.spectrum.residuals is None else self.spectrum.residuals[index]
        return RelativePairs(directions, replace(self.spectrum, eigenvalues=values, residuals=residuals))

    def record(self) -> dict[str, Any]:
        """Return how the iteration ended, as JSON values."""
        return {"ending": self.spectrum.ending.name, "num_products": self.spectrum.num_products}

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors to save."""
        found = {"directions": self.directions, "eigenvalues": self.spectrum.eigenvalues}
        return found if self.spectrum.residuals is None else found | {"residuals": self.spectrum.residuals}


def relative_pairs(krylov: Krylov, metric: KroneckerMetric, damping: float, keep: int) -> RelativePairs:
    """Return the pairs of largest |log μ| from an iteration with (M + δ)^-½ (H + δ) (M + δ)^-½.

    The basis is overwritten by the directions.
    """
    theta, S, residuals = ritz(krylov)
    order = _strength(theta).argsort(descending=True)[:keep]
    vectors = krylov.vectors
    vectors.mix(S[:, order].T)
    directions = vectors.release(len(order))
    for row in directions:  # one by one: a copy of all may not fit in memory
        whole = row[None].to(vectors.device, vectors.working)
        row.copy_(metric.root(whole, damping)[0])
    bounds = None if residuals is None else residuals[order].clone()
    spectrum = Spectrum(theta[order].clone(), bounds, krylov.ending, krylov.num_products)
    return RelativePairs(with_fixed_signs(directions), spectrum)


def read_pairs(tensors: dict[str, Tensor], record: dict[str, Any]) -> RelativePairs:
    """Restore pairs from `tensors` and `record`."""
    ending, products = Ending[record["ending"]], int(record["num_products"])
    spectrum = Spectrum(tensors["eigenvalues"], tensors.get("residuals"), ending, products)
    return RelativePairs(tensors["directions"], spectrum)


def _strength(values: Tensor) -> Tensor:
    """Return |log μ|: how much a pair differs from what the metric says."""
    return values.clamp_min(_FLOOR).log().abs()
