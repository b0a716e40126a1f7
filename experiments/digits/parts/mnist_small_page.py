"""The page of the small network's experiment: text, tables and figures."""

from dataclasses import replace
from functools import partial
from itertools import pairwise

from experiments.digits.parts.pairs import STATED
from experiments.shared.claims import (
    Claim,
    Finding,
    MissingNumberError,
    Pair,
    Records,
    cell_sample,
    in_order,
    number,
    order,
    paired,
)
from harness.measure import Cell
from harness.plot import Curve, Drawing, curves_svg
from harness.record import Notes, shown, table

PAPER_ACCURACY = {"accuracy_test_given": 73.8, "accuracy_test_true": 92.3}
METHODS = ("Arnoldi", "RandProj", "Arnoldi, tail")
PROJECTED = ("Arnoldi", "RandProj", "RandProj, Gaussian")

ABOUT = """\
**In the paper** (its first two figures): Koh and Liang's small convolutional network, for which the Hessian can be
written down, trained for 500,000 steps in batches of 500 with a penalty of 5·10⁻³, on a tenth of MNIST in which a fifth
of the labels had been changed. The first figure is the distance (optimal transport, all weights equal) of the top K
eigenvalues that Arnoldi (n = 200) and random projections find to the exact ones; the second, AUC and AP of finding the
wrong labels by self-influence, against K. Both are drawings without numbers; the claims are what the text reads from
them.

**Here**, at the same size: the same network (2,616 parameters: five 3×3 convolutions of 8 channels with strides 1, 2,
1, 2, 1 and tanh, a 1×1 convolution to 10 with tanh, the mean over places, a linear layer), the penalty on weights and
not on biases, the 6,000 digits that travel with the package, one training. All but the first epochs is in float64.

- Training: 250 epochs of Adam in batches of 500, then up to 1,000 iterations of L-BFGS on all digits, instead of
  500,000 steps. The gradient that is left is in the first table.
- The exact Hessian has one eigenvalue that is zero whatever the training: a shift of all output biases changes no
  probability. It is inverted with 10⁻⁸ added to the diagonal; no gradient has a component there.
- Arnoldi is the paper's estimator: Hessian (of all digits), the largest |λ|, nothing beyond them. With K = n = 200 its
  last pairs have not settled.
- RandProj's eigenvalues are those of G·H·Gᵀ for ten draws of G: orthonormal rows, so that it is H restricted to their
  span, and Gaussian ones with E[GᵀG] = I, which RandProj scores with. The paper does not say which it drew.
- TracIn: 25 checkpoints, one every 10 epochs of Adam. LiSSA: r = 100 on batches of 32, on `--lissa-rows` random digits.
- Added: "tail" is this package's estimator (Gauss-Newton, and |λ_K| for all directions beyond the top K) at the same
  number of products; the loss and the length of the gradient of each digit, which cost one pass.

The full size takes six and a half minutes on an H200; `--cache` keeps the network and the exact Hessian, which alone
takes hours on a CPU."""


def tables(records: Records) -> list[str]:
    """Return the tables of network, claims, eigenvalues and retrieval."""
    cells = {name: record["cells"] for name, record in records.items()}
    notes = Notes()
    lines: list[str] = []
    if "network" in cells:
        lines += [*_network(cells["network"]["network"], notes), ""]
    eigenvalues, found = cells.get("eigenvalues", {}), cells.get("retrieval", {})
    if eigenvalues:
        lines += ["### Distance of the top K eigenvalues to the exact ones", "", *_eigenvalues(eigenvalues, notes), ""]
    if found:
        lines += ["### Wrong labels found (percent)", "", *_retrieval(found, notes), ""]
    return [*lines, *notes.lines()]


def _network(cell: Cell, notes: Notes) -> list[str]:
    rows = [
        ("accuracy on test digits, a fifth relabeled too (%)", "accuracy_test_given", ".1f"),
        ("accuracy on test digits, true labels (%)", "accuracy_test_true", ".1f"),
        ("accuracy on training digits, given labels (%)", "accuracy_train_given", ".1f"),
        ("parameters", "parameters", ",d"),
        ("length of the gradient at the end", "gradient_norm", ".1e"),
        ("iterations of L-BFGS", "iterations", ",d"),
    ]
    return table(
        ("the network", "here", "paper"),
        [(text, shown(cell, key, form, notes), str(PAPER_ACCURACY.get(key, "–"))) for text, key, form in rows],
    )


def summary(records: Records) -> list[str]:
    """Return the table of accuracies, the only numbers that the paper gives."""
    return _network(records["network"]["cells"]["network"], Notes()) if "network" in records else []


_PART = {"distance": "eigenvalues", "auc": "retrieval"}


def _keeps_of(records: Records, key: str) -> list[int]:
    keeps = _keeps(records.get(_PART[key], {"cells": {}})["cells"])
    if not keeps:
        raise MissingNumberError(key)
    return keeps


def _pair(records: Records, label: str, key: str, first: str, second: str) -> Pair:
    samples = (cell_sample(records, _PART[key], name, key, f"{key}_sd") for name in (first, second))
    return paired(label, samples, STATED.get(key, 0.0))


def _at_every_keep(records: Records, key: str, first: str, second: str) -> list[Pair]:
    return [
        _pair(records, f"K = {keep}: ", key, f"{first}, K={keep}", f"{second}, K={keep}")
        for keep in _keeps_of(records, key)
    ]


