import xml.etree.ElementTree as ET

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eigentrace.rendering.svg import LinearScale, LogScale, count_ticks, image, round_ticks, text, tick_labels


def test_positions_are_even_in_the_logarithm():
    scale = LogScale(0.01, 100.0, start=0, end=8)
    assert [scale.position(v) for v in (0.01, 0.1, 1, 10, 100)] == pytest.approx([0, 2, 4, 6, 8])


def test_values_off_the_axis_lie_on_its_ends():
    scale = LogScale(1.0, 10.0, start=200, end=0)
    assert (scale.position(1e-300), scale.position(1e300)) == (200, 0)


@given(st.floats(-12, 6), st.floats(0.8, 14))
def test_ticks_are_few_and_on_the_axis(start, decades):
    scale = LogScale(10.0**start, 10.0 ** (start + decades), 0, 1)
    ticks = scale.ticks()
    assert 2 <= len(ticks) <= 9
    assert all(scale.low * 0.999 <= tick <= scale.high * 1.001 for tick in ticks)
    assert len(set(tick_labels(ticks))) == len(ticks)


@given(st.integers(0, 10**7))
def test_count_ticks_are_whole_and_few(highest):
    ticks = count_ticks(highest)
    assert ticks[0] == 0
    assert ticks[-1] <= highest
    assert len(ticks) <= 6
    assert all(isinstance(tick, int) for tick in ticks)


def test_labels_of_one_axis_are_written_alike():
    assert tick_labels([0.5, 1.0, 20.0]) == ["0.5", "1", "20"]
    assert tick_labels([1e-6, 2e-6, 1.0]) == ["10⁻⁶", "2·10⁻⁶", "10⁰"]
    assert tick_labels([1e-5, 1000.0]) == ["10⁻⁵", "10³"]


@pytest.mark.parametrize(
    ("bounds", "expected"),
    [((0, 1), [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]), ((-3, 3), [-2, 0, 2]), ((0.98, 1.01), [0.98, 0.99, 1.0, 1.01])],
)
def test_ticks_are_round(bounds, expected):
    assert round_ticks(*bounds) == expected


def test_ticks_are_few_and_inside():
    for low, high in np.random.default_rng(0).normal(size=(200, 2)) * 10.0 ** np.arange(-100, 100)[:, None] ** 1:
        low, high = sorted((low, high))  # noqa: PLW2901
        ticks = round_ticks(low, high)
        assert 2 <= len(ticks) <= 7
        slack = 1e-6 * (high - low)
        assert low - slack <= ticks[0] <= ticks[-1] <= high + slack


def test_a_linear_axis_has_round_ticks_where_they_belong():
    scale = LinearScale(0.0, 10.0, start=100, end=0)
    assert [scale.position(tick) for tick in scale.ticks()] == [100, 80, 60, 40, 20, 0]


def test_images_are_well_formed_whatever_is_written_on_them():
    drawing = ET.fromstring(image("a < b", 20, 10, [text(1, 2, "x & y", "end", "name")], style="text { fill: red }"))
    assert drawing.get("aria-label") == "a < b"
    assert [node.text for node in drawing] == ["text { fill: red }", "x & y"]
    assert ET.fromstring(image("a", 20, 10, [])).get("class") == "plot"
