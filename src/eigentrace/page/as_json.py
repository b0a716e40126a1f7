"""Conversion to values that JSON and browsers support: NaN becomes null, long texts are truncated."""

import math
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from eigentrace.rendering import Shown

MOST_LETTERS = 2000
MOST_TOKENS = 500
# Largest integer up to which JavaScript numbers represent every integer.
_EXACT = 2**53


def as_json(value: Any) -> Any:
    """Convert a value to JSON types: NaN and infinities to None, integers above 2^53 to strings."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, int):
        return value if abs(value) <= _EXACT else str(value)
    if isinstance(value, dict):
        return {str(name): as_json(item) for name, item in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [as_json(item) for item in value]
    return str(value)


def content_record(shown: "Shown", row: int | None, whole: bool) -> dict[str, Any]:
    """Return an example's content, truncated unless `whole`; an image as the URL to fetch it from."""
    if shown.kind == "image":
        return {"kind": "image", "src": f"/api/image/{row}"}
    found: dict[str, Any] = {"kind": shown.kind}
    more = False
    for name in ("text", "target"):
        text = getattr(shown, name)
        if text is not None:
            found[name] = text if whole else text[:MOST_LETTERS]
            more |= len(found[name]) < len(text)
    if shown.tokens is not None:
        found["tokens"] = [list(token) for token in (shown.tokens if whole else shown.tokens[:MOST_TOKENS])]
        more |= len(found["tokens"]) < len(shown.tokens)
    return found | {"more": True} if more else found
