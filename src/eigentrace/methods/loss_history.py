"""Losses of every example recorded while training, which show what was learned late; one evaluation pass per record."""

import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from eigentrace.data import Data, as_data
from eigentrace.data.batch import tensors_of
from eigentrace.disk.manifest import read_manifest, write_directory
from eigentrace.disk.tensors import read_tensors
from eigentrace.errors import EigentraceWarning, InputError, MismatchError, StorageError
from eigentrace.methods.losses import losses_of
from eigentrace.numeric.hashing import hash_arrays
from eigentrace.settings import check_counts, counted
from eigentrace.task.task import Task
from eigentrace.version import __version__

TaskOf = Task | Callable[[nn.Module], Task]
_KIND = "losses"
# Number of examples that are hashed to check that a record on disk belongs to the same data.
_LOOKED_AT = 8


@dataclass(frozen=True)
class LossHistory:
    """Losses of all examples at several steps of a training run."""

    values: Tensor  # (C, N) float32, in the order of `steps`
    steps: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.values.ndim != 2 or len(self.values) != len(self.steps) or not self.steps:
            raise InputError(
                f"values must have shape (steps, examples) with one row of losses per step and at least one step, got "
                f"shape {tuple(self.values.shape)} for {len(self.steps)} steps. Record at least once."
            )

    def __repr__(self) -> str:
        return f"<LossHistory: {counted(self.values.shape[1], 'example')} at {_extent(self.steps)}>"

    def mean(self) -> Tensor:  # (N,)
        """Return each example's mean loss over the steps: high if it was learned late, or never."""
        return self.values.double().mean(dim=0).to(self.values.dtype)

    def last(self) -> Tensor:  # (N,)
        """Return the losses at the last step."""
        return self.values[-1]

    @staticmethod
    def load(path: str | Path) -> "LossHistory":
        """Load a record that a `LossTracker` wrote."""
        path = Path(path)
        manifest = read_manifest(path, _KIND)
        found = _read_steps(path, manifest["num_examples"])
        if not found:
            raise InputError(f"{path} contains no recorded step yet: call LossTracker.record at least once.")
        return _history(found)


class LossTracker:
    """A recorder of every example's loss while a model trains, for any training loop.

    Args:
        task: The task, or a function that makes a task of the model in training: `eigentrace.classification`, or
            `lambda model: eigentrace.Task(model, my_loss)`.
        data: The training examples in a fixed order, without random augmentation.
        path: A directory to store the record in; if it exists, the record is continued.

    Recording does not change the model's mode, buffers or gradients, nor any random state. Call `record` once per
    epoch, or more often early in training, when losses differ most between examples.
    """

    def __init__(self, task: TaskOf, data: Any, path: str | Path | None = None) -> None:
        if not isinstance(task, Task) and not callable(task):
            raise InputError(
                f"task must be a Task or a function that makes a Task of a model, got {task!r}. Pass for example "
                "eigentrace.classification."
            )
        self.data: Data = as_data(data)
        self.path = None if path is None else Path(path)
        self._task = task
        self._found: dict[int, Tensor] = {}
        if self.path is not None:
            with _random_states():
                self._open(self.path)

    def __repr__(self) -> str:
        place = "" if self.path is None else f", stored at {self.path}"
        return f"<LossTracker of {self.data!r}: {_extent(self.steps)} recorded{place}>"

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps recorded so far, in ascending order."""
        return tuple(sorted(self._found))

    @property
    def history(self) -> LossHistory:
        """The losses recorded so far, with their steps."""
        if not self._found:
            raise InputError("Nothing has been recorded yet: call record(model) after an epoch.")
        return _history(self._found)

    @property
    def values(self) -> Tensor:  # (C, N)
        """The losses, one row per recorded step."""
        return self.history.values

    def mean(self) -> Tensor:  # (N,)
        """Return each example's mean loss over the recorded steps: high if it was learned late, or never."""
        return self.history.mean()

    def last(self) -> Tensor:  # (N,)
        """Return the losses at the last recorded step."""
        return self.history.last()

    def record(self, model: nn.Module | None = None, step: int | None = None) -> bool:
        """Evaluate and record the current loss of every example.

        Args:
            model: The model in training; not needed if the tracker has a `Task` of it.
            step: The number of this record, such as the epoch; by default, one more than the last. A step that is
                recorded already, for example before a restart, is not evaluated again.

        Returns:
            Whether the losses were evaluated.
        """
        step = (self.steps[-1] + 1 if self._found else 0) if step is None else step
        check_counts(0, step=step)
        if int(step) in self._found:
            return False
        task = self._task_of(model)
        with _random_states(), task.session():
            losses = losses_of(task, self.data).float()
        if self.path is not None:
            _append(self.path, int(step), losses)
        self._found[int(step)] = losses
        return True

    def save(self, path: str | Path) -> None:
        """Write the record to a new directory, for `LossHistory.load` or for another `LossTracker` to continue."""
        history = self.history
        files = {_name(step): {"losses": row} for step, row in zip(history.steps, history.values, strict=True)}
        write_directory(Path(path), self._manifest(), files)

    def _task_of(self, model: nn.Module | None) -> Task:
        bare = None if model is None else _unwrapped(model)
        if isinstance(self._task, Task):
            if bare is not None and bare is not self._task.model:
                raise InputError(
                    "record got a different model than the tracker's task. Pass that model, or create the "
                    "LossTracker with a function that makes a task of a model, such as eigentrace.classification."
                )
            return self._task
        if bare is None:
            raise InputError(
                "record needs the model, because this tracker was created with a function that makes a task of it: "
                "call record(model)."
            )
        task = self._task(bare)
        if not isinstance(task, Task):
            raise InputError(f"The tracker's function must return a Task of the model, got {type(task).__name__}.")
        return task

    def _manifest(self) -> dict[str, Any]:
        return {
            "kind": _KIND,
            "format": 1,
            "versions": {"eigentrace": __version__, "torch": torch.__version__},
            "num_examples": len(self.data),
            "first_examples": _first_examples(self.data),
        }

    def _open(self, path: Path) -> None:
        expected = self._manifest()
        if not path.exists():
            try:
                write_directory(path, expected, {})
            except (InputError, StorageError):
                if not path.exists():  # else another process of the same training run created it first
                    raise
        manifest = read_manifest(path, _KIND)
        for key in ("num_examples", "first_examples"):
            if manifest.get(key) != expected[key]:
                raise MismatchError(
                    f"The record at {path} was created with other data ({key} differs: {manifest.get(key)} there, "
                    f"{expected[key]} here). Pass the same examples in the same order, or use another path."
                )
        self._found = _read_steps(path, len(self.data))


