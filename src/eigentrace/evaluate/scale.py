"""Axes of plots: positions of values, tick values and tick labels."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_MAX_TICKS = 7


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


def count_ticks(highest: int) -> list[int]:
    """Return at most six evenly spaced round integers from 0 to at most `highest`.

    >>> count_ticks(1130), count_ticks(3)
    ([0, 500, 1000], [0, 1, 2, 3])
    """
    magnitude = 10 ** (len(str(max(highest, 1))) - 1)
    steps = (magnitude * tenths // 10 for tenths in (1, 2, 5, 10, 20))
    step = next(step for step in steps if step and highest / step <= 5)
    return list(range(0, highest + 1, step))


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
