"""Directories on disk that appear whole or not at all, and say which model they belong to."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from eigentrace.errors import MismatchError
from eigentrace.files import ALIGNED, appearing, write_tensors
from eigentrace.progress import track
from eigentrace.task import Task

_MANIFEST = "manifest.json"


def fingerprint(task: Task) -> str:
    """Hash the names, shapes, types and numbers a task computes with, and which of them are selected."""
    digest = hashlib.sha256()
    for name, tensor in track(sorted(task.tensors().items()), "Fingerprint"):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {name in task.params};".encode())
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().data if flat.numel() else b"")
    return digest.hexdigest()


def write(path: Path, manifest: Mapping[str, Any], files: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Write a manifest and named safetensors files as a new directory, which appears whole or not at all."""
    with appearing(path) as partial:
        partial.mkdir()
        for name, tensors in files.items():
            write_tensors(tensors, partial / name)
        (partial / _MANIFEST).write_text(json.dumps(manifest, indent=2, allow_nan=False) + "\n")


def read_manifest(path: Path, kind: str) -> dict[str, Any]:
    """Read the manifest of a directory written by `write`, and check what it is."""
    try:
        manifest = json.loads((path / _MANIFEST).read_text())
    except FileNotFoundError:
        raise MismatchError(f"{path} holds no {_MANIFEST}, so it is not a saved {kind}. Check the path.") from None
    except NotADirectoryError:
        raise MismatchError(f"{path} is a file, and a saved {kind} is a directory. Check the path.") from None
    except ValueError as error:  # not JSON, or not even text
        raise MismatchError(f"{path / _MANIFEST} is damaged ({error}). Save the {kind} again.") from None
    found = (manifest.get("kind"), manifest.get("format")) if isinstance(manifest, dict) else type(manifest).__name__
    if found != (kind, 1):
        raise MismatchError(
            f"{path / _MANIFEST} says {found} where {(kind, 1)} was expected: another kind of artifact, or one written "
            "by another version of eigentrace."
        )
    return manifest


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file. What was saved gives the same results to the bit, wherever it lies in the file."""
    try:
        tensors = load_file(path)
        return {name: t.clone() if t.data_ptr() % ALIGNED else t for name, t in tensors.items()}
    except FileNotFoundError:
        raise MismatchError(f"{path} is missing. Restore it, or make the artifact again.") from None
    except SafetensorError as error:
        raise MismatchError(f"{path} is damaged or cut short ({error}). Make it again.") from None
