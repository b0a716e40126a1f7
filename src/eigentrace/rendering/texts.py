"""Renderers of texts and pairs of texts in a table, which are read on access."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from eigentrace.errors import InputError
from eigentrace.rendering.example import Kind, Shown, check_rows, class_names, renderer_repr


class TextSource(Protocol):
    """A dataset with random access to rows, and sequential access to columns in chunks."""

    @property
    def schema(self) -> pa.Schema:
        """Names and types of the columns."""
        ...

    def __len__(self) -> int: ...

    def read(self, rows: Sequence[int], names: Sequence[str]) -> pa.Table:
        """Return some rows of some columns, in the given order."""
        ...

    def chunks(self, column: str) -> Iterator[tuple[int, pa.Array]]:
        """Yield a column in row order as (first row, values)."""
        ...


class _Held:
    """A table in memory."""

    def __init__(self, table: pa.Table) -> None:
        self.schema, self._table = table.schema, table

    def __len__(self) -> int:
        return self._table.num_rows

    def read(self, rows: Sequence[int], names: Sequence[str]) -> pa.Table:
        # `take` would concatenate all chunks of a column, and fail if they exceed 2 GiB of text.
        return pa.concat_tables([self._table.select(names).slice(row, 1) for row in rows])

    def chunks(self, column: str) -> Iterator[tuple[int, pa.Array]]:
        row = 0
        for chunk in self._table.column(column).chunks:
            yield row, chunk
            row += len(chunk)


class Texts:
    """A renderer of examples with one text.

    Args:
        source: A pyarrow Table, a mapping of names to columns, an opened dataset, or the texts themselves.
        column: The column of texts.
        classes: The names of classes 0, 1, 2, …
    """

    kind: Kind = "text"

    def __init__(self, source: Any, column: str = "text", *, classes: Sequence[str] | None = None) -> None:
        if isinstance(source, list | tuple | pa.Array | pa.ChunkedArray):
            source = {column: source}
        self._columns, self._column = _opened(source, column), column
        self.classes = class_names(classes)

    __repr__ = renderer_repr

    def __len__(self) -> int:
        return len(self._columns)

    def __call__(self, rows: Sequence[int]) -> list[Shown]:
        """Return the texts of the given rows."""
        (texts,) = _read(self._columns, rows, self._column)
        return [Shown("text", text=text) for text in texts]

    def search(self, words: str) -> np.ndarray:  # (N,) bool
        """Return which texts contain `words` as a substring (case-insensitive)."""
        return _containing(self._columns, self._column, words)


class Pairs:
    """A renderer of examples with two texts, such as a source and its translation, or a question and its answer.

    Args:
        source: A pyarrow Table, a mapping of names to columns, or an opened dataset.
        text: The column of first texts.
        target: The column of second texts.
        classes: The names of classes 0, 1, 2, …
    """

    kind: Kind = "pair"

    def __init__(
        self, source: Any, text: str = "text", target: str = "target", *, classes: Sequence[str] | None = None
    ) -> None:
        self._columns, self._text, self._target = _opened(source, text, target), text, target
        self.classes = class_names(classes)

    __repr__ = renderer_repr

    def __len__(self) -> int:
        return len(self._columns)

    def __call__(self, rows: Sequence[int]) -> list[Shown]:
        """Return both texts of the given rows."""
        texts, targets = _read(self._columns, rows, self._text, self._target)
        return [Shown("pair", text=text, target=target) for text, target in zip(texts, targets, strict=True)]

    def search(self, words: str) -> np.ndarray:  # (N,) bool
        """Return which pairs contain `words` in either text, as a substring (case-insensitive)."""
        return _containing(self._columns, self._text, words) | _containing(self._columns, self._target, words)


def _opened(source: Any, *names: str) -> TextSource:
    if isinstance(source, Mapping):
        source = pa.table(dict(source))
    if isinstance(source, pa.Table):
        source = _Held(source)
    if not all(hasattr(source, name) for name in ("schema", "read", "chunks")):
        raise InputError(f"source must be a pyarrow Table or a mapping of columns, got {type(source).__name__}.")
    for name in names:
        if name not in source.schema.names:
            raise InputError(f"There is no column {name!r}. The columns are: {', '.join(source.schema.names)}.")
    return source


def _read(columns: TextSource, rows: Sequence[int], *names: str) -> list[list[str]]:
    rows = check_rows(rows, len(columns))
    if not rows:
        return [[] for _ in names]
    table = columns.read(rows, list(dict.fromkeys(names)))
    values = [table.column(name).to_pylist() for name in names]
    return [["" if value is None else str(value) for value in column] for column in values]


def _containing(columns: TextSource, name: str, words: str) -> np.ndarray:  # (N,) bool
    if not words:
        return np.ones(len(columns), dtype=bool)
    found = [_matches(chunk, words) for _, chunk in columns.chunks(name)]
    return np.concatenate(found) if found else np.zeros(0, dtype=bool)


def _matches(chunk: pa.Array, words: str) -> np.ndarray:
    if pa.types.is_dictionary(chunk.type):
        among = np.append(_matches(chunk.dictionary, words), False)  # the last entry is for null
        return among[pc.fill_null(chunk.indices, len(chunk.dictionary)).to_numpy(zero_copy_only=False)]
    if not (pa.types.is_string(chunk.type) or pa.types.is_large_string(chunk.type)):
        chunk = pc.cast(chunk, pa.large_string())
    found = pc.match_substring(chunk, words, ignore_case=True)
    return pc.fill_null(found, False).to_numpy(zero_copy_only=False)
