"""The interface of methods, and the checks at the start of every fit."""

from typing import Any, Protocol

from eigentrace.data import Data, as_data
from eigentrace.errors import InputError
from eigentrace.fits.fitted import Fitted
from eigentrace.projection import note_coverage
from eigentrace.settings import check_counts
from eigentrace.task.checks import check_task
from eigentrace.task.task import Task


class Method(Protocol):
    """Settings with a `fit`, which changes neither the method, nor the task, nor the model."""

    def fit(self, task: Task, data: Any, *, num_train: int | None = None) -> Fitted:
        """Fit the method to a task and its training data, and return an object that scores examples.

        Args:
            task: The model and its loss.
            data: Training examples: `Data`, a dataset, a `DataLoader` without shuffling, or a list of batches.
            num_train: N, the size of the training set, if `data` is only part of it. Scores in nats are divided by N.
        """
        ...


def ready(task: Task, data: Any, num_train: int | None) -> tuple[Task, Data, int]:
    """Check the task on the data; return the task with the weights it was checked with, the data as `Data`, and N."""
    if not isinstance(task, Task):
        raise InputError(
            f"The first argument of fit must be a Task, got {type(task).__name__}. Create one with "
            "eigentrace.classification(model) or eigentrace.Task(model, loss)."
        )
    data = as_data(data)
    if num_train is not None:
        check_counts(1, num_train=num_train)
    with task.session():
        found = check_task(task, data)
        note_coverage(task, data)
    return task.pinned(found), data, len(data) if num_train is None else int(num_train)
