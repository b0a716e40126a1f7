"""Fits that score by rows: a list of blocks, each a parameter state with rows and one weight per row."""

import dataclasses
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from eigentrace import artifact
from eigentrace.checkpoints import Checkpoint
from eigentrace.compute import Compute
from eigentrace.data import Data, as_data
from eigentrace.distill import DELTA_FLOOR, Cut, Distilled, Spectrum, Tail, Weights, weigh
from eigentrace.errors import InputError, MismatchError, PrecisionWarning, UnsupportedError
from eigentrace.fitted import Fitted, checked_compute, over
from eigentrace.krylov import Ending
from eigentrace.project import Job, gradients, in_chunks, project
from eigentrace.rows import DenseRows, Rows, StackedRows, UnitRows, apply
from eigentrace.settings import plain
from eigentrace.task import Task
from eigentrace.vector import Layout
from eigentrace.version import __version__

Same = Literal["same"]
What = Literal["losses", "measurements"]


@dataclass(frozen=True)
class Block:
    """One term of a score: Σ weightₖ φₖ(x) φₖ(z) + identity · ⟨g(x), g(z)⟩, gradients taken at one parameter state."""

    rows: Rows
    weights: Tensor  # (K,) float64
    identity: float = 0.0
    state: Checkpoint | None = None
    """Where Θ is taken; the model's own parameters if None."""


