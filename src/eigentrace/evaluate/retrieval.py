"""Do the bad examples come first when a training set is ranked by a score?"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from eigentrace.errors import InputError

Values = Tensor | np.ndarray | Sequence[float]


@dataclass(frozen=True)
class Retrieval:
    """Quality of a ranking, as fractions of one."""

    auc: float
    """Chance that a random bad example scores above a random good one; ties count half."""
    ap: float
    """Precision averaged over recall, the step-wise area under the precision-recall curve."""


def retrieval(scores: Values, is_noisy: Values) -> Retrieval:
    """Measure how well high scores retrieve the noisy examples.

    Args:
        scores: One number per example; higher should mean noisier.
        is_noisy: One truth value per example.

    Returns:
        ROC AUC and average precision. Examples that share a score are taken together, so the order they
        are given in never matters.

    Raises:
        InputError: If the two do not have one value for each example, if a score is NaN, or if the noisy
            examples are none or all.

    >>> retrieval([0.9, 0.8, 0.3, 0.1], [True, False, True, False]).auc
    0.75
    """
    values, truth = _checked(scores, is_noisy)
    _, group = np.unique(-values, return_inverse=True)  # group 0 holds the highest score
    found = np.bincount(group, weights=truth)
    sizes = np.bincount(group)
    passed = sizes - found

    num_noisy, num_good = found.sum(), passed.sum()
    # Each noisy example beats the good ones of all lower groups, and half of those in its own.
    beaten = num_good - np.cumsum(passed) + 0.5 * passed
    auc = float(found @ beaten / (num_noisy * num_good))
    precision = np.cumsum(found) / np.cumsum(sizes)
    return Retrieval(auc=auc, ap=float(found @ precision / num_noisy))


def _checked(scores: Values, is_noisy: Values) -> tuple[np.ndarray, np.ndarray]:
    values, truth = _as_array(scores), _as_array(is_noisy)
    if values.ndim != 1 or values.shape != truth.shape:
        raise InputError(
            f"scores has shape {values.shape} and is_noisy {truth.shape}: give one score and one truth value "
            "for each example."
        )
    if not np.isin(truth, (0.0, 1.0)).all():
        raise InputError(
            "is_noisy holds values other than true and false: compare first, for instance `given != true`."
        )
    num_nan = int(np.isnan(values).sum())
    if num_nan:
        raise InputError(
            f"{num_nan} of {len(values)} scores are NaN and cannot be ranked: look for examples with an "
            "infinite loss, or leave them out of both arguments."
        )
    num_noisy = int(truth.sum())
    if num_noisy in (0, len(truth)):
        raise InputError(
            f"{num_noisy} of {len(truth)} examples are noisy: AUC and AP need at least one noisy and one good example."
        )
    return values, truth


def _as_array(values: Values) -> np.ndarray:
    if isinstance(values, Tensor):
        # numpy has no bfloat16, so the cast comes before the change of library.
        return values.detach().cpu().double().numpy()
    return np.asarray(values, dtype=np.float64)
