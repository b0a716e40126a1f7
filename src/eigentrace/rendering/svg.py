"""Plots as SVG: axes with their tick values and labels, and the elements of a plot."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_MAX_TICKS = 7


@dataclass(frozen=True)
class LinearScale:
    """A linear axis from `low` to `high`, drawn from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float

    def position(self, value: float) -> float:
        """Return the position of `value`."""
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Return the tick values."""
        return round_ticks(self.low, self.high)


@dataclass(frozen=True)
class LogScale:
    """A logarithmic axis from `low` to `high`, drawn from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float

    def position(self, value: float) -> float:
        """Return the position of `value`; values outside of the axis are drawn at its nearer end."""
        clamped = min(max(value, self.low), self.high)
        share = (math.log(clamped) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        return self.start + share * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Return the tick values: powers of ten, or 1-2-5 steps if there are fewer than three of these.

        >>> LogScale(0.003, 70.0, 0, 1).ticks(), LogScale(0.8, 12.0, 0, 1).ticks()
        ([0.01, 0.1, 1.0, 10.0], [1.0, 2.0, 5.0, 10.0])
        """
        first, last = math.ceil(math.log10(self.low)), math.floor(math.log10(self.high))
        stride = max(1, math.ceil((last - first + 1) / _MAX_TICKS))
        powers = [10.0**n for n in range(first, last + 1) if n % stride == 0]
        if len(powers) >= 3:
            return powers
        steps = [m * 10.0**n for n in range(first - 1, last + 1) for m in (1, 2, 5)]
        return [value for value in steps if self.low <= value <= self.high]


def round_ticks(low: float, high: float) -> list[float]:
    """Return three to seven round numbers between two bounds.

    >>> round_ticks(0.0, 0.31)
    [0.0, 0.1, 0.2, 0.3]
    """
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.999)
    # Rounded to the digits of the step, to avoid labels such as 0.30000000000000004.
    digits = max(0, 1 - math.floor(math.log10(step)))
    return [round(n * step, digits) for n in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def count_ticks(highest: int) -> list[int]:
    """Return at most six evenly spaced round integers from 0 to at most `highest`.

    >>> count_ticks(1130), count_ticks(3)
    ([0, 500, 1000], [0, 1, 2, 3])
    """
    return [int(tick) for tick in round_ticks(0, max(1, highest)) if tick == int(tick) and tick <= highest]


def tick_labels(values: Sequence[float]) -> list[str]:
    """Return the tick labels of an axis: all as plain numbers if these are short, else all as powers of ten.

    >>> tick_labels([0.01, 0.1, 1.0]), tick_labels([1e-07, 1.0])
    (['0.01', '0.1', '1'], ['10⁻⁷', '10⁰'])
    """
    if all(1e-3 <= value < 1e5 for value in values):
        return [f"{value:g}" for value in values]
    return [_as_power(value) for value in values]


def _as_power(value: float) -> str:
    # The logarithm of a power of ten may be slightly too small by rounding.
    exponent = math.floor(math.log10(value) + 1e-9)
    power = "10" + str(exponent).translate(_SUPERSCRIPTS)
    digit = round(value / 10.0**exponent)
    return power if digit == 1 else f"{digit}·{power}"


def text(x: float, y: float, content: str, anchor: Literal["start", "middle", "end"], kind: str = "") -> str:
    """Return a text element of CSS class `kind` that starts, ends or is centred at a point."""
    name = f' class="{kind}"' if kind else ""
    return f'<text{name} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(content)}</text>'


def line(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    """Return a straight line of CSS class `kind`."""
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def grid(left: float, right: float, ticks: Iterable[tuple[float, str]]) -> list[str]:
    """Return a horizontal grid line for each height, with its label to the left."""
    return [line("grid", left, y, right, y) + text(left - 8, y + 4, label, "end") for y, label in ticks]


def image(label: str, width: int, height: int, parts: Iterable[str], *, style: str | None = None) -> str:
    """Return an SVG image with a text alternative.

    Args:
        label: The description that screen readers read in place of the image.
        width: In units of the drawing; it is scaled to the space it gets.
        height: In the same units.
        parts: The elements.
        style: CSS rules of a standalone file; None for an image inside a page, styled there by its class `plot`.
    """
    kind = ' class="plot"' if style is None else ' xmlns="http://www.w3.org/2000/svg"'
    rules = "" if style is None else f"<style>{style}</style>"
    start = f'<svg{kind} viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}">'
    return start + rules + "".join(parts) + "</svg>"