@dataclass(frozen=True)
class ProjectedFit(Fitted):
    """A fit that scores by rows. Store, search and reports need not know which method made it."""

    task: Task
    blocks: tuple[Block, ...]
    method: dict[str, Any]
    """The settings that made this fit, for the record."""
    num_train: int
    has_curvature: bool = False
    distilled: Distilled | None = None
    cut: Cut | None = None

    @staticmethod
    def of(task: Task, distilled: Distilled, cut: Cut, method: dict[str, Any], num_train: int) -> "ProjectedFit":
        """Turn eigenpairs of the curvature into a fit."""
        fit = ProjectedFit(task, (), method, num_train, has_curvature=True, distilled=distilled, cut=cut)
        return fit.distill()

    @property
    def spectrum(self) -> Spectrum:
        """Eigenvalues, residual bounds and how the iteration ended, of the directions in use."""
        if self.distilled is None or self.cut is None:
            raise UnsupportedError(f"{self.method['name']} has no spectrum: it keeps no eigenpairs of the curvature.")
        spectrum, index = self.distilled.spectrum, weigh(self.distilled.spectrum.eigenvalues, self.cut).index
        residuals = None if spectrum.residuals is None else spectrum.residuals[index]
        return replace(spectrum, eigenvalues=spectrum.eigenvalues[index], residuals=residuals)

    @property
    def delta(self) -> float | None:
        """δ, what stands for the curvature of the directions that were not kept; None without a tail."""
        return 1 / self.blocks[0].identity if self.distilled is not None and self.blocks[0].identity else None

    @property
    def positive_metric(self) -> bool:
        """Tell whether every self-influence is positive by construction."""
        return all(bool((block.weights + block.identity > 0).all()) for block in self.blocks)

    def distill(
        self, keep: int | None = None, tail: Tail | Same = "same", positive_only: bool | None = None
    ) -> "ProjectedFit":
        """Return another cut of the same fit; nothing is computed again. What is not given stays as it is.

        Args:
            keep: How many directions, at most as many as the fit kept. The dropped ones join the tail.
            tail: "auto" for δ = |λ_K|, a number for δ, None for the paper's truncation.
            positive_only: Drop directions of negative curvature after taking the top `keep`.
        """
        if self.distilled is None or self.cut is None:
            raise UnsupportedError(f"{self.method['name']} has no eigenpairs to cut: distill is for curvature methods.")
        available = len(self.distilled.spectrum.eigenvalues)
        if keep is not None and keep > available:
            raise InputError(
                f"This fit holds {available} directions, so keep={keep} is too many. Fit with a larger `keep`."
            )
        cut = Cut(
            keep=self.cut.keep if keep is None else keep,
            tail=self.cut.tail if tail == "same" else tail,
            positive_only=self.cut.positive_only if positive_only is None else positive_only,
        )
        weights = weigh(self.distilled.spectrum.eigenvalues, cut)
        self._warn_of_small_delta(weights)
        directions, count = self.distilled.directions, len(weights.index)
        # The leading rows are a view; only directions dropped from between cost a copy.
        leading = count == 0 or int(weights.index[-1]) == count - 1
        rows = directions[:count] if leading else directions[weights.index.to(directions.device)]
        block = Block(DenseRows(rows, self.task.layout), weights.row, weights.identity)
        return replace(self, blocks=(block,), cut=cut)

    def _warn_of_small_delta(self, weights: Weights) -> None:
        largest = float(self.distilled.spectrum.eigenvalues[0].abs())  # type: ignore[union-attr]
        single = self.task.layout.dtype == torch.float32
        if single and weights.delta is not None and weights.delta < 0.99 * DELTA_FLOOR * largest:
            warnings.warn(
                f"tail={weights.delta:.3g} is below {DELTA_FLOOR:g} of the largest eigenvalue ({largest:.3g}): scores "
                "in float32 become differences of much larger numbers. Use a larger δ, 'auto', or a float64 model.",
                PrecisionWarning,
                stacklevel=3,
            )

    def features(self, data: Any, *, queries: bool = False, compute: Compute | None = None) -> Tensor:  # (N, K)
        """Project each example's gradient on the rows of every block, side by side."""
        data, compute = as_data(data), checked_compute(compute)
        if not sum(block.rows.count for block in self.blocks):
            raise UnsupportedError(
                f"{self.method['name']} scores by full gradients and has no features. Use RandProj over the same "
                "parameters for K numbers per example."
            )
        what: What = "measurements" if queries else "losses"
        return torch.cat([self._block_features(block, data, what, compute) for block in self.blocks], dim=1)

    def save(self, path: str | Path) -> None:
        """Write the fit to a new directory, to be read back by `eigentrace.load`."""
        self.task.check_unchanged()
        manifest: dict[str, Any] = {
            "kind": "fit",
            "format": 1,
            "versions": {"eigentrace": __version__, "torch": torch.__version__},
            "fingerprint": artifact.fingerprint(self.task),
            "coverage": str(self.task.coverage),
            "l2": self.task.l2,
            "method": self.method,
            "num_train": self.num_train,
            "has_curvature": self.has_curvature,
            "double": self.task.is_double_copy,
        }
        if self.distilled is None or self.cut is None:
            more, files = self._blocks_on_disk()
        else:
            more, files = _cut_on_disk(self.distilled, self.cut)
        artifact.write(Path(path), manifest | more, files)

    def _blocks_on_disk(self) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]]]:
        files = {}
        for number, block in enumerate(self.blocks):
            tensors = {"weights": block.weights} | _rows_tensors(block.rows)
            if block.state is not None:
                tensors |= {f"state.{name}": value for name, value in self.task.canonical(block.state.load()).items()}
            files[f"block-{number}.safetensors"] = tensors
        records = [{"identity": block.identity, "state": block.state is not None} for block in self.blocks]
        return {"blocks": records}, files

    def _self(self, data: Data, *, queries: bool, unit_gradients: bool, compute: Compute) -> Tensor:
        what: What = "measurements" if queries else "losses"
        total = torch.zeros(len(data), dtype=self.task.layout.dtype, device="cpu")
        for block in self.blocks:
            with self._at(block) as task:
                norms = unit_gradients or block.identity != 0
                job = Job.of(task, what, block.rows, norms, compute)
                for batch, found in project(job, data, "Self-influence"):
                    weights = block.weights.to(found.features)
                    scores = found.features.square() @ weights
                    if norms:
                        scores = scores + block.identity * found.squares()
                    if unit_gradients:
                        scores = over(scores, found.squares())
                    total[batch.rows] += scores.cpu()
        return total

    def _cross(self, train: Data, queries: Data, *, unit_gradients: bool, compute: Compute) -> Tensor:
        total = torch.zeros(len(queries), len(train), dtype=self.task.layout.dtype, device="cpu")
        for block in self.blocks:
            with self._at(block) as task:
                start = 0
                for asked in self._questions(block, task, queries, unit_gradients, compute):
                    stop = start + len(asked.left)
                    job = Job.of(task, "losses", asked.rows, unit_gradients, compute)
                    for batch, found in project(job, train, "Influence"):
                        scores = asked.left @ found.features.T
                        if unit_gradients:
                            scores = over(scores, found.squares().sqrt())
                        total[start:stop, batch.rows] += scores.cpu()
                    start = stop
        return total

    def _questions(
        self, block: Block, task: Task, queries: Data, unit_gradients: bool, compute: Compute
    ) -> Iterator["_Question"]:
        """Put queries in a form that one pass over the training data answers.

        Without an identity term, K numbers per query do, whatever their number. With one, the gradients of the
        queries travel as rows themselves, as many at a time as fit in memory.
        """
        if block.identity == 0:
            lefts = []
            asked = Job.of(task, "measurements", block.rows, unit_gradients, compute)
            for _, found in project(asked, queries):
                left = found.features * block.weights.to(found.features)
                lefts.append(over(left, found.squares().sqrt()[:, None]) if unit_gradients else left)
            yield _Question(torch.cat(lefts), block.rows)
            return
        asked = Job.of(task, "measurements", compute=compute)
        for rows in in_chunks(gradients(asked, queries), asked.budget):
            if unit_gradients:
                rows = over(rows, rows.norm(dim=1, keepdim=True))  # noqa: PLW2901
            phi = apply(block.rows, task.layout.unflatten(rows))
            eye = torch.eye(len(rows), dtype=rows.dtype, device=rows.device)
            left = torch.cat([phi * block.weights.to(phi), block.identity * eye], dim=1)
            yield _Question(left, StackedRows((block.rows, DenseRows(rows, task.layout))))

    def _block_features(self, block: Block, data: Data, what: What, compute: Compute) -> Tensor:
        result = torch.empty(len(data), block.rows.count, dtype=self.task.layout.dtype, device="cpu")
        with self._at(block) as task:
            for batch, found in project(Job.of(task, what, block.rows, compute=compute), data):
                result[batch.rows] = found.features.cpu()
        return result

    @contextmanager
    def _at(self, block: Block) -> Iterator[Task]:
        with self.task.session():
            yield self.task if block.state is None else self.task.at(block.state.load())


