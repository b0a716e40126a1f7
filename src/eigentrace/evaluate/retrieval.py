"""Do the bad examples come first when a training set is ranked by a score?"""

import math
from dataclasses import dataclass

import numpy as np

from eigentrace.errors import InputError
from eigentrace.evaluate.arrays import Values, as_array


@dataclass(frozen=True)
class Retrieval:
    """Quality of a ranking, as fractions of one."""

    auc: float
    """Chance that a random bad example scores above a random good one; ties count half."""
    ap: float
    """Precision averaged over recall, the step-wise area under the precision-recall curve."""
    precision: float = math.nan
    """Precision at the noise rate: the share of noisy examples among the top n, n being how many there are."""


@dataclass(frozen=True, eq=False)
class Detection:
    """How many of the noisy examples are found by somebody who looks from the top of a ranking down."""

    looked: np.ndarray
    """(points,), share of the data looked at, from 0 to 1."""
    found: np.ndarray
    """(points,), share of the noisy examples found by then."""
    area: float
    """Area under the curve: .5 by chance, one minus half the noise rate at best."""

    def at(self, looked: float) -> float:
        """Return the share found after looking at a share of the data."""
        if not 0 <= looked <= 1:
            raise InputError(f"looked must be a share of the data, from 0 to 1, got {looked!r}.")
        return float(np.interp(looked, self.looked, self.found))


def retrieval(scores: Values, is_noisy: Values) -> Retrieval:
    """Measure how well high scores retrieve the noisy examples.

    Args:
        scores: One number per example; higher should mean noisier.
        is_noisy: One truth value per example.

    Returns:
        ROC AUC, average precision, and precision at the noise rate. Examples that share a score are taken together, so
        the order they are given in never matters.

    Raises:
        InputError: If the two do not have one value for each example, if a score is NaN, or if the noisy
            examples are none or all.

    >>> retrieval([0.9, 0.8, 0.3, 0.1], [True, False, True, False]).auc
    0.75
    """
    found, sizes = _groups(scores, is_noisy)
    passed = sizes - found

    num_noisy, num_good = found.sum(), passed.sum()
    # Each noisy example beats the good ones of all lower groups, and half of those in its own.
    beaten = num_good - np.cumsum(passed) + 0.5 * passed
    auc = float(found @ beaten / (num_noisy * num_good))
    precision = np.cumsum(found) / np.cumsum(sizes)
    # Where the top n ends within a group, as many of it are noisy as on average over its orders.
    top = np.interp(num_noisy, np.append(0, np.cumsum(sizes)), np.append(0, np.cumsum(found)))
    return Retrieval(auc=auc, ap=float(found @ precision / num_noisy), precision=float(top / num_noisy))


def detection(scores: Values, is_noisy: Values) -> Detection:
    """Follow how the noisy examples turn up when the highest scores are looked at first.

    Args:
        scores: One number per example; higher should mean noisier.
        is_noisy: One truth value per example.

    Returns:
        The curve with a point after every distinct score; examples that share a score are met at an even pace.

    Raises:
        InputError: As `retrieval`.

    >>> detection([0.9, 0.8, 0.3, 0.1], [True, False, True, False]).at(0.25)
    0.5
    """
    found, sizes = _groups(scores, is_noisy)
    looked = np.append(0.0, np.cumsum(sizes)) / sizes.sum()
    share = np.append(0.0, np.cumsum(found)) / found.sum()
    area = float(np.diff(looked) @ (share[1:] + share[:-1]) / 2)
    return Detection(looked, share, area)


def _groups(scores: Values, is_noisy: Values) -> tuple[np.ndarray, np.ndarray]:
    """Count the noisy and all examples of each distinct score, highest first."""
    values, truth = _checked(scores, is_noisy)
    _, group = np.unique(-values, return_inverse=True)
    return np.bincount(group, weights=truth), np.bincount(group)


def _checked(scores: Values, is_noisy: Values) -> tuple[np.ndarray, np.ndarray]:
    values, truth = as_array(scores), as_array(is_noisy)
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
