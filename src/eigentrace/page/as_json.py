"""What is known of examples, as JSON can hold it: numbers that are none become null, long texts are cut."""

import math
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from eigentrace.rendering import Shown

MOST_LETTERS = 2000
MOST_TOKENS = 500
# Beyond this a browser's numbers skip whole ones.
_EXACT = 2**53


def as_json(value: Any) -> Any:
    """Return a value as JSON can hold it and a browser can read it."""
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
    """Say what an example looks like; an image is fetched by itself."""
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
