"""A file of settings, with the command line's own on top, as one plain record that can be stored and repeated."""

import json
import tomllib
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

from eigentrace.errors import InputError
from eigentrace.loading.dataset_check import check_unchanged
from eigentrace.loading.function import from_function
from eigentrace.loading.inputs import Inputs
from eigentrace.loading.model_folder import Check, from_folder, show_folder
from eigentrace.methods.by_name import DEFAULT, method_type, settable
from eigentrace.rendering import Show, Tensors
from eigentrace.store import Folder

_FOLDER = (
    "model", "dataset", "task", "text", "text_pair", "target", "label", "image", "id", "tokenizer", "max_length",
    "batch_size", "device", "columns", "split", "workers",
)  # fmt: skip
# Settings of the task that people think of as belonging to the fit.
_OF_TASK = ("params", "l2")
_KEYS = {
    "input": ("function", "args", *_FOLDER),
    "fit": ("method", *_OF_TASK),  # and the settings of the method
    "score": ("shard_rows", "shard_seconds", "features", "batch", "precision", "engine", "memory", "compile"),
}  # fmt: skip
# An argument of a function begins with the first to mean the directory of the run; under the second, the directory in
# full is among the resolved paths, for those who have the record alone.
IN_RUN, RUN = "{run}", "run"
_PATHS = ("model", "dataset", "tokenizer")
# TOML has no null: these words stand for it.
_NOTHING = {"tail": "none", "sample": "all"}

How = dict[str, dict[str, Any]]


def from_config(path: Path | str | None, overrides: Mapping[str, Mapping[str, Any]] | None = None) -> How:
    """Read settings from a TOML file, put others on top, and check that they are known and name an input.

    Args:
        path: The file, with sections [input], [fit] and [score]; None for none. Paths in it are relative to its folder.
        overrides: Settings of the command line by section, None for those not given. Its paths are relative to the
            current directory.

    Returns:
        A record that JSON can hold: "input" is what `make_inputs` needs, with paths as given and, under "resolved",
        in full; "fit" is the method's name, if it is not Arnoldi, and its settings; "score" the settings of scoring.
    """
    given: How = {}
    resolved: dict[str, str] = {}
    sources = [] if path is None else [(_read(Path(path)), Path(path).resolve().parent, str(path))]
    sources.append((dict(overrides or {}), Path.cwd(), "the command line"))
    method = _method_of([settings for settings, *_ in sources])
    for settings, folder, name in sources:
        _check_known(settings, name, method)
        for section, values in settings.items():
            told = {key: _value(key, value) for key, value in values.items() if value is not None}
            given.setdefault(section, {}).update(told)
            if section == "input":
                resolved |= _resolved(told, folder)
            if section == "fit" and "checkpoints" in told:
                given[section]["checkpoints"] = _in_full(told["checkpoints"], folder)
    how = {section: given.get(section, {}) for section in _KEYS}
    how["fit"] |= {"method": method} if "method" in how["fit"] else {}
    how["input"] |= {key: how["fit"].pop(key) for key in _OF_TASK if key in how["fit"]}
    _check_input(how["input"])
    how["input"]["resolved"] = resolved
    return _as_json(how)


def make_inputs(how: Mapping[str, Mapping[str, Any]], home: Path | str | None = None) -> Inputs:
    """Make task and data from a record that `from_config` returned, now or as stored with a run.

    A path is taken as it was resolved then; where that is gone, as it was given, from the current directory.

    Args:
        how: The record.
        home: The directory of the run it was stored with. Arguments of a function that begin with `{run}` begin with
            this directory then, so that a run which holds its own data can be moved.
    """
    asked = _settled(how, home)
    if "function" in asked:
        return from_function(asked["function"], asked.get("args"))
    return from_folder(**asked)


def show_of(
    how: Mapping[str, Mapping[str, Any]] | None, home: Path | str | None = None, inputs: Inputs | None = None
) -> Show | None:
    """Find out what the examples of a run look like; None where nobody can tell.

    The examples of folders are shown without loading the model. A function is called, unless what it returned is given;
    where it does not say what its examples look like, tensors that look like images are taken for images. A dataset
    that is not what the run scored is refused, as far as its ids, its labels and 64 of its rows tell.

    Args:
        how: What the run was made from, as `from_config` returned it or its manifest holds it.
        home: The run's directory; see `make_inputs`.
        inputs: What was made of the record, where that is at hand.
    """
    if inputs is None:
        if not how or "input" not in how:
            return None
        asked = _settled(how, home)
        if "function" not in asked:
            return show_folder(**asked, check=_check_of(how, home))
        inputs = make_inputs(how, home)
    return Tensors.found_in(inputs.data) if inputs.show is None else inputs.show


def check_source(how: Mapping[str, Mapping[str, Any]], home: Path | str) -> Path:
    """Stop if the dataset of a run, read from its first row to its last, is not the one that was scored.

    Args:
        how: What the run was made from: folders, and no function.
        home: The run's directory.

    Returns:
        Where the dataset is now.
    """
    asked = _settled(how, home)
    show_folder(**asked, check=_check_of(how, home, whole=True))
    return Path(asked["dataset"])


def _check_of(how: Mapping[str, Any], home: Path | str | None, whole: bool = False) -> Check | None:
    """Return what compares a dataset with what the run at `home` has scored of it."""
    if home is None or not Folder(home).exists:
        return None
    return partial(check_unchanged, folder=Folder(home), how=how, whole=whole)