@dataclass(frozen=True)
class _Question:
    """Queries as coefficients over rows: their scores are left @ features(train)ᵀ."""

    left: Tensor  # (q, k)
    rows: Rows


def _cut_on_disk(distilled: Distilled, cut: Cut) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]]]:
    """Store a cut as all eigenpairs and how they are cut: its block is made again on loading."""
    spectrum = distilled.spectrum
    tensors = {"directions": distilled.directions, "eigenvalues": spectrum.eigenvalues}
    if spectrum.residuals is not None:
        tensors["residuals"] = spectrum.residuals
    record = {"cut": {key: plain(value) for key, value in dataclasses.asdict(cut).items()}}
    ending = {"ending": spectrum.ending.name, "num_products": spectrum.num_products}
    return record | ending, {"eigenpairs.safetensors": tensors}


def _rows_tensors(rows: Rows) -> dict[str, Tensor]:
    if isinstance(rows, DenseRows):
        return {"rows": rows.matrix}
    if isinstance(rows, UnitRows):
        return {"index": rows.index}
    raise UnsupportedError(f"Rows of kind {type(rows).__name__} cannot be saved.")


def load(path: str | Path, task: Task) -> ProjectedFit:
    """Read a saved fit back for the task it was made with."""
    if not isinstance(task, Task):
        raise InputError(f"load takes the Task the fit was made with, got {type(task).__name__}.")
    path = Path(path)
    manifest = artifact.read_manifest(path, "fit")
    try:
        if manifest["double"]:
            task = task.double()
        if manifest["fingerprint"] != artifact.fingerprint(task):
            raise MismatchError(
                f"The fit at {path} was made for {manifest['coverage']} of another model, other weights, or another "
                f"selection than this task's {task.coverage}. Load the same checkpoint and give the same `params`."
            )
        return _assemble(path, manifest, task.sealed())
    except (KeyError, TypeError) as error:
        raise MismatchError(f"{path} is incomplete or was edited ({error!r}). Save the fit again.") from None


def _assemble(path: Path, manifest: dict[str, Any], task: Task) -> ProjectedFit:
    shared = {key: manifest[key] for key in ("method", "num_train", "has_curvature")}
    if "cut" in manifest:
        distilled = _read_eigenpairs(path, manifest, task.layout)
        return ProjectedFit(task, (), **shared, distilled=distilled, cut=Cut(**manifest["cut"])).distill()
    blocks = [_read_block(path, n, record, task.layout) for n, record in enumerate(manifest["blocks"])]
    return ProjectedFit(task, tuple(blocks), **shared)


def _read_eigenpairs(path: Path, manifest: dict[str, Any], layout: Layout) -> Distilled:
    tensors = artifact.read_tensors(path / "eigenpairs.safetensors")
    ending, products = Ending[manifest["ending"]], manifest["num_products"]
    spectrum = Spectrum(tensors["eigenvalues"], tensors.get("residuals"), ending, products)
    directions = _rows_of(tensors, "directions", len(spectrum.eigenvalues), layout)
    # Rows go back to where the basis they come from was held.
    on_host = manifest["method"].get("basis", {}).get("place") == "host"
    return Distilled(directions if on_host else directions.to(layout.device), spectrum)


def _read_block(path: Path, number: int, record: dict[str, Any], layout: Layout) -> Block:
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
