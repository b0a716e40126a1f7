"""Losses of every example collected while training: what was learned late, for the price of an evaluation pass each."""

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
from eigentrace.settings import check_counts
from eigentrace.task.task import Task
from eigentrace.version import __version__

TaskOf = Task | Callable[[nn.Module], Task]
_KIND = "losses"
# Examples whose numbers tell whether a record on disk belongs to the data at hand.
_LOOKED_AT = 8


@dataclass(frozen=True)
class LossHistory:
    """Losses of all examples at several steps of a training."""

    values: Tensor  # (C, N) float32, in the order of the steps
    steps: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.values.ndim != 2 or len(self.values) != len(self.steps) or not self.steps:
            raise InputError(
                f"A history has one row of losses per step and at least one step, got values of shape "
                f"{tuple(self.values.shape)} for {len(self.steps)} steps. Record at least once."
            )

    def mean(self) -> Tensor:  # (N,)
        """Average over the steps: high for examples that were learned late, or never."""
        return self.values.double().mean(dim=0).to(self.values.dtype)

    def last(self) -> Tensor:  # (N,)
        """Return the losses at the last step."""
        return self.values[-1]

    @staticmethod
    def load(path: str | Path) -> "LossHistory":
        """Read what a `LossTracker` wrote."""
        path = Path(path)
        manifest = read_manifest(path, _KIND)
        found = _read_steps(path, manifest["num_examples"])
        if not found:
            raise InputError(f"{path} holds no recorded step yet: record at least once.")
        return _history(found)


class LossTracker:
    """Collects every example's loss while a model trains, in any loop.

    Args:
        task: The task, or what makes one of the model in training: `eigentrace.classification`, or
            `lambda model: eigentrace.Task(model, my_loss)`.
        data: The training examples in a fixed order, without random augmentation.
        path: A directory to keep the record in. If it exists already the record goes on where it stopped.

    Evaluating leaves the model as found: its mode, buffers and gradients, and all random states. Call `record` once
    per epoch, or oftener early on, when examples still differ.
    """

    def __init__(self, task: TaskOf, data: Any, path: str | Path | None = None) -> None:
        if not isinstance(task, Task) and not callable(task):
            raise InputError(f"task must be a Task or a function that makes one of a model, got {task!r}.")
        self.data: Data = as_data(data)
        self.path = None if path is None else Path(path)
        self._task = task
        self._found: dict[int, Tensor] = {}
        if self.path is not None:
            with _random_states():
                self._open(self.path)

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps recorded so far, ascending."""
        return tuple(sorted(self._found))

    @property
    def history(self) -> LossHistory:
        """Everything recorded so far."""
        if not self._found:
            raise InputError("Nothing has been recorded yet: call record(model) after an epoch.")
        return _history(self._found)

    @property
    def values(self) -> Tensor:  # (C, N)
        """The losses, one row per recorded step."""
        return self.history.values

    def mean(self) -> Tensor:  # (N,)
        """Average over the recorded steps: high for examples that were learned late, or never."""
        return self.history.mean()

    def last(self) -> Tensor:  # (N,)
        """Return the losses at the last recorded step."""
        return self.history.last()

    def record(self, model: nn.Module | None = None, step: int | None = None) -> bool:
        """Evaluate the loss of every example now.

        Args:
            model: The model in training; may be left out if the tracker was given a `Task`.
            step: What this moment is called, such as the epoch; counted on from the last one if not given. A step
                that is on record, from before a restart say, is not evaluated again.

        Returns:
            Whether anything was evaluated.
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
        """Write the record to a new directory, to be read by `LossHistory.load` or recorded on with `LossTracker`."""
        history = self.history
        files = {_name(step): {"losses": row} for step, row in zip(history.steps, history.values, strict=True)}
        write_directory(Path(path), self._manifest(), files)

    def _task_of(self, model: nn.Module | None) -> Task:
        bare = None if model is None else _unwrapped(model)
        if isinstance(self._task, Task):
            if bare is not None and bare is not self._task.model:
                raise InputError(
                    "record got another model than the one of the tracker's task. Give LossTracker a function that "
                    "makes a task of the model, such as eigentrace.classification."
                )
            return self._task
        if bare is None:
            raise InputError("record needs the model: this tracker was given a function that makes a task of one.")
        task = self._task(bare)
        if not isinstance(task, Task):
            raise InputError(f"The tracker's function must make a Task of the model, got {type(task).__name__}.")
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
                if not path.exists():  # else another process of the same training was quicker
                    raise
        manifest = read_manifest(path, _KIND)
        for key in ("num_examples", "first_examples"):
            if manifest.get(key) != expected[key]:
                raise MismatchError(
                    f"The record at {path} was made of other data ({key} differs: {manifest.get(key)} there, "
                    f"{expected[key]} here). Give the same examples in the same order, or another path."
                )
        self._found = _read_steps(path, len(self.data))


def loss_callback(tracker: LossTracker, every: int | None = None) -> Any:
    """Make a callback for the Hugging Face `Trainer` that records at the end of every epoch.

    Needs the extra `[hf]`. With several processes only the first records; the model must be whole there.

    Args:
        tracker: Collects; steps are the Trainer's, so that a run that was resumed counts none twice.
        every: Record every so many steps instead of every epoch.
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
        f"{where} holds losses of {len(tracker.steps)} steps up to {tracker.steps[-1]} already, and a training begins "
        "at step 0: steps on record keep their losses and are not evaluated again. If they are of another training, "
        "give LossTracker a new path.",
        EigentraceWarning,
        stacklevel=2,
    )


def _history(found: dict[int, Tensor]) -> LossHistory:
    steps = sorted(found)
    return LossHistory(torch.stack([found[step] for step in steps]), tuple(steps))


def _name(step: int) -> str:
    return f"step-{step:012d}.safetensors"


def _append(path: Path, step: int, losses: Tensor) -> None:
    """Add a step to a record: first a folder under another name, of which only whole files are moved over."""
    staging = path / f".step-{step:012d}"
    if staging.exists():  # a run that was killed while writing
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
            raise MismatchError(f"{file} holds losses of shape {shape}, expected ({num_examples},). Remove it.")
        found[int(file.stem.removeprefix("step-"))] = losses
    return found


def _first_examples(data: Data) -> str:
    tensors = tensors_of(data.first(_LOOKED_AT).values)
    return hash_arrays((f"{tuple(tensor.shape)} {tensor.dtype};", tensor) for tensor in tensors)[:32]


def _unwrapped(model: nn.Module) -> nn.Module:
    """Return the model under what training tools put around it."""
    while isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        model = model.module
    return getattr(model, "_orig_mod", model)


@contextmanager
def _random_states() -> Iterator[None]:
    """Put Python's, numpy's and torch's random states back: reading data may draw from any of them."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
