"""Run one method on one problem in a separate process; write time, memory and quality as JSON.

Seconds are CPU time, user and system, of this process and its children.
"""

import argparse
import json
import resource
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.peers.method import METHODS, Entry, Fit, Fitter
from bench.peers.problem import Problem, make_problem
from bench.peers.problems import PROBLEMS, SMALL
from bench.peers.truth import fidelity, read_truth
from eigentrace.evaluate import retrieval
from harness.measure import Cell, attempt, synchronize

_STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class Spent:
    """The result of a call, and its CPU time."""

    result: Any
    cpu: float
    wall: float


def spent(work: Callable[[], Any], device: torch.device) -> Spent:
    """Call a function and measure its CPU time."""
    cpu, wall = _cpu_seconds(), time.perf_counter()
    result = work()
    synchronize(device)
    return Spent(result, _cpu_seconds() - cpu, time.perf_counter() - wall)


def _cpu_seconds() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


class Memory:
    """Peak memory since creation: of the GPU if there is one, else resident memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            torch.cuda.init()  # statistics can be reset only after this
            torch.cuda.reset_peak_memory_stats(device)
        else:
            _forget_peak()
            self.before = _resident("VmRSS:")

    def numbers(self) -> Cell:
        """Return the peak, and its increase since creation."""
        if self.device.type == "cuda":
            return {"peak": torch.cuda.max_memory_allocated(self.device)}
        peak = _resident("VmHWM:")
        return {"peak": peak, "peak_growth": max(0, peak - self.before)}


def _forget_peak() -> None:
    """Reset the peak memory of this process, if the system allows it."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return  # then the peak includes the start of the process


def _resident(name: str) -> int:
    if _STATUS.exists():
        for line in _STATUS.read_text(encoding="ascii").splitlines():
            if line.startswith(name):
                return 1024 * int(line.split()[1])
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else 1024 * largest


def measured(entry: Entry, problem: Problem, truth: Any, most: int | None = None) -> Cell:
    """Fit a method, score with each of its settings, and return the best quality, for one and for several networks."""
    fitter = entry.fitter()
    cell: Cell = {"version": entry.version}
    networks = 1
    if problem.examples.num_queries:
        cell |= _best(_on(entry, fitter, problem.at(0), truth), "lds")
        problem = replace(problem, states=problem.states[:most])
        networks = len(problem.states)
    else:
        cell |= _best(_on(entry, fitter, problem, truth), "ap")
    if networks > 1:
        best = _best(_averaged(entry, fitter, problem, truth), "lds")
        cell["ensemble"] = {"models": networks} | {key: best[key] for key in ("lds", "setting", "fit") if key in best}
    return cell


def _on(entry: Entry, fitter: Fitter, problem: Problem, truth: Any) -> Cell:
    """Measure on the first network."""
    with tempfile.TemporaryDirectory() as folder:
        memory = Memory(problem.device)
        fit = spent(lambda: fitter(problem, Path(folder)), problem.device)
        cell: Cell = {"fit": fit.cpu, "fit_wall": fit.wall, "tried": {}}
        for number, setting in enumerate(fit.result.settings):
            score = spent(lambda name=setting: _scores(fit.result, name, problem), problem.device)  # type: ignore[misc]
            if number == 0:
                cell |= {"score": score.cpu, "score_wall": score.wall} | memory.numbers()
            cell["tried"][setting] = quality(score.result, problem, truth)
    return cell


def _averaged(entry: Entry, fitter: Fitter, problem: Problem, truth: Any) -> Cell:
    """Measure scores over all networks of the problem, averaged by the method itself if it supports this."""
    with tempfile.TemporaryDirectory() as folder:
        parts = [problem] if entry.ensembles else [problem.at(i) for i in range(len(problem.states))]
        total: dict[str, Tensor] = {}
        start = _cpu_seconds()
        for number, part in enumerate(parts):
            place = Path(folder) / str(number)
            place.mkdir()
            fit = fitter(part, place)
            for setting in _alike(fit, total):
                name = fit.settings[setting]
                scores = fit.cross_scores(name).cpu() / len(parts)
                key = list(total)[setting] if number else name
                total[key] = total[key] + scores if number else scores
        seconds = _cpu_seconds() - start
    return {"fit": seconds, "tried": {name: quality(scores, problem, truth) for name, scores in total.items()}}


def _alike(fit: Fit, total: dict[str, Tensor]) -> range:
    """Match settings by position, since their names may contain numbers that differ between networks."""
    return range(min(len(fit.settings), len(total) or len(fit.settings)))


def _scores(fit: Fit, setting: str, problem: Problem) -> Tensor:
    return fit.cross_scores(setting) if problem.examples.num_queries else fit.self_scores(setting)


def quality(scores: Tensor, problem: Problem, truth: Any) -> Cell:
    """Compare scores with the ground truth."""
    scores = scores.detach().cpu().double()
    wrong = problem.examples.is_wrong
    expected = (problem.examples.num_queries, problem.num_train) if wrong is None else (problem.num_train,)
    if tuple(scores.shape) != expected:
        return {"failed": f"scores have shape {tuple(scores.shape)}, expected {expected}"}
    if not scores.isfinite().all():
        return {"failed": f"{int((~scores.isfinite()).sum())} of {scores.numel()} scores are not finite"}
    if wrong is None:
        return {} if truth is None else fidelity(scores, truth)
    found = retrieval(scores, wrong)
    return {"auc": 100 * found.auc, "ap": 100 * found.ap}


def _best(cell: Cell, key: str) -> Cell:
    """Add the numbers of the best setting to the cell; mark it as failed if every setting failed."""
    tried = cell["tried"]
    working = {name: found for name, found in tried.items() if "failed" not in found}
    if not working:
        return cell | {"failed": next(iter(tried.values()))["failed"]}
    best = max(working, key=lambda name: working[name].get(key, 0.0))
    return cell | working[best] | {"setting": best}


def main(argv: Sequence[str]) -> int:
    """Measure the method and problem of the command line."""
    parser = argparse.ArgumentParser(description="Measure one method on one problem.")
    parser.add_argument("--problem", required=True, choices=PROBLEMS)
    parser.add_argument("--method", required=True, choices=METHODS)
    parser.add_argument("--networks", type=int)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--device", type=torch.device, required=True)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--truth", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    settings = parser.parse_args(argv)
    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = False  # memorised examples have losses of 1e-6, which need full float32 precision
    warnings.simplefilter("ignore")  # ignore warnings of peers

    def work() -> Cell:
        spec = (SMALL if settings.small else PROBLEMS)[settings.problem]
        problem = make_problem(spec, settings.data, settings.cache, settings.device)
        truth = read_truth(settings.truth, problem) if problem.examples.num_queries else None
        return measured(METHODS[settings.method], problem, truth, settings.networks)

    settings.out.write_text(json.dumps(attempt(work)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
