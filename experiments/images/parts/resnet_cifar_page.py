"""The page of `experiments.images.resnet_cifar`: the paper's table, the orders in it, and which of them are seen."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from experiments.shared.claims import NOT_SEEN, SEEN, UNDECIDED, Claim, Finding, MissingNumberError, Records, number
from experiments.shared.orders import APART, RULE, Difference, difference
from harness.measure import Cell
from harness.plot import Curve, Drawing, curves_svg
from harness.record import Notes, Record, shown, table

KEEPS = (10, 20)
SHARES = {"top10": "top 10%", "top20": "top 20%", "all": "100%"}
"""Shares of the parameters by the part that measures them."""
METHODS = ("Arnoldi", "RandProj", "Arnoldi + tail")
CONTROLS = ("gradient norm", "loss")
PAPER = {  # The paper's AUC and AP by parameters, method and K
    ("top 10%", "Arnoldi", 10): (94.2, 64.4),
    ("top 10%", "RandProj", 10): (93.9, 62.3),
    ("top 10%", "Arnoldi", 20): (93.9, 61.3),
    ("top 10%", "RandProj", 20): (94.0, 62.4),
    ("top 20%", "Arnoldi", 10): (94.0, 62.5),
    ("top 20%", "RandProj", 10): (93.8, 61.7),
    ("top 20%", "Arnoldi", 20): (93.6, 59.4),
    ("top 20%", "RandProj", 20): (93.9, 61.9),
    ("100%", "Arnoldi", 10): (93.1, 57.0),
    ("100%", "RandProj", 10): (93.2, 59.0),
    ("100%", "Arnoldi", 20): (93.3, 57.4),
    ("100%", "RandProj", 20): (93.7, 59.2),
}
PAPER_NEGATIVE, PAPER_ACCURACY = 7, 98.6
PAPER_DEVIATION, PAPER_RUNS = 0.7, 5
PAPER_APART = APART * PAPER_DEVIATION * (2 / PAPER_RUNS) ** 0.5
"""The smallest difference of the paper's AP that is counted as one: by its deviations over five runs."""

ABOUT = f"""\
**The paper** fine-tuned a pretrained ViT-L/32 (300M parameters, trained by sharpness-aware minimisation) on CIFAR-10 to
{PAPER_ACCURACY}% test accuracy, gave 10% of the images another label, and ranked them by self-influence. Each product
of its Arnoldi iteration took 8,192 images; of the top 10 or 20 eigenpairs only those with λ > 0 counted.

**Here** the network is a published ResNet-20 (269,722 parameters), trained by others on the 50,000 clean training
images. 10% of 5,000 test images, which it has not seen, get another label, with five seeds; curvature is that of the
15,000 training images at hand. BatchNorm uses its stored statistics. "Top 10%" takes whole tensors from the output down
until they hold a tenth of the parameters; the first table has the share they reach.

- *Arnoldi* is the paper's estimator: Hessian, 200 products, each on 4,096 new images (`--sample`), λ > 0 only, no tail.
- *RandProj*: 20 draws.
- *Arnoldi + tail* is ours: Gauss-Newton, 100 products on one sample of the same size, what lies beyond K counted by
  δ = λ_K.
- *Gradient norm*: all of the gradient, no curvature. *Loss*: one forward pass.

Curvature does not depend on the labels of test images, so one fit serves all seeds of the noise. Both kinds of Arnoldi
are fitted with three seeds of their own (sample and start vector).

`python -m experiments.images.resnet_cifar --data FOLDER` runs all of it on a GPU. FOLDER holds the images and the
network, `cifar10_resnet20_weights.npz`; `--download` fetches the images only."""

_Row = tuple[str, str, int]
"""Part, method and K; K is 0 for scores without one."""


def cell_name(method: str, keep: int, seed: int) -> str:
    """Return the name of the numbers of one fit."""
    return f"{method}, K={keep}, fit {seed}"


@dataclass(frozen=True)
class Order:
    """Two scores that are compared."""

    claim: str
    first: _Row
    second: _Row

    @property
    def paper(self) -> float | None:
        """The paper's difference of AP."""
        both = [PAPER.get((SHARES[part], method, keep)) for part, method, keep in (self.first, self.second)]
        return None if both[0] is None or both[1] is None else both[0][1] - both[1][1]

    @property
    def is_told(self) -> bool:
        """Whether the paper's difference exceeds what its deviations explain."""
        return self.paper is not None and abs(self.paper) > PAPER_APART

    def verdict(self, found: Difference) -> str:
        """Say whether the paper's order is seen."""
        if self.paper is None or not self.is_told:
            return _TOLD if found.is_apart else _LEVEL
        if not found.is_apart:
            return _OPEN
        return _SEEN if found.mean * self.paper > 0 else _OPPOSITE


