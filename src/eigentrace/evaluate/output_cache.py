"""A directory that stores the outputs of retrained models, so that a killed run resumes where it stopped."""

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
    """Stored outputs of trained models, by training rows and seed.

    Keys are computed from the rows themselves, so one directory serves any subsets, groups and numbers of seeds, for
    one recipe and one training set.

    Args:
        path: The directory; created if it does not exist.
        recipe: Description of data and training; a directory with another recipe raises `MismatchError`.
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
        """Return the stored outputs of a model; None if it was not trained before."""
        return self._known.get(self.key(job))

    def add(self, jobs: Sequence[TrainingJob], outputs: Tensor) -> None:  # (jobs, Q)
        """Store the outputs of models, in one atomically written file."""
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
        """Hash the rows and the seed of a model."""
        mask = np.zeros(self._num_train, dtype=bool)
        mask[job.rows] = True
        return hashlib.sha256(np.packbits(mask).tobytes() + job.seed.to_bytes(8, "little")).digest()

    def _read(self, part: Path) -> None:
        tensors = read_tensors(part)
        keys, outputs = tensors.get("keys"), tensors.get("outputs")
        if keys is None or outputs is None or len(keys) != len(outputs) or outputs.ndim != 2:
            raise MismatchError(
                f"{part} does not contain outputs of trained models. Remove the file; its models are trained again."
            )
        self._known.update({key.numpy().tobytes(): row for key, row in zip(keys, outputs, strict=True)})


def _compare(path: Path, there: dict[str, Any], here: dict[str, Any]) -> None:
    """Raise MismatchError if the recipe of a directory differs, naming the first five entries that do."""
    entries = [_flat(there), _flat(here)]
    pairs = {name: [side.get(name, "nothing") for side in entries] for name in sorted(entries[0] | entries[1])}
    differ = [f"{name} is {short(a)} there and {short(b)} here" for name, (a, b) in pairs.items() if a != b]
    if differ:
        listed = "; ".join(differ[:5])
        raise MismatchError(
            f"{path} holds models trained with another recipe: {listed}. Use another directory, or the settings and "
            "data that it was created with."
        )


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        return {name: item for key, inner in value.items() for name, item in _flat(inner, f"{prefix}{key}.").items()}
    return {prefix.removesuffix("."): value}
