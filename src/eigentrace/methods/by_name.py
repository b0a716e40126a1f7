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
    """Return the names of a method's settings that can be given as text.

    A setting that is itself an object with settings is left out; its own are named like "basis.dtype".
    """
    found: list[str] = []
    for field in dataclasses.fields(method_type(name)):
        if not _is_object(field):
            found.append(field.name)
        elif dataclasses.is_dataclass(default := _default(field)):
            found += [f"{field.name}.{part.name}" for part in dataclasses.fields(default) if not _is_object(part)]
    return tuple(found)


def _is_object(field: dataclasses.Field) -> bool:
    return field.default_factory is not dataclasses.MISSING or dataclasses.is_dataclass(field.default)


def _default(field: dataclasses.Field) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def make_method(settings: Mapping[str, Any]) -> Method:
    """Create a method from its settings; the key "method" contains its name."""
    given = dict(settings)
    kind = method_type(given.pop("method", DEFAULT))
    fields = {field.name: field for field in dataclasses.fields(kind)}
    needed = {name for name, field in fields.items() if field.default is dataclasses.MISSING}
    missing = sorted(name for name in needed & set(settable(kind.__name__)) if name not in given)
    if missing:
        raise InputError(
            f"{kind.__name__} needs the setting {', '.join(missing)}: set it under [fit] in the settings file, or "
            "with --set."
        )
    for whole in {name.partition(".")[0] for name in given if "." in name}:
        parts = {name: given.pop(name) for name in list(given) if name.startswith(f"{whole}.")}
        changes = {name.partition(".")[2]: value for name, value in parts.items()}
        given[whole] = dataclasses.replace(_default(fields[whole]), **changes)
    return kind(**given)
