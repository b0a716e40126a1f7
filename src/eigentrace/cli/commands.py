"""What the commands do. Results go to the standard output, everything else to the standard error."""

import json
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from eigentrace.artifact import read_manifest
from eigentrace.cleaning import clean as decide
from eigentrace.cli.showing import show_explanation, show_table
from eigentrace.compute import Compute
from eigentrace.ensemble import load
from eigentrace.errors import InputError, MismatchError
from eigentrace.exporting import export
from eigentrace.files import replacing, sweep
from eigentrace.health import check as look
from eigentrace.inputs import Inputs, from_config, make_inputs
from eigentrace.lock import locked
from eigentrace.methods import Arnoldi
from eigentrace.run import Run, open_run
from eigentrace.scoring import score as score_run
from eigentrace.store import Folder
from eigentrace.store.table import ID, OWN_COLUMNS

_REQUEST = "request.json"


def fit(path: Path, config: Path | None, given: dict[str, dict[str, Any]], as_json: bool) -> None:
    """Fit into a new run, or go on with a fit that was interrupted."""
    folder = Folder(path)
    how = _request(folder, config, given)
    with _resumable(f"eigentrace fit {path}"), locked(folder.path):
        _remember(folder, how)
        sweep(folder.path)
        if not folder.fit.exists():
            inputs = make_inputs(how)
            _note(f"{len(inputs.data):,} examples; {inputs.task.coverage}")
            fitted = Arnoldi(**how["fit"]).fit(inputs.task, inputs.data, resume=folder.krylov)
            (fitted if fitted.coordinates is None else fitted.stored()).save(folder.fit)
        if folder.krylov.exists():
            shutil.rmtree(folder.krylov)
    saved = read_manifest(folder.fit, "fit")
    result = {"run": str(path), "fit": str(folder.fit), "method": saved["method"], "coverage": saved["coverage"]}
    _answer(result, f"Fitted: {saved['coverage']}.\nNext: eigentrace score {path}", as_json)


def score(path: Path, given: Mapping[str, Any], device: str | None, as_json: bool) -> None:
    """Score every example into the run, or go on."""
    folder = Folder(path)
    how = _read_request(folder)
    if not folder.fit.exists():
        raise InputError(f"{path} holds no finished fit. Run first: eigentrace fit {path}")
    asked = dict(how["score"]) | {name: value for name, value in given.items() if value is not None}
    limits = {name: asked.pop(name) for name in ("shard_rows", "shard_seconds", "features") if name in asked}
    with _resumable(f"eigentrace score {path}"):
        inputs = make_inputs(_on(how, device))
        fitted = load(folder.fit, inputs.task)
        known = how | {"classes": _classes(inputs)}
        columns = _columns(inputs)
        run = score_run(fitted, inputs.data, path, columns=columns, compute=Compute(**asked), how=known, **limits)
    _answer(_summary(run), _words(run) + f"\nNext: eigentrace info {path}", as_json)


def explain(
    path: Path,
    rows: list[int],
    queries: Path | None,
    options: dict[str, Any],
    exact: bool,
    out: Path | None,
    as_json: bool,
) -> None:
    """Print proponents and opponents."""
    if bool(rows) == (queries is not None):
        raise InputError("Say what to explain: rows of the run (--row 12), or new examples (--queries file.csv).")
    if out is not None and out.exists():
        raise InputError(f"{out} exists already and is left as it is. Choose another path.")
    run = open_run(path)
    asked: Any = rows
    if exact or queries is not None or options["top_labels"] is not None:
        how = _read_request(run.folder)
        inputs = make_inputs(how)
        run = run.attached(inputs.task, inputs.data)
        if queries is not None:
            asked = _queries(how, queries)
    k = options.pop("k")
    found = run.explain(asked, k, rescore=None if exact else False if run.num_features else None, **options)
    table = found.table()
    if out is not None:
        with replacing(out) as partial:
            pyarrow.csv.write_csv(table, partial) if out.suffix == ".csv" else pq.write_table(table, partial)
    result = {"how": found.how, "unit": found.unit, "answers": table.to_pylist()}
    _answer(result, show_explanation(found, rows, _class_names(run)), as_json)


def clean(
    path: Path,
    amounts: Mapping[str, Any],
    by: str,
    per_class: bool,
    decisions: Path | None,
    out: Path | None,
    as_json: bool,
) -> None:
    """Decide, and write decisions and the rest of the dataset."""
    run = open_run(path)
    source = _source(run) if out is not None else None
    told = {name: _amount(value) for name, value in amounts.items() if value is not None}
    found = decide(run, by=by, per_class=per_class, out=decisions, **told)
    written = None if out is None or source is None else export(found, source, out, split=_input_of(run).get("split"))
    result = {
        "rows": len(found),
        "dropped": len(found.dropped),
        "kept": len(found.kept),
        "by": by,
        "decisions": None if decisions is None else str(decisions),
        "out": None if written is None else str(written),
    }
    lines = [str(found)]
    lines += [f"Decisions: {decisions}"] if decisions is not None else []
    lines += [f"Without the dropped rows: {written}"] if written is not None else []
    _answer(result, "\n".join(lines), as_json)


