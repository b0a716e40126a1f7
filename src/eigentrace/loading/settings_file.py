"""Settings from a TOML file and the command line, merged into a JSON record that is stored with a run."""

import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

from eigentrace.errors import InputError, MismatchError
from eigentrace.loading.dataset_check import check_unchanged
from eigentrace.loading.function import from_function
from eigentrace.loading.inputs import Inputs
from eigentrace.loading.model_folder import Check, from_folder, show_folder
from eigentrace.loading.trust import check_trusted, trust_run
from eigentrace.methods.by_name import DEFAULT, method_type, settable
from eigentrace.rendering import Show, Tensors
from eigentrace.store import Folder

_FOLDER = (
    "model", "dataset", "task", "text", "text_pair", "target", "label", "image", "id", "tokenizer", "max_length",
    "batch_size", "device", "columns", "split", "workers",
)  # fmt: skip
# Settings of the task that are given in [fit].
_OF_TASK = ("params", "l2")
_KEYS = {
    "input": ("function", "args", *_FOLDER),
    "fit": ("method", *_OF_TASK),  # and the settings of the method
    "score": (
        "shard_rows", "shard_bytes", "shard_seconds", "features", "batch", "precision", "engine", "memory", "compile",
    ),
}  # fmt: skip
# IN_RUN is the placeholder for the run's directory at the beginning of a function's argument. RUN is the key of that
# directory among the resolved paths, used if the record is read without the run.
IN_RUN, RUN = "{run}", "run"
_PATHS = ("model", "dataset", "tokenizer")
# Maximum size of a settings file.
_MOST_BYTES = 1 << 24
# TOML has no null: these words represent it.
_NOTHING = {"tail": "none", "sample": "all"}

How = dict[str, dict[str, Any]]


def from_config(path: Path | str | None, overrides: Mapping[str, Mapping[str, Any]] | None = None) -> How:
    """Read settings from a TOML file, apply overrides, and check that all are known and specify an input.

    Args:
        path: A file with sections [input], [fit] and [score], or None. Paths in it are relative to its folder.
        overrides: Settings of the command line by section; settings that are None are ignored. Paths are relative to
            the current directory.

    Returns:
        A JSON-serialisable record: "input" contains the settings for `make_inputs`, with paths as given and, in
        "resolved", as absolute paths; "fit" the settings of the fit, with the method's name if given; "score" the
        settings of scoring.
    """
    given: How = {}
    resolved: dict[str, str] = {}
    sources = [] if path is None else [(_flat(_read(Path(path))), Path(path).resolve().parent, str(path))]
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


def make_inputs(how: Mapping[str, Mapping[str, Any]], home: Path | str | None = None, *, trust: bool = False) -> Inputs:
    """Return task and data from a record of `from_config`, new or stored with a run.

    Each path is used as resolved in the record; if it no longer exists, as given, relative to the current directory.
    A function is imported and called only if the user trusts the record; see `eigentrace.loading.trust`.

    Args:
        how: The record.
        home: The directory of the run that stores the record. It replaces `{run}` at the beginning of a function's
            arguments, so that a run that contains its own data can be moved.
        trust: Call the function that the record names, and record that the run at `home` is trusted.
    """
    asked = _settled(how, home)
    if "function" in asked:
        if not trust:
            check_trusted(how["input"], home, asked["function"])
        elif home is not None:
            trust_run(how["input"], home)
        return from_function(asked["function"], asked.get("args"))
    return from_folder(**asked)


def show_of(
    how: Mapping[str, Mapping[str, Any]] | None,
    home: Path | str | None = None,
    inputs: Inputs | None = None,
    *,
    trust: bool = False,
) -> Show | None:
    """Return a renderer of a run's examples; None if they cannot be rendered.

    Examples of a model folder's dataset are rendered without loading the model; a dataset whose ids, labels or sample
    of 64 rows differ from what the run scored raises MismatchError. A function is called unless `inputs` is given. If
    it returns no renderer, tensors that look like images are rendered as images.

    Args:
        how: The record of `from_config`, or the one in the run's manifest.
        home: The run's directory; see `make_inputs`.
        inputs: The result of `make_inputs`, if available.
        trust: See `make_inputs`.
    """
    if inputs is None:
        if not how or "input" not in how:
            return None
        asked = _settled(how, home)
        if "function" not in asked:
            return show_folder(**asked, check=_check_of(how, home))
        inputs = make_inputs(how, home, trust=trust)
    return Tensors.found_in(inputs.data) if inputs.show is None else inputs.show


def check_source(how: Mapping[str, Mapping[str, Any]], home: Path | str) -> Path:
    """Return the path of a run's dataset; read all of it, and raise MismatchError if it differs from what was scored.

    Args:
        how: The request of the run, with a model folder and a dataset, not a function.
        home: The run's directory.

    Returns:
        The current path of the dataset.
    """
    asked = _settled(how, home)
    show_folder(**asked, check=_check_of(how, home, whole=True))
    return Path(asked["dataset"])


def check_stored(how: Mapping[str, Mapping[str, Any]], name: str) -> None:
    """Raise MismatchError if a record has settings of the input or of scoring that `from_config` does not write.

    Args:
        how: The record.
        name: What has it, for the message.
    """
    known = {"input": (*_KEYS["input"], *_OF_TASK, "resolved"), "score": _KEYS["score"]}
    for section, keys in known.items():
        for key in how.get(section) or {}:
            if key not in keys:
                raise MismatchError(
                    f"{name} has {_unknown(key, keys, section)} It was edited, or written by another version of "
                    "eigentrace: restore it, or start again in another directory."
                )


