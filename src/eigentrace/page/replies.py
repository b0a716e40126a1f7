"""Data for the page as JSON records, which the server sends and a report embeds."""

import csv
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from eigentrace.cleaning.decisions import Decisions, for_csv
from eigentrace.errors import InputError, UnsupportedError
from eigentrace.page.as_json import as_json, content_record
from eigentrace.page.columns import MOST_GROUPS
from eigentrace.page.index import SCORE, Index, Wanted
from eigentrace.page.journal import RELABEL, WORDS, Journal
from eigentrace.page.subject import Subject
from eigentrace.page.uploads import Posted
from eigentrace.runs.ranking import ranks_of
from eigentrace.store.columns import COLUMNS

if TYPE_CHECKING:
    from eigentrace.runs.explain import Explanation

_POINTS, _HIGHEST = 4000, 200
_MOST_VALUES = 50
_MOST_EIGENVALUES = 1000
_ROWS_AT_ONCE = 1 << 18
# Number of explanations in the cache, since users return to examples.
_CACHED = 128

Record = dict[str, Any]


class MissingRowError(InputError, LookupError):
    """Raised for a row number that is out of range."""


class Answers:
    """Answers all requests of the page about one run."""

    def __init__(self, subject: Subject) -> None:
        self.subject, self.columns = subject, subject.columns
        self.journal = Journal(
            subject.reader.folder, self.columns.num_rows, subject.reader.manifest["data"]["fingerprint"]
        )
        self.index = Index(self.columns, self._search, self.journal.state)
        self._computing = Lock()
        self._cached_overview = lru_cache(maxsize=1)(self._overview)
        self._cached_explain = lru_cache(maxsize=_CACHED)(self._explain)

    def _search(self, words: str) -> np.ndarray | None:
        show = self.subject.show
        return None if show is None else show.search(words)

    def overview(self) -> Record:
        """Describe the run as a whole."""
        subject = self.subject
        return self._cached_overview() | {
            "kind": subject.kind,
            "classes": subject.classes,
            "live": subject.live,
            "note": subject.trouble or None,
            "decisions": self.journal.counts(),
            "token": None,
        }

    def _overview(self) -> Record:
        subject, columns = self.subject, self.columns
        reader, manifest = subject.reader, subject.reader.manifest
        values = reader.eigenvalues[:_MOST_EIGENVALUES]
        return as_json(
            {
                "run": subject.name,
                "rows": columns.num_rows,
                "missing": columns.num_missing,
                "model": {
                    "coverage": manifest["coverage"],
                    "features": manifest["features"]["count"],
                    "method": manifest["method"]["name"],
                    "delta": reader.delta,
                    "reliability": reader.reliability,
                    "calibration": reader.calibration,
                    "precision": manifest["compute"]["precision"],
                    "created": manifest["created"],
                    "versions": manifest["versions"],
                },
                "unit": "nats" if manifest["has_curvature"] else None,
                "num_train": manifest["num_train"],
                "spectrum": values,
                "columns": [self._column(name) for name in columns.names],
                "histogram": self.index.histogram(SCORE),
                "scatter": self._scatter(),
                "by_class": self._by_class(),
                "group_columns": columns.grouping,
            }
        )

    def _column(self, name: str) -> Record:
        kind, values = self.columns.kind_of(name), None
        if kind == "label" or name in self.columns.grouping:
            values = [value for value in self.columns.coded(name)[1] if value is not None]
            values = (
                sorted(values, key=lambda value: (str(type(value)), value)) if len(values) <= _MOST_VALUES else None
            )
        about = {"label": self.columns.label_of(name), "meaning": self.columns.meaning_of(name)}
        return {"name": name, **about, "kind": kind, "scored": name in COLUMNS, "values": values}

    def _scatter(self) -> list[list[Any]]:
        rows = self.index.scatter(_POINTS, _HIGHEST)
        parts: list[Any] = [rows, self.columns.number(SCORE)[rows], self.columns.number("loss")[rows]]
        labels = self.columns.or_missing("label")
        parts += [[None] * len(rows) if labels is None else labels[rows], self.index.disagreeing[rows].astype(int)]
        return [list(point) for point in zip(*parts, strict=True)]

    def _by_class(self) -> list[Record]:
        if self.columns.or_missing("label") is None:
            return []
        kept = ("count", "mean_self_influence", "share_of_top", "disagree")
        found = [group for group in self.index.groups("label") if group["value"] is not None]
        return [{"label": group["value"]} | {name: group[name] for name in kept} for group in found[:MOST_GROUPS]]

    def histogram(self, column: str) -> Record:
        """Return the histogram of a numeric column."""
        return as_json(self.index.histogram(column))

    def groups(self, column: str) -> Record:
        """Aggregate scores per value of a column."""
        return {"groups": as_json(self.index.groups(column))}

    def examples(self, wanted: Wanted, offset: int, limit: int) -> Record:
        """Return one page of the rows that match a query."""
        found = self.index.matching(wanted)
        return {"total": len(found), "offset": offset, "rows": self.rows(found[offset : offset + limit].tolist())}

    def example(self, row: int) -> Record:
        """Return one row with its full content, its rank and its quantile."""
        rank, quantile = self.index.place(self.checked(row))
        return self.rows([row], whole=True)[0] | {"rank": rank, "quantile": quantile}

    def rows(self, rows: Sequence[int], *, whole: bool = False) -> list[Record]:
        """Return rows as records with columns, decision and content; texts are truncated unless `whole`."""
        codes, _ = self.journal.state()
        found = self.columns.of(np.asarray(rows, dtype=np.int64))
        for record, content in zip(found, self._contents(rows, whole), strict=True):
            code = int(codes[record["row"]])
            record["decision"] = WORDS[code] if code else None
            record["new_label"] = self._new_label(record["row"]) if code == RELABEL else None
            record["content"] = content
        return as_json(found)

    def _new_label(self, row: int) -> int | None:
        predictions = self.columns.or_missing("prediction")
        named = self.journal.new_label(row)
        return int(predictions[row]) if named is None and predictions is not None else named

    def _contents(self, rows: Sequence[int], whole: bool) -> list[Record]:
        show = self.subject.show
        if show is None:
            return [{"kind": "none"} for _ in rows]
        if show.kind == "image":
            return [{"kind": "image", "src": f"/api/image/{row}"} for row in rows]
        order = np.argsort(np.asarray(rows, dtype=np.int64), kind="stable")
        try:
            # In row order, so that a large file is read sequentially.
            found = dict(zip(order.tolist(), show([rows[at] for at in order]), strict=True))
            return [content_record(found[at], row, whole) for at, row in enumerate(rows)]
        except Exception as error:  # a custom renderer may raise any exception; the numbers are still displayed
            return [{"kind": "none", "error": f"{type(error).__name__}: {error}"[:500]} for _ in rows]

    def image(self, row: int) -> bytes:
        """Return an image example as PNG."""
        show = self.subject.show
        png = None if show is None else show([self.checked(row)])[0].png
        if png is None:
            raise UnsupportedError(f"Row {row} has no image: the examples of this run are not images.")
        return png

    def checked(self, row: int) -> int:
        """Return the row; raise MissingRowError if it is out of range."""
        if not 0 <= row < self.columns.num_rows:
            raise MissingRowError(f"There is no row {row}: rows are 0 to {self.columns.num_rows - 1}.")
        return row

    def explain(
        self, row: int, k: int, normalize: str | None, same_label: bool, exclude: str | None, exact: bool = False
    ) -> Record:
        """Return the proponents and opponents of a row, by stored features or, if `exact`, with the model."""
        found = self._cached_explain(self.checked(row), k, normalize, same_label, exclude, exact)
        return self._sides(found) | {"query": self.rows([row])[0]}

    def _explain(self, row: int, k: int, *options: Any) -> "Explanation":
        normalize, same_label, exclude, exact = options
        with self._computing:
            run = self.subject.attached() if exact and self.subject.live else self.subject.run
            return run.explain(
                row, k, normalize=normalize, same_label=same_label, exclude=exclude, rescore=self._rescore(exact)
            )

    def _rescore(self, exact: bool) -> bool | None:
        return None if exact or not self.subject.reader.num_features else False

    def _sides(self, found: "Explanation") -> Record:
        result: Record = {"how": found.how, "shortlist": found.shortlist, "unit": found.unit}
        for name, side in (("proponents", found.proponents), ("opponents", found.opponents)):
            is_present = side.rows[0] >= 0  # -1 fills up sides with fewer than k rows
            records = self.rows(side.rows[0][is_present].tolist())
            scores = as_json(side.scores[0][is_present])
            result[name] = [record | {"score": score} for record, score in zip(records, scores, strict=True)]
        return result

    def ask(self, asked: Mapping[str, Any], k: int, normalize: str | None, exact: bool = False) -> Record:
        """Return the proponents and opponents of a new example."""
        if not self.subject.live:
            raise UnsupportedError(
                "The model is not loaded, so only examples of the run can be explained. Start the page with the model: "
                "eigentrace serve RUN --model."
            )
        posted = Posted.of(asked)
        with self._computing:
            inputs = self.subject.inputs
            if inputs.read is None:
                raise UnsupportedError(
                    "The function that made the inputs of this run returns Inputs without `read`, which prepares new "
                    "examples. Return Inputs(..., read=function), or explain new examples in Python."
                )
            from eigentrace.projection.engine import Compute
            from eigentrace.store.write import measured

            data, run = inputs.read([posted.example]), self.subject.attached()
            known = measured(run.fitted, data, Compute(precision=self.subject.reader.manifest["compute"]["precision"]))  # type: ignore[arg-type]
            found = run.explain(data, k, normalize=normalize, exclude="self", rescore=self._rescore(exact))
        query: Record = {
            "row": None,
            "id": None,
            "content": posted.content,
            "decision": None,
            "new_label": None,
            "columns": {},
        }
        for name, column in COLUMNS.items():
            held = known.get(column.stored_as)
            if held is not None and held.is_floating_point():
                held = held.float()  # NumPy has no bfloat16
            query[name] = None if held is None else column.read(held.numpy())[0].item()
        return self._sides(found) | {"query": as_json(query)}

    def decisions(self) -> Record:
        """Return the counts of decisions and the log of the latest ones."""
        return {"counts": self.journal.counts(), "log": as_json(self.journal.log())}

    def decide(self, asked: Mapping[str, Any]) -> Record:
        """Record a decision on given rows, or on all rows that a rule selects."""
        decision, new_label = str(asked.get("decision")), asked.get("new_label")
        rule = _rule(asked["rule"]) if asked.get("rule") is not None else None
        if (rule is None) == (asked.get("rows") is None):
            given = "neither" if rule is None else "both"
            raise InputError(f"A decision needs either rows or a rule that selects them, got {given}.")
        rows = self.index.beyond(rule) if rule is not None else _rows(asked["rows"])
        if decision == "relabel":
            self._check_label(rows, new_label)
        changed = self.journal.decide(rows, decision, new_label, rule)
        return {"changed": changed, "counts": self.journal.counts()}

    def _check_label(self, rows: np.ndarray, new_label: Any) -> None:
        most = len(self.subject.classes) if self.subject.classes else 2**31
        if new_label is not None and not (_is_whole(new_label) and 0 <= new_label < most):
            raise InputError(f"new_label must be a class number from 0 to {most - 1}, got {new_label!r}.")
        if new_label is None:
            inside = rows[(rows >= 0) & (rows < self.columns.num_rows)]
            without = inside[~self.index.disagreeing[inside]]
            if len(without):
                raise InputError(
                    f"There is no prediction that differs from the label of row {without[0]}: say which class it is "
                    "relabelled as (new_label)."
                )

    def undo(self) -> Record:
        """Undo the last decision."""
        return {"changed": self.journal.undo(), "counts": self.journal.counts()}

    def export(self, form: str, folder: Path) -> Path:
        """Write the decisions to a file, in the format of `eigentrace.clean`, with new labels."""
        decisions = self._as_decisions()
        path = folder / {"parquet": "decisions.parquet", "csv": "decisions.csv", "rows": "rows-to-keep.txt"}[form]
        if form == "rows":
            with path.open("w", newline="") as file:
                csv.writer(file, lineterminator="\n").writerows([row] for row in decisions.kept.tolist())
            return path
        schema = _exported(decisions, 0, 0, form).schema
        make = pq.ParquetWriter if form == "parquet" else pyarrow.csv.CSVWriter
        with make(path, schema) as writer:
            for start in range(0, len(decisions), _ROWS_AT_ONCE):
                writer.write_table(_exported(decisions, start, start + _ROWS_AT_ONCE, form))
        return path

    def _as_decisions(self) -> Decisions:
        codes, _ = self.journal.state()
        said, words = self.journal.reasons()
        scores = self.columns.number(SCORE).astype(np.float64)
        classes = [self.columns.or_missing(name) for name in ("label", "prediction")]
        labels, predictions = (None if held is None else held.astype(np.int64) for held in classes)
        reasons = pa.DictionaryArray.from_arrays(pa.array(said), pa.array(words, pa.string())).cast(pa.string())
        to_relabel, given = np.flatnonzero(codes == RELABEL), np.full(len(codes), -1, dtype=np.int64)
        for row in to_relabel.tolist():
            given[row] = -1 if (label := self._new_label(row)) is None else label
        return Decisions(
            mask=codes == WORDS.index("drop"),
            scores=scores,
            ranks=ranks_of(scores),
            thresholds=np.broadcast_to(np.nan, scores.shape),
            labels=labels,
            predictions=predictions,
            ids=self.columns.ids,
            to_relabel=to_relabel,
            told=pa.chunked_array([reasons]),
            given=given,
        )


def _exported(decisions: Decisions, start: int, stop: int, form: str) -> pa.Table:
    table = decisions.table(start, stop)
    return for_csv(table) if form == "csv" else table


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _rows(given: Any) -> np.ndarray:
    if not isinstance(given, list) or not all(_is_whole(row) and abs(row) < 2**62 for row in given):
        raise InputError(f"rows must be a list of integers, got {str(given)[:100]!r}.")
    return np.array(given, dtype=np.int64)


def _rule(given: Any) -> Record:
    known = {"by", "above", "below", "label"}
    if not isinstance(given, dict) or not given.keys() <= known:
        raise InputError(
            f"rule must be an object with keys among {', '.join(sorted(known))}, got {str(given)[:100]!r}."
        )
    rule = {"by": SCORE} | {name: value for name, value in given.items() if value is not None}
    for name in ("above", "below"):
        value = rule.get(name, 0.0)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise InputError(f"{name} must be a finite number, got {value!r}.")
    if not isinstance(rule["by"], str) or not _is_whole(rule.get("label", 0)):
        raise InputError(
            f"A rule needs a column name as `by` and an integer as `label`, got by={rule['by']!r} and "
            f"label={rule.get('label')!r}."
        )
    return rule
