"""Timing of measurements, each isolated so that a failure does not affect the others."""

import gc
import math
import platform
import re
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import eigentrace
from eigentrace.errors import EigentraceError, EigentraceWarning
from harness.models import Batch, Entry

Cell = dict[str, Any]
Result = TypeVar("Result")
Precision = Literal["fp32", "bf16"]

# Calls are timed in groups of at least this many seconds, so that the GPU is not synchronised after each call.
_LEAST_REPEAT = 0.05
# Untimed calls: an engine plans on the first and compiles on the second.
_WARM_UP = 3
_MOST_REPEATS = 1000
_REASON_LENGTH, _REASON_END = 300, 100
_PROFILE_LENGTH = 12


@dataclass(frozen=True)
class Timing:
    """The result of timing a repeated call."""

    seconds: float
    """Median seconds of one call."""
    warm_up: float
    """Additional seconds of the first calls, for choosing an engine, planning and compiling."""
    repeats: int
    peak: int | None
    """Peak GPU memory in bytes; None on a CPU."""

    @property
    def numbers(self) -> Cell:
        """The numbers to record in a cell."""
        return {
            "milliseconds": 1000 * self.seconds,
            "warm_up_seconds": self.warm_up,
            "repeats": self.repeats,
            "peak": self.peak,
        }


def timed(step: Callable[[], Any], run: "Run", *, compiles: bool = False, warm_up: int = _WARM_UP) -> Timing:
    """Warm up, repeat a step for about the seconds per number of the run, and take the median.

    If the step should be compiled, a warning that it was not is raised as an error, so that an eager number is never
    recorded as a compiled one.
    """
    with warnings.catch_warnings():
        if compiles:
            warnings.simplefilter("error", EigentraceWarning)
            torch.compiler.reset()  # graphs compiled for other models count towards a limit
        release(run.device)
        warm = [clocked(step, run.device) for _ in range(warm_up)]
        if run.on_gpu:
            torch.cuda.reset_peak_memory_stats(run.device)  # exclude the memory used for compiling
        together = max(1, math.ceil(min(_LEAST_REPEAT, run.seconds) / max(warm[-1], 1e-6)))
        repeats: list[float] = []
        start = time.perf_counter()
        while not repeats or (time.perf_counter() - start < run.seconds and len(repeats) < _MOST_REPEATS):
            repeats.append(clocked(partial(several, step, together), run.device) / together)
        peak = torch.cuda.max_memory_allocated(run.device) if run.on_gpu else None
        if run.profile:
            print("\n".join(profiled(step, run.device)), flush=True)
    seconds = statistics.median(repeats)
    return Timing(seconds, max(0.0, sum(warm) - len(warm) * seconds), len(repeats), peak)


def several(step: Callable[[], Any], count: int) -> None:
    """Call a step several times, discarding its results."""
    for _ in range(count):
        step()


def profiled(step: Callable[[], Any], device: torch.device) -> list[str]:
    """Profile one call; return lines with the slowest operations, or on a GPU kernels."""
    on_gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if on_gpu else [])) as found:
        clocked(step, device)
    which = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    # On a GPU, a kernel's time is also attributed to the operation that launched it, so only kernels are counted.
    kind = DeviceType.CUDA if on_gpu else DeviceType.CPU
    spent = [(getattr(event, which), event) for event in found.key_averages() if event.device_type == kind]
    total = sum(took for took, _ in spent) or 1.0
    return [
        f"    {took / 1000:9.2f} ms {took / total:6.1%} {event.count:6} × {event.key[:90]}"
        for took, event in sorted(spent, key=lambda pair: pair[0], reverse=True)[:_PROFILE_LENGTH]
    ]


def clocked(work: Callable[[], Any], device: torch.device) -> float:
    """Return the seconds that a call takes, including the device's queue."""
    return with_seconds(work, device)[1]


def with_seconds(work: Callable[[], Result], device: torch.device) -> tuple[Result, float]:
    """Return the result of a call and the seconds that it takes, including the device's queue."""
    synchronize(device)
    start = time.perf_counter()
    result = work()
    synchronize(device)
    return result, time.perf_counter() - start


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def release(device: torch.device) -> None:
    """Collect garbage, empty the memory cache, and reset the peak memory statistics."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def attempt(work: Callable[[], Cell]) -> Cell:
    """Run a measurement; return its result, or the reason of its failure, so that later ones still run."""
    try:
        return work()
    except Exception as error:  # torch, its compiler and its drivers may raise any exception
        return {"failed": reason(error)}


def reason(error: BaseException) -> str:
    """Format an error as one line, without paths of this machine.

    Messages of eigentrace are kept in full. Others, which may quote a whole program, are shortened in the middle.
    """
    text = " ".join(f"{type(error).__name__}: {error}".split())
    text = re.sub(r"(?<![\w.])/(?:[\w.+@-]+/)+", "", text)
    if len(text) <= _REASON_LENGTH or isinstance(error, EigentraceError):
        return text
    return text[: _REASON_LENGTH - _REASON_END - 1] + "…" + text[-_REASON_END:]


def described(device: torch.device) -> str:
    """Return the name of the computing device; nothing that identifies the machine."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    kind = platform.processor() or platform.machine()
    threads = torch.get_num_threads()
    return f"CPU ({kind}), {threads} thread" + ("s" if threads > 1 else "")


@dataclass(frozen=True)
class Run:
    """One run of a benchmark: device, date, command and settings."""

    device: torch.device
    small: bool
    seconds: float
    """Seconds to spend on each number."""
    info: dict[str, str]
    """Date, versions and command."""
    profile: bool = False
    """Print a profile of each measurement."""
    replace: bool = False
    """Drop numbers that were measured with other settings."""

    @property
    def on_gpu(self) -> bool:
        """Whether the device is a GPU, whose memory is measured."""
        return self.device.type == "cuda"

    @property
    def precision(self) -> Precision:
        """The dtype of training and of stored directions on this device."""
        return "bf16" if self.on_gpu else "fp32"


@dataclass(frozen=True)
class Subject:
    """A model on the device, its task and a batch of its examples."""

    entry: Entry
    model: nn.Module
    task: eigentrace.Task
    batch: Batch

    @staticmethod
    def of(entry: Entry, device: torch.device, size: int, *, channels_last: bool = False) -> "Subject":
        """Build a model and draw a batch."""
        model, batch = entry.model(device), entry.examples(size, device)
        if channels_last:
            batch = tuple(t.to(memory_format=torch.channels_last) if t.ndim == 4 else t for t in batch)
        return Subject(entry, model, entry.task(model), batch)

    @property
    def size(self) -> int:
        """B."""
        return len(self.batch[-1])

    @property
    def description(self) -> dict[str, Any]:
        """The entry of the model in a record."""
        return {"title": self.entry.title, "parameters": self.task.layout.numel}

    def part(self, size: int) -> Batch:
        """Return the first examples as a batch."""
        return tuple(t[:size] for t in self.batch)


def random_unit(like: Tensor, seed: int = 2) -> Tensor:  # (P,) -> (P,)
    """Draw a random vector of norm 1."""
    generator = torch.Generator(like.device).manual_seed(seed)
    v = torch.randn(like.shape, generator=generator, dtype=like.dtype, device=like.device)
    return v / v.norm()
