"""Figures of experiments and benchmarks: the same file whenever they are drawn, and everything named on them."""

import base64
import io
import re
import subprocess
import sys

import matplotlib
import numpy as np
import pytest
from PIL import Image

from harness.plot import (
    Curve,
    Dot,
    Mark,
    Sheet,
    Spot,
    can_draw,
    curves_svg,
    dots_svg,
    growth_svg,
    trade_off_svg,
    undrawn,
)
from tests.helpers.drawings import pictures_on, words_on
from tests.helpers.places import ROOT

CURVES = [
    Curve("A & B", [10, 100], [5.0, 4.0], spread=[0.5, 0.5], level=7.0),
    Curve("C", [10], [5.0], spread=[0.1]),
    Curve("nothing"),
    Curve("level", level=2.0, is_control=True),
]


def a_picture(shade: int = 0) -> str:
    file = io.BytesIO()
    Image.fromarray(np.full((4, 4), shade, np.uint8)).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def a_sheet() -> str:
    sheet = Sheet()
    sheet.write(10, 20, "words <here>", bold=True)
    sheet.show(10, 30, 40, a_picture(9), "under", "#0072b2")
    sheet.show(60, 30, 40, a_picture(99).rpartition(",")[2], "bare")
    return sheet.svg("A sheet", 200, 100)


DRAWINGS = {
    "curves": lambda: curves_svg({"one": CURVES, "two": []}, "K", "up"),
    "logarithmic": lambda: curves_svg({"one": CURVES, "two": CURVES}, "K", "up", log=True),
    "trade-off": lambda: trade_off_svg({"Here": [Mark("Loss", 1e-3, 100.0), Mark("Loss", 2, 40)]}, ["Loss"], "seconds"),
    "dots": lambda: dots_svg("t", [Dot("a", "s", 0.0), Dot("b", "s", 100.0, hollow=True)], "AP"),
    "growth": lambda: growth_svg("t", {"g": [Spot("a", 1, 2), Spot("b", 9, 4, hollow=True)]}, {"g": (1, 2)}, "x", "y"),
    "sheet": a_sheet,
}


@pytest.mark.parametrize("draw", DRAWINGS.values(), ids=list(DRAWINGS))
def test_a_figure_is_the_same_whenever_it_is_drawn_and_leaves_settings_alone(draw):
    before = dict(matplotlib.rcParams)
    first = draw()
    with matplotlib.rc_context({"font.size": 30, "axes.facecolor": "black"}):
        assert draw() == first
    assert dict(matplotlib.rcParams) == before
    assert first.count("\n") == 1
    assert "dc:date" not in first
    assert "fill: #ffffff" in first  # read on a dark page too


def test_curves_are_named_in_the_order_in_which_they_end():
    words = words_on(curves_svg({"one": CURVES, "two": []}, "across", "upwards"))
    assert {"one", "two", "across", "upwards"} <= set(words)
    assert [word for word in words if word in {curve.name for curve in CURVES}] == ["C", "A & B", "level"]


def test_logarithmic_axes_are_labelled_at_the_points_and_plainly():
    curves = [Curve("a", [10, 100, 1000], [20.0, 300.0, 2000.0])]
    assert {"10", "100", "1,000", "20", "50", "200", "500", "2,000"} <= set(
        words_on(curves_svg({"t": curves}, "K", "", log=True))
    )


def test_narrow_logarithmic_axes_have_labels_too():
    words = words_on(curves_svg({"t": [Curve("a", [10, 100], [91.0, 99.0])]}, "K", "", log=True))
    assert {"92", "94", "96", "98"} <= set(words)


def test_a_name_can_keep_its_colour():
    both, alone = [Curve("a", [1, 2], [1, 2]), Curve("b", [1, 2], [2, 3])], [Curve("b", [1, 2], [2, 3], colour=1)]
    found = [set(re.findall(r"stroke: (#\w{6})", curves_svg({"t": curves}, "", ""))) for curves in (both, alone)]
    assert found[0] - found[1] == {"#0072b2"}


def test_everything_on_the_other_kinds_is_named():
    assert {"Here", "Loss", "seconds", "99", "50"} <= set(words_on(DRAWINGS["trade-off"]()))
    assert {"t", "a", "b", "s", "AP", "0", "100"} <= set(words_on(DRAWINGS["dots"]()))
    assert {"t", "a", "b", "g", "x", "y"} <= set(words_on(DRAWINGS["growth"]()))
    assert {"words <here>", "under", "bare"} == set(words_on(a_sheet()))
    assert pictures_on(a_sheet()) == 2


def test_benchmarks_and_experiments_need_no_matplotlib_but_to_draw():
    assert can_draw()
    assert "`python -m bench.a --render` draws them" in undrawn("python -m bench.a")
    code = "import sys, bench.projection, experiments.paper as p; p.experiments(); print('matplotlib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
