"""Render the page of `bench.projection`: tables and a plot from its JSON file, with goals."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.measure import Cell
from harness.places import data_file, figure_link, save_figure, save_page
from harness.plot import Curve, can_draw, curves_svg, undrawn
from harness.record import Notes, Record, heading, judged, memory, millions, read, runs_of, shown, stem, table

FORWARD_K = 10
ROTATED = 1024
"""Number of coordinates in a two-sided rotated basis, for comparison with dense directions."""
ROTATED_CELL = f"rotated/{ROTATED}"
RATE_GOALS = {("vit_l_32", 10): 2700, ("vit_l_32", 100): 2000, ("transformer_base", 10): 28000}
"""Goals for examples per second on an H200, by model and K."""
TIME_GOAL, TIME_GOAL_K = 1.5, 100
"""Goals for the time per example in compiled training steps, for K up to this."""
GROWTH_GOAL = 1.5
"""Goal for the ratio of the times at K = 100 and K = 10, at the small sizes."""


def layerwise_cell(k: int, compiles: bool) -> str:
    """Return the name of the cell of layerwise mode at K."""
    return f"layerwise/{k}" + ("/compiled" if compiles else "")


@dataclass(frozen=True)
class Row:
    """One row of the tables: a model, eager or compiled, on a machine."""

    model: str
    record: Record
    compiles: bool
    has_goals: bool
    """Whether the goals for speed apply: they are for large models on a GPU."""

    @property
    def title(self) -> str:
        """The text of the first column."""
        return self.record["title"] + (", compiled" if self.compiles else "")

    def cell(self, k: int) -> Cell | None:
        """Return the cell of layerwise mode at K."""
        return self.record["cells"].get(layerwise_cell(k, self.compiles))

    def rate(self, k: int) -> float | None:
        """Return the examples per second at K."""
        return (self.cell(k) or {}).get("rate")

    @property
    def step_rate(self) -> float | None:
        """Examples per second of the training step."""
        return self.record["cells"].get("train", {}).get("rate")

    def steps(self, cell: Cell | None) -> float | None:
        """Time per example in training steps."""
        rate = (cell or {}).get("rate")
        return self.step_rate / rate if self.step_rate and rate else None

    @property
    def growth(self) -> float | None:
        """Time at K = 100 over time at K = 10."""
        few, many = self.rate(10), self.rate(100)
        return few / many if few and many else None


def render(out: Path, small: bool) -> None:
    """Render the tables and the plot from the JSON file."""
    name = stem("projection", small=small)
    results = read(data_file(out, name))
    command = "python -m bench.projection" + (" --small" if small else "")
    lines = heading("Projecting per-example gradients" + (", small models" if small else ""), command, name)
    picture = f"![Examples per second against K]({figure_link(name)})" if can_draw() else undrawn(command)
    lines += ["", picture, ""]
    lines += [
        "The columns K = … are layerwise mode, which gives K features, the squared norm of the gradient and the loss "
        "of every example; the last column takes coordinates in a two-sided rotated basis instead. The plot shows the "
        "faster of eager and compiled. The training step is forward, backward and "
        "a fused AdamW step, " + ("not compiled at this size." if small else "compiled by `torch.compile`."),
    ]
    for machine, models in results.items():
        rows = list(_rows(machine, models, small))
        lines += ["", f"## {machine}", "", *_machine(rows, small), "", *runs_of(models)]
    save_page(out, name, lines)
    if can_draw():
        panels = {machine: [_curve(record) for record in models.values()] for machine, models in results.items()}
        up = "examples per second; dashed: a training step"
        save_figure(out, name, curves_svg(panels, "K, rows", up, log=True))


def _rows(machine: str, models: dict[str, Record], small: bool) -> Iterator[Row]:
    has_goals = not small and not machine.startswith("CPU")
    for model, record in models.items():
        yield Row(model, record, False, has_goals)
        if any(name.endswith("/compiled") for name in record["cells"]):
            yield Row(model, record, True, has_goals)


def _machine(rows: Sequence[Row], small: bool) -> list[str]:
    notes, ks = Notes(), sorted({k for row in rows for k in fastest(row.record, measured=False)})

    def speed(row: Row, k: int | None, cell: Cell | None) -> str:
        goal = RATE_GOALS.get((row.model, k)) if row.has_goals and k else None
        return judged(shown(cell, "rate", _digits(cell), notes), row.rate(k) if k else None, goal, at_least=True)

    def ratio(row: Row, k: int | None, cell: Cell | None) -> str:
        value = row.steps(cell)
        goal = TIME_GOAL if row.has_goals and k and k <= TIME_GOAL_K else None
        return judged("–" if value is None else f"{value:.2f}", value, goal)

    goal = f", goal for K ≤ {TIME_GOAL_K}: at most {TIME_GOAL}" if any(row.has_goals for row in rows) else ""
    lines = [*_summary(rows, small), "Examples per second:", ""]
    lines += _grid(rows, ks, speed, facts=True, growth=small)
    lines += ["", f"Time per example, in training steps{goal}:", "", *_grid(rows, ks, ratio)]
    if any(cell.get("peak") for row in rows for cell in row.record["cells"].values()):
        lines += ["", "Peak memory in GiB, with the model, its batch and the rows in use:", ""]
        lines += _grid(rows, ks, lambda row, k, cell: memory(cell, notes))
    if any(row.compiles for row in rows):
        lines += ["", "Seconds of planning and compiling before batches run at these speeds:", ""]
        lines += _grid(rows, ks, lambda row, k, cell: shown(cell, "warm_up_seconds", ".0f", notes))
    return lines + (["", *notes.lines()] if notes.texts else [])


Write = Callable[[Row, int | None, Cell | None], str]


def _grid(
    rows: Sequence[Row], ks: Sequence[int], write: Write, *, facts: bool = False, growth: bool = False
) -> list[str]:
    """Return the table of one number: of the training step, forward mode, and layerwise mode at every K."""
    headings = ["model", *(["parameters", "batch"] if facts else []), "training step", f"forward, K = {FORWARD_K}"]
    headings += (
        [f"K = {k}" for k in ks]
        + [f"{ROTATED:,} rotated"]
        + ([f"K = 100 / K = 10, goal ≤ {GROWTH_GOAL}"] if growth else [])
    )
    lines = []
    for row in rows:
        cells, about = row.record["cells"], row.record["settings"]
        line = [row.title, *([millions(row.record["parameters"]), f"{about['batch']}"] if facts else [])]
        others = (cells.get("train"), cells.get(f"forward/{FORWARD_K}"))
        line += ["" if row.compiles else write(row, None, cell) for cell in others]
        line += [write(row, k, row.cell(k)) for k in ks]
        line.append("" if row.compiles else write(row, None, cells.get(ROTATED_CELL)))
        if growth:
            line.append("–" if row.growth is None else judged(f"{row.growth:.2f}", row.growth, GROWTH_GOAL))
        lines.append(line)
    return table(headings, lines)


def _summary(rows: Sequence[Row], small: bool) -> list[str]:
    """Count the goals that are met, eager or compiled, and list the others."""
    met: dict[str, bool] = {}
    for row in rows:
        for text, reached in _goals(row, small):
            met[text] = met.get(text, False) or reached
    missed = [text for text, reached in met.items() if not reached]
    if not met:
        return []
    return [
        f"Goals met: {len(met) - len(missed)} of {len(met)}." + (f" Missed: {'; '.join(missed)}." if missed else ""),
        "",
    ]


def _goals(row: Row, small: bool) -> Iterator[tuple[str, bool]]:
    title = row.record["title"]
    if small and row.growth is not None:
        yield f"{title}, K = 100 within {GROWTH_GOAL} × K = 10", row.growth <= GROWTH_GOAL
    if not row.has_goals:
        return
    for (model, k), goal in RATE_GOALS.items():
        rate = row.rate(k)
        if model == row.model and rate is not None:
            yield f"{title}, {goal:,} examples/s at K = {k}", rate >= goal
    for k in fastest(row.record):
        value = row.steps(row.cell(k))
        if value is not None and k <= TIME_GOAL_K:
            yield f"{title}, within {TIME_GOAL} training steps at K = {k}", value <= TIME_GOAL


def fastest(record: Record, *, measured: bool = True) -> dict[int, float]:
    """Return the best rate at each K, eager or compiled, optionally with 0 where none was measured."""
    rates: dict[int, float] = {}
    for name, cell in record["cells"].items():
        if name.startswith("layerwise/") and ("rate" in cell or not measured):
            k = int(name.split("/")[1])
            rates[k] = max(cell.get("rate", 0.0), rates.get(k, 0.0))
    return dict(sorted(rates.items()))


def _curve(record: Record) -> Curve:
    rates, level = fastest(record), record["cells"].get("train", {}).get("rate")
    return Curve(record["title"], list(rates), list(rates.values()), level=level)


def _digits(cell: Cell | None) -> str:
    return ",.0f" if (cell or {}).get("rate", 0.0) >= 100 else ".1f"
