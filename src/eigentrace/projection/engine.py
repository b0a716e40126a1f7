"""The interface of projection engines: compute settings, jobs and projected batches."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from eigentrace.errors import InputError, UnsupportedError
from eigentrace.gradients.layer_gradients import LayerGradients
from eigentrace.numeric.memory import bytes_of, check_memory, free_memory
from eigentrace.projection.directions import Directions, none
from eigentrace.settings import check_counts
from eigentrace.task.task import Task, Values

# Default memory budget of an engine, in addition to the model's own pass: small enough for a laptop; on a GPU a share
# of the free memory, since the activations of the model need the rest.
_CPU_MEMORY = 512 * 2**20
_GPU_SHARE = 0.2


@dataclass(frozen=True, kw_only=True)
class Compute:
    """How passes over the examples run: settings that affect speed, memory and rounding, not what is computed."""

    engine: Literal["auto", "layerwise", "forward", "reverse"] = "auto"
    """"auto" uses layerwise reverse mode for all parameters with a layer rule, and another engine for the others."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """"bf16" runs the model under autocast and multiplies directions in bfloat16: faster on a GPU, about two digits."""
    memory: int | float | str | None = None
    """Memory in addition to the model's own pass: bytes (int, or text such as "2GB") or a share of the free memory
    (float); None: default."""
    batch: int | Literal["auto", "data"] = "auto"
    """Examples per pass: "data" keeps the data's batches, "auto" fits them to the GPU. Too large ones are split."""
    compile: bool = False
    """Compile the pass with `torch.compile`, once per batch shape: this takes minutes, then passes are faster."""

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
            check_memory(self.memory)

    def budget(self, device: torch.device) -> int:
        """Return the bytes that an engine may use in addition to the model's own pass."""
        if self.memory is not None:
            return bytes_of(self.memory, lambda: self.free(device))
        return int(_GPU_SHARE * self.free(device)) if device.type == "cuda" else _CPU_MEMORY

    @staticmethod
    def free(device: torch.device) -> int:
        """Return the bytes that can still be allocated on a device; see `free_memory`."""
        return free_memory(device)


PerExample = Callable[[Values, Any], Tensor]


class Gather(Protocol):
    """Receives the gradients of every parameter with a layer rule during one backward pass."""

    def receive(self, name: str, form: LayerGradients) -> None:
        """Receive the gradients of a parameter from one of its uses."""
        ...

    def finish(self) -> None:
        """Process what is left at the end of the pass."""
        ...


# Called for every pass, with the number of gradients that each parameter receives, and the parameters without a rule.
MakeGather = Callable[[Mapping[str, int], Mapping[str, str]], Gather]


@dataclass(frozen=True)
class Projection:
    """The projection of one batch."""

    features: Tensor  # (B, K)
    square_norms: Tensor | None  # (B,) ‖g(x)‖², if requested
    losses: Tensor  # (B,) the function that was differentiated
    read: frozenset[str] = frozenset()
    """Names of the functions by which the model read values of the batch into Python, if known."""
    trace: bytes | None = None
    """Hash of what the model did after it read values, if it did: see `eigentrace.gradients.call_trace`."""
    gathered: tuple[Gather, ...] = ()
    """The `Gather` objects of a job with `gather`, one per pass of the layerwise engine."""
    outputs: Tensor | None = None  # (B, ...)
    """The outputs of the model, if the job requests them and they are a single tensor."""
    is_whole: bool = False
    """Whether the batch went through the model unsplit."""

    def squares(self) -> Tensor:  # (B,)
        """Return the squared norms; raise UnsupportedError if the job did not request them."""
        if self.square_norms is None:
            raise UnsupportedError("This projection has no gradient norms: request them with Job(norms=True).")
        return self.square_norms


def joined(parts: list[Projection]) -> Projection:
    """Concatenate the projections of consecutive parts of a batch."""
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
    """A projection to compute: gradients of a per-example function on directions, with or without their norms."""

    task: Task
    function: PerExample
    directions: Directions
    norms: bool = False
    compute: Compute = field(default_factory=Compute)
    gather: MakeGather | None = None
    name: Literal["loss", "measurement"] = "loss"
    """The name of the function in messages."""
    outputs: bool = False
    """Whether to return the outputs of the model too, from which the losses are computed."""
    prepare: Callable[[Any, np.ndarray], Any] | None = None
    """Adds what the function needs to each batch on the device, given the rows of its examples."""

    def place(self, values: Any, rows: np.ndarray) -> Any:
        """Move a batch to the device, and prepare it for the function."""
        placed = self.task.place(values)
        return placed if self.prepare is None else self.prepare(placed, rows)

    def evaluate(self, values: Values, batch: Any) -> tuple[Tensor, Tensor | None]:  # (B,), outputs
        """Evaluate the function; also return the model's outputs if the job requests them and they are a tensor."""
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
        """Return a job that runs the model in the precision of `compute`; without `directions` it has no features.

        `outputs` is ignored if the task has no outputs, or if `what` is a measurement with its own function.
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
        """Return the bytes that an engine may use in addition to the model's own pass."""
        return self.compute.budget(self.task.layout.device)

    @property
    def vectors_at_once(self) -> int:
        """Return how many gradients or tangents (P,) fit in the budget, including the copies made by autograd."""
        return max(1, self.budget // (2 * self.task.layout.numel * self.task.layout.dtype.itemsize))


class Engine(Protocol):
    """Runs a job on one batch of `size` examples that is on the device."""

    def __call__(self, job: Job, batch: Any, size: int) -> Projection:
        """Project every example of the batch."""
        ...
