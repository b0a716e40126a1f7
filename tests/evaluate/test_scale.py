import pytest
from hypothesis import given
from hypothesis import strategies as st

from eigentrace.evaluate.scale import LogScale, count_ticks, tick_labels


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
