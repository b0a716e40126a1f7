"""Losses that see memorised noise: averaged over the training, or over random changes of the inputs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from eigentrace.augmented import FLIPS_AND_SHIFTS, Augment, AugmentedFit
from eigentrace.checkpoints import Source, find_checkpoints
from eigentrace.errors import InputError
from eigentrace.methods.method import ready
from eigentrace.progress import track
from eigentrace.settings import check_counts, settings_of
from eigentrace.solved import LossFit
from eigentrace.task import Task


@dataclass(frozen=True)
class MeanLoss:
    """The loss of each example, averaged over checkpoints of the training: high for what was learned late.

    The final loss is blind to noise that was memorised; the mean over the way there is not. It is the early checkpoints
    that tell: some must be from before the last examples were fitted. `eigentrace.LossTracker` collects the same
    number while training, without keeping checkpoints.
    """

    checkpoints: Source | Sequence[Source]
    """State dicts, files, Hugging Face or Lightning folders."""

    def fit(self, task: Task, data: Any, *, num_train: int | None = None) -> LossFit:
        """Check every checkpoint against the model; see `Method.fit` for the arguments."""
        task, data, size = ready(task, data, num_train)
        states = find_checkpoints(self.checkpoints)
        for state in track(states, "Checking checkpoints", len(states)):
            task.canonical(state.load())
        return LossFit(task, settings_of(self), size, states)


@dataclass(frozen=True)
class AugmentedLoss:
    """The loss of each example, averaged over random changes of its inputs: high for what was memorised.

    A network that has fitted everything still tells the examples it understands from those it knows by heart: the
    latter do not survive a shift by some pixels. For networks that were trained without such changes; with them, the
    final loss is as good.
    """

    augment: Augment = FLIPS_AND_SHIFTS
    """`augment(batch, rows, seed)` returns a changed batch; images are mirrored and shifted if not given."""
    draws: int = 16
    """Changes of each example to average over: one pass over the data for each."""
    seed: int = 0
    """Fixes the changes."""

    def __post_init__(self) -> None:
        check_counts(1, draws=self.draws)
        check_counts(0, seed=self.seed)
        if not callable(self.augment):
            raise InputError(f"augment must be a function of batch, rows and seed, got {type(self.augment).__name__}.")

    def fit(self, task: Task, data: Any, *, num_train: int | None = None) -> LossFit:
        """Check the task, and that a batch can be changed; see `Method.fit` for the arguments."""
        task, data, size = ready(task, data, num_train)
        first = data.first(8)
        self.augment(task.place(first.values), first.rows, int(self.seed))
        options = {"augment": self.augment, "draws": int(self.draws), "seed": int(self.seed)}
        return AugmentedFit(task, settings_of(self), size, **options)  # type: ignore[arg-type]
