import xml.etree.ElementTree as ET

import numpy as np
import pytest

from eigentrace.errors import InputError
from eigentrace.evaluate.curves import Curve, curves_svg
from tests.helpers.expecting import refused

SVG = "{http://www.w3.org/2000/svg}"


def curve(name="a", up=(1.0, 2.0, 4.0), **options):
    return Curve(name, np.array([0.0, 0.1, 0.3]), np.array(up), **options)


def points(node):
    return np.array([[float(v) for v in pair.split(",")] for pair in node.get("points").split()])


def test_lines_go_where_the_numbers_are():
    root = ET.fromstring(curves_svg("t", [curve()], "x", "y"))
    (line,) = root.iter(f"{SVG}polyline")
    found = points(line)
    np.testing.assert_allclose((found[1, 0] - found[0, 0]) / (found[2, 0] - found[0, 0]), 1 / 3, atol=0.01)
    np.testing.assert_allclose((found[1, 1] - found[0, 1]) / (found[2, 1] - found[0, 1]), 1 / 3, atol=0.01)
    assert found[2, 1] < found[0, 1]  # up is up


def test_bands_lie_around_their_line():
    root = ET.fromstring(curves_svg("t", [curve(spread=np.array([0.5, 0.5, 0.5]))], "x", "y"))
    (line,), (band,) = root.iter(f"{SVG}polyline"), root.iter(f"{SVG}polygon")
    middle, around = points(line), points(band)
    np.testing.assert_allclose((around[:3] + around[:2:-1]) / 2, middle, atol=0.11)  # coordinates have one digit
    assert (around[:3, 1] < middle[:, 1]).all()


def test_controls_are_grey_and_dashed_and_names_do_not_cover_each_other():
    curves = [curve(name) for name in "abc"] + [curve("random", is_control=True)]
    root = ET.fromstring(curves_svg("t", curves, "x", "y"))
    lines = list(root.iter(f"{SVG}polyline"))
    assert lines[3].get("class") == "line control"
    assert len({line.get("stroke") for line in lines}) == 4
    heights = sorted(float(t.get("y")) for t in root.iter(f"{SVG}text") if t.text in ("a", "b", "c", "random"))
    assert np.diff(heights).min() >= 15.9


def test_names_of_curves_that_end_low_stay_above_the_numbers_of_the_axis():
    falling = [curve(name, up=(4.0, 2.0, 1.0)) for name in ("low", "lower", "lowest")]
    root = ET.fromstring(curves_svg("t", falling, "x", "y"))
    heights = {t.text: float(t.get("y")) for t in root.iter(f"{SVG}text")}
    names = sorted(heights[line.name] for line in falling)
    assert np.diff(names).min() >= 15.9
    assert names[-1] <= heights["0"] - 10


def test_flat_and_single_points():
    for lines in ([curve(up=(2.0, 2.0, 2.0))], [curve(up=(0.0, 0.0, 0.0))], [Curve("p", np.ones(1), np.ones(1))]):
        root = ET.fromstring(curves_svg("t", lines, "x", "y"))
        assert "nan" not in ET.tostring(root, encoding="unicode").lower()


def test_a_single_point_is_a_dot_where_its_number_is_with_its_spread():
    one = Curve("one", np.array([0.1]), np.array([2.0]), np.array([0.5]))
    root = ET.fromstring(curves_svg("t", [curve(up=(1.0, 2.0, 4.0)), one], "x", "y"))
    (line,) = root.iter(f"{SVG}polyline")
    (dot,) = [node for node in root.iter(f"{SVG}circle") if node.get("class") == "point"]
    assert [float(dot.get("cx")), float(dot.get("cy"))] == points(line)[1].tolist()
    (bar,) = [node.get("d") for node in root.iter(f"{SVG}path") if node.get("class") == "line"]
    ends = [float(word) for word in bar.removeprefix("M").replace("V", " ").split()]
    assert ends[0] == float(dot.get("cx"))
    assert (ends[1] + ends[2]) / 2 == pytest.approx(float(dot.get("cy")), abs=0.11)


@pytest.mark.parametrize(
    ("curves", "mentions"),
    [
        ([], ("curves",)),
        ([curve(up=(1.0, np.nan, 1.0))], ("'a'",)),
        ([curve(up=(1.0, 2.0))], ("'a'", "[(3,), (2,)]")),
        ([Curve("e", np.zeros(0), np.zeros(0))], ("'e'", "[(0,), (0,)]")),
    ],
)
def test_refuses(curves, mentions):
    with refused(InputError, *mentions):
        curves_svg("t", curves, "x", "y")
