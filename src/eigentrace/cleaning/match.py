"""Matching of decisions to the rows of a dataset: by id, or by position with a check of labels."""

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from eigentrace.cleaning.decisions import Decisions
from eigentrace.errors import InputError, MismatchError
from eigentrace.formats.content_hash import same_set
from eigentrace.formats.files import Files
from eigentrace.formats.single_column import single_column
from eigentrace.store.same_data import id_difference

_ALONE = "or pass decisions.mask to match rows by position only; nothing was written."


def matched(
    decisions: Decisions, files: Files, id: str | None, label: str | None, delimiter: str | None, has_names: bool
) -> np.ndarray:  # (N,) bool
    """Return the mask of rows to drop, in the order of the dataset.

    Args:
        decisions: The decisions.
        files: The dataset.
        id: The dataset's column of ids; "id" if not given.
        label: The dataset's column of labels; "label", if it exists, if not given.
        delimiter: The delimiter of CSV fields.
        has_names: Whether columns have names.
    """
    if decisions.ids is None:
        if id is not None:
            raise InputError(f"id={id!r} cannot be used, because the decisions have no ids. Omit id.")
        column = (
            single_column(files, label or "label", delimiter) if has_names and decisions.labels is not None else None
        )
        if column is None and label is not None:
            raise InputError(
                f"The labels of the decisions cannot be compared with column {label!r} of {files.source}: the column "
                f"or the labels are missing. Pass the right column with label=..., {_ALONE}"
            )
        if column is not None and len(column) == len(decisions):
            _check_labels(decisions, column, files)
        return decisions.mask
    column = single_column(files, id or "id", delimiter) if has_names else None
    if column is None:
        raise InputError(
            f"The decisions have ids, but {files.source} has no column {id or 'id'!r}. Pass the column of ids with "
            f"id=..., {_ALONE}"
        )
    return _by_id(decisions, column, files)


def _by_id(decisions: Decisions, column: pa.ChunkedArray, files: Files) -> np.ndarray:
    ids: Any = decisions.ids
    held = ids if isinstance(ids, pa.Array | pa.ChunkedArray) else pa.array(np.asarray(ids))
    held = pa.chunked_array([held]) if isinstance(held, pa.Array) else held
    found = id_difference(held, column) if len(column) == len(held) else None
    if found is None:  # a different number of rows raises an error when rows are copied
        return decisions.mask
    if not same_set(held, column):
        raise MismatchError(
            f"{files.source} is not the dataset of the decisions: {found}. Pass the dataset that was scored, pass its "
            f"column of ids with id=..., {_ALONE}"
        )
    names = held.cast(pa.large_string()).combine_chunks()
    return decisions.mask[pc.index_in(column.cast(pa.large_string()), names).to_numpy()]


def _check_labels(decisions: Decisions, column: pa.ChunkedArray, files: Files) -> None:
    """Raise MismatchError unless rows with equal labels in the dataset have equal classes, except rows to relabel."""
    labels: Any = decisions.labels
    codes = pc.dictionary_encode(column).combine_chunks().indices.fill_null(-1).to_numpy()
    compared = (labels >= 0) & (codes >= 0)
    compared[decisions.to_relabel] = False
    rows = np.flatnonzero(compared)
    _, first, place = np.unique(codes[rows], return_index=True, return_inverse=True)
    differs = labels[rows] != labels[rows[first]][place]
    if differs.any():
        at = int(differs.argmax())
        row, other = int(rows[at]), int(rows[first[place[at]]])
        raise MismatchError(
            f"{files.source} is not the dataset of the decisions: its rows {other} and {row} have the same label "
            f"{column[row].as_py()!r}, but were scored as classes {labels[other]} and {labels[row]}. Pass the dataset "
            f"that was scored, pass its column of labels with label=..., {_ALONE}"
        )
