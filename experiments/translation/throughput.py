"""Measure how many sentence pairs per hour are scored by self-influence, from gzipped text to scores on disk.

python -m experiments.translation.throughput --small                   # phrases of a small grammar, on a CPU
python -m experiments.translation.throughput --data FOLDER             # 173,000 pairs, Transformer Base, on a GPU
python -m experiments.translation.throughput --data FOLDER --ways run  # only a whole run, at the best settings
"""

import argparse
import gzip
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor, nn

import eigentrace as et
from experiments.shared.claims import NOT_SEEN, SEEN, Claim, Finding, Records, number
from experiments.shared.frame import Experiment, Session, main
from experiments.translation.parts.corpora import FILES, Corpora, Ordered, Pairs, Subwords, Texts, read_texts
from experiments.translation.parts.network import ALL, PAPER_WAY, load_network, needed, size_of
from experiments.translation.parts.network import options as network_options
from harness.command import choices, positive
from harness.measure import Cell, Precision, clocked, release, with_seconds
from harness.record import Notes, memory, shown, table

Engine = Literal["layerwise", "forward"]
KEEP = 10
BATCHES = (64, 512, 2048)
# Largest numbers of batches and pairs to score, so that slow ways take no longer than fast ones.
MOST_BATCHES = 200
MOST_PAIRS: dict[tuple[Engine, Precision], int] = {
    ("layerwise", "fp32"): 40_000,
    ("forward", "bf16"): 16_000,
    ("forward", "fp32"): 4_000,
}
TITLES: dict[Engine, str] = {"layerwise": "layer by layer", "forward": "forward mode, as the paper"}
RUN = "run"
WHOLE = "a whole run by et.score, layer by layer"
PAPER_PER_HOUR = 2.2e6
ABOUT = f"""\
**The paper** scored 2.2M pairs an hour by self-influence with K = {KEEP} on a TPUv2 of 16 cores, in batches of 2,048
and, it seems, with sentences packed into rows. It does not say what that includes.

**Here** one GPU scores real pairs with the network of [mt_retrieval](mt_retrieval.md), Transformer Base, and its
Arnoldi fit, cut to K = {KEEP}. The pairs are 163,118 translations, of which the network was trained on two thirds, and
9,999 of the web; 14 and 32 subwords a sentence. Each is read once and scored once, sorted by length, but for 52 that
are too long; sentences are not packed.

- *Reading*: gzipped text on the disk to tokens, by the tokenizer's own threads.
- *Scoring*: tokens to scores, with sorting, putting batches together, and planning, of a second and more. A batch that
  does not fit goes through in parts. *Used* is the size of batch that most pairs were tried in, *GiB* what was held at
  most; attempts that did not fit count in both.
- *Writing*: scores and row numbers to a Parquet file.
- *Pairs/h* is one over the sum of the three per pair. Forward mode costs one pass for each of the {KEEP} directions, as
  in the paper, of which up to eight are pushed together. Where fewer pairs were scored than read, they are every n-th
  of the sorted ones.
- *{WHOLE.capitalize()}* is the way of [docs/runs.md](../runs.md): beside scores it keeps features, losses, gradient
  norms and the fit itself, in checked shards that a killed run goes on from.
- The fit is done before and not counted; the page of mt_retrieval has what it took.

`python -m experiments.translation.throughput --data FOLDER --score-precision bf16` takes six and a half minutes on an
H200 with the network and the fit of mt_retrieval in `--cache`, forward mode three of them. `--pairs` scores fewer
pairs. Nothing else should run beside it. [What the folder holds, and how to run the paper's
size](../translation_data.md)."""


def _per_hour(records: Records) -> Finding:
    found = {words: number(records, "throughput", "cells", name, "per_hour") / 1e6 for words, name in _FASTEST.items()}
    told = ", ".join(f"{value:.1f}M {words}" for words, value in found.items())
    every = all(value >= _PAPER_MILLIONS for value in found.values())
    return Finding(
        SEEN if every else NOT_SEEN, f"Pairs an hour on one GPU, bfloat16: {told}; other hardware and sentences."
    )


_PAPER_MILLIONS = 2.2
_FASTEST = {
    "layer by layer": "layerwise, bf16, batch 2048",
    "by forward mode, the paper's way": "forward, bf16, batch 512",
}

CLAIMS = (
    Claim("Millions of pairs are scored in an hour (paper: 2.2M on 16 cores of a TPUv2).", _per_hour, is_main=True),
)

