"""Lines on two logarithmic axes as one SVG file, for light and dark pages."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

from eigentrace.evaluate.scale import LogScale, tick_labels

WIDTH, HEIGHT = 720, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 560, 44, 350
_LABEL_GAP = 15

# Okabe and Ito's colours, which stay apart for colour-blind readers; ink follows the page.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00")
_STYLE = """<style>
text { font: 13px system-ui, sans-serif; fill: #333 }
.name { font-weight: 600 }
.grid { stroke: #ddd } .axis { stroke: #888 }
.line { fill: none; stroke-width: 2 } .level { stroke-width: 1.3; stroke-dasharray: 6 4 }
@media (prefers-color-scheme: dark) { text { fill: #ddd } .grid { stroke: #444 } }
</style>"""


@dataclass(frozen=True)
class Line:
    """One line of a plot: values by K, and a level to compare them with."""

    title: str
    values: Mapping[int, float] = field(default_factory=dict)
    level: float | None = None


def panels_svg(panels: Mapping[str, Sequence[Line]], across: str, up: str) -> str:
    """Draw one panel per title below each other, each with its lines and the names of its axes."""
    drawn = [
        f'<g transform="translate(0 {HEIGHT * number})">{_panel(title, lines, across, up)}</g>'
        for number, (title, lines) in enumerate(panels.items())
    ]
    height = HEIGHT * max(1, len(panels))
    label = escape(f"{up} against {across}, for " + "; ".join(panels))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{label}">\n'
        + _STYLE
        + "\n"
        + "\n".join(drawn)
        + "\n</svg>\n"
    )


def _panel(title: str, lines: Sequence[Line], across: str, up: str) -> str:
    places = sorted({k for line in lines for k in line.values})
    heights = [v for line in lines for v in (*line.values.values(), *([line.level] if line.level else []))]
    parts = [_text(_LEFT, 18, title, "start", "name"), _text(_LEFT, 36, up, "start")]
    if not places:
        return "".join(parts)
    x = LogScale(places[0] / 1.15, places[-1] * 1.15, _LEFT, _RIGHT)
    y = LogScale(min(heights) / 1.5, max(heights) * 1.5, _BOTTOM, _TOP)
    parts += [_tick(y, value, label) for value, label in zip(y.ticks(), tick_labels(y.ticks()), strict=True)]
    parts += [_text(x.position(k), _BOTTOM + 18, f"{k}", "middle") for k in places]
    parts.append(f'<path class="axis" d="M{_LEFT} {_BOTTOM}H{_RIGHT}"/>')
    parts.append(_text((_LEFT + _RIGHT) / 2, _BOTTOM + 38, across, "middle"))
    colours = [_COLOURS[number % len(_COLOURS)] for number in range(len(lines))]
    parts += [_curve(line, x, y, colour) for line, colour in zip(lines, colours, strict=True)]
    return "".join(parts + _labels(lines, y, colours))


def _tick(y: LogScale, value: float, label: str) -> str:
    at = y.position(value)
    return f'<path class="grid" d="M{_LEFT} {at:.1f}H{_RIGHT}"/>' + _text(_LEFT - 8, at + 4, label, "end")


def _curve(line: Line, x: LogScale, y: LogScale, colour: str) -> str:
    points = [(x.position(k), y.position(value)) for k, value in sorted(line.values.items())]
    parts = []
    if line.level is not None:
        parts.append(f'<path class="level" stroke="{colour}" d="M{_LEFT} {y.position(line.level):.1f}H{_RIGHT}"/>')
    if points:
        path = "L".join(f"{a:.1f} {b:.1f}" for a, b in points)
        parts.append(f'<path class="line" stroke="{colour}" d="M{path}"/>')
        parts += [f'<circle fill="{colour}" cx="{a:.1f}" cy="{b:.1f}" r="3.2"/>' for a, b in points]
    return "".join(parts)


def _labels(lines: Sequence[Line], y: LogScale, colours: Sequence[str]) -> list[str]:
    """Write each line's title beside its end, pushed down where two would overlap."""
    ends = {
        number: y.position(line.values[max(line.values)] if line.values else line.level or 1.0)
        for number, line in enumerate(lines)
        if line.values or line.level
    }
    parts, lowest = [], -math.inf
    for number, at in sorted(ends.items(), key=lambda item: item[1]):
        lowest = max(at, lowest + _LABEL_GAP)
        mark = f'<rect fill="{colours[number]}" x="{_RIGHT + 8}" y="{lowest - 5:.1f}" width="10" height="10"/>'
        parts.append(mark + _text(_RIGHT + 24, lowest + 4.5, lines[number].title, "start"))
    return parts


def _text(x: float, y: float, text: str, anchor: str, kind: str = "") -> str:
    style = f' class="{kind}"' if kind else ""
    return f'<text{style} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
