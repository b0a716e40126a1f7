"""Scoring a corpus into a run: batch by batch, shard by shard, from wherever an earlier call stopped."""

import json
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from eigentrace import artifact, saved
from eigentrace.blocks import at_state
from eigentrace.compute import Compute
from eigentrace.data import Data, as_data
from eigentrace.ensemble import Ensemble
from eigentrace.errors import InputError, MismatchError, NumericalError
from eigentrace.files import sweep
from eigentrace.fitted import Fitted, checked_compute
from eigentrace.lock import locked
from eigentrace.project import Job, fitting_batch
from eigentrace.projected import ProjectedFit
from eigentrace.run import Run
from eigentrace.settings import check_counts, check_not_negative, plain
from eigentrace.store import Folder
from eigentrace.store.shards import begins_with, gaps, halved
from eigentrace.store.table import as_columns, write_table
from eigentrace.terms import EXPONENTS, FEATURES, Term, held_part, scored, terms_of, weights_of
from eigentrace.unchanged import check_begun, comparing
from eigentrace.version import __version__

Stored = Literal["fp32", "fp16"]

# What may lie in a directory before a run begins in it: a fit, and what a killed beginning left.
_BEFORE_THE_MANIFEST = ("lock", "request.json", "fit", "krylov", "weights.safetensors", "columns.parquet")
_IN_THE_MAKING = tuple(f".{name}." for name in (*_BEFORE_THE_MANIFEST, "manifest.json"))


def score(
    fitted: Fitted,
    data: Any,
    out: str | Path,
    *,
    shard_rows: int = 250_000,
    shard_seconds: float = 60.0,
    features: Stored = "fp32",
    columns: Any = None,
    compute: Compute | None = None,
    how: Mapping[str, Any] | None = None,
) -> Run:
    """Score every example into a run on disk; the same call goes on where an earlier one was stopped.

    A row of the run is a row of the data. What it holds per example: the loss, the gradient's norm, self-influence, the
    given and the predicted class where the task has classes, and the features of the fit.

    Args:
        fitted: The fit. With `fitted.stored(data)` its whole tail can be asked about later without the model.
        data: The training examples, in any of the forms `fit` takes.
        out: The run's directory; new, or of a run begun with the same model, fit and data.
        shard_rows: A shard of the run ends after so many examples,
        shard_seconds: or after so much work, whichever comes first. A killed run loses at most one.
        features: The type features are stored in. In half precision every example has a scale of its own.
        columns: More to keep per example: a mapping of names to arrays, or a pyarrow Table, such as an annotator or a
            source to group by.
        compute: Engine, precision and batch size, which the run then is bound to.
        how: Anything that JSON can hold, kept in the manifest for whoever continues the run.
    """
    check_counts(1, shard_rows=shard_rows)
    check_not_negative(shard_seconds=shard_seconds)
    if features not in ("fp32", "fp16"):
        raise InputError(f"features must be 'fp32' or 'fp16', got {features!r}.")
    terms, data, compute = terms_of(fitted), as_data(data), checked_compute(compute)
    if compute.engine == "forward":
        raise InputError("A run holds gradient norms, which forward mode does not give: use another engine, or 'auto'.")
    folder = Folder(out)
    _refuse_foreign(folder)
    with locked(folder.path):
        sweep(folder.path)
        sweep(folder.record.folder)
        held = folder.manifest["compute"] if folder.exists else {}
        compute, data = _pinned(terms, data, compute, held)
        table = as_columns(columns, data.ids, len(data))
        manifest = _manifest(fitted, terms, data, compute, features, how)
        if folder.exists:
            folder.check_same(manifest, table)
            check_begun(folder, data, terms[0].task)
        if folder.fit.exists():
            _check_fit(folder.fit, fitted)
        if not folder.exists:
            if not folder.fit.exists():
                fitted.save(folder.fit)
            folder.begin(manifest, weights_of(terms), table)
        for rows in gaps(folder.record.read(), len(data)):
            _fill(folder, terms, data, rows, compute, _Limits(shard_rows, shard_seconds, features))
        if not folder.table_file.exists():
            write_table(folder)
    return Run(folder, fitted, comparing(folder, data))


def _refuse_foreign(folder: Folder) -> None:
    """Stop, before anything is touched, if a directory without a run holds what no run has put there."""
    if folder.exists or not folder.path.is_dir():
        return
    names = sorted(path.name for path in folder.path.iterdir())
    others = [name for name in names if name not in _BEFORE_THE_MANIFEST and not name.startswith(_IN_THE_MAKING)]
    if others:
        raise InputError(
            f"{folder.path} holds other files ({', '.join(others[:3])}) and no run. Choose a new directory: nothing "
            "was changed."
        )


def _check_fit(path: Path, fitted: Fitted) -> None:
    """Stop if the directory holds another fit than the one that is to be scored with.

    Two fits of the same settings may still differ, by the examples or the threads they were made with: their features
    have other signs, and must not meet in one run.
    """
    if isinstance(fitted, Ensemble):
        for number, member in enumerate(fitted.members):
            _check_fit(path / f"member-{number}", member)
    if not isinstance(fitted, ProjectedFit):
        return
    held, mine = artifact.read_manifest(path, "fit"), _as_json(fitted.manifest())
    same = all(held.get(key) == mine.get(key) for key in ("fingerprint", "method", "cut", "num_train"))
    if not same or not all(begins_with(path / name, tensors) for name, tensors in _files(fitted).items()):
        raise MismatchError(
            f"{path} holds another fit (of another model, with other settings or on other examples) than the one "
            f"given. Score with that one, eigentrace.load({str(path)!r}, task), or choose another directory; nothing "
            "was changed."
        )


