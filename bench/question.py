"""Measure one explanation from a large run: its time beyond the search, and its memory."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from bench.serve import FEATURES, write_scores
from eigentrace.store.folder import Folder
from harness.command import say
from harness.measure import Cell, Run, attempt
from harness.record import Notes, Record, Recorder, shown, table

QUESTIONS: dict[str, dict[str, Any]] = {
    "any example": {},
    "the same label": {"same_label": True},
    "no duplicates": {"exclude": "duplicates"},
}
_GOAL = "50 ms beside the search itself, and memory that does not grow with the run"
# Measured in a separate process, so that nothing else takes memory; memory-mapped files are not counted.
_CHILD = """
import json, statistics, sys, threading, time
from importlib import import_module
from importlib.util import find_spec
import numpy as np, torch
import eigentrace as et
found = find_spec("eigentrace.numeric")
search = import_module("eigentrace.numeric.top_k" if found else "eigentrace.search").search

def held():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))

class Watch(threading.Thread):
    def __init__(self):
        super().__init__(daemon=True)
        self.most = self.first = held()
        self.is_on = True
    def run(self):
        while self.is_on:
            self.most = max(self.most, held())
            time.sleep(0.0005)

def plain():
    run = et.open_run(path)
    asked = run.features_of(np.array([row])).double() * run.weights
    return search(run.feature_chunks(), asked.float(), 10)

def question():
    return et.open_run(path).explain(row, 10, **options)

path, options, what = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
row = 4321
watch = Watch()
watch.start()
(plain if what == "search" else question)()
watch.is_on = False
watch.join()
spent = {plain: [], question: []}
for _ in range(7 if what == "both" else 0):
    for work in spent:
        began = time.perf_counter()
        work()
        spent[work].append(time.perf_counter() - began)
seconds = {work.__name__: min(times, default=None) for work, times in spent.items()}
if what == "both":
    seconds["beside"] = statistics.median(q - p for q, p in zip(spent[question], spent[plain]))
print(json.dumps({"peak": watch.most - watch.first} | seconds))
"""


def ask_runs(run: Run, path: Path, settings: argparse.Namespace) -> int:
    """Explain a row of runs of several sizes; return the number of failures."""
    failures = 0
    source = Path(__file__).parent.parent if settings.checkout is None else settings.checkout.resolve()
    for rows, features in settings.rows:
        facts = {"title": f"{rows:,} × {features:,}", "settings": {"rows": rows, "features": features}}
        recorder = Recorder(run, path, f"rows/{rows}" + ("" if features == FEATURES else f"x{features}"), facts)
        with tempfile.TemporaryDirectory(prefix="bench-explain-", dir=settings.cache) as place:
            folder = Folder(Path(place) / "run")
            ids = pa.array(f"id-{row:09d}" for row in range(rows))
            write_scores(folder, rows, pa.table({"id": ids}), Path(place) / "none.parquet", features)
            for name, options in QUESTIONS.items():
                cell = recorder.add(f"{settings.called}/{name}", attempt(partial(_asked, folder.path, options, source)))
                failures += "failed" in cell
                say(f"{facts['title']:>18}, {name:16} {cell.get('failed') or _line(cell)}")
    return failures


def _asked(path: Path, options: dict[str, Any], source: Path) -> Cell:
    both, search = (_child(path, options, what, source) for what in ("both", "search"))
    peaks = {"peak": both["peak"], "search_peak": search["peak"]}
    return {"seconds": both["question"], "search": both["plain"], "beside": both["beside"]} | peaks


def _child(path: Path, options: dict[str, Any], what: str, source: Path) -> dict[str, float]:
    command = [sys.executable, "-c", _CHILD, str(path), json.dumps(options), what]
    environment = os.environ | {"PYTHONPATH": str(source / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "the process failed")
    return json.loads(done.stdout)


def _line(cell: Cell) -> str:
    whole, beside = 1e3 * cell["seconds"], 1e3 * cell["beside"]
    return f"{whole:,.0f} ms, {beside:,.0f} beside the search; {cell['peak'] / 2**20:,.0f} MiB"


def question_tables(problems: dict[str, Record], notes: Notes) -> list[str]:
    """Return the table of time and memory, by size of the run."""
    if not problems:
        return []
    lines = [
        "",
        "### One question to a large run",
        "",
        "One row of a run of drawn numbers, rows × features, with ids and classes, asked by stored features "
        "for its 10 strongest on either side (`explain(row, 10)`, the run opened anew each time), in a process of its "
        "own. The search is the same product and top 10 over the same features, without anything around it. "
        "Milliseconds are the least of seven, the two in turns, with the files in the system's cache; what the "
        "question takes beside the search is the median difference of the turns. Memory is the most that the process "
        f"held beyond what it began with, files that it maps not counted. Goal: {_GOAL}.",
        "",
    ]
    headings = [
        "rows × features",
        "version",
        "restricted to",
        "question, ms",
        "search, ms",
        "beside it, ms",
        "MiB",
        "search, MiB",
    ]
    rows = []
    for record in problems.values():
        for name, cell in record["cells"].items():
            called, _, what = name.partition("/")
            done = "failed" not in cell
            many = {"ms": 1e3 * cell["seconds"], "search": 1e3 * cell["search"]} if done else {}
            many |= {"beside": 1e3 * cell["beside"]} if done else {}
            many |= {"mib": cell["peak"] / 2**20, "search_mib": cell["search_peak"] / 2**20} if done else {}
            keys = ("ms", "search", "beside", "mib", "search_mib")
            rows.append([record["title"], called, what, *(shown(cell | many, key, ",.0f", notes) for key in keys)])
    return [*lines, *table(headings, rows)]
