"""The implementation of the commands. Results are printed to standard output, everything else to standard error."""

import inspect
import json
import math
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from eigentrace.cleaning.decisions import Decisions, check_decisions_file
from eigentrace.cleaning.export import export
from eigentrace.cli import request
from eigentrace.cli.deciding import decide
from eigentrace.cli.example_texts import texts_of
from eigentrace.cli.showing import classes_of, num_sampled, show_explanation, show_fit, show_run
from eigentrace.disk.atomic import replacing, sweep
from eigentrace.disk.lock import locked
from eigentrace.disk.manifest import read_manifest
from eigentrace.errors import InputError
from eigentrace.fits.fitted import Fitted
from eigentrace.fits.load import load
from eigentrace.krylov.resume import progress_of
from eigentrace.loading import Inputs, check_source, warn_of_mistakes
from eigentrace.methods.arnoldi import Arnoldi
from eigentrace.methods.by_name import make_method
from eigentrace.methods.method import Method
from eigentrace.projection.engine import Compute
from eigentrace.runs.explain import Explanation
from eigentrace.runs.run import Run, open_run
from eigentrace.runs.score import score as score_run
from eigentrace.settings import counted
from eigentrace.store import Folder
from eigentrace.store.check import check as look
from eigentrace.store.columns import ID, TAKEN
from eigentrace.task.training_record import Training

# Settings of scoring that are not those of `Compute`.
_LIMITS = ("shard_rows", "shard_bytes", "shard_seconds", "features")


def fit(path: Path, config: Path | None, given: dict[str, dict[str, Any]], trust: bool, as_json: bool) -> None:
    """Fit into a new run, or resume an interrupted fit."""
    folder = Folder(path)
    how = request.resolve(path, config, given)
    method = make_method(how["fit"])
    # Nothing is written before model and data are loaded, so that a mistyped option creates no run.
    inputs = None if folder.fit.exists() else request.load_inputs(how, path, trust=trust)
    if inputs is not None:
        how = request.with_data_hashes(how, inputs, path, begun=folder.has_fit_begun)
    fitted: Fitted | None = None
    with locked(folder.path):
        request.write(path, how)
        sweep(folder.path)
        if inputs is not None and not folder.fit.exists():
            _note(f"{counted(len(inputs.data), 'example')}; {inputs.task.coverage}")
            warn_of_mistakes(inputs)
            fitted = _fitted(method, inputs, folder)
            if fitted.can.save:
                fitted.save(folder.fit)
            else:
                request.write(path, how | {request.UNSAVED: {"method": fitted.method["name"]}})
        if folder.krylov.exists():
            shutil.rmtree(folder.krylov)
    known = ("method", "coverage", "num_train", "num_products", "ending")
    if fitted is not None and not fitted.can.save:
        saved: dict[str, Any] = {"method": fitted.record(), "coverage": str(fitted.task.coverage)}
        saved["num_train"] = fitted.num_train
    else:
        saved = read_manifest(folder.fit, "fit")
    result: dict[str, Any] = {"run": str(path), "fit": str(folder.fit) if folder.fit.exists() else None}
    result |= {key: saved[key] for key in known if key in saved}
    result |= {} if (sampled := num_sampled(saved)) is None else {"num_sampled": sampled}
    _answer(result, f"{show_fit(saved)}\nNext: eigentrace score {path}", as_json)


def estimate(path: Path, config: Path | None, given: dict[str, dict[str, Any]], trust: bool, as_json: bool) -> None:
    """Print what a fit will take, without fitting; nothing is written."""
    how = request.resolve(path, config, given)
    method = make_method(how["fit"])
    if not isinstance(method, Arnoldi):
        raise InputError(f"--estimate supports the method Arnoldi, got {type(method).__name__}: fit without it.")
    inputs = request.load_inputs(how, path, trust=trust)
    _note(f"{counted(len(inputs.data), 'example')}; {inputs.task.coverage}")
    found = method.estimate(inputs.task, inputs.data)
    _answer(found.record(), f"The fit will take {found}.", as_json)


