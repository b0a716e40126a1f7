"""Check that a dataset is still the one that a run scored."""

from collections.abc import Mapping
from typing import Any

from eigentrace.errors import MismatchError
from eigentrace.formats.content_hash import content_columns, content_of, same_set, sample_of
from eigentrace.formats.dataset_columns import class_labels
from eigentrace.formats.records import Records
from eigentrace.store import Folder
from eigentrace.store.same_data import id_difference, label_difference, stored_ids


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
