"""A directory that remembers what retrained models gave, one recipe to a directory, and survives being killed."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eigentrace.disk.atomic import replacing
from eigentrace.disk.manifest import MANIFEST, read_manifest
from eigentrace.disk.tensors import read_tensors, write_tensors
from eigentrace.errors import MismatchError
from eigentrace.evaluate.subsets import TrainingJob
from eigentrace.settings import short
from eigentrace.version import __version__

_KIND = "cache of retrained models"


class Store:
    """Outputs of trained models by subset and seed.

    What is asked for is looked up by the rows themselves, so that one directory serves any subsets, groups and numbers
    of seeds of one recipe on one training set.

    Args:
        path: The directory; made if it is not there.
        recipe: Describes data and training; a directory of another recipe is refused.
        num_train: Size of the training set.
    """

    def __init__(self, path: Path, recipe: dict[str, Any], num_train: int) -> None:
        self.path, self._num_train = path, num_train
        here = json.loads(json.dumps({"num_train": num_train, **recipe}))
        if not path.exists() or (path.is_dir() and not any(path.iterdir())):
            path.mkdir(parents=True, exist_ok=True)
            manifest = {"kind": _KIND, "format": 1, "version": __version__, "recipe": here}
            text = json.dumps(manifest, indent=2) + "\n"
            with replacing(path / MANIFEST) as partial:
                partial.write_text(text)
        _compare(path, read_manifest(path, _KIND)["recipe"], here)
        self._known: dict[bytes, Tensor] = {}
        for part in sorted(path.glob("part-*.safetensors")):
            self._read(part)

    def __len__(self) -> int:
        return len(self._known)

    def get(self, job: TrainingJob) -> Tensor | None:  # (Q,)
        """Return what a model gave, if it was trained before."""
        return self._known.get(self.key(job))

    def add(self, jobs: Sequence[TrainingJob], outputs: Tensor) -> None:  # (jobs, Q)
        """Remember what models gave: in a file that is there as a whole or not at all."""
        keys = [self.key(job) for job in jobs]
        tensors = {
            "keys": torch.from_numpy(np.stack([np.frombuffer(key, dtype=np.uint8) for key in keys])),
            "outputs": outputs.detach().cpu().contiguous(),
        }
        name = f"part-{len(self._known):06d}-{keys[0].hex()[:12]}.safetensors"
        with replacing(self.path / name) as partial:
            write_tensors(tensors, partial)
        self._known.update(zip(keys, outputs, strict=True))

    def key(self, job: TrainingJob) -> bytes:
        """Name a model by its rows and seed."""
        mask = np.zeros(self._num_train, dtype=bool)
        mask[job.rows] = True
        return hashlib.sha256(np.packbits(mask).tobytes() + job.seed.to_bytes(8, "little")).digest()

    def _read(self, part: Path) -> None:
        tensors = read_tensors(part)
        keys, outputs = tensors.get("keys"), tensors.get("outputs")
        if keys is None or outputs is None or len(keys) != len(outputs) or outputs.ndim != 2:
            raise MismatchError(f"{part} does not hold trained models. Remove it; they are trained again.")
        self._known.update({key.numpy().tobytes(): row for key, row in zip(keys, outputs, strict=True)})


def _compare(path: Path, there: dict[str, Any], here: dict[str, Any]) -> None:
    """Refuse a directory whose recipe differs, naming every entry that does."""
    entries = [_flat(there), _flat(here)]
    pairs = {name: [side.get(name, "nothing") for side in entries] for name in sorted(entries[0] | entries[1])}
    differ = [f"{name} is {short(a)} there and {short(b)} here" for name, (a, b) in pairs.items() if a != b]
    if differ:
        listed = "; ".join(differ[:5])
        raise MismatchError(
            f"{path} holds models of another training: {listed}. Give another directory for this one, or the settings "
            "and data it was made with."
        )


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        return {name: item for key, inner in value.items() for name, item in _flat(inner, f"{prefix}{key}.").items()}
    return {prefix.removesuffix("."): value}
