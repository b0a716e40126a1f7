"""Trained networks, kept so that another command need not train them again."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from eigentrace.disk.atomic import replacing
from harness.files import made_once


def name_of(what: str, recipe: Any, *data: Tensor) -> str:
    """Name what is kept of a training after its kind and a digest of all it depends on.

    Args:
        what: The kind.
        recipe: Everything but the data, with a `repr` that tells it all, such as a dataclass of numbers.
        data: What it is trained on.
    """
    sha = hashlib.sha256(repr(recipe).encode())
    for tensor in data:
        sha.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return f"{what}_{sha.hexdigest()[:16]}"


def kept(path: Path, model: nn.Module, train: Callable[[nn.Module], None]) -> nn.Module:
    """Train a network in place, or give it the weights of the file where there is one; return it in eval mode.

    Of several processes that ask for the same network one trains it, and the others wait for its weights.
    """

    def make() -> None:
        train(model)
        keep(path, model.state_dict())

    made_once(path, make)
    model.load_state_dict(torch.load(path, weights_only=True, map_location="cpu"))
    return model.eval()


def keep(path: Path, tensors: Any) -> None:
    """Write tensors and numbers to a file that is there as a whole or not at all, whoever else writes it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as unfinished:
        torch.save(tensors, unfinished)