_SEEN, _OPPOSITE, _OPEN = "seen", "opposite", "cannot be told"
_TOLD, _LEVEL = "told apart", "not told apart"
WHERE, CURVATURE = "top 10% against 100%", "Arnoldi against RandProj"
NUMBER = "K = 10 against K = 20"


def orders() -> Iterator[Order]:
    """List the comparisons: those of the paper's table, then those with scores that it does not have."""
    for part in SHARES:
        for keep in KEEPS:
            yield Order(CURVATURE, (part, "Arnoldi", keep), (part, "RandProj", keep))
    for method in METHODS[:2]:
        for keep in KEEPS:
            yield Order(WHERE, ("top10", method, keep), ("all", method, keep))
    for part in SHARES:
        yield Order(NUMBER, (part, "Arnoldi", 10), (part, "Arnoldi", 20))
    for other in ("Arnoldi + tail", *CONTROLS):
        for part in SHARES:
            keep = 0 if other in CONTROLS else KEEPS[0]
            yield Order(f"Arnoldi against {other}", (part, "Arnoldi", KEEPS[0]), (part, other, keep))


def numbers(records: Mapping[str, Record], row: _Row, key: str) -> list[list[float]]:
    """Return the numbers of a score for every fit or draw (rows) and seed of the noise; empty if there are none."""
    return [each for cell in _cells(records, row) for each in cell[key]]


def compared(records: Mapping[str, Record]) -> list[tuple[Order, Difference]]:
    """Compare all pairs of which both scores were measured, by AP."""
    found = []
    for order in orders():
        both = [numbers(records, row, "ap") for row in (order.first, order.second)]
        if all(both):
            found.append((order, difference(*both)))
    return found


def _verdicts(claim: str) -> Callable[[Records], Finding]:
    """Return the judge of the orders of one kind that the paper has."""

    def judge(records: Records) -> Finding:
        found = [(o, d, o.verdict(d)) for o, d in compared(records) if o.claim == claim and o.is_told]
        if not found:
            raise MissingNumberError(claim)
        words = [word for *_, word in found]
        outcome = NOT_SEEN if _OPPOSITE in words else UNDECIDED if _OPEN in words else SEEN
        told = [f"{_where(o)} {d.mean:+.1f} ± {d.error:.1f} (paper: {o.paper:+.1f}), {word}" for o, d, word in found]
        return Finding(outcome, f"Differences of AP, {_OVER}: {'; '.join(told)}.", _in_brief(words))

    return judge


def _where(order: Order) -> str:
    parts = dict.fromkeys(SHARES[part] for part, *_ in (order.first, order.second))
    method = f"{order.first[1]}, " if order.first[1] == order.second[1] else ""
    keeps = dict.fromkeys(str(keep) for *_, keep in (order.first, order.second))
    return f"{method}{' against '.join(parts)}, K = {' against '.join(keeps)}:"


def _in_brief(words: Sequence[str]) -> str:
    counts = Counter(words)
    told = ", ".join(f"{counts[word]} {word}" for word in (_SEEN, _OPPOSITE, _OPEN) if counts[word])
    return f"Of {len(words)} orders of AP in the paper, {_OVER}: {told}."


def _level(records: Records) -> Finding:
    levels = {name: _levels(records, name) for name in ("Arnoldi", "RandProj")}
    if not all(levels.values()):
        raise MissingNumberError("AP")
    least = min(ap for _, ap in PAPER.values())
    ranges = "; ".join(f"{name} {min(aps):.0f} to {max(aps):.0f}" for name, aps in levels.items())
    right = number(records, "all", "cells", "network", "accuracy")
    told = f"AP by {ranges}, {_OVER}; the network is {right:.1f}% right (paper: {PAPER_ACCURACY}%)."
    return Finding(SEEN if min(map(min, levels.values())) >= least else NOT_SEEN, told)


def _negative(records: Records) -> Finding:
    shares = [cell["negative"] for cell in _cells(records, ("all", "Arnoldi", KEEPS[0]))]
    if not shares:
        raise MissingNumberError("negative eigenvalues")
    share = float(np.mean(shares))
    is_like = PAPER_NEGATIVE / _FACTOR < share < PAPER_NEGATIVE * _FACTOR
    told = f"{share:.1f}% over {len(shares)} fits of all parameters; seen within a factor of {_FACTOR}."
    return Finding(SEEN if is_like else NOT_SEEN, told)


