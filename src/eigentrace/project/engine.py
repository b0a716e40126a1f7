"""What every projection engine takes and gives."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from eigentrace.compute import Compute
from eigentrace.errors import UnsupportedError
from eigentrace.forms import Form
from eigentrace.rows import Rows, none
from eigentrace.task import Task, Values

PerExample = Callable[[Values, Any], Tensor]


class Gather(Protocol):
    """Takes the gradients of every parameter that has a layer rule, as forms, while one pass goes back."""

    def receive(self, name: str, form: Form) -> None:
        """Take one use's gradients of a parameter."""
        ...

    def finish(self) -> None:
        """Take note that the pass is over."""
        ...


# Made for every pass, from how often each parameter sends a gradient and which ones have no rule.
MakeGather = Callable[[Mapping[str, int], Mapping[str, str]], Gather]


@dataclass(frozen=True)
class Projection:
    """One batch, projected."""

    features: Tensor  # (B, K)
    square_norms: Tensor | None  # (B,) ‖g(x)‖², where asked for
    losses: Tensor  # (B,) the function that was differentiated
    read: frozenset[str] = frozenset()
    """Functions by which the model read numbers of the batch into Python, where that is known."""
    gathered: tuple[Gather, ...] = ()
    """What the passes of a job with `gather` took, if the layerwise engine did them."""
    is_whole: bool = False
    """Whether the batch went through the model as it came, and nothing of it was taken apart."""

    def squares(self) -> Tensor:  # (B,)
        """Return the squared norms of a job that asked for them."""
        if self.square_norms is None:
            raise UnsupportedError("This projection carries no gradient norms: ask for them with Job(norms=True).")
        return self.square_norms


def joined(parts: list[Projection]) -> Projection:
    """Put the projections of consecutive parts of a batch together."""
    if len(parts) == 1:
        return parts[0]
    squares = [part.square_norms for part in parts]
    return Projection(
        torch.cat([part.features for part in parts]),
        None if squares[0] is None else torch.cat(squares),  # type: ignore[arg-type]
        torch.cat([part.losses for part in parts]),
        gathered=tuple(gather for part in parts for gather in part.gathered),
    )


@dataclass(frozen=True)
class Job:
    """What to project: the gradient of a per-example function, on rows, with or without its norm."""

    task: Task
    function: PerExample
    rows: Rows
    norms: bool = False
    compute: Compute = field(default_factory=Compute)
    gather: MakeGather | None = None
    name: Literal["loss", "measurement"] = "loss"
    """What messages call the function."""

    @staticmethod
    def of(
        task: Task,
        what: Literal["losses", "measurements"],
        rows: Rows | None = None,
        norms: bool = False,
        compute: Compute | None = None,
    ) -> "Job":
        """Make a job whose model runs in the precision asked for; without rows, gradients are all there is to ask."""
        compute = compute or Compute()
        task = task.in_bf16() if compute.precision == "bf16" else task
        name: Literal["loss", "measurement"] = (
            "measurement" if what == "measurements" and task.has_measurement else "loss"
        )
        return Job(task, getattr(task, what), rows or none(task.layout), norms, compute, name=name)

    @property
    def budget(self) -> int:
        """Bytes an engine may spend beyond the model's own pass."""
        return self.compute.budget(self.task.layout.device)

    @property
    def vectors_at_once(self) -> int:
        """How many gradients or tangents of P numbers fit the budget, with the copy that differentiating makes."""
        return max(1, self.budget // (2 * self.task.layout.numel * self.task.layout.dtype.itemsize))


class Engine(Protocol):
    """Does a job for one placed batch of `size` examples."""

    def __call__(self, job: Job, batch: Any, size: int) -> Projection:
        """Project every example of the batch."""
        ...
