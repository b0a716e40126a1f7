"""What the rows of a dataset hold, in a few numbers, and whether a file still holds what was scored."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from eigentrace.data.rows import spread
from eigentrace.digest import digests
from eigentrace.errors import MismatchError
from eigentrace.inputs.columns import class_labels
from eigentrace.inputs.records import Records
from eigentrace.store import Folder
from eigentrace.unchanged import id_difference, label_difference, stored_ids

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
    total, mixed = hashlib.sha256(), 0
    for table in records.pieces(columns, _ROWS_AT_ONCE):
        found = _digests(table)
        if found is None:
            return {}
        total.update(found.astype("<u8").tobytes())
        mixed = (mixed + int(found.sum(dtype=np.uint64))) % 2**64
    return {"content": total.hexdigest(), "unordered": f"{mixed:016x}", "sample": sample_of(records, columns)}


def sample_of(records: Records, columns: Sequence[str]) -> str:
    """Hash the rows that a look at a large dataset can afford."""
    long = min(_LONG, len(records))
    starts = spread(len(records) - long + 1, _STRETCHES)
    found = _digests(records.read(np.unique(starts[:, None] + np.arange(long)), columns))
    return "" if found is None else hashlib.sha256(found.astype("<u8").tobytes()).hexdigest()


def _digests(table: pa.Table) -> np.ndarray | None:
    return digests(zip(*(column.to_pylist() for column in table.columns), strict=True))


def check_unchanged(
    records: Records,
    roles: Mapping[str, str],
    identity: str | None,
    folder: Folder,
    how: Mapping[str, Any],
    *,
    whole: bool = False,
) -> None:
    """Stop if a dataset is not the one that a run scored.

    Ids and labels are compared row by row; of the rest 64 rows, or all with `whole`.

    Args:
        records: The dataset.
        roles: Which column serves as what.
        identity: The column of ids.
        folder: The run.
        how: What the run was made from.
        whole: Read all that there is, and accept rows that stand in another order under the same ids.
    """
    count, known, found = int(folder.manifest["data"]["rows"]), how.get("data") or {}, None
    columns = content_columns(roles, identity)
    if len(records) != count:
        found = f"it has {len(records):,} rows, and {count:,} were scored"
    held = stored_ids(folder) if identity is not None and found is None else None
    moved = False
    if held is not None and identity is not None:
        ids = records.whole([identity]).column(0)
        found = id_difference(held, ids)
        moved = whole and found is not None and same_set(held, ids)
        found = None if moved else found
    if found is None and not moved and "label" in roles and how.get("classes"):
        names = {name: number for number, name in enumerate(how["classes"])}
        found = label_difference(folder, class_labels(records, roles["label"], names, len(names)))
    if found is None and whole and "content" in known:
        key = "unordered" if moved else "content"
        now = content_of(records, columns)
        if now.get(key) != known[key]:
            same = now.get("unordered") == known["unordered"]
            found = "its rows are in another order" if same else "its rows hold something else"
    elif found is None and "sample" in known and sample_of(records, columns) != known["sample"]:
        found = "its rows hold something else, or are in another order"
    if found is not None:
        raise MismatchError(
            f"{records.name} is not what the run at {folder.path} scored: {found}. Bring back the dataset that was "
            "scored, or fit and score what it is now in another directory."
        )


def content_columns(roles: Mapping[str, str], identity: str | None) -> list[str]:
    """Name the columns that a row's content is made of."""
    return list(dict.fromkeys([*roles.values(), *([] if identity is None else [identity])]))


def same_set(held: pa.ChunkedArray, ids: pa.ChunkedArray) -> bool:
    """Tell whether two columns of ids name the same examples, every one of them once."""
    held, ids = (values.cast(pa.large_string()) for values in (held, ids))
    if len(held) != len(ids) or pc.count_distinct(held).as_py() != len(held):
        return False
    return pc.count_distinct(ids).as_py() == len(ids) and pc.all(pc.is_in(ids, held.combine_chunks())).as_py()
