"""Fits by eigenpairs of the curvature, cut to any number, with or without a tail."""

import warnings
from dataclasses import dataclass, field, fields, replace
from numbers import Integral
from typing import Any, Literal, Self

import torch
from torch import Tensor

from eigentrace.data import as_data
from eigentrace.errors import InputError, PrecisionWarning
from eigentrace.fits.calibration import Calibration, GradientMoments
from eigentrace.fits.cut import DELTA_FLOOR, Cut, Tail, delta_of
from eigentrace.fits.fitted import Capabilities, checked_compute
from eigentrace.fits.on_disk import cut_record, eigenpair_files, fit_manifest
from eigentrace.fits.projected_fit import ProjectedFit
from eigentrace.fits.tail_coordinates import Coordinates, check_wanted, gather
from eigentrace.fits.weighted_directions import Block, Weights, kept_index, recut, weigh
from eigentrace.krylov.eigenpairs import Eigenpairs, Spectrum
from eigentrace.krylov.solve import Rows
from eigentrace.numeric.seeding import generator_of
from eigentrace.projection.directions import DenseDirections, StackedDirections
from eigentrace.projection.engine import Compute
from eigentrace.settings import check_counts, counted
from eigentrace.task.checks import check_loss_fingerprint
from eigentrace.task.task import Task

Same = Literal["same"]