def _rising(records: Records) -> list[Pair]:
    keeps = _keeps_of(records, "auc")
    return [
        _pair(records, f"K = {later} after {before}: ", "auc", f"Arnoldi, K={later}", f"Arnoldi, K={before}")
        for before, later in pairwise(keeps)
    ]


def _passes_exact(records: Records) -> Finding:
    keep = _keeps_of(records, "auc")[-2:][0]  # the largest but n, whose last pairs have not settled
    pair = _pair(records, f"K = {keep}: ", "auc", f"Arnoldi, K={keep}", "exact Hessian")
    below = round(number(records, "eigenvalues", "cells", "exact", "negative"))
    if below:
        why = f"{below} exact eigenvalues are below zero, so the network is not at a minimum"
        pair = replace(pair, hindrance=why)
    return in_order("AUC", [pair])


CLAIMS = (
    order(
        "Arnoldi's eigenvalues are closer to the exact ones than those of random projections (paper: a figure).",
        "Distance of RandProj (orthonormal rows) against Arnoldi's",
        lambda records: _at_every_keep(records, "distance", "RandProj", "Arnoldi"),
        is_main=True,
    ),
    order(
        "Arnoldi finds more than RandProj at the same K (paper: a figure).",
        "AUC",
        lambda records: _at_every_keep(records, "auc", "Arnoldi", "RandProj"),
        is_main=True,
    ),
    order("Arnoldi finds more the larger K is (paper: a figure).", "AUC", _rising),
    Claim("With large K, Arnoldi finds more than the exact Hessian (paper: a figure).", _passes_exact),
)


def _eigenvalues(cells: dict[str, Cell], notes: Notes) -> list[str]:
    rows = [
        (str(keep), *(_spread(cells.get(f"{name}, K={keep}"), "distance", ".2g", notes) for name in PROJECTED))
        for keep in _keeps(cells)
    ]
    lines = table(("K", "Arnoldi", "RandProj, orthonormal rows", "RandProj, Gaussian rows"), rows)
    exact = cells.get("exact", {})
    if "deviation" in exact:
        lines += [
            "",
            f"The exact eigenvalues lie between {exact['smallest']:.2g} and {exact['largest']:.3g}, "
            f"{exact['negative']} of them below zero; their standard deviation is {exact['deviation']:.2g}.",
        ]
    return lines


def _retrieval(cells: dict[str, Cell], notes: Notes) -> list[str]:
    order = [f"{name}, K={keep}" for name in METHODS for keep in _keeps(cells)]
    order += [name for name in cells if ", K=" not in name]
    rows = [
        (
            name + (f" ({cells[name]['rows']:,} digits)" if "rows" in cells[name] else ""),
            _spread(cells[name], "auc", ".1f", notes),
            _spread(cells[name], "ap", ".1f", notes),
            shown(cells[name], "seconds", ".2g", notes),
            shown(cells[name], "fit_seconds", ".2g", notes),
        )
        for name in order
        if name in cells
    ]
    return table(("method", "AUC", "AP", "scoring (s)", "fit (s)"), rows)


def figures(records: Records, *, small: bool) -> dict[str, Drawing]:
    """Draw the paper's two figures, the second as one figure for AUC and one for AP."""
    eigenvalues = records.get("eigenvalues", {}).get("cells", {})
    found = records.get("retrieval", {}).get("cells", {})
    drawn = dict[str, Drawing]()
    if _keeps(eigenvalues):
        titles = ("Arnoldi", "orthonormal rows", "Gaussian rows")
        curves = [Curve("deviation of exact", level=eigenvalues.get("exact", {}).get("deviation"), is_control=True)]
        for title, name in zip(titles, PROJECTED, strict=True):
            far = {keep: distance for keep, distance in by_keep(eigenvalues, name, "distance").items() if distance > 0}
            curves.append(Curve(title, list(far), list(far.values())))
        panels = {"Top eigenvalues by Arnoldi, and by RandProj with two kinds of rows": curves}
        drawn["eigenvalues"] = partial(curves_svg, panels, "K", "distance to the exact ones", log=True)
    for key in ("auc", "ap") if _keeps(found) else ():
        panels = {"Wrong labels found": _curves(found, key)}
        drawn[key] = partial(curves_svg, panels, "K", f"{key.upper()} (%)")
    return drawn


def _curves(cells: dict[str, Cell], key: str) -> list[Curve]:
    curves = []
    for name in METHODS:
        values, spread = by_keep(cells, name, key), by_keep(cells, name, f"{key}_sd")
        if values:
            band = list(spread.values()) if len(spread) == len(values) else None
            curves.append(Curve(name, list(values), list(values.values()), band))
    ends = [_keeps(cells)[0], _keeps(cells)[-1]]
    levels = {name: cell[key] for name, cell in cells.items() if ", K=" not in name and key in cell}
    levels.pop("gradient norm", None)
    curves += [Curve(n, ends, [level, level], is_control=n == "loss") for n, level in levels.items()]
    return curves


def by_keep(cells: dict[str, Cell], name: str, key: str) -> dict[int, float]:
    """Return one number of a method's cells by K, without failures."""
    return {
        keep: cells[f"{name}, K={keep}"][key] for keep in _keeps(cells) if key in cells.get(f"{name}, K={keep}", {})
    }


def _keeps(cells: dict[str, Cell]) -> list[int]:
    return sorted({int(name.rpartition("=")[2]) for name in cells if ", K=" in name})


def _spread(cell: Cell | None, key: str, pattern: str, notes: Notes) -> str:
    text = shown(cell, key, pattern, notes)
    return f"{text} ± {cell[f'{key}_sd']:{pattern}}" if cell and f"{key}_sd" in cell else text
