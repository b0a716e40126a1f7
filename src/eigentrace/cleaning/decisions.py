"""Decisions: keep, drop or relabel each example, with reasons, stored as a table that can be edited."""

import dataclasses
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq

from eigentrace.disk.atomic import appearing
from eigentrace.disk.bounded import check_regular
from eigentrace.disk.parquet import BoundedParquet
from eigentrace.errors import InputError, MismatchError
from eigentrace.settings import counted

# Rows whose reasons are formatted at a time.
_ROWS_AT_ONCE = 1 << 18
_RULE = b"eigentrace.rule"
WORDS = ("keep", "drop", "relabel")
"""The possible decisions."""
_RELABEL = 2
_NEW_LABEL = "new_label"
_COLUMNS = ("row", "decision", "score", "rank", "threshold", "label", "prediction", "reason")

# Columns that are read as numbers: their type, and the value for missing numbers.
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
    """The rule by which rows were chosen, as phrases for the reasons."""

    by: str
    """Name of the score."""
    drops: str
    """Description of a dropped row's score, such as "among the highest 5%"."""
    keeps: str
    """Description of a kept row's score."""
    is_share: bool
    """Whether the rule is a share or number of rows, so that rows with equal scores can be both dropped and kept."""
    per_class: bool = False


@dataclass(frozen=True, eq=False)
class Decisions:
    """Decisions to keep, drop or relabel each row, with reasons; made by `eigentrace.clean` or read from a file."""

    mask: np.ndarray  # (N,) bool
    """True for rows to drop."""
    scores: np.ndarray  # (N,) float64
    ranks: np.ndarray  # (N,) int64
    """From 1 for the first row to drop; 0 for rows without a score. Ties are in row order."""
    thresholds: np.ndarray  # (N,) float64
    """The threshold: the given one, or the score of the last row dropped; NaN if none is dropped."""
    rule: Rule | None = None
    """None if the decisions were read from a file without it."""
    labels: np.ndarray | None = None  # (N,) int64, negative for none
    predictions: np.ndarray | None = None  # (N,) int64
    ids: Any = None
    to_relabel: np.ndarray = dataclasses.field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """Rows marked "relabel" by a user, ascending. They are kept."""
    told: pa.ChunkedArray | None = None
    """The reasons, if they were read from a file."""
    given: np.ndarray | None = None  # (N,) int64, negative for none
    """New labels chosen by a user for rows to relabel, on the page or in the column `new_label` of the file."""

    def __len__(self) -> int:
        return len(self.mask)

    @cached_property
    def dropped(self) -> np.ndarray:
        """Rows to drop, in the order of their ranks."""
        rows = np.flatnonzero(self.mask)
        ranks = self.ranks[rows]
        return rows[np.argsort(np.where(ranks > 0, ranks, len(self) + 1), kind="stable")]

    @cached_property
    def kept(self) -> np.ndarray:
        """Rows to keep, ascending."""
        return np.flatnonzero(~self.mask)

    @cached_property
    def suggested(self) -> np.ndarray:  # (N,) int64
        """The model's prediction where it differs from the label; -1 where both are equal or either is missing."""
        return suggestions(self.labels, self.predictions, len(self))

    @cached_property
    def new_labels(self) -> np.ndarray:  # (N,) int64
        """The new class of each row to relabel: the one chosen by a user, else the suggested one; -1 elsewhere."""
        rows, found = self.to_relabel, np.full(len(self), -1, dtype=np.int64)
        found[rows] = self.suggested[rows]
        if self.given is not None:
            found[rows] = np.where(self.given[rows] >= 0, self.given[rows], found[rows])
        return found

    @property
    def num_unscored(self) -> int:
        """Number of rows whose score is NaN; they are kept."""
        return int(np.isnan(self.scores).sum())

    @property
    def num_tied(self) -> int:
        """Number of kept rows whose score equals that of a dropped row; of equal scores, earlier rows are dropped."""
        return int(self._tied(slice(None)).sum())

    @property
    def reasons(self) -> pa.ChunkedArray:  # (N,) strings
        """The reason for each decision, as text formatted on access."""
        if self.told is not None:
            return self.told
        starts = range(0, max(len(self), 1), _ROWS_AT_ONCE)
        return pa.chunked_array([self._reasons(slice(start, start + _ROWS_AT_ONCE)) for start in starts], pa.string())

    def relabel(self, rows: Sequence[int] | np.ndarray) -> "Decisions":
        """Return new decisions in which the given rows are kept and marked "relabel"; no row is marked automatically.

        Args:
            rows: Rows with a suggested label.
        """
        rows = np.unique(np.asarray(rows, dtype=np.int64))
        wrong = rows[(rows < 0) | (rows >= len(self))]
        if not len(wrong):
            wrong = rows[self.suggested[rows] < 0]
        if len(wrong):
            raise InputError(
                f"Row {wrong[0]} has no suggested label, so it cannot be relabelled. Rows with decisions.suggested >= "
                "0 can."
            )
        mask = self.mask.copy()
        mask[rows] = False
        return dataclasses.replace(self, mask=mask, to_relabel=np.union1d(self.to_relabel, rows), told=None)

    def table(self, start: int = 0, stop: int | None = None) -> pa.Table:
        """Return rows `start` to `stop` (exclusive) as the table that `write` writes."""
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
        """Write one row per example to a new Parquet or CSV file, by its suffix; an existing file is never overwritten.

        The column `decision` contains keep, drop or relabel. It can be edited: `Decisions.read` uses its values. A CSV
        file does not contain the rule.
        """
        path = check_decisions_file(path)
        make = pa.csv.CSVWriter if path.suffix == ".csv" else pq.ParquetWriter
        form = for_csv if path.suffix == ".csv" else lambda table: table
        options: dict[str, Any] = {} if path.suffix == ".csv" else {"write_page_checksum": True}
        with appearing(path) as partial, make(partial, form(self.table(0, 0)).schema, **options) as writer:
            for start in range(0, len(self), _ROWS_AT_ONCE):
                writer.write_table(form(self.table(start, start + _ROWS_AT_ONCE)))
        return path

    @staticmethod
    def read(path: str | Path) -> "Decisions":
        """Read decisions from a file written by `write`, which may have been edited."""
        table = _read(Path(path))
        words = table["decision"]
        wrong = pc.unique(words.filter(pc.invert(pc.is_in(words, pa.array(WORDS)))))
        rows, scores, ranks, thresholds, labels, predictions, given = (
            _numbers(path, table, name, kind, missing) for name, (kind, missing) in _NUMBERS.items()
        )
        if len(wrong) or not np.array_equal(rows, np.arange(len(rows))):
            what = (
                f"has the decision {wrong[0].as_py()!r}" if len(wrong) else "does not list rows 0, 1, 2, ... in order"
            )
            raise MismatchError(f"{path} {what}. It must list all rows in order, each with one of {', '.join(WORDS)}.")
        known = table.schema.metadata or {}
        return Decisions(
            mask=pc.equal(words, "drop").to_numpy(),
            scores=scores,
            ranks=ranks,
            thresholds=thresholds,
            rule=_rule_of(path, known[_RULE]) if _RULE in known else None,
            labels=_unless_empty(table, "label", labels),
            predictions=_unless_empty(table, "prediction", predictions),
            ids=_unless_empty(table, "id", table["id"] if "id" in table.column_names else None),
            to_relabel=np.flatnonzero(pc.equal(words, "relabel").to_numpy()),
            told=table["reason"],
            given=_unless_empty(table, _NEW_LABEL, given),
        )

    def __repr__(self) -> str:
        relabelled = f", {len(self.to_relabel):,} to relabel" if len(self.to_relabel) else ""
        by = "" if self.rule is None else f", by {self.rule.by}"
        return f"<Decisions on {counted(len(self), 'row')}: {int(self.mask.sum()):,} to drop{relabelled}{by}>"

    def __str__(self) -> str:
        dropped = int(self.mask.sum())
        parts = [f"Drops {dropped:,} of {counted(len(self), 'row')}"]
        if self.rule is not None:
            parts[0] += f": {self.rule.by} {self.rule.drops}{' of their label' if self.rule.per_class else ''}"
        if self.num_tied:
            tied, which = counted(self.num_tied, "row"), "it comes" if self.num_tied == 1 else "they come"
            parts.append(f"{tied} tied with a dropped row {_be(self.num_tied)} kept because {which} later")
        if self.num_unscored:
            unscored, whose = counted(self.num_unscored, "row"), "its" if self.num_unscored == 1 else "their"
            parts.append(f"{unscored} {_be(self.num_unscored)} kept because {whose} score is NaN")
        if count := len(self.to_relabel):
            parts.append(f"{counted(count, 'row')} {_be(count)} marked to be relabelled")
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
        """Return the decisions on some rows as indices into WORDS."""
        codes = self.mask[part].astype(np.int8)
        start, stop, _ = part.indices(len(self))
        codes[self.to_relabel[(self.to_relabel >= start) & (self.to_relabel < stop)] - start] = _RELABEL
        return codes

    def _reasons(self, part: slice) -> pa.Array:
        rule = self.rule or Rule("score", "too high", "not too high", is_share=False)
        scores, mask = self.scores[part], self.mask[part]
        said = np.full(len(mask), f"{rule.by} is {rule.keeps}", dtype=object)
        said[self._tied(part)] = f"{rule.by} equals that of a dropped row that comes earlier"
        said[np.isnan(scores)] = f"{rule.by} is NaN, so the row is kept"
        said[self._codes(part) == _RELABEL] = "marked to be relabelled"
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


