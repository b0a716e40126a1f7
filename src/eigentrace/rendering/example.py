"""The class of a rendered example, and the interface of dataset renderers."""

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, Protocol, get_args

import numpy as np

from eigentrace.errors import InputError
from eigentrace.rendering.png import as_png
from eigentrace.settings import counted, short

Kind = Literal["image", "text", "pair", "tokens"]
KINDS: tuple[str, ...] = get_args(Kind)
Token = tuple[str, float | None]


@dataclass(frozen=True)
class Shown:
    """One example rendered for display: a text, a pair of texts, tokens or an image."""

    kind: Kind
    text: str | None = None
    """The text, or the first of a pair."""
    target: str | None = None
    """The second text of a pair."""
    tokens: tuple[Token, ...] | None = None
    """The tokens of a text, each with its loss or None."""
    png: bytes | None = None
    """The image as a PNG file."""

    def __repr__(self) -> str:
        words = [text for text in (self.text, self.target) if text is not None]
        words += [] if self.tokens is None else ["".join(token for token, _ in self.tokens)]
        size = [] if self.png is None else [f"{len(self.png):,} bytes"]
        return f"<Shown: {', '.join([self.kind, *size, *(repr(short(text)) for text in words)])}>"

    def __post_init__(self) -> None:
        check_kind(self.kind)
        parts = {"image": ("png",), "text": ("text",), "pair": ("text", "target"), "tokens": ("tokens",)}[self.kind]
        missing = [name for name in parts if getattr(self, name) is None]
        if missing:
            raise InputError(f"Shown with kind {self.kind} must have {' and '.join(missing)}, got None.")


class Show(Protocol):
    """A renderer of the examples of a dataset, called with rows."""

    @property
    def kind(self) -> Kind:
        """The kind of the examples: "image", "text", "pair" or "tokens"."""
        ...

    @property
    def classes(self) -> tuple[str, ...] | None:
        """The names of classes 0, 1, 2, …, or None if unknown."""
        ...

    def __len__(self) -> int: ...

    def __call__(self, rows: Sequence[int]) -> list[Shown]:
        """Return the rendered examples of the given rows, in the given order."""
        ...

    def search(self, words: str) -> np.ndarray | None:  # (N,) bool
        """Return which examples contain `words` as a substring (case-insensitive); None if they have no text."""
        ...


def renderer_repr(renderer: Show) -> str:
    """Return `repr` of a renderer."""
    return f"<{type(renderer).__name__}: {counted(len(renderer), 'example')}>"


def as_shown(value: Any, kind: Kind) -> Shown:
    """Convert the value that a user's function returns for an example to a `Shown`.

    Args:
        value: A `Shown`; or a text, two texts, tokens (texts, or pairs of a text and a loss), or an image (an array, a
            tensor, a Pillow image, or the bytes of a PNG file).
        kind: The kind of the value.
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
    raise InputError(f"An example of kind {kind} must be {wanted[check_kind(kind)]}, got {_short(value)}.")


def check_kind(kind: str) -> str:
    """Return the kind, or raise InputError if it is unknown."""
    if kind not in KINDS:
        raise InputError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}.")
    return kind


def check_rows(rows: Sequence[int], length: int) -> list[int]:
    """Return rows as Python integers; raise InputError unless all are in 0 to `length` - 1."""
    numbers = [int(row) for row in rows]
    for row in numbers:
        if not 0 <= row < length:
            raise InputError(f"Rows must be from 0 to {length - 1}, got {row}.")
    return numbers


def class_names(classes: Sequence[Any] | None) -> tuple[str, ...] | None:
    """Return class names as strings, or None."""
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
    raise InputError(f"A token must be a text, or a pair of a text and a loss (a number or None), got {_short(item)}.")


def _short(value: Any) -> str:
    words = repr(value)
    return words if len(words) <= 60 else f"{words[:57]}..."
