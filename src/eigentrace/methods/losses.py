"""The mean loss over a training: examples that are learned late, or never, score high."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from eigentrace.checkpoints import Source, find_checkpoints
from eigentrace.methods.method import ready
from eigentrace.progress import track
from eigentrace.settings import settings_of
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