def _fitted(method: Method, inputs: Inputs, folder: Folder) -> Fitted:
    """Fit a method. If it can be resumed, its state is stored in the run; if it has coordinates, features are used."""
    resumes = "resume" in inspect.signature(method.fit).parameters
    more: dict[str, Any] = {"resume": folder.krylov} if resumes else {}
    fitted = method.fit(inputs.task, inputs.data, **more)
    return fitted.stored() if fitted.has_coordinates else fitted


def _fit_of(folder: Folder, how: Mapping[str, Any], inputs: Inputs) -> Fitted:
    """Load the fit of a run, or fit again if its method has nothing to save."""
    if not folder.fit.exists() and request.UNSAVED in how:
        return _fitted(make_method(how["fit"]), inputs, folder)
    return load(folder.fit, inputs.task)


def score(path: Path, given: Mapping[str, Any], device: str | None, trust: bool, as_json: bool) -> None:
    """Score every example into the run, or resume scoring."""
    folder = Folder(path)
    how = request.read(path)
    if not folder.fit.exists() and request.UNSAVED not in how:
        raise InputError(f"{path} contains no finished fit. Run first: eigentrace fit {path}")
    asked = dict(how["score"]) | {name: value for name, value in given.items() if value is not None}
    limits = {name: asked.pop(name) for name in _LIMITS if name in asked}
    compute = Compute(**asked)
    inputs = request.load_inputs(how, path, device, trust=trust)
    how = request.with_data_hashes(how, inputs, path) if "data" in how else how
    fitted = _fit_of(folder, how, inputs)
    known = how | {"classes": _classes(inputs)}
    run = score_run(fitted, inputs.data, path, columns=_columns(inputs), compute=compute, how=known, **limits)
    words = f"Scored {counted(run.num_rows, 'example')} into {counted(len(run.reader.shards), 'shard')} of {path}."
    _answer(_summary(run, path), f"{words}\nNext: eigentrace info {path}", as_json)


def explain(
    path: Path,
    rows: list[int],
    ids: list[str],
    queries: Path | None,
    options: dict[str, Any],
    exact: bool,
    training: Path | None,
    out: Path | None,
    texts: bool | None,
    trust: bool,
    as_json: bool,
) -> None:
    """Print the proponents and opponents of each query."""
    if bool(rows or ids) == (queries is not None):
        given = "--queries and rows of the run" if rows or ids else "neither --row, --id nor --queries"
        raise InputError(
            f"Got {given}. Pass either rows of the run to explain (--row 12, --id s012) or new examples (--queries "
            "file.csv)."
        )
    _check_choice("--exclude", options["exclude"], (None, "self", "duplicates"), "self, duplicates or none")
    _check_choice(
        "--normalize", options["normalize"], (None, "gradient", "features", "metric"), "gradient, features or metric"
    )
    if out is not None:
        _check_answers_file(out)
    run = _opened(path)
    rows = [*rows, *(run.rows_of(ids).tolist() if ids else [])]
    asked: Any = rows
    if exact or queries is not None or options["top_labels"] is not None:
        how = request.read(path)
        inputs = request.load_inputs(how, path, trust=trust)
        if training is not None:
            inputs.task.training = Training.from_checkpoint(training, inputs.task.model)
        # Attaching the data compares it with what was scored, which takes a pass over it: only if it is needed.
        data = inputs.data if exact or rows or not run.num_features else None
        run = (
            run.with_fit(_fit_of(run.folder, how, inputs), data)
            if request.UNSAVED in how
            else run.attached(inputs.task, data)
        )
        if queries is not None:
            asked = request.new_examples(how, path, queries)
    k = options.pop("k")
    found = run.explain(asked, k, rescore=None if exact else False if run.num_features else None, **options)
    if out is not None:
        _write_answers(found, out)
    result: dict[str, Any] = {"run": str(path), "how": found.how, "shortlist": found.shortlist, "unit": found.unit}
    result |= {} if found.refine is None else {"refine": found.refine}
    result |= {"classes": classes_of(run)}
    result |= {"rows": rows} if rows else {"queries": str(queries)}
    reader, remark = texts_of(run, texts)
    answers = found.table().to_pylist()
    if reader is not None and as_json:
        known = reader(np.array([answer["row"] for answer in answers], dtype=np.int64))
        answers = [answer | {"text": text} for answer, text in zip(answers, known, strict=True)]
    words = show_explanation(found, run, rows, reader) + (f"\n\n{remark}" if remark else "")
    words += "" if out is None else f"\n\nAnswers: {out}"
    _answer(result | {"answers": answers}, words, as_json)


