"""Hashes of a dataset's rows, by which a changed file is told."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from eigentrace.data.digest import digests
from eigentrace.data.row_numbers import spread
from eigentrace.formats.records import Records
from eigentrace.numeric.hashing import hash_digests

# Where reading all rows would take too long: stretches of them, which lie in few row groups, and rows of each.
_STRETCHES, _LONG = 4, 16


# Rows that become Python objects at a time: they may be images.
_ROWS_AT_ONCE = 1 << 10


def content_of(records: Records, columns: Sequence[str]) -> dict[str, Any]:
    """Read some columns whole, and return what tells their rows from others.

    Returns:
        "content", a hash of all rows in their order; "unordered", one that does not depend on it; and "sample", that of
        64 rows in four stretches, from the first to the last. Empty where a value has no digest.
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
    """Hash the rows that a look at a large dataset can afford."""
    long = min(_LONG, len(records))
    starts = spread(len(records) - long + 1, _STRETCHES)
    found = _digests(records.read(np.unique(starts[:, None] + np.arange(long)), columns))
    return "" if found is None else hash_digests([found])


def _digests(table: pa.Table) -> np.ndarray | None:
    return digests(zip(*(column.to_pylist() for column in table.columns), strict=True))


def content_columns(roles: Mapping[str, str], identity: str | None) -> list[str]:
    """Name the columns that a row's content is made of."""
    return list(dict.fromkeys([*roles.values(), *([] if identity is None else [identity])]))


def same_set(held: pa.ChunkedArray, ids: pa.ChunkedArray) -> bool:
    """Tell whether two columns of ids name the same examples, every one of them once."""
    held, ids = (values.cast(pa.large_string()) for values in (held, ids))
    if len(held) != len(ids) or pc.count_distinct(held).as_py() != len(held):
        return False
    return pc.count_distinct(ids).as_py() == len(ids) and pc.all(pc.is_in(ids, held.combine_chunks())).as_py()
