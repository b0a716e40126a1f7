"""Render the page of `bench.fidelity`: tables from its JSON file, with goals."""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from bench.page import write_page
from eigentrace.settings import counted
from harness.measure import Cell
from harness.record import Notes, Record, judged, shown, table

KS = (10, 20, 50, 100, 200)
SIZES = (128, 256, 512, 1024, 4096)
"""Numbers R of stored coordinates."""
DELTAS = tuple(10 ** (exponent / 2) for exponent in range(-7, 1))
"""Eight values of δ, half a decade apart."""
SHARES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
"""Values of EK-FAC's damping, as shares of the mean of its diagonal."""
EKFAC_CELL = "ekfac/auto"
ROUNDS = (1, 2, 3, 5, 10)
"""Products per query of refined scores."""
FACTORS = (0.1, 0.3, 3.0, 10.0)
"""Dampings of refined scores besides that of the training, as multiples of it."""
REGIMES = {"mlp-short": (0.01, 10), "mlp-fast": (0.05, 20), "mlp-slow": (0.002, 50)}
"""Learning rate and epochs of the trainings besides the default one."""
TAILS: tuple[Literal["auto", "shaped"] | None, ...] = (None, "auto", "shaped")
STORED_TAILS: tuple[Literal["auto", "shaped"], ...] = ("auto", "shaped")
_NAMES = {None: "truncated, as in the paper", "auto": "tail, δ = λ_K", "shaped": "shaped tail"}
# Goals, in percent.
_MLP_GOAL, _LOGISTIC_GOAL, _GAIN_GOAL, _GRID_GOAL, _STORED_GOAL, _OVERLAP_GOAL = 43.0, 80.0, 1.4, 0.95, 0.9, 90.0


def tail_cell(tail: str | None, keep: int) -> str:
    """Return the name of the cell of one K and tail."""
    return f"{tail or 'truncated'}/{keep}"


def grid_cell(keep: int, delta: float) -> str:
    """Return the name of the cell of one δ of the grid."""
    return f"delta/{keep}/{delta:.3g}"


def stored_cell(tail: str, keep: int, size: int) -> str:
    """Return the name of the cell of scores from stored features."""
    return f"stored/{tail}/{keep}/{size}"


def damped_cell(share: float) -> str:
    """Return the name of the cell of one damping of EK-FAC."""
    return f"ekfac/{share:g}"


def pairs_cell(damping: str, keep: int) -> str:
    """Return the name of the cell of EK-FAC corrected by eigenpairs."""
    return f"pairs/{damping}/{keep}"


def refined_cell(rounds: int, factor: float = 1.0) -> str:
    """Return the name of the cell of refined scores."""
    return f"refine/{rounds}" if factor == 1 else f"refine/{rounds}/{factor:g}"


def render(out: Path, small: bool) -> None:
    """Render the tables from the JSON file."""
    about = (
        "LDS (linear datamodelling score) in percent: the rank correlation, over 100 random halves of 5,000 digits, "
        "five networks trained on each, between the loss of a query and what the scores of its half predict, averaged "
        "over 500 queries. Intervals are 95%, by bootstrap over queries and halves."
    )
    write_page(
        out,
        "fidelity",
        "Scores against retraining",
        about,
        lambda regimes: _machine(regimes, goals=not small),
        small=small,
    )


