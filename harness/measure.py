"""How everything is timed, and how one measurement that fails leaves the others standing."""

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

# Calls timed together last at least this long, so that launching a kernel is not waited for call by call.
_LEAST_REPEAT = 0.05
# Calls before any is timed: an engine plans on the first, and compiles on the second.
_WARM_UP = 3
_MOST_REPEATS = 1000
_REASON_LENGTH, _REASON_END = 300, 100
_PROFILE_LENGTH = 12


@dataclass(frozen=True)
class Timing:
    """One piece of work, done again and again."""

    seconds: float
    """Median of one call."""
    warm_up: float
    """What the first calls took beyond that: choosing, planning, compiling."""
    repeats: int
    peak: int | None
    """Most bytes of GPU memory in use at a time; None on a CPU."""

    @property
    def numbers(self) -> Cell:
        """What a cell says about it."""
        return {
            "milliseconds": 1000 * self.seconds,
            "warm_up_seconds": self.warm_up,
            "repeats": self.repeats,
            "peak": self.peak,
        }


def timed(step: Callable[[], Any], run: "Run", *, compiles: bool = False, warm_up: int = _WARM_UP) -> Timing:
    """Warm up, then repeat for about as many seconds as the run allows and take the median.

    Where the step should be compiled, a warning that it is not counts as a failure: an eager number must not stand for
    a compiled one.
    """
    with warnings.catch_warnings():
        if compiles:
            warnings.simplefilter("error", EigentraceWarning)
            torch.compiler.reset()  # what was compiled for other models counts against a limit
        release(run.device)
        warm = [clocked(step, run.device) for _ in range(warm_up)]
        if run.on_gpu:
            torch.cuda.reset_peak_memory_stats(run.device)  # compiling takes memory of its own
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
    """Call a step several times, keeping nothing of what it returns."""
    for _ in range(count):
        step()


def profiled(step: Callable[[], Any], device: torch.device) -> list[str]:
    """Return the operations, or on a GPU the kernels, that one call spends most of its time in, as lines."""
    on_gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if on_gpu else [])) as found:
        clocked(step, device)
    which = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    # On a GPU the time of a kernel is also that of the operation which launched it: only kernels are counted.
    kind = DeviceType.CUDA if on_gpu else DeviceType.CPU
    spent = [(getattr(event, which), event) for event in found.key_averages() if event.device_type == kind]
    total = sum(took for took, _ in spent) or 1.0
    return [
        f"    {took / 1000:9.2f} ms {took / total:6.1%} {event.count:6} × {event.key[:90]}"
        for took, event in sorted(spent, key=lambda pair: pair[0], reverse=True)[:_PROFILE_LENGTH]
    ]


def clocked(work: Callable[[], Any], device: torch.device) -> float:
    """Return the seconds that some work takes, the device's queue included."""
    return with_seconds(work, device)[1]


def with_seconds(work: Callable[[], Result], device: torch.device) -> tuple[Result, float]:
    """Return what some work gives, and the seconds that it takes, the device's queue included."""
    synchronize(device)
    start = time.perf_counter()
    result = work()
    synchronize(device)
    return result, time.perf_counter() - start


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all it was told to."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def release(device: torch.device) -> None:
    """Give back what earlier work left, garbage and cached memory, and count peak memory anew."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def attempt(work: Callable[[], Cell]) -> Cell:
    """Return what a measurement gives, or why it failed: the ones after it must not be lost."""
    try:
        return work()
    except Exception as error:  # torch, its compiler and its drivers raise nearly everything
        return {"failed": reason(error)}


def reason(error: BaseException) -> str:
    """Write an error as one line, without the folders of this machine.

    Ours end with what to do and stay whole. Of others, which may quote a whole program, the middle is left out.
    """
    text = " ".join(f"{type(error).__name__}: {error}".split())
    text = re.sub(r"(?<![\w.])/(?:[\w.+@-]+/)+", "", text)
    if len(text) <= _REASON_LENGTH or isinstance(error, EigentraceError):
        return text
    return text[: _REASON_LENGTH - _REASON_END - 1] + "…" + text[-_REASON_END:]


def described(device: torch.device) -> str:
    """Name the device that computes, never the machine around it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    kind = platform.processor() or platform.machine()
    threads = torch.get_num_threads()
    return f"CPU ({kind}), {threads} thread" + ("s" if threads > 1 else "")


@dataclass(frozen=True)
class Run:
    """One start of a benchmark: where, when, and by which command."""

    device: torch.device
    small: bool
    seconds: float
    """To spend on each number."""
    info: dict[str, str]
    """When and by which versions and command."""
    profile: bool = False
    """Print what takes the time of each measurement."""
    replace: bool = False
    """Drop numbers of other settings that are in the way."""

    @property
    def on_gpu(self) -> bool:
        """Tell whether there is a GPU's memory to measure."""
        return self.device.type == "cuda"

    @property
    def precision(self) -> Precision:
        """What models are trained and rows are stored in on such a device."""
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
        """What a record says about the model."""
        return {"title": self.entry.title, "parameters": self.task.layout.numel}

    def part(self, size: int) -> Batch:
        """Return a batch of the first examples."""
        return tuple(t[:size] for t in self.batch)


def random_unit(like: Tensor, seed: int = 2) -> Tensor:  # (P,) -> (P,)
    """Draw a vector of length one."""
    generator = torch.Generator(like.device).manual_seed(seed)
    v = torch.randn(like.shape, generator=generator, dtype=like.dtype, device=like.device)
    return v / v.norm()