def loss_callback(tracker: LossTracker, every: int | None = None) -> Any:
    """Create a callback for the Hugging Face `Trainer` that records losses at the end of every epoch.

    Needs the extra `[hf]`. With several processes only the first one records; it must hold the whole model.

    Args:
        tracker: Records the losses; steps are the Trainer's, so that resuming a run records none twice.
        every: Record every `every` steps instead of every epoch.
    """
    from transformers import TrainerCallback

    if every is not None:
        check_counts(1, every=every)

    class RecordLosses(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **found: Any) -> None:
            if not state.global_step and tracker.steps and state.is_world_process_zero:
                _warn_of_earlier(tracker)

        def on_epoch_end(self, args: Any, state: Any, control: Any, **found: Any) -> None:
            if every is None and state.is_world_process_zero:
                tracker.record(found["model"], state.global_step)

        def on_step_end(self, args: Any, state: Any, control: Any, **found: Any) -> None:
            if every is not None and state.global_step % every == 0 and state.is_world_process_zero:
                tracker.record(found["model"], state.global_step)

    return RecordLosses()


def _warn_of_earlier(tracker: LossTracker) -> None:
    where = "The tracker" if tracker.path is None else f"The record at {tracker.path}"
    warnings.warn(
        f"{where} has losses of {len(tracker.steps)} steps up to {tracker.steps[-1]} already, but training starts at "
        "step 0: recorded steps keep their losses and are not evaluated again. If they belong to another training run, "
        "give LossTracker a new path.",
        EigentraceWarning,
        stacklevel=2,
    )


def _history(found: dict[int, Tensor]) -> LossHistory:
    steps = sorted(found)
    return LossHistory(torch.stack([found[step] for step in steps]), tuple(steps))


def _extent(steps: tuple[int, ...]) -> str:
    return counted(len(steps), "step") + (f" ({steps[0]} to {steps[-1]})" if len(steps) > 1 else "")


def _name(step: int) -> str:
    return f"step-{step:012d}.safetensors"


def _append(path: Path, step: int, losses: Tensor) -> None:
    """Add a step to a record: write the file to a temporary folder, then move it into the record."""
    staging = path / f".step-{step:012d}"
    if staging.exists():  # left by a process that was killed while writing
        for file in staging.iterdir():
            file.unlink()
        staging.rmdir()
    write_directory(staging, {}, {_name(step): {"losses": losses}})
    (staging / _name(step)).replace(path / _name(step))
    for file in staging.iterdir():
        file.unlink()
    staging.rmdir()


def _read_steps(path: Path, num_examples: int) -> dict[int, Tensor]:
    found = {}
    for file in sorted(path.glob("step-*.safetensors")):
        losses = read_tensors(file).get("losses")
        if losses is None or losses.shape != (num_examples,):
            shape = None if losses is None else tuple(losses.shape)
            raise MismatchError(
                f"{file} contains losses of shape {shape}, expected ({num_examples},). Remove the file to record this "
                "step again."
            )
        found[int(file.stem.removeprefix("step-"))] = losses
    return found


def _first_examples(data: Data) -> str:
    tensors = tensors_of(data.first(_LOOKED_AT).values)
    return hash_arrays((f"{tuple(tensor.shape)} {tensor.dtype};", tensor) for tensor in tensors)[:32]


def _unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside the wrappers of DistributedDataParallel, DataParallel and torch.compile."""
    while isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        model = model.module
    return getattr(model, "_orig_mod", model)


@contextmanager
def _random_states() -> Iterator[None]:
    """Restore the random states of Python, numpy and torch at the end: loading data may draw from any of them."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