def _machine(regimes: dict[str, Record], goals: bool) -> list[str]:
    notes, lines = Notes(), []
    for regime, record in regimes.items():
        recipe = record["settings"]
        lines += ["", f"### {regime}: learning rate {recipe['lr']:g}, {recipe['epochs']} epochs", ""]
        keeps = [k for k in KS if tail_cell("auto", k) in record["cells"]]
        cuts = table(["method", *(f"K = {k}" for k in keeps)], _cuts(regime, record, keeps, goals, notes))
        lines += cuts if keeps else ["Measured here: EK-FAC, corrected and refined scores, below."]
        ensembles = list(_ensembles(record, keeps, notes))
        if ensembles:
            lines += ["", "Averaged over networks from ten seeds:", ""]
            lines += table(["method", *(f"K = {k}" for k in keeps[-2:])], ensembles)
    damped = [row for regime, record in regimes.items() for row in _ekfac(regime, record, notes)]
    if damped:
        headings = [
            "regime",
            "damping 0.5 × mean, the default",
            *(f"{share:g} × mean" for share in SHARES),
            "share of the best",
        ]
        lines += ["", "### EK-FAC, by its damping", "", *table(headings, damped)]
    corrected = [row for regime, record in regimes.items() for row in _pairs(regime, record, notes)]
    if corrected:
        headings = ["regime", "damping", *(f"K = {k}" for k in KS)]
        lines += ["", "### EK-FAC, corrected by K eigenpairs", "", *table(headings, corrected)]
    solved = [row for regime, record in regimes.items() for row in _refined(regime, record, notes)]
    if solved:
        headings = ["regime", "preconditioner", *(counted(rounds, "product") for rounds in ROUNDS)]
        lines += ["", "### Solved, with the damping of the training", "", *table(headings, solved)]
        grid_of = [row for regime, record in regimes.items() for row in _factors(regime, record, notes)]
        headings = ["regime", *(f"{factor:g} ×" for factor in sorted((*FACTORS, 1.0)))]
        about = f"The same, {ROUNDS[-1]} products, with multiples of that damping:"
        lines += ["", about, "", *table(headings, grid_of)] if grid_of else []
    grid = [row for regime, record in regimes.items() for row in _grid(regime, record, goals, notes)]
    if grid:
        headings = ["regime", "K", "λ_K", "δ = λ_K", "best δ", "its LDS", "share of the best"]
        lines += ["", "### δ = λ_K against a grid of eight", "", *table(headings, grid)]
    stored = [row for regime, record in regimes.items() for row in _stored(regime, record, goals, notes)]
    if stored:
        headings = ["regime", "tail", "K", "R", "bytes", "energy held", "LDS", "of the exact", "top 20 rescored"]
        lines += ["", "### From stored features", "", *table(headings, stored)]
    return lines + (["", *notes.lines()] if notes.texts else [])


def _cuts(regime: str, record: Record, keeps: list[int], goals: bool, notes: Notes) -> Iterator[list[str]]:
    cells = record["cells"]
    yield ["gradient similarity", *[_with_interval(cells.get("gradient"), notes)] * len(keeps)]
    for tail in TAILS:
        row = []
        for keep in keeps:
            cell, truncated = cells.get(tail_cell(tail, keep)), cells.get(tail_cell(None, keep))
            text = _with_interval(cell, notes)
            if goals and tail == "auto" and keep == 100 and cell and "lds" in cell:
                goal = {"mlp": _MLP_GOAL, "logistic": _LOGISTIC_GOAL}.get(regime)
                text = judged(text, cell["lds"], goal, at_least=True)
                if regime == "mlp" and truncated and "lds" in truncated:
                    gain = cell["lds"] / truncated["lds"]
                    text += "; " + judged(f"{gain:.2f} × truncated", gain, _GAIN_GOAL, at_least=True)
            row.append(text)
        yield [_NAMES[tail], *row]


def _ekfac(regime: str, record: Record, notes: Notes) -> Iterator[list[str]]:
    cells = record["cells"]
    own, tried = cells.get(EKFAC_CELL), [cells.get(damped_cell(share)) for share in SHARES]
    known = [cell["lds"] for cell in tried if cell and "lds" in cell]
    if own and "lds" in own and known:
        share = f"{own['lds'] / max(*known, own['lds']):.3f}"
        yield [regime, _with_interval(own, notes), *(shown(cell, "lds", ".1f", notes) for cell in tried), share]


