"""What every projection engine takes and gives: settings, a job for one batch after the other, and projections."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from eigentrace.errors import InputError, UnsupportedError
from eigentrace.gradients.layer_gradients import LayerGradients
from eigentrace.projection.directions import Directions, none
from eigentrace.settings import check_counts
from eigentrace.task.task import Task, Values

# What an engine may take beyond the model's own pass: small enough for a laptop, and on a GPU a share of what is free,
# since the model's activations need the rest.
_CPU_MEMORY = 512 * 2**20
_GPU_SHARE = 0.2


@dataclass(frozen=True, kw_only=True)
class Compute:
    """How examples go through the model. It decides speed, memory and rounding, never what is computed."""

    engine: Literal["auto", "layerwise", "forward", "reverse"] = "auto"
    """"auto" takes layerwise reverse mode where the model has rules for it, and another engine for the rest."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """"bf16" runs the model under autocast and multiplies directions in bfloat16: faster on a GPU, about two digits."""
    memory: int | float | None = None
    """Bytes (an integer) or share of the free memory (a fraction) beyond the model's own pass; None for a default."""
    batch: int | Literal["auto", "data"] = "auto"
    """Examples per pass: "data" as the data gives them, "auto" as many as fit a GPU. More than fit are split."""
    compile: bool = False
    """Compile the pass with `torch.compile` for each new shape of batch: minutes at first, faster from then on."""

    def __post_init__(self) -> None:
        if self.engine not in ("auto", "layerwise", "forward", "reverse"):
            raise InputError(f"engine must be 'auto', 'layerwise', 'forward' or 'reverse', got {self.engine!r}.")
        if self.precision not in ("fp32", "bf16"):
            raise InputError(f"precision must be 'fp32' or 'bf16', got {self.precision!r}.")
        if self.batch not in ("auto", "data"):
            check_counts(1, batch=self.batch)
        if not isinstance(self.compile, bool):
            raise InputError(f"compile must be True or False, got {self.compile!r}.")
        if self.memory is not None:
            _check_memory(self.memory)

    def budget(self, device: torch.device) -> int:
        """Bytes an engine may spend beyond the model's own pass."""
        if isinstance(self.memory, Integral):
            return int(self.memory)
        if self.memory is not None:
            return int(float(self.memory) * self.free(device))
        return int(_GPU_SHARE * self.free(device)) if device.type == "cuda" else _CPU_MEMORY

    @staticmethod
    def free(device: torch.device) -> int:
        """Bytes that could still be allocated on a device, what torch's allocator holds in reserve included."""
        if device.type == "cuda":
            reserve = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
            return torch.cuda.mem_get_info(device)[0] + reserve
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _check_memory(memory: object) -> None:
    whole = isinstance(memory, Integral) and not isinstance(memory, bool) and int(memory) > 0
    share = isinstance(memory, Real) and not isinstance(memory, Integral) and 0 < float(memory) < 1
    if not (whole or share):
        raise InputError(
            f"memory must be a number of bytes, or a fraction of the free memory between 0 and 1, got {memory!r}."
        )


PerExample = Callable[[Values, Any], Tensor]


class Gather(Protocol):
    """Takes the gradients of every parameter that has a layer rule, as forms, while one pass goes back."""

    def receive(self, name: str, form: LayerGradients) -> None:
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
    outputs: Tensor | None = None  # (B, ...)
    """The model's outputs, of a job that asks for them, where they are one tensor."""
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
    outputs = [part.outputs for part in parts]
    return Projection(
        torch.cat([part.features for part in parts]),
        None if squares[0] is None else torch.cat(squares),  # type: ignore[arg-type]
        torch.cat([part.losses for part in parts]),
        gathered=tuple(gather for part in parts for gather in part.gathered),
        outputs=None if any(part is None for part in outputs) else torch.cat(outputs),  # type: ignore[arg-type]
    )


@dataclass(frozen=True)
class Job:
    """What to project: the gradient of a per-example function, on directions, with or without its norm."""

    task: Task
    function: PerExample
    directions: Directions
    norms: bool = False
    compute: Compute = field(default_factory=Compute)
    gather: MakeGather | None = None
    name: Literal["loss", "measurement"] = "loss"
    """What messages call the function."""
    outputs: bool = False
    """Whether projections carry the model's outputs too, which the pass takes the losses from."""

    def evaluate(self, values: Values, batch: Any) -> tuple[Tensor, Tensor | None]:  # (B,), outputs
        """Evaluate the function, and return the outputs beside it if the job asks for them and they are a tensor."""
        if not self.outputs:
            return self.function(values, batch), None
        losses, outputs = self.task.losses_and_outputs(values, batch)
        return losses, outputs if isinstance(outputs, Tensor) else None

    @staticmethod
    def of(
        task: Task,
        what: Literal["losses", "measurements"],
        directions: Directions | None = None,
        norms: bool = False,
        compute: Compute | None = None,
        outputs: bool = False,
    ) -> "Job":
        """Make a job whose model runs in the precision of `compute`; without `directions`, it has no features.

        Outputs can be asked for only where the task has them; a measurement of its own is not taken from them.
        """
        compute = compute or Compute()
        task = task.in_bf16() if compute.precision == "bf16" else task
        name: Literal["loss", "measurement"] = (
            "measurement" if what == "measurements" and task.has_measurement else "loss"
        )
        outputs = outputs and task.has_outputs and name == "loss"
        return Job(
            task, getattr(task, what), directions or none(task.layout), norms, compute, name=name, outputs=outputs
        )

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
