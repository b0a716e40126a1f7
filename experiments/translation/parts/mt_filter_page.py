"""The page of selections from the noisy corpus: tables with the paper's numbers and ours, and figures."""

import re
from collections.abc import Mapping, Sequence
from functools import partial

from experiments.shared.claims import MissingNumberError, Pair, Place, Records, Sample, order, paired, sample
from experiments.translation.parts.bleu import SETS
from experiments.translation.parts.mt_retrieval_page import NETWORKS, network_table
from experiments.translation.parts.network import OUR_WAY, PAPER_WAY, part_of
from experiments.translation.parts.noisy_corpus import CLEAN, KINDS, WITHOUT_VERDICT
from experiments.translation.parts.selection import (
    LOSS,
    NONE,
    ORACLE,
    PER_TOKEN,
    PREFILTER,
    RAND_PROJ,
    RANDOM,
    SCORES,
    bleu_key,
    over_seeds,
)
from harness.measure import Cell
from harness.plot import Curve, Drawing, curves_svg
from harness.record import Notes, Record, shown, table

PAPER = {  # The paper's BLEU on newstest2016 after 10,000 and 200,000 steps, by selection and percentage
    (NONE, None): (9.9, 17.8),
    (PREFILTER, None): (11.7, 22.6),
    (RAND_PROJ, 1): (7.7, 8.7),
    (PAPER_WAY, 1): (17.8, 19.6),
    (RAND_PROJ, 5): (18.7, 27.9),
    (PAPER_WAY, 5): (24.0, 30.3),
    (RAND_PROJ, 10): (21.3, 28.6),
    (PAPER_WAY, 10): (25.0, 30.8),
}
# The paper selects 1, 5 and 10% of 100 million pairs. These are few of 150,000, so larger parts are added.
FEW, LARGER = (1, 5, 10), (25, 50, 75)
EVERY, MANY = (*FEW, *LARGER), (10, *LARGER)
PER_WAY: dict[str, tuple[int, ...]] = {
    RAND_PROJ: EVERY,
    PAPER_WAY: EVERY,
    OUR_WAY: EVERY,
    LOSS: MANY,
    RAND_PROJ + PER_TOKEN: LARGER,
    PAPER_WAY + PER_TOKEN: MANY,
    OUR_WAY + PER_TOKEN: MANY,
    LOSS + PER_TOKEN: MANY,
    RANDOM: MANY,
}
Chosen = tuple[str, int | None]


def part_name(way: str, percent: int | None) -> str:
    """Return the name of a selection on the command line."""
    word = re.sub(r"[^a-z]+", "_", way.lower())
    return word if percent is None else f"{word}_{percent}"


def label(way: str, percent: int | None) -> str:
    """Return the name of a selection's numbers."""
    return way if percent is None else f"{way}, {percent}%"


_ALL: tuple[Chosen, ...] = (
    *((way, None) for way in (NONE, PREFILTER, ORACLE)),
    *((way, percent) for way, percents in PER_WAY.items() for percent in percents),
)
SELECTIONS: dict[str, Chosen] = {part_name(*one): one for one in _ALL}
"""The selections to train on, by the names of `--parts`."""

