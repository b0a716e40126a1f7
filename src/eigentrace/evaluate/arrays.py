"""Numbers in any of the forms people have them, as float64 arrays that were looked at first."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from eigentrace.errors import InputError

Values = Tensor | np.ndarray | Sequence[float]
_BLOCK = 65536


def as_array(values: Any) -> np.ndarray:
    """Turn a tensor, an array or a list into a float64 array."""
    if isinstance(values, Tensor):
        # numpy has no bfloat16, so the cast comes before the change of library.
        return values.detach().cpu().double().numpy()
    return np.asarray(values, dtype=np.float64)


def summed(scores: np.ndarray, masks: np.ndarray) -> np.ndarray:  # (Q, N), (G, N) bool -> (Q, G)
    """Sum scores over groups of examples, in blocks that keep the masks small while they are numbers."""
    total = np.zeros((len(scores), len(masks)))
    for start in range(0, scores.shape[1], _BLOCK):
        part = slice(start, start + _BLOCK)
        total += scores[:, part] @ masks[:, part].T.astype(np.float64)
    return total


def checked(values: Any, name: str, ndim: int) -> np.ndarray:
    """Turn numbers into an array, and refuse another number of dimensions, emptiness and NaN by name."""
    array = as_array(values)
    if array.ndim != ndim or not array.size:
        shape = "(queries, training examples)" if ndim == 2 else "(training examples,)"
        raise InputError(f"{name} must have shape {shape} and hold something, got shape {array.shape}.")
    num_nan = int(np.isnan(array).sum())
    if num_nan:
        raise InputError(
            f"{num_nan} of {array.size} numbers in {name} are NaN: look for examples with an infinite loss, and leave "
            "them out or give them a score."
        )
    return array
