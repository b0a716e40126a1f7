"""Directories with a JSON manifest that identifies their kind and format, written atomically."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eigentrace.disk.atomic import appearing
from eigentrace.disk.bounded import Entries, read_json
from eigentrace.disk.tensors import write_tensors
from eigentrace.errors import MismatchError
from eigentrace.numeric.hashing import hash_text

if TYPE_CHECKING:
    from torch import Tensor

MANIFEST = "manifest.json"
# The checksum of all other entries of a manifest.
_SUM = "sha256"


def write_directory(path: Path, manifest: Mapping[str, Any], files: Mapping[str, Mapping[str, "Tensor"]]) -> None:
    """Write a manifest and named safetensors files as a new directory, atomically."""
    with appearing(path) as partial:
        partial.mkdir()
        for name, tensors in files.items():
            write_tensors(tensors, partial / name, checksums=True)
        (partial / MANIFEST).write_text(manifest_text(manifest))


def manifest_text(manifest: Mapping[str, Any]) -> str:
    """Return a manifest as JSON, with a checksum of its entries."""
    entries = json.loads(json.dumps(manifest, indent=2, allow_nan=False))
    return json.dumps(entries | {_SUM: _sum_of(entries)}, indent=2, allow_nan=False) + "\n"


def _sum_of(entries: Mapping[str, Any]) -> str:
    return hash_text(json.dumps(entries, sort_keys=True))


def read_manifest(path: Path, kind: str) -> dict[str, Any]:
    """Read the manifest of a directory written by `write_directory`, and check its kind, format and checksum.

    Manifests of earlier versions have no checksum. In the result, a missing key raises MismatchError.
    """
    file = path / MANIFEST
    try:
        manifest = read_json(file)
    except FileNotFoundError:
        raise MismatchError(f"{path} contains no {MANIFEST}, so it is not a saved {kind}. Check the path.") from None
    except NotADirectoryError:
        raise MismatchError(f"{path} is a file, but a saved {kind} is a directory. Check the path.") from None
    except MismatchError:
        raise
    except ValueError as error:  # not JSON, or not even text
        raise MismatchError(f"{file} is damaged ({error}). Save the {kind} again.") from None
    except OSError as error:
        raise MismatchError(f"{file} cannot be read ({error}). Check its permissions and the disk.") from None
    is_object = isinstance(manifest, Entries)
    found = (manifest.get("kind"), manifest.get("format")) if is_object else type(manifest).__name__
    if found != (kind, 1):
        raise MismatchError(
            f"{file} has kind and format {str(found)[:200]}, expected {(kind, 1)}. It is another kind of artifact, or "
            "was written by another version of eigentrace."
        )
    recorded = manifest.pop(_SUM, None)
    if recorded not in (None, _sum_of(manifest)):
        raise MismatchError(
            f"{file} is damaged or was edited: its checksum differs. Restore it, or create the {kind} again."
        )
    return manifest


def through_json(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return a value as read back from JSON: tuples become lists."""
    return json.loads(json.dumps(value, allow_nan=False))
