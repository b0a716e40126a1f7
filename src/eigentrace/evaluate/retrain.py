"""The ground truth: outputs of models that were retrained on subsets of the training data."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eigentrace.disk.manifest import read_manifest, write_directory
from eigentrace.disk.tensors import read_tensors
from eigentrace.errors import InputError, MismatchError, NumericalError
from eigentrace.evaluate.output_cache import Store
from eigentrace.evaluate.subsets import Subsets, TrainingJob, model_seed
from eigentrace.evaluate.training import Trainer, as_trainer
from eigentrace.progress import track
from eigentrace.settings import check_counts, counted
from eigentrace.version import __version__

_KIND = "retrained"


@dataclass(frozen=True, eq=False)
class Retrained:
    """Outputs of models trained on subsets, for each query."""

    masks: np.ndarray
    """(m, N), true where an example was in the subset."""
    outputs: np.ndarray
    """(m, s, Q), one number per subset, seed and query."""
    higher_is_worse: bool = True
    """Whether the outputs are losses, or scores such as margins that rise as a model gets better."""
    recipe: dict[str, Any] = field(default_factory=dict)
    """Description of the training, if the trainer has one."""

    def __repr__(self) -> str:
        subsets, seeds, queries = self.outputs.shape
        size = f"{counted(subsets, 'subset')} of {counted(self.masks.shape[1], 'example')}"
        return f"<Retrained: {size}, {counted(seeds, 'seed')}, {counted(queries, 'query')}>"

    def __post_init__(self) -> None:
        masks, outputs = np.asarray(self.masks), np.asarray(self.outputs, dtype=np.float64)
        if masks.ndim != 2 or masks.dtype != np.bool_ or outputs.ndim != 3 or len(masks) != len(outputs):
            raise InputError(
                f"Got masks {masks.dtype} {masks.shape} and outputs {outputs.shape}: expected boolean masks of shape "
                "(subsets, training examples) and outputs of shape (subsets, seeds, queries)."
            )
        if not outputs.size or not np.isfinite(outputs).all():
            raise InputError(
                f"{int((~np.isfinite(outputs)).sum())} of {outputs.size} outputs are not finite: pass at least one "
                "output, and leave out models that diverged."
            )
        object.__setattr__(self, "masks", masks)
        object.__setattr__(self, "outputs", outputs)

    @property
    def mean(self) -> np.ndarray:  # (m, Q)
        """Outputs averaged over seeds."""
        return self.outputs.mean(axis=1)

    def save(self, path: str | Path) -> None:
        """Write masks, outputs and recipe to a new directory."""
        manifest = {
            "kind": _KIND,
            "format": 1,
            "version": __version__,
            "num_train": self.masks.shape[1],
            "higher_is_worse": self.higher_is_worse,
            "recipe": self.recipe,
        }
        tensors = {
            "masks": torch.from_numpy(np.packbits(self.masks, axis=1)),
            "outputs": torch.from_numpy(self.outputs),
        }
        write_directory(Path(path), manifest, {"retrained.safetensors": tensors})

    @classmethod
    def load(cls, path: str | Path) -> "Retrained":
        """Read a directory that `save` wrote."""
        manifest = read_manifest(Path(path), _KIND)
        tensors = read_tensors(Path(path) / "retrained.safetensors")
        if tensors.keys() != {"masks", "outputs"}:
            raise MismatchError(
                f"{path} contains the tensors {sorted(tensors)}, expected masks and outputs. Save the result again."
            )
        masks = np.unpackbits(tensors["masks"].numpy(), axis=1, count=manifest["num_train"]).astype(bool)
        return cls(masks, tensors["outputs"].numpy(), manifest["higher_is_worse"], manifest["recipe"])


def retrain(
    trainer: Any,
    subsets: Subsets,
    *,
    seeds: int = 5,
    seed: int = 0,
    shared_seeds: bool = False,
    cache: str | Path | None = None,
) -> Retrained:
    """Train models on every subset with several seeds, and measure the queries with each.

    Args:
        trainer: `ManyModels`, `Loop`, or a function of rows and seed that returns one number per query.
        subsets: The examples that each model is trained on.
        seeds: s, the number of models to train on each subset.
        seed: Seed from which the seeds of all models are derived.
        shared_seeds: Use the same s seeds for all subsets, which makes differences between subsets less noisy. By
            default every model has its own seed, so that all models are independent.
        cache: A directory that stores the outputs of trained models. A killed run resumes from it, and calls with more
            subsets or seeds train only the new models. It must have been created with the same recipe and data.

    Raises:
        InputError: If the trainer does not return one number per query.
        MismatchError: If the cache was created with another recipe or other data.
        NumericalError: If training diverges.
    """
    trainer = as_trainer(trainer)
    check_counts(1, seeds=seeds)
    check_counts(0, seed=seed)
    numbers = [[model_seed(seed, j, None if shared_seeds else i) for j in range(seeds)] for i in range(len(subsets))]
    outputs = train_jobs(trainer, subsets.jobs(numbers), subsets.num_train, cache)
    values = outputs.view(len(subsets), seeds, -1).numpy()
    return Retrained(subsets.masks, values, trainer.higher_is_worse, trainer.recipe() or {})


def train_jobs(
    trainer: Trainer, jobs: Sequence[TrainingJob], num_train: int, cache: str | Path | None
) -> Tensor:  # (jobs, Q) float64
    """Train the models that the cache does not have, each once, and return the outputs of all jobs."""
    trainer.check(num_train)
    store = None if cache is None else _opened(Path(cache), trainer, num_train)
    names = [(job.rows.tobytes(), job.seed) for job in jobs]
    wanted = dict(zip(names, jobs, strict=True))
    found = {name: known for name, job in wanted.items() if store and (known := store.get(job)) is not None}
    # Models with equally many examples are trained together, since they take the same number of steps.
    missing = sorted((name for name in wanted if name not in found), key=lambda name: len(wanted[name].rows))
    step = max(1, trainer.at_once)
    blocks = [missing[i : i + step] for i in range(0, len(missing), step)]
    for block in track(blocks, "Retraining", len(missing), len):
        part = [wanted[name] for name in block]
        outputs = trainer.outputs(part).detach().to("cpu", torch.float64)
        _check(part, outputs, found)
        if store is not None:
            store.add(part, outputs)
        found.update(zip(block, outputs, strict=True))
    return torch.stack([found[name] for name in names])


def _opened(path: Path, trainer: Trainer, num_train: int) -> Store:
    recipe = trainer.recipe()
    if recipe is None:
        raise InputError(
            "A cache needs a recipe, so that it is never reused for other training: pass Loop(..., recipe={...}) with "
            "the data, the model and every setting of the training."
        )
    return Store(path, recipe, num_train)


def _check(jobs: Sequence[TrainingJob], outputs: Tensor, found: dict[Any, Tensor]) -> None:
    if outputs.ndim != 2 or len(outputs) != len(jobs):
        raise InputError(
            f"The trainer returned outputs of shape {tuple(outputs.shape)} for {len(jobs)} models: expected "
            f"({len(jobs)}, queries)."
        )
    num_queries = len(next(iter(found.values()))) if found else outputs.shape[1]
    if outputs.shape[1] != num_queries:
        raise InputError(
            f"A model was measured on {outputs.shape[1]} queries, others on {num_queries}: measure every model on the "
            "same queries."
        )
    bad = torch.nonzero(~outputs.isfinite().all(dim=1)).flatten().tolist()
    if bad:
        job = jobs[bad[0]]
        raise NumericalError(
            f"{len(bad)} of {len(jobs)} trained models returned outputs that are not finite (first: {len(job.rows)} "
            f"examples, seed {job.seed}). Their training diverged: lower the learning rate, or clip gradients."
        )
