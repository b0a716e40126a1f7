"""The page of `experiments.images.scaling`: seconds by model, a linear fit, and the cost of offloading."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np

from harness.measure import Cell
from harness.plot import Drawing, Spot, growth_svg
from harness.record import Notes, Record, memory, millions, shown, table

CURVATURES: tuple[Literal["hessian", "gauss-newton"], ...] = ("hessian", "gauss-newton")
PLACES: tuple[Literal["device", "host"], ...] = ("device", "host")
PAPER = {"vit_l_32": "15 h", "transformer_base": "139 min"}
"""The paper's seconds for 200 products, on a 4-core TPUv2."""
TRANSFORMERS = ("vit_b_32", "vit_l_32_half", "vit_l_32")
FRESH, FIXED = "vit_l_32_fresh", "vit_l_32_fixed"
WHOLE = {
    FRESH: ("{sample} new examples for every product, {vectors} vectors", "15 h"),
    FIXED: ("one sample of {sample}, restarts at {vectors} vectors", "–"),
}
"""Parts with all products of ViT-L/32, the paper's way first, with its time; the lines do not use them."""
WHOLE_CELL = "fit"


def fit_name(kind: str, steps: int) -> str:
    """Return the name of the cell of a fit."""
    return f"{kind}/{steps}"


def orthogonalisation_name(steps: int) -> str:
    """Return the name of the cell of an iteration without products."""
    return f"orthogonalisation/{steps}"


@dataclass(frozen=True)
class Point:
    """A fit of a model, with all steps."""

    model: str
    parameters: int
    kind: str
    seconds: float
    extrapolated_from: int | None
    """Number of products that were timed, if not all."""
    cell: Cell


def points(records: Mapping[str, Record]) -> list[Point]:
    """Return the fits with all steps, measured or extrapolated, smallest model first."""
    found: list[Point] = []
    for model, record in records.items():
        for kind in CURVATURES if model != "offload" and model not in WHOLE else ():
            found += _point(model, record, kind)
    return sorted(found, key=lambda point: (point.parameters, CURVATURES.index(point.kind)))


def _point(model: str, record: Record, kind: str) -> Iterator[Point]:
    full, parameters = record["settings"]["steps"], record["facts"]["parameters"]
    timed = {cell["settings"]["steps"]: cell for cell in _fits(record, kind) if "failed" not in cell}
    if full in timed:
        yield Point(model, parameters, kind, timed[full]["seconds"], None, timed[full])
        return
    whole = record["cells"].get(orthogonalisation_name(full), {"failed": "not measured"})
    if timed and "failed" not in whole:
        steps = max(timed)
        yield Point(model, parameters, kind, extrapolated(timed[steps], whole, full), steps, timed[steps])


def _fits(record: Record, kind: str) -> list[Cell]:
    return [cell for name, cell in record["cells"].items() if name.startswith(f"{kind}/")]


def extrapolated(cell: Cell, whole: Cell, steps: int) -> float:
    """Extrapolate a fit of many steps from one of few steps and the measured orthogonalisation of all steps."""
    parts = cell["parts"]
    return (
        parts.get("checks", 0.0)
        + parts["first product"]
        + (steps - 1) * parts["products"] / (cell["settings"]["steps"] - 1)
        + whole["seconds"]
        + parts["eigenvectors"]
    )


@dataclass(frozen=True)
class Straight:
    """A straight line through some points: seconds = start + rate · parameters / 1e6."""

    start: float
    rate: float
    r2: float
    num_points: int


def straight(chosen: Sequence[Point]) -> Straight | None:
    """Fit a line by least squares; None through fewer than three points."""
    if len(chosen) < 3:
        return None
    x, y = np.array([(point.parameters / 1e6, point.seconds) for point in chosen]).T
    rate, start = np.polyfit(x, y, 1)
    left, around = np.square(y - start - rate * x).sum(), np.square(y - y.mean()).sum()
    return Straight(float(start), float(rate), float(1 - left / around), len(chosen))


def tables(records: Mapping[str, Record]) -> list[str]:
    """Return the tables of fits, of the lines through them, and of the offloaded basis."""
    notes = Notes()
    found = points(records)
    lines = [*_fits_of(found, records, notes), "", *_failures(records, notes), *_lines_through(found)]
    lines += [*_whole(records, notes), *_offload(records.get("offload"), notes)]
    return lines + (["", *notes.lines()] if notes.texts else [])


def summary(records: Mapping[str, Record]) -> list[str]:
    """Return the tables of fits alone."""
    notes = Notes()
    lines = [*_fits_of(points(records), records, notes), "", *_whole(records, notes)]
    return lines + (["", *notes.lines()] if notes.texts else [])


