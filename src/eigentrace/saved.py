"""Fits as files: eigenpairs and how they are cut, coordinates, or blocks as they are."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eigentrace import artifact
from eigentrace.blocks import Block
from eigentrace.checkpoints import Checkpoint
from eigentrace.coordinates import Coordinates
from eigentrace.distill import Cut, Distilled, Spectrum
from eigentrace.errors import MismatchError, UnsupportedError
from eigentrace.krylov import Ending
from eigentrace.rows import DenseRows, Rows, UnitRows
from eigentrace.settings import plain
from eigentrace.task import Task
from eigentrace.vector import Layout

OnDisk = tuple[dict[str, Any], dict[str, dict[str, Tensor]]]


def blocks_on_disk(blocks: Sequence[Block], task: Task) -> OnDisk:
    """Store blocks as they are: rows, weights, and the parameters they are taken at."""
    files = {}
    for number, block in enumerate(blocks):
        tensors = {"weights": block.weights} | _rows_tensors(block.rows)
        if block.state is not None:
            tensors |= {f"state.{name}": value for name, value in task.canonical(block.state.load()).items()}
        files[f"block-{number}.safetensors"] = tensors
    return {"blocks": [{"identity": block.identity, "state": block.state is not None} for block in blocks]}, files


def cut_on_disk(distilled: Distilled, cut: Cut, coordinates: Coordinates | None) -> OnDisk:
    """Store a cut as all eigenpairs and how they are cut: its block is made again on loading."""
    spectrum = distilled.spectrum
    tensors = {"directions": distilled.directions, "eigenvalues": spectrum.eigenvalues}
    if spectrum.residuals is not None:
        tensors["residuals"] = spectrum.residuals
    record: dict[str, Any] = {"cut": {key: plain(value) for key, value in dataclasses.asdict(cut).items()}}
    record |= {"ending": spectrum.ending.name, "num_products": spectrum.num_products}
    files = {"eigenpairs.safetensors": tensors}
    if coordinates is not None:
        record["coordinates"] = coordinates.count
        files["coordinates.safetensors"] = coordinates.tensors()
    return record, files


def _rows_tensors(rows: Rows) -> dict[str, Tensor]:
    if isinstance(rows, DenseRows):
        return {"rows": rows.matrix}
    if isinstance(rows, UnitRows):
        return {"index": rows.index}
    raise UnsupportedError(f"Rows of kind {type(rows).__name__} cannot be saved.")


def read_eigenpairs(path: Path, manifest: dict[str, Any], layout: Layout) -> Distilled:
    """Read the eigenpairs of a saved cut."""
    tensors = artifact.read_tensors(path / "eigenpairs.safetensors")
    ending, products = Ending[manifest["ending"]], manifest["num_products"]
    spectrum = Spectrum(tensors["eigenvalues"], tensors.get("residuals"), ending, products)
    directions = _rows_of(tensors, "directions", len(spectrum.eigenvalues), layout)
    # Rows go back to where the basis they come from was held.
    on_host = manifest["method"].get("basis", {}).get("place") == "host"
    return Distilled(directions if on_host else directions.to(layout.device), spectrum)


def read_block(path: Path, number: int, record: dict[str, Any], layout: Layout) -> Block:
    """Read one of several saved blocks."""
    tensors = artifact.read_tensors(path / f"block-{number}.safetensors")
    rows: Rows = (
        UnitRows(tensors["index"], layout)
        if "index" in tensors
        else DenseRows(_rows_of(tensors, "rows", len(tensors["weights"]), layout).to(layout.device), layout)
    )
    state = {key.removeprefix("state."): t for key, t in tensors.items() if key.startswith("state.")}
    return Block(rows, tensors["weights"], record["identity"], Checkpoint(state) if record["state"] else None)


def _rows_of(tensors: dict[str, Tensor], name: str, count: int, layout: Layout) -> Tensor:  # (K, P), on the host
    found = tensors[name]
    # Rows of a bfloat16 basis stay as they were held.
    if found.shape != (count, layout.numel) or found.dtype not in (layout.dtype, torch.bfloat16):
        raise MismatchError(
            f"The saved {name} are {tuple(found.shape)} of {found.dtype}, expected {(count, layout.numel)} of "
            f"{layout.dtype} or bfloat16: the file was edited or belongs to another fit. Save it again."
        )
    return found
