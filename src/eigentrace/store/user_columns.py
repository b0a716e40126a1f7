"""User columns: combine ids and columns into one table, compare tables, and read single items from Parquet."""

import os
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from eigentrace.disk.blocks import Blocks, VerifiedFile, damaged, sums_of, verify_whole
from eigentrace.disk.bounded import open_regular
from eigentrace.disk.parquet import BoundedParquet
from eigentrace.errors import EigentraceError, InputError, StorageError
from eigentrace.settings import short
from eigentrace.store.columns import ID, TAKEN


def as_columns(columns: Any, ids: Sequence[Any] | None, rows: int) -> pa.Table | None:
    """Return one table of ids and columns, checked to have one row per example; None if there are neither."""
    if columns is None and ids is None:
        return None
    table = columns if isinstance(columns, pa.Table) else _table({} if columns is None else columns)
    twice = sorted({name for name in table.column_names if table.column_names.count(name) > 1})
    if twice:
        raise InputError(f"Column names must be unique, but {twice[0]!r} is used more than once.")
    if ids is not None and ID in table.column_names:
        raise InputError(f"The data has ids, and the columns contain {ID!r} too. Pass only one of them.")
    named = {} if ids is None else {ID: _ids(ids)}
    wrong = [name for name, values in (named | _by_name(table)).items() if len(values) != rows]
    if wrong:
        size = len((named | _by_name(table))[wrong[0]])
        raise InputError(f"Column {wrong[0]!r} has {size} rows for {rows} examples. Pass one row per example.")
    table = pa.table(named | _by_name(table))
    taken = sorted(set(TAKEN) & set(table.column_names))
    if taken:
        raise InputError(f"Column names {', '.join(taken)} are reserved for columns of the run. Rename your columns.")
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
        raise InputError(f"The columns have different numbers of rows ({sizes}). Pass one row per example.")
    return pa.table(arrays)


def _ids(ids: Any) -> Any:
    """Return ids as an Arrow array; raise InputError with the first one that a CSV file cannot contain."""
    values = _array(ids, ID)
    kind = values.type.value_type if pa.types.is_dictionary(values.type) else values.type
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        wrong = next((row for row, value in enumerate(values) if not _is_text(value.as_py())), None)
    elif pa.types.is_nested(kind):
        wrong = pc.index(pc.is_valid(values), True).as_py()
    else:
        wrong = None
    if wrong is not None:
        raise InputError(
            f"Ids must be numbers or text, but that of row {wrong} is {short(values[wrong].as_py())} (type {kind}). "
            "Pass text, such as str(id)."
        )
    return values


def _is_text(value: bytes | None) -> bool:
    try:
        return value is None or bool(value.decode("utf-8") or True)
    except UnicodeDecodeError:
        return False


def _array(values: Any, name: Any) -> Any:
    if isinstance(values, pa.Array | pa.ChunkedArray):
        return values
    try:
        return pa.array(values if isinstance(values, list) else np.asarray(values))
    except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
        raise InputError(
            f"Column {name!r} cannot be stored: {error}.{_first_wrong(values)} Pass numbers of at most 64 "
            "bits, or strings."
        ) from None


def _first_wrong(values: Any) -> str:
    """Return, as a sentence, the first value that cannot be stored, or not in one column with those before it."""
    kind = None
    for row, value in enumerate(values if isinstance(values, Iterable) else ()):
        try:
            found = pa.scalar(value).type
        except (pa.ArrowException, ValueError, TypeError, OverflowError):
            return f" Row {row} is {short(value)}."
        if kind not in (None, found) and value is not None:
            return f" Row {row} is {short(value)} ({found}), after values of {kind}."
        kind = kind if value is None else found
    return ""


def same_columns(held: pa.Table, asked: pa.Table) -> bool:
    """Return whether columns equal the stored ones, after conversion to the types that Parquet stores."""
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
    # NaN does not equal NaN.
    gone = [pc.is_nan(values) for values in (held, asked)]
    return gone[0].equals(gone[1]) and all_but_nan(held).equals(all_but_nan(asked))


def first_difference(held: pa.ChunkedArray, asked: pa.ChunkedArray) -> int | None:
    """Return the first row in which two columns of the same length differ, regardless of type; None if equal."""
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
    """Replace NaN by null."""
    return pc.if_else(pc.is_nan(values), None, values)


def _decoded(values: pa.ChunkedArray) -> pa.ChunkedArray:
    return values.cast(values.type.value_type) if pa.types.is_dictionary(values.type) else values


# Maximum number of Parquet row groups read at a time.
_GROUPS_AT_ONCE = 64


ADVICE = "Restore it from a copy: the ids and columns of a run cannot be computed again. `eigentrace check RUN` lists "
ADVICE += "all damaged files."


