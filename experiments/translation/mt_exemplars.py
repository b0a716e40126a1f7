"""Sentence pairs of the web from low to high self-influence, and human verdicts on them (the paper's appendix).

python -m experiments.translation.mt_exemplars --small          # phrases of a small grammar, half a minute on a CPU
python -m experiments.translation.mt_exemplars --data FOLDER    # 13,000 pairs from the web, on a GPU half a minute
"""

import re
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from html import escape

import numpy as np
from torch import Tensor

import eigentrace as et
from eigentrace.evaluate import retrieval, spearman
from experiments.shared.claims import NOT_SEEN, SEEN, UNDECIDED, Claim, Finding, Records, number
from experiments.shared.frame import Experiment, Session, main
from experiments.translation.parts.corpora import Corpora, Ordered, Pairs, Texts
from experiments.translation.parts.mt_retrieval_page import network_table
from experiments.translation.parts.network import (
    ALL,
    OUR_WAY,
    PAPER_WAY,
    Estimator,
    Network,
    load_network,
    needed,
    options,
    size_of,
)
from harness.measure import Cell, attempt, release
from harness.plot import Curve, Drawing, curves_svg
from harness.record import Notes, shown, table

KEEP = 10
# Ranges of quantiles from which pairs are shown: the paper's, and one from the middle.
SHOWN = ((0, 1), (1, 5), (5, 10), (45, 55), (90, 100))
SHOWN_EACH = 3
# Largest number of characters of either side of a displayed pair.
SHORT = 110
RANGES = ((0, 10), (70, 100), (0, 100))
PAPER_SPEARMAN = {(0, 10): "0.5", (70, 100): "-0.19"}
PER_TOKEN = " per token"
TENTHS = 10
QUESTIONS = {"wrong": "anything but valid", "misaligned": "wrong alignment or language"}
ABOUT = f"""\
**The paper** scored 100M raw pairs of Paracrawl with its network trained on WMT17 (Arnoldi, K = 10), and showed pairs
by quantile of self-influence: up to 1% clean but very short, between 1% and 10% longer and mostly right, at the top a
pair of which neither side translates the other. It found the Spearman correlation of self-influence with the length
of the longer sentence to be 0.5 among the cleanest tenth and -0.19 between 70% and 100%.

**Here** the network of [mt_retrieval](mt_retrieval.md) scores what can be had: 9,999 crawled pairs, unfiltered (they
read like WMT13's of Common Crawl), and 2,988 pairs of published releases of ParaCrawl, already filtered, about which
people said what is wrong with them. The 41 pairs with a side of more than 127 subwords are left out. Of the crawled
pairs 17 were also trained on, of the others none. Lengths are counted in subwords.

- *Arnoldi* is the paper's (Hessian, 200 products on 512 new training pairs each, K = {KEEP}, nothing beyond),
  *Arnoldi + tail* ours (Gauss-Newton, K = {KEEP}), the *loss* one forward pass. A pair's loss is the sum over its
  tokens; *per token* divides gradients by the number T of target tokens, and so self-influence by T², the loss by T.
- People's verdicts: can a score tell pairs that are anything but valid from valid ones, and, among the valid and these
  only, pairs of wrong alignment or language? AUC in percent, 50 by chance. Anything but valid counts machine
  translation, free translation and wrong tokens too.
- The pairs shown are drawn at random among those of at most {SHORT} letters a side, {SHOWN_EACH} from each range.

`python -m experiments.translation.mt_exemplars --data FOLDER --score-precision bf16` reads the network and the fits
that mt_retrieval left in `--cache`, and then takes half a minute on an H200. With `--small`, phrases of a small grammar
stand in, a third of them exchanged and called misaligned. [What the folder holds, and how to run the paper's
size](../translation_data.md)."""
_READINGS = {"sums": "Arnoldi", "per token": "Arnoldi" + PER_TOKEN}


def _correlation(records: Records, low: int, high: int, near: Callable[[float], bool]) -> Finding:
    found = {
        words: number(records, "exemplars", "cells", name, f"spearman {low}-{high}")
        for words, name in _READINGS.items()
    }
    told = ", ".join(f"{value:.2f} ({words})" for words, value in found.items())
    near_all, near_any = (every(near(value) for value in found.values()) for every in (all, any))
    outcome = SEEN if near_all else UNDECIDED if near_any else NOT_SEEN
    return Finding(outcome, f"Spearman {told}; the paper does not say which it took. 1 training, web pairs.")


