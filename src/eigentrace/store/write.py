"""Writers of a run: score rows batch by batch, store them in shards, and write the table of all columns."""

import time
from collections.abc import Generator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from eigentrace.data import Batch, Data
from eigentrace.disk.atomic import replacing
from eigentrace.errors import NumericalError, TaskError
from eigentrace.fits.fitted import Fitted
from eigentrace.fits.weighted_directions import Term, What, at_state
from eigentrace.projection import Job, Projection, project
from eigentrace.projection.engine import Compute
from eigentrace.store.columns import DIGEST, EXPONENTS, FEATURES, ROW, ScoredColumn
from eigentrace.store.folder import Folder
from eigentrace.store.reader import RunReader
from eigentrace.store.shards import halved
from eigentrace.task.checks import check_loss_fingerprint, check_losses
from eigentrace.task.task import Task

Stored = Literal["fp32", "fp16"]

# Rows that a fit without weighted directions scores at a time: at first, at most, and the factor of growth.
_FIRST_STRETCH, _STRETCH, _GROWTH = 64, 4096, 4


def expected_columns(fitted: Fitted) -> list[str]:
    """Return the names of the columns that scoring with a fit writes."""
    names = ["loss", *(["gradient_norm"] if fitted.terms() else []), "self_influence"]
    return [*names, "label", "prediction", "confidence"] if fitted.task.has_labels else names


def held_part(terms: tuple[Term, ...]) -> str:
    """Return how much of a score the stored features give: "nothing", "everything" or "kept directions"."""
    if not any(term.block.directions.count for term in terms):
        return "nothing"
    return "everything" if all(term.block.identity == 0 for term in terms) else "kept directions"


def weights_of(terms: tuple[Term, ...]) -> Tensor:  # (K,)
    """Return the weight of each stored feature, including the identity's contribution along its direction."""
    weights = [(term.block.weights + term.block.identity) * term.share for term in terms]
    return torch.cat(weights) if weights else torch.zeros(0, dtype=torch.float64, device="cpu")


def scored(fitted: Fitted, data: Data, compute: Compute, rows: range, limits: "Limits") -> Generator[dict[str, Tensor]]:
    """Yield per batch, on the CPU: losses, squared norms, self-influence, features and classes, by tensor name."""
    terms = fitted.terms()
    if terms:
        return _by_terms(terms, data, compute, rows, "losses")
    return _by_scores(fitted, data, compute, rows, limits)


def measured(fitted: Fitted, queries: Data, compute: Compute) -> dict[str, Tensor]:
    """Return the same tensors for all queries, with measurements as losses; scores only for fits with directions."""
    terms, rows = fitted.terms(), range(len(queries))
    found = _by_terms(terms, queries, compute, rows, "measurements") if terms else _asked_about(fitted, queries)
    parts = list(found)
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _by_terms(
    terms: tuple[Term, ...], data: Data, compute: Compute, rows: range, what: What
) -> Generator[dict[str, Tensor]]:
    """Score with one pass per term; the passes advance together, batch by batch."""
    for term in terms:
        check_loss_fingerprint(term.task, data)
    with ExitStack() as stack:
        here = [stack.enter_context(at_state(term.task, term.block)) for term in terms]
        passes = [
            project(_job(task, term, what, compute, number == 0), data, "Scoring", rows, digests=number == 0)
            for number, (task, term) in enumerate(zip(here, terms, strict=True))
        ]
        for found in zip(*passes, strict=True):
            batch = found[0][0]
            projections = [projection for _, projection in found]
            yield _projected(terms, batch, projections) | _described(terms[0], batch, projections[0].outputs, compute)


def _job(task: Task, term: Term, what: What, compute: Compute, is_first: bool) -> Job:
    """Return the job of a term; that of the first term also returns model outputs, if at the model's own weights."""
    outputs = is_first and task.has_labels and term.block.state is None
    return Job.of(task, what, term.block.directions, norms=True, compute=compute, outputs=outputs)


def _projected(terms: tuple[Term, ...], batch: Batch, found: list[Projection]) -> dict[str, Tensor]:
    settled = [term.block.settled(projection.features) for term, projection in zip(terms, found, strict=True)]
    own = [
        term.block.own_scores(phi, projection.squares()) * term.share
        for term, phi, projection in zip(terms, settled, found, strict=True)
    ]
    kept = {
        "loss": found[0].losses,
        "square_norm": found[0].squares(),
        "self_influence": torch.stack(own).sum(dim=0),
        FEATURES: torch.cat(settled, dim=1),
    }
    return {name: tensor.cpu() for name, tensor in kept.items() if tensor.numel()} | _digest(batch)


