"""What a dataset's columns say beside the inputs: classes, ids, and metadata to group and filter by."""

import json
from collections.abc import Mapping, Sequence
from numbers import Integral

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from eigentrace.errors import DataError, InputError
from eigentrace.formats.records import Records

# Mean bytes of a text that still counts as metadata: names, dates and addresses, and no documents.
_SMALL = 128
_SAMPLE = 1024


def is_text(kind: pa.DataType) -> bool:
    """Tell whether a column holds text, directly or by a dictionary."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)


def check_text(records: Records, **columns: str | None) -> None:
    """Refuse columns that should be text and are not."""
    for what, column in columns.items():
        if column is not None and not is_text(records.schema.field(column).type):
            raise InputError(
                f"Column {column!r} of {records.name}, asked for as {what}, holds {records.schema.field(column).type} "
                f"and no text. Name another column with {what}."
            )


def class_labels(records: Records, column: str, label2id: Mapping[str, int], num_labels: int) -> np.ndarray:  # (N,)
    """Read the class of every row.

    Text is looked up among the names of the model's config; text of digits that is no name there, and whole numbers,
    are classes themselves. A dataset that names the classes its numbers stand for has them looked up by name, where
    the model knows the same names.
    """
    records.refuse_nulls(column)
    kind = records.schema.field(column).type
    names = _class_names(records.schema, column)
    if is_text(kind):
        return np.concatenate(
            [_by_name(records, column, label2id, num_labels, *chunk) for chunk in records.chunks(column)]
        )
    if not pa.types.is_integer(kind) and not pa.types.is_boolean(kind):
        raise InputError(
            f"Labels must be names or whole numbers, and column {column!r} of {records.name} holds {kind}. Name "
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
    """Return the class that a single label means: a number is a class, a text its name or its number."""
    if isinstance(label, str):
        found = _class_of(label, label2id, num_labels)
    else:
        found = label if isinstance(label, Integral) and 0 <= label < num_labels else -1
    if found < 0:
        names = ", ".join(sorted(label2id, key=lambda name: label2id[name])[:10])
        known = f", or one of {names}" if names else ""
        raise InputError(f"The model has no class {label!r}: give a number from 0 to {num_labels - 1}{known}.")
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
            f"Row {first + at} of {records.name} (counted from 0) has the label {names[codes[at]]!r}, which the model "
            f"does not know. Its config.json names {num_labels} classes: {known}{', …' if len(label2id) > 10 else ''}. "
            f"Name classes as there (label2id), or by numbers from 0 to {num_labels - 1}."
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
            f"Row {first + at} of {records.name} (counted from 0) has the label {labels[at]} in column {column!r}, and "
            f"the model has {size} classes, 0 to {size - 1}."
        )
    return labels.astype(np.int32)


def _refuse_two_numberings(column: str, label2id: Mapping[str, int]) -> None:
    other = {name: number for name, number in label2id.items() if name.isdigit() and int(name) != number}
    if other:
        name, number = next(iter(other.items()))
        raise InputError(
            f"Column {column!r} holds numbers, and the model's config.json calls class {number} {name!r}: a number may "
            "mean a name or a class. Write the labels as text to have them taken as names."
        )


def _class_names(schema: pa.Schema, column: str) -> list[str] | None:
    """Names that the `datasets` package stored beside a column of class numbers."""
    stored = (schema.metadata or {}).get(b"huggingface")
    if stored is None:
        return None
    feature = json.loads(stored).get("info", {}).get("features", {}).get(column, {})
    return feature.get("names") if isinstance(feature, dict) and feature.get("_type") == "ClassLabel" else None


def read_ids(records: Records, column: str | None) -> np.ndarray | pa.Array | None:
    """Read the ids as one array, of numpy where they are numbers."""
    if column is None:
        return None
    records.refuse_nulls(column)
    kind = records.schema.field(column).type
    if not is_text(kind) and not pa.types.is_integer(kind):
        raise InputError(f"Ids must be text or whole numbers, and column {column!r} of {records.name} holds {kind}.")
    ids = records.whole([column]).column(0)
    if not is_text(kind):
        return ids.to_numpy()
    # Offsets of 64 bits: the ids of a hundred million examples pass 2 GiB.
    return pc.cast(ids, pa.large_string()).combine_chunks()


def metadata_of(
    records: Records, taken: Sequence[str | None], identity: str | None, columns: Sequence[str] | None
) -> pa.Table | None:
    """Read what else the dataset says about every example.

    Args:
        records: The dataset.
        taken: Columns that are inputs or labels.
        identity: The column of ids, which always belongs to it.
        columns: Those wanted; None for all numbers, dates, and texts of at most 128 bytes in the mean.
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
