"""Reading of one column of a dataset's files, without the others in memory."""

from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.json

from eigentrace.errors import DataError
from eigentrace.formats.damage import check_values, read_stream
from eigentrace.formats.files import BLOCK, Files
from eigentrace.formats.quoting import check_closed, parsing
from eigentrace.formats.records import opened_parquet

# Types of a JSON column, tried in this order.
_KINDS = (pa.string(), pa.int64(), pa.float64(), pa.bool_())


def single_column(files: Files, name: str, delimiter: str | None = None) -> pa.ChunkedArray | None:
    """Return all rows of one column; None if the files have no such column.

    Args:
        files: The result of `find_files`.
        name: The column. In CSV and TSV files, whose first record must be a header, it is read as text.
        delimiter: The delimiter of CSV fields; detected from the header if not given.
    """
    try:
        parts = [_checked_column(path, files.format, name, delimiter) for path in files.paths]
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(f"Column {name!r} of {files.source} cannot be read ({error}). Check the file.") from None
    chunks = [chunk for part in parts if part is not None for chunk in part.chunks]
    if not chunks or any(part is None for part in parts):
        return None
    return pa.chunked_array([chunk.cast(chunks[0].type) for chunk in chunks])


def _checked_column(path: Path, kind: str, name: str, delimiter: str | None) -> pa.ChunkedArray | None:
    found = _column(path, kind, name, delimiter)
    if found is not None:
        check_values(found, name, path)
    return found


def _column(path: Path, kind: str, name: str, delimiter: str | None) -> pa.ChunkedArray | None:
    if kind == "parquet":
        with closing(opened_parquet(path)) as file:
            return file.read(columns=[name]).column(0) if name in file.schema.names else None
    if kind == "arrow":
        table = read_stream(path)
        return table.column(name) if name in table.column_names else None
    return _of_json(path, name) if kind == "jsonl" else _of_csv(path, kind, name, delimiter)


def _of_csv(path: Path, kind: str, name: str, delimiter: str | None) -> pa.ChunkedArray | None:
    read = pa.csv.ReadOptions(block_size=BLOCK)
    convert = pa.csv.ConvertOptions(include_columns=[name], column_types={name: pa.string()}, strings_can_be_null=False)
    try:
        table = pa.csv.read_csv(path, read, parsing(path, kind, delimiter), convert)
    except pa.ArrowKeyError:
        return None
    if kind == "csv":
        check_closed(path, delimiter)
    return table.column(0)


def _of_json(path: Path, name: str) -> pa.ChunkedArray | None:
    for kind in _KINDS:
        parse = pa.json.ParseOptions(explicit_schema=pa.schema([(name, kind)]), unexpected_field_behavior="ignore")
        try:
            found = pa.json.read_json(path, pa.json.ReadOptions(block_size=BLOCK), parse).column(0)
        except pa.ArrowInvalid:
            continue
        return None if found.null_count == len(found) else found
    return None
