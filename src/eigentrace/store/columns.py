"""The user's columns, on disk: whether they are the same, and single items of one of them."""

from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq


def same_columns(held: pa.Table, asked: pa.Table) -> bool:
    """Tell whether columns are those that were stored, be it in the nearest type that Parquet has."""
    if held.column_names != asked.column_names or held.num_rows != asked.num_rows:
        return False
    return all(_same(held.column(name), asked.column(name)) for name in held.column_names)


def _same(held: pa.ChunkedArray, asked: pa.ChunkedArray) -> bool:
    try:
        held, asked = (_decoded(values) for values in (held, asked))
        asked = asked if asked.type == held.type else asked.cast(held.type)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError):
        return False
    if not pa.types.is_floating(held.type) or pa.types.is_float16(held.type):
        return held.equals(asked)
    # A NaN equals none, not even itself.
    gone = [pc.is_nan(values) for values in (held, asked)]
    return gone[0].equals(gone[1]) and all_but_nan(held).equals(all_but_nan(asked))


def first_difference(held: pa.ChunkedArray, asked: pa.ChunkedArray) -> int | None:
    """Return the first row in which two columns of the same length differ, whatever types they are stored in."""
    held, asked = (_decoded(values) for values in (held, asked))
    try:
        asked = asked if asked.type == held.type else asked.cast(held.type)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError):
        held, asked = (values.cast(pa.large_string()) for values in (held, asked))
    differs = pc.fill_null(pc.not_equal(held, asked), True)
    both_null = pc.and_(pc.is_null(held), pc.is_null(asked))
    row = pc.index(pc.and_(differs, pc.invert(both_null)), True).as_py()
    return None if row < 0 else row


def all_but_nan(values: pa.ChunkedArray) -> pa.ChunkedArray:
    """Put nothing where a NaN is."""
    return pc.if_else(pc.is_nan(values), None, values)


def _decoded(values: pa.ChunkedArray) -> pa.ChunkedArray:
    return values.cast(values.type.value_type) if pa.types.is_dictionary(values.type) else values


class Names:
    """One column of a Parquet file, of which single items are read without the rest."""

    def __init__(self, path: Path, column: str) -> None:
        self.path, self.column = path, column

    def whole(self) -> np.ndarray:  # (N,)
        """Read all items."""
        return pq.read_table(self.path, columns=[self.column]).column(0).to_numpy()

    def of(self, rows: np.ndarray) -> np.ndarray:  # (...) -> (...)
        """Read the items of some rows, in any order and shape; None stands for that of row -1."""
        flat = rows.reshape(-1)
        wanted = np.unique(flat[flat >= 0])
        group = np.searchsorted(self._ends, wanted, side="right")
        parts = [pa.array([], self._file.schema_arrow.field(self.column).type).to_numpy(zero_copy_only=False)]
        for number in np.unique(group).tolist():
            read = self._file.read_row_group(number, columns=[self.column]).column(0)
            first = self._ends[number] - len(read)
            parts.append(read.take(pa.array(wanted[group == number] - first)).to_numpy())
        found = np.concatenate(parts[1:] or parts)
        if len(wanted) and not (flat < 0).any():
            return found[np.searchsorted(wanted, flat)].reshape(rows.shape)
        result = np.full(flat.shape, None, dtype=object)
        result[flat >= 0] = found[np.searchsorted(wanted, flat[flat >= 0])]
        return result.reshape(rows.shape)

    @cached_property
    def _file(self) -> pq.ParquetFile:
        return pq.ParquetFile(self.path)

    @cached_property
    def _ends(self) -> np.ndarray:
        metadata = self._file.metadata
        return np.cumsum([metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)])
