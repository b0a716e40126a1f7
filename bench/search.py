"""Measure exact search of stored features: this package, `torch.topk` per chunk, and FAISS if it is installed.

python -m bench.search                    # top 100 of 100 queries: 10M × 32 and 1M × 128 on a CPU, 100M × 32 on a GPU
python -m bench.search --rows 5000000 --features 64 --queries 10 --k 20
python -m bench.search --small            # seconds, to see that all runs
"""

import argparse
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from bench.page import write_page
from eigentrace.numeric.top_k import search
from harness.command import carried_out, positive, result_options, say, start
from harness.measure import Cell, Run, attempt, release, timed
from harness.record import Notes, Record, Recorder, memory, shown, table

# Number of rows that are drawn and read at a time.
_CHUNK, _CHUNK_ON_GPU = 65_536, 2**20
SIZES = {"cpu": ((10_000_000, 32), (1_000_000, 128)), "cuda": ((100_000_000, 32),)}
SMALL_SIZES = ((200_000, 32), (50_000, 128))
WAYS = {
    "search/both": "`search`, both sides",
    "search/highest": "`search`, highest only",
    "search/streamed": "`search`, both sides, features in main memory",
    "topk": "`torch.topk` of every chunk, highest only",
    "faiss": "FAISS `IndexFlatIP` as it comes, highest only",
    "faiss/blas": "FAISS `IndexFlatIP` told to use BLAS, highest only",
}
_FAISS_MISSING = "faiss is not installed: left out (`pip install faiss-cpu`)"

# Scores that differ by rounding may be in a different order at the end of a list.
_LEAST_SAME = 0.999


@dataclass(frozen=True)
class Problem:
    """Features, queries and the number of results."""

    features: Tensor  # (N, K)
    asked: Tensor  # (Q, K)
    k: int

    @staticmethod
    def draw(rows: int, width: int, queries: int, k: int, device: torch.device) -> "Problem":
        """Draw normal numbers chunk by chunk, in float16 on a GPU and float32 on a CPU."""
        generator = torch.Generator(device).manual_seed(0)
        narrow = torch.float32 if device.type == "cpu" else torch.float16
        features = torch.empty(rows, width, dtype=narrow, device=device)
        for part in features.split(_CHUNK):
            part.copy_(torch.randn(part.shape, generator=generator, device=device))
        return Problem(features, torch.randn(queries, width, generator=generator, device=device), k)

    @property
    def num_scores(self) -> int:
        """Number of scores, N × Q."""
        return len(self.features) * len(self.asked)

    def chunks(self, features: Tensor | None = None) -> Iterator[tuple[int, Tensor]]:
        """Yield the features in chunks, as a run does."""
        features = self.features if features is None else features
        size = _CHUNK_ON_GPU if self.asked.is_cuda else _CHUNK
        for first in range(0, len(features), size):
            yield first, features[first : first + size]

    def ours(self, features: Tensor | None = None, *, both: bool) -> Tensor:  # (Q, k)
        """Search with eigentrace."""
        return search(self.chunks(features), self.asked, self.k, both=both).proponents

    def by_topk(self) -> Tensor:  # (Q, k)
        """Merge the top k of every chunk with `torch.topk`."""
        scores = torch.empty(len(self.asked), 0, dtype=self.asked.dtype, device=self.asked.device)
        rows = scores.long()
        for first, part in self.chunks():
            new = self.asked @ part.to(self.asked.dtype).T
            here = torch.arange(first, first + len(part), device=rows.device).expand_as(new)
            scores, rows = torch.cat([scores, new], dim=1), torch.cat([rows, here], dim=1)
            best = scores.topk(min(self.k, scores.shape[1]), dim=1)
            scores, rows = best.values, rows.gather(1, best.indices)
        return rows


def main(argv: Sequence[str]) -> int:
    """Run the command line; return the number of failures, including results that are not the same."""
    settings = _parser().parse_args(argv)

    def measure(path: Path) -> int:
        run = start("bench.search", settings, argv)
        sizes = SMALL_SIZES if settings.small else SIZES[run.device.type]
        if settings.rows or settings.features:
            sizes = ((settings.rows or sizes[0][0], settings.features or sizes[0][1]),)
        return sum(_measure(rows, width, run, path, settings) for rows, width in sizes)

    return carried_out("search", settings, measure, render)


def _measure(rows: int, width: int, run: Run, path: Path, settings: argparse.Namespace) -> int:
    problem = Problem.draw(rows, width, settings.queries, settings.k, run.device)
    facts = {
        "title": f"{rows:,} × {width}",
        "settings": {"queries": settings.queries, "k": settings.k, "type": str(problem.features.dtype).split(".")[1]},
    }
    recorder = Recorder(run, path, f"{rows}x{width}", facts)
    threads = torch.get_num_threads()
    try:
        return sum(_with_threads(problem, recorder, count) for count in ({1, threads} if not run.on_gpu else {threads}))
    finally:
        torch.set_num_threads(threads)


