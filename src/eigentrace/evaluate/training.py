"""What trains models on parts of the data: the contract, and a plain loop around anybody's training function."""

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
    """Trains models on parts of one training set, and measures the same queries with each."""

    higher_is_worse: bool
    """Whether outputs are losses, which proponents keep low, or scores such as margins, which they keep high."""

    @property
    def at_once(self) -> int:
        """How many models it likes to be given together."""
        ...

    def check(self, num_train: int) -> None:
        """Refuse a training set of another size."""
        ...

    def recipe(self) -> dict[str, Any] | None:
        """Describe everything that outputs depend on, apart from rows and seed, as JSON; None if it cannot tell."""
        ...

    def outputs(self, jobs: Sequence[TrainingJob]) -> Tensor:  # (jobs, Q)
        """Train one model per job, and measure each query with it."""
        ...


class Loop:
    """Train by a function of one's own, one model after the other.

    Args:
        train: `train(rows, seed)` trains on these rows (an ascending array of integers) and returns one number per
            query, or a model that `measure` takes. All of its randomness should come from the seed.
        measure: `measure(model)`, one number per query; not needed if `train` returns these.
        recipe: What the function does, in words and numbers (tensors are hashed): a cache is refused to another recipe,
            and nothing but this tells them apart. Required with a cache.
        higher_is_worse: Whether a query's number is a loss (the default) or rises as the model gets better.
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

    def check(self, num_train: int) -> None:
        """Take any size: the function knows its data."""

    def recipe(self) -> dict[str, Any] | None:
        """Describe the training as the caller did, if they did."""
        return None if self._recipe is None else {"trainer": "Loop", "recipe": recipe_as_json(self._recipe)}

    def outputs(self, jobs: Sequence[TrainingJob]) -> Tensor:  # (jobs, Q)
        """Train one model per job, and measure each query with it."""
        return torch.stack([self._one(job) for job in jobs])

    def _one(self, job: TrainingJob) -> Tensor:  # (Q,)
        found = self.train(job.rows.copy(), job.seed)
        if self.measure is not None:
            found = self.measure(found)
        if isinstance(found, nn.Module):
            raise InputError("`train` returned a model: give Loop(train, measure=...) that asks it about the queries.")
        try:
            values = torch.as_tensor(found).detach().to("cpu", torch.float64)
        except (TypeError, ValueError, RuntimeError):
            raise InputError(
                f"Training must yield one number per query, got {type(found).__name__}: return a tensor or an array."
            ) from None
        if values.ndim != 1 or not len(values):
            raise InputError(f"Training must yield one number per query, shape (Q,), got shape {tuple(values.shape)}.")
        return values


def as_trainer(trainer: Any) -> Trainer:
    """Accept a trainer, or a plain training function."""
    if isinstance(trainer, Trainer):
        return trainer
    if isinstance(trainer, type) or not callable(trainer):
        raise InputError(
            f"Expected a trainer, got {trainer!r}: give Loop(train), ManyModels(...) or a function of rows and seed."
        )
    return Loop(trainer)


def recipe_as_json(value: Any) -> Any:
    """Turn part of a recipe into JSON: tensors by their hash, functions by name and source."""
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
        f"A recipe holds words, numbers, tensors, functions, and lists and dicts of these, got {type(value).__name__}."
    )


def tensor_hash(*tensors: Tensor | np.ndarray) -> str:
    """Hash types, shapes and numbers."""
    found = [torch.as_tensor(tensor) for tensor in tensors]
    return f"sha256:{hash_arrays((f'{tensor.dtype} {tuple(tensor.shape)};', tensor) for tensor in found)}"


def _source_of(function: Any) -> str:
    name = f"{function.__module__}.{getattr(function, '__qualname__', type(function).__qualname__)}"
    if name.startswith("torch."):  # the same by whatever release it comes from
        return name
    try:
        source = inspect.getsource(function)
    except (OSError, TypeError):
        return name
    return f"{name} sha256:{hash_text(source)[:16]}"
