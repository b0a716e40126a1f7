"""Parquet beside the shards: the user's columns, and one row per example when all are scored."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from eigentrace.errors import InputError
from eigentrace.files import replacing
from eigentrace.store.folder import Folder
from eigentrace.store.shards import names_in, read_column

ID = "id"
# Rows of a group in the table, and of the user's columns that are read at a time.
_GROUP_ROWS = 1 << 18
OWN_COLUMNS = ("row", "loss", "gradient_norm", "self_influence", "label", "prediction", "confidence")


def as_columns(columns: Any, ids: Sequence[Any] | None, rows: int) -> pa.Table | None:
    """Make one table of ids and other columns, and check that it has a row for every example."""
    if columns is None and ids is None:
        return None
    table = columns if isinstance(columns, pa.Table) else _table({} if columns is None else columns)
    twice = sorted({name for name in table.column_names if table.column_names.count(name) > 1})
    if twice:
        raise InputError(f"Two columns are called {twice[0]!r}: give every column a name of its own.")
    if ids is not None and ID in table.column_names:
        raise InputError(f"The data has ids, and the columns hold {ID!r} too: give one of them.")
    named = {} if ids is None else {ID: _array(ids, ID)}
    wrong = [name for name, values in (named | _by_name(table)).items() if len(values) != rows]
    if wrong:
        size = len((named | _by_name(table))[wrong[0]])
        raise InputError(f"Column {wrong[0]!r} has {size} rows for {rows} examples: give one row per example.")
    table = pa.table(named | _by_name(table))
    taken = sorted(set(OWN_COLUMNS) & set(table.column_names))
    if taken:
        raise InputError(f"A run has columns of its own called {', '.join(taken)}: give yours other names.")
    return table


def _by_name(table: pa.Table) -> dict[str, Any]:
    return {name: table.column(name) for name in table.column_names}


def _table(columns: Any) -> pa.Table:
    if not isinstance(columns, Mapping):
        raise InputError(
            f"columns must be a mapping of names to arrays, or a pyarrow Table, got {type(columns).__name__}."
        )
    arrays = {str(name): _array(values, name) for name, values in columns.items()}
    sizes = {name: len(values) for name, values in arrays.items()}
    if len(set(sizes.values())) > 1:
        raise InputError(f"The columns have different numbers of rows ({sizes}): give one row per example.")
    return pa.table(arrays)


def _array(values: Any, name: Any) -> Any:
    if isinstance(values, pa.Array | pa.ChunkedArray):
        return values
    try:
        return pa.array(values if isinstance(values, list) else np.asarray(values))
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, ValueError) as error:
        raise InputError(f"Column {name!r} cannot be stored: {error}. Give numbers or strings.") from None


def write_table(folder: Folder) -> None:
    """Write the table of a run whose shards are all there, shard by shard."""
    pieces = _Pieces(folder)
    with replacing(folder.table_file) as partial:
        writer: pq.ParquetWriter | None = None
        try:
            for shard in folder.record.read():
                path = folder.record.file(shard)
                for low in range(0, shard.stop - shard.start, _GROUP_ROWS):
                    high = min(low + _GROUP_ROWS, shard.stop - shard.start)
                    made = pa.table(_part(path, shard.start, low, high) | pieces.take(high - low))
                    writer = writer or pq.ParquetWriter(partial, made.schema, write_page_checksum=True)
                    writer.write_table(made)
        finally:
            if writer is not None:
                writer.close()


def _part(path: Any, start: int, low: int, high: int) -> dict[str, Any]:
    part: dict[str, Any] = {"row": np.arange(start + low, start + high)}
    held = names_in(path)
    for name in ("loss", "square_norm", "self_influence", "label", "prediction", "confidence"):
        if name in held:
            values = read_column(path, name, low, high).numpy()
            part["gradient_norm" if name == "square_norm" else name] = (
                np.sqrt(values) if name == "square_norm" else values
            )
    return part


class _Pieces:
    """Hands out the user's columns in pieces of the sizes asked for, and holds little more than one of them."""

    def __init__(self, folder: Folder) -> None:
        self.file = pq.ParquetFile(folder.columns_file) if folder.columns_file.exists() else None
        self.batches = iter(()) if self.file is None else self.file.iter_batches(batch_size=_GROUP_ROWS)
        self.held: list[pa.RecordBatch] = []

    def take(self, rows: int) -> dict[str, Any]:
        if self.file is None:
            return {}
        while sum(batch.num_rows for batch in self.held) < rows:
            self.held.append(next(self.batches))
        table = pa.Table.from_batches(self.held)
        self.held = table.slice(rows).to_batches()
        return {name: table.column(name).slice(0, rows) for name in table.column_names}
