"""Converting scores given as tensors, arrays or lists to checked float64 arrays."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from eigentrace.errors import InputError

Values = Tensor | np.ndarray | Sequence[float]
_BLOCK = 65536


def as_array(values: Any) -> np.ndarray:
    """Convert a tensor, an array or a list to a float64 array."""
    if isinstance(values, Tensor):
        # numpy has no bfloat16, so the cast comes first.
        return values.detach().cpu().double().numpy()
    return np.asarray(values, dtype=np.float64)


def summed(scores: np.ndarray, masks: np.ndarray) -> np.ndarray:  # (Q, N), (G, N) bool -> (Q, G)
    """Sum scores over groups of examples, in blocks, because masks converted to float64 take eight times the memory."""
    total = np.zeros((len(scores), len(masks)))
    for start in range(0, scores.shape[1], _BLOCK):
        part = slice(start, start + _BLOCK)
        total += scores[:, part] @ masks[:, part].T.astype(np.float64)
    return total


def checked(values: Any, name: str, ndim: int) -> np.ndarray:
    """Convert values to an array; raise InputError unless it is not empty, has no NaN, and has `ndim` dimensions."""
    array = as_array(values)
    if array.ndim != ndim or not array.size:
        shape = "(queries, training examples)" if ndim == 2 else "(training examples,)"
        raise InputError(f"{name} must have shape {shape} and not be empty, got shape {array.shape}.")
    num_nan = int(np.isnan(array).sum())
    if num_nan:
        raise InputError(
            f"{num_nan} of {array.size} numbers in {name} are NaN. Look for examples with an infinite loss, and leave "
            "them out or set their scores."
        )
    return array
