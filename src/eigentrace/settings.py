"""Settings: refusing wrong ones by name, and writing them down."""

import dataclasses
import math
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from eigentrace.errors import InputError


def check_counts(minimum: int, **settings: Any) -> None:
    """Refuse settings that are not whole numbers of at least a minimum, by name."""
    for name, value in settings.items():
        if isinstance(value, bool) or not isinstance(value, Integral) or value < minimum:
            raise InputError(f"{name} must be a whole number of at least {minimum}, got {value!r}.")


def check_not_negative(**settings: Any) -> None:
    """Refuse settings that are not finite numbers of at least 0, by name."""
    for name, value in settings.items():
        if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) < math.inf:
            raise InputError(f"{name} must be a finite number of at least 0, got {value!r}.")


def settings_of(method: Any) -> dict[str, Any]:
    """Return a method's name and settings in a form that JSON can hold."""
    if not dataclasses.is_dataclass(method):
        return {"name": type(method).__name__}
    values = {field.name: plain(getattr(method, field.name)) for field in dataclasses.fields(method)}
    return {"name": type(method).__name__} | values


def plain(value: Any) -> Any:
    """Turn a setting into what JSON can hold; what it cannot is named by its type."""
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
    """Write a value for a message, cut off where it is long."""
    text = " ".join(str(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."
