"""Checks that data, task and fit are those that a run was scored with: ids, labels, digests, losses and scores."""

from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from eigentrace.data import Data
from eigentrace.data.row_numbers import spread
from eigentrace.errors import MismatchError
from eigentrace.fits.fitted import Fitted
from eigentrace.projection.engine import Compute
from eigentrace.store import Folder
from eigentrace.store.columns import DIGEST, ID
from eigentrace.store.shards import gaps
from eigentrace.store.user_columns import as_columns, first_difference
from eigentrace.task.identity import another_loss
from eigentrace.task.task import Task

# Number of scored rows that are read and compared when a run is resumed.
_COMPARED = 1024
# Number of examples whose loss or score is computed again and compared.
_EVALUATED = 8
# Tolerance for rounding between scores of the same fit, relative to the largest score compared.
_SAME_SCORE, _SAME_SCORE_BF16 = 1e-3, 0.05


def difference(folder: Folder, data: Data, task: Task | None) -> str | None:
    """Describe the first row whose id, or label if in memory, differs from the run's; None if all are equal."""
    held = stored_ids(folder)
    if data.ids is not None and held is not None:
        found = id_difference(held, data.ids)
        if found is not None:
            return found
    labels = labels_at_hand(data, task)
    return None if labels is None else label_difference(folder, labels)


def stored_ids(folder: Folder) -> pa.ChunkedArray | None:
    """Return the ids stored in a run, or None."""
    given = folder.user_columns
    return None if given is None or ID not in given.names else given.table([ID]).column(0)


def id_difference(held: pa.ChunkedArray, ids: Any) -> str | None:
    """Describe the first row whose id differs from the run's; None if all are equal."""
    table: Any = as_columns(None, ids, len(ids))
    row = first_difference(held, table.column(0))
    if row is None:
        return None
    return f"row {row} is {held[row].as_py()!r} in the run and {table.column(0)[row].as_py()!r} in the data"


def label_difference(folder: Folder, labels: np.ndarray) -> str | None:  # (N,)
    """Describe the first scored row whose label differs from the run's; None if all are equal."""
    for shard in folder.record.read():
        if "label" not in folder.record.names(shard):
            return None
        held, here = folder.record.column(shard, "label"), labels[shard.start : shard.stop]
        differs = held[: len(here)] != here
        if differs.any():
            at = int(differs.argmax())
            return f"row {shard.start + at} has the label {held[at]} in the run and {here[at]} in the data"
    return None


def labels_at_hand(data: Data, task: Task | None) -> np.ndarray | None:  # (N,)
    """Return the labels of all examples if the data is in memory and the task has labels; else None."""
    held = data.held() if task is not None and task.has_labels else None
    if held is None or task is None:
        return None
    labels = torch.cat([task.labels(batch).detach().long().cpu() for batch in held]).numpy()
    return labels if labels.shape == (len(data),) else None


def check_begun(folder: Folder, data: Data, task: Task) -> None:
    """Raise MismatchError if rows that a run has scored differ from the data, before the run is resumed.

    Ids and labels are compared as in `difference`, then the digests of up to 1,024 scored rows of seekable data.
    """
    found = difference(folder, data, task)
    if found is None and data.is_seekable:
        found = _sample_difference(folder, data)
    if found is not None:
        raise MismatchError(
            f"The run at {folder.path} was created with different examples: {found}. Resume with the same data, or "
            "choose another directory; nothing was changed."
        )


def _sample_difference(folder: Folder, data: Data) -> str | None:
    wanted = spread(len(data), _COMPARED)
    rows, known = [np.empty(0, np.int64)], [np.empty(0, np.uint64)]
    for shard in folder.record.read():
        here = wanted[(wanted >= shard.start) & (wanted < shard.stop)]
        if len(here) and DIGEST in folder.record.names(shard):
            rows.append(here)
            known.append(folder.record.rows(shard, DIGEST, here - shard.start).view(np.uint64))
    expected, start = np.concatenate(known), 0
    for batch in data.batches(np.concatenate(rows), digests=True) if len(expected) else ():
        if batch.digests is None:
            return None
        differs = batch.digests != expected[start : start + len(batch)]
        if differs.any():
            return f"row {batch.rows[differs.argmax()]} has changed since it was scored"
        start += len(batch)
    return None


def check_loss(folder: Folder, fitted: Fitted, data: Data) -> None:
    """Raise MismatchError if the task's losses of the first examples differ from those stored in the run.

    Examples that have changed since are skipped here; they are reported when they are read.
    """
    shard = next(iter(folder.record.read()), None)
    if shard is None or shard.start > 0 or "loss" not in folder.record.names(shard):
        return
    record, task = folder.record, fitted.task
    reading = data.batches(range(min(_EVALUATED, shard.stop)), digests=True)
    batch = next(reading)
    reading.close()  # type: ignore[attr-defined]
    with task.session():
        here = task.losses(task.params, task.place(batch.values)).double().cpu()
    held = torch.from_numpy(record.rows(shard, "loss", batch.rows)).double()
    if batch.digests is not None and DIGEST in record.names(shard):
        held[torch.from_numpy(batch.digests != record.rows(shard, DIGEST, batch.rows).view(np.uint64))] = torch.nan
    at = another_loss(held, here)
    if at is not None:
        raise MismatchError(
            f"The task's loss differs from that of the run at {folder.path}: row {batch.rows[at]} has the loss "
            f"{held[at]:.4g} in the run, got {here[at]:.4g}. Pass the task that the run was scored with."
        )


def check_scores(folder: Folder, fitted: Fitted, data: Data, compute: Compute) -> None:
    """Raise MismatchError if the scores of the first examples by an unsaved fit differ from those stored in the run.

    Settings do not identify such fits: functions and checkpoints are recorded by type only, and data not at all.
    """
    shard = next(iter(folder.record.read()), None)
    if shard is None or not data.is_seekable:
        return
    rows = range(shard.start, min(shard.start + _EVALUATED, shard.stop))
    held = torch.from_numpy(folder.record.column(shard, "self_influence", 0, len(rows))).double()
    here = fitted.scores_of_rows(data, rows, compute).double().cpu()
    tol = _SAME_SCORE_BF16 if compute.precision == "bf16" else _SAME_SCORE
    gaps = (here - held).abs().nan_to_num()
    if float(gaps.max()) > tol * max(float(held.nan_to_num().abs().max()), torch.finfo(torch.float32).tiny):
        at = int(gaps.argmax())
        raise MismatchError(
            f"The run at {folder.path} was created with a different fit: the score of row {rows[at]} is {held[at]:.6g} "
            f"in the run, got {here[at]:.6g}. Resume with the same fit, or choose another directory; nothing was "
            "changed."
        )


def comparing(folder: Folder, data: Data) -> Data:
    """Return the data with a check: reading an example whose digest differs from the run's raises MismatchError."""

    @cache
    def known() -> np.ndarray | None:
        shards = folder.record.read()
        if any(gaps(shards, len(data))) or not all(DIGEST in folder.record.names(shard) for shard in shards):
            return None
        return np.concatenate([folder.record.column(shard, DIGEST) for shard in shards]).view(np.uint64)

    def refusal(row: int) -> MismatchError:
        return MismatchError(
            f"Row {row} of the data has changed since the run at {folder.path} scored it: its inputs or its label "
            "differ. Pass the data as it was scored, or score the current data into another directory."
        )

    return data.compared(known, refusal)
