import re
from dataclasses import replace
from html.parser import HTMLParser
from importlib import resources

import numpy as np
import pytest

from eigentrace.demo.report import Example, Fact, MethodRow, Note, Report, render_page
from eigentrace.errors import InputError
from tests.helpers.expecting import refused

EVIL = "<script>alert('x')</script>&\""


@pytest.fixture
def report():
    rng = np.random.default_rng(0)
    return Report(
        title="Labels",
        lede="A lede.",
        facts=[Fact("7", "days")],
        methods=[MethodRow("Loss", None, 99.0, 80.0, 0.0, 1.0), MethodRow("Arnoldi", 5, 98.0, 99.0, 2.0, 1.0)],
        eigenvalues=np.array([3.0, -2.0, 1.0]),
        residuals=np.array([0.1, 0.1, 0.1]),
        scores=np.exp(rng.normal(size=50)),
        is_wrong=np.arange(50) < 10,
        examples=[
            Example(4, np.full((28, 28), 9, np.uint8), given=3, true=8, score=1.5),
            Example(7, np.full((28, 28), 7, np.uint8), given=2, true=2, score=0.5),
        ],
        notes=[Note("Sign", "Positive helps.")],
    )


class Elements(HTMLParser):
    """Collects tags with their attributes, and checks that those with an end are closed in order."""

    def __init__(self, page):
        super().__init__()
        self.found, self.open = [], []
        self.feed(page)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag not in {"meta", "img"}:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_stands_alone(report):
    page = render_page(report)
    elements = Elements(page).found
    assert not {tag for tag, _ in elements} & {"script", "link", "iframe", "object", "base", "form"}
    for _, attributes in elements:
        assert not [name for name in attributes if name.startswith("on")]
        assert attributes.get("src", "data:").startswith("data:image/png;base64,") or "src" not in attributes
        assert "href" not in attributes
    assert "url(" not in page
    assert "@import" not in page
    assert "default-src 'none'" in page


def test_every_picture_is_described(report):
    pictures = [attributes for tag, attributes in Elements(render_page(report)).found if tag in {"img", "svg"}]
    assert len(pictures) == 2 + 2 + 2  # plots, bars of the table, examples
    assert all(p.get("alt") or p.get("aria-label") or p.get("aria-hidden") for p in pictures)


def test_examples_say_what_was_given_and_what_is_true(report):
    page = re.sub(r"<[^>]*>", "", render_page(report))
    assert "given 3 · true 8✓ wrong label" in page
    assert "given 2 · true 2✗ right label" in page
    assert "1 of these 2" in page
    assert 'class="hit"' in render_page(report)
    assert 'class="miss"' in render_page(report)


def test_the_best_numbers_are_bold_each_in_its_column(report):
    page = render_page(report)
    assert "<td><b>99.0</b></td><td>80.0</td>" in page
    assert "<td>98.0</td><td><b>99.0</b></td>" in page


def test_all_text_is_escaped(report):
    hostile = replace(
        report,
        title=EVIL,
        lede=EVIL,
        facts=[Fact(EVIL, EVIL)],
        methods=[replace(report.methods[0], method=EVIL)],
        notes=[Note(EVIL, EVIL)],
    )
    page = render_page(hostile)
    assert "<script" not in page
    assert page.count("&lt;script&gt;alert(&#x27;x&#x27;)&lt;/script&gt;&amp;&quot;") == 8
    Elements(page)


def test_error_bounds_are_named_only_where_there_are_some(report):
    assert "error bounds" in render_page(report)
    assert "error bounds" not in render_page(replace(report, residuals=None))


def test_the_legend_names_only_what_is_drawn(report):
    assert "</span>negative" in render_page(report)
    assert "</span>negative" not in render_page(replace(report, eigenvalues=np.array([2.0, 1.0, 0.5])))
    assert "dashed frame" in render_page(report)
    assert "dashed frame" not in render_page(replace(report, examples=report.examples[:1]))


@pytest.mark.parametrize(
    ("score", "text"), [(1964.4, "1,964"), (12.345, "12.3"), (0.00012345, "0.000123"), (-250.0, "-250"), (2e9, "2e+09")]
)
def test_scores_are_written_short(report, score, text):
    page = render_page(replace(report, examples=[replace(report.examples[0], score=score)]))
    assert f"score {text}</span>" in page


def test_scores_and_flags_must_match(report):
    with refused(InputError, "scores", "(50,)", "is_wrong", "(3,)"):
        replace(report, is_wrong=np.zeros(3, bool))


def luminance(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return np.dot(linear, [0.2126, 0.7152, 0.0722])


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize("text", ["ink", "soft", "blue", "red"])
@pytest.mark.parametrize("ground", ["page", "card"])
def test_text_has_the_contrast_of_wcag_aa(scheme, text, ground):
    style = resources.files("eigentrace.demo").joinpath("style.css").read_text(encoding="utf-8")
    colours = dict(re.findall(r"--(\w+): (#\w{6});", re.findall(r":root \{(.*?)\}", style, re.DOTALL)[scheme]))
    light, dark = sorted((luminance(colours[text]), luminance(colours[ground])), reverse=True)
    assert (light + 0.05) / (dark + 0.05) >= 4.5  # WCAG 2.1, success criterion 1.4.3
