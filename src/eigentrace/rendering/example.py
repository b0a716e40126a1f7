"""One example as people see it, and what every way of showing a dataset offers."""

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, Protocol, get_args

import numpy as np

from eigentrace.errors import InputError
from eigentrace.rendering.png import as_png

Kind = Literal["image", "text", "pair", "tokens"]
KINDS: tuple[str, ...] = get_args(Kind)
Token = tuple[str, float | None]


@dataclass(frozen=True)
class Shown:
    """One example as people see it."""

    kind: Kind
    text: str | None = None
    """The text, or the first of a pair."""
    target: str | None = None
    """The second text of a pair."""
    tokens: tuple[Token, ...] | None = None
    """Pieces of a text, each with its loss where that is known."""
    png: bytes | None = None
    """The image as a PNG file."""

    def __post_init__(self) -> None:
        check_kind(self.kind)
        parts = {"image": ("png",), "text": ("text",), "pair": ("text", "target"), "tokens": ("tokens",)}[self.kind]
        missing = [name for name in parts if getattr(self, name) is None]
        if missing:
            raise InputError(f"An example shown as {self.kind} needs {' and '.join(missing)}, and has none.")


class Show(Protocol):
    """Shows the examples of a dataset, by their rows."""

    @property
    def kind(self) -> Kind:
        """What the examples are."""
        ...

    @property
    def classes(self) -> tuple[str, ...] | None:
        """The names of labels 0, 1, 2, …, if they are known."""
        ...

    def __len__(self) -> int: ...

    def __call__(self, rows: Sequence[int]) -> list[Shown]:
        """Show the examples of some rows, in the order asked for."""
        ...

    def search(self, words: str) -> np.ndarray | None:  # (N,) bool
        """Tell which examples contain the words, in capitals or not; None where there is no text to look in."""
        ...


def as_shown(value: Any, kind: Kind) -> Shown:
    """Turn what a user's function returns for an example into what is shown.

    Args:
        value: A `Shown`; or a text, two texts, tokens (texts, or pairs of a text and a loss), or an image (an array, a
            tensor, an image of Pillow, or the bytes of a PNG file).
        kind: Which of these it is.
    """
    if isinstance(value, Shown):
        return value
    if kind == "image":
        return Shown("image", png=as_png(value))
    if kind == "text" and isinstance(value, str):
        return Shown("text", text=value)
    if kind == "pair" and _are(value, str) and len(value) == 2:
        return Shown("pair", text=value[0], target=value[1])
    if kind == "tokens" and _are(value, str, list, tuple):
        return Shown("tokens", tokens=tuple(_token(item) for item in value))
    wanted = {"text": "a text", "pair": "two texts", "tokens": "a list of tokens, or of pairs of a token and a loss"}
    raise InputError(f"An example of kind {kind} is {wanted[check_kind(kind)]}, got {_short(value)}.")


def check_kind(kind: str) -> str:
    """Refuse a kind that nobody knows how to show."""
    if kind not in KINDS:
        raise InputError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}.")
    return kind


def check_rows(rows: Sequence[int], length: int) -> list[int]:
    """Return rows as plain numbers, and refuse those that are not there: -1 is no row."""
    numbers = [int(row) for row in rows]
    for row in numbers:
        if not 0 <= row < length:
            raise InputError(f"There is no row {row}: rows are 0 to {length - 1}.")
    return numbers


def class_names(classes: Sequence[Any] | None) -> tuple[str, ...] | None:
    """Return names of labels as texts."""
    return None if classes is None else tuple(str(name) for name in classes)


def _are(value: Any, *kinds: type) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(item, kinds) for item in value)


def _token(item: Any) -> Token:
    match item:
        case str():
            return item, None
        case (str() as text, None):
            return text, None
        case (str() as text, loss) if isinstance(loss, Real):
            return text, float(loss)
    raise InputError(f"A token is a text, or a pair of a text and its loss (a number or None), got {_short(item)}.")


def _short(value: Any) -> str:
    words = repr(value)
    return words if len(words) <= 60 else f"{words[:57]}..."
