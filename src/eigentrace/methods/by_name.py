"""Methods by their names, for files of settings and the command line."""

import dataclasses
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

import eigentrace
from eigentrace.errors import InputError
from eigentrace.methods.method import Method

DEFAULT = "Arnoldi"
"""The method where none is named."""


def method_names() -> list[str]:
    """Return the names of all public methods."""
    return [name for name in eigentrace.__all__ if _is_method(getattr(eigentrace, name))]


def _is_method(one: Any) -> bool:
    return dataclasses.is_dataclass(one) and one.__module__.startswith("eigentrace.methods.") and hasattr(one, "fit")


def method_type(name: Any) -> Any:
    """Return the class of a method; capitals and hyphens in its name do not matter."""
    known = {_plain(one): one for one in method_names()}
    if not isinstance(name, str) or _plain(name) not in known:
        near = get_close_matches(_plain(str(name)), list(known), n=2, cutoff=0.5)
        hint = f"; did you mean {' or '.join(known[one] for one in near)}?" if near else "."
        raise InputError(f"There is no method {name!r}{hint} Methods are {', '.join(known.values())}.")
    return getattr(eigentrace, known[_plain(name)])


def _plain(name: str) -> str:
    return name.replace("-", "").replace("_", "").replace(" ", "").lower()


def settable(name: Any = DEFAULT) -> tuple[str, ...]:
    """Name the settings of a method that text can give: those whose default is no object."""
    fields = dataclasses.fields(method_type(name))
    return tuple(field.name for field in fields if not _is_object(field))


def _is_object(field: dataclasses.Field) -> bool:
    return field.default_factory is not dataclasses.MISSING or dataclasses.is_dataclass(field.default)


def make_method(settings: Mapping[str, Any]) -> Method:
    """Make a method of its settings, which name it under "method"."""
    given = dict(settings)
    kind = method_type(given.pop("method", DEFAULT))
    needed = {field.name for field in dataclasses.fields(kind) if field.default is dataclasses.MISSING}
    missing = sorted(name for name in needed & set(settable(kind.__name__)) if name not in given)
    if missing:
        raise InputError(f"{kind.__name__} needs {', '.join(missing)}: give it under [fit], or with --set.")
    return kind(**given)
