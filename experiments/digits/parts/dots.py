"""Percentages of many rows as dots on one axis, a colour for each series: an SVG file for light and dark pages."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _LEFT, _RIGHT, _TOP, _STEP = 720, 210, 690, 66, 24
_COLOURS = ("#d55e00", "#0072b2", "#009e73", "#cc79a7")
_STYLE = (
    "text { font: 13px system-ui, sans-serif; fill: #333 } .name { font-weight: 600 } .grid { stroke: #ddd } "
    "@media (prefers-color-scheme: dark) { text { fill: #ddd } .grid { stroke: #444 } }"
)


@dataclass(frozen=True)
class Dot:
    """One percentage."""

    row: str
    series: str
    value: float
    hollow: bool = False


def dots_svg(title: str, dots: Sequence[Dot], across: str) -> str:
    """Draw dots from 0 to 100, rows and series in the order they first come."""
    rows, series = list(dict.fromkeys(dot.row for dot in dots)), list(dict.fromkeys(dot.series for dot in dots))
    bottom = _TOP + _STEP * len(rows)
    parts = [_text(16, 22, title, "start", "name"), _text((_LEFT + _RIGHT) / 2, bottom + 38, across, "middle")]
    for number, name in enumerate(series):
        parts.append(f'<circle cx="{_LEFT + 130 * number}" cy="40" r="5" fill="{_colour(number)}"/>')
        parts.append(_text(_LEFT + 130 * number + 10, 44, name, "start"))
    for tick in range(0, 101, 20):
        parts.append(f'<path class="grid" d="M{_x(tick):.1f} {_TOP - 8}V{bottom}"/>')
        parts.append(_text(_x(tick), bottom + 18, f"{tick}", "middle"))
    parts += [_text(_LEFT - 14, _y(number) + 4, row, "end") for number, row in enumerate(rows)]
    for dot in dots:
        colour = _colour(series.index(dot.series))
        fill = f'fill="none" stroke="{colour}" stroke-width="2"' if dot.hollow else f'fill="{colour}"'
        parts.append(f'<circle cx="{_x(dot.value):.1f}" cy="{_y(rows.index(dot.row)):.1f}" r="5" {fill}/>')
    label = escape(f"{title}: {across}, for {', '.join(rows)}; {', '.join(series)}")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {bottom + 52}" role="img" '
        f'aria-label="{label}"><style>{_STYLE}</style>{"".join(parts)}</svg>\n'
    )


def _x(value: float) -> float:
    return _LEFT + (_RIGHT - _LEFT) * value / 100


def _y(row: int) -> float:
    return _TOP + _STEP * (row + 0.5)


def _colour(number: int) -> str:
    return _COLOURS[number % len(_COLOURS)]


def _text(x: float, y: float, text: str, anchor: str, kind: str = "") -> str:
    style = f' class="{kind}"' if kind else ""
    return f'<text{style} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
