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
from eigentrace.errors import EigentraceError, TaskError
from eigentrace.task.derivatives import backward, leaves_of
from eigentrace.task.task import Task, Values

# Relative differences above which two evaluations of the same thing count as different. Rounding in float64, in
# float32 with the atomics of a GPU, and in bfloat16 stays well below; dropout or a shuffled loader is of order one.
SAME_TOL = {"fp64": 1e-8, "fp32": 1e-3, "bf16": 5e-2}

# Share of later batches that are checked at random, and of a batch's examples that are evaluated again. A forward pass
# of a quarter of every 16th batch takes well below 1% of the time of scoring.
_CHECKED_SHARE, _AGAIN_SHARE = 1 / 16, 1 / 4
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


@dataclass
class CompanyCheck:
    """Compares the losses in some batches of a pass with those of their examples in other company.

    Checked are batches 1, 2, 4, 8, … and a random 16th of the others. Examples that depend on each other in fewer
    batches than that may pass unnoticed.
    """

    task: Task
    function: Callable[[Values, Any], Tensor]
    what: str = "loss"
    _random: random.Random = field(default_factory=lambda: random.Random(0), repr=False)
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
        gaps = (again - losses[index]).abs() / losses.abs().max().clamp_min(least)
        if float(gaps.max()) > max(SAME_TOL[precision], 1e-3):
            at = chosen[int(gaps.argmax())]
            raise TaskError(
                f"The {self.what} of row {rows[at]} changes by {float(gaps.max()):.2g} (relative) when it is evaluated "
                f"with {number - 1} instead of {size - 1} other examples of its batch {_named(rows)}, "
                f"{_why(batch, size)}"
            )


def check_company(check: CompanyCheck, batch: Any, rows: np.ndarray, losses: Tensor) -> None:
    """Check a placed batch thoroughly: losses alone, in several groups of other sizes, and one gradient.

    Raises:
        TaskError: If a loss or a gradient depends on the other examples.
    """
    size = len(rows)
    check.observe(batch, size)
    if size < 2:
        return
    for number in sorted({1, 2, max(1, size // 4), size // 2, size - 1}):
        check.compare(batch, rows, losses, number)
    _compare_gradients(check, batch, rows, losses)


def _compare_gradients(check: CompanyCheck, batch: Any, rows: np.ndarray, losses: Tensor) -> None:
    """Compare the gradient of one example's loss in its batch with the gradient alone."""
    task, size, at = check.task, len(rows), int(losses.abs().argmax())
    alone_in = check.select(batch, torch.tensor([at], device=losses.device), size)
    flat = []
    for part, place in ((batch, at), (alone_in, 0)):
        with torch.enable_grad():
            leaves = leaves_of(task.params)
            flat.append(task.layout.flatten(backward(task.losses(leaves, part)[place], leaves)))
    together, alone = flat
    norm = float(torch.maximum(together.norm(), alone.norm()))
    gap = float((together - alone).norm()) / norm if norm else 0.0
    if gap > max(SAME_TOL[precision_of(task)], 1e-2):
        raise TaskError(
            f"The gradient of row {rows[at]} changes by {gap:.2g} (relative) when its example is alone instead of with "
            f"{size - 1} others of its batch {_named(rows)}, although its loss stays the same, {_why(batch, size)}"
        )


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
