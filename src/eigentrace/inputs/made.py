"""What every way of naming a model and its data ends with."""

from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from eigentrace.data import Data
from eigentrace.errors import InputError
from eigentrace.task import Task


@dataclass(frozen=True)
class Inputs:
    """A task and its training data, and what else the dataset says about every example."""

    task: Task
    data: Data
    columns: pa.Table | None = None
    """Metadata, one row per example, the id column included; None where there is none."""
    source: Path | None = None
    """The file or folder the examples were read from, which a filtered dataset is written in the form of."""

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
