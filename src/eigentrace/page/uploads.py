"""New examples posted to the server, checked before they are decoded."""

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
# Longest side in pixels that images are reduced to: models use smaller ones.
_LONGEST = 2048


@dataclass(frozen=True)
class Posted:
    """A new example: as `Inputs.read` takes it, and as the page shows it."""

    example: dict[str, Any]
    content: dict[str, Any]

    @staticmethod
    def of(asked: Mapping[str, Any]) -> "Posted":
        """Parse a posted example: a text, a pair of texts, or an image in base64, with an optional label."""
        label = asked.get("label")
        if label is not None and (isinstance(label, bool) or not isinstance(label, int | str)):
            raise InputError(f"label must be a class number or a class name, got {type(label).__name__}.")
        example: dict[str, Any] = {} if label is None else {"label": label}
        if asked.get("image") is not None:
            image = read_image(asked["image"])
            return Posted(example | {"image": image}, {"kind": "image", "src": _uri(image)})
        texts = {name: _text(asked, name) for name in ("text", "target") if asked.get(name) is not None}
        if not texts:
            raise InputError("The request contains no example. Send a text, a pair of texts, or an image.")
        content = {"kind": "pair" if "target" in texts else "text"} | texts
        second = {"text_pair": texts["target"]} if "target" in texts else {}
        return Posted(example | texts | second, content)


def _uri(image: np.ndarray) -> str:
    from eigentrace.rendering.png import as_png

    return "data:image/png;base64," + base64.b64encode(as_png(image)).decode("ascii")


def _text(asked: Mapping[str, Any], name: str) -> str:
    text = asked[name]
    if not isinstance(text, str):
        raise InputError(f"{name} must be a text, got {type(text).__name__}.")
    if len(text) > MOST_LETTERS:
        raise InputError(f"{name} must have at most {MOST_LETTERS:,} characters, got {len(text):,}. Shorten it.")
    return text.encode("utf-8", "replace").decode("utf-8")


def read_image(given: Any) -> np.ndarray:  # (H, W) or (H, W, 3) uint8
    """Decode a PNG, JPEG or WebP image from base64; images that are too large are rejected before decoding."""
    if not isinstance(given, str):
        raise InputError(f"image must be a base64 string, got {type(given).__name__}.")
    if given.startswith("data:"):
        given = given.partition(",")[2]
    try:
        data = base64.b64decode(given, validate=True)
    except (binascii.Error, ValueError):
        raise InputError("image is not valid base64. Send the bytes of an image file encoded as base64.") from None
    if len(data) > MOST_BYTES:
        raise InputError(
            f"The image has {len(data):,} bytes, more than the limit of {MOST_BYTES // 2**20} MiB. Use a smaller one."
        )
    try:
        from PIL import Image, ImageOps
    except ModuleNotFoundError:
        raise InputError(
            'Images need the package pillow, which is not installed. In the clone: pip install -e ".[images]"'
        ) from None
    try:
        with Image.open(io.BytesIO(data), formats=_FORMATS) as opened:
            if opened.width * opened.height > MOST_PIXELS:
                raise InputError(f"it has {opened.width} × {opened.height} pixels, more than {MOST_PIXELS:,}")
            opened.thumbnail((_LONGEST, _LONGEST))
            image = ImageOps.exif_transpose(opened)
            return np.asarray(image.convert("L" if image.mode in ("1", "L", "LA", "I;16") else "RGB"))
    except Exception as error:  # decoders may raise any exception on malformed files
        raise InputError(f"The image cannot be read as {', '.join(_FORMATS)}: {str(error)[:200]}.") from None
