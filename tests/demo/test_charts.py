import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from eigentrace.demo.charts import histogram_svg, spectrum_svg
from eigentrace.errors import InputError
from tests.helpers.expecting import expect_mentions, refused


def marks(svg, kind):
    return [node for node in ET.fromstring(svg).iter() if kind in node.get("class", "").split()]


def test_spectrum_has_a_mark_for_each_eigenvalue():
    svg = spectrum_svg(np.array([8.0, -4.0, 2.0, 0.0]))
    assert len(marks(svg, "positive")) == 3  # zero is drawn at the floor, with the positive ones
    assert len(marks(svg, "negative")) == 1
    assert not marks(svg, "error")


def test_spectrum_falls_evenly_for_a_geometric_series():
    heights = [float(m.get("cy")) for m in marks(spectrum_svg(2.0 ** -np.arange(6)), "positive")]
    steps = np.diff(heights)  # y grows downwards
    assert (steps > 0).all()
    np.testing.assert_allclose(steps, steps[0], atol=0.11)  # coordinates are written to a tenth


def test_spectrum_says_in_words_what_it_shows():
    root = ET.fromstring(spectrum_svg(np.array([8.0, -4.0, 2.0])))
    assert root.get("role") == "img"
    expect_mentions(root.get("aria-label"), ["3 eigenvalues", 1, "negative", 8])


def test_residuals_become_bars_where_they_are_known():
    residuals = np.array([0.1, 5.0, np.nan])
    bars = marks(spectrum_svg(np.array([8.0, -4.0, 2.0]), residuals), "error")
    assert len(bars) == 2
    lengths = [float(b.get("y2")) - float(b.get("y1")) for b in bars]
    assert 0 < lengths[0] < lengths[1]


def test_one_eigenvalue_is_enough():
    assert len(marks(spectrum_svg(np.array([3.0])), "positive")) == 1


@pytest.mark.parametrize("values", [np.array([]), np.zeros(3), np.array([1.0, np.nan]), np.array([1.0, np.inf])])
def test_spectrum_refuses_what_cannot_be_drawn(values):
    with refused(InputError, "eigenvalues", values.shape):
        spectrum_svg(values)


def test_spectrum_refuses_residuals_of_another_length():
    with refused(InputError, "1 residuals", "2 eigenvalues"):
        spectrum_svg(np.ones(2), np.ones(1))


def heights_of(svg, kind):
    """The counts of an outline, as heights above the bottom line."""
    (path,) = marks(svg, kind)[-1:]
    levels = [float(y) for y in re.findall(r"V([\d.]+)H", path.get("d"))]
    return 252 - np.array(levels)


def test_histogram_counts_every_score_once():
    rng = np.random.default_rng(0)
    scores, is_wrong = np.exp(rng.normal(size=900)), rng.random(900) < 0.2
    svg = histogram_svg(scores, is_wrong)
    right, wrong = heights_of(svg, "right").sum(), heights_of(svg, "wrong").sum()
    assert right / wrong == pytest.approx((~is_wrong).sum() / is_wrong.sum(), rel=0.03)
    assert max(heights_of(svg, "right")) == pytest.approx(252 - 30)


def test_histogram_puts_zero_and_less_aside():
    svg = histogram_svg(np.array([-1.0, 0.0, 1.0, 10.0]), np.array([False, False, False, True]))
    assert len(marks(svg, "right")) == 2
    assert len(marks(svg, "wrong")) == 1
    assert "≤ 0" in svg
    expect_mentions(ET.fromstring(svg).get("aria-label"), ["2 are zero"])
    assert "≤ 0" not in histogram_svg(np.array([1.0, 2.0]), np.array([False, True]))


@pytest.mark.parametrize("scores", [np.full(4, 2.0), np.full(4, -2.0), np.array([1e-300, 1.0, 1e300, 2.0])])
def test_histogram_of_extreme_scores(scores):
    drawing = ET.fromstring(histogram_svg(scores, np.array([True, False, True, False])))
    assert drawing.tag.endswith("svg")


def test_histogram_of_one_kind_only():
    expect_mentions(ET.fromstring(histogram_svg(np.ones(3), np.zeros(3, bool))).get("aria-label"), [3, "none for 0"])


@pytest.mark.parametrize("scores", [np.array([1.0]), np.array([1.0, np.nan])])
def test_histogram_refuses_what_cannot_be_drawn(scores):
    with refused(InputError, scores.shape, (2,)):
        histogram_svg(scores, np.array([True, False]))
