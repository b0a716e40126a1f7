"""Repeatable training: the same numbers to the bit on one kind of device."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def repeatable(*, warn_only: bool = False) -> Iterator[None]:
    """Use deterministic algorithms inside the context.

    Args:
        warn_only: Warn about operations without a deterministic algorithm, instead of raising an error.
    """
    # PyTorch requires it for deterministic matrix products on a GPU.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    settings: Any = torch.utils.deterministic
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        settings.fill_uninitialized_memory,
    )
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    # Filling uninitialised memory is not needed here, and takes time.
    settings.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        settings.fill_uninitialized_memory = before[2]