_OVER = "5 seeds of the noise, 3 fits"
_FACTOR = 1.5

CLAIMS = (
    Claim(
        "Self-influence finds wrong labels of held-out images with an AP of at least 57 (paper: 57.0 to 64.4).",
        _level,
        is_main=True,
    ),
    Claim(
        "The top tenth of the parameters finds more than all (paper, K = 10: 64.4 AP against 57.0, 62.3 against 59.0).",
        _verdicts(WHERE),
        is_main=True,
    ),
    Claim(
        "Arnoldi is ahead of RandProj in the top tenth at K = 10 (64.4 AP against 62.3), and behind it in the top "
        "fifth at K = 20 (59.4 against 61.9) and over all parameters (57.0 against 59.0, 57.4 against 59.2).",
        _verdicts(CURVATURE),
    ),
    Claim(
        "Arnoldi finds more with K = 10 than with K = 20 in the top layers (paper: 64.4 AP against 61.3, 62.5 against "
        "59.4).",
        _verdicts(NUMBER),
    ),
    Claim(f"Negative eigenvalues carry {PAPER_NEGATIVE}% of the top hundred's mass.", _negative),
)


def _levels(records: Mapping[str, Record], method: str) -> list[float]:
    found = [numbers(records, (part, method, keep), "ap") for part in SHARES for keep in KEEPS]
    return [float(np.mean(each)) for each in found if each]


def _cells(records: Mapping[str, Record], row: _Row) -> list[Cell]:
    """Return the cells of a score that were measured, of all its fits."""
    part, method, keep = row
    cells = records.get(part, {"cells": {}})["cells"]
    start = f"{method}, K={keep}, fit " if keep else method
    return [cell for name, cell in cells.items() if name.startswith(start) and "failed" not in cell]


def summary(records: Mapping[str, Record]) -> list[str]:
    """Return the table with the paper's numbers."""
    return _scores(records)


def tables(records: Mapping[str, Record]) -> list[str]:
    """Return the tables of the network, of every score with the paper's numbers, and of the orders."""
    notes = Notes()
    lines = [*_network(records, notes), "", *_scores(records), ""]
    found = compared(records)
    if found:
        rows = [_order(order, gap) for order, gap in found]
        headings = ("comparison by AP", "parameters", "K", "first − second", "standard error", "paper", "verdict")
        about = (
            f"{RULE} The paper has an order where its difference exceeds {PAPER_APART:.1f}, as many standard errors by "
            "its deviations; elsewhere the verdict says only whether the two are told apart here."
        )
        lines += [about, "", *table(headings, rows), ""]
    return [*lines, *_failures(records, notes), *notes.lines()]


def _network(records: Mapping[str, Record], notes: Notes) -> list[str]:
    networks = {part: records[part]["cells"].get("network") for part in SHARES if part in records}
    rows = [(SHARES[part], *_facts(records, part, cell, notes)) for part, cell in networks.items()]
    headings = (
        "parameters",
        "number",
        "share",
        "negative λ",
        "λ > 0 of the top 10",
        "of 20",
        "Hessian fit, s",
        "scoring, s",
    )
    known = next((cell for cell in networks.values() if cell is not None and "failed" not in cell), None)
    said = "Accuracy is not measured yet."
    if known is not None:
        found = f"{known['accuracy']:.1f}% of {known['tests']:,} test images"
        said = f"The network predicts {found} as published (paper: {PAPER_ACCURACY}%)."
    return [
        f"{said} Negative λ: their share in percent of the sum of |λ| over the top 100 (paper: {PAPER_NEGATIVE}). "
        "Numbers of a fit are means over fits.",
        "",
        *table(headings, rows),
    ]


def _facts(records: Mapping[str, Record], part: str, cell: Cell | None, notes: Notes) -> list[str]:
    fits = {keep: _cells(records, (part, "Arnoldi", keep)) for keep in KEEPS}
    counts = ["–" if not fits[keep] else f"{np.mean([fit['directions'] for fit in fits[keep]]):.1f}" for keep in KEEPS]
    negative, took, scoring = (_mean(fits[KEEPS[0]], key) for key in ("negative", "fit_seconds", "score_seconds"))
    share = "–" if cell is None or "failed" in cell else f"{cell['parameters'] / cell['all_parameters']:.1%}"
    return [shown(cell, "parameters", ",", notes), share, negative, *counts, took, scoring]


