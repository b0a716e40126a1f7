"""The types of a run manifest's entries, checked before anything is read with them."""

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
    for key in _TEXTS:
        entries = manifest.get(key) or ()
        values = entries if isinstance(entries, list) else (*entries, *dict(entries).values())
        if not all(isinstance(value, str) for value in values):
            raise _wrong(path, key, entries, "expected only texts")
    for name in (*manifest.get("files", ()), *manifest.get("blocks", ())):
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts or "\0" in name or not name:
            raise _wrong(path, "files", name, "expected names of files in the run's directory")


def _wrong(path: Path, key: str, value: Any, expected: str) -> MismatchError:
    return MismatchError(
        f"{path} is damaged or was edited: {key} is {str(value)[:200]!r}, {expected}. Restore it, or score into a new "
        "directory."
    )