def check(path: Path, repair: bool, as_json: bool) -> None:
    """Look at every file, and with `repair` score again what is damaged or missing."""
    health = look(path, repair=repair)
    first = health
    if repair and not health.is_good:
        folder = Folder(path)
        how = _read_request(folder)
        pinned = {name: folder.manifest["compute"][name] for name in ("engine", "precision", "compile")}
        inputs = make_inputs(how)
        _note(f"Scoring {health.num_missing:,} rows again.")
        score_run(
            load(folder.fit, inputs.task), inputs.data, path, columns=_columns(inputs), compute=Compute(**pinned),
            features=folder.manifest["features"]["type"], how=folder.manifest["how"],
        )  # fmt: skip
        health = look(path)
    result = {
        "good": health.is_good,
        "rows": health.num_rows,
        "missing": health.num_missing,
        "faults": [asdict(fault) | {"path": str(fault.path)} for fault in health.faults],
    }
    if repair:
        result["repaired"] = [str(fault.path) for fault in first.faults]
    words = str(first) if not repair or first.is_good else f"{first}\nAfter repairing: {health}"
    _answer(result, words, as_json)
    if not health.is_good:
        sys.exit(1)


def info(path: Path, as_json: bool) -> None:
    """Describe a run."""
    folder = Folder(path)
    if not folder.exists and (folder.fit.exists() or folder.krylov.exists()):
        state = "fitted, not scored yet" if folder.fit.exists() else "the fit is not finished"
        step = "score" if folder.fit.exists() else "fit"
        result = {"run": str(path), "state": state}
        return _answer(result, f"{path}: {state}.\nNext: eigentrace {step} {path}", as_json)
    run = open_run(path)
    return _answer(_summary(run), _words(run), as_json)


def _summary(run: Run) -> dict[str, Any]:
    manifest = run.manifest
    result: dict[str, Any] = {
        "run": str(run.path),
        "rows": run.num_rows,
        "missing": run.num_missing,
        "coverage": manifest["coverage"],
        "method": manifest["method"]["name"],
        "features": manifest["features"],
        "compute": manifest["compute"],
        "shards": len(run.shards),
        "columns": list(run.columns),
        "versions": manifest["versions"],
    }
    if run.is_complete:
        ranking = run.self_influence()
        top = ranking.top(10)
        quantiles = {str(q): float(ranking.quantile(q)) for q in (0.05, 0.5, 0.95, 0.99)}
        ids = None if top.ids is None else [_plain(name) for name in top.ids]
        result["self_influence"] = {"quantiles": quantiles, "top_rows": top.rows.tolist(), "top_ids": ids}
        if "prediction" in run.columns:
            agree = run.column("label") == run.column("prediction")
            result["accuracy_on_given_labels"] = float(agree.mean())
    return result


def _words(run: Run) -> str:
    manifest = run.manifest
    lines = [
        f"{run.path}: {run.num_rows:,} examples, {manifest['method']['name']}, {manifest['coverage']}",
        f"features: {run.num_features} per example as {manifest['features']['type']} "
        f"(they hold {manifest['features']['hold']}), {len(run.shards)} shards",
    ]
    if not run.is_complete:
        return "\n".join([*lines, f"not complete: {run.num_missing:,} rows are missing"])
    ranking = run.self_influence()
    spread = ", ".join(f"{q:.0%} {ranking.quantile(q):.4g}" for q in (0.05, 0.5, 0.95, 0.99))
    lines += [f"self-influence below: {spread}", "highest self-influence:"]
    top, names = ranking.top(10), _class_names(run)
    columns: dict[str, Any] = {"row": top.rows, "score": top.scores}
    columns |= {} if top.ids is None else {"id": top.ids}
    for name in ("label", "prediction", "loss"):
        if name in run.columns:
            values = run.column(name)[top.rows]
            columns[name] = [names[int(v)] for v in values] if names and name != "loss" else values
    return "\n".join([*lines, show_table(columns)])