ABOUT = """\
**The paper** took the raw ParaCrawl corpus of WMT18, 100M German-English pairs, scored all by self-influence with a
network trained on WMT17, trained Transformer Base again on the 1, 5 and 10% with the lowest scores, and compared with
all pairs and with rules that filter without a network. BLEU is on newstest2016, after 10,000 and 200,000 steps.

**Here** that corpus could not be had. A noisy corpus of 150,000 pairs is put together from real sentences instead, with
the kinds of noise that the paper names; the first table counts them. A quarter of the pairs are clean, a few of them
from crawled parts of WMT's training data. Noise is made (exchanged, cut, joined, copied) of sentences that no clean
pair has, and is easier to tell than the noise of the web, so the ranking is also measured on pairs that people judged.
Comparable pairs are captions of the photos of multi30k, of which the network was trained on other captions, and on some
of the same English ones. The network of [mt_retrieval](mt_retrieval.md) scores all pairs: it was trained on pairs that
have no sentence in common with the clean ones. Pairs with a side of more than 127 subwords are left out.

- **Training again** is small: 3 + 3 blocks 256 wide, 14M parameters, dropout 0.2, batches of 4,096 tokens. BLEU
  (sacreBLEU, greedy search) is taken after two numbers of steps of one training. So few clean pairs, most of them short
  sentences of everyday life and captions of photos, teach little about news, the paper's test set; so captions of
  multi30k stand beside it.
- **Sizes.** 1% of the paper's corpus is a million pairs, 1% of ours 1,500: there a selection is always large enough to
  learn to translate, here the smaller ones are not, whatever they consist of. The number of steps is the same for all,
  so that the smallest are gone through some 1,500 times, all pairs four or five times. *Random* selections of the same
  size say what size alone does, *clean only* is what a perfect filter would leave.
- *Arnoldi* (the paper's, Hessian) and *RandProj* have K = 10; *Arnoldi + tail* is ours (Gauss-Newton, K = 10, the other
  directions by δ). A pair's loss is the sum over its target's tokens; *per token* divides gradients by their number T,
  and so self-influence by T², the loss by T. Sums prefer short pairs.
- **Rules** (prefilter), as in the paper's appendix. AFRL: at most three times as many words on one side as on the
  other, and no word of more than 30 characters (the paper says tokens, for long addresses; that many subwords hardly
  ever make a word). Alibaba: an edit distance of at least 2 and at least 0.1 of the mean length, in characters (which
  unit the paper counted in it does not say). Microsoft: a German source and an English target, told by naive Bayes over
  one to four letters in a row that learned from 5,000 training pairs and from half of the pairs of other languages, of
  which the corpus has the other half. A sentence goes if another language is ahead by 5 nats, so that short ones in
  doubt stay; without letters it goes.

`python -m experiments.translation.mt_filter --data FOLDER --score-precision bf16 --workers 6` runs all of it on a GPU.
The scores come first and are kept in `--cache`: two minutes on an H200 with the network and the fits of mt_retrieval
there. The selections, each a part, are then shared among `--workers` processes: 30 trainings, of this page and of
[mt_prefiltered](mt_prefiltered.md), six at a time, took 12 minutes, and one alone two. `--seeds` trains on each several
times; scores stay the same. The scores behind this page lie in [mt_filter_scores](data/mt_filter_scores): where the
cache has none, selections with `--score-precision bf16` are made by them, without the network. With `--small`, phrases
of a small grammar stand in: it shows that everything runs, and nothing else. [What the folder holds, and how to run the
paper's size](../translation_data.md)."""
VERDICT = """\
Likely reasons for the difference from the paper: 1% is 1,500 pairs here and a million there, and what sums select is
clean but short, 5 to 8 subwords where all pairs have 19. The paper's score takes captions for noise: few of its tenth
are captions. Half of the pairs by Arnoldi are worth more than all on captions, and less on news, where sums leave the
long sentences out.

Per token, a quarter and half of the pairs are worth more than all of them by every score tried, most by the loss, which
costs one forward pass. It also separates noise from clean pairs best, and wrong alignments that people marked. These
rows are of one training each; the deviations of those of two say how far BLEU may differ."""
_RULES = ("AFRL", "Alibaba", "Microsoft", "all")


def repeats(cells: Mapping[str, Cell], key: str) -> float:
    """Return the standard deviation of BLEU over trainings, pooled over the selections that have several."""
    found = [cell[f"{key}_deviation"] ** 2 for cell in cells.values() if f"{key}_deviation" in cell]
    if not found:
        raise MissingNumberError(f"two trainings on one selection, {key}")
    return (sum(found) / len(found)) ** 0.5


def bleu_pair(records: Records, part: str, first: str, second: str, test: str, label: str) -> Pair:
    """Pair the BLEU of two selections after the last step, by training.

    Where both are below 1, the networks do not translate and no order is read off.
    """
    if part not in records:
        raise MissingNumberError(part)
    key = bleu_key(test, max(steps_of(records[part])))
    samples = [_by_training(records, part, name, key) for name in (first, second)]
    hindrance = "both below 1" if max(found.mean for found in samples) < 1 else ""
    stated = repeats(over_seeds(records[part])["cells"], key)
    return paired(f"{label}, {TESTS[test]}: ", samples, stated, hindrance)


def _by_training(records: Records, part: str, name: str, key: str) -> Sample:
    cells = records[part]["cells"]
    names = [found for found in cells if found == name or found.startswith(f"{name}, seed ")]
    places: dict[str, Place] = {found.removeprefix(name): (part, "cells", found, key) for found in names}
    if not places:
        raise MissingNumberError(f"{name}, {key}")
    return sample(records, places)


TESTS = {"newstest2016": "news", "multi30k": "captions"}
_BLEU = "BLEU after the last step"


def _over(records: Records, first: Chosen, second: Chosen, label_of: str) -> list[Pair]:
    return [bleu_pair(records, "selections", label(*first), label(*second), test, label_of) for test in TESTS]


CLAIMS = (
    order(
        "Arnoldi's selection gives more BLEU than RandProj's of the same size (paper: 19.6 against 8.7, 30.3 against "
        "27.9, 30.8 against 28.6).",
        _BLEU,
        lambda r: [pair for k in FEW for pair in _over(r, (PAPER_WAY, k), (RAND_PROJ, k), f"{k}%")],
        is_main=True,
    ),
    order(
        "A tenth of the pairs by Arnoldi gives more than all (paper: 30.8 BLEU against 17.8).",
        _BLEU,
        lambda r: _over(r, (PAPER_WAY, 10), (NONE, None), "10%"),
        is_main=True,
    ),
    order(
        "What rules leave gives more than all pairs (paper: 22.6 BLEU against 17.8).",
        _BLEU,
        lambda r: _over(r, (PREFILTER, None), (NONE, None), "rules"),
    ),
)


