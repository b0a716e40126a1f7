"""Which examples to keep and which to drop, and why: one row per example, written as a table that people can edit."""

import dataclasses
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq

from eigentrace.disk.atomic import appearing
from eigentrace.errors import InputError, MismatchError

# Rows whose reasons are put into words at a time.
_ROWS_AT_ONCE = 1 << 18
_RULE = b"eigentrace.rule"
WORDS = ("keep", "drop", "relabel")
"""What can be decided of a row."""
_RELABEL = 2
_NEW_LABEL = "new_label"
_COLUMNS = ("row", "decision", "score", "rank", "threshold", "label", "prediction", "reason")

# What is read as numbers, and what stands for a number that is missing.
_NUMBERS = {
    "row": (pa.int64(), -1),
    "score": (pa.float64(), np.nan),
    "rank": (pa.int64(), 0),
    "threshold": (pa.float64(), np.nan),
    "label": (pa.int64(), -1),
    "prediction": (pa.int64(), -1),
    _NEW_LABEL: (pa.int64(), -1),
}


@dataclass(frozen=True)
class Rule:
    """How rows were chosen, in words that reasons are made of."""

    by: str
    """Name of the score."""
    drops: str
    """What the score of a dropped row is, such as "among the highest 5%"."""
    keeps: str
    """What that of a kept one is."""
    is_share: bool
    """Whether a number of rows was asked for, so that rows of equal score may fall on both sides."""
    per_class: bool = False


