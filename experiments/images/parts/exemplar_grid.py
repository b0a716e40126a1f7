"""Sheets of small pictures: rankings by self-influence, and queries with their proponents and opponents."""

from collections.abc import Mapping, Sequence

from harness.measure import Cell
from harness.plot import BLUE, GREEN, VERMILION, Sheet

_SIDE, _STEP, _LINE = 52, 66, 72
_LABELS = 92
"""Width of the labels to the left of a row."""


def ranked_svg(title: str, cells: Mapping[str, Cell], classes: Sequence[str]) -> str:
    """Draw random pictures of the top, the middle and the bottom of each ranking, side by side; frame wrong labels."""
    sheet, pictures = Sheet(), _pictures(cells)
    sheet.write(8, 18, f"{title}: pictures by self-influence", size=12, bold=True)
    left, bottom = float(_LABELS), 0.0
    for number, (name, cell) in enumerate(cells.items()):
        sheet.write(left, 42, name)
        across, y = len(cell["bands"]["90–100%"]), 52.0
        for band, rows in cell["bands"].items():
            for first in range(0, len(rows), across):
                if number == first == 0:
                    sheet.write(8, y + _SIDE / 2 + 4, band)
                for place, (row, share, label, bad) in enumerate(rows[first : first + across]):
                    under, frame = f"{classes[label]} {share:.0%}", VERMILION if bad else None
                    sheet.show(left + place * _STEP, y, _SIDE, pictures[str(row)], under, frame)
                y += _LINE
        left, bottom = left + across * _STEP + 28, max(bottom, y)
    has_bad = any(bad for cell in cells.values() for rows in cell["bands"].values() for *_, bad in rows)
    legend = "Below each picture its given label and its quantile" + (
        "; framed where the label is known, or likely, to be wrong." if has_bad else "."
    )
    sheet.write(8, bottom + 14, legend)
    return sheet.svg(f"{title}: pictures by self-influence", left - 28, bottom + 26)


def explained_svg(title: str, cells: Mapping[str, Cell], classes: Sequence[str]) -> str:
    """Draw queries, and below each its proponents and opponents by every way to find them."""
    sheet, pictures = Sheet(), _pictures(cells)
    y, left, width = 8.0, _LABELS + 76, 0.0
    for number, shown in enumerate(next(iter(cells.values()))["shown"]):
        row, label = shown["query"]
        sheet.show(8, y, _SIDE, pictures[str(row)], classes[label])
        about = f"{title}: what speaks for and against this “{classes[label]}”"
        sheet.write(8 + _STEP, y + 14, about, size=12, bold=True)
        sheet.write(left, y + _SIDE + 8, "proponents, strongest first")
        sheet.write(left + 5.3 * _STEP, y + _SIDE + 8, "opponents, strongest first")
        y += _LINE
        for name, cell in cells.items():
            sheet.write(8, y + _SIDE / 2 + 4, name)
            for start, side, colour in ((0.0, "proponents", BLUE), (5.3, "opponents", VERMILION)):
                for place, (other, its) in enumerate(cell["shown"][number][side]):
                    x, frame = left + (start + place) * _STEP, GREEN if other == row else colour
                    sheet.show(x, y, _SIDE, pictures[str(other)], classes[its], frame)
                    width = max(width, x + _STEP)
            y += _LINE
        y += 20
    sheet.write(8, y, "Framed green: the picture itself.")
    return sheet.svg(f"{title}: proponents and opponents", width, y + 12)


def _pictures(cells: Mapping[str, Cell]) -> dict[str, str]:
    return {row: uri for cell in cells.values() for row, uri in cell["pictures"].items()}
