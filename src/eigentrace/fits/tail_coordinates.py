"""R coordinates that stand for the tail of a gradient, and what is known of them over the curvature sample.

S·g(x) are coordinates of the Kronecker eigenbasis; with the kept part taken out in feature space they are
s(x) = S·g(x) − (S·Gᵀ)φ(x), the same coordinates of g's part outside of the kept directions.
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
from eigentrace.settings import check_counts
from eigentrace.task.layout import Layout
from eigentrace.task.task import Task

# A share of the energy never takes more coordinates than this, and candidates are this many times those wanted.
MOST_COORDINATES = 8192
_CANDIDATES = 3
# A share that is reached to rounding is reached.
_ROUNDING = 1e-9
# Kept directions that are written out at a time to be turned.
_DIRECTIONS_AT_ONCE = 8


def check_wanted(coordinates: Any) -> None:
    """Refuse what is neither a count nor a share."""
    if isinstance(coordinates, Real) and not isinstance(coordinates, Integral):
        if not 0 < float(coordinates) <= 1:
            raise InputError(
                f"coordinates={coordinates} is read as a share of the tail's energy, above 0 and at most 1. Give a "
                "whole number for a count."
            )
        return
    check_counts(1, coordinates=coordinates)


@dataclass(frozen=True)
class Coordinates:
    """Chosen coordinates with their second moments over the curvature sample, from which any cut's energies follow."""

    directions: RotatedDirections  # S, orthonormal
    overlap: Tensor  # (R, K) S·Gᵀ
    energy: Tensor  # (R,) E[(S·g)²]
    cross: Tensor  # (R, K) E[(S·g) φᵀ]
    moments: Tensor  # (K, K) E[φ φᵀ]
    total: float
    """E‖g‖²."""
    order: Tensor  # (R,) by falling residual energy when they were chosen

    @property
    def count(self) -> int:
        """R."""
        return len(self.energy)

    def residual(self, kept: Tensor) -> Tensor:  # (k,) -> (R,)
        """Return E[s²], the energy of each coordinate without the part of the kept directions given."""
        C = self.overlap[:, kept].double()
        inner = C @ self.moments[kept][:, kept] - 2 * self.cross[:, kept]
        return (self.energy + (C * inner).sum(dim=1)).clamp_min(0)

    def outside(self, kept: Tensor) -> float:
        """Return the energy of gradients outside of the kept directions, in all coordinates together."""
        return max(self.total - float(self.moments.diagonal()[kept].sum()), 0.0)

    def needed(self, wanted: float, kept: Tensor) -> int:
        """Tell how many coordinates a count or a share of the energy comes to; all of them where it is out of reach."""
        if isinstance(wanted, Integral):
            return min(int(wanted), self.count)
        found = self.residual(kept)[self.order].cumsum(0)
        reached = found >= float(wanted) * self.outside(kept) * (1 - _ROUNDING)
        return int(reached.nonzero()[0]) + 1 if bool(reached.any()) else self.count

    def first(self, count: int | None) -> "Coordinates":
        """Return the leading coordinates, the same ones for every cut of the fit; all of them for None."""
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
        """Return everything as named tensors, for a file."""
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
        """Read a file's tensors back, and check that they belong to the fit."""
        names = [key.removeprefix("pairs.") for key in tensors if key.startswith("pairs.")]
        unknown = sorted(set(names) - set(layout.names))
        overlap = tensors["overlap"]
        if unknown or overlap.ndim != 2 or overlap.shape[1] != num_directions:
            lacking = f", which has no parameter {unknown[0]!r}" if unknown else ""
            raise MismatchError(
                f"The saved coordinates are {tuple(overlap.shape)} over {len(names)} parameters, expected "
                f"{num_directions} directions of this model{lacking}: the file was edited or belongs to "
                "another fit. Save it again."
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
                f"The saved coordinates are {directions.count} with {len(energy)} energies. Save them again."
            )
        return Coordinates(directions, overlap, energy, cross, moments, float(tensors["total"]), order)


def gather(
    task: Task, data: Data, directions: DenseDirections, kept: Tensor, wanted: float, compute: Compute
) -> Coordinates:
    """Choose the coordinates of the Kronecker eigenbasis with the most gradient energy outside the kept directions.

    Three passes over the data: covariances, energies along all coordinates, and the exact moments of the candidates.

    Args:
        task: At the parameters of the fit.
        data: The curvature sample.
        directions: G, orthonormal: all those of the fit.
        kept: Which of them are in use.
        wanted: How many coordinates, or which share of the energy outside of the kept directions.
        compute: How examples go through the model; never compiled.
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
    """Multiply the coordinates with the kept directions: S·Gᵀ."""
    found = [torch.zeros(0, rotated.count, dtype=kept.layout.dtype, device="cpu")]
    for start in range(0, kept.count, _DIRECTIONS_AT_ONCE):
        part = kept.dense(start, min(start + _DIRECTIONS_AT_ONCE, kept.count))
        found.append(apply(rotated, _named(kept.layout, part)).cpu().to(kept.layout.dtype))
    return torch.cat(found).T.contiguous()


def _named(layout: Layout, directions: Tensor) -> dict[str, Tensor]:
    """Cut directions by parameter, in their own type: a bfloat16 parameter would round them."""
    return {name: directions[:, layout.span(name)] for name in layout.names}
