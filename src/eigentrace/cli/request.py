"""The request of a run: the settings that it was created with, stored in the run and read by every later command."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from eigentrace.data import Data
from eigentrace.disk.atomic import replacing
from eigentrace.disk.bounded import open_regular, read_json
from eigentrace.errors import InputError, MismatchError
from eigentrace.krylov.resume import progress_of
from eigentrace.loading import Inputs, from_config, make_inputs
from eigentrace.loading.settings_file import check_stored
from eigentrace.loading.trust import trust_run
from eigentrace.methods.by_name import DEFAULT
from eigentrace.numeric.hashing import hash_arrays
from eigentrace.settings import short
from eigentrace.store.entries import check_request
from eigentrace.store.folder import REQUEST, Folder
from eigentrace.store.same_data import difference, labels_at_hand

UNSAVED = "unsaved"
"""Key of a request whose method was fitted but has nothing to save."""
_NEEDED = {"model": "--model", "dataset": "--data", "task": "--task"}
_WAYS = "--model, --data and --task, with --input file.py:function, or with --config file.toml"
# Settings that may differ when a fit is resumed: they affect how examples are loaded, not what they are.
_FREE = ("device", "workers", "resolved")

# Settings of a fit that are always text, even if they look like a number.
_WORDS = ("method", "params", "curvature", "precision")

How = dict[str, dict[str, Any]]


def resolve(path: Path, config: Path | None, given: dict[str, dict[str, Any]]) -> How:
    """Return the settings of this call; without any, those the run was created with."""
    folder, fit = Folder(path), given["fit"]
    given["fit"] = {name: value if name in _WORDS else parse(value) for name, value in fit.items()}
    if config is None and all(value is None for part in given.values() for value in part.values()):
        return read(path)
    _check_named(config, given["input"])
    how = from_config(config, given)
    trust_run(how["input"], path)  # the user named the function in this call
    if not (path / REQUEST).exists():
        _refuse_others(path)
        return how
    if not folder.fit.exists() and not folder.krylov.exists() and UNSAVED not in (folder.request or {}):
        return how
    held = read(path)
    differing = _differing(held, how)
    if differing:
        raise MismatchError(
            f"{path} was created with other settings: {differing}. Nothing was changed: resume with `eigentrace fit "
            f"{path}` and no options, or choose another directory."
        )
    known = {name: held[name] for name in ("data", UNSAVED) if name in held}
    return how | {"score": held["score"] | how["score"]} | known


def read(path: Path) -> How:
    """Read the settings that a run was created with."""
    file = path / REQUEST
    try:
        return _checked(read_json(file), file)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except MismatchError:
        raise
    except OSError as error:
        raise MismatchError(f"{file} cannot be read ({error}). Check its permissions and the disk.") from None
    except ValueError as error:
        raise MismatchError(f"{file} is damaged ({error}). Restore it, or start again in another directory.") from None
    if not path.is_dir():
        raise InputError(f"There is no run at {path}. Create one: eigentrace fit {path}, with {_WAYS}.")
    raise InputError(
        f"The model and the data of {path} are unknown: there is no {REQUEST}, which `eigentrace fit` writes. Continue "
        "a run that was created in Python in Python."
    )


def _checked(found: Any, file: Path) -> How:
    """Return the content of a request; raise MismatchError unless it has all sections, of known settings."""
    for name in ("input", "fit", "score"):
        held = found.get(name) if isinstance(found, dict) else None
        if not isinstance(held, dict):
            what = (
                f"{name} is {short(repr(held), 100)}" if isinstance(found, dict) else f"it is {short(repr(found), 100)}"
            )
            raise MismatchError(
                f"{file} is damaged or was edited: {what}, expected an object with the objects input, fit and score. "
                "Restore it, or start again in another directory."
            )
    check_request(found, file)
    check_stored(found, str(file))
    return found


def write(path: Path, how: Mapping[str, Any]) -> None:
    """Write the request of a run."""
    file, words = path / REQUEST, (json.dumps(how, indent=2) + "\n").encode()
    if not file.exists():
        _refuse_others(path)
    else:
        with open_regular(file) as held:
            if held.read(len(words) + 1) == words:
                return
    with replacing(file) as partial:
        partial.write_bytes(words)


def load_inputs(how: Mapping[str, Any], home: Path, device: str | None = None, *, trust: bool = False) -> Inputs:
    """Load the model and the data of the run at `home`, on another device if one is passed."""
    asked = how["input"]
    if device is not None:
        if "function" in asked:
            raise InputError(
                f"The device of the model is chosen by the function {asked['function']}, so --device {device} has no "
                "effect: leave it out."
            )
        asked = asked | {"device": device}
    wanted = str(asked.get("device") or "")
    if wanted.startswith("cuda") and not torch.cuda.is_available():
        raise InputError(f"The device {wanted} is not available: torch finds no GPU. Use --device cpu.")
    return make_inputs({"input": asked}, home, trust=trust)


def with_data_hashes(how: How, inputs: Inputs, path: Path, begun: bool = True) -> How:
    """Add hashes of the data to a request; raise MismatchError if the fit was started with other data."""
    labels = labels_at_hand(inputs.data, inputs.task)
    now: dict[str, Any] = {"rows": len(inputs.data), "fingerprint": inputs.data.fingerprint()}
    now |= {} if labels is None else {"labels": hash_arrays([("", labels)])}
    now |= {} if inputs.content is None else inputs.content()
    held = how.get("data", now) if begun else now
    if held.get("rows") != now["rows"]:
        found = f"it has {now['rows']:,} examples and had {held.get('rows', 0):,}"
    elif held.get("content") != now.get("content") and held.get("unordered") == now.get("unordered"):
        found = "its examples are in another order"
    elif any(held.get(key) != now.get(key) for key in ("content", "labels", "fingerprint")):
        folder = Folder(path)
        where = difference(folder, inputs.data, inputs.task) if folder.exists else None
        found = f"its examples or their labels have changed{f' ({where})' if where else ''}"
    else:
        return how | {"data": held}
    raise MismatchError(
        f"The data of {path} has changed since its fit was started: {found}. Nothing was changed in the run: restore "
        "the earlier data, or fit the new data in another directory."
    )


def new_examples(how: Mapping[str, Any], home: Path, queries: Path) -> Data:
    """Load a file of new examples in the same way as the data of the run."""
    if "function" in how["input"]:
        raise InputError(
            f"--queries needs a run of a dataset file, but the data of this run comes from the function "
            f"{how['input']['function']}. Explain new examples in Python: eigentrace.open_run(path, task, data)"
            ".explain(queries)."
        )
    changed: dict[str, Any] = {"dataset": str(queries.resolve()), "id": None, "split": None, "columns": []}
    resolved = {key: value for key, value in how["input"]["resolved"].items() if key != "dataset"}
    asked = {key: value for key, value in (how["input"] | changed).items() if value is not None}
    return load_inputs({"input": asked | {"resolved": resolved}}, home).data


def scored_folder(path: Path) -> Folder:
    """Return the folder of a run that has scores, or raise InputError naming the command to run first."""
    if not path.is_dir():
        raise InputError(
            f"There is no run at {path}: expected a directory that `eigentrace fit` created. Check the path."
        )
    if state := unscored(path):
        raise InputError(f"{path} has no scores: {state[0]}. Run first: {state[1]}")
    return Folder(path)


def unscored(path: Path) -> tuple[str, str] | None:
    """Return the state of a run without scores, and the next command; None for any other directory."""
    folder = Folder(path)
    if folder.exists:
        return None
    if folder.fit.exists() or UNSAVED in (folder.request or {}):
        return "the fit is finished, and nothing is scored yet", f"eigentrace score {path}"
    if folder.krylov.exists() or (path / REQUEST).exists():
        known = progress_of(folder.krylov)
        saved = "" if known is None else f": {known[0]:,} of {known[1]:,} curvature products are saved"
        return f"the fit is not finished{saved}", f"eigentrace fit {path}"
    return None


def parse(value: Any) -> Any:
    """Convert text to a number or a boolean if it is one, also within lists; return anything else unchanged."""
    if isinstance(value, list):
        return [parse(item) for item in value]
    if not isinstance(value, str):
        return value
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return value


def _check_named(config: Path | None, asked: Mapping[str, Any]) -> None:
    missing = [option for name, option in _NEEDED.items() if asked[name] is None]
    if config is None and asked["function"] is None and missing:
        raise InputError(f"Missing: {', '.join(missing)}. Specify what to fit with {_WAYS}.")


def _refuse_others(path: Path) -> None:
    """Raise InputError if the directory contains files that `eigentrace fit` did not write."""
    if path.exists() and not path.is_dir():
        raise InputError(f"{path} is a file, but a run is a directory. Choose another path.")
    ours = ("lock", REQUEST)
    held = sorted(file.name for file in path.iterdir()) if path.is_dir() else []
    others = [name for name in held if name not in ours and not name.startswith(f".{REQUEST}")]
    if others:
        raise InputError(
            f"{path} contains other files ({', '.join(others[:3])}) and no run. Nothing was changed: choose a new "
            "directory."
        )


def _differing(held: How, asked: How) -> str:
    """List the settings that differ between two requests, with their values; empty if none does."""
    words = []
    for section in ("input", "fit"):
        before, now = ({**part[section], **part[section].get("resolved", {})} for part in (held, asked))
        if section == "fit":
            before, now = ({"method": DEFAULT} | part for part in (before, now))
        for key in sorted({*before, *now} - {*_FREE}):
            if before.get(key) != now.get(key):
                words.append(f"{key} is {_said(before, key)} there and {_said(now, key)} here")
    return "; ".join(words)


def _said(settings: Mapping[str, Any], key: str) -> str:
    return json.dumps(settings[key]) if key in settings else "not given"
