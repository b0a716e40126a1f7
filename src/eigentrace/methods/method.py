"""What all methods share: the contract, and the record of their settings."""

import dataclasses
from typing import Any, Protocol

from eigentrace.data import Data, as_data
from eigentrace.errors import InputError
from eigentrace.fitted import Fitted
from eigentrace.probe import check_task
from eigentrace.task import Task


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


def settings_of(method: Any) -> dict[str, Any]:
    """Return a method's name and settings in a form that JSON can hold."""
    if not dataclasses.is_dataclass(method):
        return {"name": type(method).__name__}
    values = {field.name: _plain(getattr(method, field.name)) for field in dataclasses.fields(method)}
    return {"name": type(method).__name__} | values


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return settings_of(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, str | int | float | None) else str(type(value).__name__)


def ready(task: Task, data: Any) -> Data:
    """Accept data and check the task on it, inside a session."""
    if not isinstance(task, Task):
        raise InputError(
            f"fit takes a Task first, got {type(task).__name__}. Make one: eigentrace.classification(model), or "
            "eigentrace.Task(model, loss)."
        )
    data = as_data(data)
    with task.session():
        check_task(task, data)
    return data


def at_least(minimum: float, **settings: float) -> None:
    """Refuse settings below a minimum, by name."""
    for name, value in settings.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not value >= minimum:
            raise InputError(f"{name} must be a number of at least {minimum}, got {value!r}.")