def tables(records: Records) -> list[str]:
    """Return the tables of corpus, ranking, BLEU with the paper's, and composition of selections."""
    notes = Notes()
    lines: list[str] = []
    if "scores" in records:
        cells = records["scores"]["cells"]
        lines += [*corpus_table(cells), "", *_told(cells.get("languages")), ""]
    for recipe, title in NETWORKS.items():
        if (part := part_of("scores", recipe)) in records:
            cells = records[part]["cells"]
            lines += [f"### {title}", "", *network_table(cells.get("network"), notes), "", *_rankings(cells, notes), ""]
    if "selections" in records:
        record = over_seeds(records["selections"])
        lines += ["### Selections, by scores of the first network", ""]
        lines += [*_bleu(record, notes), "", *makeup_table(record["cells"], [label(*one) for one in _ALL], notes), ""]
    return [*lines, *notes.lines()]


def corpus_table(cells: dict[str, Cell]) -> list[str]:
    """Return the table of the corpus's composition, and of what the rules keep."""
    kinds, kept = cells.get("corpus", {}).get("kinds", {}), cells.get("prefilter", {}).get("kept", {})
    rows = [
        (
            f"{kind}: {KINDS[kind]}",
            *(f"{found[key]:{pattern}}" for key, pattern in _COLUMNS.items()),
            *_percents(kept.get(kind)),
        )
        for kind, found in kinds.items()
    ]
    total = f"{cells.get('corpus', {}).get('pairs', 0):,d}"
    rows.append(("all", total, "", "", *_percents(kept.get("all"))))
    return table(("kind of pair", *_COLUMNS, *(f"kept by {rule}, %" for rule in _RULES)), rows)


_COLUMNS = {"pairs": ",d", "German words": ".1f", "English words": ".1f"}


def _percents(kept: Cell | None) -> list[str]:
    return [f"{kept[rule]:.1f}" if kept else "–" for rule in _RULES]


def _told(cell: Cell | None) -> list[str]:
    if not cell or "German" not in cell:
        return []
    return [
        "The language classifier, on sentences it has not learned from: "
        f"{cell['German']:.1f}% of German and {cell['English']:.1f}% of English ones are recognised "
        f"({cell['German stays']:.1f}% and {cell['English stays']:.1f}% stay, for the doubt); of sentences in other "
        f"languages, {cell['other, not German']:.1f}% are told from German and {cell['other, not English']:.1f}% from "
        f"English ({cell['other goes as German']:.1f}% and {cell['other goes as English']:.1f}% go). Some of the last "
        "are English in truth. Its settings were chosen among four by such numbers on the same files, which flatters "
        "them."
    ]


def _rankings(cells: dict[str, Cell], notes: Notes) -> list[str]:
    noise = [kind for kind in KINDS if kind != CLEAN and kind not in WITHOUT_VERDICT]
    keys = ["auc", "ap", *(f"auc {kind}" for kind in noise), "auc objected", "auc misaligned"]
    headings = ["all noise: AUC", "AP", *noise, "judged: not valid", "judged: wrong alignment or language"]
    rows = [
        (
            name,
            *(shown(cells.get(name), key, ".1f", notes) for key in keys),
            shown(cells.get(name), "below 0", ".1f", notes),
            shown(cells.get(name), "seconds", ".0f", notes),
        )
        for score in SCORES
        for name in (score, score + PER_TOKEN)
    ]
    said = (
        "High scores against clean pairs, kind by kind; against valid pairs where people judged. AUC in percent. "
        "A score below 0 comes of directions of negative curvature, and is selected first."
    )
    return [*table(("score", *headings, "below 0, %", "seconds"), rows), "", said]


def steps_of(record: Record) -> list[int]:
    """Return the numbers of steps after which BLEU was measured."""
    return list(record["settings"]["at"])


def bleu_columns(record: Record) -> dict[str, str]:
    """Return the column headings of BLEU by the keys of their numbers."""
    return {bleu_key(name, steps): f"{name} @{steps:,}" for name in SETS for steps in steps_of(record)}


def bleu_numbers(cell: Cell | None, record: Record, notes: Notes) -> list[str]:
    """Format BLEU, with the standard deviation over trainings if there are several."""
    texts = []
    for key in bleu_columns(record):
        text, deviation = shown(cell, key, ".1f", notes), (cell or {}).get(f"{key}_deviation")
        texts.append(text if deviation is None else f"{text} ± {deviation:.1f}")
    return texts


