"""Check that the loss of an example does not depend on the other examples of its batch."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eigentrace.data.batch import is_per_example, kept_whole, map_tensors, tensors_of
from eigentrace.errors import DeterminismError, EigentraceError, TaskError
from eigentrace.task.derivatives import LACKING, backward, leaves_of
from eigentrace.task.task import Task, Values

# Relative differences above which two evaluations of the same thing count as different. Rounding in float64, in
# float32 with the atomics of a GPU, and in bfloat16 stays well below; dropout or a shuffled loader is of order one.
SAME_TOL = {"fp64": 1e-8, "fp32": 1e-3, "bf16": 5e-2}

# Share of later batches that are checked at random, and of a batch's examples that are evaluated again. Forward passes
# of a quarter of every 16th batch take well below 1% of the time of scoring.
_CHECKED_SHARE, _AGAIN_SHARE = 1 / 16, 1 / 4
# Number of examples among which a gradient is computed, and the least share of the largest loss that its example has.
_GROUP, _LARGE_SHARE = 8, 0.5
# Relative difference above which two gradients count as different, and rounding in units of eps for a loss of 1.
_GRADIENT_TOL, _ROUNDING = 1e-2, 10.0
_NOT_ALONE = (
    "so losses are not per example. Look for a division by the batch size, token count or class counts, for batch "
    "statistics, for experts with limited capacity, or for another use of other examples. A list is read as batches: "
    "pass a list of single examples as Data(examples)."
)


def precision_of(task: Task) -> str:
    """Return the precision of losses: "bf16" under autocast or if a parameter is bfloat16, else "fp64" or "fp32"."""
    if task.is_bf16 or torch.bfloat16 in task.layout.dtypes:
        return "bf16"
    return "fp64" if task.layout.dtype == torch.float64 else "fp32"


def rounding_of_outputs(task: Task, batch: Any) -> float:
    """Return by how much bfloat16 rounds the largest output of a batch; 0 in other precisions or without outputs.

    It bounds what the loss of a confident model can show: logits near 30 are rounded by an eighth.
    """
    if precision_of(task) != "bf16" or not task.has_outputs:
        return 0.0
    outputs = task.outputs(task.params, batch)
    if not isinstance(outputs, Tensor) or not outputs.numel():
        return 0.0
    return 2 * torch.finfo(torch.bfloat16).eps * float(outputs.detach().abs().max())


@dataclass
class CompanyCheck:
    """Compares losses and gradients in some batches of a pass with those of their examples in other company.

    Checked are batches 1, 2, 4, 8, … and a random 16th of the others. Examples that depend on each other in fewer
    batches than that may pass unnoticed.
    """

    task: Task
    function: Callable[[Values, Any], Tensor]
    what: str = "loss"
    has_gradients: bool = True
    """Whether gradients are compared, too: not where only losses are used."""
    _random: random.Random = field(default_factory=lambda: random.Random(0), repr=False)
    _random_group: random.Random = field(default_factory=lambda: random.Random(0), repr=False)
    _seen: int = 0
    _shared: set[int] = field(default_factory=set)
    """Positions of tensors that all examples share, although their first dimension may be a batch's size by chance."""

    def __call__(self, batch: Any, rows: np.ndarray, losses: Tensor) -> None:
        """Check a placed batch if it is its turn.

        Raises:
            TaskError: If a loss differs; the message contains the batch and the row.
        """
        self._seen += 1
        self.observe(batch, len(rows))
        is_due = self._seen & (self._seen - 1) == 0 or self._random.random() < _CHECKED_SHARE
        if is_due and len(rows) > 1:
            self.compare(batch, rows, losses, max(1, round(_AGAIN_SHARE * len(rows))))
            self.compare(batch, rows, losses, 1)
            if self.has_gradients:
                self.compare_gradient(batch, rows, losses, min(_GROUP, max(2, round(_AGAIN_SHARE * len(rows)))))

    def observe(self, batch: Any, size: int) -> None:
        """Note which tensors of a batch have another first dimension than its size, and so are shared."""
        self._shared |= {at for at, tensor in enumerate(tensors_of(batch)) if not is_per_example(tensor, size)}

    def select(self, batch: Any, index: Tensor, size: int) -> Any:
        """Return some of the examples of a batch, with the shared tensors whole."""
        positions = count()

        def chosen(tensor: Tensor) -> Tensor:
            is_shared = next(positions) in self._shared
            return tensor if is_shared or not is_per_example(tensor, size) else tensor[index]

        return map_tensors(chosen, batch)

    def compare(self, batch: Any, rows: np.ndarray, losses: Tensor, number: int) -> None:
        """Evaluate `number` random examples of a batch without the others; see `__call__`."""
        size = len(rows)
        # Of single examples, that with the largest loss: the loss of a well-fitted one is too small to show much.
        chosen = self._random.sample(range(size), number) if number > 1 else [int(losses.abs().argmax())]
        index = torch.tensor(chosen, device=losses.device)
        part = self.select(batch, index, size)
        try:
            again = self.function(self.task.params, part).detach()
        except (EigentraceError, torch.OutOfMemoryError):
            raise
        except (ValueError, RuntimeError, IndexError) as error:
            raise TaskError(
                f"The {self.what} fails for {_some_of(number, size)} {_named(rows)} ({error}), {_why(batch, size)}"
            ) from error
        if len(again) != number:
            raise TaskError(
                f"The {self.what} returns {len(again)} numbers for {_some_of(number, size)} {_named(rows)}, "
                f"{_why(batch, size)}"
            )
        # Losses near zero have no accurate digits in bfloat16: compare on an absolute scale then.
        precision = precision_of(self.task)
        least = 0.1 if precision == "bf16" else 1e-6
        largest = losses.abs().max().clamp_min(least)
        gaps = (again - losses[index]).abs() / largest
        tol = max(SAME_TOL[precision], 1e-3)
        if float(gaps.max()) > tol and float(gaps.max()) > tol + rounding_of_outputs(self.task, part) / float(largest):
            at = chosen[int(gaps.argmax())]
            raise TaskError(
                f"The {self.what} of row {rows[at]} changes by {float(gaps.max()):.2g} (relative) when it is evaluated "
                f"with {number - 1} instead of {size - 1} other examples of its batch {_named(rows)}, "
                f"{_why(batch, size)}"
            )

    def compare_gradient(self, batch: Any, rows: np.ndarray, losses: Tensor, number: int) -> None:
        """Compare the gradient of one example among `number` examples of a batch with its gradient alone.

        Compared is an example with a large loss: gradients of well-fitted ones are too small to show much.
        """
        size, large = len(rows), losses.abs() >= _LARGE_SHARE * losses.abs().max()
        at = self._random_group.choice(large.nonzero().flatten().tolist())
        others = self._random_group.sample([other for other in range(size) if other != at], number - 1)
        group, alone = (
            self.select(batch, torch.tensor(chosen, device=losses.device), size) for chosen in ([at, *others], [at])
        )
        tol = max(SAME_TOL[precision_of(self.task)], _GRADIENT_TOL)
        # Rounding in a nearly saturated loss is relative to the model's outputs, not to their small gradient.
        tol += _ROUNDING * torch.finfo(losses.dtype).eps / float(losses[at].abs().clamp_min(1e-30))
        try:
            gap = self._gradient_gap(group, alone)
            if gap <= tol or gap <= tol + rounding_of_outputs(self.task, group):
                return
            again = self._gradient_gap(group, group)
        except EigentraceError:
            raise
        except LACKING:  # without a gradient in reverse mode, or without the memory for it
            return
        if again > tol:
            raise DeterminismError(
                f"The gradient of the {self.what} of row {rows[at]} differs by {again:.2g} (relative) when it is "
                f"computed twice, although its {self.what} stays the same. Something in the backward pass draws random "
                "numbers: expected a backward pass that repeats."
            )
        raise TaskError(
            f"The gradient of the {self.what} of row {rows[at]} changes by {gap:.2g} (relative) when its example is "
            f"alone instead of with {number - 1} others of its batch {_named(rows)}, although its {self.what} stays "
            f"the same, {_why(batch, size)}"
        )

    def _gradient_gap(self, group: Any, alone: Any) -> float:
        """Return the relative difference between the gradients of a group's first example and of the same alone."""

        def norm_of(*signed: tuple[float, Any]) -> float:
            # Of the difference directly: two gradients of a large model may not fit.
            with torch.enable_grad():
                leaves = leaves_of(self.task.params)
                total = sum(sign * self.function(leaves, part)[0] for sign, part in signed)
                found = backward(total, leaves)  # type: ignore[arg-type]
            return float(torch.stack([torch.linalg.vector_norm(part) for part in found.values()]).norm())

        norm = max(norm_of((1.0, group)), norm_of((1.0, alone)))
        return norm_of((1.0, group), (-1.0, alone)) / norm if norm else 0.0


