"""The columns of a run, in memory as compact arrays; read without importing torch, which takes seconds."""

from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from eigentrace.errors import InputError
from eigentrace.store.columns import COLUMNS, ID, ScoredColumn
from eigentrace.store.reader import RunReader

# A column defines groups if it has at most this many distinct values (integer columns with more are measurements). The
# first _SAMPLE rows are counted first: they are enough to reject a column with far more.
MOST_GROUPS, _MOST_NUMBERS = 1000, 50
_SAMPLE = 20_000


class Columns:
    """Columns of a run: scores and classes as NumPy arrays, user columns and ids as an Arrow table."""

    def __init__(self, reader: RunReader) -> None:
        reader.check_held()
        self.num_rows, self.num_missing = reader.num_rows, reader.num_missing
        self.numbers = {one.name: _narrow(one, reader.column(one.name, partial=True)) for one in reader.scored}
        self.given: pa.Table = reader.user_table()
        for name in self.given.column_names:
            if name != ID and _is_number(self.given.schema.field(name).type):
                self.numbers[name] = self.given.column(name).to_numpy()
        pa.default_memory_pool().release_unused()

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of all columns except the ids, user columns last."""
        given = [name for name in self.given.column_names if name != ID]
        return (*(name for name in self.numbers if name not in given), *given)

    @property
    def ids(self) -> pa.ChunkedArray | None:
        """The ids of the examples; None if the run has none."""
        return self.given.column(ID) if ID in self.given.column_names else None

    def number(self, name: str) -> np.ndarray:  # (N,)
        """Return a numeric column."""
        if name not in self.numbers:
            raise InputError(f"There is no numeric column {name!r}. Choose one of: {', '.join(self.numbers)}.")
        return self.numbers[name]

    def or_missing(self, name: str) -> np.ndarray | None:  # (N,)
        """Return a numeric column, or None if the run does not have it."""
        return self.numbers.get(name)

    def kind_of(self, name: str) -> str:
        """Return the kind of a column: "number", "text", or "label" for classes of the model."""
        if _is_class(name):
            return "label"
        return "number" if name in self.numbers else "text"

    def label_of(self, name: str) -> str:
        """Return the displayed name of a column."""
        return COLUMNS[name].label if name in COLUMNS else name.replace("_", " ")

    def meaning_of(self, name: str) -> str | None:
        """Return what a column contains; None for the user's columns."""
        return COLUMNS[name].meaning if name in COLUMNS else None

    @cached_property
    def grouping(self) -> tuple[str, ...]:
        """Names of the user columns that define groups: categorical, with few distinct values."""
        return tuple(name for name in self.given.column_names if name != ID and self._defines_groups(name))

    def _defines_groups(self, name: str) -> bool:
        kind = self.given.schema.field(name).type
        if pa.types.is_floating(kind) or pa.types.is_nested(kind):
            return False
        most = _MOST_NUMBERS if pa.types.is_integer(kind) else MOST_GROUPS
        few = pc.count_distinct(self._plain(name).slice(0, _SAMPLE), mode="all").as_py() <= most
        return few and len(self._encoded(name)[1]) <= most

    def coded(self, name: str) -> tuple[np.ndarray, list[Any]]:  # (N,) int32, values
        """Return a column as codes, with the list of distinct values they index; None may be one of these."""
        if name not in self.names:
            raise InputError(f"This run has no column {name!r}. Choose one of: {', '.join(self.names)}.")
        if not _is_class(name) and name not in self.grouping:
            raise InputError(
                f"Column {name!r} cannot define groups: it holds measurements, or more than {MOST_GROUPS:,} distinct "
                f"values. Choose one of: {', '.join((*self.grouping, *filter(_is_class, self.names)))}."
            )
        return self._encoded(name)

    def _encoded(self, name: str) -> tuple[np.ndarray, list[Any]]:
        held = self._coded.get(name)
        if held is None:
            if _is_class(name):
                found = pa.chunked_array([pa.array(self.numbers[name], mask=self.numbers[name] < 0)])
            else:
                found = self._plain(name)
            encoded = found.dictionary_encode(null_encoding="encode").unify_dictionaries().combine_chunks()
            held = encoded.indices.to_numpy().astype(np.int32, copy=False), encoded.dictionary.to_pylist()
            self._coded[name] = held
        return held

    @cached_property
    def _coded(self) -> dict[str, tuple[np.ndarray, list[Any]]]:
        return {}

    def _plain(self, name: str) -> pa.ChunkedArray:
        column = self.given.column(name)
        return column.cast(column.type.value_type) if pa.types.is_dictionary(column.type) else column

    def of(self, rows: np.ndarray) -> list[dict[str, Any]]:
        """Return all columns of some rows as records, with user columns under "columns"."""
        given = self.given.take(pa.array(rows)).to_pylist() if self.given.num_columns else [{}] * len(rows)
        found = []
        for row, mine in zip(rows.tolist(), given, strict=True):
            held: dict[str, Any] = {"row": row, "id": mine.get(ID)}
            held |= {name: self._at(column, row) for name, column in COLUMNS.items()}
            found.append(held | {"columns": {name: value for name, value in mine.items() if name != ID}})
        return found

    def _at(self, column: ScoredColumn, row: int) -> float | int | None:
        """Return one row's value of a scored column; None if the run does not have it."""
        if column.name not in self.numbers:
            return None
        value = self.numbers[column.name][row]
        if column.kind == "class":
            return int(value) if value >= 0 else None
        return value


def _is_class(name: str) -> bool:
    return name in COLUMNS and COLUMNS[name].kind == "class"


def _is_number(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_floating(kind)


def _narrow(column: ScoredColumn, values: np.ndarray) -> np.ndarray:
    return values.astype(np.int32) if column.kind == "class" else values