def clean(
    path: Path,
    amounts: Mapping[str, Any],
    by: str,
    per_class: bool,
    chosen: Path | None,
    decisions: Path | None,
    out: Path | None,
    as_json: bool,
) -> None:
    """Make decisions, and write them and the dataset without the dropped rows."""
    if decisions is not None:
        _check_new(check_decisions_file(decisions))
    run = _opened(path)
    if out is not None:
        _refuse_function(run)
    told = {name: _amount(value) for name, value in amounts.items() if value is not None}
    found = decide(run, told, by, per_class, chosen)
    written = None if out is None else _written(run, found, out)
    if decisions is not None:
        found.write(decisions)
    result = {
        "run": str(path),
        "rows": len(found),
        "dropped": len(found.dropped),
        "kept": len(found.kept),
        "by": by if chosen is None else None,
        "dropped_rows": found.dropped.tolist(),
        "to_relabel": found.to_relabel.tolist(),
        "decisions": None if decisions is None else str(decisions),
        "out": None if written is None else str(written),
    }
    lines = [str(found)]
    lines += [f"Decisions: {decisions}"] if decisions is not None else []
    lines += [f"Dataset with the {counted(len(found.kept), 'kept row')}: {written}"] if written is not None else []
    if written is not None and len(found.to_relabel):
        lines += [
            f"Labels are copied unchanged: change those of the {counted(len(found.to_relabel), 'row')} to relabel "
            "yourself."
        ]
    if decisions is None and written is None:
        lines += ["Nothing was written: use --out to write the dataset without these rows, or --decisions for a list."]
    _answer(result, "\n".join(lines), as_json)


def check(path: Path, repair: bool, trust: bool, as_json: bool) -> None:
    """Check every file; with `repair`, score rows again that are damaged or missing."""
    folder = request.scored_folder(path)
    first = health = look(path, repair=repair)
    if repair and not health.is_good:
        how = request.read(path)
        pinned = {name: folder.manifest["compute"][name] for name in ("engine", "precision", "compile")}
        inputs = request.load_inputs(how, path, trust=trust)
        if "data" in how:
            request.with_data_hashes(how, inputs, path)
        if health.num_missing:
            _note(f"Scoring {counted(health.num_missing, 'row')} again.")
        score_run(
            _fit_of(folder, how, inputs), inputs.data, path, columns=_columns(inputs), compute=Compute(**pinned),
            features=folder.manifest["features"]["type"], how=folder.manifest["how"],
        )  # fmt: skip
        health = look(path)
    result = {
        "run": str(path),
        "good": health.is_good,
        "rows": health.num_rows,
        "missing": health.num_missing,
        "faults": [asdict(fault) | {"path": str(fault.path)} for fault in health.faults],
    }
    if repair:
        result["repaired"] = [str(fault.path) for fault in first.faults]
    words = str(first) if not repair or first.is_good else f"{first}\nAfter the repair: {health}"
    if not repair and not health.is_good:
        words += f"\nNext: eigentrace check {path} --repair"
    _answer(result, words, as_json)
    if not health.is_good:
        sys.exit(1)


def info(path: Path, texts: bool | None, as_json: bool) -> None:
    """Describe a run."""
    if state := request.unscored(path):
        result: dict[str, Any] = {"run": str(path), "state": state[0], "next": state[1]}
        if (known := progress_of(Folder(path).krylov)) is not None:
            result["products"] = {"saved": known[0], "total": known[1]}
        return _answer(result, f"{path}: {state[0]}.\nNext: {state[1]}", as_json)
    run = _opened(path)
    reader, remark = texts_of(run, texts) if run.is_complete else (None, "")
    summary, words = _summary(run, path), show_run(run, path, reader) + (f"{remark}\n" if remark else "")
    if reader is not None:
        own = summary["self_influence"]
        own["top_texts"] = reader(np.array(own["top_rows"]))
    return _answer(summary, f"{words}\n{_after(run, path)}", as_json)


