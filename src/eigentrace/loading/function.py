"""A task and its data from a function of the user's own, named on the command line."""

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from eigentrace.data import as_data
from eigentrace.errors import InputError
from eigentrace.loading.inputs import Inputs
from eigentrace.task.task import Task


def from_function(name: str, args: Mapping[str, Any] | None = None) -> Inputs:
    """Call the function that a user names, and take what it returns as task and data.

    The current directory is put on the import path and stays there, as with `python -m`; for a file its own folder is.

    Args:
        name: `package.module:function` or `path/to/file.py:function`. It returns `(task, data)`, or `Inputs`.
        args: What the function is called with, by name.
    """
    place, colon, called = name.rpartition(":")
    if not colon or not place or not called:
        raise InputError(
            f"{name!r} does not name a function: write package.module:function, or path/to/file.py:function."
        )
    module = _from_file(Path(place)) if place.endswith(".py") else _from_path(place)
    function = _found(module, place, called)
    args = dict(args or {})
    try:
        inspect.signature(function).bind(**args)
    except TypeError as error:
        raise InputError(
            f"{name} takes {inspect.signature(function)}, and was given ({', '.join(args)}): {error}. Name its "
            "arguments as the function does."
        ) from None
    return _as_inputs(function(**args), name)


def _from_path(name: str) -> ModuleType:
    _make_importable(Path.cwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # What the module itself fails to import is the user's to see, with its traceback.
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise
        raise InputError(
            f"There is no module {name!r}: {error.name!r} was not found in {Path.cwd()} nor among the installed "
            "packages. Run the command where the module can be imported, or give the file, path/to/file.py:function."
        ) from None


def _from_file(path: Path) -> ModuleType:
    path = path.resolve()
    if not path.is_file():
        raise InputError(f"There is no file {path}, from which a function was asked for.")
    _make_importable(path.parent)
    # A name of its own: a file called json.py must not take the place of a module that others import.
    name = f"{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise InputError(f"{path} cannot be imported as Python.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _make_importable(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _found(module: ModuleType, place: str, name: str) -> Callable[..., Any]:
    function = getattr(module, name, None)
    if callable(function):
        return function
    known = sorted(
        key for key, value in vars(module).items() if inspect.isfunction(value) and value.__module__ == module.__name__
    )
    what = f"{name!r} in {place} is no function" if hasattr(module, name) else f"{place} has no function {name!r}"
    raise InputError(f"{what}. Functions it has: {', '.join(known) or 'none'}.")


def _as_inputs(made: Any, name: str) -> Inputs:
    if isinstance(made, Inputs):
        return made
    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], Task):
        return Inputs(made[0], as_data(made[1]))
    kinds = ", ".join(type(item).__name__ for item in made) if isinstance(made, tuple) else ""
    raise InputError(
        f"{name} returned {f'({kinds})' if kinds else type(made).__name__}, and must return (task, data): an "
        "eigentrace.Task, for instance eigentrace.classification(model), and the training data."
    )
