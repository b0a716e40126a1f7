"""Rows where and in the type in which they are multiplied: copied once if they fit, else streamed piece by piece."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from eigentrace.projection.directions import DensePart, DenseRows, Part, Rows, StackedRows
from eigentrace.projection.engine import Compute
from eigentrace.task.layout import Layout

# Share of the free memory that a copy of the rows may take; activations need the rest.
_SHARE = 0.5
# Rows begin at multiples of this many numbers, which the matrix units need to read them at full speed.
_ALIGNMENT = 16


def placed(rows: Rows, device: torch.device, compute: Compute) -> Rows:
    """Return rows ready for the matrix products of a pass on a device."""
    if isinstance(rows, StackedRows):
        return StackedRows(tuple(placed(part, device, compute) for part in rows.stacked))
    if not isinstance(rows, DenseRows):
        return rows
    dtype = torch.bfloat16 if compute.precision == "bf16" else rows.layout.dtype
    if rows.matrix.device == device and rows.matrix.dtype == dtype:
        return rows
    if rows.matrix.numel() * dtype.itemsize <= _SHARE * compute.free(device):
        return DenseRows(_copied(rows.matrix, device, dtype), rows.layout)
    return StreamedRows(rows.matrix, rows.layout, device, dtype)


def aligned(count: int, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:  # (K, P)
    """Allocate rows each of which begins where the matrix units like it, whatever P is."""
    length = -(-numel // _ALIGNMENT) * _ALIGNMENT
    return torch.empty(count, length, dtype=dtype, device=device)[:, :numel]


def _copied(matrix: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    copy = aligned(matrix.shape[0], matrix.shape[1], dtype, device)
    for target, row in zip(copy, matrix, strict=True):  # one by one: no second copy in between
        target.copy_(row)
    return copy


@dataclass
class StreamedRows:
    """Rows too large for the device: each parameter's piece comes over while the one before it is multiplied.

    A backward pass asks for the pieces in the same order every time, so the next one is known.
    """

    matrix: Tensor  # (K, P), in host memory or in another type
    layout: Layout
    device: torch.device
    dtype: torch.dtype
    _next: dict[str, str] = field(default_factory=dict)
    _last: str | None = None
    _coming: dict[str, tuple[Tensor, "torch.cuda.Event | None"]] = field(default_factory=dict)
    _stream: "torch.cuda.Stream | None" = None

    @property
    def count(self) -> int:
        """K."""
        return self.matrix.shape[0]

    def dense(self, start: int, stop: int) -> Tensor:
        """Write some of the rows out."""
        return self.matrix[start:stop].to(self.layout.device, self.layout.dtype)

    def parts(self, name: str, offset: int = 0) -> Iterator[Part]:
        """Yield the columns of one parameter, and send for those that will be asked for next."""
        if self._last is not None and self._last != name:
            self._next[self._last] = name
        self._last = name
        piece, arrived = self._coming.pop(name) if name in self._coming else self._send_for(name)
        if arrived is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(arrived)
            piece.record_stream(current)
        following = self._next.get(name)
        if following is not None and following not in self._coming:
            self._coming[following] = self._send_for(following)
        yield DensePart(piece, offset)

    def _send_for(self, name: str) -> tuple[Tensor, "torch.cuda.Event | None"]:
        columns = self.matrix[:, self.layout.span(name)]
        if self.device.type != "cuda":
            return columns.to(self.device, self.dtype), None
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        # Only page-locked memory is copied while the device computes; other rows pass through a piece of it.
        source = columns if columns.is_cuda or columns.is_pinned() else columns.contiguous().pin_memory()
        with torch.cuda.stream(self._stream):
            piece = source.to(self.device, non_blocking=True).to(self.dtype)
            arrived = torch.cuda.Event()
            arrived.record()
        return piece, arrived