@dataclass(frozen=True, eq=False)
class Decisions:
    """Which rows to drop, which to keep, and why. Made by `eigentrace.clean`, or read from a file."""

    mask: np.ndarray  # (N,) bool
    """True for rows to drop."""
    scores: np.ndarray  # (N,) float64
    ranks: np.ndarray  # (N,) int64
    """1 for the worst row of all, 0 for rows without a score. Equal scores are ranked in the order of their rows."""
    thresholds: np.ndarray  # (N,) float64
    """The score that decided: the one given, or that of the mildest dropped row; NaN if none is dropped."""
    rule: Rule | None = None
    """None if the file this was read from does not say."""
    labels: np.ndarray | None = None  # (N,) int64, negative for none
    predictions: np.ndarray | None = None  # (N,) int64
    ids: Any = None
    to_relabel: np.ndarray = dataclasses.field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """Rows that somebody decided to relabel, ascending. They are kept."""
    told: pa.ChunkedArray | None = None
    """The reasons, where they were read from a file."""
    given: np.ndarray | None = None  # (N,) int64, negative for none
    """Classes that people chose for rows to be relabelled, on the page or in the file's column `new_label`."""

    def __len__(self) -> int:
        return len(self.mask)

    @cached_property
    def dropped(self) -> np.ndarray:
        """Rows to drop, the worst first."""
        rows = np.flatnonzero(self.mask)
        ranks = self.ranks[rows]
        return rows[np.argsort(np.where(ranks > 0, ranks, len(self) + 1), kind="stable")]

    @cached_property
    def kept(self) -> np.ndarray:
        """Rows to keep, ascending."""
        return np.flatnonzero(~self.mask)

    @cached_property
    def suggested(self) -> np.ndarray:  # (N,) int64
        """The model's prediction where it differs from the label; -1 where it agrees, or where either is missing."""
        return suggestions(self.labels, self.predictions, len(self))

    @cached_property
    def new_labels(self) -> np.ndarray:  # (N,) int64
        """The class of each row to be relabelled: the one that somebody chose, else the suggested one; -1 elsewhere."""
        rows, found = self.to_relabel, np.full(len(self), -1, dtype=np.int64)
        found[rows] = self.suggested[rows]
        if self.given is not None:
            found[rows] = np.where(self.given[rows] >= 0, self.given[rows], found[rows])
        return found

    @property
    def num_unscored(self) -> int:
        """How many scores are NaN; such rows are kept."""
        return int(np.isnan(self.scores).sum())

    @property
    def num_tied(self) -> int:
        """How many rows are kept although a dropped row has the same score, because they come later."""
        return int(self._tied(slice(None)).sum())

    @property
    def reasons(self) -> pa.ChunkedArray:  # (N,) strings
        """Why each row is dropped or kept. Put into words when asked for."""
        if self.told is not None:
            return self.told
        starts = range(0, max(len(self), 1), _ROWS_AT_ONCE)
        return pa.chunked_array([self._reasons(slice(start, start + _ROWS_AT_ONCE)) for start in starts], pa.string())

    def relabel(self, rows: Sequence[int] | np.ndarray) -> "Decisions":
        """Return other decisions, in which some rows are kept and marked "relabel"; nothing is ever marked by itself.

        Args:
            rows: Rows with a suggested label.
        """
        rows = np.unique(np.asarray(rows, dtype=np.int64))
        wrong = rows[(rows < 0) | (rows >= len(self))]
        if not len(wrong):
            wrong = rows[self.suggested[rows] < 0]
        if len(wrong):
            raise InputError(
                f"Row {wrong[0]} has no suggested label, so it cannot be relabelled. Those of decisions.suggested >= "
                "0 can."
            )
        mask = self.mask.copy()
        mask[rows] = False
        return dataclasses.replace(self, mask=mask, to_relabel=np.union1d(self.to_relabel, rows), told=None)

    def table(self, start: int = 0, stop: int | None = None) -> pa.Table:
        """Return what is known about some rows: one row each, as `write` writes it."""
        start, stop, _ = slice(start, stop).indices(len(self))
        part = slice(start, stop)
        columns = {
            "row": pa.array(np.arange(start, stop)),
            "id": pa.nulls(stop - start, pa.string()) if self.ids is None else self._ids.slice(start, stop - start),
            "decision": pa.DictionaryArray.from_arrays(pa.array(self._codes(part)), list(WORDS)),
            "score": pa.array(self.scores[part]),
            "rank": _nullable(self.ranks, part, 1),
            "threshold": pa.array(self.thresholds[part]),
            "label": _nullable(self.labels, part, 0),
            "prediction": _nullable(self.predictions, part, 0),
            "suggested_label": _nullable(self.suggested, part, 0),
            "reason": self._reasons(part) if self.told is None else self.told.slice(start, stop - start),
        }
        columns |= {} if self.given is None else {_NEW_LABEL: _nullable(self.new_labels, part, 0)}
        rule = {_RULE: json.dumps(asdict(self.rule)).encode()} if self.rule else None
        return pa.table(columns).replace_schema_metadata(rule)

    def write(self, path: str | Path) -> Path:
        """Write one row per example to a new Parquet or CSV file, as its name ends; one that exists is left as it is.

        The column `decision` holds keep, drop or relabel. It may be changed by hand: `Decisions.read` goes by it. A CSV
        does not hold the rule.
        """
        path = check_decisions_file(path)
        make = pa.csv.CSVWriter if path.suffix == ".csv" else pq.ParquetWriter
        form = for_csv if path.suffix == ".csv" else lambda table: table
        with appearing(path) as partial, make(partial, form(self.table(0, 0)).schema) as writer:
            for start in range(0, len(self), _ROWS_AT_ONCE):
                writer.write_table(form(self.table(start, start + _ROWS_AT_ONCE)))
        return path

    @staticmethod
    def read(path: str | Path) -> "Decisions":
        """Read what `write` wrote, whether or not somebody has changed some decisions since."""
        table = _read(Path(path))
        words = table["decision"].cast(pa.string())
        wrong = pc.unique(words.filter(pc.invert(pc.is_in(words, pa.array(WORDS)))))
        rows, scores, ranks, thresholds, labels, predictions, given = (
            _numbers(path, table, name, kind, missing) for name, (kind, missing) in _NUMBERS.items()
        )
        if len(wrong) or not np.array_equal(rows, np.arange(len(rows))):
            what = f"decides {wrong[0].as_py()!r}" if len(wrong) else "does not list the rows 0, 1, 2, ... in order"
            raise MismatchError(f"{path} {what}. Every row needs one of {', '.join(WORDS)}: all rows, in their order.")
        known = table.schema.metadata or {}
        return Decisions(
            mask=pc.equal(words, "drop").to_numpy(),
            scores=scores,
            ranks=ranks,
            thresholds=thresholds,
            rule=Rule(**json.loads(known[_RULE])) if _RULE in known else None,
            labels=_unless_empty(table, "label", labels),
            predictions=_unless_empty(table, "prediction", predictions),
            ids=_unless_empty(table, "id", table["id"] if "id" in table.column_names else None),
            to_relabel=np.flatnonzero(pc.equal(words, "relabel").to_numpy()),
            told=table["reason"].cast(pa.string()),
            given=_unless_empty(table, _NEW_LABEL, given),
        )

    def __str__(self) -> str:
        dropped = int(self.mask.sum())
        parts = [f"Drops {dropped:,} of {len(self):,} rows"]
        if self.rule is not None:
            parts[0] += f": {self.rule.by} {self.rule.drops}{' of their label' if self.rule.per_class else ''}"
        if self.num_tied:
            parts.append(f"{self.num_tied:,} of equal score are kept because they come later")
        if self.num_unscored:
            parts.append(f"{self.num_unscored:,} are kept because their score is NaN")
        if len(self.to_relabel):
            parts.append(f"{len(self.to_relabel):,} are to be relabelled")
        return "; ".join(parts) + "."

    @cached_property
    def _ids(self) -> pa.ChunkedArray:
        ids = self.ids if isinstance(self.ids, pa.Array | pa.ChunkedArray) else pa.array(self.ids)
        return ids if isinstance(ids, pa.ChunkedArray) else pa.chunked_array([ids])

    def _tied(self, part: slice) -> np.ndarray:
        if self.rule is None or not self.rule.is_share:
            return np.zeros(len(self.mask[part]), dtype=bool)
        return ~self.mask[part] & (self.scores[part] == self.thresholds[part]) & (self._codes(part) != _RELABEL)

    def _codes(self, part: slice) -> np.ndarray:  # int8
        """Return the decisions on some rows as positions among the words for them."""
        codes = self.mask[part].astype(np.int8)
        start, stop, _ = part.indices(len(self))
        codes[self.to_relabel[(self.to_relabel >= start) & (self.to_relabel < stop)] - start] = _RELABEL
        return codes

    def _reasons(self, part: slice) -> pa.Array:
        rule = self.rule or Rule("score", "too high", "not too high", is_share=False)
        scores, mask = self.scores[part], self.mask[part]
        said = np.full(len(mask), f"{rule.by} is {rule.keeps}", dtype=object)
        said[self._tied(part)] = f"{rule.by} equals that of a dropped row, which comes first"
        said[np.isnan(scores)] = f"{rule.by} is NaN, so nothing can be said"
        said[self._codes(part) == _RELABEL] = "to be relabelled, as somebody decided"
        where = np.flatnonzero(mask)
        drops = np.char.add(np.char.mod(f"{rule.by.replace('%', '%%')} %.4g is ", scores[where]), rule.drops)
        if rule.per_class and self.labels is not None:
            drops = np.char.add(drops, np.char.mod(" of label %d", self.labels[part][where]))
        said[where] = drops
        at = np.flatnonzero(self.suggested[part] >= 0)
        if len(at) and self.labels is not None:
            pairs = np.char.mod("; the model predicts %d instead of ", self.suggested[part][at])
            said[at] = said[at] + np.char.add(pairs, np.char.mod("%d", self.labels[part][at])).astype(object)
        return pa.array(said, pa.string())


