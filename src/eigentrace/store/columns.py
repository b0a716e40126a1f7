"""The columns that scoring writes for every example, declared once: a new one is added here and computed in `write`."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np

Kind = Literal["number", "class"]

# Tensors of a shard that are no columns: features, the powers of two that those in half precision were scaled by, and a
# hash of each example's content.
FEATURES, EXPONENTS, DIGEST = "features", "feature_exponents", "digest"
# Columns that are not written, and that users may not write either.
ROW, ID = "row", "id"


@dataclass(frozen=True)
class ScoredColumn:
    """One number of every example."""

    name: str
    """What the table, Python and the command line call it."""
    label: str
    """What people read on a page."""
    meaning: str
    kind: Kind = "number"
    """Whether it measures something, or numbers a class, with -1 for none."""
    tensor: str = ""
    """What a shard calls it, where that is something else."""
    read: Callable[[np.ndarray], np.ndarray] = np.asarray
    """Turns what a shard holds into what is asked for."""

    @property
    def stored_as(self) -> str:
        """The name of the tensor that holds it."""
        return self.tensor or self.name

    @property
    def missing(self) -> float:
        """What stands for a row that is not scored."""
        return -1 if self.kind == "class" else np.nan


COLUMNS = {
    column.name: column
    for column in (
        ScoredColumn("loss", "loss", "the loss of the example, in nats where it is cross-entropy"),
        ScoredColumn(
            "gradient_norm", "gradient norm", "‖g(x)‖, the length of its gradient", tensor="square_norm", read=np.sqrt
        ),
        ScoredColumn("self_influence", "self-influence", "the method's score of the example against itself"),
        ScoredColumn("label", "label", "the class that it was given", "class"),
        ScoredColumn("prediction", "prediction", "the class that the model predicts", "class"),
        ScoredColumn("confidence", "confidence", "the probability of the predicted class"),
    )
}
"""All columns that this version writes, in the order in which tables list them."""
TAKEN = (ROW, *COLUMNS)
"""Names that columns of the user's own may not have."""

# What runs hold that do not say so: those of version 0.1.0.
UNRECORDED = ("loss", "gradient_norm", "self_influence", "label", "prediction", "confidence")


def named(names: Iterable[str]) -> tuple[ScoredColumn, ...]:
    """Return the declared columns of these names, in the order of the declaration."""
    wanted = set(names)
    return tuple(column for name, column in COLUMNS.items() if name in wanted)


def of_tensors(names: Iterable[str]) -> tuple[ScoredColumn, ...]:
    """Return the columns that tensors of these names hold."""
    wanted = set(names)
    return tuple(column for column in COLUMNS.values() if column.stored_as in wanted)
