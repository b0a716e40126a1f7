"""Check that a dataset has not changed since a run scored it."""

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
    """Raise MismatchError if a dataset differs from the one that a run scored.

    Ids and labels are compared in all rows; other content in 64 rows, or in all rows with `whole`.

    Args:
        records: The dataset.
        roles: The column of each role, such as text or label.
        identity: The column of ids.
        folder: The run.
        how: The request of the run.
        whole: Compare the content of all rows, and accept rows in a different order if they have the same ids.
    """
    count, known, found = int(folder.manifest["data"]["rows"]), how.get("data") or {}, None
    columns = content_columns(roles, identity)
    if len(records) != count:
        found = f"it has {len(records):,} rows, but {count:,} were scored"
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
            found = "its rows are in a different order" if same else "the content of its rows differs"
    elif found is None and "sample" in known and sample_of(records, columns) != known["sample"]:
        found = "the content or the order of its rows differs"
    if found is not None:
        raise MismatchError(
            f"{records.name} has changed since the run at {folder.path} scored it: {found}. Restore the dataset that "
            "was scored, or fit and score the current one in another directory."
        )