def _mean(cells: list[Cell], key: str) -> str:
    return f"{np.mean([cell[key] for cell in cells]):.1f}" if cells else "–"


def _scores(records: Mapping[str, Record]) -> list[str]:
    headings = ("parameters, score", "K", "paper: AUC", "AP", "AUC", "± noise", "AP", "± noise", "± fits")
    listed: list[_Row] = []
    for part in SHARES:
        listed += [(part, method, keep) for keep in KEEPS for method in METHODS] + [(part, CONTROLS[0], 0)]
    rows = [_row(records, row, f"{SHARES[row[0]]}, {row[1]}") for row in listed]
    measured = next((part for part in SHARES if numbers(records, (part, "loss", 0), "ap")), "all")
    rows.append(_row(records, (measured, "loss", 0), "loss"))
    about = (
        "Percent, means over fits or draws and over seeds of the noise. *± noise*: standard deviation over seeds of "
        "the noise, of means over fits or draws. *± fits*: over fits or draws, of means over the noise. The paper's "
        f"deviations over {PAPER_RUNS} runs: 0.1 for AUC, {PAPER_DEVIATION} for AP."
    )
    return [about, "", *table(headings, rows)]


def _row(records: Mapping[str, Record], row: _Row, title: str) -> list[str]:
    part, method, keep = row
    known = PAPER.get((SHARES[part], method, keep))
    theirs = ["–", "–"] if known is None else [f"{value:.1f}" for value in known]
    auc, ap = (np.array(numbers(records, row, key)) for key in ("auc", "ap"))
    ours = ["–"] * 5
    if ap.size:
        found: list[Any] = [auc.mean(), _spread(auc.mean(axis=0)), ap.mean(), _spread(ap.mean(axis=0))]
        ours = [f"{value:.1f}" for value in found] + [f"{_spread(ap.mean(axis=1)):.1f}" if len(ap) > 1 else "–"]
    return [title, str(keep) if keep else "–", *theirs, *ours]


def _spread(values: np.ndarray) -> float:
    return float(values.std(ddof=1)) if len(values) > 1 else 0.0


def _order(order: Order, found: Difference) -> list[str]:
    parts = list(dict.fromkeys(SHARES[part] for part, *_ in (order.first, order.second)))
    keeps = list(dict.fromkeys(str(keep) for *_, keep in (order.first, order.second) if keep))
    method = f", {order.first[1]}" if order.first[1] == order.second[1] and order.claim == WHERE else ""
    paper = "–" if order.paper is None else f"{order.paper:+.1f}"
    numbers_of = [f"{found.mean:+.1f}", f"{found.error:.2f}", paper, order.verdict(found)]
    return [order.claim + method, " / ".join(parts), " / ".join(keeps), *numbers_of]


def _failures(records: Mapping[str, Record], notes: Notes) -> list[str]:
    failed = [
        f"{SHARES[part]}, {name}: {shown(cell, '', '', notes)}"
        for part, record in records.items()
        for name, cell in record["cells"].items()
        if "failed" in cell
    ]
    return ["Not measured: " + "; ".join(failed) + ".", ""] if failed else []


def figures(records: Mapping[str, Record], *, small: bool) -> dict[str, Drawing]:
    """Draw AP against the share of the parameters, with a panel for each K."""
    panels = {f"K = {keep}": _curves(records, keep) for keep in KEEPS}
    axes = "% of the parameters", "AP, %"
    return {"ap": partial(curves_svg, panels, *axes)} if any(panels.values()) else {}


def _curves(records: Mapping[str, Record], keep: int) -> list[Curve]:
    curves = []
    for method in (*METHODS, *CONTROLS):
        rows = [(part, method, 0 if method in CONTROLS else keep) for part in SHARES]
        found = [np.array(numbers(records, row, "ap")) for row in rows]
        shares = [_share(records, part) for part in SHARES]
        if all(each.size for each in found) and all(shares):
            means, spread = [each.mean() for each in found], [_spread(each.mean(axis=0)) for each in found]
            curves.append(Curve(method, shares, means, spread, is_control=method == "loss"))  # type: ignore[arg-type]
    return curves


def _share(records: Mapping[str, Record], part: str) -> float | None:
    cell = records.get(part, {"cells": {}})["cells"].get("network", {})
    return 100 * cell["parameters"] / cell["all_parameters"] if "parameters" in cell else None
