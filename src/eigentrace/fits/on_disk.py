"""The files of a fit: eigenpairs with their cut and coordinates, or blocks of weighted directions."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eigentrace.disk.tensors import read_tensors
from eigentrace.errors import MismatchError, UnsupportedError
from eigentrace.fits.calibration import GradientMoments
from eigentrace.fits.cut import Cut
from eigentrace.fits.file_names import COORDINATES, EIGENPAIRS, MOMENTS, block_file
from eigentrace.fits.fitted import Fitted
from eigentrace.fits.relative_pairs import RelativePairs, read_pairs
from eigentrace.fits.tail_coordinates import Coordinates
from eigentrace.fits.weighted_directions import Block
from eigentrace.krylov.eigenpairs import Eigenpairs, Spectrum
from eigentrace.krylov.iterate import Ending
from eigentrace.projection.directions import CoordinateDirections, DenseDirections, Directions
from eigentrace.task.checkpoints import Checkpoint
from eigentrace.task.layout import Layout
from eigentrace.task.task import Task
from eigentrace.version import __version__


def fit_manifest(fitted: Fitted) -> dict[str, Any]:
    """Return the manifest entries of all fits: the model they belong to, and their settings."""
    task = fitted.task
    return {
        "kind": "fit",
        "format": 1,
        "versions": {"eigentrace": __version__, "torch": torch.__version__},
        "fingerprint": task.fingerprint(),
        "coverage": str(task.coverage),
        "l2": task.l2,
        "method": fitted.method,
        "num_train": fitted.num_train,
        "has_curvature": fitted.has_curvature,
        "double": task.is_double_copy,
        "trial": None if task.loss_fingerprint is None else task.loss_fingerprint.record(),
    }


def block_records(blocks: Sequence[Block]) -> dict[str, Any]:
    """Return the manifest entries of saved blocks."""
    return {"blocks": [{"identity": block.identity, "state": block.state is not None} for block in blocks]}


def block_files(blocks: Sequence[Block], task: Task) -> dict[str, dict[str, Tensor]]:
    """Return the files of blocks: directions, weights, and the parameters at which gradients are computed."""
    files = {}
    for number, block in enumerate(blocks):
        tensors = {"weights": block.weights} | _tensors_of(block.directions)
        if block.state is not None:
            tensors |= {f"state.{name}": value for name, value in task.canonical(block.state.load()).items()}
        files[block_file(number)] = tensors
    return files


def cut_record(eigenpairs: Eigenpairs, cut: Cut, coordinates: Coordinates | None) -> dict[str, Any]:
    """Return the manifest entries of a cut, which is saved with all eigenpairs, not only those it uses."""
    spectrum = eigenpairs.spectrum
    record: dict[str, Any] = {"cut": cut.record()}
    record |= {"ending": spectrum.ending.name, "num_products": spectrum.num_products}
    return record if coordinates is None else record | {"coordinates": coordinates.count}


def eigenpair_files(
    eigenpairs: Eigenpairs, coordinates: Coordinates | None, moments: GradientMoments | None
) -> dict[str, dict[str, Tensor]]:
    """Return the files of all eigenpairs of a fit, and those of its coordinates and moments if there are any."""
    spectrum = eigenpairs.spectrum
    tensors = {"directions": eigenpairs.directions, "eigenvalues": spectrum.eigenvalues}
    if spectrum.residuals is not None:
        tensors["residuals"] = spectrum.residuals
    others = {COORDINATES: coordinates, MOMENTS: moments}
    return {EIGENPAIRS: tensors} | {name: other.tensors() for name, other in others.items() if other is not None}


def _tensors_of(directions: Directions) -> dict[str, Tensor]:
    if isinstance(directions, DenseDirections):
        return {"rows": directions.matrix}
    if isinstance(directions, CoordinateDirections):
        return {"index": directions.index}
    raise UnsupportedError(
        f"Cannot save directions of type {type(directions).__name__}. Expected DenseDirections or CoordinateDirections."
    )


def read_eigenpairs(path: Path, manifest: dict[str, Any], layout: Layout) -> Eigenpairs:
    """Read the eigenpairs of a saved fit."""
    tensors = read_tensors(path / EIGENPAIRS)
    ending, products = Ending[manifest["ending"]], manifest["num_products"]
    spectrum = Spectrum(tensors["eigenvalues"], tensors.get("residuals"), ending, products)
    directions = _directions_of(tensors, "directions", len(spectrum.eigenvalues), layout)
    # Directions return to the memory that the basis of the fit was in.
    on_host = manifest["method"].get("basis", {}).get("place") == "host"
    return Eigenpairs(directions if on_host else directions.to(layout.device), spectrum)


def read_relative_pairs(path: Path, manifest: dict[str, Any], layout: Layout) -> RelativePairs:
    """Read the eigenpairs of a saved fit that correct its metric."""
    found = read_pairs(read_tensors(path / EIGENPAIRS), manifest["relative"], layout.device)
    count = len(found.spectrum.eigenvalues)
    directions = _directions_of({"directions": found.directions}, "directions", count, layout)
    on_host = manifest["method"].get("basis", {}).get("place") == "host"
    return replace(found, directions=directions if on_host else directions.to(layout.device))


def read_block(path: Path, number: int, record: dict[str, Any], layout: Layout) -> Block:
    """Read a saved block."""
    tensors = read_tensors(path / block_file(number))
    directions: Directions = (
        CoordinateDirections(tensors["index"], layout)
        if "index" in tensors
        else DenseDirections(_directions_of(tensors, "rows", len(tensors["weights"]), layout).to(layout.device), layout)
    )
    state = {key.removeprefix("state."): t for key, t in tensors.items() if key.startswith("state.")}
    return Block(directions, tensors["weights"], record["identity"], Checkpoint(state) if record["state"] else None)


def _directions_of(tensors: dict[str, Tensor], name: str, count: int, layout: Layout) -> Tensor:  # (K, P), on the host
    found = tensors[name]
    # Directions of a bfloat16 basis keep their type.
    if found.shape != (count, layout.numel) or found.dtype not in (layout.dtype, torch.bfloat16):
        raise MismatchError(
            f"The saved directions have shape {tuple(found.shape)} and type {found.dtype}, expected shape "
            f"{(count, layout.numel)} and type {layout.dtype} or bfloat16. The file was edited or belongs to another "
            "fit: save the fit again."
        )
    return found


def read_coordinates(path: Path, manifest: dict[str, Any], num_directions: int, layout: Layout) -> Coordinates | None:
    """Read the coordinates of a saved fit, if it has any."""
    if "coordinates" not in manifest:
        return None
    return Coordinates.of_tensors(read_tensors(path / COORDINATES), num_directions, layout)


def read_moments(path: Path, num_directions: int) -> GradientMoments | None:
    """Read the moments of gradients of a saved fit; earlier versions measured none."""
    if not (path / MOMENTS).exists():
        return None
    return GradientMoments.of_tensors(read_tensors(path / MOMENTS), num_directions)
