"""Measure time, memory and quality of every method that can be imported, on the same trained model and data.

python -m bench.peers                                    # everything; `make peers` installs the peers first
python -m bench.peers --problems digits --repeats 2      # the better of two runs
python -m bench.peers --problems mnist-mlp --retrain     # the ground truth of the counterfactuals, best on a GPU
python -m bench.peers --small                            # 200 examples each, to see that all runs
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import torch

from bench.peers import truth
from bench.peers.method import METHODS, Entry, is_asked
from bench.peers.page import render
from bench.peers.problem import Problem, make_problem
from bench.peers.problem import described as agreement
from bench.peers.problems import EMBEDDED, PROBLEMS, SMALL
from harness.command import carried_out, choices, positive, result_options, say, start
from harness.measure import Cell, Run, attempt, described, reason
from harness.record import Recorder, read

NOT_INSTALLED = "not installed"


def main(argv: Sequence[str]) -> int:
    """Run the command line; return the number of methods that failed."""
    settings = _parser().parse_args(argv)
    torch.set_num_threads(1)

    def measure(path: Path) -> int:
        run, failures = start("bench.peers", settings, argv), 0
        names = settings.problems or [name for name in PROBLEMS if settings.data or name in EMBEDDED]
        prepared = []
        for name in names:
            try:
                ready = _prepared(name, run, path, settings)
            except Exception as error:  # missing data of one problem must not stop the others
                say(f"{name}: {reason(error)}")
                failures += 1
                continue
            prepared += [ready] if ready else []
        return failures + _measure(prepared, path, settings)

    return carried_out("peers", settings, measure, render)


def _prepared(name: str, run: Run, path: Path, settings: argparse.Namespace) -> tuple[Problem, Recorder] | None:
    """Prepare a problem and its record; return None if this fails, or if only the ground truth was requested."""
    spec = (SMALL if settings.small else PROBLEMS)[name]
    cache = _cache(settings)
    problem = make_problem(spec, settings.data, cache, run.device)
    at = truth.place(cache, name)
    if settings.retrain:
        if problem.examples.num_queries and truth.read_truth(at, problem) is None:
            truth.make_truth(problem, cache, small=settings.small)
        return None
    facts = {"title": spec.title, "parameters": problem.num_parameters, "settings": spec.settings}
    return problem, Recorder(run, path, name, facts | {"facts": _facts(problem)})


def _cache(settings: argparse.Namespace) -> Path:
    folder: Path = settings.cache
    return folder / "small" if settings.small else folder


def _measure(prepared: Sequence[tuple[Problem, Recorder]], path: Path, settings: argparse.Namespace) -> int:
    """Run the chosen methods on every problem, optionally in parallel; return the number of failures."""
    entries = [METHODS[method] for method in settings.methods]
    work = [(*ready, entry) for ready in prepared for entry in entries if is_asked(entry, ready[0])]
    if settings.jobs > 1:
        work.sort(key=lambda item: entries.index(item[2]))  # in the order of the command line, on every problem
    failures = 0
    with ThreadPoolExecutor(settings.jobs) as pool:
        running = {
            pool.submit(_cell, entry, problem, _cache(settings), settings): i
            for i, (problem, _, entry) in enumerate(work)
        }
        for done in as_completed(running):
            problem, recorder, entry = work[running[done]]
            cell, name = done.result(), problem.spec.name
            say(f"{name:18} {entry.title:45} {_line(cell)}")
            if "missing" in cell and _measured_before(path, recorder.run, name, entry):
                continue
            recorder.add(entry.name, cell)
            failures += "failed" in cell
    return failures


def _cell(entry: Entry, problem: Problem, cache: Path, settings: argparse.Namespace) -> Cell:
    """Run one method in a separate process, repeatedly, and keep the smallest of each time."""
    if not entry.is_installed:
        return {"missing": NOT_INSTALLED}
    cells = [attempt(lambda: _alone(entry, problem, cache, settings)) for _ in range(settings.repeats)]
    failed = [cell for cell in cells if "failed" in cell]
    if failed:
        return failed[0]
    best = dict(cells[0])
    for key in ("fit", "score", "fit_wall", "score_wall", "peak", "peak_growth", "load"):
        values = [cell[key] for cell in cells if key in cell]
        if values:
            best[key] = min(values)
    return best | {"repeats": settings.repeats}


def _alone(entry: Entry, problem: Problem, cache: Path, settings: argparse.Namespace) -> Cell:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "cell.json"
        command = [sys.executable, "-m", "bench.peers.worker", "--problem", problem.spec.name, "--method", entry.name]
        command += ["--device", str(problem.device), "--cache", str(cache), "--out", str(out)]
        command += ["--truth", str(truth.place(cache, problem.spec.name))]
        command += ["--networks", str(settings.networks)] if settings.networks else []
        command += ["--small"] if settings.small else []
        command += ["--data", str(settings.data)] if settings.data else []
        threads = {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
        try:
            done = subprocess.run(
                command, env=os.environ | threads, capture_output=True, text=True, timeout=settings.timeout, check=False
            )
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"took longer than {settings.timeout:g} seconds") from None
        if not out.exists():
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise RuntimeError(f"the process ended with {done.returncode}: {last}")
        return json.loads(out.read_text(encoding="utf-8")) | {"load": _busy()}


def _busy() -> float:
    """Return the load average of the last minute, if the system provides it."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else 0.0


