"""Try the ways of doing a thing in order of preference, and take the first that the model supports."""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch

from eigentrace.errors import UnsupportedError

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
