"""The class Inputs: the task, the data and further content of a dataset, as returned by all loaders."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from eigentrace.data import Data
from eigentrace.errors import InputError
from eigentrace.rendering import Show
from eigentrace.task.task import Task

Example = Mapping[str, Any]
"""A new example as a mapping with the keys text, text_pair, target, label (a class number or name) and image (the bytes
of a file, or a uint8 array (height, width) or (height, width, 3)), as the task requires."""


@dataclass(frozen=True)
class Inputs:
    """A task, its training data, and optional metadata, rendering and content hashes of the dataset."""

    task: Task
    data: Data
    columns: pa.Table | None = None
    """Metadata with one row per example, including the column of ids; None if there is none."""
    source: Path | None = None
    """The file or folder of the examples, whose format a filtered dataset gets."""
    show: Show | None = None
    """Renders the examples for display; see `eigentrace.rendering`."""
    read: Callable[[Sequence[Example]], Data] | None = None
    """Prepares new examples, to be used as queries, like those of the data; None if not supported."""

    content: Callable[[], dict[str, Any]] | None = None
    """Reads the whole dataset and returns hashes of its content; None if not supported."""
    remarks: Callable[[], Iterable[str]] | None = None
    """Reads the whole dataset and describes rows that may be mistakes, such as empty texts; None if not supported."""

    def __repr__(self) -> str:
        return f"<Inputs: {self.task!r}, {self.data!r}>"

    def __post_init__(self) -> None:
        if not isinstance(self.task, Task) or not isinstance(self.data, Data):
            raise InputError(
                f"Inputs needs an eigentrace.Task and an eigentrace.Data, got {type(self.task).__name__} and "
                f"{type(self.data).__name__}."
            )
        if self.columns is not None and self.columns.num_rows != len(self.data):
            raise InputError(
                f"columns must have one row per example, got {self.columns.num_rows} rows for {len(self.data)} "
                "examples."
            )
        if self.show is not None and len(self.show) != len(self.data):
            raise InputError(
                f"show must have the same length as the data, got {len(self.show)} for {len(self.data)} examples."
            )
