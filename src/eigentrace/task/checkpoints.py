"""Reading of checkpoints written by common training tools, without executing pickled code."""

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from eigentrace.disk.bounded import check_regular, read_json
from eigentrace.disk.tensors import read_tensors
from eigentrace.errors import EigentraceWarning, InputError, MismatchError

State = Mapping[str, Tensor]
Source = str | Path | State

_NESTED = ("state_dict", "model_state_dict", "model")
_DAMAGED = "{file} is damaged or not a checkpoint ({error}). Restore it, or pass another."
_SUFFIXES = (".ckpt", ".safetensors", ".pt", ".pth")
_STEP = re.compile(r"(?:step[=_-]?|checkpoint-)(\d+)")


@dataclass(frozen=True)
class Checkpoint:
    """One state of the model: tensors in memory, or the path to load them from."""

    source: Path | State

    def load(self) -> State:
        """Return the state dict."""
        return _read(self.source) if isinstance(self.source, Path) else self.source

    def __repr__(self) -> str:
        return f"<Checkpoint: {self}>"

    def __str__(self) -> str:
        return str(self.source) if isinstance(self.source, Path) else "state dict in memory"


def find_checkpoints(sources: Source | Sequence[Source]) -> tuple[Checkpoint, ...]:
    """Return the checkpoints in state dicts, files, Hugging Face folders or training folders.

    A training folder is searched for `checkpoint-<step>` folders and `*.ckpt`, `*.safetensors`, `*.pt` and `*.pth`
    files, which are sorted by the steps in their names. The final model that the Trainer saves beside its checkpoints,
    and Lightning's `last.ckpt`, are copies of one of them and are skipped.
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
        raise InputError("checkpoints is empty: pass at least one path or state dict, or None for the model as it is.")
    _refuse_same_tensors([c.source for c in found if isinstance(c.source, Mapping)])
    return tuple(found)


def _refuse_same_tensors(states: list[State]) -> None:
    """Raise InputError if state dicts share their tensors, because `model.state_dict()` was not copied."""
    seen: dict[frozenset[int], int] = {}
    for number, state in enumerate(states):
        memory = frozenset(tensor.data_ptr() for tensor in state.values())
        if seen.setdefault(memory, number) != number:
            raise InputError(
                f"State dicts {seen[memory]} and {number} share their tensors, so both contain the current weights of "
                "the model. Store copies during training: copy.deepcopy(model.state_dict())."
            )


def _expand(path: Path) -> list[Path]:
    if not path.exists():
        raise InputError(f"Checkpoint {path} does not exist.")
    if path.is_file():
        return [path]
    # Subfolders of a model's folder may contain parts of that model; only checkpoint-* folders are other states of it.
    pattern = "checkpoint-*" if _weights_in(path) else "*"
    inside = [p for p in path.glob(pattern) if p.is_dir() and _weights_in(p)]
    if not inside and _weights_in(path):
        return [path]
    if not inside:
        inside = [p for p in path.iterdir() if p.suffix in _SUFFIXES]
    if len(inside) > 1:
        inside = [p for p in inside if p.name != "last.ckpt"]
    if not inside and any(path.rglob("adapter_model.*")):
        raise InputError(
            f"{path} contains adapters without their base model. Load each into the model with PEFT, and pass "
            "copies of its state dict."
        )
    if not inside:
        raise InputError(
            f"{path} contains no checkpoints: expected model.safetensors, pytorch_model.bin, checkpoint-* folders or "
            f"{', '.join(_SUFFIXES)} files."
        )
    if len(inside) == 1:
        warnings.warn(
            f"{path} contains a single checkpoint. The Hugging Face Trainer (save_total_limit) and Lightning "
            "(save_top_k) delete earlier ones by default; TracIn works best with several.",
            EigentraceWarning,
            stacklevel=4,
        )
    return sorted(inside, key=_order)


def _order(path: Path) -> tuple[int, list[str | int]]:
    """Return a sort key: the step in the name, or else the name in natural order (epoch_2 before epoch_10)."""
    match = _STEP.search(path.name)
    parts = [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", path.name)]
    return (int(match.group(1)) if match else -1, parts)


def _weights_in(folder: Path) -> list[Path]:
    """Return the weight files of a Hugging Face folder, including all shards."""
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (folder / name).is_file():
            return [folder / name]
        index = folder / f"{name}.index.json"
        if index.is_file():
            return _shards(index)
    return []


def _shards(index: Path) -> list[Path]:
    try:
        return sorted({index.parent / shard for shard in read_json(index)["weight_map"].values()})
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise MismatchError(f"{index} is damaged or not an index of weights ({error!r}). Restore it.") from None


def _read(path: Path) -> State:
    files = _weights_in(path) if path.is_dir() else [path]
    state: dict[str, Tensor] = {}
    for file in files:
        state.update(read_tensors(file) if file.suffix == ".safetensors" else _read_pickled(file))
    return state


def _read_pickled(file: Path) -> State:
    check_regular(file)
    try:
        loaded = torch.load(file, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise MismatchError(f"{file} is missing. Restore it, or pass another checkpoint.") from None
    except UnpicklingError as error:
        reason = next((line for line in str(error).splitlines() if "GLOBAL" in line or "global" in line), None)
        if reason is None:
            raise MismatchError(_DAMAGED.format(file=file, error=str(error).splitlines()[-1])) from None
        raise InputError(
            f"{file} contains more than tensors, and loading it would run code from it ({reason.strip()}). Load it "
            "yourself if you trust it and pass its state dict, or save it as safetensors."
        ) from None
    except (RuntimeError, EOFError, LookupError, ValueError, TypeError, AttributeError) as error:
        raise MismatchError(_DAMAGED.format(file=file, error=repr(error))) from None
    return _unwrap(loaded, str(file))


def _unwrap(loaded: Any, where: str) -> State:
    """Return the tensors by name from a checkpoint that may contain other training state."""
    while isinstance(loaded, Mapping) and (inner := [key for key in _NESTED if isinstance(loaded.get(key), Mapping)]):
        loaded = loaded[inner[0]]
    if not isinstance(loaded, Mapping) or not any(isinstance(value, Tensor) for value in loaded.values()):
        got = f"the keys {list(loaded)[:3]}" if isinstance(loaded, Mapping) else type(loaded).__name__
        raise MismatchError(
            f"{where} contains no state dict: expected tensors by name, at the top or under {_NESTED}, got {got}."
        )
    return {name: value for name, value in loaded.items() if isinstance(value, Tensor)}
