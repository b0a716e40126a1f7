"""Measure the page on a large run: time to the first view, time of every sort and filter, and memory.

python -m bench.serve                     # 1,000,000 examples with texts, over real HTTP
python -m bench.serve --rows 5000000      # more of them
python -m bench.serve --small             # seconds, to see that all runs
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from bench.page import write_page
from eigentrace.store import Folder
from eigentrace.store.write import write_table
from harness.command import carried_out, positive, result_options, say, start
from harness.measure import Cell, Run, attempt
from harness.record import Notes, Record, Recorder, judged, shown, table

ROWS, SMALL_ROWS = 1_000_000, 5_000
FEATURES, CLASSES, SOURCES = 32, 10, 12
_SHARD, _SHARD_NUMBERS = 250_000, 2**26
_WORDS = np.array(
    ["the", "a", "cat", "dog", "bird", "sat", "ran", "flew", "on", "under", "over", "mat", "tree", "house"]
)
_TOKEN = "x" * 24
_FIRST, _REST = 2.0, 1.0
# Requests in the order in which they are sent, none of them cached: (action on the page, URL).
QUESTIONS = {
    "sort/self_influence": ("sorted by self-influence", "/api/examples?limit=60"),
    "sort/loss": ("sorted by loss", "/api/examples?sort=loss&limit=60"),
    "sort/loss/asc": ("sorted by loss, the lowest first", "/api/examples?sort=loss&order=asc&limit=60"),
    "sort/given": ("sorted by a column of the user", "/api/examples?sort=length&limit=60"),
    "page/deep": ("the last page", "/api/examples?sort=loss&limit=60&offset={deep}"),
    "filter/label": ("of one class", "/api/examples?label=3&limit=60"),
    "filter/disagree": ("of another prediction than the label", "/api/examples?disagree=1&limit=60"),
    "filter/group": ("of one source", "/api/examples?group=source:source-3&limit=60"),
    "filter/quantile": ("of the top hundredth", "/api/examples?low=0.99&sort=gradient_norm&limit=60"),
    "filter/within": ("within a brush", "/api/examples?within=loss:0.5:2&within=self_influence:1:50&limit=60"),
    "filter/search": ("whose text holds two words", "/api/examples?search=cat+dog&limit=60"),
    "filter/none": ("whose text holds what none does", "/api/examples?search=zebra&limit=60"),
    "filter/id": ("of one id", "/api/examples?search=id-00000{id}&limit=60"),
    "filter/many": (
        "by five filters at once",
        "/api/examples?label=2&disagree=1&group=source:source-1&low=0.5&search=tree&sort=confidence&order=asc",
    ),
    "histogram": ("the histogram of losses", "/api/histogram?column=loss"),
    "groups": ("sums by source", "/api/groups/source"),
    "example": ("one example", "/api/examples/{id}"),
}
ASKED = ("explain", "explain/again")


def main(argv: Sequence[str]) -> int:
    """Run the command line; return the number of failures."""
    settings = _parser().parse_args(argv)

    def measure(path: Path) -> int:
        run = start("bench.serve", settings, argv)
        rows = settings.rows or (SMALL_ROWS if settings.small else ROWS)
        with tempfile.TemporaryDirectory(prefix="bench-serve-") as place:
            made = make_run(Path(place) / "run", rows)
            return _measure(made, rows, Recorder(run, path, str(rows), {"title": f"{rows:,}", "settings": {}}), run)

    return carried_out("serve", settings, measure, render)


def make_run(path: Path, rows: int) -> Path:
    """Write a run in the format of scoring, with random numbers, ids, a source, a length and a text per example."""
    draw = np.random.default_rng(0)
    path.mkdir(parents=True)
    texts = path.parent / "texts.parquet"
    with pq.ParquetWriter(texts, pa.schema([("text", pa.string())])) as writer:
        for first in range(0, rows, _SHARD):
            picked = _WORDS[draw.integers(0, len(_WORDS), (min(_SHARD, rows - first), 12))]
            writer.write_table(pa.table({"text": [" ".join(words) for words in picked.tolist()]}))
    columns = pa.table(
        {
            "id": [f"id-{row:09d}" for row in range(rows)],
            "source": pa.array([f"source-{n}" for n in range(SOURCES)]).take(pa.array(draw.integers(0, SOURCES, rows))),
            "length": draw.integers(5, 500, rows),
        }
    )
    write_scores(Folder(path), rows, columns, texts)
    write_table(Folder(path))
    return path


def write_scores(folder: Folder, rows: int, columns: pa.Table, texts: Path, features: int = FEATURES) -> None:
    """Write the manifest of a run, and shards with random numbers."""
    folder.begin(_manifest(rows, texts, features), torch.ones(features, dtype=torch.float64), columns)
    shard = min(_SHARD, _SHARD_NUMBERS // features)
    for first in range(0, rows, shard):
        folder.record.add(first, _shard(min(shard, rows - first), features, torch.Generator().manual_seed(first)))


def _shard(rows: int, features: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    loss = torch.rand(rows, generator=generator).log().neg()
    labels = torch.randint(0, CLASSES, (rows,), generator=generator)
    wrong = torch.rand(rows, generator=generator) < 0.1
    return {
        "features": torch.randn(rows, features, generator=generator),
        "loss": loss,
        "square_norm": loss.square() + 0.01,
        "self_influence": (loss * torch.randn(rows, generator=generator).exp()).square(),
        "label": labels,
        "prediction": torch.where(wrong, (labels + 1) % CLASSES, labels),
        "confidence": torch.rand(rows, generator=generator),
        "digest": torch.randint(-(2**60), 2**60, (rows,), generator=generator),
    }


def _manifest(rows: int, texts: Path, features: int) -> dict[str, Any]:
    asked = {"model": str(texts.parent), "dataset": str(texts), "task": "causal-lm"}
    return {
        "kind": "run",
        "format": 1,
        "created": "2026-01-01T00:00:00+00:00",
        "versions": {"eigentrace": "0", "torch": torch.__version__},
        "model": {"fingerprint": ["0"]},
        "coverage": "100% of 0 parameters",
        "method": {"name": "Arnoldi"},
        "num_train": rows,
        "has_curvature": True,
        "data": {"rows": rows, "fingerprint": "0"},
        "compute": {"engine": "auto", "precision": "fp32", "compile": False, "batch": 1},
        "features": {"count": features, "type": "fp32", "hold": "everything"},
        "how": {"input": asked | {"resolved": {}}, "fit": {}, "score": {}},
    }


@dataclass(frozen=True)
class Server:
    """A server in a separate process."""

    url: str
    pid: int
    began: float
    """Time at which its process was started."""

    def get(self, address: str) -> bytes:
        """Send a GET request."""
        with urllib.request.urlopen(f"{self.url}{address}", timeout=120) as answer:
            return answer.read()

    def post(self, address: str, body: Any) -> bytes:
        """Send a POST request."""
        headers = {"X-Token": _TOKEN, "Content-Type": "application/json"}
        asked = urllib.request.Request(f"{self.url}{address}", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(asked, timeout=120) as answer:
            return answer.read()

    def memory(self) -> tuple[int, int]:
        """Return the current memory without mapped files, and the peak memory with them, in bytes."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        found = [re.search(rf"{name}:\s+(\d+) kB", status) for name in ("RssAnon", "VmHWM")]
        now, most = (int(match[1]) * 1024 if match else 0 for match in found)
        return now, most


