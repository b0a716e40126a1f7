"""Answers as text for a terminal."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from eigentrace.explain import Explanation, Side

_WIDEST = 48


def show_table(columns: Mapping[str, Any]) -> str:
    """Lay columns out side by side, numbers to the right."""
    cells = {name: [_cell(value) for value in values] for name, values in columns.items()}
    widths = {name: max(len(name), *(len(cell) for cell in column)) for name, column in cells.items()}
    rows = [list(columns), *zip(*cells.values(), strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths.values(), strict=True)).rstrip() for row in rows
    )


def show_explanation(found: Explanation, rows: Sequence[int], classes: Sequence[str] | None) -> str:
    """Show for every query who speaks for it and who against."""
    unit = "" if found.unit is None else f", scores in {found.unit}"
    lines = [f"Scored by: {found.how}{unit}."]
    for query in range(len(found.proponents.rows)):
        name = f"row {rows[query]}" if rows else f"query {query}"
        for title, side in (("Proponents", found.proponents), ("Opponents", found.opponents)):
            lines += ["", f"{title} of {name}", _show_side(side, query, classes)]
    return "\n".join(lines)


def _show_side(side: Side, query: int, classes: Sequence[str] | None) -> str:
    there = side.rows[query] >= 0
    if not there.any():
        return "  none that the question allows"
    columns: dict[str, Any] = {"row": side.rows[query][there], "score": side.scores[query][there]}
    if side.ids is not None:
        columns["id"] = side.ids[query][there]
    for name, values in (("label", side.labels), ("prediction", side.predictions)):
        if values is not None:
            numbers = values[query][there]
            columns[name] = [classes[int(n)] for n in numbers] if classes else numbers
    return show_table(columns)


def _cell(value: Any) -> str:
    if isinstance(value, float | np.floating):
        return f"{value:.4g}"
    text = str(value)
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 1]}…"
