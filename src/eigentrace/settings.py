"""Validation of settings, and their conversion to JSON."""

import dataclasses
import math
from collections.abc import Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from eigentrace.errors import InputError

# Characters of a value in a message or in `repr`.
_LONGEST = 60


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


def check_above_zero(**settings: Any) -> None:
    """Raise InputError unless each setting is a finite number above 0."""
    for name, value in settings.items():
        if isinstance(value, bool) or not isinstance(value, Real) or not 0 < float(value) < math.inf:
            raise InputError(f"{name} must be a positive finite number, got {value!r}.")


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


def settings_repr(method: Any) -> str:
    """Return `repr` of a settings dataclass: its name, and the settings that differ from their defaults, shortened."""
    words = []
    for field in dataclasses.fields(method):
        value = getattr(method, field.name)
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        if value is not default and (type(value) is not type(default) or value != default):
            words.append(f"{field.name}={_setting_repr(value)}")
    return f"{type(method).__name__}({', '.join(words)})"


def _setting_repr(value: Any) -> str:
    if isinstance(value, str | int | float | Path | None) or dataclasses.is_dataclass(value):
        return repr(value)
    if isinstance(value, list | tuple | Mapping):
        is_plain = len(value) <= 3 and all(isinstance(item, str | int | float | Path) for item in value)
        return short(repr(value)) if is_plain else f"<{type(value).__name__} of {len(value)}>"
    return getattr(value, "__name__", f"<{type(value).__name__}>")


def counted(number: int, thing: str) -> str:
    """Return a number with its noun, in the plural if needed: 1 shard, 2 shards, 3 queries."""
    several = f"{thing[:-1]}ies" if thing.endswith("ry") else f"{thing}s"
    return f"{number:,} {thing if number == 1 else several}"


def short(value: Any, longest: int = _LONGEST) -> str:
    """Format a value for a message, truncated to 60 characters or another number."""
    text = " ".join(str(value).split())
    return text if len(text) <= longest else f"{text[: longest - 3]}..."
