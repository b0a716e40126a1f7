"""Checkpoints as training tools leave them, read without ever executing a pickle."""

import json
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from eigentrace.artifact import read_tensors
from eigentrace.errors import EigentraceWarning, InputError, MismatchError

State = Mapping[str, Tensor]
Source = str | Path | State

_NESTED = ("state_dict", "model_state_dict", "model")
_STEP = re.compile(r"(?:step=|checkpoint-|step_?)(\d+)")


@dataclass(frozen=True)
class Checkpoint:
    """One state of the model: tensors in memory, or where to read them when they are needed."""

    source: Path | State

    def load(self) -> State:
        """Return the state dict."""
        return _read(self.source) if isinstance(self.source, Path) else self.source

    def __str__(self) -> str:
        return str(self.source) if isinstance(self.source, Path) else "state dict in memory"


def find_checkpoints(sources: Source | Sequence[Source]) -> tuple[Checkpoint, ...]:
    """List checkpoints: state dicts, files, Hugging Face folders, or a training folder full of either kind.

    A training folder is searched for `checkpoint-<step>` folders and `*.ckpt`, `*.safetensors`, `*.pt` and `*.pth`
    files, and what is found comes in the order of the steps in the names.
    """
    if isinstance(sources, str | Path | Mapping):
        sources = [sources]
    found: list[Checkpoint] = []
    for source in sources:
        if isinstance(source, Mapping):
            found.append(Checkpoint(_unwrap(source, "the state dict")))
        elif isinstance(source, str | Path):
            found.extend(Checkpoint(path) for path in _expand(Path(source)))
        else:
            raise InputError(f"A checkpoint must be a path or a state dict, got {type(source).__name__}.")
    if not found:
        raise InputError("No checkpoints given: pass at least one path or state dict, or None for the model as it is.")
    return tuple(found)


def _expand(path: Path) -> list[Path]:
    if not path.exists():
        raise InputError(f"Checkpoint {path} does not exist.")
    if path.is_file() or _weights_in(path):
        return [path]
    inside = [p for p in path.iterdir() if (p.is_dir() and _weights_in(p)) or p.suffix in (".ckpt", ".pt", ".pth")]
    if not inside:
        raise InputError(
            f"{path} holds no checkpoints: looked for model.safetensors, pytorch_model.bin, checkpoint-* folders and "
            ".ckpt, .pt or .pth files."
        )
    if len(inside) == 1:
        warnings.warn(
            f"{path} holds a single checkpoint. The Hugging Face Trainer (save_total_limit) and Lightning (save_top_k) "
            "delete earlier ones by default; TracIn works best over several.",
            EigentraceWarning,
            stacklevel=5,
        )
    return sorted(inside, key=lambda p: (_step(p), p.name))


def _step(path: Path) -> int:
    match = _STEP.search(path.name)
    return int(match.group(1)) if match else -1


def _weights_in(folder: Path) -> list[Path]:
    """Return the weight files of a Hugging Face folder, all shards of them."""
    for name in ("model.safetensors", "adapter_model.safetensors", "pytorch_model.bin"):
        if (folder / name).is_file():
            return [folder / name]
        index = folder / f"{name}.index.json"
        if index.is_file():
            return sorted({folder / shard for shard in json.loads(index.read_text())["weight_map"].values()})
    return []


def _read(path: Path) -> State:
    files = _weights_in(path) if path.is_dir() else [path]
    state: dict[str, Tensor] = {}
    for file in files:
        state.update(read_tensors(file) if file.suffix == ".safetensors" else _read_pickled(file))
    return state


def _read_pickled(file: Path) -> State:
    try:
        loaded = torch.load(file, map_location="cpu", weights_only=True)
    except UnpicklingError as error:
        raise InputError(
            f"{file} holds more than tensors; reading it would run code from the file ({str(error).splitlines()[0]}). "
            "Load it yourself if you trust it, and pass its state dict, or save it as safetensors."
        ) from None
    except (RuntimeError, EOFError) as error:
        raise MismatchError(f"{file} is damaged or not a checkpoint ({error}).") from None
    return _unwrap(loaded, str(file))


def _unwrap(loaded: Any, where: str) -> State:
    """Find the tensors inside what a training loop saved beside them."""
    for key in _NESTED:
        if isinstance(loaded, Mapping) and isinstance(loaded.get(key), Mapping):
            loaded = loaded[key]
    if not isinstance(loaded, Mapping) or not any(isinstance(value, Tensor) for value in loaded.values()):
        raise MismatchError(f"{where} holds no state dict: expected tensors by name, at the top or under {_NESTED}.")
    return {name: value for name, value in loaded.items() if isinstance(value, Tensor)}
