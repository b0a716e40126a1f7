"""Memorisation: how much better models predict an example if they were trained on it."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from eigentrace.errors import InputError
from eigentrace.evaluate.retrain import Retrained
from eigentrace.settings import counted


@dataclass(frozen=True, eq=False)
class Memorization:
    """Memorisation of training examples, estimated from models trained on random subsets."""

    values: np.ndarray
    """(Q,), how much better models trained on the example predict it than models that were not: the difference in loss,
    or in probability; NaN for an example that is in every subset or in none."""
    error: np.ndarray
    """(Q,), standard error of `values`, over subsets; NaN with fewer than two subsets on one of the sides."""
    with_example: np.ndarray
    """(Q,), mean output of the models trained on the example; NaN if there are none."""
    without: np.ndarray
    """(Q,), mean output of the models not trained on it; NaN if there are none."""
    num_with: np.ndarray
    """(Q,), number of subsets that contain the example."""
    num_without: np.ndarray
    """(Q,), number of subsets that do not contain it."""

    def __repr__(self) -> str:
        return f"<Memorization: {self}>"

    def __str__(self) -> str:
        size = counted(len(self.values), "example")
        defined = ~np.isnan(self.values)
        if not defined.any():
            return f"{size}, all in every subset or in none"
        text = f"{size}, mean {self.values[defined].mean():.3g}, median {np.median(self.values[defined]):.3g}"
        errors = self.error[~np.isnan(self.error)]
        text += f", standard errors about {np.median(errors):.2g}" if len(errors) else ""
        return text + (f", {self.num_undefined} in every subset or in none" if self.num_undefined else "")

    @property
    def num_undefined(self) -> int:
        """Number of examples that are in every subset or in none, whose value is NaN."""
        return int(np.isnan(self.values).sum())


def memorization(retrained: Retrained, *, rows: Any = None) -> Memorization:
    """Estimate the memorisation of training examples, as defined by Feldman and Zhang (2020).

    An example's memorisation is the difference between the mean output of the models whose subset contains it and that
    of the models whose subset does not. It is positive if models predict the example better after training on it.
    Outputs are averaged over the seeds of a subset first. The standard error is √(s₁²/m₁ + s₀²/m₀), where s₁ and s₀ are
    the standard deviations over the m₁ subsets with the example and the m₀ without it; it includes the noise of
    training, and holds for subsets drawn independently of each other.

    Args:
        retrained: Outputs of models trained on random subsets, where the queries are training examples with the labels
            used in training: losses, or numbers that increase as models improve, such as the label's probability.
        rows: (Q,), the training row of each query; by default, the queries are all training examples in order.

    Raises:
        InputError: If queries and training examples do not match, or a row does not exist or occurs twice.
    """
    places = _rows(retrained, rows)
    members = retrained.masks[:, places]  # (m, Q)
    outputs = retrained.mean
    (mean_with, square_with, num_with), (mean_without, square_without, num_without) = (
        _moments(outputs, side) for side in (members, ~members)
    )
    gain = mean_without - mean_with if retrained.higher_is_worse else mean_with - mean_without
    return Memorization(gain, np.sqrt(square_with + square_without), mean_with, mean_without, num_with, num_without)


def _moments(outputs: np.ndarray, side: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # (m, Q) x 2
    """Return mean, squared standard error of the mean, and count of the outputs on one side, by query."""
    count = side.sum(axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = np.where(side, outputs, 0.0).sum(axis=0) / count
        spread = np.where(side, (outputs - mean) ** 2, 0.0).sum(axis=0) / (count - 1) / count
    return mean, np.where(count > 1, spread, np.nan), count


def _rows(retrained: Retrained, rows: Any) -> np.ndarray:  # -> (Q,)
    num_train, num_queries = retrained.masks.shape[1], retrained.outputs.shape[2]
    if rows is None:
        if num_queries != num_train:
            raise InputError(
                f"Memorisation needs the training examples as queries, but {counted(num_queries, 'query')} were "
                f"measured with {counted(num_train, 'training example')}. Retrain with the training examples as "
                "queries; if the queries are only some of them, pass their row numbers as rows=."
            )
        return np.arange(num_train)
    places = np.asarray(rows)
    if places.dtype.kind not in "iu" or places.shape != (num_queries,):
        raise InputError(
            f"rows must be the row numbers of {counted(num_queries, 'query')}, integers of shape ({num_queries},), got "
            f"{places.dtype} of shape {places.shape}. For a mask, pass `np.flatnonzero(mask)`."
        )
    if places.min() < 0 or places.max() >= num_train:
        raise InputError(
            f"rows are from {places.min()} to {places.max()}: they must be between 0 and {num_train - 1}, the rows of "
            "the training examples."
        )
    if len(np.unique(places)) != num_queries:
        found, times = np.unique(places, return_counts=True)
        raise InputError(
            f"Row {found[times > 1][0]} occurs {times[times > 1][0]} times in rows: measure each example once."
        )
    return places
