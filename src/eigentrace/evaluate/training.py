"""The interface of trainers, which train models on subsets, and a trainer that calls the user's own function."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from eigentrace.errors import InputError
from eigentrace.evaluate.subsets import TrainingJob
from eigentrace.numeric.hashing import hash_arrays, hash_text


@runtime_checkable
class Trainer(Protocol):
    """The interface of trainers: trains models on subsets of one training set and measures the same queries with each.

    A model's training examples and seed come as a `TrainingJob`.
    """

    higher_is_worse: bool
    """Whether outputs are losses, which proponents lower, or scores such as margins, which they raise."""

    @property
    def at_once(self) -> int:
        """Number of models that `outputs` should get in one call."""
        ...

    def check(self, num_train: int) -> None:
        """Raise InputError unless the trainer's training set has this size."""
        ...

    def recipe(self) -> dict[str, Any] | None:
        """Describe everything that outputs depend on besides rows and seed, as JSON; None without a description."""
        ...

    def outputs(self, jobs: Sequence[TrainingJob]) -> Tensor:  # (jobs, Q)
        """Train one model per job, and measure each query with it."""
        ...


class Loop:
    """A trainer that calls a function of the user's, for one model after the other.

    Args:
        train: `train(rows, seed)` trains on these rows (an ascending array of integers) and returns one number per
            query, or a model for `measure`. All randomness should come from the seed.
        measure: `measure(model)` returns one number per query; not needed if `train` returns these.
        recipe: A description of the data, the model and the training settings, in text, numbers and tensors (which are
            hashed). Required for a cache, which is only reused with an equal recipe.
        higher_is_worse: Whether a query's number is a loss (the default), or a score that rises as the model gets
            better.
    """

    at_once = 1

    def __init__(
        self,
        train: Callable[[np.ndarray, int], Any],
        measure: Callable[[Any], Any] | None = None,
        *,
        recipe: Any = None,
        higher_is_worse: bool = True,
    ) -> None:
        for name, function in {"train": train, "measure": measure or train}.items():
            if not callable(function):
                raise InputError(f"{name} must be a function, got {type(function).__name__}.")
        self.train, self.measure, self.higher_is_worse = train, measure, higher_is_worse
        self._recipe = recipe

    def __repr__(self) -> str:
        return f"<Loop over {getattr(self.train, '__name__', type(self.train).__name__)}>"

    def check(self, num_train: int) -> None:
        """Accept any size, because only the function has the data."""

    def recipe(self) -> dict[str, Any] | None:
        """Return the recipe that was passed, as JSON; None if there is none."""
        return None if self._recipe is None else {"trainer": "Loop", "recipe": recipe_as_json(self._recipe)}

    def outputs(self, jobs: Sequence[TrainingJob]) -> Tensor:  # (jobs, Q)
        """Train one model per job, and measure each query with it."""
        return torch.stack([self._one(job) for job in jobs])

    def _one(self, job: TrainingJob) -> Tensor:  # (Q,)
        found = self.train(job.rows.copy(), job.seed)
        if self.measure is not None:
            found = self.measure(found)
        if isinstance(found, nn.Module):
            raise InputError(
                f"`train` returned a model ({type(found).__name__}), expected one number per query: pass "
                "Loop(train, measure=...) a function that measures the queries with a model."
            )
        try:
            values = torch.as_tensor(found).detach().to("cpu", torch.float64)
        except (TypeError, ValueError, RuntimeError):
            raise InputError(
                f"Training must return one number per query, got {type(found).__name__}: return a tensor or an array."
            ) from None
        if values.ndim != 1 or not len(values):
            raise InputError(f"Training must return one number per query, shape (Q,), got shape {tuple(values.shape)}.")
        return values


def as_trainer(trainer: Any) -> Trainer:
    """Return a trainer as it is, and wrap a plain training function in `Loop`."""
    if isinstance(trainer, Trainer):
        return trainer
    if isinstance(trainer, type) or not callable(trainer):
        raise InputError(
            f"Expected a trainer, got {trainer!r}: pass Loop(train), ManyModels(...), or a function of rows and seed."
        )
    return Loop(trainer)


def recipe_as_json(value: Any) -> Any:
    """Convert part of a recipe to JSON: tensors to their hash, functions to their name and the hash of their source."""
    if isinstance(value, Tensor | np.ndarray):
        return tensor_hash(value)
    if isinstance(value, Mapping):
        return {str(key): recipe_as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [recipe_as_json(item) for item in value]
    if isinstance(value, np.generic):
        return value.item()
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, type) or callable(value):
        return _source_of(value)
    raise InputError(
        f"A recipe may contain text, numbers, tensors, functions, and lists and dicts of these, got "
        f"{type(value).__name__}: convert it to one of these."
    )


def tensor_hash(*tensors: Tensor | np.ndarray) -> str:
    """Hash the dtypes, shapes and values of tensors."""
    found = [torch.as_tensor(tensor) for tensor in tensors]
    return f"sha256:{hash_arrays((f'{tensor.dtype} {tuple(tensor.shape)};', tensor) for tensor in found)}"


def _source_of(function: Any) -> str:
    name = f"{function.__module__}.{getattr(function, '__qualname__', type(function).__qualname__)}"
    if name.startswith("torch."):  # identified by name, whatever the release
        return name
    try:
        source = inspect.getsource(function)
    except (OSError, TypeError):
        return name
    return f"{name} sha256:{hash_text(source)[:16]}"
