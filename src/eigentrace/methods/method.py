"""What all methods share: the contract, and how a fit begins."""

from typing import Any, Protocol

from eigentrace.data import Data, as_data
from eigentrace.errors import InputError
from eigentrace.fits.fitted import Fitted
from eigentrace.projection import note_coverage
from eigentrace.settings import check_counts
from eigentrace.task.checks import check_task
from eigentrace.task.task import Task


class Method(Protocol):
    """Settings that know how to fit. Fitting changes neither the method, nor the task, nor the model."""

    def fit(self, task: Task, data: Any, *, num_train: int | None = None) -> Fitted:
        """Prepare scoring for a task.

        Args:
            task: The model and its loss.
            data: Training examples: `Data`, a dataset, a `DataLoader` without shuffling, or a list of batches.
            num_train: N, the size of the training set, if `data` is only part of it. Scores in nats divide by it.
        """
        ...


def ready(task: Task, data: Any, num_train: int | None) -> tuple[Task, Data, int]:
    """Check the task on the data; return it pinned to its weights, the data, and N, the size of the training set."""
    if not isinstance(task, Task):
        raise InputError(
            f"fit takes a Task first, got {type(task).__name__}. Make one: eigentrace.classification(model), or "
            "eigentrace.Task(model, loss)."
        )
    data = as_data(data)
    if num_train is not None:
        check_counts(1, num_train=num_train)
    with task.session():
        found = check_task(task, data)
        note_coverage(task, data)
    return task.pinned(found), data, len(data) if num_train is None else int(num_train)
