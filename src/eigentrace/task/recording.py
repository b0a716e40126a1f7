"""Record the learning rate of every step of a training, from which the damping of a solve follows."""

import warnings
from typing import Any

import torch
from torch import nn

from eigentrace.errors import EigentraceWarning, InputError, MismatchError
from eigentrace.settings import counted
from eigentrace.task.rate_sums import CALLBACK, TRAINER_STATE, RateSums, recorded_in
from eigentrace.task.training_record import Training, check_optimizer, read_training

_ALL_STEPS = (
    "Create the record before the first step, and when a training is resumed load the record as well "
    "(load_state_dict). Without it, pass all rates: eigentrace.Training.from_optimizer(optimizer, model, lrs)."
)


class TrainingRecord:
    """A recorder of the learning rates of every step of an optimizer, for any training loop.

    Create it before the first step. Rates are added up at each step that the optimizer takes, for each of its groups:
    schedules, warm-up, accumulation of gradients and steps that a GradScaler skips are taken into account, and so is a
    schedule of the momentum of SGD. Groups may be added later. Training is not changed.

    Args:
        optimizer: SGD, Adam, AdamW or Adafactor of torch, also if accelerate has wrapped it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = unwrapped(optimizer)
        check_optimizer(self._optimizer)
        self._sums = RateSums()
        # Its steps so far are not recorded, unless the record of them is loaded.
        self._is_late = bool(self._optimizer.state)
        self._handle = self._optimizer.register_step_post_hook(self._add)
        self._optimizer.register_load_state_dict_post_hook(self._note_loaded)

    def _note_loaded(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that the optimizer has taken steps elsewhere, unless the record of them was loaded before."""
        if optimizer.state and not self.steps:
            self._is_late = True

    def __repr__(self) -> str:
        sums = " or ".join(f"{value:.4g}" for value in sorted(set(self.lr_sums))[:3])
        return f"<TrainingRecord of {type(self._optimizer).__name__}: {counted(self.steps, 'step')}" + (
            f", lr_sum={sums}>" if sums else ">"
        )

    def __enter__(self) -> "TrainingRecord":
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    @property
    def steps(self) -> int:
        """The number of steps recorded so far."""
        return self._sums.steps

    @property
    def lr_sums(self) -> list[float]:
        """The sum of the learning rates of each group of the optimizer."""
        return [group.lr_sum for group in self._sums.groups]

    def remove(self) -> None:
        """End recording; what was recorded is kept."""
        self._handle.remove()

    def _resume(self) -> None:
        """Record again after `remove`."""
        self._handle.remove()
        self._handle = self._optimizer.register_step_post_hook(self._add)

    def _records(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether it is this optimizer whose steps are recorded."""
        return unwrapped(optimizer) is self._optimizer

    def training(self, model: nn.Module, *, loss_scale: float = 1.0) -> Training:
        """Return how the model was trained until now, for `training=` of a task.

        Args:
            model: The model that the optimizer trains, for the names of its parameters.
            loss_scale: See `Training`.
        """
        what = type(self._optimizer).__name__
        if not self.steps:
            raise InputError(
                f"No step of {what} has been recorded yet: create the record before training, and ask at its end."
            )
        if self._is_late:
            raise MismatchError(f"{what} had taken steps before they were recorded. {_ALL_STEPS}")
        self._sums.check_steps(self._optimizer.state, what, _ALL_STEPS)
        source = f"recorded at {counted(self.steps, 'step')}"
        return read_training(
            self._optimizer, model, lambda groups: self._sums.for_groups(groups, what), loss_scale, source
        )

    def state_dict(self) -> dict[str, Any]:
        """Return what was recorded, as numbers, to be saved with a checkpoint."""
        return self._sums.as_json()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with what `state_dict` returned, instead of what was recorded."""
        self._load(state, "The state", "Pass what TrainingRecord.state_dict() returned.")

    def _load(self, state: Any, where: str, remedy: str) -> None:
        """Load a state that was found somewhere, which an error names, with what to do."""
        sums = RateSums.from_json(state, where, remedy)
        sums.check_groups(self._optimizer.param_groups, type(self._optimizer).__name__, remedy)
        self._sums, self._is_late = sums, False

    def _add(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        # Fused optimizers are called by a GradScaler in any case, and skip the step themselves.
        overflow = getattr(optimizer, "found_inf", None)
        if overflow is None or not float(overflow):
            self._sums.add(optimizer.param_groups)


def unwrapped(optimizer: Any) -> Any:
    """Return the optimizer inside the wrapper of accelerate."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    return optimizer


class _Held:
    """What a callback records, shared with the copies that a Trainer makes of it."""

    def __init__(self) -> None:
        self.record: TrainingRecord | None = None
        self.trainer: Any = None

    def begin(self, optimizer: Any, state: Any) -> None:
        """Record from the beginning of a training, or go on with what its checkpoint or the same optimizer has."""
        self.trainer = state
        if not state.global_step:
            if self.record is not None and self.record._records(optimizer):
                self.record._resume()
            else:
                self._new(optimizer)
            return
        where = f"{TRAINER_STATE} of the checkpoint at step {state.global_step}"
        remedy = f"Restore the file, or remove {CALLBACK!r} from its stateful_callbacks to train without the record."
        try:
            found = recorded_in(vars(state))
        except (LookupError, TypeError, AttributeError) as error:
            raise MismatchError(f"{where} has a damaged record of learning rates ({error!r}). {remedy}") from None
        if found is None or found[1]:
            self._forget()
            warnings.warn(
                f"{where} has no record of the learning rates until there: none are recorded from there on. "
                "eigentrace.Training.from_checkpoint will interpolate the logged ones. For exact sums, give the "
                "callback to the Trainer from the first step.",
                EigentraceWarning,
                stacklevel=2,
            )
        else:
            self._new(optimizer)._load(found[0], where, remedy)

    def end(self) -> None:
        if self.record is not None:
            self.record.remove()

    def as_json(self) -> dict[str, Any] | None:
        if self.record is None:
            return None
        return {"global_step": self.trainer.global_step, "sums": self.record.state_dict()}

    def _new(self, optimizer: Any) -> TrainingRecord:
        self._forget()
        self.record = TrainingRecord(optimizer)
        return self.record

    def _forget(self) -> None:
        self.end()
        self.record = None


def training_callback() -> Any:
    """Create a callback for the Hugging Face `Trainer` that records the learning rate of every step.

    Needs the extra `[hf]`. The sums are saved in `trainer_state.json` of each checkpoint, where
    `Training.from_checkpoint` finds them, and with which a resumed training goes on. Its `record` is the
    `TrainingRecord`, from the beginning of the training.
    """
    from transformers import TrainerCallback
    from transformers.trainer_callback import ExportableState

    held = _Held()

    class EigentraceTraining(TrainerCallback, ExportableState):
        recorded: Any = None  # what the Trainer restores, if it is asked to; `held` has it from the state

        @property
        def record(self) -> TrainingRecord:
            if held.record is None:
                raise InputError(
                    "No learning rates are recorded: training has not begun, or was resumed from a checkpoint without "
                    "a record."
                )
            return held.record

        def on_train_begin(self, args: Any, state: Any, control: Any, **found: Any) -> None:
            held.begin(found["optimizer"], state)
            # The Trainer expects an entry when it saves, which a checkpoint without this callback does not have.
            state.stateful_callbacks[CALLBACK] = self.state()

        def on_train_end(self, args: Any, state: Any, control: Any, **found: Any) -> None:
            held.end()

        def state(self) -> dict[str, Any]:
            return {"args": {}, "attributes": {"recorded": held.as_json()}}

    return EigentraceTraining()
