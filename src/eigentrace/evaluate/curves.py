"""Line plots with error bands as standalone SVG, with colours for light and dark backgrounds."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from eigentrace.errors import InputError
from eigentrace.rendering.svg import LinearScale, grid, image, line, text

_WIDTH, _HEIGHT = 640, 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 470, 52, 306
_NAME_GAP = 16
# Blue, vermilion, green, purple, orange, sky blue: distinguishable with colour vision deficiencies.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_CONTROL = "#808080"
_STYLE = (
    "text { font: 13px system-ui, sans-serif; fill: #333 } .name { font-weight: 600 } "
    ".grid { stroke: #ddd } .axis { stroke: #888 } .line { fill: none; stroke-width: 2 } "
    ".control { stroke-dasharray: 6 4 } .band { stroke: none; fill-opacity: .15 } "
    "@media (prefers-color-scheme: dark) { text { fill: #ddd } .grid { stroke: #444 } }"
)


@dataclass(frozen=True, eq=False)
class Curve:
    """One curve of a plot."""

    name: str
    across: np.ndarray
    """(points,), x values, ascending."""
    up: np.ndarray
    """(points,), y values."""
    spread: np.ndarray | None = None
    """(points,), half the height of the band around the curve."""
    is_control: bool = False
    """Whether to draw the curve grey and dashed."""


def curves_svg(title: str, curves: Sequence[Curve], across: str, up: str) -> str:
    """Draw curves on one pair of axes, each labelled at its end.

    Raises:
        InputError: If there is nothing to draw, lengths differ, or a number is not finite.
    """
    for curve in curves:
        parts = [curve.across, curve.up] + ([] if curve.spread is None else [curve.spread])
        if len({part.shape for part in parts}) != 1 or curve.up.ndim != 1 or not len(curve.up):
            raise InputError(
                f"Curve {curve.name!r} has arrays of shapes {[part.shape for part in parts]}: pass one-dimensional "
                "arrays of equal length, with at least one point."
            )
        if not all(np.isfinite(part).all() for part in parts):
            raise InputError(f"Curve {curve.name!r} contains numbers that are not finite: leave those points out.")
    if not curves:
        raise InputError("There are no curves to draw: pass at least one.")
    bands = [_band(curve) for curve in curves]
    x = _axis([float(v) for c in curves for v in c.across], _LEFT, _RIGHT)
    y = _axis([float(v) for low, high in bands for v in (*low, *high)], _BOTTOM, _TOP)
    drawn = grid(_LEFT, _RIGHT, ((y.position(v), f"{v:g}") for v in y.ticks()))
    drawn += [text(x.position(v), _BOTTOM + 20, f"{v:g}", "middle") for v in x.ticks()]
    drawn += [line("axis", _LEFT, _BOTTOM, _RIGHT, _BOTTOM), text(_LEFT, 20, title, "start", "name")]
    drawn += [text(_LEFT, 38, up, "start"), text((_LEFT + _RIGHT) / 2, _BOTTOM + 40, across, "middle")]
    colours = _colours(curves)
    names = _label_places([y.position(float(c.up[-1])) for c in curves])
    for curve, (low, high), colour, place in zip(curves, bands, colours, names, strict=True):
        drawn += [_drawn(curve, low, high, colour, x, y), text(_RIGHT + 10, place + 4, curve.name, "start")]
        drawn.append(f'<circle fill="{colour}" cx="{_RIGHT + 4}" cy="{place:.1f}" r="3"/>')
    label = f"{title}: {up} against {across}, for {', '.join(c.name for c in curves)}"
    return image(label, _WIDTH, _HEIGHT, drawn, style=_STYLE) + "\n"


def _axis(values: Sequence[float], start: float, end: float) -> LinearScale:
    """Return a linear axis over the range of some values."""
    low, high = min(values), max(values)
    if high - low <= 1e-9 * max(abs(low), abs(high)):  # all values are equal: add a margin
        margin = abs(high) * 0.05 or 1.0
        low, high = low - margin, high + margin
    return LinearScale(low, high, start, end)


def _band(curve: Curve) -> tuple[np.ndarray, np.ndarray]:
    spread = np.zeros_like(curve.up) if curve.spread is None else curve.spread
    return curve.up - spread, curve.up + spread


def _colours(curves: Sequence[Curve]) -> list[str]:
    number, found = 0, []
    for curve in curves:
        found.append(_CONTROL if curve.is_control else _COLOURS[number % len(_COLOURS)])
        number += not curve.is_control
    return found


def _label_places(ends: Sequence[float]) -> list[float]:
    """Move the labels at the curves' ends apart, so that they overlap neither each other nor the tick labels."""
    order = sorted(range(len(ends)), key=lambda i: ends[i])
    places = list(ends)
    for above, here in pairwise(order):
        places[here] = max(places[here], places[above] + _NAME_GAP)
    floor = float(max(_BOTTOM, _TOP + _NAME_GAP * (len(ends) - 1)))
    for here in reversed(order):
        places[here] = min(places[here], floor)
        floor = places[here] - _NAME_GAP
    return places


def _drawn(curve: Curve, low: np.ndarray, high: np.ndarray, colour: str, x: LinearScale, y: LinearScale) -> str:
    kind = "line control" if curve.is_control else "line"
    if len(curve.up) == 1:
        # A line through a single point would be invisible.
        across, up, top, bottom = (
            axis.position(float(values[0])) for axis, values in ((x, curve.across), (y, curve.up), (y, high), (y, low))
        )
        bar = (
            ""
            if curve.spread is None
            else f'<path class="{kind}" stroke="{colour}" d="M{across:.1f} {top:.1f}V{bottom:.1f}"/>'
        )
        return f'{bar}<circle class="point" fill="{colour}" cx="{across:.1f}" cy="{up:.1f}" r="3"/>'
    polyline = f'<polyline class="{kind}" stroke="{colour}" points="{_points(curve.across, curve.up, x, y)}"/>'
    if curve.spread is None:
        return polyline
    around = f"{_points(curve.across, high, x, y)} {_points(curve.across[::-1], low[::-1], x, y)}"
    return f'<polygon class="band" fill="{colour}" points="{around}"/>{polyline}'


def _points(across: np.ndarray, up: np.ndarray, x: LinearScale, y: LinearScale) -> str:
    return " ".join(f"{x.position(float(a)):.1f},{y.position(float(u)):.1f}" for a, u in zip(across, up, strict=True))