def _fits_of(found: Sequence[Point], records: Mapping[str, Record], notes: Notes) -> list[str]:
    headings = ["model", "parameters", "curvature", "n", "seconds", "how", "ms per product", "GiB", "paper, n = 200"]
    return table(headings, [_row(point, records[point.model], notes) for point in found])


def _row(point: Point, record: Record, notes: Notes) -> list[str]:
    steps = point.cell["settings"]["steps"]
    how = "measured" if point.extrapolated_from is None else f"extrapolated from {steps} products"
    paper = PAPER.get(point.model, "–") if point.kind == "hessian" else "–"
    return [
        record["title"],
        millions(point.parameters),
        point.kind,
        f"{record['settings']['steps']}",
        f"{point.seconds:.1f}",
        how,
        f"{1000 * point.cell['parts']['products'] / max(1, steps - 1):.0f}",
        memory(point.cell, notes),
        paper,
    ]


def _failures(records: Mapping[str, Record], notes: Notes) -> list[str]:
    failed = [
        f"{record['title']}, {name}: {shown(cell, '', '', notes)}"
        for record in records.values()
        for name, cell in record["cells"].items()
        if "failed" in cell
    ]
    return ["Not measured: " + "; ".join(failed) + ".", ""] if failed else []


def _lines_through(found: Sequence[Point]) -> list[str]:
    rows = []
    for kind in CURVATURES:
        own = [point for point in found if point.kind == kind]
        for title, chosen in (("all models", own), ("ViTs alone", [p for p in own if p.model in TRANSFORMERS])):
            line = straight(chosen)
            if line is not None:
                rows.append([f"{kind}, {title}", f"{line.num_points}", f"{line.start:.1f}", f"{line.rate:.3f}"])
                rows[-1].append(f"{line.r2:.3f}")
    if not rows:
        return []
    headings = ["line through", "points", "seconds at 0", "seconds per million parameters", "R²"]
    return ["The paper's claim is a linear trend. Least squares:", "", *table(headings, rows)]


def _whole(records: Mapping[str, Record], notes: Notes) -> list[str]:
    there = [name for name in WHOLE if name in records]
    if not there:
        return []
    first = records[there[0]]
    parts = ["products", "orthogonalisation", "eigenvectors", "checks"]
    headings = ["fit, Hessian", "batch", "seconds", *parts, "ms per product", "GiB", "paper"]
    told = f"All {first['settings']['steps']} products of {first['title']} measured, nothing extrapolated"
    rows = [_whole_row(name, records[name], notes) for name in there]
    return ["", f"{told} (seconds in all, then by part):", "", *table(headings, rows)]


def _whole_row(name: str, record: Record, notes: Notes) -> list[str]:
    told, paper = WHOLE[name]
    settings, cell = record["settings"], record["cells"].get(WHOLE_CELL)
    parts = {} if cell is None or "failed" in cell else dict(cell["parts"])
    each = "–"
    if parts:
        each = f"{1000 * parts['products'] / max(1, settings['steps'] - 1):.0f}"
        parts["products"] += parts.pop("first product")
    return [
        told.format(**settings),
        f"{settings['batch']}",
        shown(cell, "seconds", ".1f", notes),
        *(shown(parts, part, ".1f", notes) for part in ("products", "orthogonalisation", "eigenvectors", "checks")),
        each,
        memory(cell, notes),
        paper,
    ]


def _offload(record: Record | None, notes: Notes) -> list[str]:
    if record is None:
        return []
    rows = []
    for place in PLACES:
        cell = record["cells"].get(place)
        parts = {} if cell is None or "failed" in cell else cell["parts"]
        steps = f"{cell['settings']['steps']}" if cell is not None and parts else "–"
        spent = f"{parts['orthogonalisation']:.1f}" if parts else "–"
        rows.append([place, steps, shown(cell, "seconds", ".1f", notes), spent, memory(cell, notes)])
    headings = ["basis of " + record["title"], "products", "seconds", "orthogonalisation", "GiB of the GPU"]
    return ["", "The basis in host memory, as the paper held it (bfloat16, no restarts):", "", *table(headings, rows)]


def figures(records: Mapping[str, Record], *, small: bool) -> dict[str, Drawing]:
    """Draw seconds against parameters, with the line through all models."""
    found = points(records)
    spots: dict[str, list[Spot]] = {}
    for point in found:
        place = records[point.model]["title"], point.parameters / 1e6, point.seconds
        spots.setdefault(point.kind, []).append(Spot(*place, hollow=point.extrapolated_from is not None))
    lines = {kind: straight([point for point in found if point.kind == kind]) for kind in spots}
    trends = {kind: (line.start, line.rate) for kind, line in lines.items() if line is not None}
    title = "Seconds of a fit against millions of parameters"
    return {"seconds": partial(growth_svg, title, spots, trends, "million parameters", "seconds")} if spots else {}
