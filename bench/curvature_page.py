"""Render the page of `bench.curvature`: tables from its JSON file, with the goal."""

from collections.abc import Iterator
from itertools import product
from pathlib import Path

from harness.places import data_file, save_page
from harness.record import Notes, Record, heading, judged, memory, millions, read, runs_of, shown, stem, table

KINDS, PRECISIONS, MODES = ("hessian", "gauss-newton"), ("fp32", "bf16"), ("eager", "compiled")
FIT_GOAL = ("vit_l_32", 200, 180.0)
"""The goal: number of products of a fit of ViT-L/32, and its seconds on an H200."""
PARTS = ("checks", "first product", "products", "orthogonalisation", "eigenvectors", "calibration")


def product_cell(kind: str, precision: str, mode: str) -> str:
    """Return the name of the cell of one product."""
    return f"{kind}/{precision}/{mode}"


def fit_cell(steps: int, mode: str) -> str:
    """Return the name of the cell of a fit."""
    return f"fit/{steps}/{mode}"


def render(out: Path, small: bool) -> None:
    """Render the tables from the JSON file."""
    name = stem("curvature", small=small)
    command = "python -m bench.curvature" + (" --small" if small else "")
    lines = heading("Curvature products and fits" + (", small models" if small else ""), command, name)
    for machine, models in read(data_file(out, name)).items():
        has_goal = not small and not machine.startswith("CPU")
        lines += ["", f"## {machine}", *_machine(models, has_goal), "", *runs_of(models)]
    save_page(out, name, lines)


def _machine(models: dict[str, Record], has_goal: bool) -> list[str]:
    notes = Notes()
    products = [row for record in models.values() for row in _products(record, notes)]
    fits = [row for model, record in models.items() for row in _fits(model, record, has_goal, notes)]
    lines: list[str] = []
    if products:
        headings = ["model", "parameters", "batch", "curvature", "precision", "differentiated"]
        headings += ["eager, ms", "compiled, ms", "compiling, s", "eager, GiB", "compiled, GiB"]
        lines += ["", "One product with a vector, on one batch:", "", *table(headings, products)]
    if fits:
        headings = ["model", "steps", "keep", "sample", "batch", "precision", "compiled", "seconds", *PARTS, "GiB"]
        lines += ["", "A whole fit, `Arnoldi(...).fit`, with its parts in seconds:", "", *table(headings, fits)]
    return lines + (["", *notes.lines()] if notes.texts else [])


def _products(record: Record, notes: Notes) -> Iterator[list[str]]:
    for kind, precision in product(KINDS, PRECISIONS):
        eager, compiled = (record["cells"].get(product_cell(kind, precision, mode)) for mode in MODES)
        if eager is None and compiled is None:
            continue
        form = next((cell["form"] for cell in (eager, compiled) if cell and "form" in cell), "–")
        yield [
            record["title"],
            millions(record["parameters"]),
            f"{record['settings']['batch']}",
            kind,
            precision,
            form,
            *(shown(cell, "milliseconds", ",.1f", notes) for cell in (eager, compiled)),
            shown(compiled, "warm_up_seconds", ",.0f", notes),
            *(memory(cell, notes) for cell in (eager, compiled)),
        ]


def _fits(model: str, record: Record, has_goal: bool, notes: Notes) -> Iterator[list[str]]:
    for name, cell in record["cells"].items():
        if not name.startswith("fit/"):
            continue
        if "failed" in cell:
            steps, mode = name.split("/")[1:]
            yield [
                record["title"],
                steps,
                "–",
                "–",
                "–",
                "–",
                mode,
                shown(cell, "", "", notes),
                *["–"] * (len(PARTS) + 1),
            ]
            continue
        settings = cell["settings"]
        goal = FIT_GOAL[2] if has_goal and FIT_GOAL[:2] == (model, settings["steps"]) else None
        marks = "".join(notes.mark(text) for text in cell["warnings"])
        yield [
            record["title"],
            *(f"{settings[key]}" for key in ("steps", "keep", "sample", "batch", "precision")),
            {True: "yes", False: "no"}.get(settings["compile"], "auto"),
            judged(f"{cell['seconds']:.1f}", cell["seconds"], goal) + marks,
            *(shown(cell["parts"], part, ".1f", notes) for part in PARTS),
            memory(cell, notes),
        ]
