"""How many examples go through the model at once: as many as fit, and fewer when they turn out not to."""

from dataclasses import replace
from typing import Any

import torch

from eigentrace.batch import select
from eigentrace.data import Data
from eigentrace.errors import MemoryLimitError
from eigentrace.project.engine import Engine, Job, Projection, joined

# Sizes at which memory is measured, to draw a line through; and the most examples worth taking at once.
_TRIED = (4, 16)
_MOST = 1024
# Share of the free memory that a pass may be expected to fill: lengths vary, and caches leave holes.
_FILLED = 0.7


class Portions:
    """Puts batches through an engine in portions that fit, and remembers the size that did."""

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit

    def __call__(self, engine: Engine, job: Job, values: Any, size: int) -> Projection:
        """Project a batch; on running out of memory halve the portion and go on with what is left."""
        done: list[Projection] = []
        start = 0
        while start < size:
            stop = min(size, start + (self.limit or size))
            whole = stop - start == size
            found = _attempt(engine, job, values if whole else select(values, slice(start, stop), size), stop - start)
            if found is not None:
                done.append(found if whole else replace(found, is_whole=False))
                start = stop
                continue
            if stop - start == 1:
                raise MemoryLimitError(
                    f"One example does not fit in the memory of {job.task.layout.device} beside the model and "
                    f"{job.rows.count} rows. Keep fewer rows (fitted.distill), select fewer parameters, use "
                    "Compute(precision='bf16'), or hold the rows in host memory (Basis(place='host'))."
                )
            self.limit = (stop - start) // 2
            torch.cuda.empty_cache()
        return joined(done)


def _attempt(engine: Engine, job: Job, values: Any, size: int) -> Projection | None:
    """Return None instead of raising, so that no traceback keeps the failed pass's tensors alive."""
    try:
        return engine(job, values, size)
    except torch.OutOfMemoryError:
        return None


def largest_batch(engine: Engine, job: Job, data: Data) -> int | None:
    """Estimate how many examples fit a GPU, from the peak memory of a few; None where there is nothing to go by."""
    device = job.task.layout.device
    if device.type != "cuda" or not data.can_rebatch or len(data) < 2 * _TRIED[-1]:
        return None
    peaks = []
    for count in _TRIED:
        values = job.task.place(data.rebatched(count).first(count).values)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        if _attempt(engine, job, values, count) is None:
            return max(1, count // 2)
        peaks.append(torch.cuda.max_memory_allocated(device) - before)
    each = max(1.0, (peaks[1] - peaks[0]) / (_TRIED[1] - _TRIED[0]))
    # What is written out in chunks grows up to the budget, whatever the batch.
    room = _FILLED * job.compute.free(device) - job.budget - peaks[0]
    fitting = int(max(_TRIED[0], min(_MOST, room / each)))
    return 2 ** (fitting.bit_length() - 1)
