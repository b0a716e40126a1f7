"""Random access to the rows of a dataset's files, without reading Parquet and Arrow files into memory."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet as pq

from eigentrace.disk.parquet import BoundedParquet
from eigentrace.errors import DataError, InputError
from eigentrace.formats.damage import check_values, damaged_data, read_stream, reading
from eigentrace.formats.files import BLOCK, Files
from eigentrace.formats.quoting import check_closed, parsing

# Number of row groups in memory: a sequential pass needs one, a batch that spans two needs both.
_HELD_GROUPS = 3


class _Pieces(Protocol):
    """A dataset in pieces that fit into memory one at a time."""

    schema: pa.Schema
    sizes: list[int]

    def get(self, number: int, names: tuple[str, ...]) -> pa.Table: ...

    def whole(self, names: tuple[str, ...]) -> pa.Table: ...

    def may_have_nulls(self, number: int, column: str) -> bool: ...


class _Held:
    """The batches of Arrow tables, in memory or memory-mapped; columns of a batch are checked when first read.

    Args:
        tables: Tables with the same columns, and the file that each was read from.
    """

    def __init__(self, tables: Sequence[tuple[pa.Table, Path | str]]) -> None:
        self.schema = tables[0][0].schema
        batches = [(batch, path) for table, path in tables for batch in table.to_batches()]
        self._batches, self._paths = [batch for batch, _ in batches], [path for _, path in batches]
        self._checked: set[tuple[int, str]] = set()
        self.sizes = [batch.num_rows for batch in self._batches]

    def get(self, number: int, names: tuple[str, ...]) -> pa.Table:
        for name in names:
            self._column(number, name)
        return pa.Table.from_batches([self._batches[number]]).select(list(names))

    def whole(self, names: tuple[str, ...]) -> pa.Table:
        return pa.concat_tables(self.get(number, names) for number in range(len(self.sizes)))

    def may_have_nulls(self, number: int, column: str) -> bool:
        return self._column(number, column).null_count > 0

    def _column(self, number: int, name: str) -> pa.Array:
        values = self._batches[number].column(name)
        if (number, name) not in self._checked:
            check_values(values, name, self._paths[number])
            self._checked.add((number, name))
        return values


class _RowGroups:
    """The row groups of Parquet files, each read when one of its rows is accessed."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.schema = opened_parquet(paths[0]).schema
        self.sizes: list[int] = []
        self._places: list[tuple[Path, int]] = []
        self._open: tuple[Path, BoundedParquet] | None = None
        self._groups: dict[tuple[int, tuple[str, ...]], pa.Table] = {}
        self._lock = Lock()
        for path in paths:
            with closing(opened_parquet(path)) as file:
                _check_same(self.schema, file.schema, paths[0], path)
                self.sizes += file.sizes
                self._places += [(path, group) for group in range(len(file.sizes))]

    def __getstate__(self) -> dict[str, Any]:
        # Open files and locks cannot be pickled.
        return vars(self) | {"_open": None, "_groups": {}, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state | {"_lock": Lock()})

    def get(self, number: int, names: tuple[str, ...]) -> pa.Table:
        # The page reads examples in several threads.
        with self._lock:
            return self._get(number, names)

    def whole(self, names: tuple[str, ...]) -> pa.Table:
        parts, held = [], dict.fromkeys((path for path, _ in self._places), 0)
        for number, (path, _) in enumerate(self._places):
            parts.append(self.get(number, names))
            held[path] += parts[-1].nbytes
            self._file(path).check(held[path])
        return pa.concat_tables(parts)

    def _get(self, number: int, names: tuple[str, ...]) -> pa.Table:
        key = (number, names)
        table = self._groups.pop(key, None)
        if table is None:
            table = self._read_group(number, names)
        self._groups[key] = table  # most recently used last
        while len(self._groups) > _HELD_GROUPS:
            del self._groups[next(iter(self._groups))]
        return table

    def _read_group(self, number: int, names: tuple[str, ...]) -> pa.Table:
        path, group = self._places[number]
        with reading(path):
            try:
                table = self._file(path).read([group], names).select(list(names))
            except (pa.ArrowException, ValueError) as error:
                raise damaged_data(path, error) from None
        for name in names:
            check_values(table.column(name), name, path)
        if len(table) != self.sizes[number]:
            raise damaged_data(path, f"row group {group} has {len(table):,} rows, expected {self.sizes[number]:,}")
        return without_views(table)

    def may_have_nulls(self, number: int, column: str) -> bool:
        path, group = self._places[number]
        with reading(path):
            metadata = self._file(path).metadata
            about, schema, counts = metadata.row_group(group), metadata.schema, []
            for at in range(about.num_columns):
                if schema.column(at).path == column:
                    leaf = about.column(at)
                    # pyarrow ends the process when it reads statistics of another type than that of the column.
                    if leaf.physical_type != schema.column(at).physical_type:
                        raise damaged_data(path, f"column {column!r} has two types in row group {group}")
                    counts += [leaf.statistics.null_count] if leaf.statistics else []
        return counts != [0]

    def _file(self, path: Path) -> BoundedParquet:
        if self._open is None or self._open[0] != path:
            self._open = (path, opened_parquet(path))
        return self._open[1]


