"""Renderers of examples by a user's function, and of image tensors."""

from collections.abc import Callable, Sequence
from functools import cached_property
from threading import Lock
from typing import Any

import numpy as np
from torch import Tensor

from eigentrace.data import Data, as_data
from eigentrace.data.batch import tensors_of
from eigentrace.errors import InputError
from eigentrace.rendering.example import Kind, Shown, as_shown, check_kind, check_rows, class_names, renderer_repr
from eigentrace.rendering.png import Scale, as_pixels, encode_png, smaller
from eigentrace.settings import check_counts

# Number of examples from which the values of black and white are determined.
_SAMPLE = 16
# Minimum side of square matrices that are rendered as grey images by default.
_LEAST_SQUARE = 8


class Custom:
    """A renderer that calls a user's function.

    Args:
        function: Takes a row and returns a text, two texts, tokens, an image, or a `Shown`; see
            `eigentrace.rendering.as_shown`. It is never called by two threads at once.
        kind: "image", "text", "pair" or "tokens".
        length: Number of examples.
        classes: The names of classes 0, 1, 2, …
        search: Takes words and returns one boolean per example, True for those that contain them.
    """

    def __init__(
        self,
        function: Callable[[int], Any],
        kind: Kind,
        length: int,
        *,
        classes: Sequence[str] | None = None,
        search: Callable[[str], Any] | None = None,
    ) -> None:
        check_kind(kind)
        check_counts(1, length=length)
        self.kind, self.classes = kind, class_names(classes)
        self._function, self._length, self._search, self._lock = function, length, search, Lock()

    __repr__ = renderer_repr

    def __len__(self) -> int:
        return self._length

    def __call__(self, rows: Sequence[int]) -> list[Shown]:
        """Return the rendered examples of the given rows."""
        rows = check_rows(rows, self._length)
        with self._lock:
            return [as_shown(self._function(row), self.kind) for row in rows]

    def search(self, words: str) -> np.ndarray | None:  # (N,) bool
        """Return which examples contain the words by the user's `search`; None without it."""
        if self._search is None:
            return None
        found = np.asarray(self._search(words))
        if found.shape != (self._length,) or found.dtype != bool:
            raise InputError(
                f"search must return one boolean for each of the {self._length} examples, got {found.dtype} of shape "
                f"{found.shape}."
            )
        return found


class Images:
    """A renderer of examples that are images, read by a function.

    Args:
        get: Takes a row and returns an array, a tensor, a Pillow image, or the bytes of a PNG file. It is never called
            by two threads at once.
        length: Number of examples.
        classes: The names of classes 0, 1, 2, …
    """

    kind: Kind = "image"

    def __init__(self, get: Callable[[int], Any], length: int, *, classes: Sequence[str] | None = None) -> None:
        self._custom = Custom(get, "image", length, classes=classes)
        self.classes = self._custom.classes

    __repr__ = renderer_repr

    def __len__(self) -> int:
        return len(self._custom)

    def __call__(self, rows: Sequence[int]) -> list[Shown]:
        """Return the images of the given rows as PNG files."""
        return self._custom(rows)

    def search(self, words: str) -> None:
        """Return None, because images contain no text."""


class Tensors:
    """A renderer of image tensors: of each example, the first tensor whose shape is that of an image.

    Values in 0 to 1 or 0 to 255 are rendered unchanged. Other values, such as those of normalised images, are scaled
    by the lowest and highest value of a few examples.

    Args:
        data: Images as one tensor, (N, channels, height, width) or (N, height, width); or examples that contain them,
            in any form that `fit` accepts.
        classes: The names of classes 0, 1, 2, …
    """

    kind: Kind = "image"

    def __init__(self, data: Any, *, classes: Sequence[str] | None = None) -> None:
        self._data = Data.from_batches([(data,)]) if isinstance(data, Tensor) else as_data(data)
        self.classes, self._lock = class_names(classes), Lock()
        if not any(_may_be_image(tensor) for tensor in tensors_of(self._data.first(1).values)):
            raise InputError(
                "No tensor of the first example is an image of shape (height, width) or (channels, height, width) with "
                "1, 3 or 4 channels. Use a function instead: eigentrace.rendering.Custom(function, kind, length)."
            )

    @classmethod
    def found_in(cls, data: Data, classes: Sequence[str] | None = None) -> "Tensors | None":
        """Return a renderer of the data if its examples look like images, else None.

        A tensor (channels, height, width) is an image. A tensor (height, width) is one only if it is a square of at
        least 8 pixels, because sequences of vectors are matrices too. Data that is not seekable is not read.
        """
        if not data.is_seekable:
            return None
        likely = any(_looks_like_image(tensor) for tensor in tensors_of(data.first(1).values))
        return cls(data, classes=classes) if likely else None

    __repr__ = renderer_repr

    def __len__(self) -> int:
        return len(self._data)

    def __call__(self, rows: Sequence[int]) -> list[Shown]:
        """Return the images of the given rows as PNG files."""
        rows = check_rows(rows, len(self))
        with self._lock:
            found = self._pixels(np.unique(rows)) if rows else {}
            return [Shown("image", png=encode_png(smaller(self._scale(found[row])))) for row in rows]

    def search(self, words: str) -> None:
        """Return None, because images contain no text."""

    @cached_property
    def _scale(self) -> Scale:
        sample = self._pixels(np.unique(np.linspace(0, len(self) - 1, _SAMPLE).astype(int)))
        return Scale.of(np.concatenate([pixels.reshape(-1) for pixels in sample.values()]))

    def _pixels(self, rows: np.ndarray) -> dict[int, np.ndarray]:
        """Return the images of ascending rows, read one by one because their shapes may differ."""
        found: dict[int, np.ndarray] = {}
        for batch in self._data.rebatched(1).batches(rows):
            image = next((t for t in tensors_of(batch.values) if _may_be_image(t) and len(t) == len(batch)), None)
            if image is None:
                raise InputError(f"Row {batch.rows[0]} contains no image, but the first row does.")
            found |= {int(row): as_pixels(pixels) for row, pixels in zip(batch.rows, image, strict=True)}
        return found


def _may_be_image(tensor: Tensor) -> bool:  # (1, ...)
    return (tensor.ndim == 3 or (tensor.ndim == 4 and tensor.shape[1] in (1, 3, 4))) and min(tensor.shape) > 0


def _looks_like_image(tensor: Tensor) -> bool:
    if not _may_be_image(tensor):
        return False
    return tensor.ndim == 4 or (tensor.shape[1] == tensor.shape[2] >= _LEAST_SQUARE)
