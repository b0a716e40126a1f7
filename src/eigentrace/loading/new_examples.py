"""Preparation of new examples, given one by one, like those of a dataset."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from eigentrace.data import Data
from eigentrace.errors import InputError
from eigentrace.formats.dataset_columns import class_of
from eigentrace.formats.records import held_records
from eigentrace.loading.image_dataset import ImageDataset, read_pixels
from eigentrace.loading.inputs import Example
from eigentrace.loading.text_dataset import TextDataset
from eigentrace.rendering.png import encode_png


@dataclass(frozen=True)
class NewExamples:
    """A function that prepares new examples with the tokenizer or image preprocessing of the data."""

    examples: TextDataset | ImageDataset
    """The dataset whose preparation is used."""
    roles: Mapping[str, str]
    """The column of each role, such as text or label."""
    config: Any
    """The model's configuration."""

    def __call__(self, given: Sequence[Example]) -> Data:
        """Return data of new examples, each of which must have a value for every role."""
        if not given:
            raise InputError("At least one example is needed, got none.")
        for number, example in enumerate(given):
            missing = [role for role in self.roles if example.get(role) is None]
            if missing:
                raise InputError(f"Example {number} lacks {' and '.join(missing)}. Pass {', '.join(self.roles)}.")
        columns = {
            column: [_part(role, example[role]) for example in given]
            for role, column in self.roles.items()
            if role != "label"
        }
        changed: dict[str, Any] = {"records": held_records(columns, "the new examples")}
        if "label" in self.roles:
            changed["labels"] = self._labels(given)
        examples = replace(self.examples, **changed)
        return Data(examples, examples.collate, batch_size=len(given))

    def _labels(self, given: Sequence[Example]) -> np.ndarray:  # (N,)
        known = self.config.label2id or {}
        return np.array([class_of(example["label"], known, self.config.num_labels) for example in given], np.int32)


def _part(role: str, value: Any) -> Any:
    if role == "image":
        # Never a path: a request from a browser must not read files of this machine.
        if isinstance(value, bytes | np.ndarray):
            return encode_png(read_pixels(value) if isinstance(value, bytes) else value)
        raise InputError(f"image must be the bytes of a file or an array of pixels, got {type(value).__name__}.")
    if not isinstance(value, str):
        raise InputError(f"{role} must be text, got {type(value).__name__}.")
    return value