def _settled(how: Mapping[str, Mapping[str, Any]], home: Path | str | None) -> dict[str, Any]:
    """Return what the input is made from, with every path where it is now."""
    asked = dict(how["input"])
    resolved = dict(asked.pop("resolved", {}))
    _check_input(asked)
    made_in = resolved.pop(RUN, None)
    for key, full in resolved.items():
        asked[key] = full if _is_there(key, full) else asked[key]
    if home is not None and Folder(home).exists:
        _refuse_lost(asked.get("dataset"), resolved.get("dataset"), home)
    if asked.get("args"):
        asked["args"] = {name: _in_run(value, home or made_in) for name, value in asked["args"].items()}
    return asked


def _refuse_lost(given: str | None, full: str | None, home: Path | str) -> None:
    """Stop where the dataset of a run is neither where it was nor under its name in the current directory."""
    if given is not None and full is not None and not _is_there("dataset", given):
        raise InputError(
            f"The dataset of the run at {home} was {full}, which is gone, and there is no {given} here. Bring it back, "
            f"or run this in a directory where it is called {given}."
        )


def _in_run(value: Any, home: Path | str | None) -> Any:
    if not isinstance(value, str) or Path(value).parts[:1] != (IN_RUN,):
        return value
    if home is None:
        raise InputError(f"The argument {value!r} begins with the directory of a run, and none is known here.")
    return str(Path(home).resolve().joinpath(*Path(value).parts[1:]))


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"There is no file of settings {path}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not TOML: {error}") from None


def _method_of(sources: Iterable[Mapping[str, Any]]) -> str:
    """Return the name of the method that the last source to name one names."""
    sections = [settings.get("fit", {}) for settings in sources]
    named = [fit["method"] for fit in sections if isinstance(fit, Mapping) and fit.get("method") is not None]
    return method_type(named[-1] if named else DEFAULT).__name__


def _in_full(paths: Any, folder: Path) -> Any:
    if isinstance(paths, list):
        return [_in_full(path, folder) for path in paths]
    return str((folder / paths).resolve()) if isinstance(paths, str | Path) else paths


def _check_known(settings: Mapping[str, Any], name: str, method: str = DEFAULT) -> None:
    known = _KEYS | {"fit": (*_KEYS["fit"], *settable(method))}
    for section, values in settings.items():
        if section not in known:
            raise InputError(f"{name} has {_unknown(section, known)} Sections are [{'], ['.join(known)}].")
        if not isinstance(values, Mapping):
            raise InputError(f"{name} gives {section} = {values!r}, and [{section}] is a section of settings.")
        for key in values:
            if values[key] is not None and key not in known[section]:
                elsewhere = [f"[{other}]" for other, keys in known.items() if key in keys]
                hint = f" It belongs to {' or '.join(elsewhere)}." if elsewhere else ""
                raise InputError(
                    f"{name} has {_unknown(key, known[section], section)}{hint} Settings of [{section}]"
                    f"{f' for {method}' if section == 'fit' else ''} are {', '.join(known[section])}."
                )


def _unknown(word: str, known: Iterable[str], section: str = "") -> str:
    near = get_close_matches(word, list(known), n=3, cutoff=0.5)
    kind = f"an unknown setting {word!r} in [{section}]" if section else f"an unknown section [{word}]"
    return f"{kind}; did you mean {' or '.join(near)}?" if near else f"{kind}."


def _value(key: str, value: Any) -> Any:
    return None if key in _NOTHING and value == _NOTHING[key] else value


def _resolved(told: Mapping[str, Any], folder: Path) -> dict[str, str]:
    """Return paths in full; of a function named by a file, the file's."""
    full = {key: str((folder / told[key]).resolve()) for key in _PATHS if isinstance(told.get(key), str | Path)}
    place, _, called = str(told.get("function", "")).rpartition(":")
    if place.endswith(".py"):
        full["function"] = f"{(folder / place).resolve()}:{called}"
    return full


def _is_there(key: str, full: str) -> bool:
    path = Path(full.rpartition(":")[0] if key == "function" else full)
    return path.exists() or any(letter in full for letter in "*?[")


def _check_input(asked: Mapping[str, Any]) -> None:
    """See that the input is a function, or folders, and not both."""
    if "function" in asked:
        others = [key for key in asked if key not in ("function", "args", "resolved")]
        if others:
            raise InputError(
                f"[input] names the function {asked['function']} and gives {', '.join(others)} too, which the function "
                "decides on. Give them to it in [input.args], or leave the function out."
            )
        return
    missing = [key for key in ("model", "dataset", "task") if key not in asked]
    if missing:
        raise InputError(
            f"[input] lacks {', '.join(missing)}. Give model, dataset and task, or a function that returns (task, "
            "data): function = 'package.module:function'."
        )
    if "args" in asked:
        raise InputError("[input.args] are arguments of a function, and none is named. Leave them out.")


def _as_json(how: How) -> How:
    """Turn paths into text, and refuse what JSON cannot hold: the record is stored with the run."""
    try:
        return json.loads(json.dumps(how, default=_text_of))
    except TypeError as error:
        raise InputError(f"A setting cannot be stored: {error}") from None


def _text_of(value: Any) -> str:
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{value!r} is a {type(value).__name__}. Write it as text or as a number.")
