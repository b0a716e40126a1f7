"""Directories with a manifest that says what they are, which appear whole or not at all."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eigentrace.disk.atomic import appearing
from eigentrace.disk.tensors import write_tensors
from eigentrace.errors import MismatchError

if TYPE_CHECKING:
    from torch import Tensor

MANIFEST = "manifest.json"


def write_directory(path: Path, manifest: Mapping[str, Any], files: Mapping[str, Mapping[str, "Tensor"]]) -> None:
    """Write a manifest and named safetensors files as a new directory, which appears whole or not at all."""
    with appearing(path) as partial:
        partial.mkdir()
        for name, tensors in files.items():
            write_tensors(tensors, partial / name)
        (partial / MANIFEST).write_text(json.dumps(manifest, indent=2, allow_nan=False) + "\n")


def read_manifest(path: Path, kind: str) -> dict[str, Any]:
    """Read the manifest of a directory written by `write_directory`, and check what it is."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
    except FileNotFoundError:
        raise MismatchError(f"{path} holds no {MANIFEST}, so it is not a saved {kind}. Check the path.") from None
    except NotADirectoryError:
        raise MismatchError(f"{path} is a file, and a saved {kind} is a directory. Check the path.") from None
    except ValueError as error:  # not JSON, or not even text
        raise MismatchError(f"{path / MANIFEST} is damaged ({error}). Save the {kind} again.") from None
    found = (manifest.get("kind"), manifest.get("format")) if isinstance(manifest, dict) else type(manifest).__name__
    if found != (kind, 1):
        raise MismatchError(
            f"{path / MANIFEST} says {found} where {(kind, 1)} was expected: another kind of artifact, or one written "
            "by another version of eigentrace."
        )
    return manifest


def through_json(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a value is when it comes back from a JSON file: tuples are lists there."""
    return json.loads(json.dumps(value, allow_nan=False))