def _digest(batch: Batch) -> dict[str, Tensor]:
    return {} if batch.digests is None else {DIGEST: torch.from_numpy(batch.digests.view(np.int64).copy())}


def _described(term: Term, batch: Batch, outputs: Tensor | None, compute: Compute) -> dict[str, Tensor]:
    """Return classes, and the loss if features are computed at other weights, both at the model's own weights."""
    task = _in_precision(term.task, compute)
    if not task.has_labels and term.block.state is None:
        return {}
    values = task.place(batch.values)
    found: dict[str, Tensor] = {}
    if term.block.state is not None or (outputs is None and task.has_labels):
        losses, outputs = _losses_and_outputs(task, values)
        found |= {"loss": losses} if term.block.state is not None else {}
    found |= _classes(task, values, outputs) if task.has_labels else {}
    return {name: tensor.cpu() for name, tensor in found.items()}


def _in_precision(task: Task, compute: Compute) -> Task:
    """Return the task in the precision of the run, so that all values of a run have one precision."""
    return task.in_bf16() if compute.precision == "bf16" else task


def _losses_and_outputs(task: Task, values: Any) -> tuple[Tensor, Any]:
    if task.has_outputs:
        return task.losses_and_outputs(task.params, values)
    return task.losses(task.params, values), None


def _by_scores(
    fitted: Fitted, data: Data, compute: Compute, rows: range, limits: "Limits"
) -> Generator[dict[str, Tensor]]:
    """Score with the fit's `scores_of_rows`, a range of rows at a time, and add losses and classes.

    An interrupted range is lost entirely, so ranges are short at first and grow to what fits the limits of a shard.
    """
    start, size = rows.start, _FIRST_STRETCH if data.is_seekable else max(1, len(rows))
    while start < rows.stop:
        began = time.monotonic()
        stretch = range(start, min(start + min(size, limits.rows) if data.is_seekable else rows.stop, rows.stop))
        yield from _stretch_of(fitted, data, compute, stretch)
        start = stretch.stop
        if 2 * _GROWTH * (time.monotonic() - began) < limits.seconds:
            size = min(size * _GROWTH, _STRETCH)


def _stretch_of(fitted: Fitted, data: Data, compute: Compute, stretch: range) -> Generator[dict[str, Tensor]]:
    task = _in_precision(fitted.task, compute)
    scores = None if fitted.is_loss else fitted.scores_of_rows(data, stretch, compute)
    with task.session():
        for batch in data.batches(stretch, digests=True):
            values = task.place(batch.values)
            losses, outputs = _losses_and_outputs(task, values)
            check_losses(losses, batch.rows, task=task, batch=values)
            found = {"loss": losses, "self_influence": losses if scores is None else scores[batch.rows - stretch.start]}
            found |= _classes(task, values, outputs) if task.has_labels else {}
            yield {name: tensor.detach().cpu() for name, tensor in found.items()} | _digest(batch)


def _asked_about(fitted: Fitted, queries: Data) -> Generator[dict[str, Tensor]]:
    """Yield measurements, as losses, and classes of queries; there are no scores without directions."""
    task = fitted.task
    with task.session():
        for batch in queries.batches(digests=True):
            values = task.place(batch.values)
            found = {"loss": task.measurements(task.params, values)}
            check_losses(found["loss"], batch.rows, "measurement", task=task, batch=values)
            found |= _classes(task, values, task.outputs(task.params, values)) if task.has_labels else {}
            yield {name: tensor.detach().cpu() for name, tensor in found.items()} | _digest(batch)


def _classes(task: Task, values: Any, outputs: Any) -> dict[str, Tensor]:
    labels = task.labels(values).long()
    shape = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
    if not isinstance(outputs, Tensor) or outputs.ndim != 2 or len(outputs) != len(labels) or outputs.shape[1] < 2:
        raise TaskError(
            f"A task with `labels` must have one output per class, shape ({len(labels)}, classes) for this batch, got "
            f"{shape}. Omit `labels`, or return two outputs for two classes."
        )
    confidence, prediction = outputs.float().softmax(dim=1).max(dim=1)
    return {"label": labels, "prediction": prediction, "confidence": confidence}


