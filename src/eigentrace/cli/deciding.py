"""The decisions of `eigentrace clean`: from a rule, or from a file written by the page, by a report or by hand."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv

from eigentrace.cleaning.decisions import WORDS, Decisions
from eigentrace.cleaning.thresholds import clean
from eigentrace.errors import InputError, MismatchError
from eigentrace.runs.run import Run
from eigentrace.store import Folder
from eigentrace.store.same_data import id_difference, label_difference, stored_ids

# Columns that a report exports, for the rows with a decision only.
_OF_REPORT = {"row": pa.int64(), "id": pa.string(), "decision": pa.string(), "new_label": pa.int64()}


def decide(run: Run, amounts: Mapping[str, Any], by: str, per_class: bool, chosen: Path | None) -> Decisions:
    """Return the decisions made by a rule, or read them from the file `chosen`."""
    if chosen is None:
        return clean(run, by=by, per_class=per_class, **amounts)
    if amounts or per_class or by != "self_influence":
        raise InputError(
            f"--from {chosen} already contains the decisions: leave out --drop, --keep, --above, --below, --by and "
            "--per-class."
        )
    found = _of_report(run, chosen) if _is_of_report(chosen) else Decisions.read(chosen)
    if other := _difference(run, found):
        raise MismatchError(f"{chosen} does not belong to the run at {run.path}: {other}. Check the path.")
    return found


def _difference(run: Run, found: Decisions) -> str | None:
    """Describe how decisions do not match the rows of a run; None if they match."""
    if len(found) != run.num_rows:
        return f"it has decisions for {len(found):,} rows, but the run has {run.num_rows:,}"
    held = stored_ids(Folder(run.path))
    other = id_difference(held, found.ids) if held is not None and found.ids is not None else None
    if other is None and found.labels is not None and "label" in run.columns:
        labels = np.where(found.labels >= 0, found.labels, run.column("label"))
        other = label_difference(Folder(run.path), labels)
    return other


def _is_of_report(path: Path) -> bool:
    if path.suffix != ".csv" or not path.is_file():
        return False
    with path.open("rb") as file:
        return file.readline().strip() == ",".join(_OF_REPORT).encode()


def _of_report(run: Run, path: Path) -> Decisions:
    """Read the decisions that a report exported; rows that it does not list are kept."""
    try:
        table = pa.csv.read_csv(path, convert_options=pa.csv.ConvertOptions(column_types=_OF_REPORT))
    except pa.ArrowException as error:
        raise MismatchError(f"{path} cannot be read as a table of decisions ({error}). Export it again.") from None
    ids, (rows, words) = run.ids, (table[name].to_pylist() for name in ("row", "decision"))
    for row, word, name in zip(rows, words, table["id"].to_pylist(), strict=True):
        if word not in WORDS or row is None or not 0 <= row < run.num_rows:
            raise MismatchError(
                f"{path} contains the decision {word!r} for row {row}. Decisions must be one of {', '.join(WORDS)}, "
                f"for rows from 0 to {run.num_rows - 1}: check the path, or export it again."
            )
        known = "" if ids is None or ids[row] is None else str(ids[row])
        if name.removeprefix("'") != known.removeprefix("'"):  # a report quotes ids that look like a formula
            raise MismatchError(
                f"{path} does not belong to the run at {run.path}: the id of row {row} is {known!r} in the run and "
                f"{name!r} in the file. Check the path."
            )
    codes, given = np.zeros(run.num_rows, dtype=np.int8), np.full(run.num_rows, -1, dtype=np.int64)
    codes[rows] = [WORDS.index(word) for word in words]
    given[rows] = table["new_label"].fill_null(-1).to_numpy()
    said = np.full(run.num_rows, "not decided on", dtype=object)
    said[rows] = [f"marked {word}: in a report" for word in words]
    return dataclasses.replace(
        clean(run, drop=0),
        mask=codes == WORDS.index("drop"),
        rule=None,
        to_relabel=np.flatnonzero(codes == WORDS.index("relabel")),
        told=pa.chunked_array([pa.array(said, pa.string())]),
        given=given,
    )
