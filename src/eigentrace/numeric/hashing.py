"""SHA-256 hashes that are stored on disk, and an overview of how files, data and models are compared.

| compared | with | equal means |
|---|---|---|
| file | `hash_file` | the same bytes |
| arrays (weights, a shard, a training set) | `hash_arrays` | the same labels, shapes, types and numbers, to the bit |
| example | `data.digest.digest` | the same content, independent of how it is read or collated |
| data | `hash_digests` | the same examples in the same order |
| model | `Task.fingerprint` | the same weights and the same selection of them, to the bit |
| model, within a process | `task.identity.WeightSums` | the same weights up to the order of summation |
| loss | `task.identity.LossFingerprint` | the same losses of a few examples, up to rounding |
| dataset on disk | `formats.content_hash` | the same inputs, labels and ids, in order, in any order, or in 64 rows |
| part of a file | `disk.blocks.block_sums` | the same bytes, except with a chance of 2^-64 |
| retrained model | `evaluate.output_cache` | the same rows and seed, with the same recipe and training set |
| ids and columns | `store.user_columns.same_columns` | the same values, in the closest type that Parquet supports |
"""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

_CHUNK = 1 << 22


def hash_file(path: Path) -> str:
    """Hash the bytes of a file."""
    total = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            total.update(chunk)
    return total.hexdigest()


def hash_text(text: str) -> str:
    """Hash a string as UTF-8."""
    return hashlib.sha256(text.encode()).hexdigest()


def hash_arrays(labelled: Iterable[tuple[str, Any]], head: str = "") -> str:
    """Hash the bytes of tensors or numpy arrays, in order.

    Args:
        labelled: Pairs of a label, such as name, shape and type, and an array.
        head: Text that is hashed before the arrays.
    """
    total = hashlib.sha256(head.encode())
    for label, array in labelled:
        total.update(label.encode())
        total.update(_bytes_of(array))
    return total.hexdigest()


def hash_digests(parts: Iterable[np.ndarray | None], head: str = "") -> str:
    """Hash the digests of examples (uint64), part by part; None counts as an empty part."""
    return hash_arrays((("", np.empty(0) if part is None else part.astype("<u8")) for part in parts), head)


def _bytes_of(array: Any) -> Any:
    if hasattr(array, "detach"):  # a tensor, on any device; numpy does not know all of its types
        import torch

        array = array.detach().cpu().contiguous().reshape(-1)
        array = array.view(torch.uint8).numpy() if array.numel() else np.empty(0)
    array = np.ascontiguousarray(array)
    return array.reshape(-1).view(np.uint8).data if array.size else b""