def summary(records: Records) -> list[str]:
    """Return the table of BLEU alone."""
    notes = Notes()
    found = _bleu(over_seeds(records["selections"]), notes, tuple(PAPER)) if "selections" in records else []
    return [*found, "", *notes.lines()] if notes.texts else found


def _bleu(record: Record, notes: Notes, chosen: Sequence[Chosen] = _ALL) -> list[str]:
    cells, rows = record["cells"], []
    columns = {"trainings": ("trainings", "d")}
    if any("train_loss" in cell for cell in cells.values()):
        columns = {"training loss": ("train_loss", ".2f")} | columns
    for way, percent in chosen:
        cell = cells.get(label(way, percent))
        if cell is None and (way, percent) not in PAPER:
            continue
        paper = [f"{value:.1f}" for value in PAPER.get((way, percent), ())] or ["–", "–"]
        size = shown(cell, "percent", ".0f", notes) if percent is None else str(percent)
        more = [shown(cell, key, pattern, notes) for key, pattern in columns.values()]
        rows.append((way, size, *paper, *bleu_numbers(cell, record, notes), *more))
    headings = ("selected by", "%", "paper: BLEU @10k", "@200k", *bleu_columns(record).values(), *columns)
    return [*table(headings, rows), "", "The paper's rule-based filter left 14% of its corpus."]


def makeup_table(cells: dict[str, Cell], names: Sequence[str], notes: Notes) -> list[str]:
    """Return the table of the selections' composition."""
    rows = []
    for name in names:
        if name not in cells:
            continue
        cell = cells[name]
        kinds = cell.get("kinds", {})
        shares = [f"{kinds[kind]:.1f}" if kind in kinds else "–" for kind in KINDS]
        sizes = {"pairs": ",d", "length": ".1f", "captions": ".1f"}
        rows.append((name, *(shown(cell, key, pattern, notes) for key, pattern in sizes.items()), *shares))
    headings = ("pairs", "subwords of the longer side", "captions, clean or comparable, %")
    return table(("selection", *headings, *(f"{kind}, %" for kind in KINDS)), rows)


def figures(records: Records, *, small: bool) -> dict[str, Drawing]:
    """Draw BLEU after the last step against the share selected."""
    if "selections" not in records:
        return {}
    rows = {way: {percent: label(way, percent) for percent in percents} for way, percents in PER_WAY.items()}
    levels = {"all pairs": NONE, ORACLE: ORACLE}
    return bleu_figures(over_seeds(records["selections"]), rows, "pairs selected, %", levels)


def bleu_figures(
    record: Record, rows: dict[str, dict[int, str]], across: str, levels: dict[str, str] | None = None
) -> dict[str, Drawing]:
    """Draw BLEU after the last step, with a figure for sums and one for scores per token for each test set.

    Args:
        record: What was measured.
        rows: The names of the numbers, by score and by how many percent.
        across: What the percents are of.
        levels: Numbers that no percent belongs to, drawn all the way across, by what they are called.
    """
    last, drawn = max(steps_of(record)), dict[str, Drawing]()
    for name in SETS:
        for per_token in (False, True):
            ways = [way for way in rows if way.endswith(PER_TOKEN) == per_token and way != RANDOM]
            curves = [_curve(record["cells"], way, rows[way], bleu_key(name, last)) for way in (*ways, RANDOM)]
            found = [curve for curve in curves if curve is not None]
            if any(not curve.is_control for curve in found):
                found += _level_lines(record["cells"], levels or {}, bleu_key(name, last), found)
                said = PER_TOKEN if per_token else ""
                title = f"BLEU on {name} after {last:,} steps, scores{said or ' as they are'}"
                drawn[name + said.replace(" ", "_")] = partial(curves_svg, {title: found}, across, "BLEU")
    return drawn


def _curve(cells: dict[str, Cell], way: str, rows: dict[int, str], key: str) -> Curve | None:
    found = {percent: cells.get(row, {}).get(key) for percent, row in rows.items()}
    points = {percent: value for percent, value in found.items() if value is not None}
    # All scores share the number at 0, so a curve needs another one.
    if not any(points):
        return None
    name = way.removesuffix(PER_TOKEN)
    colour = None if way == RANDOM else list(SCORES).index(name)
    return Curve(name, list(points), list(points.values()), is_control=way == RANDOM, colour=colour)


def _level_lines(cells: dict[str, Cell], levels: dict[str, str], key: str, beside: Sequence[Curve]) -> list[Curve]:
    """Return single numbers as horizontal lines of the width of the curves."""
    across = [place for curve in beside for place in curve.across]
    ends = [min(across), max(across)]
    found = {title: cells.get(row, {}).get(key) for title, row in levels.items()}
    return [Curve(t, ends, [value] * 2, is_control=True) for t, value in found.items() if value is not None]