def _pairs(regime: str, record: Record, notes: Notes) -> Iterator[list[str]]:
    cells = record["cells"]
    for name, damping in (("that of the training, the default", "training"), ("0.5 × mean, that of EK-FAC", "ekfac")):
        found = [cells.get(pairs_cell(damping, keep)) for keep in KS]
        if any(found):
            yield [regime, name, *(_with_interval(cell, notes) for cell in found)]


def _refined(regime: str, record: Record, notes: Notes) -> Iterator[list[str]]:
    cells = record["cells"]
    preconditioners = {"EK-FAC": "", "eigenpairs of Arnoldi": "/arnoldi", "EK-FAC and 100 eigenpairs": "/pairs"}
    for name, ending in preconditioners.items():
        found = [cells.get(refined_cell(rounds) + ending) for rounds in ROUNDS]
        if any(found):
            yield [regime, name, *(_with_interval(cell, notes) for cell in found)]


def _factors(regime: str, record: Record, notes: Notes) -> Iterator[list[str]]:
    cells = [record["cells"].get(refined_cell(ROUNDS[-1], factor)) for factor in sorted((*FACTORS, 1.0))]
    if sum(cell is not None for cell in cells) > 1:
        yield [regime, *(shown(cell, "lds", ".1f", notes) for cell in cells)]


def _ensembles(record: Record, keeps: list[int], notes: Notes) -> Iterator[list[str]]:
    cells, last = record["cells"], keeps[-2:]
    if "gradient/ensemble" in cells:
        yield ["gradient similarity", *[_with_interval(cells["gradient/ensemble"], notes)] * len(last)]
        for tail in TAILS:
            found = [cells.get(f"{tail_cell(tail, keep)}/ensemble") for keep in last]
            yield [_NAMES[tail], *(_with_interval(cell, notes) for cell in found)]


def _grid(regime: str, record: Record, goals: bool, notes: Notes) -> Iterator[list[str]]:
    cells = record["cells"]
    for keep in KS:
        own = cells.get(tail_cell("auto", keep))
        tried = {d: cells[grid_cell(keep, d)] for d in DELTAS if "lds" in cells.get(grid_cell(keep, d), {})}
        if not own or "lds" not in own or not tried:
            continue
        best = max(tried, key=lambda d: tried[d]["lds"])
        share = own["lds"] / max(tried[best]["lds"], own["lds"])
        yield [
            regime,
            f"{keep}",
            f"{own['delta']:.2g}",
            shown(own, "lds", ".1f", notes),
            f"{best:.2g}",
            shown(tried[best], "lds", ".1f", notes),
            judged(f"{share:.3f}", share, _GRID_GOAL if goals else None, at_least=True),
        ]


def _stored(regime: str, record: Record, goals: bool, notes: Notes) -> Iterator[list[str]]:
    cells = record["cells"]
    for name, cell in cells.items():
        if not name.startswith("stored/"):
            continue
        tail, keep, size = name.split("/")[1:]
        exact = cells.get(tail_cell(tail, int(keep)))
        if "lds" not in cell or not exact or "lds" not in exact:
            yield [regime, tail, keep, size, "–", "–", shown(cell, "lds", ".1f", notes), "–", "–"]
            continue
        share, counts = cell["lds"] / exact["lds"], goals and regime == "mlp" and int(size) == 1024
        yield [
            regime,
            {"auto": "flat"}.get(tail, tail),
            keep,
            size,
            f"{cell['bytes']:,}",
            f"{cell['captured']:.0%}",
            _with_interval(cell, notes),
            judged(f"{share:.2f}", share, _STORED_GOAL if counts else None, at_least=True),
            judged(f"{cell['overlap']:.1f}", cell["overlap"], _OVERLAP_GOAL if counts else None, at_least=True),
        ]


def _with_interval(cell: Cell | None, notes: Notes) -> str:
    text = shown(cell, "lds", ".1f", notes)
    return f"{text} ({cell['lds_low']:.1f}–{cell['lds_high']:.1f})" if cell and "lds_low" in cell else text
