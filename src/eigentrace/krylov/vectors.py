"""Storage and multiplication of the vectors of a Krylov basis."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from eigentrace.errors import InputError
from eigentrace.numeric.accumulate import times
from eigentrace.numeric.memory import check_memory
from eigentrace.settings import check_counts, settings_of

# Numbers of the basis converted to the working precision (and device) at a time: 64 MiB of float32.
_CHUNK_NUMBERS = 1 << 24
# Numbers packed on a GPU before they are multiplied: 512 MiB of bfloat16. Smaller products would end before the next is
# launched.
_PACKED_NUMBERS = 1 << 28
# Chunks and vectors begin at multiples of this many numbers.
_ALIGNED = 64
# Numbers of a basis that are multiplied in one call: cuBLAS counts those of a matrix-vector product in 32 bits.
_MOST_NUMBERS = (1 << 31) - 1
# Terms of a dot product of bfloat16 numbers summed at once: a GPU truncates partial sums to 24 bits every 16 terms,
# so that 2,048 of one sign lose 4e-6 of their sum at worst.
_PIECE = 1 << 11


@dataclass(frozen=True, kw_only=True)
class Basis:
    """How Krylov vectors are stored."""

    dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """fp32 follows the parameters (fp64 for float64 models); bf16 halves the memory, with errors of about 1e-4 in
    eigenvalues. The eigenvectors are stored in the same type. "auto" is fp32 if it fits in memory."""
    place: Literal["auto", "device", "host"] = "auto"
    """Where vectors and eigenvectors are stored: on the model's device, or in (pinned) host memory. "auto" is the
    device if they fit there."""
    max_vectors: int | None = None
    """Restart at this number of stored vectors (Lanczos only). None stores one per step, or as many as fit."""
    restart_keep: int | None = None
    """Number of Ritz vectors kept at a restart; 60% of max_vectors if None."""
    memory: int | float | str | None = None
    """Memory for the fit, where its vectors are stored: bytes (int, or text such as "12GB"), or a share of the free
    memory (float). None is 90% of it."""

    def __post_init__(self) -> None:
        if self.dtype not in ("auto", "fp32", "bf16"):
            raise InputError(f"Basis dtype must be 'auto', 'fp32' or 'bf16', got {self.dtype!r}.")
        if self.place not in ("auto", "device", "host"):
            raise InputError(f"Basis place must be 'auto', 'device' or 'host', got {self.place!r}.")
        if self.max_vectors is not None:
            check_counts(3, **{"Basis max_vectors": self.max_vectors})
        if self.restart_keep is not None and not 1 <= self.restart_keep < (self.max_vectors or 0):
            raise InputError(
                f"Basis restart_keep must be between 1 and max_vectors - 1, got {self.restart_keep} with "
                f"max_vectors={self.max_vectors}."
            )
        if self.memory is not None:
            check_memory(self.memory)

    @property
    def carried(self) -> int:
        """Number of Ritz vectors kept at a restart."""
        limit = self.max_vectors or 0
        return self.restart_keep or max(1, min(limit - 2, round(0.6 * limit)))

    def record(self) -> dict[str, Any]:
        """Return how vectors are stored, as JSON values, without the memory limit that they were chosen by."""
        return {name: value for name, value in settings_of(self).items() if name != "memory"}

    def as_begun(self, record: Mapping[str, Any]) -> "Basis":
        """Return the basis with what it leaves open taken from the record of an iteration that is resumed."""
        names = ["dtype", "place", "max_vectors"] + ([] if self.max_vectors else ["restart_keep"])
        return replace(self, **{name: record[name] for name in names if getattr(self, name) in (None, "auto")})

    def type_of(self, working: torch.dtype) -> torch.dtype:
        """Return the type in which vectors are stored that are multiplied in the type `working`."""
        return torch.bfloat16 if self.dtype == "bf16" else working

    def home(self, device: torch.device) -> torch.device:
        """Return where vectors of a model on `device` are stored."""
        return torch.device("cpu") if self.place == "host" else device


class Vectors:
    """Vectors of P numbers, stored with one dtype and place and multiplied with another.

    Sums are computed in the working type (float32 or float64), whatever the storage. On a GPU, bfloat16 vectors are
    multiplied without conversion: the other factor is split into three bfloat16 parts that contain all of its digits.
    Converting the vectors to float32 first would move five times as many bytes.
    """

    def __init__(self, count: int, like: Tensor, basis: Basis) -> None:
        self.working, self.device = like.dtype, like.device
        dtype, device = basis.type_of(like.dtype), basis.home(like.device)
        self._direct = dtype == like.dtype and device == like.device
        self._split = dtype == torch.bfloat16 and like.dtype == torch.float32 and like.device.type == "cuda"
        size = like.numel()
        # Fast kernels need vectors that start at a multiple of 16 bytes; memory that a GPU reads while it computes must
        # be pinned.
        width = -(-size // _ALIGNED) * _ALIGNED if self._split else size
        pinned = device.type == "cpu" and like.device.type == "cuda"
        self.store = torch.empty(count, width, dtype=dtype, device=device, pin_memory=pinned)[:, :size]

    def get(self, index: int) -> Tensor:  # (P,)
        """Return one vector in the working type."""
        return self.store[index].to(self.device, self.working)

    def put(self, index: int, vector: Tensor) -> float:
        """Store a vector and return the norm of the rounding error."""
        self.store[index] = vector.to(self.store.device, self.store.dtype)
        return 0.0 if self._direct else float((self.get(index) - vector).norm())

    def dots(self, count: int, w: Tensor) -> Tensor:  # (P,) -> (count,)
        """Return the dot products of the first `count` vectors with w."""
        if self._direct:
            return torch.cat([self.store[part] @ w for part in self._blocks(count)])
        right = thirds(w) if self._split else w[None]
        parts = (self._products(part, right[:, columns]) for columns, part in self._parts(count))
        return _sum(parts).sum(dim=1).to(self.working)

    def combine(self, coefficients: Tensor) -> Tensor:  # (k, count) -> (k, P)
        """Return k linear combinations of the first `count` vectors."""
        coefficients = coefficients.to(self.device, self.working)
        if self._direct:
            first, *others = self._blocks(coefficients.shape[-1])
            total = coefficients[..., first] @ self.store[first]
            for part in others:
                total += coefficients[..., part] @ self.store[part]
            return total
        result = torch.empty(*coefficients.shape[:-1], self.store.shape[1], dtype=self.working, device=self.device)
        for columns, mixed in self._mixed(torch.atleast_2d(coefficients)):
            result[..., columns] = mixed.view(*coefficients.shape[:-1], -1)
        return result

    def mix(self, coefficients: Tensor) -> Tensor:  # (k, count) -> (k,)
        """Replace the first k vectors by combinations of the first `count`; return the norms of rounding errors."""
        k = len(coefficients)
        lost = torch.zeros(k, dtype=torch.float64, device=self.device)
        for columns, mixed in self._mixed(coefficients.to(self.device, self.working)):
            rounded = mixed.to(self.store.dtype)
            self.store[:k, columns] = rounded.to(self.store.device)
            if not self._direct:
                lost += (rounded.to(self.working) - mixed).square().sum(dim=1)
        return lost.sqrt().cpu()

    def gram(self, count: int) -> Tensor:  # (count, count), float64
        """Return the Gram matrix of the first `count` vectors."""
        return _sum(self._products(part, part) for _, part in self._parts(count, count)).cpu()

    def release(self, count: int) -> Tensor:  # (count, P)
        """Return the first `count` vectors and free the memory of the others."""
        kept = self.store[:count]
        if count < len(self.store):
            with contextlib.suppress(torch.OutOfMemoryError):  # then the memory of all is kept
                pinned = kept.is_pinned()
                kept = torch.empty(kept.shape, dtype=kept.dtype, device=kept.device, pin_memory=pinned).copy_(kept)
        self.store = kept
        return kept

    def _blocks(self, count: int) -> Iterator[slice]:
        """Yield slices of the first `count` vectors that are small enough for one call."""
        most = max(1, _MOST_NUMBERS // max(1, self.store.shape[1]))
        return (slice(start, min(start + most, count)) for start in range(0, max(1, count), most))

    def _products(self, part: Tensor, right: Tensor) -> Tensor:  # (m, width), (n, width) -> (m, n) float64
        if self._split:
            return in_pieces(part, right)
        left, right = (side.to(self.working).contiguous() for side in (part, right))
        return in_pieces(left, right) if self.working == torch.float32 else left @ right.T

    def _mixed(self, coefficients: Tensor) -> Iterator[tuple[slice, Tensor]]:  # (k, count) -> (k, width) at a time
        k, count = coefficients.shape
        left = thirds(coefficients).flatten(0, 1) if self._split else coefficients
        for columns, part in self._parts(count, len(left)):
            # Packed first: with a stride of gigabytes, matrix products read out of bounds (cuBLAS 13, H200).
            packed = part.contiguous()
            if self._split:
                yield columns, times(left, packed).view(3, k, -1).sum(dim=0)
            else:
                yield columns, left @ packed.to(self.working)

    def _parts(self, count: int, results: int = 0) -> Iterator[tuple[slice, Tensor]]:
        """Yield columns of the first `count` vectors with their stored dtype, on the device for multiplication."""
        total = self.store.shape[1]
        here = self._split and self.store.device == self.device
        # Vectors that are multiplied without a copy take no memory, whatever their number.
        numbers = 1 if here and not results else max(count, results)
        largest = _PACKED_NUMBERS if here and results else _CHUNK_NUMBERS
        width = max(_ALIGNED, largest // numbers // _ALIGNED * _ALIGNED)
        spans = [slice(start, min(start + width, total)) for start in range(0, total, width)]
        if self.store.device == self.device:
            yield from ((span, self.store[:count, span]) for span in spans)
        else:
            yield from _streamed(self.store[:count], spans, self.device)


def thirds(numbers: Tensor) -> Tensor:  # float32 (*) -> bfloat16 (3, *)
    """Split float32 numbers into three bfloat16 parts with the same sum: 3 × 8 bits are float32's 24.

    >>> x = torch.tensor([1 / 3, -1e-20, 12345.678])
    >>> bool((thirds(x).double().sum(dim=0) == x.double()).all())
    True
    """
    # Parts start at a multiple of 16 bytes, as in `Vectors`.
    size = numbers.numel()
    parts = torch.empty(3, -(-size // _ALIGNED) * _ALIGNED, dtype=torch.bfloat16, device=numbers.device)[:, :size]
    rest = numbers.flatten()
    for part in parts:
        part.copy_(rest)
        rest = rest - part
    return parts.unflatten(1, numbers.shape) if numbers.ndim != 1 else parts


def in_pieces(left: Tensor, right: Tensor) -> Tensor:  # (m, width), (n, width) -> (m, n) float64
    """Return left @ right.T for bfloat16 or float32 matrices, summed in many short pieces.

    One long product would leave most of a GPU idle, and its matrix units truncate every partial sum, which over
    millions of terms of one sign loses four digits. On some CPUs a long float32 product loses digits too.
    """
    width = left.shape[1]
    body = width // _PIECE * _PIECE
    total = torch.zeros(len(left), len(right), dtype=torch.float64, device=left.device)
    if body:
        a, b = (x[:, :body].unflatten(1, (-1, _PIECE)).transpose(0, 1) for x in (left, right))
        total += times(a, b.transpose(1, 2)).double().sum(dim=0)
    if body < width:
        total += times(left[:, body:], right[:, body:].T)
    return total


def _sum(parts: Iterator[Tensor]) -> Tensor:
    """Add tensors up in place, one at a time."""
    total = next(parts).clone()
    for part in parts:
        total += part
    return total


def _streamed(vectors: Tensor, spans: list[slice], device: torch.device) -> Iterator[tuple[slice, Tensor]]:
    """Copy columns of pinned vectors to a GPU, the next ones while the current ones are used."""
    here, side = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    width = max(span.stop - span.start for span in spans)
    buffers = [torch.empty(len(vectors), width, dtype=vectors.dtype, device=device) for _ in range(2)]
    copied, used = ([torch.cuda.Event() for _ in range(2)] for _ in range(2))

    def fetch(number: int) -> None:
        span, which = spans[number], number % 2
        side.wait_event(used[which])
        with torch.cuda.stream(side):
            # One by one: only contiguous memory is copied directly.
            for target, vector in zip(buffers[which], vectors, strict=True):
                target[: span.stop - span.start].copy_(vector[span], non_blocking=True)
        copied[which].record(side)

    for event in used:
        event.record(here)
    fetch(0)
    for number, span in enumerate(spans):
        if number + 1 < len(spans):
            fetch(number + 1)
        here.wait_event(copied[number % 2])
        yield span, buffers[number % 2][:, : span.stop - span.start]
        used[number % 2].record(here)
