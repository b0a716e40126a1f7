"""Fits by eigenpairs of the curvature: any cut of them, with or without a tail."""

import warnings
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import Any, Literal, Self

import torch
from torch import Tensor

from eigentrace.data import as_data
from eigentrace.errors import InputError, PrecisionWarning
from eigentrace.fits.cut import DELTA_FLOOR, Cut, Tail, delta_of
from eigentrace.fits.fitted import Capabilities, checked_compute
from eigentrace.fits.on_disk import cut_record, eigenpair_files, fit_manifest
from eigentrace.fits.projected_fit import ProjectedFit
from eigentrace.fits.tail_coordinates import Coordinates, check_wanted, gather
from eigentrace.fits.weighted_directions import Block, Weights, kept_index, recut, weigh
from eigentrace.krylov.eigenpairs import Eigenpairs, Spectrum
from eigentrace.numeric.seeding import generator_of
from eigentrace.projection.directions import DenseDirections, StackedDirections
from eigentrace.projection.engine import Compute
from eigentrace.settings import check_counts, plain
from eigentrace.task.checks import check_loss_fingerprint
from eigentrace.task.task import Task

Same = Literal["same"]


@dataclass(frozen=True)
class EigenFit(ProjectedFit):
    """A cut of the curvature's eigenpairs. Store, search and reports need not know which method found them."""

    task: Task
    eigenpairs: Eigenpairs
    """All those of the fit, of which the cut uses some."""
    cut: Cut
    method: dict[str, Any]
    num_train: int
    coordinates: Coordinates | None = None
    """What stands for the tail in stored features and gives a shaped tail its shape; see `with_coordinates`."""
    has_curvature: bool = True
    blocks: tuple[Block, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "blocks", (self._block(),))

    @property
    def can(self) -> Capabilities:
        """Answer every question there is."""
        return Capabilities(influence=True, features=True, save=True, spectrum=True, distill=True, unit_gradients=True)

    @property
    def delta(self) -> float | None:
        """δ, what stands for the curvature of the directions that were not kept; None without a tail."""
        return delta_of(self.cut, self.eigenpairs.spectrum.eigenvalues.abs().tolist())

    def record(self) -> dict[str, Any]:
        """Return the settings of the fit and of its cut."""
        return dict(self.method) | {"cut": {name: plain(value) for name, value in vars(self.cut).items()}}

    def _kept(self) -> Tensor:  # (k,)
        """Tell which of the eigenpairs are in use."""
        return kept_index(self.eigenpairs.spectrum.eigenvalues, self.cut)

    def _spectrum(self) -> Spectrum:
        spectrum, index = self.eigenpairs.spectrum, self._kept()
        residuals = None if spectrum.residuals is None else spectrum.residuals[index]
        return replace(spectrum, eigenvalues=spectrum.eigenvalues[index], residuals=residuals)

    def _distilled(self, keep: int | None, tail: Tail | Same, positive_only: bool | None, delta: float | None) -> Self:
        available = len(self.eigenpairs.spectrum.eigenvalues)
        if keep is not None and keep > available:
            raise InputError(
                f"This fit holds {available} directions, so keep={keep} is too many. Fit with a larger `keep`."
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
        """Make the one block of the cut."""
        eigenvalues, used, index = self.eigenpairs.spectrum.eigenvalues, self._used(), self._kept()
        weights = weigh(eigenvalues, self.cut, None if used is None else used.residual(index))
        if not self.cut.stored:
            self._warn_of_small_delta(weights)
        directions, count = self.eigenpairs.directions, len(index)
        # The leading directions are a view; only dropping some in between costs a copy.
        leading = count == 0 or int(index[-1]) == count - 1
        kept = DenseDirections(
            directions[:count] if leading else directions[index.to(directions.device)], self.task.layout
        )
        if used is None:
            return Block(kept, weights.direction, weights.identity)
        every = torch.cat([weights.direction, weights.coordinate])
        overlap = used.overlap[:, index].to(self.task.layout.device)
        return Block(StackedDirections((kept, used.directions)), every, weights.identity, overlap=overlap)

    def _used(self) -> Coordinates | None:
        """Pick the coordinates that the cut scores by, if it does by any."""
        if not (self.cut.stored or self.cut.tail == "shaped"):
            return None
        if self.coordinates is None:
            raise InputError(
                "This fit holds no coordinates of its tail yet, and a stored or shaped tail needs them: use "
                "fitted.with_coordinates(data), or fit with Arnoldi(coordinates=...)."
            )
        return self.coordinates.first(self.cut.coordinates)

    def with_coordinates(
        self, data: Any, coordinates: float = 1024, *, sample: int | None = None, compute: Compute | None = None
    ) -> Self:
        """Return the same fit with coordinates that stand for its tail, chosen over a sample; scores stay as they are.

        Args:
            data: The training examples.
            coordinates: R, how many; or, as a fraction, which share of the tail's energy they should hold.
            sample: Examples they are chosen on; as many, and the same ones, as the fit took its curvature on if None.
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
        """Return the fit that scores by features alone: K + R numbers per example stand for its gradient.

        Args:
            data: The training examples, to choose coordinates on (1024 if not told); not needed by a fit that holds
                coordinates already.
            coordinates: R, or the share of the tail's energy to hold; all coordinates at hand if None.
            compute: Precision, memory and batch size of the passes.
        """
        if coordinates is not None:
            check_wanted(coordinates)
        fit = self
        if data is not None:
            fit = self.with_coordinates(data, 1024 if coordinates is None else coordinates, compute=compute)
        held = 0 if fit.coordinates is None else fit.coordinates.count
        if isinstance(coordinates, Integral) and data is None and 0 < held < coordinates:
            raise InputError(
                f"This fit holds {held} coordinates, so {coordinates} are too many: give data to find more."
            )
        count = None
        if coordinates is not None and fit.coordinates is not None:
            count = fit.coordinates.needed(coordinates, fit._kept())
        return replace(fit, cut=replace(fit.cut, stored=True, coordinates=count))

    def unstored(self) -> Self:
        """Return the fit with its whole tail again, which needs the gradients of queries and examples."""
        return replace(self, cut=replace(self.cut, stored=False, coordinates=None))

    def _warn_of_small_delta(self, weights: Weights) -> None:
        largest = float(self.eigenpairs.spectrum.eigenvalues[0].abs())
        single = self.task.layout.dtype == torch.float32
        if single and weights.delta is not None and weights.delta < 0.99 * DELTA_FLOOR * largest:
            warnings.warn(
                f"tail={weights.delta:.3g} is below {DELTA_FLOOR:g} of the largest eigenvalue ({largest:.3g}): scores "
                "in float32 become differences of much larger numbers. Use a larger δ, 'auto', or a float64 model.",
                PrecisionWarning,
                stacklevel=3,
            )

    @property
    def captured(self) -> float | None:
        """Share of the tail's energy, over the curvature sample, that the coordinates in use hold; None without any."""
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
        # A flat tail that is not stored has no use for the coordinates.
        weights = torch.cat([whole.weights, torch.zeros(missing, dtype=torch.float64, device="cpu")])
        return (replace(whole, weights=weights),)

    def recut_features(self, features: Tensor, source: "EigenFit") -> Tensor:  # (N, K'+R) -> (N, K+R)
        """Turn features stored with a larger cut of this fit into this one's: dropped directions join the tail."""
        return recut(self.blocks[0], self._kept(), features, source.blocks[0], source._kept())

    def _manifest(self) -> dict[str, Any]:
        return fit_manifest(self) | cut_record(self.eigenpairs, self.cut, self.coordinates)

    def _files(self) -> dict[str, dict[str, Tensor]]:
        return eigenpair_files(self.eigenpairs, self.coordinates)