CLAIMS = (
    Claim(
        "In the cleanest tenth, longer pairs rank higher (paper: a Spearman correlation of about 0.5).",
        lambda records: _correlation(records, 0, 10, lambda value: 0.4 <= value <= 0.6),
        is_main=True,
    ),
    Claim(
        "Between 70 and 100%, the correlation is slightly negative (paper: -0.19).",
        lambda records: _correlation(records, 70, 100, lambda value: -0.3 <= value < 0),
    ),
)

VERDICT = """\
The pairs drawn, three from each range, show both ends less clearly than the paper's: phrases of hotels and of software
at the bottom, right and wrong pairs at the top. As sums, long pairs come last. A likely reason: the network learned
from few pairs that read like the web, and what it does not know is as influential as what is wrong. Of the pairs that
people judged, the loss per token tells wrong ones best, the paper's score hardly at all."""


@dataclass(frozen=True)
class Noisy:
    """Pairs of both corpora, one after the other."""

    texts: Texts
    pairs: Pairs
    ordered: Ordered

    @staticmethod
    def of(corpora: Corpora, batch: int) -> "Noisy":
        """Read the pairs to score, without those that are too long."""
        crawl, judged = corpora.pairs("crawl"), corpora.pairs("judged")
        texts = corpora.texts("crawl").take(crawl.rows) + corpora.texts("judged").take(judged.rows)
        pairs = crawl + judged
        return Noisy(texts, pairs, Ordered.of(pairs, batch))

    @property
    def verdicts(self) -> np.ndarray:  # (N,)
        """The human verdict on each pair, as one or two letters; empty if there is none."""
        return np.array(self.texts.verdicts, dtype=object)


def said(scores: np.ndarray, noisy: Noisy) -> Cell:
    """Measure how scores are related to verdicts, and to length by quantile."""
    verdicts, lengths = noisy.verdicts, noisy.pairs.lengths.astype(float)
    asked, valid = verdicts != "", verdicts == "V"
    misaligned = np.isin(verdicts, ["A", "L"])
    quantiles = ranked(scores)
    tenths = np.minimum((TENTHS * quantiles).astype(int), TENTHS - 1)
    return {
        "wrong": 100 * retrieval(scores[asked], ~valid[asked]).auc,
        "misaligned": 100 * retrieval(scores[valid | misaligned], misaligned[valid | misaligned]).auc,
        **{f"spearman {low}-{high}": _spearman(scores, lengths, _within(quantiles, low, high)) for low, high in RANGES},
        "lengths": [float(lengths[tenths == tenth].mean()) for tenth in range(TENTHS)],
    }


def ranked(scores: np.ndarray) -> np.ndarray:  # (N,)
    """Return the quantile of each pair, from 0 to just below 1."""
    places = np.empty(len(scores))
    places[np.argsort(scores, kind="stable")] = np.arange(len(scores))
    return places / len(scores)


def _within(quantiles: np.ndarray, low: int, high: int) -> np.ndarray:
    return (quantiles >= low / 100) & (quantiles < high / 100)


def _spearman(scores: np.ndarray, lengths: np.ndarray, rows: np.ndarray) -> float | None:
    found = float(spearman(scores[rows][None], lengths[rows][None])[0])
    return found if np.isfinite(found) else None


def exemplars(scores: np.ndarray, texts: Texts) -> Cell:
    """Sample short pairs from each range of quantiles."""
    longest = np.array([max(len(de), len(en)) for de, en in zip(texts.german, texts.english, strict=True)])
    chance, quantiles, rows = np.random.default_rng(0), ranked(scores), []
    for low, high in SHOWN:
        here = np.flatnonzero(_within(quantiles, low, high) & (longest <= SHORT))
        drawn = chance.permutation(here)[:SHOWN_EACH]
        rows += [
            [f"{low}–{high}%", texts.verdicts[row], texts.german[row], texts.english[row]] for row in sorted(drawn)
        ]
    return {"rows": rows}


def _arnoldi(network: Network, estimator: Estimator, data: et.Data) -> Tensor:
    fitted, _ = network.fit(ALL, estimator)
    return fitted.distill(KEEP).self_influence(data, compute=network.compute)


def _loss(network: Network, data: et.Data) -> Tensor:
    return et.Loss().fit(network.task(ALL), data).self_influence(data)


WORK: dict[str, tuple[Callable[[Network, et.Data], Tensor], int]] = {
    PAPER_WAY: (lambda network, data: _arnoldi(network, PAPER_WAY, data), 2),
    OUR_WAY: (lambda network, data: _arnoldi(network, OUR_WAY, data), 2),
    "loss": (_loss, 1),
}
"""The scores: how each is computed, and the power of T by which it is divided per token."""


