"""Ordinary gradients of a batch, and trying several ways of differentiating in order of preference."""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor

from eigentrace.errors import UnsupportedError
from eigentrace.task.task import Task, Values

T = TypeVar("T")


LACKING = (RuntimeError, NotImplementedError, AssertionError)
"""What a missing derivative or batching rule may raise: torch asserts inside its transforms."""


def first_supported(candidates: Iterable[T], attempt: Callable[[T], Any], name: Callable[[T], str], what: str) -> T:
    """Return the first candidate whose attempt does not fail for lack of a derivative or batching rule.

    Running out of memory is no lack of support, and mistakes in the input have errors of their own: both pass through.

    Args:
        candidates: The ways, best first.
        attempt: Does a little of the work one way.
        name: What a way is called in the message.
        what: The message's beginning and remedy, around "{}" for the reasons of each way.
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
    """Differentiate the summed loss of a batch by an ordinary backward pass, which every trainable model supports."""
    with torch.enable_grad():
        leaves = leaves_of(values)
        return backward(task.losses(leaves, batch).sum(), leaves)


def leaves_of(values: Values) -> dict[str, Tensor]:
    """Return values as leaves of a new graph."""
    return {name: value.detach().requires_grad_() for name, value in values.items()}


def backward(of: Tensor, leaves: Values, **options: Any) -> dict[str, Tensor]:
    """Differentiate in the leaves by reverse mode; zeros where nothing depends on them."""
    if not of.requires_grad:
        return {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
    found = torch.autograd.grad(of, list(leaves.values()), materialize_grads=True, **options)
    return dict(zip(leaves, found, strict=True))