@dataclass(frozen=True, repr=False)
class EigenFit(ProjectedFit):
    """A fit that scores by a cut of the eigenpairs of the curvature, from any method that computes them."""

    task: Task
    eigenpairs: Eigenpairs
    """All eigenpairs of the fit; the cut uses some of them."""
    cut: Cut
    method: dict[str, Any]
    num_train: int
    coordinates: Coordinates | None = None
    """Represent the tail in stored features, and define a shaped tail; see `with_coordinates`."""
    moments: GradientMoments | None = None
    """Moments of gradients of the curvature sample, for `calibration`; None if not measured."""
    has_curvature: bool = True
    blocks: tuple[Block, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "blocks", (self._block(),))

    def _described(self) -> list[str]:
        directions = counted(len(self._kept()), "direction")
        tail = "no tail" if self.delta is None else f"{'shaped ' * (self.cut.tail == 'shaped')}tail δ={self.delta:.3g}"
        used = self._used()
        tail += "" if used is None else f" on {counted(used.count, 'coordinate')}"
        sample = self.method.get("sample")
        part = "" if sample is None or sample >= self.num_train else f"{sample:,} of "
        examples = f"curvature on {part}{counted(self.num_train, 'example')}"
        return [f"{directions} of {counted(self.task.layout.numel, 'parameter')}", tail, examples]

    @property
    def can(self) -> Capabilities:
        """All capabilities."""
        return Capabilities(**{field.name: True for field in fields(Capabilities)})

    @property
    def has_coordinates(self) -> bool:
        """Whether coordinates represent the tail, so that `stored` needs no data."""
        return self.coordinates is not None

    @property
    def delta(self) -> float | None:
        """δ, the eigenvalue assumed for the directions not kept; None without a tail."""
        return delta_of(self.cut, self.eigenpairs.spectrum.eigenvalues.abs().tolist())

    def record(self) -> dict[str, Any]:
        """Return the settings of the fit and of its cut."""
        return dict(self.method) | {"cut": self.cut.record()}

    def _kept(self) -> Tensor:  # (k,)
        """Return the indices of the eigenpairs in use."""
        return kept_index(self.eigenpairs.spectrum.eigenvalues, self.cut)

    def _spectrum(self) -> Spectrum:
        spectrum, index = self.eigenpairs.spectrum, self._kept()
        residuals = None if spectrum.residuals is None else spectrum.residuals[index]
        return replace(spectrum, eigenvalues=spectrum.eigenvalues[index], residuals=residuals)

    def _distilled(self, keep: int | None, tail: Tail | Same, positive_only: bool | None, delta: float | None) -> Self:
        available = len(self.eigenpairs.spectrum.eigenvalues)
        if keep is not None and keep > available:
            raise InputError(
                f"keep={keep} is too large: this fit has {available} directions. Use at most {available}, or fit again "
                "with a larger `keep`."
            )
        tail_now = self.cut.tail if tail == "same" else tail
        cut = replace(
            self.cut,
            keep=self.cut.keep if keep is None else keep,
            tail=tail_now,
            stored=self.cut.stored and tail_now is not None,
            positive_only=self.cut.positive_only if positive_only is None else positive_only,
            delta=self.cut.delta if tail == "same" and delta is None else delta,
        )
        return replace(self, cut=cut)

    def _block(self) -> Block:
        """Return the block of weighted directions of the cut."""
        used, index, weights = self._used(), self._kept(), self._weights()
        if not self.cut.stored:
            self._warn_if_delta_is_small(weights)
        directions, count = self.eigenpairs.directions, len(index)
        # A slice of leading directions is a view; only an index with gaps needs a copy.
        leading = count == 0 or int(index[-1]) == count - 1
        kept = DenseDirections(
            directions[:count] if leading else directions[index.to(directions.device)], self.task.layout
        )
        if used is None:
            return Block(kept, weights.direction, weights.identity)
        every = torch.cat([weights.direction, weights.coordinate])
        overlap = used.overlap[:, index].to(self.task.layout.device)
        return Block(StackedDirections((kept, used.directions)), every, weights.identity, overlap=overlap)

    def _weights(self) -> Weights:
        used = self._used()
        energies = None if used is None else used.residual(self._kept())
        return weigh(self.eigenpairs.spectrum.eigenvalues, self.cut, energies)

    @property
    def calibration(self) -> Calibration | None:
        """Mean self-influence under the measured curvature, relative to this fit; None if not measured."""
        if self.moments is None:
            return None
        used = self._used()
        energies = None if used is None else used.residual(self._kept())
        return self.moments.calibration(self.eigenpairs.spectrum.eigenvalues, self._weights(), energies)

    def _used(self) -> Coordinates | None:
        """Return the coordinates that the cut uses; None if it uses none."""
        if not (self.cut.stored or self.cut.tail == "shaped"):
            return None
        if self.coordinates is None:
            raise InputError(
                "This fit has no coordinates of its tail, and a stored or shaped tail needs them: call "
                "fitted.with_coordinates(data) first, or fit with Arnoldi(coordinates=...)."
            )
        return self.coordinates.first(self.cut.coordinates)

    def with_coordinates(
        self, data: Any, coordinates: float = 1024, *, sample: int | None = None, compute: Compute | None = None
    ) -> Self:
        """Return the same fit with coordinates that represent its tail, selected on a sample; scores do not change.

        Args:
            data: The training examples.
            coordinates: Their number R (int), or the share of the tail's energy to capture (float).
            sample: Number of examples to select them on; None for the curvature sample of the fit.
            compute: Precision, memory and batch size of the passes.
        """
        check_wanted(coordinates)
        if sample is not None:
            check_counts(1, sample=sample)
        data, compute = as_data(data), checked_compute(compute)
        size = self.method.get("sample") if sample is None else sample
        rows = data.sample(size or len(data), generator_of(self.method.get("seed", 0)))
        directions = DenseDirections(self.eigenpairs.directions, self.task.layout)
        check_loss_fingerprint(self.task, data)
        with self.task.session():
            found = gather(self.task, data.take(rows), directions, self._kept(), coordinates, compute)
        return replace(self, coordinates=found, cut=replace(self.cut, coordinates=None))

    def stored(self, data: Any = None, coordinates: float | None = None, *, compute: Compute | None = None) -> Self:
        """Return the fit that scores by features alone: K + R numbers represent the gradient of an example.

        Args:
            data: The training examples, on which coordinates are selected (1024 by default); not needed if the fit has
                coordinates already.
            coordinates: R, or the share of the tail's energy to capture; None for all available coordinates.
            compute: Precision, memory and batch size of the passes.
        """
        if coordinates is not None:
            check_wanted(coordinates)
        fit = self
        if data is not None:
            fit = self.with_coordinates(data, 1024 if coordinates is None else coordinates, compute=compute)
        available = 0 if fit.coordinates is None else fit.coordinates.count
        if isinstance(coordinates, Integral) and data is None and 0 < available < coordinates:
            raise InputError(
                f"coordinates={coordinates} is too large: this fit has {available} coordinates. Use at most that many, "
                "or pass data to select more."
            )
        count = None
        if coordinates is not None and fit.coordinates is not None:
            count = fit.coordinates.needed(coordinates, fit._kept())
        return replace(fit, cut=replace(fit.cut, stored=True, coordinates=count))

    def unstored(self) -> Self:
        """Return the fit with its full tail, which needs the gradients of queries and examples."""
        return replace(self, cut=replace(self.cut, stored=False, coordinates=None))

    def _warn_if_delta_is_small(self, weights: Weights) -> None:
        largest = float(self.eigenpairs.spectrum.eigenvalues[0].abs())
        single = self.task.layout.dtype == torch.float32
        if single and weights.delta is not None and weights.delta < 0.99 * DELTA_FLOOR * largest:
            warnings.warn(
                f"tail={weights.delta:.3g} is below {DELTA_FLOOR:g} of the largest eigenvalue ({largest:.3g}): in "
                "float32, scores suffer from cancellation of much larger numbers. Use a larger δ, 'auto', or a float64 "
                "model.",
                PrecisionWarning,
                stacklevel=3,
            )

    @property
    def captured(self) -> float | None:
        """Share of the tail's energy on the curvature sample that the coordinates in use capture; None without any."""
        if (used := self._used()) is None:
            return None
        index = self._kept()
        outside = used.outside(index)
        return float(used.residual(index).sum()) / outside if outside else 1.0

    def _by_features(self) -> Self:
        return self if self.blocks[0].identity == 0 else self.stored()

    def _whole_blocks(self) -> tuple[Block, ...]:
        if not self.cut.stored:
            return self.blocks
        whole = replace(self, cut=replace(self.cut, stored=False)).blocks[0]
        missing = len(self.blocks[0].weights) - len(whole.weights)
        # A flat tail that is not stored does not use the coordinates: their weights are zero.
        weights = torch.cat([whole.weights, torch.zeros(missing, dtype=torch.float64, device="cpu")])
        return (replace(whole, weights=weights),)

    def recut_features(self, features: Tensor, source: "EigenFit") -> Tensor:  # (N, K'+R) -> (N, K+R)
        """Convert features of a larger cut of this fit into those of this cut, with dropped directions in the tail."""
        return recut(self.blocks[0], self._kept(), features, source.blocks[0], source._kept())

    def _preconditioner(self, damping: Tensor) -> Rows:
        """Return the multiplication by the inverse of GᵀΛG + D, with negative eigenvalues left out (Woodbury)."""
        values = self.eigenpairs.spectrum.eigenvalues[: self.cut.keep]
        kept = (values > 0).nonzero().flatten()
        directions = self.eigenpairs.directions[kept.to(self.eigenpairs.directions.device)].to(damping)
        scaled = directions / damping
        inner = torch.diag(1 / values[kept].to(damping)) + scaled @ directions.T

        def precondition(rows: Tensor) -> Tensor:
            return rows / damping - torch.linalg.solve(inner, scaled @ rows.T).T @ scaled

        return precondition

    def _mean_eigenvalue(self) -> float:
        return float(self.eigenpairs.spectrum.eigenvalues.clamp_min(0).sum()) / self.task.layout.numel

    def _manifest(self) -> dict[str, Any]:
        return fit_manifest(self) | cut_record(self.eigenpairs, self.cut, self.coordinates)

    def _files(self) -> dict[str, dict[str, Tensor]]:
        return eigenpair_files(self.eigenpairs, self.coordinates, self.moments)
