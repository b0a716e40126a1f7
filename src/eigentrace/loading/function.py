"""Loading of task and data from a user's function."""

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
    """Import a user's function, call it, and return its task and data.

    The current directory, or the folder of the file, is added to the import path permanently, as with `python -m`.

    Args:
        name: `package.module:function` or `path/to/file.py:function`. The function returns `(task, data)`, or `Inputs`.
        args: Keyword arguments of the function.
    """
    place, colon, called = name.rpartition(":")
    if not colon or not place or not called:
        raise InputError(
            f"The function must have the form package.module:function or path/to/file.py:function, got {name!r}."
        )
    module = _from_file(Path(place)) if place.endswith(".py") else _from_path(place)
    function = _found(module, place, called)
    args = dict(args or {})
    try:
        inspect.signature(function).bind(**args)
    except TypeError as error:
        raise InputError(
            f"{name} has the signature {inspect.signature(function)}, got the arguments ({', '.join(args)}): {error}. "
            "Pass arguments with the names in the signature."
        ) from None
    return _as_inputs(function(**args), name)


def _from_path(name: str) -> ModuleType:
    # The current directory may be that of somebody else's run: it is not searched for what eigentrace imports later.
    if name.partition(".")[0] != "eigentrace":
        _make_importable(Path.cwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # A failing import inside the module is raised with its stack trace.
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise
        raise InputError(
            f"There is no module {name!r}: {error.name!r} is neither in {Path.cwd()} nor an installed package. Run the "
            "command where the module can be imported, or pass a file, path/to/file.py:function."
        ) from None


def _from_file(path: Path) -> ModuleType:
    path = path.resolve()
    if not path.is_file():
        raise InputError(f"There is no file {path} to import the function from. Check the path.")
    _make_importable(path.parent)
    # A unique module name, because a file called json.py must not replace the module json.
    name = f"{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise InputError(f"{path} cannot be imported as Python. Pass a file that ends in .py.")
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
    what = f"{name!r} in {place} is not a function" if hasattr(module, name) else f"{place} has no function {name!r}"
    raise InputError(f"{what}. Its functions are: {', '.join(known) or 'none'}.")


def _as_inputs(made: Any, name: str) -> Inputs:
    if isinstance(made, Inputs):
        return made
    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], Task):
        return Inputs(made[0], as_data(made[1]))
    kinds = ", ".join(type(item).__name__ for item in made) if isinstance(made, tuple) else ""
    raise InputError(
        f"{name} must return (task, data), an eigentrace.Task such as eigentrace.classification(model) and the "
        f"training data, got {f'({kinds})' if kinds else type(made).__name__}."
    )
