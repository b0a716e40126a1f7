"""Directions on the device of the matrix products: copied once if they fit, else streamed parameter by parameter."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from eigentrace.projection.directions import DenseDirections, DensePart, Directions, Part, StackedDirections
from eigentrace.projection.engine import Compute
from eigentrace.task.layout import Layout

# Share of the free memory that a copy of the directions may take; activations need the rest.
_SHARE = 0.5
# Directions start at multiples of this many elements, so that matrix units read them at full speed.
_ALIGNMENT = 16


def placed(directions: Directions, device: torch.device, compute: Compute) -> Directions:
    """Return the directions in the type and on the device of the matrix products."""
    if isinstance(directions, StackedDirections):
        return StackedDirections(tuple(placed(part, device, compute) for part in directions.stacked))
    if not isinstance(directions, DenseDirections):
        return directions
    dtype = torch.bfloat16 if compute.precision == "bf16" else directions.layout.dtype
    if directions.matrix.device == device and directions.matrix.dtype == dtype:
        return directions
    if directions.matrix.numel() * dtype.itemsize <= _SHARE * compute.free(device):
        return DenseDirections(_copied(directions.matrix, device, dtype), directions.layout)
    return StreamedDirections(directions.matrix, directions.layout, device, dtype)


def aligned(count: int, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:  # (K, P)
    """Allocate directions that each start at an aligned address, for any P."""
    length = -(-numel // _ALIGNMENT) * _ALIGNMENT
    return torch.empty(count, length, dtype=dtype, device=device)[:, :numel]


def _copied(matrix: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    copy = aligned(matrix.shape[0], matrix.shape[1], dtype, device)
    for target, direction in zip(copy, matrix, strict=True):  # one by one, which needs no temporary copy of all
        target.copy_(direction)
    return copy


@dataclass
class StreamedDirections:
    """Directions too large for the device: the part of each parameter is copied while the previous one is multiplied.

    Every backward pass uses the parameters in the same order, so that the next part can be prefetched.
    """

    matrix: Tensor  # (K, P), in host memory or in another type
    layout: Layout
    device: torch.device
    dtype: torch.dtype
    _next: dict[str, str] = field(default_factory=dict)
    _last: str | None = None
    _prefetched: dict[str, tuple[Tensor, "torch.cuda.Event | None"]] = field(default_factory=dict)
    _stream: "torch.cuda.Stream | None" = None

    @property
    def count(self) -> int:
        """The number of directions, K."""
        return self.matrix.shape[0]

    def dense(self, start: int, stop: int) -> Tensor:
        """Return the directions from `start` to `stop` as a matrix."""
        return self.matrix[start:stop].to(self.layout.device, self.layout.dtype)

    def parts(self, name: str, offset: int = 0) -> Iterator[Part]:
        """Yield the columns of one parameter, and prefetch those expected next."""
        if self._last is not None and self._last != name:
            self._next[self._last] = name
        self._last = name
        piece, arrived = self._prefetched.pop(name) if name in self._prefetched else self._send_for(name)
        if arrived is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(arrived)
            piece.record_stream(current)
        following = self._next.get(name)
        if following is not None and following not in self._prefetched:
            self._prefetched[following] = self._send_for(following)
        yield DensePart(piece, offset)

    def _send_for(self, name: str) -> tuple[Tensor, "torch.cuda.Event | None"]:
        columns = self.matrix[:, self.layout.span(name)]
        if self.device.type != "cuda":
            return columns.to(self.device, self.dtype), None
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        # Only copies from page-locked memory overlap with computation; other memory is first copied to such a buffer.
        source = columns if columns.is_cuda or columns.is_pinned() else columns.contiguous().pin_memory()
        with torch.cuda.stream(self._stream):
            piece = source.to(self.device, non_blocking=True).to(self.dtype)
            arrived = torch.cuda.Event()
            arrived.record()
        return piece, arrived
