"""Directories with a JSON manifest that identifies their kind and format, written atomically."""

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
    """Write a manifest and named safetensors files as a new directory, atomically."""
    with appearing(path) as partial:
        partial.mkdir()
        for name, tensors in files.items():
            write_tensors(tensors, partial / name)
        (partial / MANIFEST).write_text(json.dumps(manifest, indent=2, allow_nan=False) + "\n")


def read_manifest(path: Path, kind: str) -> dict[str, Any]:
    """Read the manifest of a directory written by `write_directory`, and check its kind and format."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
    except FileNotFoundError:
        raise MismatchError(f"{path} contains no {MANIFEST}, so it is not a saved {kind}. Check the path.") from None
    except NotADirectoryError:
        raise MismatchError(f"{path} is a file, but a saved {kind} is a directory. Check the path.") from None
    except ValueError as error:  # not JSON, or not even text
        raise MismatchError(f"{path / MANIFEST} is damaged ({error}). Save the {kind} again.") from None
    found = (manifest.get("kind"), manifest.get("format")) if isinstance(manifest, dict) else type(manifest).__name__
    if found != (kind, 1):
        raise MismatchError(
            f"{path / MANIFEST} has kind and format {found}, expected {(kind, 1)}. It is another kind of artifact, or "
            "was written by another version of eigentrace."
        )
    return manifest


def through_json(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return a value as read back from JSON: tuples become lists."""
    return json.loads(json.dumps(value, allow_nan=False))
