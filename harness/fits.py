"""Measure the time of a complete fit and of its parts."""

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal
from unittest.mock import patch

import torch

import eigentrace as et
from eigentrace.errors import EigentraceWarning
from eigentrace.methods import arnoldi
from harness.measure import Cell, Run, Subject, clocked, release
from harness.models import Batch, Entry

Kind = Literal["hessian", "gauss-newton"]

FIT = et.Arnoldi(steps=200, keep=50, sample=512, precision="bf16", basis=et.Basis(dtype="bf16", max_vectors=100))
"""The paper's settings for ViT-L/32, with restarts and half the memory for the basis."""
FIT_BATCH = 256
"""Batch size of a fit: twice that of a single product, which takes less than twice the time."""
MANY_EXAMPLES = 1_281_167
"""Examples that a fit with new ones at every step draws from: as many as ImageNet has."""


@dataclass(frozen=True)
class ByRow:
    """A dataset whose examples are made when they are read, each from its row number, so that none are stored."""

    entry: Entry
    device: torch.device
    count: int = MANY_EXAMPLES

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, row: int) -> Batch:
        if not 0 <= row < self.count:
            raise IndexError(row)
        return tuple(t[0] for t in self.entry.examples(1, self.device, seed=int(row)))


def fit(subject: Subject, method: et.Arnoldi, run: Run, size: int | None = None) -> Cell:
    """Measure the time of a fit, and of its parts.

    Args:
        subject: The model.
        method: The fit: on as many examples as it samples, or with `spread` on new ones at every step.
        run: The run.
        size: Number of examples multiplied together; `FIT_BATCH` if not given, and fewer with a small model.
    """
    size = size or (subject.size if run.small else FIT_BATCH)
    data = _examples(subject, method, run, size)
    watch = Stopwatch(run.device)
    release(run.device)
    with warnings.catch_warnings(record=True) as caught, watch.on_fits():
        warnings.simplefilter("always")
        total = clocked(lambda: method.fit(subject.task, data), run.device)
    settings = {name: getattr(method, name) for name in ("steps", "keep", "sample", "precision", "compile")}
    settings["batch"] = size
    said = sorted({str(w.message) for w in caught if issubclass(w.category, EigentraceWarning)})
    return {"seconds": total, "parts": watch.parts(), "peak": _peak(run), "settings": settings, "warnings": said}


def _examples(subject: Subject, method: et.Arnoldi, run: Run, size: int) -> et.Data:
    if method.spread:
        return et.Data(ByRow(subject.entry, run.device), batch_size=size)
    examples = subject.entry.examples(method.sample or subject.size, run.device)
    return et.Data.from_batches(list(zip(*(t.split(size) for t in examples), strict=True)))


class Stopwatch:
    """Accumulates the time of the parts of a fit."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.calls: dict[str, list[float]] = {}

    def around(self, name: str, function: Callable) -> Callable:
        """Wrap a function so that its calls are timed."""

        def timed_function(*args: Any, **options: Any) -> Any:
            results: list[Any] = []
            took = clocked(lambda: results.append(function(*args, **options)), self.device)
            self.calls.setdefault(name, []).append(took)
            return results[0]

        return timed_function

    def on_fits(self) -> AbstractContextManager:
        """Time the parts of `Arnoldi.fit` inside the context."""

        def iteration(iterate: Callable) -> Callable:
            return self.around(
                "iteration", lambda matvec, *args, **options: iterate(self.around("products", matvec), *args, **options)
            )

        return patch.multiple(
            arnoldi,
            ready=self.around("checks", arnoldi.ready),
            check_curvature=self.around("checks", arnoldi.check_curvature),
            arnoldi=iteration(arnoldi.arnoldi),
            lanczos=iteration(arnoldi.lanczos),
            top_eigenpairs=self.around("eigenvectors", arnoldi.top_eigenpairs),
            gradient_moments=self.around("calibration", arnoldi.gradient_moments),
        )

    def parts(self) -> dict[str, float]:
        """Return the seconds of each part; the first product, which may include compiling, separately."""
        spent = {name: sum(calls) for name, calls in self.calls.items()}
        first, every = self.calls["products"][0], spent["products"]
        orthogonalising = spent.pop("iteration") - every
        return spent | {"first product": first, "products": every - first, "orthogonalisation": orthogonalising}


def _peak(run: Run) -> int | None:
    return torch.cuda.max_memory_allocated(run.device) if run.on_gpu else None
