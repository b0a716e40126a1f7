"""Readers of a dataset's labels, ids and metadata columns."""

import json
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from eigentrace.errors import DataError, InputError
from eigentrace.formats.records import Records

# Maximum mean size in bytes of texts that count as metadata, such as names, dates and addresses, but not documents.
_SMALL = 128
_SAMPLE = 1024


def is_text(kind: pa.DataType) -> bool:
    """Return whether a column type is text, plain or dictionary-encoded."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)


def check_text(records: Records, **columns: str | None) -> None:
    """Raise InputError unless all given columns are text."""
    for what, column in columns.items():
        if column is not None and not is_text(records.schema.field(column).type):
            raise InputError(
                f"Column {column!r} of {records.name}, used as {what}, must be text, got "
                f"{records.schema.field(column).type}. Choose another column with {what}."
            )


def class_labels(records: Records, column: str, label2id: Mapping[str, int], num_labels: int) -> np.ndarray:  # (N,)
    """Return the class number of every row.

    Text is looked up in the model's `label2id`; text that is not in it but consists of digits is a class number, and
    so are integers. If the dataset stores class names for its integers, and they are the same names as the model's,
    the integers are converted to the model's class numbers by name.
    """
    records.refuse_nulls(column)
    kind = records.schema.field(column).type
    names = _class_names(records, column)
    if is_text(kind):
        return np.concatenate(
            [_by_name(records, column, label2id, num_labels, *chunk) for chunk in records.chunks(column)]
        )
    if not pa.types.is_integer(kind) and not pa.types.is_boolean(kind):
        raise InputError(
            f"Labels must be names or integers, but column {column!r} of {records.name} contains {kind}. Choose "
            "another column with label."
        )
    named = names is not None and set(names) == set(label2id)
    if not named:
        _refuse_two_numberings(column, label2id)
    table = np.array([label2id[name] for name in names], np.int32) if named and names is not None else None
    size = num_labels if table is None else len(table)
    numbers = [_in_range(records, column, size, *chunk) for chunk in records.chunks(column)]
    labels = np.concatenate(numbers)
    return labels if table is None else table[labels]


def class_of(label: int | str, label2id: Mapping[str, int], num_labels: int) -> int:
    """Return the class number of one label: a number, a class name, or a number as text."""
    if isinstance(label, str):
        found = _class_of(label, label2id, num_labels)
    else:
        found = label if isinstance(label, Integral) and 0 <= label < num_labels else -1
    if found < 0:
        names = ", ".join(sorted(label2id, key=lambda name: label2id[name])[:10])
        known = f", or one of {names}" if names else ""
        raise InputError(f"The model has no class {label!r}. Pass a number from 0 to {num_labels - 1}{known}.")
    return int(found)


def _by_name(
    records: Records, column: str, label2id: Mapping[str, int], num_labels: int, first: int, chunk: pa.Array
) -> np.ndarray:
    encoded = chunk if pa.types.is_dictionary(chunk.type) else chunk.dictionary_encode()
    codes = encoded.indices.to_numpy()
    names = encoded.dictionary.to_pylist()
    classes = np.array([_class_of(name, label2id, num_labels) for name in names], dtype=np.int32)
    labels = classes[codes] if len(codes) else np.empty(0, np.int32)
    if (labels < 0).any():
        at = int((labels < 0).argmax())
        known = ", ".join(sorted(label2id, key=lambda name: label2id[name])[:10])
        raise DataError(
            f"Row {first + at} of {records.name} (counted from 0) has the label {names[codes[at]]!r}, which is not a "
            f"class of the model. Its config.json has {num_labels} classes: {known}"
            f"{', …' if len(label2id) > 10 else ''}. Use these names (label2id), or numbers from 0 to {num_labels - 1}."
        )
    return labels


def _class_of(name: str, label2id: Mapping[str, int], num_labels: int) -> int:
    if name in label2id:
        return label2id[name]
    return int(name) if name.isascii() and name.isdigit() and int(name) < num_labels else -1


def _in_range(records: Records, column: str, size: int, first: int, chunk: pa.Array) -> np.ndarray:
    labels = pc.cast(chunk, pa.int64()).to_numpy(zero_copy_only=False)
    wrong = (labels < 0) | (labels >= size)
    if wrong.any():
        at = int(wrong.argmax())
        raise DataError(
            f"Row {first + at} of {records.name} (counted from 0) has the label {labels[at]} in column {column!r}, but "
            f"the model has {size} classes, 0 to {size - 1}."
        )
    return labels.astype(np.int32)


def _refuse_two_numberings(column: str, label2id: Mapping[str, int]) -> None:
    other = {name: number for name, number in label2id.items() if name.isdigit() and int(name) != number}
    if other:
        name, number = next(iter(other.items()))
        raise InputError(
            f"Column {column!r} contains numbers, but in the model's config.json class {number} has the name {name!r}: "
            "a number may be a class number or a name. Write the labels as text to use them as names."
        )


def _class_names(records: Records, column: str) -> list[str] | None:
    """Return the class names that the `datasets` package stored for a column of class numbers, or None."""
    stored = (records.schema.metadata or {}).get(b"huggingface")
    if stored is None:
        return None
    try:
        feature = json.loads(stored)["info"]["features"].get(column, {})
        is_class = isinstance(feature, dict) and feature.get("_type") == "ClassLabel"
        names: Any = feature.get("names") if is_class else []
        if not all(isinstance(name, str) for name in names):
            raise TypeError("class names must be text")
        return names or None
    except KeyError:
        return None
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(
            f"The features that `datasets` stored in {records.name} are damaged ({error}), so the names of its classes "
            "are unknown. Save the dataset again."
        ) from None


def read_ids(records: Records, column: str | None) -> np.ndarray | pa.Array | None:
    """Return the ids as one array: NumPy for integers, Arrow for text; None without a column."""
    if column is None:
        return None
    records.refuse_nulls(column)
    kind = records.schema.field(column).type
    if not is_text(kind) and not pa.types.is_integer(kind):
        raise InputError(
            f"Ids must be text or integers, but column {column!r} of {records.name} contains {kind}. Choose another "
            "column with id."
        )
    ids = records.whole([column]).column(0)
    if not is_text(kind):
        return ids.to_numpy()
    # 64-bit offsets: the ids of a hundred million examples exceed 2 GiB.
    return pc.cast(ids, pa.large_string()).combine_chunks()


def metadata_of(
    records: Records, taken: Sequence[str | None], identity: str | None, columns: Sequence[str] | None
) -> pa.Table | None:
    """Return the metadata columns of a dataset as a table; None if there are none.

    Args:
        records: The dataset.
        taken: Columns of inputs and labels, which are excluded by default.
        identity: The column of ids, which is always included.
        columns: The columns to read; None for all numbers, dates, and texts of at most 128 bytes on average.
    """
    if columns is None:
        names = [n for n in records.schema.names if n == identity or (n not in taken and _is_small(records, n))]
    else:
        for column in columns:
            records.check_columns(columns=column)
        names = [name for name in records.schema.names if name == identity or name in columns]
    return records.whole(names) if names else None


def _is_small(records: Records, column: str) -> bool:
    kind = records.schema.field(column).type
    if not is_text(kind):
        return pa.types.is_primitive(kind) or pa.types.is_dictionary(kind) or pa.types.is_decimal(kind)
    sample = records.read(np.arange(min(len(records), _SAMPLE)), [column]).column(0)
    return (pc.mean(pc.binary_length(pc.cast(sample, pa.string()))).as_py() or 0) <= _SMALL
