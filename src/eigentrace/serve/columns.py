"""What a run says about every example, held in memory as narrow arrays; read without torch, which takes seconds."""

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from eigentrace.errors import InputError, StorageError

SCORES = ("loss", "gradient_norm", "self_influence", "confidence")
CLASSES = ("label", "prediction")
ID = "id"
# Distinct values up to which a column names groups (numbers that are more have another meaning), and rows by which a
# column of far more is told.
MOST_GROUPS, _MOST_NUMBERS = 1000, 50
_SAMPLE = 20_000


class Columns:
    """Columns of a run: scores and classes as numpy arrays, the user's own and the ids as Arrow."""

    def __init__(self, path: Path, num_rows: int) -> None:
        self.path, self.num_rows = path, num_rows
        table = path / "table.parquet"
        self.numbers, self.num_missing = (_whole(table), 0) if table.exists() else _partly(path, num_rows)
        wrong = next((name for name, held in self.numbers.items() if len(held) != num_rows), None)
        if wrong is not None:
            raise InputError(
                f"{table} has {len(self.numbers[wrong]):,} rows for {num_rows:,} examples. `eigentrace check {path}` "
                "says what is damaged."
            )
        given = path / "columns.parquet"
        self.given: pa.Table = _read(given) if given.exists() else pa.table({})
        for name in self.given.column_names:
            if name != ID and _is_number(self.given.schema.field(name).type):
                self.numbers[name] = self.given.column(name).to_numpy()
        pa.default_memory_pool().release_unused()

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of all columns but the ids, those of the user last."""
        given = [name for name in self.given.column_names if name != ID]
        return (*(name for name in self.numbers if name not in given), *given)

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        own = sum(values.nbytes for name, values in self.numbers.items() if name not in self.given.column_names)
        return own + self.given.nbytes

    @property
    def ids(self) -> pa.ChunkedArray | None:
        """The user's name for each example, if there are any."""
        return self.given.column(ID) if ID in self.given.column_names else None

    def number(self, name: str) -> np.ndarray:  # (N,)
        """Return a column of numbers."""
        if name not in self.numbers:
            raise InputError(f"There is no column of numbers {name!r}. There are: {', '.join(self.numbers)}.")
        return self.numbers[name]

    def or_missing(self, name: str) -> np.ndarray | None:  # (N,)
        """Return a column of the run's own, or None where the task has no such thing."""
        return self.numbers.get(name)

    def kind_of(self, name: str) -> str:
        """Say what a column holds: a number, a text, or a class of the model."""
        if name in CLASSES:
            return "label"
        return "number" if name in self.numbers else "text"

    @cached_property
    def grouping(self) -> tuple[str, ...]:
        """Names of the user's columns that name groups: few values, and no measured numbers."""
        return tuple(name for name in self.given.column_names if name != ID and self._names_groups(name))

    def _names_groups(self, name: str) -> bool:
        kind = self.given.schema.field(name).type
        if pa.types.is_floating(kind) or pa.types.is_nested(kind):
            return False
        most = _MOST_NUMBERS if pa.types.is_integer(kind) else MOST_GROUPS
        few = pc.count_distinct(self._plain(name).slice(0, _SAMPLE), mode="all").as_py() <= most
        return few and len(self._encoded(name)[1]) <= most

    def coded(self, name: str) -> tuple[np.ndarray, list[Any]]:  # (N,) int32, values
        """Return a column as positions among its different values, of which None is one."""
        if name not in self.names:
            raise InputError(f"This run has no column {name!r}. It has: {', '.join(self.names)}.")
        if name not in CLASSES and name not in self.grouping:
            raise InputError(
                f"Column {name!r} holds measured numbers, or more than {MOST_GROUPS:,} different values, and names no "
                f"groups. These do: {', '.join((*self.grouping, *CLASSES))}."
            )
        return self._encoded(name)

    def _encoded(self, name: str) -> tuple[np.ndarray, list[Any]]:
        held = self._coded.get(name)
        if held is None:
            if name in CLASSES:
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
        """Return everything that is known about some rows, those of the user under "columns"."""
        given = self.given.take(pa.array(rows)).to_pylist() if self.given.num_columns else [{}] * len(rows)
        found = []
        for row, mine in zip(rows.tolist(), given, strict=True):
            held: dict[str, Any] = {"row": row, "id": mine.get(ID)}
            held |= {name: _class_at(self.or_missing(name), row) for name in CLASSES}
            held |= {name: values[row] if (values := self.or_missing(name)) is not None else None for name in SCORES}
            found.append(held | {"columns": {name: value for name, value in mine.items() if name != ID}})
        return found


def _class_at(values: np.ndarray | None, row: int) -> int | None:
    return None if values is None or values[row] < 0 else int(values[row])


def _is_number(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_floating(kind)


def _read(path: Path, columns: list[str] | None = None) -> pa.Table:
    try:
        return pq.read_table(path, columns=columns, memory_map=True)
    except (pa.ArrowException, OSError) as error:
        raise StorageError(f"{path} cannot be read ({error}). `eigentrace check RUN` says what is damaged.") from None


def _whole(path: Path) -> dict[str, np.ndarray]:
    """Read the table of a complete run."""
    names = [name for name in (*SCORES, *CLASSES) if name in pq.read_schema(path).names]
    table = _read(path, names)
    return {name: _narrow(name, table.column(name).to_numpy()) for name in names}


def _narrow(name: str, values: np.ndarray) -> np.ndarray:
    return values.astype(np.int32) if name in CLASSES else values


def _partly(path: Path, num_rows: int) -> tuple[dict[str, np.ndarray], int]:
    """Read the shards that there are of a run that is not complete; rows of others are NaN, and of class -1."""
    from eigentrace.run import open_run
    from eigentrace.store.shards import names_in, read_column

    run = open_run(path)
    held = {name: "square_norm" if name == "gradient_norm" else name for name in (*SCORES, *CLASSES)}
    files = [(shard, run.folder.record.file(shard)) for shard in run.shards]
    there = set(names_in(files[0][1])) if files else set()
    found: dict[str, np.ndarray] = {}
    for name in (name for name, stored in held.items() if stored in there):
        values = np.full(num_rows, -1 if name in CLASSES else np.nan, np.int32 if name in CLASSES else np.float32)
        change: Callable[[np.ndarray], np.ndarray] = np.sqrt if name == "gradient_norm" else np.asarray
        for shard, file in files:
            values[shard.start : shard.stop] = change(read_column(file, held[name]).numpy())
        found[name] = values
    return found, run.num_missing
