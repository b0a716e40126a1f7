"""Which rows of a dataset decisions are about: by ids where there are any, else by an order that labels agree with."""

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

_ALONE = "or give decisions.mask to go by the order of the rows alone; nothing was written."


def matched(
    decisions: Decisions, files: Files, id: str | None, label: str | None, delimiter: str | None, has_names: bool
) -> np.ndarray:  # (N,) bool
    """Return which rows of the dataset go, in its own order.

    Args:
        decisions: What was decided.
        files: The dataset.
        id: Its column of ids; "id" if not given.
        label: Its column of labels; "label", if there is one, if not given.
        delimiter: What separates the fields of a CSV.
        has_names: Whether columns have names.
    """
    if decisions.ids is None:
        if id is not None:
            raise InputError(f"The decisions have no ids to compare with column {id!r}: leave id away.")
        column = (
            single_column(files, label or "label", delimiter) if has_names and decisions.labels is not None else None
        )
        if column is None and label is not None:
            raise InputError(f"There are no labels to compare with in column {label!r} of {files.source}, {_ALONE}")
        if column is not None and len(column) == len(decisions):
            _check_labels(decisions, column, files)
        return decisions.mask
    column = single_column(files, id or "id", delimiter) if has_names else None
    if column is None:
        raise InputError(
            f"The decisions have ids, and {files.source} has no column {id or 'id'!r} to find them in. Name the column "
            f"with id=..., {_ALONE}"
        )
    return _by_id(decisions, column, files)


def _by_id(decisions: Decisions, column: pa.ChunkedArray, files: Files) -> np.ndarray:
    ids: Any = decisions.ids
    held = ids if isinstance(ids, pa.Array | pa.ChunkedArray) else pa.array(np.asarray(ids))
    held = pa.chunked_array([held]) if isinstance(held, pa.Array) else held
    found = id_difference(held, column) if len(column) == len(held) else None
    if found is None:  # or another number of rows, which is told when they are copied
        return decisions.mask
    if not same_set(held, column):
        raise MismatchError(
            f"{files.source} is not the dataset that was decided on: {found}. Give the dataset that was scored, name "
            f"its column of ids with id=..., {_ALONE}"
        )
    names = held.cast(pa.large_string()).combine_chunks()
    return decisions.mask[pc.index_in(column.cast(pa.large_string()), names).to_numpy()]


def _check_labels(decisions: Decisions, column: pa.ChunkedArray, files: Files) -> None:
    """Stop unless rows of equal label in the dataset have equal classes; rows to be relabelled may have any."""
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
            f"{files.source} is not the dataset that was decided on: its rows {other} and {row} have the same label "
            f"{column[row].as_py()!r}, and were scored as classes {labels[other]} and {labels[row]}. Give the dataset "
            f"that was scored, name its column of labels with label=..., {_ALONE}"
        )