@contextmanager
def served(run: Path) -> Iterator[Server]:
    """Start a server on a run, and stop it on exit."""
    code = (
        "import sys; from eigentrace.page.server import run_server; "
        "run_server(sys.argv[1], port=0, token=sys.argv[2], on_start=lambda place: print(place.url, flush=True))"
    )
    began = time.perf_counter()
    command = [sys.executable, "-c", code, str(run), _TOKEN]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            if process.stdout is None or not (url := process.stdout.readline().strip()):
                raise RuntimeError("The server did not start; its output is above.")
            yield Server(url.rstrip("/"), process.pid, began)
        finally:
            process.kill()


def _measure(path: Path, rows: int, recorder: Recorder, run: Run) -> int:
    """Measure cold starts, then every request once on a fresh server."""
    failures = 0

    def add(name: str, words: str, work: Callable[[], Cell]) -> None:
        nonlocal failures
        load = os.getloadavg()[0]
        cell = recorder.add(name, attempt(work) | {"words": words, "load": load})
        failures += "failed" in cell
        say(f"{words:45} {cell.get('failed') or _told(cell)}")

    add("first", "from nothing to the numbers of the overview", partial(_cold, path, 1 if run.small else 5))
    with served(path) as server:
        add("overview", "the overview again", partial(_after_first, server))
        add("examples", "the first examples, which load torch and open the texts", partial(_asked, server, _page()))
        numbers = {"deep": str(rows - 60), "id": str(rows // 3)}
        for name, (words, address) in QUESTIONS.items():
            add(name, words, partial(_asked, server, address.format(**numbers)))
        add("explain", "proponents and opponents of a row", partial(_asked, server, f"/api/explain/{rows // 2}"))
        add("explain/again", "of another", partial(_asked, server, f"/api/explain/{rows // 4}"))
        rule = {"rule": {"by": "self_influence", "above": 0.5}, "decision": "drop"}
        add("decide", "a rule that drops many rows", partial(_posted, server, "/api/decisions", rule))
        add("filter/decision", "those that were dropped", partial(_asked, server, "/api/examples?decision=drop"))
        add("undo", "undoing it", partial(_posted, server, "/api/undo", {}))
        add("export", "all decisions as Parquet", partial(_asked, server, "/api/export?format=parquet"))
        add("memory", "memory after all of these", partial(_memory, server))
    return failures


def _told(cell: Cell) -> str:
    if "held" in cell:
        return f"{cell['held'] / 2**20:.0f} MiB, at most {cell['peak'] / 2**20:.0f}"
    return f"{cell['seconds']:.3f} s"


def _page() -> str:
    return "/api/examples?limit=1&sort=row"


def _cold(path: Path, repeats: int) -> Cell:
    """Return the median time from the start of a process to the response with the first view."""
    times = []
    for _ in range(repeats):
        with served(path) as server:
            server.get("/")
            server.get("/api/overview")
            times.append(time.perf_counter() - server.began)
            memory = server.memory()[0]
    return {"seconds": float(np.median(times)), "all": times, "held_then": memory}


def _after_first(server: Server) -> Cell:
    server.get("/api/overview")
    return _asked(server, "/api/overview")


def _asked(server: Server, address: str) -> Cell:
    began = time.perf_counter()
    size = len(server.get(address))
    return {"seconds": time.perf_counter() - began, "bytes": size}


def _posted(server: Server, address: str, body: Any) -> Cell:
    began = time.perf_counter()
    changed = json.loads(server.post(address, body))["changed"]
    return {"seconds": time.perf_counter() - began, "changed": changed}


def _memory(server: Server) -> Cell:
    held, most = server.memory()
    return {"held": held, "peak": most}


def render(out: Path, small: bool) -> None:
    """Render the table from the JSON file."""
    about = (
        f"A drawn run of so many examples with {FEATURES} features, {CLASSES} classes, an id, a source and a text of "
        "twelve words each, written by the store that scoring writes with, and a server in a process of its own. "
        "*Seconds* are by the clock of whoever asks over HTTP; every question is the first of its kind, so that "
        "nothing is remembered. *Load* is the machine's load average before the measurement: 0 if nothing else runs."
    )
    write_page(out, "serve", "The page on a large run", about, _machine, small=small)


def _machine(problems: dict[str, Record]) -> list[str]:
    records = problems.values()
    return [line for record in records for line in ("", f"### {record['title']} examples", "", *_rows(record))]


def _rows(record: Record) -> list[str]:
    notes = Notes()
    rows = []
    for name, cell in record["cells"].items():
        if name == "memory":
            continue
        goal = _FIRST if name == "first" else _REST if name.startswith(("sort", "filter", "page")) else None
        text = judged(shown(cell, "seconds", ".3f", notes), cell.get("seconds"), goal)
        rows.append((cell["words"], text, f"{cell['load']:.1f}"))
    lines = [*table(("", "seconds", "load"), rows), "", *notes.lines()]
    memory, first = record["cells"].get("memory", {}), record["cells"].get("first", {})
    if "held" in memory and "held_then" in first:
        lines += [
            f"The server holds {first['held_then'] / 2**20:.0f} MiB when the overview is there, and "
            f"{memory['held'] / 2**20:.0f} MiB after all of the above, torch included; at most "
            f"{memory['peak'] / 2**20:.0f} MiB, the features that are mapped from the disk included."
        ]
    return lines


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.serve", description="The page on a large run.")
    parser.add_argument("--rows", type=positive, help="examples")
    parser.add_argument("--small", action="store_true", help="a few rows, to see that all runs")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"), help="only named in the record")
    result_options(parser)
    parser.set_defaults(profile=False, seconds=None)
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
