"""Measuring how high a score ranks noisy examples."""

import math
from dataclasses import dataclass

import numpy as np

from eigentrace.errors import InputError
from eigentrace.evaluate.arrays import Values, as_array
from eigentrace.settings import counted


@dataclass(frozen=True)
class Retrieval:
    """Measures of a ranking's quality, each from 0 to 1."""

    auc: float
    """Area under the ROC curve: the probability that a random noisy example scores higher than a random good one;
    ties count half."""
    ap: float
    """Average precision: the step-wise area under the precision-recall curve."""
    precision: float = math.nan
    """Precision at the noise rate: the share of noisy examples among the top n, where n is the number of noisy
    examples."""


@dataclass(frozen=True, eq=False)
class Detection:
    """Share of the noisy examples found when a ranking is inspected from the top."""

    looked: np.ndarray
    """(points,), share of the data inspected, from 0 to 1."""
    found: np.ndarray
    """(points,), share of the noisy examples found by then."""
    area: float
    """Area under the curve: 0.5 for a random ranking, at most 1 minus half the noise rate."""

    def __repr__(self) -> str:
        return f"<Detection: area {self.area:.3f}, {counted(len(self.looked), 'point')}>"

    def at(self, looked: float) -> float:
        """Return the share of the noisy examples found after inspecting a share of the data."""
        if not 0 <= looked <= 1:
            raise InputError(f"looked must be a share of the data, between 0 and 1, got {looked!r}.")
        return float(np.interp(looked, self.looked, self.found))


def retrieval(scores: Values, is_noisy: Values) -> Retrieval:
    """Measure how well high scores retrieve the noisy examples.

    Args:
        scores: One number per example; higher should mean noisier.
        is_noisy: One truth value per example.

    Returns:
        ROC AUC, average precision, and precision at the noise rate. Examples with equal scores form one group, so the
        order of the examples does not matter.

    Raises:
        InputError: If the shapes differ, a score is NaN, or no example or every example is noisy.

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
    # If the top n ends within a group of equal scores, its expected number of noisy examples is used.
    top = np.interp(num_noisy, np.append(0, np.cumsum(sizes)), np.append(0, np.cumsum(found)))
    return Retrieval(auc=auc, ap=float(found @ precision / num_noisy), precision=float(top / num_noisy))


def detection(scores: Values, is_noisy: Values) -> Detection:
    """Compute the share of noisy examples found as a function of the share of data inspected, highest scores first.

    Args:
        scores: One number per example; higher should mean noisier.
        is_noisy: One truth value per example.

    Returns:
        The curve, with a point after every distinct score; among equal scores, noisy examples are spread evenly.

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
            f"scores has shape {values.shape} and is_noisy {truth.shape}: pass one score and one truth value for each "
            "example."
        )
    if not np.isin(truth, (0.0, 1.0)).all():
        raise InputError(
            f"is_noisy must contain only true and false, got the value {truth[~np.isin(truth, (0.0, 1.0))][0]:g}. "
            "Compare labels first, for example `given != true`."
        )
    num_nan = int(np.isnan(values).sum())
    if num_nan:
        raise InputError(
            f"{num_nan} of {len(values)} scores are NaN and cannot be ranked. Look for examples with an infinite loss, "
            "or leave them out of both arguments."
        )
    num_noisy = int(truth.sum())
    if num_noisy in (0, len(truth)):
        raise InputError(
            f"{num_noisy} of {len(truth)} examples are noisy: AUC and AP need at least one noisy and one good example."
        )
    return values, truth