def opened_parquet(path: Path) -> BoundedParquet:
    """Open a Parquet file, memory-mapped, with its page checksums verified if it has any."""

    def make(coded: list[str]) -> pq.ParquetFile:
        return pq.ParquetFile(path, memory_map=True, read_dictionary=coded, page_checksum_verification=True)

    with reading(path):
        return BoundedParquet(make, partial(path.open, "rb"), path.stat().st_size, partial(damaged_data, path))


class Records:
    """A dataset of rows, numbered from 0, with named columns.

    Parquet files and saved datasets are read on access; CSV and JSON lines are in memory as Arrow tables.
    """

    def __init__(self, pieces: _Pieces, name: str) -> None:
        self._pieces, self.name, self.schema = pieces, name, pieces.schema
        self._ends = np.cumsum(pieces.sizes, dtype=np.int64)
        twice = {column for column in self.schema.names if self.schema.names.count(column) > 1}
        if twice:
            raise DataError(f"{name} has several columns called {_named(sorted(twice))}. Column names must be unique.")
        if not len(self):
            raise DataError(f"{name} has no rows. At least one example is needed.")

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def check_columns(self, **wanted: str | None) -> None:
        """Raise InputError unless all given columns exist; keywords are the arguments that chose them."""
        for what, column in wanted.items():
            if column is not None and column not in self.schema.names:
                raise InputError(
                    f"{self.name} has no column {column!r} (used as {what}). Its columns are: "
                    f"{_named(self.schema.names)}. Choose one of them with {what}."
                )

    def read(self, rows: Sequence[int] | np.ndarray, names: Sequence[str]) -> pa.Table:
        """Return the given rows of some columns, in the given order."""
        rows = np.asarray(rows, dtype=np.int64)
        pieces = np.searchsorted(self._ends, rows, side="right")
        cuts = np.flatnonzero(np.diff(pieces)) + 1
        parts = []
        for here, numbers in zip(np.split(rows, cuts), np.split(pieces, cuts), strict=True):
            number = int(numbers[0])
            start = self._ends[number] - self._pieces.sizes[number]
            parts.append(self._pieces.get(number, tuple(names)).take(pa.array(here - start)))
        return parts[0] if len(parts) == 1 else pa.concat_tables(parts)

    def chunks(self, column: str) -> Iterator[tuple[int, pa.Array]]:
        """Yield a column in row order as (first row, values), one piece at a time."""
        for number in range(len(self._pieces.sizes)):
            yield from self._chunks(number, column)

    def _chunks(self, number: int, column: str) -> Iterator[tuple[int, pa.Array]]:
        row = int(self._ends[number]) - self._pieces.sizes[number]
        for chunk in self._pieces.get(number, (column,)).column(0).chunks:
            yield row, chunk
            row += len(chunk)

    def whole(self, names: Sequence[str]) -> pa.Table:
        """Return all rows of some columns."""
        return self._pieces.whole(tuple(names))

    def pieces(self, names: Sequence[str], rows_at_once: int) -> Iterator[pa.Table]:
        """Yield some columns in row order, at most `rows_at_once` rows at a time."""
        for number in range(len(self._pieces.sizes)):
            table = self._pieces.get(number, tuple(names))
            yield from (table.slice(start, rows_at_once) for start in range(0, len(table), rows_at_once))

    def refuse_nulls(self, *columns: str) -> None:
        """Raise DataError at the first row without a value; row groups whose statistics count no nulls are not read."""
        for column in columns:
            for number in range(len(self._pieces.sizes)):
                if self._pieces.may_have_nulls(number, column):
                    for first, chunk in self._chunks(number, column):
                        self._refuse_null(column, first, chunk)

    def _refuse_null(self, column: str, first: int, chunk: pa.Array) -> None:
        if chunk.null_count:
            row = first + int(chunk.is_null().to_numpy(zero_copy_only=False).argmax())
            raise DataError(
                f"Row {row} of {self.name} (counted from 0) has no value in column {column!r}. Fill it in, or "
                "remove the row."
            )


def without_views(table: pa.Table) -> pa.Table:
    """Convert string and binary views, for which pyarrow has no `take`, to plain types."""
    kinds = [(field.name, _PLAIN.get(field.type)) for field in table.schema]
    for at, (name, kind) in enumerate(kinds):
        table = table if kind is None else table.set_column(at, name, table.column(at).cast(kind))
    return table


