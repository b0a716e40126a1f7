"""R coordinates that represent the tail of a gradient, with their second moments over the curvature sample.

S·g(x) are coordinates in the Kronecker eigenbasis. Without the part in the kept directions they are
s(x) = S·g(x) − (S·Gᵀ)φ(x): the same coordinates of the component of g outside the kept directions.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from eigentrace.data import Data
from eigentrace.errors import InputError, MismatchError
from eigentrace.fits.kronecker import eigenbases, energies, leading
from eigentrace.projection import Job, project
from eigentrace.projection.directions import DenseDirections, RotatedDirections, Rotation, StackedDirections, apply
from eigentrace.projection.engine import Compute
from eigentrace.settings import check_counts, counted
from eigentrace.task.layout import Layout
from eigentrace.task.task import Task

# Maximum number of coordinates for a share of the energy.
MOST_COORDINATES = 8192
# Candidates per requested coordinate.
_CANDIDATES = 3
# Relative tolerance with which a share counts as reached.
_ROUNDING = 1e-9
# Kept directions that are rotated at a time.
_DIRECTIONS_AT_ONCE = 8


def check_wanted(coordinates: Any) -> None:
    """Raise InputError unless `coordinates` is a positive integer, or a share in (0, 1]."""
    if isinstance(coordinates, Real) and not isinstance(coordinates, Integral):
        if not 0 < float(coordinates) <= 1:
            raise InputError(
                f"coordinates={coordinates} is a float, which means a share of the tail's energy: it must be above 0 "
                "and at most 1. Pass an integer for a number of coordinates."
            )
        return
    check_counts(1, coordinates=coordinates)


@dataclass(frozen=True)
class Coordinates:
    """Selected coordinates with second moments over the curvature sample, which give the energies of any cut."""

    directions: RotatedDirections  # S, orthonormal
    overlap: Tensor  # (R, K) S·Gᵀ
    energy: Tensor  # (R,) E[(S·g)²]
    cross: Tensor  # (R, K) E[(S·g) φᵀ]
    moments: Tensor  # (K, K) E[φ φᵀ]
    total: float
    """E‖g‖²."""
    order: Tensor  # (R,) by descending residual energy at selection

    def __repr__(self) -> str:
        return f"<Coordinates: {self.count:,} for the tail of {counted(len(self.moments), 'direction')}>"

    @property
    def count(self) -> int:
        """The number of coordinates, R."""
        return len(self.energy)

    def residual(self, kept: Tensor) -> Tensor:  # (k,) -> (R,)
        """Return E[s²], the energy of each coordinate without its part in these kept directions."""
        C = self.overlap[:, kept].double()
        inner = C @ self.moments[kept][:, kept] - 2 * self.cross[:, kept]
        return (self.energy + (C * inner).sum(dim=1)).clamp_min(0)

    def outside(self, kept: Tensor) -> float:
        """Return the total energy of gradients outside the kept directions."""
        return max(self.total - float(self.moments.diagonal()[kept].sum()), 0.0)

    def needed(self, wanted: float, kept: Tensor) -> int:
        """Return the number of coordinates for a count, or for a share of the energy; at most all of them."""
        if isinstance(wanted, Integral):
            return min(int(wanted), self.count)
        found = self.residual(kept)[self.order].cumsum(0)
        reached = found >= float(wanted) * self.outside(kept) * (1 - _ROUNDING)
        return int(reached.nonzero()[0]) + 1 if bool(reached.any()) else self.count

    def first(self, count: int | None) -> "Coordinates":
        """Return the first coordinates by energy, the same for every cut of the fit; all for None."""
        if count is None or count >= self.count:
            return self
        index = self.order[:count].sort().values
        place = torch.searchsorted(index, self.order[:count])
        return Coordinates(
            self.directions.picked(index),
            self.overlap[index],
            self.energy[index],
            self.cross[index],
            self.moments,
            self.total,
            place,
        )

    def tensors(self) -> dict[str, Tensor]:
        """Return all fields as named tensors, for a file."""
        found = {"overlap": self.overlap, "energy": self.energy, "cross": self.cross, "moments": self.moments}
        found["order"] = self.order
        found["total"] = torch.tensor([self.total], dtype=torch.float64, device="cpu")
        for name, rotation in self.directions.rotations.items():
            found[f"pairs.{name}"] = rotation.pairs
            sides = {"left": rotation.left, "right": rotation.right}
            found |= {f"{side}.{name}": basis for side, basis in sides.items() if basis is not None}
        return found

    @staticmethod
    def of_tensors(tensors: Mapping[str, Tensor], num_directions: int, layout: Layout) -> "Coordinates":
        """Restore coordinates from the tensors of a file, after checking that they belong to the fit."""
        names = [key.removeprefix("pairs.") for key in tensors if key.startswith("pairs.")]
        unknown = sorted(set(names) - set(layout.names))
        overlap = tensors["overlap"]
        if unknown or overlap.ndim != 2 or overlap.shape[1] != num_directions:
            lacking = f", which has no parameter {unknown[0]!r}" if unknown else ""
            raise MismatchError(
                f"The saved coordinates have shape {tuple(overlap.shape)} and cover {len(names)} parameters, expected "
                f"{num_directions} directions of this model{lacking}. The file was edited or belongs to another fit: "
                "save the fit again."
            )
        device = layout.device
        sides = {key: value.to(device) for key, value in tensors.items() if key.split(".")[0] in ("left", "right")}
        rotations = {
            name: Rotation(sides.get(f"left.{name}"), sides.get(f"right.{name}"), tensors[f"pairs.{name}"].to(device))
            for name in names
        }
        directions = RotatedDirections(rotations, layout)
        energy, cross, moments, order = (tensors[key] for key in ("energy", "cross", "moments", "order"))
        if directions.count != len(energy):
            raise MismatchError(
                f"The saved coordinates are inconsistent: {directions.count} coordinates with {len(energy)} energies. "
                "Save the fit again."
            )
        return Coordinates(directions, overlap, energy, cross, moments, float(tensors["total"]), order)


def gather(
    task: Task, data: Data, directions: DenseDirections, kept: Tensor, wanted: float, compute: Compute
) -> Coordinates:
    """Select the coordinates of the Kronecker eigenbasis with the most gradient energy outside the kept directions.

    This takes three passes over the data: covariances, energies of all coordinates, and exact moments of candidates.

    Args:
        task: The task, at the parameters of the fit.
        data: The curvature sample.
        directions: All directions G of the fit, orthonormal.
        kept: Indices of those in use.
        wanted: Number of coordinates, or share of the energy outside the kept directions.
        compute: Settings of the passes, which are never compiled.
    """
    check_wanted(wanted)
    compute = replace(compute, compile=False)
    bases = eigenbases(task, data, compute)
    found = energies(task, data, bases, directions, compute)
    count = _CANDIDATES * int(wanted) if isinstance(wanted, Integral) else MOST_COORDINATES
    measured = _measure(task, data, directions, leading(found, directions, kept, count), compute)
    order = measured.residual(kept).argsort(descending=True, stable=True)
    ranked = replace(measured, order=order)
    return ranked.first(ranked.needed(wanted, kept))


def _measure(
    task: Task, data: Data, directions: DenseDirections, rotated: RotatedDirections, compute: Compute
) -> Coordinates:
    layout, K, R = task.layout, directions.count, rotated.count
    energy = torch.zeros(R, dtype=torch.float64, device=layout.device)
    cross = torch.zeros(R, K, dtype=torch.float64, device=layout.device)
    moments = torch.zeros(K, K, dtype=torch.float64, device=layout.device)
    total = 0.0
    job = Job.of(task, "losses", StackedDirections((directions, rotated)), norms=True, compute=compute)
    for _, found in project(job, data, "Coordinates"):
        phi, s = found.features.double().split([K, R], dim=1)
        energy += s.square().sum(dim=0)
        cross += s.T @ phi
        moments += phi.T @ phi
        total += float(found.squares().double().sum())
    size = len(data)
    sums = energy.cpu() / size, cross.cpu() / size, moments.cpu() / size
    return Coordinates(rotated, overlap(rotated, directions), *sums, total / size, torch.arange(R, device="cpu"))


def overlap(rotated: RotatedDirections, kept: DenseDirections) -> Tensor:  # (R, K), on the host
    """Return the inner products of coordinates and kept directions, S·Gᵀ."""
    found = [torch.zeros(0, rotated.count, dtype=kept.layout.dtype, device="cpu")]
    for start in range(0, kept.count, _DIRECTIONS_AT_ONCE):
        part = kept.dense(start, min(start + _DIRECTIONS_AT_ONCE, kept.count))
        found.append(apply(rotated, _named(kept.layout, part)).cpu().to(kept.layout.dtype))
    return torch.cat(found).T.contiguous()


def _named(layout: Layout, directions: Tensor) -> dict[str, Tensor]:
    """Split directions by parameter, keeping their type: that of a bfloat16 parameter would round them."""
    return {name: directions[:, layout.span(name)] for name in layout.names}