def _with_threads(problem: Problem, recorder: Recorder, threads: int) -> int:
    """Measure every way with a number of threads; return the number of failures."""
    torch.set_num_threads(threads)
    ways: dict[str, Callable[[], Tensor]] = {
        "search/both": partial(problem.ours, both=True),
        "search/highest": partial(problem.ours, both=False),
        "topk": problem.by_topk,
    }
    if recorder.run.on_gpu:
        ways["search/streamed"] = partial(problem.ours, problem.features.cpu(), both=True)
    elif importlib.util.find_spec("faiss") is None:
        say(_FAISS_MISSING)
    else:
        ways |= _faiss_ways(problem, threads)
    expected = problem.ours(both=False)
    failures = 0
    for name, way in ways.items():
        cell = recorder.add(name, attempt(partial(_cell, way, expected, problem, recorder.run)))
        failed = "failed" in cell or cell["same"] < _LEAST_SAME
        text = cell.get("failed") or f"{cell['seconds']:.2f} s, {cell['same']:.2%} of the rows are the same"
        say(f"{recorder.record['title']:>16}  threads: {threads}  {WAYS[name]:52} {text}")
        failures += failed
    return failures


def _faiss_ways(problem: Problem, threads: int) -> dict[str, Callable[[], Tensor]]:
    faiss = importlib.import_module("faiss")
    faiss.omp_set_num_threads(threads)
    index = faiss.IndexFlatIP(problem.features.shape[1])
    index.add(problem.features.numpy())
    usual = faiss.cvar.distance_compute_blas_threshold

    def found(threshold: int) -> Tensor:  # (Q, k)
        faiss.cvar.distance_compute_blas_threshold = threshold
        try:
            return torch.from_numpy(index.search(problem.asked.numpy(), problem.k)[1])
        finally:
            faiss.cvar.distance_compute_blas_threshold = usual

    return {"faiss": partial(found, usual), "faiss/blas": partial(found, 1)}


def _cell(way: Callable[[], Tensor], expected: Tensor, problem: Problem, run: Run) -> Cell:
    load, found = os.getloadavg()[0], []
    timing = timed(lambda: found.append(way()), run, warm_up=1)
    release(run.device)
    return timing.numbers | {
        "seconds": timing.seconds,
        "nanoseconds": 1e9 * timing.seconds / problem.num_scores,
        "same": min(same_rows(rows, expected) for rows in found),
        "load": load,
    }


def same_rows(found: Tensor, expected: Tensor) -> float:  # (Q, k), (Q, k)
    """Return the share of the expected rows that was found, in any order."""
    return float((found[:, :, None] == expected[:, None, :]).any(dim=1).float().mean())


def render(out: Path, small: bool) -> None:
    """Render the tables from the JSON file."""
    about = (
        "The strongest k of all rows for each query; features are drawn from a normal distribution. *Nanoseconds* are "
        "per score, and there are rows times queries of these. *The same* is the part of the rows found by `search` "
        "that this way finds too. *Load* is the machine's load average before the measurement: 0 if nothing else runs."
    )
    write_page(out, "search", "Exact search of stored features", about, _machine, small=small)


def _machine(problems: dict[str, Record]) -> list[str]:
    notes, rows = Notes(), []
    for record in problems.values():
        about = record["settings"]
        for way, title in WAYS.items():
            cell = record["cells"].get(way)
            if cell is None:
                continue
            numbers = (("seconds", ",.3f"), ("nanoseconds", ".3f"), ("same", ".2%"), ("load", ".1f"))
            written = [shown(cell, key, pattern, notes) for key, pattern in numbers]
            facts = [record["title"], about["type"], f"{about['queries']}", f"{about['k']}"]
            rows.append([title, *facts, *written, memory(cell, notes)])
    headings = [
        "way",
        "rows × features",
        "type",
        "queries",
        "k",
        "seconds",
        "nanoseconds",
        "the same",
        "load",
        "GPU, GiB",
    ]
    return ["", *table(headings, rows), *(["", *notes.lines()] if notes.texts else [])]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.search", description="Exact search of stored features.")
    parser.add_argument("--rows", type=positive, help="number of examples; with --features, instead of the usual sizes")
    parser.add_argument("--features", type=positive, help="numbers per example")
    parser.add_argument("--queries", type=positive, default=100, help="queries at a time")
    parser.add_argument("--k", type=positive, default=100, help="number of results")
    parser.add_argument("--small", action="store_true", help="a few rows, to see that all runs")
    parser.add_argument("--seconds", type=float, help="to spend on each number: 3, or 0.5 with --small")
    parser.add_argument("--device", type=torch.device, help="cuda where there is one, else cpu")
    result_options(parser)
    parser.set_defaults(profile=False)
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