def _without_views_of(table: pa.Table, path: Path) -> pa.Table:
    """Convert the views of a file as `without_views` does, after a check of their values."""
    for field in table.schema:
        if field.type in _PLAIN:
            check_values(table.column(field.name), field.name, path)
    return without_views(table)


_PLAIN = {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary()}


def held_records(columns: Mapping[str, Any], name: str) -> Records:
    """Return records of columns in memory."""
    return Records(_Held([(pa.table(dict(columns)), name)]), name)


def open_records(files: Files, as_text: Sequence[str] = ()) -> Records:
    """Open the files of a dataset as records.

    Args:
        files: The result of `find_files`.
        as_text: Columns to read as text even if a CSV file contains only digits in them.
    """
    name = str(files.source)
    try:
        if files.format == "parquet":
            return _records(_RowGroups(files.paths), name)
        tables = []
        for path in files.paths:
            with reading(path):
                tables.append((_without_views_of(_read(path, files.format, as_text), path), path))
                _check_same(tables[0][0].schema, tables[-1][0].schema, files.paths[0], path)
        return _records(_Held(tables), name)
    except pa.ArrowException as error:
        if files.format == "csv" and "straddling" in str(
            error
        ):  # a field longer than a block: probably unclosed quotes
            for path in files.paths:
                check_closed(path)
        raise DataError(f"{name} cannot be read as {files.format}: {error}{_hint(files, str(error))}") from None


def _records(pieces: _Pieces, name: str) -> Records:
    with reading(name):  # names of columns may not be UTF-8
        return Records(pieces, name)


def _hint(files: Files, error: str) -> str:
    """Return the usual cause and remedy of a parser error, or an empty text."""
    for pattern, words in _HINTS.items():
        if re.search(pattern, error):
            return f" | {words}"
    if not re.search(r"Expected \d+ columns?, got \d+", error):
        return ""
    if any(_has_lone_return(path) for path in files.paths):
        return f" | {_LONE_RETURN}"
    if files.format == "tsv":
        return (
            " | Every line of a TSV file must have as many fields as its header. Quote texts with tabs or line breaks "
            "and double all quotes inside them, or store them as JSON lines or Parquet."
        )
    return (
        " | The usual cause is a lone quote at the beginning of a field: it opens a field that extends to the next "
        "quote, across commas and lines. Quote texts with quotes or commas and double the quotes inside them, as CSV "
        "writers do, or store them as TSV, where lone quotes are text."
    )


_HINTS = {
    "invalid UTF8": "Text must be UTF-8. Convert the file (iconv -f latin1 -t utf-8), or save it as CSV UTF-8.",
    r"Column\(\) changed from object to array": (
        "The file is one JSON array, but JSON lines are objects, one per line. Convert it with jq -c '.[]', or with "
        "to_json(orient='records', lines=True) of pandas."
    ),
    r"Column\(/.*\) changed from": "A column must have one type in all rows: write its values as text, or as numbers.",
}
_LONE_RETURN = (
    "The file contains carriage returns (\\r) without a line feed after them, which end a row outside quotes. Remove "
    "them from the texts, or quote these texts."
)


def _has_lone_return(path: Path) -> bool:
    with path.open("rb") as file:
        return any(re.search(rb"\r(?!\n)", line) for line in file)


def _read(path: Path, kind: str, as_text: Sequence[str]) -> pa.Table:
    if kind == "arrow":
        return read_stream(path)
    if kind == "jsonl":
        return _read_json(path, as_text)
    convert = pa.csv.ConvertOptions(column_types=dict.fromkeys(as_text, pa.string()))
    table = pa.csv.read_csv(path, pa.csv.ReadOptions(block_size=BLOCK), parsing(path, kind), convert)
    if kind == "csv":
        check_closed(path)
    return table


def _read_json(path: Path, as_text: Sequence[str]) -> pa.Table:
    options = pa.json.ReadOptions(block_size=BLOCK)
    table = pa.json.read_json(path, read_options=options)
    # pyarrow parses texts that look like dates as dates, unless the schema has them as text.
    dates = [name for name in as_text if name in table.column_names and pa.types.is_temporal(table[name].type)]
    if not dates:
        return table
    schema = pa.schema([(name, pa.string()) for name in dates])
    parse = pa.json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="infer")
    return pa.json.read_json(path, read_options=options, parse_options=parse).select(table.column_names)


def _check_same(expected: pa.Schema, found: pa.Schema, first: Path, path: Path) -> None:
    if not found.equals(expected):
        raise DataError(
            f"{path.name} and {first.name} are parts of one dataset but have different columns or types: "
            f"{_described(found)} and {_described(expected)}. Write them with the same schema."
        )


def _named(columns: Sequence[str]) -> str:
    """Return column names joined by commas; empty names and names with surrounding blanks are quoted."""
    return ", ".join(name if name and name == name.strip() else repr(name) for name in columns)


def _described(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} {field.type}" for field in schema)