def _opened(path: Path) -> Run:
    return open_run(request.scored_folder(path).path)


def _after(run: Run, path: Path) -> str:
    """Suggest the next commands for a run."""
    if not run.is_complete:
        return f"Next: eigentrace score {path}"
    row = run.self_influence().top(1).rows[0]
    rest = "--decisions decisions.parquet" if "function" in _input_of(run) else "--out a/new/file"
    clean_up = f"eigentrace clean {path} --drop 5% {rest}"
    if not run.reader.scores_pairs:
        return f"Next: {clean_up}"
    return f"Next: eigentrace explain {path} --row {row}{'' if run.num_features else ' --exact'}\n      {clean_up}"


def _summary(run: Run, path: Path) -> dict[str, Any]:
    manifest = run.manifest
    result: dict[str, Any] = {
        "run": str(path),
        "rows": run.num_rows,
        "missing": run.num_missing,
        "coverage": manifest["coverage"],
        "method": manifest["method"]["name"],
        "features": manifest["features"],
        "compute": manifest["compute"],
        "shards": len(run.reader.shards),
        "columns": list(run.columns),
        "classes": classes_of(run),
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


def _columns(inputs: Inputs) -> pa.Table | None:
    """Return the dataset's own columns; those with the name of a run's column are renamed to `given_...`."""
    table = inputs.columns
    if table is None:
        return None
    if inputs.data.ids is not None and ID in table.column_names:
        table = table.drop_columns([ID])
    taken = table.column_names
    return table.rename_columns([_given(name, taken) if name in TAKEN else name for name in taken])


def _given(name: str, taken: Sequence[str]) -> str:
    name = f"given_{name}"
    return _given(name, taken) if name in taken else name


def _classes(inputs: Inputs) -> list[str] | None:
    names = getattr(getattr(inputs.task.model, "config", None), "id2label", None)
    return [str(names[n]) for n in sorted(names)] if inputs.task.has_labels and names else None


def _input_of(run: Run) -> dict[str, Any]:
    return (run.manifest["how"] or {}).get("input", {})


def _refuse_function(run: Run) -> None:
    if "dataset" not in _input_of(run):
        raise InputError(
            f"--out needs the file that the rows of the run came from, but the data of {run.path} comes from "
            f"{_origin(run)}. Leave --out away and write the decisions (--decisions), or use "
            "eigentrace.export(decisions, source, out) in Python."
        )


def _origin(run: Run) -> str:
    function = _input_of(run).get("function")
    return "Python" if function is None else f"the function {function}"


def _written(run: Run, decisions: Decisions, out: Path) -> Path:
    """Write the kept rows, after checking that the dataset is still the one that was scored."""
    _check_new(out)
    source = check_source(run.manifest["how"], run.path)
    asked = _input_of(run)
    by_id = {"id": asked["id"]} if asked.get("id") else {}
    return export(decisions if by_id else decisions.mask, source, out, split=asked.get("split"), **by_id)


def _check_new(path: Path) -> None:
    if path.exists():
        raise InputError(f"{path} already exists and was not changed. Choose another path.")


def _check_choice(option: str, value: str | None, known: tuple[str | None, ...], words: str) -> None:
    if value not in known:
        raise InputError(f"{option} must be {words}, got {value!r}.")


def _check_answers_file(out: Path) -> None:
    _check_new(out)
    if out.suffix not in (".csv", ".parquet"):
        raise InputError(f"--out must end in .csv or .parquet, the formats that can be written, got {out.name}.")


def _write_answers(found: Explanation, out: Path) -> None:
    with replacing(out) as partial:
        write = pyarrow.csv.write_csv if out.suffix == ".csv" else pq.write_table
        write(found.table(), partial)


def _amount(value: Any) -> Any:
    """Return a share such as "5%" as it is, and convert other text to a number of rows."""
    return value if isinstance(value, str) and value.strip().endswith("%") else request.parse(value)


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _finite(value: Any) -> Any:
    """Replace numbers that are not finite by None, since JSON cannot store them."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    value = _plain(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _answer(result: dict[str, Any], words: str, as_json: bool) -> None:
    print(json.dumps(_finite(result), indent=2, allow_nan=False) if as_json else words, flush=True)


def _note(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
