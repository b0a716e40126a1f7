"""An example that somebody posts: checked before anything of it is opened."""

import base64
import binascii
import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from eigentrace.errors import InputError

MOST_BYTES = 4 * 2**20
MOST_PIXELS = 25_000_000
MOST_LETTERS = 200_000
_FORMATS = ("PNG", "JPEG", "WEBP")
# The longest side that is kept: models see less.
_LONGEST = 2048


@dataclass(frozen=True)
class Posted:
    """A new example, as the inputs take it and as the page shows it."""

    example: dict[str, Any]
    content: dict[str, Any]

    @staticmethod
    def of(asked: Mapping[str, Any]) -> "Posted":
        """Read what was posted: a text, two texts, or an image in base64; and a class."""
        label = asked.get("label")
        if label is not None and (isinstance(label, bool) or not isinstance(label, int | str)):
            raise InputError(f"label must be a class, by its number or its name, got {type(label).__name__}.")
        example: dict[str, Any] = {} if label is None else {"label": label}
        if asked.get("image") is not None:
            image = read_image(asked["image"])
            return Posted(example | {"image": image}, {"kind": "image", "src": _uri(image)})
        texts = {name: _text(asked, name) for name in ("text", "target") if asked.get(name) is not None}
        if not texts:
            raise InputError("Nothing was posted to ask about: give a text, two texts, or an image.")
        content = {"kind": "pair" if "target" in texts else "text"} | texts
        second = {"text_pair": texts["target"]} if "target" in texts else {}
        return Posted(example | texts | second, content)


def _uri(image: np.ndarray) -> str:
    from eigentrace.rendering.png import as_png

    return "data:image/png;base64," + base64.b64encode(as_png(image)).decode("ascii")


def _text(asked: Mapping[str, Any], name: str) -> str:
    text = asked[name]
    if not isinstance(text, str) or len(text) > MOST_LETTERS:
        raise InputError(f"{name} must be a text of at most {MOST_LETTERS:,} letters.")
    return text.encode("utf-8", "replace").decode("utf-8")


def read_image(given: Any) -> np.ndarray:  # (H, W) or (H, W, 3) uint8
    """Decode an image; refuse what is too large before it is opened, and what is no image of a common kind."""
    if not isinstance(given, str):
        raise InputError(f"image must be a file in base64, got {type(given).__name__}.")
    if given.startswith("data:"):
        given = given.partition(",")[2]
    try:
        data = base64.b64decode(given, validate=True)
    except (binascii.Error, ValueError):
        raise InputError("image is not base64.") from None
    if len(data) > MOST_BYTES:
        raise InputError(f"An image may have at most {MOST_BYTES // 2**20} MiB, and this one has {len(data):,} bytes.")
    try:
        from PIL import Image, ImageOps
    except ModuleNotFoundError:
        raise InputError(
            'Images need the package pillow, which is not installed. In the clone: pip install -e ".[images]"'
        ) from None
    try:
        with Image.open(io.BytesIO(data), formats=_FORMATS) as opened:
            if opened.width * opened.height > MOST_PIXELS:
                raise InputError(f"it has {opened.width} × {opened.height} pixels, and at most {MOST_PIXELS:,} may be")
            opened.thumbnail((_LONGEST, _LONGEST))
            image = ImageOps.exif_transpose(opened)
            return np.asarray(image.convert("L" if image.mode in ("1", "L", "LA", "I;16") else "RGB"))
    except Exception as error:  # decoders that are fed with anything raise anything
        raise InputError(f"The image cannot be read as {', '.join(_FORMATS)}: {str(error)[:200]}.") from None
