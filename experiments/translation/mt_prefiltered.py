"""Self-influence after rules: drop the highest scores among prefiltered pairs (section 5.2 of the paper).

python -m experiments.translation.mt_prefiltered --small          # phrases of a small grammar, on a CPU
python -m experiments.translation.mt_prefiltered --data FOLDER    # with the scores that mt_filter kept, on a GPU
"""

import sys
from functools import partial

import numpy as np

from experiments.shared.claims import Pair, Records, order
from experiments.shared.frame import Experiment, Session, main
from experiments.translation.parts.mt_filter_page import (
    TESTS,
    bleu_columns,
    bleu_figures,
    bleu_numbers,
    bleu_pair,
    makeup_table,
    part_name,
)
from experiments.translation.parts.network import OUR_WAY, PAPER_WAY, needed
from experiments.translation.parts.selection import (
    LOSS,
    NOISY_FILES,
    PER_TOKEN,
    PREFILTER,
    RANDOM,
    Bench,
    begin,
    measure_choice,
    options,
    over_seeds,
)
from harness.plot import Drawing
from harness.record import Notes, Record, shown, table

NOTHING = "nothing"
PAPER = {(NOTHING, None): 36.32, (PAPER_WAY, 25): 37.38, (PAPER_WAY, 50): 37.20}
"""The paper's BLEU on newstest2016 by score and percentage dropped."""
WAYS = (PAPER_WAY, OUR_WAY, LOSS, PAPER_WAY + PER_TOKEN, OUR_WAY + PER_TOKEN, LOSS + PER_TOKEN, RANDOM)
DROPPED = (25, 50)
Dropped = tuple[str, int | None]
_ALL: tuple[Dropped, ...] = ((NOTHING, None), *((way, percent) for way in WAYS for percent in DROPPED))
PARTS: dict[str, Dropped] = {part_name(*one): one for one in _ALL}
ABOUT = """\
**The paper** took what the winner of WMT18's filtering task (Microsoft) had selected from ParaCrawl, and dropped the 25
and 50% with the highest self-influence (Arnoldi, presumably K = 10). BLEU on newstest2016 went from 36.32 to 37.38 and
37.20.

**Here** that selection could not be had. The rules of [mt_filter](mt_filter.md) take its place, on the same noisy
corpus of 150,000 pairs; they leave two thirds of it, of which about a third are clean. So what is left is far noisier
than the paper's, which a cascade of filters had cleaned, and there is more for a score to find. Scores, the network
that is trained again and its numbers of steps are those of mt_filter.

- *Arnoldi* is the paper's, *Arnoldi + tail* ours, both with K = 10; *loss* is one forward pass; *random* drops as many
  pairs blindly, and says what fewer pairs cost by themselves.
- Sums over a target's tokens drop long pairs first; *per token* divides self-influence by the square of their number,
  the loss by it.

`python -m experiments.translation.mt_prefiltered --data FOLDER --score-precision bf16 --workers 6` reads the scores
that `mt_filter --parts scores` left in `--cache` if `--score-precision` is the same, or those behind mt_filter's page,
or makes them. Each row is a part, and they are shared among `--workers` processes: 30 trainings, of this page and of
mt_filter, six at a time, took 12 minutes on an H200. With `--small`, phrases of a small grammar stand in: it shows that
everything runs, and nothing else. [What the folder holds, and how to run the paper's size](../translation_data.md)."""
VERDICT = """\
Fewer pairs by themselves cost: pairs dropped at random leave less than nothing dropped on both tests. What sums drop is
not only noise but also long, and news is long. Per token, every score gains on both tests, most on news by the loss;
the tail is no help here. These rows are of one training each."""


def label(way: str, percent: int | None) -> str:
    """Return the name of the numbers of a row."""
    return way if percent is None else f"{way}, {percent}% dropped"


def measure(session: Session, name: str) -> None:
    """Retrain on the remaining pairs."""
    part = begin(session, "dropped", "Dropped after the prefilter")
    way, percent = PARTS[name]

    def choose(bench: Bench) -> np.ndarray:  # (n,)
        rows = bench.chosen(PREFILTER)
        return rows if percent is None else bench.chosen(way, 100 - percent, among=rows)

    measure_choice(part, label(way, percent), choose)


def tables(records: Records) -> list[str]:
    """Return the tables of BLEU, with the paper's, and of the remaining pairs."""
    if "dropped" not in records:
        return []
    record, notes = over_seeds(records["dropped"]), Notes()
    names = [label(*one) for one in _ALL]
    return [*_bleu(record, notes), "", *makeup_table(record["cells"], names, notes), "", *notes.lines()]


def _bleu(record: Record, notes: Notes) -> list[str]:
    rows = []
    for way, percent in _ALL:
        cell = record["cells"].get(label(way, percent))
        paper = PAPER.get((way, percent))
        if cell is None and paper is None:
            continue
        clean = (cell or {}).get("kinds", {}).get("clean")
        rows.append(
            (
                way,
                "0" if percent is None else str(percent),
                "–" if paper is None else f"{paper:.2f}",
                *bleu_numbers(cell, record, notes),
                shown(cell, "pairs", ",d", notes),
                "–" if clean is None else f"{clean:.1f}",
                shown(cell, "trainings", "d", notes),
            )
        )
    numbers = (*bleu_columns(record).values(), "pairs left", "clean, %", "trainings")
    return table(("dropped by", "%", "paper: newstest2016", *numbers), rows)


def figures(records: Records, *, small: bool) -> dict[str, Drawing]:
    """Draw BLEU after the last step against the share dropped."""
    if "dropped" not in records:
        return {}
    rows = {way: {0: label(NOTHING, None)} | {percent: label(way, percent) for percent in DROPPED} for way in WAYS}
    return bleu_figures(over_seeds(records["dropped"]), rows, "dropped of what the rules leave, %")


def summary(records: Records) -> list[str]:
    """Return the table of BLEU alone."""
    notes = Notes()
    found = _bleu(over_seeds(records["dropped"]), notes) if "dropped" in records else []
    return [*found, "", *notes.lines()] if notes.texts else found


def _gains(records: Records, percent: int) -> list[Pair]:
    names = label(PAPER_WAY, percent), label(NOTHING, None)
    return [bleu_pair(records, "dropped", *names, test, f"{percent}%") for test in TESTS]


CLAIMS = (
    order(
        "A quarter dropped by self-influence gives more than nothing dropped (paper: 37.38 BLEU against 36.32).",
        "BLEU after the last step",
        lambda records: _gains(records, 25),
        is_main=True,
    ),
    order(
        "Half dropped gives more than nothing dropped, too (paper: 37.20 BLEU against 36.32).",
        "BLEU after the last step",
        lambda records: _gains(records, 50),
    ),
)

EXPERIMENT = Experiment(
    "mt_prefiltered",
    "Self-influence on top of a prefilter",
    ABOUT,
    {name: partial(measure, name=name) for name in PARTS},
    tables,
    figures,
    options,
    VERDICT,
    needed=needed(*NOISY_FILES),
    claims=CLAIMS,
    summary=summary,
    area="translation",
)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT, sys.argv[1:]))