class ColumnsFile:
    """The Parquet file of a run's ids and user columns; what is read of it is verified.

    Args:
        path: The file.
        rows: The number of rows that it must have, if known.
        sums: The checksums of its blocks, as `checksums_of` returns them, if recorded.
        sha256: The checksum of the whole file, which is verified on first use if the blocks have none.
        advice: What to do about damage, for messages.
    """

    def __init__(
        self, path: Path, rows: int | None = None, sums: Any = None, sha256: str | None = None, advice: str = ADVICE
    ) -> None:
        self.path, self._rows, self._sums, self._sha256, self._advice = path, rows, sums, sha256, advice

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the columns."""
        with self.reading():
            return tuple(self.file.schema.names)

    def table(self, columns: Sequence[str] | None = None) -> pa.Table:
        """Return all columns, or the given ones."""
        with self.reading():
            found = self.file.read(columns=columns)
            found.validate(full=True)
            return found

    def batches(self, rows: int) -> Iterator[pa.RecordBatch]:
        """Yield the rows in order, at most `rows` at a time."""
        with self.reading():
            for group in range(len(self.file.sizes)):
                yield from self.file.read([group]).to_batches(max_chunksize=rows)

    @cached_property
    def file(self) -> BoundedParquet:
        """The open file; use it within `reading`."""
        path, advice, blocks = self.path, self._advice, None
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if self._sums is not None:
                sums = np.frombuffer(b64decode(self._sums, validate=True), np.uint64)
                blocks = Blocks(path, sums, size, advice)
            elif self._sha256 is not None:
                verify_whole(path, file, self._sha256, advice)

        # These do not refer to this object: the file is closed when nobody refers to it.
        def raw() -> Any:
            return path.open("rb") if blocks is None else VerifiedFile(path, blocks)

        def make(coded: list[str]) -> pq.ParquetFile:
            source = path if blocks is None else raw()
            return pq.ParquetFile(source, read_dictionary=coded, page_checksum_verification=True)

        found = BoundedParquet(make, raw, size, lambda what: damaged(path, what, advice), self._rows or 0)
        if self._rows not in (None, found.metadata.num_rows):
            raise damaged(path, f"it has {found.metadata.num_rows:,} rows, expected {self._rows:,}", advice)
        return found

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Raise StorageError for whatever pyarrow raises on a damaged file."""
        try:
            yield
        except EigentraceError:
            raise
        except FileNotFoundError:
            raise StorageError(f"{self.path} is missing. {self._advice}") from None
        except (pa.ArrowException, OSError, ValueError, TypeError) as error:
            raise damaged(self.path, f"it cannot be read ({error})", self._advice) from None


def checksums_of(path: Path) -> str:
    """Return the checksums of a file's blocks as text, for a manifest."""
    with open_regular(path) as file:
        return b64encode(sums_of(file).tobytes()).decode("ascii")


class Names:
    """One column of a Parquet file, whose items can be read without the rest of the file."""

    def __init__(self, held: ColumnsFile, column: str) -> None:
        self.held, self.column = held, column

    def whole(self) -> np.ndarray:  # (N,)
        """Return all items."""
        with self.held.reading():
            return self.held.table([self.column]).column(0).to_numpy()

    def of(self, rows: np.ndarray) -> np.ndarray:  # (...) -> (...)
        """Return the items of the given rows, in any order and shape; None for row -1."""
        with self.held.reading():
            return self._of(rows)

    def _of(self, rows: np.ndarray) -> np.ndarray:
        flat = rows.reshape(-1)
        wanted = np.unique(flat[flat >= 0])
        group = np.searchsorted(self._ends, wanted, side="right")
        parts = [pa.array([], self.held.file.schema.field(self.column).type).to_numpy(zero_copy_only=False)]
        groups = np.unique(group)
        for some in np.split(groups, range(_GROUPS_AT_ONCE, len(groups), _GROUPS_AT_ONCE)) if len(groups) else ():
            read = self.held.file.read(some.tolist(), [self.column]).column(0)
            here = wanted[np.isin(group, some)]
            ends = np.cumsum(self._sizes[some])
            at = np.searchsorted(some, np.searchsorted(self._ends, here, side="right"))
            parts.append(read.take(pa.array(here - self._ends[some][at] + ends[at])).to_numpy())
        found = np.concatenate(parts[1:] or parts)
        if len(wanted) and not (flat < 0).any():
            return found[np.searchsorted(wanted, flat)].reshape(rows.shape)
        result = np.full(flat.shape, None, dtype=object)
        result[flat >= 0] = found[np.searchsorted(wanted, flat[flat >= 0])]
        return result.reshape(rows.shape)

    @cached_property
    def _sizes(self) -> np.ndarray:
        return np.array(self.held.file.sizes, np.int64)

    @cached_property
    def _ends(self) -> np.ndarray:
        return np.cumsum(self._sizes)
