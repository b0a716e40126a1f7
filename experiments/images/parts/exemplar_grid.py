"""Grids of small pictures as SVG files that stand alone, for light and dark pages."""

from collections.abc import Mapping, Sequence
from html import escape

from harness.measure import Cell

_SIDE, _STEP, _LINE = 52, 66, 72
_LABELS = 92
"""Room for what is written to the left of a row."""
_FOR, _AGAINST, _SELF, _BAD = "#0072b2", "#d55e00", "#009e73", "#d55e00"
_STYLE = (
    "text { font: 12px system-ui, sans-serif; fill: #333 } .name { font-weight: 600; font-size: 14px } "
    ".under { font-size: 10px } .frame { fill: none; stroke-width: 2 } "
    "@media (prefers-color-scheme: dark) { text { fill: #ddd } }"
)


class Grid:
    """Collects pictures and words; a picture that is shown twice is stored once."""

    def __init__(self, pictures: Mapping[str, str]) -> None:
        self.pictures, self.used = pictures, dict[int, None]()
        self.parts: list[str] = []
        self.width = 0.0

    def write(self, x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> None:
        """Write a line."""
        style = f' class="{kind}"' if kind else ""
        self.parts.append(f'<text{style} x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(text)}</text>')

    def show(self, x: float, y: float, row: int, under: str, frame: str | None = None) -> None:
        """Show a picture with a line below it, framed in a colour if one is given."""
        self.used[row] = None
        self.parts.append(f'<use href="#p{row}" x="{x:g}" y="{y:g}"/>')
        if frame is not None:
            self.parts.append(
                f'<rect class="frame" stroke="{frame}" x="{x:g}" y="{y:g}" width="{_SIDE}" height="{_SIDE}"/>'
            )
        self.write(x + _SIDE / 2, y + _SIDE + 12, under, "under", "middle")
        self.width = max(self.width, x + _STEP)

    def svg(self, title: str, height: float) -> str:
        """Put everything together."""
        stored = "".join(
            f'<image id="p{row}" width="{_SIDE}" height="{_SIDE}" href="{escape(self.pictures[str(row)])}"/>'
            for row in self.used
        )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width:g} {height:g}" role="img" '
            f'aria-label="{escape(title)}"><style>{_STYLE}</style><defs>{stored}</defs>{"".join(self.parts)}</svg>\n'
        )


def ranked_svg(title: str, cells: Mapping[str, Cell], classes: Sequence[str]) -> str:
    """Draw random pictures of the top, the middle and the bottom of each ranking, side by side; frame wrong labels."""
    grid = Grid(_pictures(cells))
    grid.write(8, 18, f"{title}: pictures by self-influence", "name")
    left, bottom = float(_LABELS), 0.0
    for number, (name, cell) in enumerate(cells.items()):
        grid.write(left, 42, name)
        across, y = len(cell["bands"]["90–100%"]), 52.0
        for band, rows in cell["bands"].items():
            for first in range(0, len(rows), across):
                if number == 0:
                    grid.write(8, y + _SIDE / 2 + 4, band)
                for place, (row, share, label, bad) in enumerate(rows[first : first + across]):
                    under = f"{classes[label]} {share:.0%}"
                    grid.show(left + place * _STEP, y, row, under, _BAD if bad else None)
                y += _LINE
        left, bottom = left + across * _STEP + 28, max(bottom, y)
    has_bad = any(bad for cell in cells.values() for rows in cell["bands"].values() for *_, bad in rows)
    legend = "Below each picture its given label and its quantile" + (
        "; framed where the label is known, or likely, to be wrong." if has_bad else "."
    )
    grid.write(8, bottom + 14, legend)
    return grid.svg(f"{title}: pictures by self-influence", bottom + 26)


def explained_svg(title: str, cells: Mapping[str, Cell], classes: Sequence[str]) -> str:
    """Draw queries, and below each its proponents and opponents by every way to find them."""
    grid = Grid(_pictures(cells))
    y, left = 8.0, _LABELS + 76
    queries = next(iter(cells.values()))["shown"]
    for number, shown in enumerate(queries):
        row, label = shown["query"]
        grid.show(8, y, row, classes[label])
        grid.write(8 + _STEP, y + 14, f"{title}: what speaks for and against this “{classes[label]}”", "name")
        grid.write(left, y + _SIDE + 8, "proponents, strongest first")
        grid.write(left + 5.3 * _STEP, y + _SIDE + 8, "opponents, strongest first")
        y += _LINE
        for name, cell in cells.items():
            grid.write(8, y + _SIDE / 2 + 4, name)
            for start, side, colour in ((0.0, "proponents", _FOR), (5.3, "opponents", _AGAINST)):
                for place, (other, its) in enumerate(cell["shown"][number][side]):
                    frame = _SELF if other == row else colour
                    grid.show(left + (start + place) * _STEP, y, other, classes[its], frame)
            y += _LINE
        y += 20
    grid.write(8, y, "Framed green: the picture itself.")
    return grid.svg(f"{title}: proponents and opponents", y + 12)


def _pictures(cells: Mapping[str, Cell]) -> dict[str, str]:
    return {row: uri for cell in cells.values() for row, uri in cell["pictures"].items()}
