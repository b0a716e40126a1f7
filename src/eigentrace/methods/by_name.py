"""Looking up methods by name, for settings files and the command line."""

import dataclasses
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

import eigentrace
from eigentrace.errors import InputError
from eigentrace.methods.method import Method

DEFAULT = "Arnoldi"
"""The method used if none is named."""


def method_names() -> list[str]:
    """Return the names of all public methods."""
    return [name for name in eigentrace.__all__ if _is_method(getattr(eigentrace, name))]


def _is_method(one: Any) -> bool:
    return dataclasses.is_dataclass(one) and one.__module__.startswith("eigentrace.methods.") and hasattr(one, "fit")


def method_type(name: Any) -> Any:
    """Return the class of a method by name (case-insensitive, hyphens and underscores ignored)."""
    known = {_plain(one): one for one in method_names()}
    if not isinstance(name, str) or _plain(name) not in known:
        near = get_close_matches(_plain(str(name)), list(known), n=2, cutoff=0.5)
        hint = f"; did you mean {' or '.join(known[one] for one in near)}?" if near else "."
        raise InputError(f"There is no method {name!r}{hint} The methods are {', '.join(known.values())}.")
    return getattr(eigentrace, known[_plain(name)])


def _plain(name: str) -> str:
    return name.replace("-", "").replace("_", "").replace(" ", "").lower()


def settable(name: Any = DEFAULT) -> tuple[str, ...]:
    """Return the names of a method's settings that can be given as text: those whose default is not an object."""
    fields = dataclasses.fields(method_type(name))
    return tuple(field.name for field in fields if not _is_object(field))


def _is_object(field: dataclasses.Field) -> bool:
    return field.default_factory is not dataclasses.MISSING or dataclasses.is_dataclass(field.default)


def make_method(settings: Mapping[str, Any]) -> Method:
    """Create a method from its settings; the key "method" contains its name."""
    given = dict(settings)
    kind = method_type(given.pop("method", DEFAULT))
    needed = {field.name for field in dataclasses.fields(kind) if field.default is dataclasses.MISSING}
    missing = sorted(name for name in needed & set(settable(kind.__name__)) if name not in given)
    if missing:
        raise InputError(
            f"{kind.__name__} needs the setting {', '.join(missing)}: set it under [fit] in the settings file, or "
            "with --set."
        )
    return kind(**given)