VERDICT = """\
How the two machines, the sentences and what is counted compare is open, so this is no measure of methods. A whole run,
which also keeps features, losses, norms and the fit in checked files, was measured when a batch that did not fit still
halved all that came after it.

The batch matters most: small ones leave the GPU idle. 2,048 of the longest pairs do not fit, whose logits alone are 34
GB in float32; these go through in parts. Forward mode is two to seven times slower, and larger batches do not help it:
at 512 it already fills the memory. Its rows are of fewer pairs, so that pairs of more different lengths share a batch:
it pads more, and the difference is smaller than it looks."""


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this experiment."""
    network_options(parser)
    parser.add_argument("--pairs", type=positive, help="score so many pairs, drawn at random; all if left out")
    parser.add_argument("--ways", type=choices(*TITLES, RUN), help=f"some of {','.join([*TITLES, RUN])}")


def raw_files(corpora: Corpora, temporary: Path) -> list[Path]:
    """Return the files to read: those of the data, with --small parts of them, or files of phrases."""
    names = ("train", "crawl")
    if corpora.folder is not None and not corpora.small:
        return [corpora.folder / FILES[name] for name in names]
    for name in names:
        texts = corpora.texts(name)
        with gzip.open(temporary / FILES[name], "wt", encoding="utf-8", newline="\n") as file:
            rows = zip(texts.german, texts.english, strict=True)
            file.write("\n".join(["de\ten", *("\t".join(row) for row in rows)]) + "\n")
    return [temporary / FILES[name] for name in names]


def read_pairs(paths: Sequence[Path], subwords: Subwords, count: int | None) -> Pairs:
    """Read and tokenise files, without the cache."""
    texts = sum((read_texts(path) for path in paths), start=Texts([], [], []))
    if count is not None and count < len(texts):
        texts = texts.take(np.sort(np.random.default_rng(0).permutation(len(texts))[:count]))
    return subwords.encoded(texts)


def write_scores(path: Path, scores: Tensor, ordered: Ordered) -> None:
    """Write a table of scores in the order of the pairs."""
    values = ordered.back(scores)
    pq.write_table(pa.table({"row": np.arange(len(values)), "self_influence": values}), path)


def thinned(pairs: Pairs, most: int) -> Pairs:
    """Return every n-th of the pairs sorted by length, as many as requested."""
    if len(pairs) <= most:
        return pairs
    order = np.argsort(-pairs.lengths, kind="stable")
    return pairs.take(order[np.linspace(0, len(order) - 1, most).astype(np.int64)])


@contextmanager
def watched(model: nn.Module) -> Iterator[Counter[int]]:
    """Record the sizes of the batches that a network evaluates."""
    sizes: Counter[int] = Counter()
    handle = model.register_forward_pre_hook(lambda _, inputs: sizes.update([len(inputs[0])]))
    try:
        yield sizes
    finally:
        handle.remove()


def _most(sizes: Counter[int]) -> int:
    """Return the batch size of most examples; a few are also evaluated one by one."""
    return max(sizes, key=lambda size: size * sizes[size])


def timed_scores(ready: "Ready", pairs: Pairs, compute: et.Compute) -> Cell:
    """Score pairs and write the scores; return the time of each."""
    fitted = ready.fitted
    device = fitted.task.layout.device
    release(device)

    def score() -> tuple[Ordered, Tensor]:
        ordered = Ordered.of(pairs, int(compute.batch))
        return ordered, fitted.self_influence(ordered.data, compute=compute)

    with watched(ready.network.model) as sizes:
        (ordered, scores), seconds = with_seconds(score, device)
    if not scores.isfinite().all():
        raise FloatingPointError("Some scores are not finite.")
    writing = clocked(lambda: write_scores(ready.folder / "scores.parquet", scores, ordered), device)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return {
        "scored": len(pairs),
        "score_seconds": seconds,
        "write_seconds": writing,
        "used": _most(sizes),
        "peak": peak,
    }


def per_hour(cell: Cell, read_seconds: float, read: int) -> Cell:
    """Add the rates of scoring only, and end to end with reading."""
    each = (cell["score_seconds"] + cell["write_seconds"]) / cell["scored"]
    return cell | {
        "read_seconds": read_seconds,
        "read": read,
        "scoring_per_hour": 3600 * cell["scored"] / cell["score_seconds"],
        "per_hour": 3600 / (each + read_seconds / read),
    }


def cell_name(engine: str, precision: str, batch: int) -> str:
    """Return the name of a number of the table."""
    return f"{engine}, {precision}, batch {batch}"


class Ready:
    """The network, its fit, and the pairs to score, with the time of reading them."""

    def __init__(self, session: Session, folder: Path) -> None:
        self.folder = folder
        self.most_batches = 2 if session.small else MOST_BATCHES
        self.network, corpora = load_network(session)
        fitted, self.fit_seconds = self.network.fit(ALL, PAPER_WAY)
        self.fitted = fitted.distill(KEEP)
        self.paths = raw_files(corpora, folder)
        self.subwords = corpora.subwords
        self.count: int | None = session.settings.pairs
        self.pairs, self.read_seconds = with_seconds(self.read, session.device)
        # One-time costs of a process are not counted.
        timed_scores(self, thinned(self.pairs, 16), et.Compute(batch=16))

    def read(self) -> Pairs:
        """Read the files again."""
        return read_pairs(self.paths, self.subwords, self.count)


def measure(session: Session) -> None:
    """Measure both engines and a complete run."""
    settings = asdict(size_of(session)) | {"asked": session.settings.pairs}
    part = session.part("throughput", "Pairs an hour", settings)
    sizes = (16, 64) if session.small else BATCHES
    wanted = session.settings.ways or [*TITLES, RUN]
    cells: list[tuple[str, Callable[[Ready], Cell]]] = [
        (cell_name(engine, precision, batch), partial(_scored, engine=engine, precision=precision, batch=batch))
        for engine in TITLES
        if engine in wanted
        for precision in get_args(Precision)
        for batch in sizes
    ]
    if RUN in wanted:
        cells.append((cell_name(WHOLE, "bf16", max(sizes)), partial(_whole, batch=max(sizes))))
    if all(part.has(name) for name, _ in cells):
        return
    with tempfile.TemporaryDirectory() as folder:
        ready = Ready(session, Path(folder))
        for name, work in cells:
            part.cell(name, partial(work, ready))


def _scored(ready: Ready, engine: Engine, precision: Precision, batch: int) -> Cell:
    most = min(ready.most_batches * batch, MOST_PAIRS.get((engine, precision), len(ready.pairs)))
    compute = et.Compute(engine=engine, precision=precision, batch=batch)
    found = timed_scores(ready, thinned(ready.pairs, most), compute)
    return per_hour(found, ready.read_seconds, len(ready.pairs)) | {"fit_seconds": ready.fit_seconds}


def _whole(ready: Ready, batch: int) -> Cell:
    device = ready.fitted.task.layout.device
    compute = et.Compute(engine="layerwise", precision="bf16", batch=batch)
    out = ready.folder / "run"
    release(device)
    pairs, reading = with_seconds(ready.read, device)

    def score() -> None:
        ordered = Ordered.of(pairs, batch)
        run = et.score(ready.fitted, ordered.data, out=out, compute=compute, columns={"pair": ordered.order})
        assert run.is_complete

    with watched(ready.network.model) as sizes:
        seconds = clocked(score, device)
    cell: Cell = {"scored": len(pairs), "score_seconds": seconds, "write_seconds": 0.0, "used": _most(sizes)}
    cell["peak"] = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    return per_hour(cell, reading, len(pairs)) | {"bytes": size, "fit_seconds": ready.fit_seconds}


def tables(records: Records) -> list[str]:
    """Return the tables of rates, with the paper's, and of the seconds of each stage."""
    cells: dict[str, Cell] = records.get("throughput", {"cells": {}})["cells"]
    notes = Notes()
    paper = ("paper: TPUv2, 16 cores", "–", "2048", "–", "–", "–", "–", "–", "–", f"{PAPER_PER_HOUR / 1e6:.1f}M")
    rows = [paper]
    for name, cell in sorted(cells.items(), key=lambda item: _place(item[0])):
        title, precision, batch = name.rsplit(", ", 2)
        stages = ("read_seconds", "score_seconds", "write_seconds")
        seconds = [shown(cell, key, ".2f" if key == "write_seconds" else ".1f", notes) for key in stages]
        if title == WHOLE and "failed" not in cell:
            seconds[-1] = "in scoring"
        rows.append(
            (
                TITLES.get(title, title),  # type: ignore[call-overload]
                precision,
                batch.removeprefix("batch "),
                shown(cell, "used", "d", notes),
                memory(cell, notes),
                shown(cell, "scored", ",d", notes),
                *seconds,
                _millions(cell, notes),
            )
        )
    headings = (
        "engine",
        "precision",
        "batch",
        "used",
        "GiB",
        "pairs scored",
        "reading all, s",
        "scoring, s",
        "writing, s",
        "pairs/h, end to end",
    )
    found = [cell for cell in cells.values() if "fit_seconds" in cell]
    if not found:
        return [*table(headings, rows), "", *notes.lines()]
    took = max(cell["fit_seconds"] for cell in found)
    said = f"Reading is of all {found[0]['read']:,} pairs. The fit, or reading it back, took {took:.0f} s."
    return [*table(headings, rows), "", said, "", *notes.lines()]


def _place(name: str) -> tuple[int, str, int]:
    title, precision, batch = name.rsplit(", ", 2)
    return [*TITLES, WHOLE].index(title), precision, int(batch.removeprefix("batch "))


def _millions(cell: Cell, notes: Notes) -> str:
    if "per_hour" not in cell:
        return shown(cell, "per_hour", ".1f", notes)
    return f"{cell['per_hour'] / 1e6:.1f}M"


EXPERIMENT = Experiment(
    "throughput",
    "Sentence pairs scored in an hour",
    ABOUT,
    {"throughput": measure},
    tables,
    options=options,
    needed=needed("crawl"),
    verdict=VERDICT,
    claims=CLAIMS,
    area="translation",
)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT, sys.argv[1:]))
