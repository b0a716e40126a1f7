"""Reverse-mode gradients of a batch, and selection of the first way to differentiate that works."""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor

from eigentrace.errors import UnsupportedError
from eigentrace.task.task import Task, Values

T = TypeVar("T")


LACKING = (RuntimeError, NotImplementedError, AssertionError)
"""Exceptions that torch raises for a missing derivative or batching rule; its transforms use assertions."""


def first_supported(candidates: Iterable[T], attempt: Callable[[T], Any], name: Callable[[T], str], what: str) -> T:
    """Return the first candidate whose attempt does not fail for lack of a derivative or batching rule.

    Other exceptions, such as out-of-memory errors and errors in the input, are not caught.

    Args:
        candidates: Ways to differentiate, best first.
        attempt: Runs a small part of the work with a candidate.
        name: Returns the name of a candidate for the message.
        what: The error message, in which "{}" is replaced by the reason of each candidate.
    """
    failures = []
    for candidate in candidates:
        try:
            attempt(candidate)
        except torch.OutOfMemoryError:
            raise
        except LACKING as error:
            failures.append(f"{name(candidate)}: {error}")
        else:
            return candidate
    raise UnsupportedError(what.replace("{}", " | ".join(failures)))


def gradient(task: Task, values: Values, batch: Any) -> dict[str, Tensor]:
    """Return the gradient of the summed loss of a batch, by an ordinary backward pass."""
    with torch.enable_grad():
        leaves = leaves_of(values)
        return backward(task.losses(leaves, batch).sum(), leaves)


def leaves_of(values: Values) -> dict[str, Tensor]:
    """Return values as leaves of a new autograd graph."""
    return {name: value.detach().requires_grad_() for name, value in values.items()}


def backward(of: Tensor, leaves: Values, **options: Any) -> dict[str, Tensor]:
    """Differentiate `of` with respect to the leaves in reverse mode; zeros for leaves it does not depend on."""
    if not of.requires_grad:
        return {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
    found = torch.autograd.grad(of, list(leaves.values()), materialize_grads=True, **options)
    return dict(zip(leaves, found, strict=True))
