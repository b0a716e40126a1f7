"""The page of the layers: AP by selection of layers, method and K, with its spread over seeds."""

from functools import partial
from statistics import mean, stdev

from experiments.shared.claims import Pair, Records, order, paired, seed_sample
from experiments.translation.parts.mt_retrieval_page import cell_name, network_table
from experiments.translation.parts.network import ALL, DECODER, EMBEDDING, ENCODER, NO_EMBEDDING
from harness.measure import Cell
from harness.plot import Curve, Drawing, curves_svg
from harness.record import Notes, shown, table

KEPT = (10, 20, 50, 100)
SELECTIONS = (ALL, NO_EMBEDDING, ENCODER, DECODER)
ARNOLDI, PLAIN, GAUSS_NEWTON, RAND_PROJ = "Arnoldi", "Arnoldi, λ left out", "Gauss-Newton", "RandProj"
STARTS, PROJECTIONS = 3, 5
"""Seeds of Arnoldi, and of random projections."""
METHODS = (RAND_PROJ, ARNOLDI, PLAIN, GAUSS_NEWTON)
_READINGS = {"sums": "ap", "per token": "mean_ap"}
ABOUT = """\
The first network of [mt_retrieval](mt_retrieval.md) (dropout 0.3, 2,000 steps: it knows its training pairs by heart)
had Arnoldi behind RandProj over all layers and far ahead in the last three. Here that network is trained again, and the
same question asked over all layers, all but the embedding (one matrix for source, target and output), the encoder and
the decoder, with more directions and several seeds. Pairs are drawn as there, in two draws.

- *Arnoldi* is the paper's: the Hessian, 200 products on 512 new pairs each, one fit for every K. *λ left out* sums the
  same squared features without dividing them by λ, as RandProj does. *Gauss-Newton* differs in the matrix only.
- *RandProj* of several blocks of layers has the sum of the blocks' features, which is what directions over all of them
  give.
- AP in percent, mean ± standard deviation over seeds: three of Arnoldi (batches and start vector), five of RandProj.
  "Per token" divides a pair's gradient by its number of target tokens."""
VERDICT = ""


def cell_of(layers: str, method: str, keep: int, seed: int) -> str:
    """Return the name of a number of one seed."""
    return f"{cell_name(layers, method, keep)}, seed {seed}"


def _ahead(records: Records, layers: str) -> list[Pair]:
    return [
        paired(
            f"{words}, K = {keep}: ",
            (seed_sample(records, "layers", cell_name(layers, method, keep), key) for method in (ARNOLDI, RAND_PROJ)),
        )
        for words, key in _READINGS.items()
        for keep in KEPT
    ]


CLAIMS = tuple(
    order(
        f"{layers[0].upper()}{layers[1:]}: Arnoldi finds more than RandProj"
        + (" (paper: 47.8 AP against 31.3, 54.4 against 28.0)." if layers == ALL else "."),
        "AP by seed",
        partial(_ahead, layers=layers),
    )
    for layers in SELECTIONS
)


def tables(records: Records) -> list[str]:
    """Return the tables of the network, of AP, and of where the directions lie."""
    if "layers" not in records:
        return []
    cells, notes = records["layers"]["cells"], Notes()
    lines = [*network_table(cells.get("network"), notes), "", *_aps(cells, notes), "", *_directions(cells)]
    return [*lines, "", *notes.lines()]


def _aps(cells: dict[str, Cell], notes: Notes) -> list[str]:
    headings = ("layers, score", *(f"{words}: K = {keep}" for words in _READINGS for keep in KEPT))
    rows = []
    for layers, method in ((layers, method) for layers in SELECTIONS for method in METHODS):
        numbers = [
            _over_seeds(cells, cell_name(layers, method, keep), key) for key in _READINGS.values() for keep in KEPT
        ]
        if set(numbers) != {"–"}:
            rows.append((f"{layers}, {method}", *numbers))
    loss = [shown(cells.get("loss"), key, ".1f", notes) for key in _READINGS.values()]
    rows.append(("loss", *(value for text in loss for value in (text, *["–"] * (len(KEPT) - 1)))))
    return table(headings, rows)


def _values(cells: dict[str, Cell], row: str, key: str) -> list[float]:
    return [cell[key] for name, cell in cells.items() if name.startswith(f"{row}, seed ") and key in cell]


def _over_seeds(cells: dict[str, Cell], row: str, key: str, pattern: str = ".1f") -> str:
    values = _values(cells, row, key)
    if not values:
        return "–"
    spread = f" ± {stdev(values):{pattern}}" if len(values) > 1 else ""
    return f"{mean(values):{pattern}}{spread}"


def _directions(cells: dict[str, Cell]) -> list[str]:
    """Say where the directions lie, how many are of positive curvature, and how scores go with length."""
    keys = {f"in the {name}, %": f"share_{name}" for name in (EMBEDDING, ENCODER, DECODER)}
    rows = []
    for layers, method in ((layers, method) for layers in SELECTIONS for method in (ARNOLDI, GAUSS_NEWTON)):
        for keep in KEPT:
            row = cell_name(layers, method, keep)
            if _values(cells, row, "positive"):
                shares = [_values(cells, row, key) for key in keys.values()]
                numbers = [_over_seeds(cells, row, key, ".3g") for key in ("positive", "largest", "smallest")]
                rows.append(
                    (
                        f"{layers}, {method}",
                        str(keep),
                        *numbers,
                        *(f"{100 * mean(found):.0f}" if found else "–" for found in shares),
                        _over_seeds(cells, row, "spearman_length", ".2f"),
                        _over_seeds(cells, row, "fit_seconds", ".0f"),
                    )
                )
    headings = ("layers, fit", "K", "λ > 0", "largest λ", "K-th λ", *keys, "Spearman of scores with length", "seconds")
    return table(headings, rows)


def figures(records: Records, *, small: bool) -> dict[str, Drawing]:
    """Draw AP against K, one panel for each selection of layers and reading."""
    cells = records.get("layers", {"cells": {}})["cells"]
    panels = {}
    for layers in SELECTIONS:
        for words, key in _READINGS.items():
            curves = []
            for place, method in enumerate(METHODS):
                found = {keep: _values(cells, cell_name(layers, method, keep), key) for keep in KEPT}
                points = {keep: values for keep, values in found.items() if values}
                if points:
                    spread = [stdev(values) if len(values) > 1 else 0.0 for values in points.values()]
                    up = [mean(values) for values in points.values()]
                    curves.append(Curve(method, list(points), up, spread, colour=place))
            if curves:
                panels[f"{layers}, {words}"] = curves
    return {"ap": partial(curves_svg, panels, "K", "AP, %")} if panels else {}
