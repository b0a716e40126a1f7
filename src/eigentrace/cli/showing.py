"""Results as text for a terminal."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eigentrace.cli.example_texts import Texts
from eigentrace.runs.explain import EXACT, RESCORED, Explanation, Side
from eigentrace.runs.run import Run
from eigentrace.settings import counted

_WIDEST = 48
_SHARES = (0.05, 0.5, 0.95, 0.99)
# Calibrations below this are not worth a line: they are estimates.
_NOTICEABLE = 1.1
_UNITS = {
    None: "",
    "nats": " in nats: by how much the loss would rise without the example",
    "cosine": " as cosines",
}


def classes_of(run: Run) -> list[str] | None:
    """Return the model's names of its classes, if it has any."""
    return (run.manifest["how"] or {}).get("classes")


def show_table(columns: Mapping[str, Any]) -> str:
    """Format columns as a table, with numbers right-aligned and text left-aligned."""
    cells = {name: [_cell(value) for value in values] for name, values in columns.items()}
    lines = []
    for row in [list(columns), *zip(*cells.values(), strict=True)]:
        parts = []
        for (name, values), cell in zip(columns.items(), row, strict=True):
            width = max(len(name), *(len(other) for other in cells[name]))
            parts.append(cell.ljust(width) if _are_words(values) else cell.rjust(width))
        lines.append("  ".join(parts).rstrip())
    return "\n".join(lines)


def show_fit(saved: Mapping[str, Any]) -> str:
    """Describe a finished fit."""
    name, sampled = saved["method"]["name"], num_sampled(saved)
    done = counted(saved["num_products"], "curvature product") if "num_products" in saved else name
    part = "" if sampled in (None, saved["num_train"]) else f"{sampled:,} of "
    return f"Fitted {saved['coverage']}: {done} on {part}{counted(saved['num_train'], 'training example')}."


def num_sampled(saved: Mapping[str, Any]) -> int | None:
    """Return the number of examples that the curvature of a fit is averaged over; None if its method has no sample."""
    if "sample" not in saved["method"]:
        return None
    return min(saved["method"]["sample"] or saved["num_train"], saved["num_train"])


def show_run(run: Run, path: Path, texts: Texts | None = None) -> str:
    """Describe a run, with the examples of highest self-influence and their texts if available."""
    manifest, features = run.manifest, run.manifest["features"]
    lines = [
        f"{path}: {counted(run.num_rows, 'example')}, {manifest['method']['name']}, {manifest['coverage']}",
        f"{counted(run.num_features, 'feature')} per example ({features['hold']}) as {features['type']}, in "
        f"{counted(len(run.reader.shards), 'shard')}",
    ]
    if not run.is_complete:
        return "\n".join([*lines, f"incomplete: {run.num_missing:,} of {run.num_rows:,} examples are not scored yet"])
    if "prediction" in run.columns:
        agree = (run.column("label") == run.column("prediction")).mean()
        lines.append(f"the model predicts the given label of {agree:.1%} of the examples")
    ranking = run.self_influence()
    spread = ", ".join(f"{ranking.quantile(q):.4g} ({q:.0%})" for q in _SHARES)
    lines += [f"quantiles of self-influence: {spread}", *_calibration(run), "", "highest self-influence"]
    top, names = ranking.top(10), classes_of(run)
    columns: dict[str, Any] = {"row": top.rows}
    columns |= {} if top.ids is None else {"id": top.ids}
    columns |= {"score": top.scores}
    for name in ("label", "prediction", "loss"):
        if name in run.columns:
            values = run.column(name, top.rows)
            columns[name] = _named(values, names) if name != "loss" else values
    columns |= {} if texts is None else {"text": texts(top.rows)}
    return "\n".join([*lines, show_table(columns), ""])


def show_explanation(found: Explanation, run: Run, rows: Sequence[int], texts: Texts | None = None) -> str:
    """Show the proponents and opponents of every query, with their texts if available."""
    classes = classes_of(run)
    exact = "" if found.how in (EXACT, RESCORED) else "; --exact loads the model"
    lines = [f"Scores{_UNITS[found.unit]} ({found.told}{exact})", *(_calibration(run) if found.unit == "nats" else [])]
    for query in range(len(found.proponents.rows)):
        name = _about(run, rows[query], classes) if rows else f"query {query}"
        if rows and texts is not None:
            lines += ["", f"Row {rows[query]}: {_cell(texts(np.array([rows[query]]))[0])}"]
        for title, side in (("Proponents", found.proponents), ("Opponents", found.opponents)):
            lines += ["", f"{title} of {name}", _show_side(side, query, classes, texts)]
    return "\n".join(lines)


def _calibration(run: Run) -> list[str]:
    """Say by which factor scores in nats are too small for training to convergence, if that was measured."""
    ratio = run.reader.calibration
    if ratio is None or ratio < _NOTICEABLE:
        return []
    return [f"by the measured curvature, a converged model has about {ratio:.2g} times these nats (docs/tail.md)"]


def _about(run: Run, row: int, classes: Sequence[str] | None) -> str:
    this, ids = np.array([row]), run.reader.ids
    known = [] if ids is None else [str(ids.of(this)[0])]
    for name in ("label", "prediction"):
        if name in run.columns:
            known.append(f"{name} {_named(run.column(name, this), classes)[0]}")
    return f"row {row}" + (f" ({', '.join(known)})" if known else "")


def _show_side(side: Side, query: int, classes: Sequence[str] | None, texts: Texts | None) -> str:
    there = side.rows[query] >= 0
    if not there.any():
        return "none among the eligible examples"
    columns: dict[str, Any] = {"row": side.rows[query][there]}
    if side.ids is not None:
        columns["id"] = side.ids[query][there]
    columns["score"] = side.scores[query][there]
    for name, values in (("label", side.labels), ("prediction", side.predictions)):
        if values is not None:
            columns[name] = _named(values[query][there], classes)
    columns |= {} if texts is None else {"text": texts(side.rows[query][there])}
    return show_table(columns)


def _named(numbers: np.ndarray, classes: Sequence[str] | None) -> list[Any]:
    """Replace classes by their names; a number without a name, such as an unknown label, is kept."""
    if not classes:
        return numbers.tolist()
    return [classes[n] if 0 <= n < len(classes) else str(n) for n in numbers.tolist()]


def _are_words(values: Sequence[Any]) -> bool:
    return all(isinstance(value, str) for value in values)


def _cell(value: Any) -> str:
    if isinstance(value, float | np.floating):
        return f"{value:.4g}"
    text = " ".join(str(value).split())
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 1]}…"
