"""Examples shown by a function, or by the tensors a network sees."""

from collections.abc import Callable, Sequence
from functools import cached_property
from threading import Lock
from typing import Any

import numpy as np
from torch import Tensor

from eigentrace.data import Data, as_data
from eigentrace.data.batch import tensors_of
from eigentrace.errors import InputError
from eigentrace.rendering.example import Kind, Shown, as_shown, check_kind, check_rows, class_names
from eigentrace.rendering.png import Scale, as_pixels, encode_png, smaller
from eigentrace.settings import check_counts

# Examples by which black and white are settled.
_SAMPLE = 16
# What is taken for a grey image without being told: nothing is that small, and tables of numbers are no squares.
_LEAST_SQUARE = 8


class Custom:
    """Examples shown by a user's own function.

    Args:
        function: Takes a row, and returns what `eigentrace.rendering.as_shown` takes: a text, two texts, tokens, an
            image, or a `Shown`. It is never called by two threads at once.
        kind: "image", "text", "pair" or "tokens".
        length: How many examples there are.
        classes: The names of labels 0, 1, 2, …
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

    def __len__(self) -> int:
        return self._length

    def __call__(self, rows: Sequence[int]) -> list[Shown]:
        """Ask the function about some rows."""
        rows = check_rows(rows, self._length)
        with self._lock:
            return [as_shown(self._function(row), self.kind) for row in rows]

    def search(self, words: str) -> np.ndarray | None:  # (N,) bool
        """Tell which examples contain the words, where the user said how."""
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
    """Examples that are an image each.

    Args:
        get: Takes a row, and returns an array, a tensor, an image of Pillow, or the bytes of a PNG file. It is never
            called by two threads at once.
        length: How many examples there are.
        classes: The names of labels 0, 1, 2, …
    """

    kind: Kind = "image"

    def __init__(self, get: Callable[[int], Any], length: int, *, classes: Sequence[str] | None = None) -> None:
        self._custom = Custom(get, "image", length, classes=classes)
        self.classes = self._custom.classes

    def __len__(self) -> int:
        return len(self._custom)

    def __call__(self, rows: Sequence[int]) -> list[Shown]:
        """Make PNG files of the images of some rows."""
        return self._custom(rows)

    def search(self, words: str) -> None:
        """There is no text to look in."""


class Tensors:
    """The images that a network sees: the first tensor of an example that can be one.

    Values from 0 to 1, or from 0 to 255, are taken as they are; others, such as those of normalised images, are spread
    between the lowest and the highest of a few examples.

    Args:
        data: Images as one tensor, (N, channels, height, width) or (N, height, width); or examples that hold them, in
            any form that `fit` takes.
        classes: The names of labels 0, 1, 2, …
    """

    kind: Kind = "image"

    def __init__(self, data: Any, *, classes: Sequence[str] | None = None) -> None:
        self._data = Data.from_batches([(data,)]) if isinstance(data, Tensor) else as_data(data)
        self.classes, self._lock = class_names(classes), Lock()
        if not any(_may_be_image(tensor) for tensor in tensors_of(self._data.first(1).values)):
            raise InputError(
                "No tensor of the first example is an image of shape (height, width) or (channels, height, width) with "
                "1, 3 or 4 channels. Show examples by a function: eigentrace.rendering.Custom(function, kind, length)."
            )

    @classmethod
    def found_in(cls, data: Data, classes: Sequence[str] | None = None) -> "Tensors | None":
        """Return a way to show the data if its examples look like images, else None.

        Without being told, (channels, height, width) is an image, and of (height, width) only a square of at least 8
        pixels: sequences of vectors have that shape too. Data that can only be read in order is left alone.
        """
        if not data.is_seekable:
            return None
        likely = any(_looks_like_image(tensor) for tensor in tensors_of(data.first(1).values))
        return cls(data, classes=classes) if likely else None

    def __len__(self) -> int:
        return len(self._data)

    def __call__(self, rows: Sequence[int]) -> list[Shown]:
        """Make PNG files of the images of some rows."""
        rows = check_rows(rows, len(self))
        with self._lock:
            found = self._pixels(np.unique(rows)) if rows else {}
            return [Shown("image", png=encode_png(smaller(self._scale(found[row])))) for row in rows]

    def search(self, words: str) -> None:
        """There is no text to look in."""

    @cached_property
    def _scale(self) -> Scale:
        sample = self._pixels(np.unique(np.linspace(0, len(self) - 1, _SAMPLE).astype(int)))
        return Scale.of(np.concatenate([pixels.reshape(-1) for pixels in sample.values()]))

    def _pixels(self, rows: np.ndarray) -> dict[int, np.ndarray]:
        """Read the images of ascending rows, each in a batch of its own: their shapes may differ."""
        found: dict[int, np.ndarray] = {}
        for batch in self._data.rebatched(1).batches(rows):
            image = next((t for t in tensors_of(batch.values) if _may_be_image(t) and len(t) == len(batch)), None)
            if image is None:
                raise InputError(f"Row {batch.rows[0]} holds no image, and the first row does.")
            found |= {int(row): as_pixels(pixels) for row, pixels in zip(batch.rows, image, strict=True)}
        return found


def _may_be_image(tensor: Tensor) -> bool:  # (1, ...)
    return (tensor.ndim == 3 or (tensor.ndim == 4 and tensor.shape[1] in (1, 3, 4))) and min(tensor.shape) > 0


def _looks_like_image(tensor: Tensor) -> bool:
    if not _may_be_image(tensor):
        return False
    return tensor.ndim == 4 or (tensor.shape[1] == tensor.shape[2] >= _LEAST_SQUARE)
