"""Validation of settings, and their conversion to JSON."""

import dataclasses
import math
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from eigentrace.errors import InputError


def check_counts(minimum: int, **settings: Any) -> None:
    """Raise InputError unless each setting is an integer ≥ `minimum`."""
    for name, value in settings.items():
        if isinstance(value, bool) or not isinstance(value, Integral) or value < minimum:
            raise InputError(f"{name} must be a whole number of at least {minimum}, got {value!r}.")


def check_not_negative(**settings: Any) -> None:
    """Raise InputError unless each setting is a finite number ≥ 0."""
    for name, value in settings.items():
        if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) < math.inf:
            raise InputError(f"{name} must be a finite number of at least 0, got {value!r}.")


def settings_of(method: Any) -> dict[str, Any]:
    """Return a method's name and settings as JSON values."""
    if not dataclasses.is_dataclass(method):
        return {"name": type(method).__name__}
    values = {field.name: plain(getattr(method, field.name)) for field in dataclasses.fields(method)}
    return {"name": type(method).__name__} | values


def plain(value: Any) -> Any:
    """Convert a setting to a JSON value; an object without one becomes the name of its type."""
    if dataclasses.is_dataclass(value):
        return settings_of(value)
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, Integral | Real) and not isinstance(value, bool):
        return int(value) if isinstance(value, Integral) else float(value)
    if isinstance(value, Path):
        return str(value)
    return value if isinstance(value, str | bool | None) else type(value).__name__


def short(value: Any) -> str:
    """Format a value for a message, truncated to 60 characters."""
    text = " ".join(str(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."