def _check_of(how: Mapping[str, Any], home: Path | str | None, whole: bool = False) -> Check | None:
    """Return the function that compares a dataset with what the run at `home` scored; None without a run."""
    if home is None or not Folder(home).exists:
        return None
    return partial(check_unchanged, folder=Folder(home), how=how, whole=whole)


def _settled(how: Mapping[str, Mapping[str, Any]], home: Path | str | None) -> dict[str, Any]:
    """Return the input settings, with every path as it can be found now."""
    check_stored(how, "The request of the run")
    asked = dict(how["input"])
    resolved = dict(asked.pop("resolved", {}))
    _check_input(asked)
    made_in = resolved.pop(RUN, None)
    for key, full in resolved.items():
        # Another key would replace what the request names, or add a function to a request that has none.
        if key not in asked or key not in (*_PATHS, "function"):
            raise MismatchError(
                f"The settings have an absolute path {full!r} of {key!r}, but no path of this name. They are damaged "
                "or were edited: restore the run, or create it again."
            )
        asked[key] = full if _is_there(key, full) else asked[key]
    if home is not None and Folder(home).exists:
        _refuse_lost(asked.get("dataset"), resolved.get("dataset"), home)
    if asked.get("args"):
        asked["args"] = {name: _in_run(value, home or made_in) for name, value in asked["args"].items()}
    return asked


def _refuse_lost(given: str | None, full: str | None, home: Path | str) -> None:
    """Raise InputError if a run's dataset is neither at its recorded path nor at the given path from here."""
    if given is not None and full is not None and not _is_there("dataset", given):
        raise InputError(
            f"The dataset of the run at {home} was {full}, which no longer exists, and there is no {given} in the "
            f"current directory. Restore it, or run this in a directory from which its path is {given}."
        )


def _in_run(value: Any, home: Path | str | None) -> Any:
    if not isinstance(value, str) or Path(value).parts[:1] != (IN_RUN,):
        return value
    if home is None:
        raise InputError(
            f"The argument {value!r} begins with the placeholder for a run's directory, but there is no run. Pass the "
            "run's directory as `home`."
        )
    return str(Path(home).resolve().joinpath(*Path(value).parts[1:]))


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:  # which may be a pipe
            content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise InputError(f"{path} has more than {_MOST_BYTES:,} bytes, so it is no settings file. Check the path.")
        found = tomllib.loads(content.decode("utf-8"))
    except FileNotFoundError:
        raise InputError(f"There is no settings file {path}. Check the path.") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error}). Pass a TOML file.") from None
    except RecursionError:
        raise InputError(f"{path} is nested too deeply. Correct it there.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not valid TOML: {error}. Correct it there.") from None
    for name, value in _texts_of(found):
        if "\0" in value:
            raise InputError(f"{path} has a zero byte in {name}, which no path or name contains. Correct it there.")
    return found


def _texts_of(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield all texts in settings, with their names such as input.model."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _texts_of(item, f"{name}.{key}" if name else key)
    elif isinstance(value, list):
        for item in value:
            yield from _texts_of(item, name)
    elif isinstance(value, str):
        yield name, value


def _flat(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings with the sections inside of [fit] as single settings: dtype of [fit.basis] as "basis.dtype".

    The settings of the task are what they are: `l2` maps patterns of names to numbers.
    """
    fit = settings.get("fit")
    if not isinstance(fit, Mapping):
        return settings
    inside = {name: values for name, values in fit.items() if isinstance(values, Mapping) and name not in _OF_TASK}
    plain = {name: value for name, value in fit.items() if name not in inside}
    parts = {f"{name}.{part}": value for name, values in inside.items() for part, value in values.items()}
    return settings | {"fit": plain | parts}


def _method_of(sources: Iterable[Mapping[str, Any]]) -> str:
    """Return the method's name from the last source that has one, or the default."""
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
            raise InputError(f"{name} has {section} = {values!r}, but [{section}] must be a section of settings.")
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
    """Return absolute paths of the settings that are paths, including the file of a function."""
    full = {key: str((folder / told[key]).resolve()) for key in _PATHS if isinstance(told.get(key), str | Path)}
    place, _, called = str(told.get("function", "")).rpartition(":")
    if place.endswith(".py"):
        full["function"] = f"{(folder / place).resolve()}:{called}"
    return full


def _is_there(key: str, full: str) -> bool:
    path = Path(full.rpartition(":")[0] if key == "function" else full)
    return path.exists() or any(letter in full for letter in "*?[")


def _check_input(asked: Mapping[str, Any]) -> None:
    """Raise InputError unless the input is either a function, or a model, a dataset and a task."""
    if "function" in asked:
        others = [key for key in asked if key not in ("function", "args", "resolved")]
        if others:
            raise InputError(
                f"[input] has the function {asked['function']} and also {', '.join(others)}, which cannot be combined. "
                "Pass them to the function in [input.args], or omit the function."
            )
        return
    missing = [key for key in ("model", "dataset", "task") if key not in asked]
    if missing:
        raise InputError(
            f"[input] lacks {', '.join(missing)}. Pass model, dataset and task, or a function that returns (task, "
            "data): function = 'package.module:function'."
        )
    if "args" in asked:
        raise InputError("[input.args] can only be used with a function, but [input] has none. Omit [input.args].")


def _as_json(how: How) -> How:
    """Return the record with paths as text; raise InputError for values that JSON cannot store."""
    for name, value in _unstorable(how):
        raise InputError(
            f"The setting {name} is {value!r}, a {type(value).__name__}, which cannot be stored with the run. Write it "
            "as text or as a number."
        )
    return json.loads(json.dumps(how, default=str))  # paths as text


def _unstorable(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the settings that JSON cannot store, with their names such as input.args.since."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _unstorable(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _unstorable(item, f"{name}[{number}]")
    elif not isinstance(value, str | int | float | Path | None):
        yield name, value