def measure(session: Session) -> None:
    """Score the pairs with every method."""
    part = session.part("exemplars", "Pairs of the web", asdict(size_of(session)))
    names = {score: [score, score + PER_TOKEN] for score in WORK}
    needed = {score: [*names[score], *(["pairs"] if score == PAPER_WAY else [])] for score in WORK}
    wanted = [score for score in WORK if not all(part.has(name) for name in needed[score])]
    if not wanted and part.has("network"):
        return
    network, corpora = load_network(session)
    noisy = Noisy.of(corpora, network.size.batch)
    part.cell("network", lambda: network.facts)
    for score in wanted:
        release(session.device)
        work, power = WORK[score]
        found = attempt(lambda work=work: {"scores": noisy.ordered.back(work(network, noisy.ordered.data))})  # type: ignore[misc]
        for name, divided in zip(names[score], (0, power), strict=True):
            if "failed" in found:
                part.add(name, dict(found))
                continue
            scores = found["scores"] / noisy.pairs.target_lengths.astype(float) ** divided
            part.cell(name, lambda scores=scores: said(scores, noisy))  # type: ignore[misc]
            if name == PAPER_WAY:
                part.cell("pairs", lambda scores=scores: exemplars(scores, noisy.texts))  # type: ignore[misc]


def tables(records: Records) -> list[str]:
    """Return the tables of pairs, of correlations with length and of verdicts."""
    cells = records.get("exemplars", {"cells": {}})["cells"]
    notes = Notes()
    pairs = [tuple(safe(text) for text in row) for row in cells.get("pairs", {}).get("rows", [])]
    lines = [*network_table(cells.get("network"), notes), ""]
    lines += [*table(("self-influence (Arnoldi)", "verdict", "German", "English"), pairs), ""] if pairs else []
    return [*lines, *_correlations(cells, notes), "", *notes.lines()]


def summary(records: Records) -> list[str]:
    """Return the table of correlations and verdicts alone."""
    notes = Notes()
    return [*_correlations(records.get("exemplars", {"cells": {}})["cells"], notes), "", *notes.lines()]


def _correlations(cells: dict[str, Cell], notes: Notes) -> list[str]:
    spearmans = [f"spearman {low}-{high}" for low, high in RANGES]
    headings = (
        "score",
        *(f"{low}–{high}%: Spearman with length" for low, high in RANGES),
        *(f"AUC: {what}" for what in QUESTIONS.values()),
    )
    quoted = ("paper: Arnoldi", *(PAPER_SPEARMAN.get(one, "–") for one in RANGES), *("–" for _ in QUESTIONS))
    rows = [
        (
            name,
            *(shown(cells.get(name), key, ".2f", notes) for key in spearmans),
            *(shown(cells.get(name), key, ".1f", notes) for key in QUESTIONS),
        )
        for score in WORK
        for name in (score, score + PER_TOKEN)
    ]
    return table(headings, [quoted, *rows])


def safe(text: str) -> str:
    """Escape text of the web for Markdown."""
    text = re.sub(r"([\\`*_\[\]|~$#])", r"\\\1", " ".join(text.split()))
    text = escape(text, quote=False)
    # Keep URLs from becoming links.
    return text.replace("://", ":&#47;&#47;").replace("www.", "www&#46;").replace("@", "&#64;")


def figures(records: Records, *, small: bool) -> dict[str, Drawing]:
    """Draw the mean length of each tenth of the pairs, from low to high scores."""
    cells = records.get("exemplars", {"cells": {}})["cells"]
    across = [100 * (tenth + 0.5) / TENTHS for tenth in range(TENTHS)]
    curves = [
        Curve(name, across, cells[name]["lengths"], is_control=score == "loss")
        for score in WORK
        for name in (score, score + PER_TOKEN)
        if "lengths" in cells.get(name, {})
    ]
    if not curves:
        return {}
    panels = {"Longer side of pairs by score": curves}
    return {"length": partial(curves_svg, panels, "quantile of the score, %", "subwords")}


EXPERIMENT = Experiment(
    "mt_exemplars",
    "Pairs of the web by self-influence",
    ABOUT,
    {"exemplars": measure},
    tables,
    figures,
    options,
    VERDICT,
    needed=needed("crawl", "judged"),
    claims=CLAIMS,
    summary=summary,
    area="translation",
)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT, sys.argv[1:]))
