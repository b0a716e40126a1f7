"""Quality against time as one SVG file: each method a line through its settings, panels below each other."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from eigentrace.evaluate.scale import LogScale, tick_labels

_WIDTH, _HEIGHT = 760, 380
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 530, 48, 322
_TICKS = (50, 80, 90, 95, 98, 99)
# Blue, vermilion, green, purple, orange, sky, yellow: told apart by people who see few colours.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#b8a700")
_SHAPES = ("circle", "square", "diamond")
_STYLE = (
    "text { font: 13px system-ui, sans-serif; fill: #333 } .name { font-weight: 600 } "
    ".grid { stroke: #ddd } .axis { stroke: #888 } .line { fill: none; stroke-width: 1.6 } "
    "@media (prefers-color-scheme: dark) { text { fill: #ddd } .grid { stroke: #444 } }"
)


@dataclass(frozen=True)
class Mark:
    """One row of a table."""

    name: str
    family: str
    """The method, whose marks are joined by a line."""
    seconds: float
    ap: float
    """Average precision in percent."""


def trade_off_svg(panels: Mapping[str, Sequence[Mark]], families: Sequence[str]) -> str:
    """Draw AP against seconds in panels with the same axes; AP is spread out towards 100.

    Args:
        panels: Marks by the title of their panel.
        families: All methods, in the order of colours and shapes.
    """
    marks = [mark for panel in panels.values() for mark in panel]
    times = [mark.seconds for mark in marks]
    x = LogScale(min(times) / 2, max(times) * 2, _LEFT, _RIGHT)
    y = LogScale(min(0.8, *(_missing(mark) for mark in marks)), max(60, *map(_missing, marks)) * 1.2, _TOP, _BOTTOM)
    drawn = [
        f'<g transform="translate(0 {number * _HEIGHT})">{_panel(title, panel, families, x, y)}</g>'
        for number, (title, panel) in enumerate(panels.items())
    ]
    label = escape("Average precision against the time to score all examples: " + "; ".join(panels))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT * len(panels)}" role="img" '
        f'aria-label="{label}"><style>{_STYLE}</style>{"".join(drawn)}</svg>\n'
    )


def _missing(mark: Mark) -> float:
    return max(0.1, 100 - mark.ap)


def _panel(title: str, marks: Sequence[Mark], families: Sequence[str], x: LogScale, y: LogScale) -> str:
    parts = [_text(_LEFT, 18, title, "start", "name"), _text(_LEFT, 36, "AP (%)", "start")]
    for percent in _TICKS:
        at = y.position(100 - percent)
        parts.append(
            f'<path class="grid" d="M{_LEFT} {at:.1f}H{_RIGHT}"/>' + _text(_LEFT - 8, at + 4, f"{percent}", "end")
        )
    ticks = x.ticks()
    for tick, label in zip(ticks, tick_labels(ticks), strict=True):
        parts.append(_text(x.position(tick), _BOTTOM + 18, label, "middle"))
    parts.append(f'<path class="axis" d="M{_LEFT} {_BOTTOM}H{_RIGHT}"/>')
    parts.append(_text((_LEFT + _RIGHT) / 2, _BOTTOM + 38, "seconds to score all digits", "middle"))
    present = [family for family in families if any(mark.family == family for mark in marks)]
    for number, family in enumerate(present):
        points = [(x.position(m.seconds), y.position(_missing(m)), m.name) for m in marks if m.family == family]
        key = _TOP + 10 + 19 * number
        parts.append(_family(points, families.index(family)))
        parts.append(_shape(_RIGHT + 22, key, families.index(family)) + _text(_RIGHT + 34, key + 4, family, "start"))
    return "".join(parts)


def _family(points: Sequence[tuple[float, float, str]], number: int) -> str:
    path = "L".join(f"{a:.1f} {b:.1f}" for a, b, _ in points)
    line = f'<path class="line" stroke="{_COLOURS[number % len(_COLOURS)]}" d="M{path}"/>' if len(points) > 1 else ""
    return line + "".join(f"<g><title>{escape(name)}</title>{_shape(a, b, number)}</g>" for a, b, name in points)


def _shape(x: float, y: float, number: int) -> str:
    shape, fill = _SHAPES[number // len(_COLOURS) % len(_SHAPES)], f'fill="{_COLOURS[number % len(_COLOURS)]}"'
    if shape == "circle":
        return f'<circle {fill} cx="{x:.1f}" cy="{y:.1f}" r="4.5"/>'
    turn = f' transform="rotate(45 {x:.1f} {y:.1f})"' if shape == "diamond" else ""
    return f'<rect {fill} x="{x - 4:.1f}" y="{y - 4:.1f}" width="8" height="8"{turn}/>'


def _text(x: float, y: float, text: str, anchor: str, kind: str = "") -> str:
    style = f' class="{kind}"' if kind else ""
    return f'<text{style} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
