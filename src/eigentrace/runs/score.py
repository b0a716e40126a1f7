"""Scoring of a corpus into a run on disk, which can be interrupted and resumed."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from eigentrace.data import Data, as_data
from eigentrace.disk.atomic import sweep
from eigentrace.disk.lock import locked
from eigentrace.disk.manifest import through_json
from eigentrace.errors import InputError, MismatchError
from eigentrace.fits.fitted import Fitted, checked_compute
from eigentrace.fits.weighted_directions import at_state
from eigentrace.projection import Job, fitting_batch
from eigentrace.projection.engine import Compute
from eigentrace.runs.run import Run
from eigentrace.settings import check_counts, check_not_negative
from eigentrace.store.columns import ScoredColumn, named
from eigentrace.store.folder import Folder
from eigentrace.store.reader import RunReader
from eigentrace.store.same_data import check_begun, check_scores, comparing
from eigentrace.store.shards import gaps
from eigentrace.store.user_columns import as_columns
from eigentrace.store.write import Limits, Stored, expected_columns, fill, held_part, weights_of, write_table
from eigentrace.version import __version__


def score(
    fitted: Fitted,
    data: Any,
    out: str | Path,
    *,
    shard_rows: int = 250_000,
    shard_bytes: int = 64_000_000,
    shard_seconds: float = 60.0,
    features: Stored = "fp32",
    columns: Any = None,
    compute: Compute | None = None,
    how: Mapping[str, Any] | None = None,
) -> Run:
    """Score every example and store the results in a run on disk; call again with the same arguments to resume.

    A run has one row per row of the data. It stores per example: the loss, the gradient norm, self-influence, the
    label, prediction and confidence if the task has labels, and the features of the fit.

    Args:
        fitted: The fit. Pass `fitted.stored(data)` to store features that approximate the tail, too.
        data: The training examples, in any form that `fit` accepts.
        out: The run's directory: a new one, or that of a run created with the same model, fit and data.
        shard_rows: Maximum number of examples in a shard, to within a batch.
        shard_bytes: Maximum size of a shard, to within a batch. Scoring holds a shard in memory until it is written.
        shard_seconds: Maximum time in seconds until a shard is written. A killed process loses at most one shard.
        features: The type in which features are stored. In "fp16", each example has its own scale.
        columns: Additional columns, such as an annotator or a source to group by: a mapping of names to arrays, or a
            pyarrow Table.
        compute: Engine, precision and batch size. A run can only be resumed with the same ones.
        how: Any JSON-serialisable mapping, stored in the manifest.
    """
    limits = _limits(shard_rows, shard_bytes, shard_seconds, features)
    data, compute = as_data(data), checked_compute(compute)
    if compute.engine == "forward":
        raise InputError(
            "A run stores gradient norms, which engine='forward' does not compute. Use engine='auto' or another engine."
        )
    folder = Folder(out)
    folder.refuse_foreign()
    with locked(folder.path):
        sweep(folder.path)
        sweep(folder.record.folder)
        held = folder.manifest["compute"] if folder.exists else {}
        compute, data = _pinned(fitted, data, compute, held)
        table = as_columns(columns, data.ids, len(data))
        manifest = _manifest(fitted, data, compute, features, how)
        if folder.exists:
            folder.check_same(manifest, table)
            check_begun(folder, data, fitted.task)
        limits = replace(limits, columns=_columns(folder, manifest["columns"]))
        _keep_fit(folder, fitted, data, compute)
        if not folder.exists:
            folder.begin(manifest, weights_of(fitted.terms()), table)
        for rows in gaps(folder.record.read(), len(data)):
            fill(folder, fitted, data, rows, compute, limits)
        if not folder.table_file.exists():
            write_table(folder)
    return Run(folder, fitted, comparing(folder, data))


def _limits(rows: int, num_bytes: int, seconds: float, features: Stored) -> Limits:
    check_counts(1, shard_rows=rows, shard_bytes=num_bytes)
    check_not_negative(shard_seconds=seconds)
    if features not in ("fp32", "fp16"):
        raise InputError(f"features must be 'fp32' or 'fp16', got {features!r}.")
    return Limits(rows, num_bytes, seconds, features)


def _keep_fit(folder: Folder, fitted: Fitted, data: Data, compute: Compute) -> None:
    """Save the fit in a new run if it can be saved; raise MismatchError if the run was created with a different fit."""
    if folder.fit.exists() and not fitted.can.save:
        raise MismatchError(
            f"{folder.fit} contains a different fit than the one passed ({fitted.method['name']}), which cannot be "
            f"saved. Score with eigentrace.load({str(folder.fit)!r}, task), or choose another directory."
        )
    if folder.fit.exists():
        fitted.check_saved(folder.fit)
    elif folder.exists:
        check_scores(folder, fitted, data, compute)
    elif fitted.can.save:
        fitted.save(folder.fit)


def _columns(folder: Folder, expected: Sequence[str]) -> tuple[ScoredColumn, ...]:
    """Return the columns to write: those of an existing run, even if a new run would have more.

    Args:
        folder: The run.
        expected: The columns of a new run with the same fit.
    """
    if not folder.exists:
        return named(expected)
    begun = folder.manifest.get("columns") or [column.name for column in RunReader(folder).scored] or expected
    lacking = sorted(set(begun) - set(expected))
    if lacking:
        raise MismatchError(
            f"The run at {folder.path} has the columns {', '.join(lacking)}, which scoring would not write now. It was "
            "created by another version of eigentrace, or with a task that has other outputs or labels. Resume with "
            "the same version and task, or choose another directory; nothing was changed."
        )
    return named(begun)


def _pinned(fitted: Fitted, data: Data, compute: Compute, held: Mapping[str, Any]) -> tuple[Compute, Data]:
    """Return settings and data with a fixed batch size, that of an existing run, because rounding depends on it."""
    if not data.can_rebatch:
        return replace(compute, batch="data"), data
    if isinstance(compute.batch, str) and held.get("batch"):
        batch = int(held["batch"])
    else:
        batch = _chosen_batch(fitted, data, compute)
    return replace(compute, batch=batch), data.rebatched(batch)


def _chosen_batch(fitted: Fitted, data: Data, compute: Compute) -> int:
    terms = fitted.terms()
    if not terms:
        return len(data.first(len(data)))
    job = Job.of(terms[0].task, "losses", terms[0].block.directions, norms=True, compute=compute)
    with at_state(terms[0].task, terms[0].block):
        return fitting_batch(job, data) or 1


def _manifest(
    fitted: Fitted, data: Data, compute: Compute, features: Stored, how: Mapping[str, Any] | None
) -> dict[str, Any]:
    try:
        how = None if how is None else through_json(how)
    except (TypeError, ValueError) as error:
        raise InputError(f"`how` must be JSON-serialisable ({error}). Use text, numbers, lists and mappings.") from None
    terms = fitted.terms()
    tasks = {id(leaf.task): leaf.task for leaf in fitted.leaves()}.values()
    pinned = {name: getattr(compute, name) for name in ("engine", "precision", "compile")}
    manifest = {
        "kind": "run",
        "format": 1,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"eigentrace": __version__, "torch": torch.__version__},
        "model": {"fingerprint": [task.fingerprint() for task in tasks]},
        "coverage": str(fitted.task.coverage),
        "method": fitted.record(),
        "num_train": fitted.num_train,
        "has_curvature": fitted.has_curvature,
        "calibration": None if fitted.calibration is None else fitted.calibration.ratio,
        "pairs": fitted.can.influence,
        "data": {"rows": len(data), "fingerprint": data.fingerprint()},
        "compute": pinned | {"batch": None if isinstance(compute.batch, str) else compute.batch},
        "features": {
            "count": sum(term.block.directions.count for term in terms),
            "type": features,
            "hold": held_part(terms),
        },
        "columns": expected_columns(fitted),
        "declared": {column.name: column.record() for column in named(expected_columns(fitted))},
        "how": how,
    }
    return through_json(manifest)
