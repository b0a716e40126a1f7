"""Declarations of the columns that scoring writes; a new one is declared here and computed in `write`."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np

Kind = Literal["number", "class"]

# Tensors of a shard that are not columns: features, the exponents of the powers of two by which float16 features were
# scaled, and the digest of each example.
FEATURES, EXPONENTS, DIGEST = "features", "feature_exponents", "digest"
# Names that are reserved, although scoring writes no column with them.
ROW, ID = "row", "id"


@dataclass(frozen=True)
class ScoredColumn:
    """A column that scoring writes: one number per example."""

    name: str
    """The name in the table, in Python and on the command line."""
    label: str
    """The name displayed on the page."""
    meaning: str
    kind: Kind = "number"
    """"number" for a measured value, or "class" for a class number, where -1 means missing."""
    tensor: str = ""
    """The name of its tensor in a shard, if it differs from `name`."""
    read: Callable[[np.ndarray], np.ndarray] = np.asarray
    """Converts the stored values to the values of the column."""

    @property
    def stored_as(self) -> str:
        """The name of its tensor in a shard."""
        return self.tensor or self.name

    def record(self) -> dict[str, str]:
        """Return the declaration as JSON, for people and programs that read a manifest without this package."""
        return {"kind": self.kind, "label": self.label, "meaning": self.meaning}

    @property
    def missing(self) -> float:
        """The value for rows without scores."""
        return -1 if self.kind == "class" else np.nan


COLUMNS = {
    column.name: column
    for column in (
        ScoredColumn("loss", "loss", "the loss of the example, in nats if it is a cross-entropy"),
        ScoredColumn(
            "gradient_norm", "gradient norm", "‖g(x)‖, the length of its gradient", tensor="square_norm", read=np.sqrt
        ),
        ScoredColumn("self_influence", "self-influence", "the method's score of the example for itself"),
        ScoredColumn("label", "label", "the class of the example in the data", "class"),
        ScoredColumn("prediction", "prediction", "the class that the model predicts", "class"),
        ScoredColumn("confidence", "confidence", "the probability of the predicted class"),
    )
}
"""All columns that this version writes, in table order."""
TAKEN = (ROW, *COLUMNS)
"""Names that user columns must not have."""


def named(names: Iterable[str]) -> tuple[ScoredColumn, ...]:
    """Return the columns with these names, in order of declaration."""
    wanted = set(names)
    return tuple(column for name, column in COLUMNS.items() if name in wanted)


def of_tensors(names: Iterable[str]) -> tuple[ScoredColumn, ...]:
    """Return the columns that are stored in tensors with these names, in order of declaration."""
    wanted = set(names)
    return tuple(column for column in COLUMNS.values() if column.stored_as in wanted)
