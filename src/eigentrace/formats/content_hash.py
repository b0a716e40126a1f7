"""Hashes of a dataset's content, which detect changed files."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from eigentrace.data.digest import digests
from eigentrace.data.row_numbers import spread
from eigentrace.formats.records import Records
from eigentrace.numeric.hashing import hash_digests

# The sample of a large dataset: number of ranges of rows (consecutive rows are in few row groups), and rows in each.
_STRETCHES, _LONG = 4, 16


# Rows converted to Python objects at a time; few, because they may be images.
_ROWS_AT_ONCE = 1 << 10


def content_of(records: Records, columns: Sequence[str]) -> dict[str, Any]:
    """Return hashes of all rows of the given columns.

    Returns:
        "content", a hash of all rows in order; "unordered", a hash that does not depend on their order; and "sample", a
        hash of 64 rows in four ranges spread over the dataset. Empty if any value has no digest.
    """
    mixed, lacks = 0, False

    def parts() -> Iterator[np.ndarray]:
        nonlocal mixed, lacks
        for table in records.pieces(columns, _ROWS_AT_ONCE):
            part = _digests(table)
            if part is None:
                lacks = True
                return
            mixed = (mixed + int(part.sum(dtype=np.uint64))) % 2**64
            yield part

    content = hash_digests(parts())
    if lacks:
        return {}
    return {"content": content, "unordered": f"{mixed:016x}", "sample": sample_of(records, columns)}


def sample_of(records: Records, columns: Sequence[str]) -> str:
    """Return a hash of up to 64 rows, spread over the dataset in four ranges; empty if any value has no digest."""
    long = min(_LONG, len(records))
    starts = spread(len(records) - long + 1, _STRETCHES)
    found = _digests(records.read(np.unique(starts[:, None] + np.arange(long)), columns))
    return "" if found is None else hash_digests([found])


def _digests(table: pa.Table) -> np.ndarray | None:
    return digests(zip(*(column.to_pylist() for column in table.columns), strict=True))


def content_columns(roles: Mapping[str, str], identity: str | None) -> list[str]:
    """Return the columns that are hashed as the content of a row: inputs, labels and ids."""
    return list(dict.fromkeys([*roles.values(), *([] if identity is None else [identity])]))


def same_set(held: pa.ChunkedArray, ids: pa.ChunkedArray) -> bool:
    """Return whether two columns contain the same ids in any order, each exactly once."""
    held, ids = (values.cast(pa.large_string()) for values in (held, ids))
    if len(held) != len(ids) or pc.count_distinct(held).as_py() != len(held):
        return False
    return pc.count_distinct(ids).as_py() == len(ids) and pc.all(pc.is_in(ids, held.combine_chunks())).as_py()