def check_company(check: CompanyCheck, batch: Any, rows: np.ndarray, losses: Tensor) -> None:
    """Check a placed batch thoroughly: losses alone and in several groups of other sizes, and a gradient in them all.

    Raises:
        TaskError: If a loss or a gradient depends on the other examples.
    """
    size = len(rows)
    check.observe(batch, size)
    if size < 2:
        return
    for number in sorted({1, 2, max(1, size // 4), size // 2, size - 1}):
        check.compare(batch, rows, losses, number)
    check.compare_gradient(batch, rows, losses, size)


def _some_of(count: int, size: int) -> str:
    return f"{'an example that is alone' if count == 1 else f'{count} examples'} instead of {size}, from the batch"


def _named(rows: np.ndarray) -> str:
    return f"(rows {rows[0]} to {rows[-1]})"


def _why(batch: Any, size: int) -> str:
    """Return the likely cause: a part of the batch that was not split, or else a loss that is not per example."""
    whole = kept_whole(batch, size)
    if not whole:
        return _NOT_ALONE
    more = f" and {len(whole) - 1} more" if len(whole) > 1 else ""
    return (
        f"so either losses are not per example, or the batch was not split correctly: each of its {size} examples "
        f"keeps all of {whole[0]}{more}. Put the examples along the first dimension of tensors, in tuples, lists or "
        "dicts. If that is not possible (graphs merged into one, lists of tensors, custom objects), pass one example "
        "at a time: Data(dataset, collate, batch_size=1), on a GPU with Compute(batch='data')."
    )