def _files(fitted: ProjectedFit) -> dict[str, dict[str, Tensor]]:
    if fitted.distilled is None or fitted.cut is None:
        return saved.blocks_on_disk(fitted.blocks, fitted.task)[1]
    return saved.cut_on_disk(fitted.distilled, fitted.cut, fitted.coordinates)[1]


def _pinned(terms: tuple[Term, ...], data: Data, compute: Compute, held: Mapping[str, Any]) -> tuple[Compute, Data]:
    """Settle on a batch size, that of the run if there is one: rounding depends on it."""
    if not data.can_rebatch:
        return Compute(**_settings(compute) | {"batch": "data"}), data
    if isinstance(compute.batch, str) and held.get("batch"):
        batch = int(held["batch"])
    else:
        job = Job.of(terms[0].task, "losses", terms[0].block.rows, norms=True, compute=compute)
        with at_state(terms[0].task, terms[0].block):
            batch = fitting_batch(job, data) or 1
    return Compute(**_settings(compute) | {"batch": batch}), data.rebatched(batch)


def _settings(compute: Compute) -> dict[str, Any]:
    return {name: getattr(compute, name) for name in ("engine", "precision", "memory", "batch", "compile")}


def _manifest(
    fitted: Fitted,
    terms: tuple[Term, ...],
    data: Data,
    compute: Compute,
    features: Stored,
    how: Mapping[str, Any] | None,
) -> dict[str, Any]:
    try:
        how = None if how is None else _as_json(dict(how))
    except (TypeError, ValueError) as error:
        raise InputError(
            f"`how` is kept as JSON, which cannot hold it ({error}). Give text, numbers and lists."
        ) from None
    tasks = {id(term.task): term.task for term in terms}.values()
    pinned = {name: getattr(compute, name) for name in ("engine", "precision", "compile")}
    manifest = {
        "kind": "run",
        "format": 1,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"eigentrace": __version__, "torch": torch.__version__},
        "model": {"fingerprint": [artifact.fingerprint(task) for task in tasks]},
        "coverage": str(terms[0].task.coverage),
        "method": _method(fitted),
        "num_train": fitted.num_train,
        "has_curvature": fitted.has_curvature,
        "data": {"rows": len(data), "fingerprint": data.fingerprint()},
        "compute": pinned | {"batch": None if isinstance(compute.batch, str) else compute.batch},
        "features": {
            "count": sum(term.block.rows.count for term in terms),
            "type": features,
            "hold": held_part(terms),
        },
        "how": how,
    }
    return _as_json(manifest)


def _as_json(value: dict[str, Any]) -> dict[str, Any]:
    """Return what a value is when it comes back from a JSON file: tuples are lists there."""
    return json.loads(json.dumps(value, allow_nan=False))


def _method(fitted: Fitted) -> dict[str, Any]:
    cut = getattr(fitted, "cut", None)
    settings = getattr(fitted, "method", {})
    return (
        dict(settings)
        if cut is None
        else dict(settings) | {"cut": {name: plain(value) for name, value in vars(cut).items()}}
    )


@dataclass(frozen=True)
class _Limits:
    rows: int
    seconds: float
    features: Stored


@dataclass
class _Open:
    """A shard that is being filled."""

    start: int
    began: float = field(default_factory=time.monotonic)
    parts: list[dict[str, Tensor]] = field(default_factory=list)
    rows: int = 0

    def add(self, part: dict[str, Tensor]) -> None:
        self.parts.append(part)
        self.rows += len(part["loss"])

    def is_full(self, limits: _Limits) -> bool:
        return self.rows >= limits.rows or time.monotonic() - self.began >= limits.seconds

    def close(self, folder: Folder) -> None:
        # Digests end with the first example that has none.
        names = [name for name in self.parts[0] if all(name in part for part in self.parts)]
        folder.record.add(self.start, {name: torch.cat([part[name] for part in self.parts]) for name in names})


def _fill(folder: Folder, terms: tuple[Term, ...], data: Data, rows: range, compute: Compute, limits: _Limits) -> None:
    """Score a stretch of rows that no shard holds; whatever ends it, what was scored is kept."""
    shard = _Open(rows.start)
    try:
        with closing(scored(terms, data, compute, rows)) as parts:
            for part in parts:
                shard.add(_stored(part, shard.start + shard.rows, limits.features))
                if shard.is_full(limits):
                    full, shard = shard, _Open(shard.start + shard.rows)
                    full.close(folder)
    finally:
        if shard.rows:
            shard.close(folder)


def _stored(part: dict[str, Tensor], first: int, features: Stored) -> dict[str, Tensor]:
    """Give features the type they are stored in, which must be able to hold them."""
    if FEATURES in part:
        single = part[FEATURES].float()
        bad = (~single.isfinite()).any(dim=1).nonzero().flatten()
        if len(bad):
            raise NumericalError(
                f"The features of row {first + int(bad[0])} are too large for float32, in which they are read back. "
                "Look at that example, or fit on a loss or inputs of smaller size."
            )
        if features == "fp16":
            part[FEATURES], part[EXPONENTS] = halved(single)
        else:
            part[FEATURES] = single
    return part