@dataclass(frozen=True)
class Limits:
    """The limits of a shard in rows, bytes and seconds, the columns to write, and the type of its features."""

    rows: int
    bytes: int
    seconds: float
    features: Stored
    columns: tuple[ScoredColumn, ...] = ()


@dataclass
class _Open:
    """A shard in memory, to which batches are added until it is written."""

    start: int
    began: float = field(default_factory=time.monotonic)
    parts: list[dict[str, Tensor]] = field(default_factory=list)
    rows: int = 0
    bytes: int = 0

    def add(self, part: dict[str, Tensor]) -> None:
        self.parts.append(part)
        self.rows += len(next(iter(part.values())))
        self.bytes += sum(tensor.nbytes for tensor in part.values())

    def is_full(self, limits: Limits) -> bool:
        is_long = self.rows >= limits.rows or self.bytes >= limits.bytes
        return is_long or time.monotonic() - self.began >= limits.seconds

    def close(self, folder: Folder) -> None:
        # Batches without digests lack that tensor: the shard then stores none.
        names = [name for name in self.parts[0] if all(name in part for part in self.parts)]
        # Parts are dropped as they are joined, so that two copies of the largest tensor are in memory, and no third.
        folder.record.add(self.start, {name: torch.cat([part.pop(name) for part in self.parts]) for name in names})


def fill(folder: Folder, fitted: Fitted, data: Data, rows: range, compute: Compute, limits: Limits) -> None:
    """Score missing rows into shards; rows that are scored before an exception are stored too."""
    shard = _Open(rows.start)
    try:
        with closing(scored(fitted, data, compute, rows, limits)) as parts:
            for part in parts:
                shard.add(_stored(part, shard.start + shard.rows, limits))
                if shard.is_full(limits):
                    full, shard = shard, _Open(shard.start + shard.rows)
                    full.close(folder)
    finally:
        if shard.rows:
            shard.close(folder)


def _stored(part: dict[str, Tensor], first: int, limits: Limits) -> dict[str, Tensor]:
    """Select the run's columns and convert features to their stored type; raise NumericalError if too large for it."""
    kept = {column.stored_as: part[column.stored_as] for column in limits.columns}
    # NumPy, which reads shards, has no bfloat16.
    kept = {name: tensor.float() if tensor.dtype == torch.bfloat16 else tensor for name, tensor in kept.items()}
    kept |= {DIGEST: part[DIGEST]} if DIGEST in part else {}
    if FEATURES not in part:
        return kept
    single = part[FEATURES].float()
    bad = (~single.isfinite()).any(dim=1).nonzero().flatten()
    if len(bad):
        raise NumericalError(
            f"The features of row {first + int(bad[0])} overflow float32. Inspect that example, or scale the loss or "
            "the inputs down and fit again."
        )
    if limits.features == "fp32":
        return kept | {FEATURES: single}
    features, exponents = halved(single)
    return kept | {FEATURES: features, EXPONENTS: exponents}


# Rows per row group of the table, and of the user's columns read at a time.
_GROUP_ROWS = 1 << 18


def write_table(folder: Folder) -> None:
    """Write the table of a complete run, shard by shard."""
    reader, pieces = RunReader(folder), _Pieces(folder)
    with replacing(folder.table_file) as partial:
        writer: pq.ParquetWriter | None = None
        try:
            for shard in reader.shards:
                for start in range(shard.start, shard.stop, _GROUP_ROWS):
                    rows = range(start, min(start + _GROUP_ROWS, shard.stop))
                    part = {ROW: np.arange(rows.start, rows.stop)}
                    part |= {column.name: reader.column(column.name, rows) for column in reader.scored}
                    made = pa.table(part | pieces.take(len(rows)))
                    writer = writer or pq.ParquetWriter(partial, made.schema, write_page_checksum=True)
                    writer.write_table(made)
        finally:
            if writer is not None:
                writer.close()


class _Pieces:
    """The user's columns, read in consecutive pieces of given sizes with little more than one piece in memory."""

    def __init__(self, folder: Folder) -> None:
        given = folder.user_columns
        self.batches = None if given is None else given.batches(_GROUP_ROWS)
        self.held: list[pa.RecordBatch] = []

    def take(self, rows: int) -> dict[str, Any]:
        if self.batches is None:
            return {}
        while sum(batch.num_rows for batch in self.held) < rows:
            self.held.append(next(self.batches))
        table = pa.Table.from_batches(self.held)
        self.held = table.slice(rows).to_batches()
        return {name: table.column(name).slice(0, rows) for name in table.column_names}