def _request(folder: Folder, config: Path | None, given: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Take the settings of this call; without any, those the run was begun with."""
    given["fit"]["tail"] = _number(given["fit"]["tail"])
    given["fit"]["coordinates"] = _number(given["fit"]["coordinates"])
    told = config is not None or any(value is not None for part in given.values() for value in part.values())
    stored = folder.path / _REQUEST
    if not told:
        return _read_request(folder)
    how = from_config(config, given)
    if stored.exists():
        held = _read_request(folder)
        if {key: held[key] for key in ("input", "fit")} != {key: how[key] for key in ("input", "fit")}:
            raise MismatchError(
                f"{folder.path} was begun with other settings ({stored}). Go on with `eigentrace fit {folder.path}` "
                "alone, or choose another directory; nothing was changed."
            )
    return how


def _read_request(folder: Folder) -> dict[str, Any]:
    stored = folder.path / _REQUEST
    try:
        return json.loads(stored.read_text())
    except FileNotFoundError:
        raise InputError(
            f"{folder.path} does not say which model and data it belongs to: {_REQUEST} is written by `eigentrace fit` "
            "with --input, or --model, --data and --task. A run made in Python is continued there."
        ) from None
    except ValueError as error:
        raise MismatchError(
            f"{stored} is damaged ({error}). Restore it, or begin again in another directory."
        ) from None


def _remember(folder: Folder, how: Mapping[str, Any]) -> None:
    stored = folder.path / _REQUEST
    if not stored.exists():
        others = sorted(path.name for path in folder.path.iterdir() if path.name != "lock")
        if others:
            raise InputError(
                f"{folder.path} holds other files ({', '.join(others[:3])}) and no run of this command. Choose a new "
                "directory: nothing was changed."
            )
        with replacing(stored) as partial:
            partial.write_text(json.dumps(how, indent=2) + "\n")


def _settings(fit: Mapping[str, Any]) -> dict[str, Any]:
    known = {
        "precision",
        "steps",
        "keep",
        "tail",
        "coordinates",
        "curvature",
        "positive_only",
        "sample",
        "spread",
        "seed",
    }
    return {name: value for name, value in fit.items() if name in known | {"compile", "reliability"}}


def _on(how: dict[str, Any], device: str | None) -> dict[str, Any]:
    return how if device is None or "function" in how["input"] else how | {"input": how["input"] | {"device": device}}


def _columns(inputs: Inputs) -> pa.Table | None:
    """Keep the dataset's own columns, under other names where a run has some of those names itself."""
    table = inputs.columns
    if table is None:
        return None
    if inputs.data.ids is not None and ID in table.column_names:
        table = table.drop_columns([ID])
    names = [f"given_{name}" if name in OWN_COLUMNS else name for name in table.column_names]
    return table.rename_columns(names)


def _classes(inputs: Inputs) -> list[str] | None:
    names = getattr(getattr(inputs.task.model, "config", None), "id2label", None)
    return [str(names[n]) for n in sorted(names)] if inputs.task.has_labels and names else None


def _class_names(run: Run) -> list[str] | None:
    return (run.manifest["how"] or {}).get("classes")


def _input_of(run: Run) -> dict[str, Any]:
    return (run.manifest["how"] or {}).get("input", {})


def _source(run: Run) -> Path:
    asked = _input_of(run)
    dataset = asked.get("resolved", {}).get("dataset") or asked.get("dataset")
    if dataset is None:
        raise InputError(
            "This run does not say which file its rows came from (its data comes from a function): leave --out away "
            "and use the decisions (--decisions), or eigentrace.export(decisions, source, out) in Python."
        )
    return Path(dataset)


def _queries(how: Mapping[str, Any], queries: Path) -> Any:
    if "function" in how["input"]:
        raise InputError(
            "New examples for a function's data are asked about in Python: run.explain(queries, task=...)."
        )
    changed: dict[str, Any] = {"dataset": str(queries.resolve()), "id": None, "split": None, "columns": []}
    resolved = {key: value for key, value in how["input"]["resolved"].items() if key != "dataset"}
    asked = {key: value for key, value in (how["input"] | changed).items() if value is not None}
    return make_inputs({"input": asked | {"resolved": resolved}}).data


def _amount(value: Any) -> Any:
    """Read a share as it was written, and a plain number as one of rows."""
    if isinstance(value, str) and not value.strip().endswith("%"):
        return _number(value)
    return value


def _number(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return value


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


@contextmanager
def _resumable(command: str) -> Iterator[None]:
    """Say how to go on after Ctrl-C; what was done is on the disk."""
    try:
        yield
    except KeyboardInterrupt:
        _stop(f"\nStopped. What was done is kept; go on with: {command}")


def _stop(message: str) -> NoReturn:
    _note(message)
    sys.exit(130)


def _answer(result: dict[str, Any], words: str, as_json: bool) -> None:
    print(json.dumps(result, indent=2, default=_plain) if as_json else words, flush=True)


def _note(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