def _be(number: int) -> str:
    return "is" if number == 1 else "are"


def check_decisions_file(path: str | Path) -> Path:
    """Return the path, or raise InputError unless its suffix is .parquet or .csv."""
    path = Path(path)
    if path.suffix not in (".parquet", ".csv"):
        raise InputError(f"The file of decisions must end in .parquet or .csv, got {path.name!r}.")
    return path


def for_csv(table: pa.Table) -> pa.Table:
    """Convert the dictionary-encoded column `decision` to text, because CSV has no dictionaries."""
    at = table.column_names.index("decision")
    return table.set_column(at, "decision", table.column(at).cast(pa.string()))


def suggestions(labels: np.ndarray | None, predictions: np.ndarray | None, count: int) -> np.ndarray:  # (N,) int64
    """Return predictions that differ from the labels; -1 where both are equal or either is missing."""
    if labels is None or predictions is None:
        return np.full(count, -1, dtype=np.int64)
    return np.where((labels >= 0) & (predictions >= 0) & (labels != predictions), predictions, -1)


def _nullable(values: np.ndarray | None, part: slice, least: int) -> pa.Array:
    """Convert integers to an Arrow array, with null for values below `least`."""
    if values is None:
        return pa.nulls(part.stop - part.start, pa.int64())
    return pa.array(values[part], pa.int64(), mask=values[part] < least)


