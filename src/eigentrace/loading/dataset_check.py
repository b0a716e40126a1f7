"""Checks of a dataset: whether it has changed since a run scored it, and warnings about rows that may be mistakes."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow.compute as pc

from eigentrace.errors import EigentraceWarning, MismatchError
from eigentrace.formats.content_hash import content_columns, content_of, same_set, sample_of
from eigentrace.formats.dataset_columns import class_labels
from eigentrace.formats.records import Records
from eigentrace.loading.inputs import Inputs
from eigentrace.settings import counted
from eigentrace.store import Folder
from eigentrace.store.same_data import id_difference, label_difference, stored_ids
from eigentrace.store.user_columns import as_columns

# Rows that a warning names.
_NAMED = 3


def warn_of_mistakes(inputs: Inputs) -> None:
    """Warn if several examples have the same id, or if texts are empty, with the number of rows and the first ones."""
    found = [] if inputs.data.ids is None else list(_repeated_ids(inputs.data.ids))
    for words in (*found, *(() if inputs.remarks is None else inputs.remarks())):
        warnings.warn(words, EigentraceWarning, stacklevel=2)


def _repeated_ids(ids: Any) -> Iterator[str]:
    column: Any = as_columns(None, ids, len(ids))
    encoded = pc.dictionary_encode(column.column(0), null_encoding="encode").combine_chunks()
    codes = encoded.indices.to_numpy()
    first = np.full(len(encoded.dictionary), -1)
    first[codes[::-1]] = np.arange(len(codes))[::-1]
    rows = np.flatnonzero(first[codes] != np.arange(len(codes)))
    if len(rows):
        named = [f"row {row} has the id {encoded[row].as_py()!r} of row {first[codes[row]]}" for row in rows[:_NAMED]]
        more = ", …" if len(rows) > _NAMED else ""
        yield (
            f"{len(rows):,} of {counted(len(codes), 'example')} have the id of an earlier one: {', '.join(named)}{more}"
            ". They cannot be told apart by id: give every example its own id, or leave the ids out."
        )


def empty_texts(records: Records, columns: Sequence[str]) -> Iterator[str]:
    """Yield a description of the rows without any text, for each column that has some."""
    for column in columns:
        rows = np.concatenate(
            [first + np.flatnonzero(_is_empty(chunk)) for first, chunk in records.chunks(column)] or [np.empty(0, int)]
        )
        if len(rows):
            named = ", ".join(map(str, rows[:_NAMED])) + (", …" if len(rows) > _NAMED else "")
            yield (
                f"{len(rows):,} of {counted(len(records), 'row')} of {records.name} have an empty text in column "
                f"{column!r} (row {named}, counted from 0). They are used as they are: if that is a mistake, "
                "remove them or fill them in."
            )


def _is_empty(chunk: Any) -> np.ndarray:  # (n,) bool
    plain = chunk.dictionary_decode() if hasattr(chunk, "dictionary_decode") else chunk
    return pc.equal(pc.utf8_length(pc.utf8_trim_whitespace(plain)), 0).to_numpy(zero_copy_only=False)


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