def _facts(problem: Problem) -> Cell:
    wrong = problem.examples.is_wrong
    facts: Cell = {"num_train": problem.num_train, "num_queries": problem.examples.num_queries}
    return facts | ({} if wrong is None else {"num_wrong": int(wrong.sum())}) | agreement(problem)


def _measured_before(path: Path, run: Run, problem: str, entry: Entry) -> bool:
    """Return whether an earlier run had the package: its numbers are then kept although it is missing now."""
    record = read(path).get(described(run.device), {}).get(problem)
    return record is not None and "missing" not in record["cells"].get(entry.name, {"missing": ""})


def _line(cell: Cell) -> str:
    if "missing" in cell:
        return cell["missing"]
    if "failed" in cell:
        return f"failed: {cell['failed']}"
    quality = "".join(f", {key.upper()} {cell[key]:.1f}" for key in ("auc", "ap", "lds") if key in cell)
    return f"fit {cell['fit']:.2f} s, score {cell['score']:.2f} s, {cell['peak'] / 2**20:.0f} MiB{quality}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.peers", description="Side by side with the peers.")
    every_problem, every_method = choices(*PROBLEMS), choices(*METHODS)
    parser.add_argument(
        "--problems", type=every_problem, help=f"{','.join(PROBLEMS)}; all there is data for if left out"
    )
    parser.add_argument("--methods", type=every_method, default=list(METHODS), help=",".join(METHODS))
    parser.add_argument("--small", action="store_true", help="200 examples and a few steps, to see that all runs")
    parser.add_argument("--repeats", type=positive, default=1, help="number of runs of each method; the fastest counts")
    parser.add_argument(
        "--jobs",
        type=positive,
        default=1,
        help="number of methods to run in parallel, which distorts seconds but not scores",
    )
    parser.add_argument(
        "--networks", type=positive, help="number of networks to average over instead of all; 1 for no averaging"
    )
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds that a method may take")
    parser.add_argument("--device", type=torch.device, help="cuda where there is one, else cpu")
    parser.add_argument("--data", type=Path, help="folder of the data that is not embedded")
    parser.add_argument("--cache", type=Path, default=Path("runs/peers"), help="keeps trained networks")
    parser.add_argument("--retrain", action="store_true", help="only train the ground truth of the counterfactuals")
    result_options(parser)
    parser.set_defaults(seconds=0.0, profile=False)
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
