"""What every projection engine takes and gives."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from eigentrace.errors import UnsupportedError
from eigentrace.rows import Rows
from eigentrace.task import Task, Values

PerExample = Callable[[Values, Any], Tensor]

# Memory for per-example gradients (or tangents) at a time: small enough for a laptop, and on a GPU a share of
# what is free, since the model's activations need the rest.
_CPU_BUDGET = 512 * 2**20
_GPU_SHARE = 0.2


@dataclass(frozen=True)
class Projection:
    """One batch, projected."""

    features: Tensor  # (B, K)
    square_norms: Tensor | None  # (B,) ‖g(x)‖², where asked for
    losses: Tensor  # (B,) the function that was differentiated

    def squares(self) -> Tensor:  # (B,)
        """Return the squared norms of a job that asked for them."""
        if self.square_norms is None:
            raise UnsupportedError("This projection carries no gradient norms: ask for them with Job(norms=True).")
        return self.square_norms


@dataclass(frozen=True)
class Job:
    """What to project: the gradient of a per-example function, on rows, with or without its norm."""

    task: Task
    function: PerExample
    rows: Rows
    norms: bool = False


class Engine(Protocol):
    """Does a job for one placed batch of `size` examples."""

    def __call__(self, job: Job, batch: Any, size: int) -> Projection:
        """Project every example of the batch."""
        ...


def memory_budget(device: torch.device) -> int:
    """Bytes an engine may spend beyond the model's own pass."""
    if device.type == "cuda":
        return int(_GPU_SHARE * torch.cuda.mem_get_info(device)[0])
    return _CPU_BUDGET


def examples_at_once(task: Task) -> int:
    """How many full per-example gradients fit the budget, with room for the copy that differentiating makes."""
    bytes_each = 2 * task.layout.numel * task.layout.dtype.itemsize
    return max(1, memory_budget(task.layout.device) // bytes_each)
