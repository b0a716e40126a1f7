"""The types of the entries of a run's manifest and of its request, checked before anything is read with them."""

from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from eigentrace.errors import MismatchError
from eigentrace.store.shards import MOST_ROWS

_NOTHING = type(None)
_TYPES: dict[str, tuple[type, ...]] = {
    "created": (str,),
    "versions": (dict,),
    "model": (dict,),
    "coverage": (str,),
    "method": (dict,),
    "method.name": (str,),
    "method.cut": (dict,),
    "method.agreement": (dict, _NOTHING),
    "method.agreement.self_influence": (float, int, _NOTHING),
    "num_train": (int,),
    "has_curvature": (bool,),
    "calibration": (float, int, _NOTHING),
    "pairs": (bool,),
    "data": (dict,),
    "data.rows": (int,),
    "data.fingerprint": (str,),
    "compute": (dict,),
    "compute.engine": (str,),
    "compute.precision": (str,),
    "compute.compile": (bool,),
    "compute.batch": (int, _NOTHING),
    "features": (dict,),
    "features.count": (int,),
    "features.type": (str,),
    "features.hold": (str,),
    "columns": (list, _NOTHING),
    "declared": (dict,),
    "how": (dict, _NOTHING),
    "files": (dict,),
    "blocks": (dict,),
}
"""The types of the entries that are read; entries may be missing in manifests of earlier versions."""
_SECTIONS = ("fit", "score", "unsaved")
_NAMES = ("function", "model", "dataset", "task", "tokenizer", "split", "device", "id")
"""The entries of a run's request that are objects, and those of its input that are text."""
_COUNTS = ("num_train", "data.rows", "features.count")
_TEXTS = ("columns", "files", "blocks")


def check_entries(manifest: Mapping[str, Any], path: Path) -> None:
    """Raise MismatchError unless all entries of a run's manifest have their types, and all files are in the run."""
    for key, kinds in _TYPES.items():
        parent: Any = manifest
        *outer, last = key.split(".")
        for part in outer:
            parent = parent.get(part, {}) or {}
        if last in parent and not isinstance(parent[last], kinds):
            expected = " or ".join(kind.__name__ for kind in kinds)
            raise _wrong(path, key, parent[last], f"expected {expected}")
        if last in parent and int in kinds and isinstance(parent[last], bool):
            raise _wrong(path, key, parent[last], "expected a number")
        if key in _COUNTS and last in parent and not 0 <= parent[last] <= MOST_ROWS:
            raise _wrong(path, key, parent[last], f"expected 0 to {MOST_ROWS}")
    check_request(manifest.get("how") or {}, path)
    for key in _TEXTS:
        entries = manifest.get(key) or ()
        values = entries if isinstance(entries, list) else (*entries, *dict(entries).values())
        if not all(isinstance(value, str) for value in values):
            raise _wrong(path, key, entries, "expected only texts")
    for name in (*manifest.get("files", ()), *manifest.get("blocks", ())):
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts or "\0" in name or not name:
            raise _wrong(path, "files", name, "expected names of files in the run's directory")


def check_request(how: Mapping[str, Any], path: Path) -> None:
    """Raise MismatchError unless all entries that are read of a run's request have their types; none is required.

    Args:
        how: The request.
        path: The file that has it.
    """
    asked = _object(how, "input", path)
    for name in _SECTIONS:
        _object(how, name, path)
    _object(asked, "args", path)
    texts = {name: asked.get(name) for name in _NAMES}
    texts |= {f"absolute path of {name}": value for name, value in _object(asked, "resolved", path).items()}
    for name, value in texts.items():
        if not isinstance(value, str | _NOTHING):
            raise _wrong(path, f"the request's {name}", value, "expected text")
    classes, rows = how.get("classes"), _object(how, "data", path).get("rows", 0)
    if classes is not None and not (isinstance(classes, list) and all(isinstance(name, str) for name in classes)):
        raise _wrong(path, "the request's classes", classes, "expected a list of texts")
    if type(rows) is not int or not 0 <= rows <= MOST_ROWS:
        raise _wrong(path, "the request's number of rows", rows, f"expected 0 to {MOST_ROWS}")


def _object(held: Mapping[str, Any], name: str, path: Path) -> Mapping[str, Any]:
    """Return an object of a request, empty if it is missing or null; raise MismatchError for anything else."""
    value = held.get(name)
    if not isinstance(value, dict | _NOTHING):
        raise _wrong(path, f"the request's {name}", value, "expected an object")
    return value or {}


def _wrong(path: Path, key: str, value: Any, expected: str) -> MismatchError:
    return MismatchError(
        f"{path} is damaged or was edited: {key} is {str(value)[:200]!r}, {expected}. Restore it, or score into a new "
        "directory."
    )