def check_decisions_file(path: str | Path) -> Path:
    """Refuse to write decisions to a file whose name says that it is something else."""
    path = Path(path)
    if path.suffix not in (".parquet", ".csv"):
        raise InputError(f"Decisions are written as Parquet or CSV: end {path.name!r} in .parquet or .csv.")
    return path


def for_csv(table: pa.Table) -> pa.Table:
    """Write decisions out as words: a CSV has no dictionaries."""
    at = table.column_names.index("decision")
    return table.set_column(at, "decision", table.column(at).cast(pa.string()))


def suggestions(labels: np.ndarray | None, predictions: np.ndarray | None, count: int) -> np.ndarray:  # (N,) int64
    """Return predictions that differ from the labels; -1 where they agree or where either is missing."""
    if labels is None or predictions is None:
        return np.full(count, -1, dtype=np.int64)
    return np.where((labels >= 0) & (predictions >= 0) & (labels != predictions), predictions, -1)


def _nullable(values: np.ndarray | None, part: slice, least: int) -> pa.Array:
    """Turn whole numbers into an Arrow array with nulls for those below the least one that means something."""
    if values is None:
        return pa.nulls(part.stop - part.start, pa.int64())
    return pa.array(values[part], pa.int64(), mask=values[part] < least)


def _numbers(path: str | Path, table: pa.Table, name: str, kind: pa.DataType, missing: float) -> np.ndarray:
    """Read a column that another tool may have written: nulls and NaN stand for what is missing."""
    column = table[name] if name in table.column_names else pa.nulls(len(table), kind)
    try:
        if pa.types.is_floating(column.type) and pa.types.is_integer(kind):
            column = pc.if_else(pc.is_nan(column), None, column)
        return pc.fill_null(column.cast(kind), missing).to_numpy(zero_copy_only=False)
    except pa.ArrowException as error:
        raise MismatchError(
            f"Column {name} of {path} must hold {'whole ' if pa.types.is_integer(kind) else ''}numbers ({error}). "
            "Classes are written as their numbers."
        ) from None


def _unless_empty(table: pa.Table, name: str, values: Any) -> Any:
    """Return what a column was read as; None where no row has a value in it."""
    return values if name in table.column_names and table[name].null_count < len(table) else None


def _read_csv(path: Path) -> pa.Table:
    """Read decisions in a CSV; ids are text if they are in quotes, as `write` puts those that are."""
    with path.open("rb") as file:
        file.readline()
        first = file.readline()
    texts = ("decision", "reason", "id") if re.match(rb'"?\d+"?,"', first) else ("decision", "reason")
    return pa.csv.read_csv(
        path,
        parse_options=pa.csv.ParseOptions(newlines_in_values=True),
        convert_options=pa.csv.ConvertOptions(column_types=dict.fromkeys(texts, pa.string())),
    )


def _read(path: Path) -> pa.Table:
    try:
        table = _read_csv(path) if path.suffix == ".csv" else pq.read_table(path)
    except FileNotFoundError:
        raise MismatchError(f"There are no decisions at {path}. Check the path.") from None
    except (pa.ArrowException, OSError) as error:
        raise MismatchError(f"{path} cannot be read as a table of decisions ({error}). Write it again.") from None
    lacking = [name for name in _COLUMNS if name not in table.column_names]
    if lacking:
        raise MismatchError(f"{path} has no column {lacking[0]}, so it does not hold decisions. Check the path.")
    return table
