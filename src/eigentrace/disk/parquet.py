"""Parquet files of which no more is decoded than their bytes on the disk justify.

A small file can stand for any number of bytes: equal values are stored once, with a count, texts are stored once and
repeated by number, and pages are compressed. What a file says of its values is added up when it is opened, what its
pages say of themselves before they are read, and texts that are repeated by number are counted before they are written
out.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from eigentrace.disk.parquet_pages import Pages, pages_of

# Bytes that the values of a file may take in memory: in any case, per byte of the file, and per row known to exist.
_LEAST, _PER_BYTE, _PER_ROW = 1 << 30, 64, 128
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8, "BYTE_ARRAY": 4}
# Texts of a row group with more bytes cannot be read as a dictionary.
_LARGEST_DICTIONARY = 1 << 31


class BoundedParquet:
    """A Parquet file whose values are counted before they are decoded.

    Args:
        make: Opens the file, given the names of the columns to read as dictionaries.
        raw: Opens the bytes of the file.
        size: The number of its bytes.
        refuse: Returns the error to raise, given what is wrong.
        rows: The number of rows that are known to exist, if any.
    """

    def __init__(
        self,
        make: Callable[[list[str]], pq.ParquetFile],
        raw: Callable[[], Any],
        size: int,
        refuse: Callable[[str], Exception],
        rows: int = 0,
    ) -> None:
        self._make, self._raw, self._refuse = make, raw, refuse
        self._pages: dict[tuple[int, int], Pages] = {}
        self.file = make([])
        self._coded: dict[tuple[str, ...], pq.ParquetFile] = {}
        self.metadata, self.schema = self.file.metadata, self.file.schema_arrow
        self.most = _LEAST + _PER_BYTE * size + _PER_ROW * rows
        self.sizes = [self.metadata.row_group(group).num_rows for group in range(self.metadata.num_row_groups)]
        if min(self.sizes, default=0) < 0 or sum(self.sizes) != self.metadata.num_rows:
            raise refuse(f"its row groups have {sum(self.sizes):,} rows, expected {self.metadata.num_rows:,}")
        self._check_claims()

    def close(self) -> None:
        """Close the file."""
        for file in (self.file, *self._coded.values()):
            file.close()

    def read(self, groups: Sequence[int] | None = None, columns: Sequence[str] | None = None) -> pa.Table:
        """Return row groups of some columns, all by default; raise the error if their values take too much memory."""
        groups = range(len(self.sizes)) if groups is None else groups
        names = list(self.schema.names if columns is None else columns)
        self._check_pages(names, groups)
        coded = tuple(name for name in dict.fromkeys(names) if self._may_swell(name, groups))
        if coded and coded not in self._coded:
            self._coded[coded] = self._make(list(coded))
        table = (self._coded[coded] if coded else self.file).read_row_groups(list(groups), columns=names)
        self.check(sum(_swelled(column) for column in table.columns))
        for at, field in enumerate(table.schema):
            if field.name in coded and not pa.types.is_dictionary(self.schema.field(field.name).type):
                table = table.set_column(at, field.name, _plain(table.column(at), self.schema.field(field.name).type))
        return table

    def check(self, size: int) -> None:
        """Raise the error if values would take more bytes of memory than the file justifies."""
        if size > self.most:
            what = f"its values would take {size:,} bytes of memory"
            raise self._refuse(f"{what}, expected at most {self.most:,} for its size")

    def _check_claims(self) -> None:
        """Raise the error if the values that the file says it has would take too much memory."""
        schema, total = self.metadata.schema, 0
        for number, rows in enumerate(self.sizes):
            group = self.metadata.row_group(number)
            for at in range(group.num_columns):
                about, leaf = group.column(at), schema.column(at)
                if about.num_values < 0 or (not leaf.max_repetition_level and about.num_values != rows):
                    what = f"column {leaf.path!r} of row group {number} has {about.num_values:,} values"
                    raise self._refuse(f"{what}, expected {rows:,}")
                total += max(about.total_uncompressed_size, about.num_values * _width(leaf))
        self.check(total)

    def _check_pages(self, names: Sequence[str], groups: Sequence[int]) -> None:
        """Raise the error if the pages that are about to be read would take too much memory."""
        total, wanted = 0, set(names)
        with closing(self._raw()) as file:
            for number in groups:
                group = self.metadata.row_group(number)
                for at in range(group.num_columns):
                    about = group.column(at)
                    if about.path_in_schema in wanted or about.path_in_schema.split(".")[0] in wanted:
                        pages = self._pages_of(file, number, at, about)
                        total += max(pages.bytes, pages.values * _width(self.metadata.schema.column(at)))
        self.check(total)

    def _pages_of(self, file: Any, group: int, at: int, about: Any) -> Pages:
        if (group, at) not in self._pages:
            begins = [about.data_page_offset] + ([about.dictionary_page_offset] if about.has_dictionary_page else [])
            start = min(begin for begin in begins if begin or len(begins) == 1)
            try:
                if start < 0 or about.total_compressed_size < 0:
                    raise ValueError(f"it begins at byte {start:,} and has {about.total_compressed_size:,} bytes")
                self._pages[group, at] = pages_of(file, start, start + about.total_compressed_size)
            except ValueError as error:
                where = f"column {about.path_in_schema!r} of row group {group}"
                raise self._refuse(f"the pages of {where} cannot be read ({error})") from None
        return self._pages[group, at]

    def _may_swell(self, name: str, groups: Sequence[int]) -> bool:
        """Return whether texts of a column, if repeated by number, could take too much memory, and can be counted."""
        worst = 0
        if self.schema.names.count(name) != 1 or not _is_text(self.schema.field(name).type):
            return False
        for number in groups:
            group = self.metadata.row_group(number)
            for at in range(group.num_columns):
                about = group.column(at)
                if about.path_in_schema == name:
                    held = self._pages[number, at].bytes
                    if held >= _LARGEST_DICTIONARY:
                        return False
                    worst += about.num_values * held
        return worst > self.most


def _width(leaf: Any) -> int:
    return _WIDTHS.get(leaf.physical_type, leaf.length)


_TEXTS = (
    *(pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view),
    *(pa.types.is_binary, pa.types.is_large_binary, pa.types.is_binary_view),
)


def _is_text(kind: pa.DataType) -> bool:
    return any(check(kind) for check in _TEXTS)


def _swelled(column: pa.ChunkedArray) -> int:
    """Return the bytes of a column in memory, with texts that are repeated by number written out."""
    if not pa.types.is_dictionary(column.type) or not _is_text(column.type.value_type):
        return column.nbytes
    lengths = (pc.binary_length(chunk.dictionary).take(chunk.indices) for chunk in column.chunks)
    return column.nbytes + sum(pc.sum(long.cast(pa.int64())).as_py() or 0 for long in lengths)


def _plain(column: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    """Write out texts that are repeated by number, in pieces that fit into an array."""
    parts = []
    for chunk in column.chunks:
        pieces = max(1, math.ceil(_swelled(pa.chunked_array([chunk])) / _LEAST))
        step = max(1, math.ceil(len(chunk) / pieces))
        few = (chunk.slice(start, step) for start in range(0, len(chunk), step))
        parts += [one.cast(column.type.value_type).cast(kind) for one in few]
    return pa.chunked_array(parts, kind)
