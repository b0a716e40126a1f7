"""A cache of trained networks, shared by commands."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from eigentrace.disk.atomic import replacing
from harness.files import made_once


def name_of(what: str, recipe: Any, *data: Tensor) -> str:
    """Return the file name of a training: its kind, and a digest of everything it depends on.

    Args:
        what: The kind.
        recipe: All settings, with a complete `repr`, such as a dataclass of numbers.
        data: The training data.
    """
    sha = hashlib.sha256(repr(recipe).encode())
    for tensor in data:
        sha.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return f"{what}_{sha.hexdigest()[:16]}"


def kept(path: Path, model: nn.Module, train: Callable[[nn.Module], None]) -> nn.Module:
    """Train a network in place, or load its weights if the file exists; return it in eval mode.

    If several processes need the same network, one trains it and the others wait.
    """

    def make() -> None:
        train(model)
        keep(path, model.state_dict())

    made_once(path, make)
    model.load_state_dict(torch.load(path, weights_only=True, map_location="cpu"))
    return model.eval()


def keep(path: Path, tensors: Any) -> None:
    """Write tensors and numbers to a file atomically, even if several processes write it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as unfinished:
        torch.save(tensors, unfinished)
