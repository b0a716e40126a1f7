"""How many examples go through the model at once: as many as fit, and fewer when they turn out not to."""

from dataclasses import replace
from typing import Any

import torch

from eigentrace.batch import is_per_example, select, tensors_of
from eigentrace.data import Data
from eigentrace.errors import MemoryLimitError
from eigentrace.probe import note_batch
from eigentrace.project.engine import Engine, Job, Projection, joined

# Sizes at which memory is measured, to draw a line through; and the most examples worth taking at once.
_TRIED = (4, 16)
_MOST = 1024
# Share of the free memory that a pass may be expected to fill: lengths vary, and caches leave holes.
_FILLED = 0.7


class Portions:
    """Puts batches through an engine in portions that fit, and remembers how large these were.

    Args:
        limit: Examples of a portion at most; all of a batch if not given.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.room: int | None = None
        """Numbers of its widest tensor that a portion may have: more short examples than long ones fit."""

    def __call__(self, engine: Engine, job: Job, values: Any, size: int) -> Projection:
        """Project a batch; on running out of memory halve the portion and go on with what is left."""
        done: list[Projection] = []
        start, width = 0, _width(values, size)
        while start < size:
            at_once = self.limit or size
            if self.room is not None:
                at_once = max(1, min(at_once, self.room // width))
            stop = min(size, start + at_once)
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
            self.room = (stop - start) // 2 * width
            torch.cuda.empty_cache()
        return joined(done)


def _width(values: Any, size: int) -> int:
    """Return how many numbers an example has in its widest tensor."""
    return max((t.numel() // size for t in tensors_of(values) if is_per_example(t, size)), default=1) or 1


def _attempt(engine: Engine, job: Job, values: Any, size: int) -> Projection | None:
    """Return None instead of raising, so that no traceback keeps the failed pass's tensors alive."""
    try:
        return engine(job, values, size)
    except torch.OutOfMemoryError:
        return None
    except Exception as error:
        note_batch(error, job.task, values)
        raise


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
