"""What every way of naming a model and its data ends with."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from eigentrace.data import Data
from eigentrace.errors import InputError
from eigentrace.rendering import Show
from eigentrace.task.task import Task

Example = Mapping[str, Any]
"""A new example, by what its parts are for: text, text_pair, target, label (a class by number or name), and image (the
bytes of a file, or a uint8 array (height, width) or (height, width, 3))."""


@dataclass(frozen=True)
class Inputs:
    """A task and its training data, and what else the dataset says about every example."""

    task: Task
    data: Data
    columns: pa.Table | None = None
    """Metadata, one row per example, the id column included; None where there is none."""
    source: Path | None = None
    """The file or folder the examples were read from, which a filtered dataset is written in the form of."""
    show: Show | None = None
    """What the examples look like to people; see `eigentrace.rendering`."""
    read: Callable[[Sequence[Example]], Data] | None = None
    """Prepares new examples as those of the data were prepared, for questions about them; None where nobody can."""

    content: Callable[[], dict[str, Any]] | None = None
    """Reads the whole dataset for a few numbers that tell it from any other; None where nobody can."""

    def __post_init__(self) -> None:
        if not isinstance(self.task, Task) or not isinstance(self.data, Data):
            raise InputError(
                f"Inputs needs an eigentrace.Task and an eigentrace.Data, got {type(self.task).__name__} and "
                f"{type(self.data).__name__}."
            )
        if self.columns is not None and self.columns.num_rows != len(self.data):
            raise InputError(
                f"The columns have {self.columns.num_rows} rows for {len(self.data)} examples: give one row for each."
            )
        if self.show is not None and len(self.show) != len(self.data):
            raise InputError(
                f"{len(self.show)} examples can be shown, and the data has {len(self.data)}: show the same rows."
            )