def _numbers(path: str | Path, table: pa.Table, name: str, kind: pa.DataType, missing: float) -> np.ndarray:
    """Return a column as numbers of the given type, with nulls and NaN replaced by `missing`."""
    column = table[name] if name in table.column_names else pa.nulls(len(table), kind)
    try:
        if pa.types.is_floating(column.type) and pa.types.is_integer(kind):
            column = pc.if_else(pc.is_nan(column), None, column)
        return pc.fill_null(column.cast(kind), missing).to_numpy(zero_copy_only=False)
    except pa.ArrowException as error:
        raise MismatchError(
            f"Column {name} of {path} must contain {'whole ' if pa.types.is_integer(kind) else ''}numbers ({error}). "
            "Use class numbers, not class names."
        ) from None


def _unless_empty(table: pa.Table, name: str, values: Any) -> Any:
    """Return the values of a column; None if the column is missing or has no value in any row."""
    return values if name in table.column_names and table[name].null_count < len(table) else None


def _rule_of(path: str | Path, text: bytes) -> Rule:
    try:
        rule = Rule(**json.loads(text))
        if not all(isinstance(value, str) for value in (rule.by, rule.drops, rule.keeps)):
            raise ValueError("its phrases are not text")
        return rule
    except (TypeError, ValueError, RecursionError) as error:
        raise MismatchError(f"The rule in {path} is damaged ({error}). Create the file again.") from None


def _read_csv(path: Path) -> pa.Table:
    """Read decisions from a CSV file; ids are read as text if they are quoted, as `write` quotes ids that are text."""
    with path.open("rb") as file:
        file.readline()
        first = file.readline()
    texts = ("decision", "reason", "id") if re.match(rb'"?\d+"?,"', first) else ("decision", "reason")
    return pa.csv.read_csv(
        path,
        parse_options=pa.csv.ParseOptions(newlines_in_values=True),
        convert_options=pa.csv.ConvertOptions(column_types=dict.fromkeys(texts, pa.string())),
    )


def _read_parquet(path: Path) -> pa.Table:
    def make(coded: list[str]) -> pq.ParquetFile:
        return pq.ParquetFile(path, read_dictionary=coded, page_checksum_verification=True)

    return BoundedParquet(make, partial(path.open, "rb"), path.stat().st_size, ValueError).read()


def _read(path: Path) -> pa.Table:
    """Return the table of a file of decisions, with `decision` and `reason` as text."""
    try:
        check_regular(path)
        table = _read_csv(path) if path.suffix == ".csv" else _read_parquet(path)
        table.validate(full=True)
        lacking = [name for name in _COLUMNS if table.column_names.count(name) != 1]
        if lacking:
            raise MismatchError(
                f"{path} has {table.column_names.count(lacking[0])} columns {lacking[0]}, expected one, so it is not a "
                "file of decisions. Check the path."
            )
        for name in ("decision", "reason"):
            at = table.column_names.index(name)
            table = table.set_column(at, name, table.column(at).cast(pa.string()))
        return table
    except FileNotFoundError:
        raise MismatchError(f"There are no decisions at {path}. Check the path.") from None
    except MismatchError:
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        raise MismatchError(f"{path} cannot be read as a table of decisions ({error}). Create it again.") from None
