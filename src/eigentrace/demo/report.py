"""The demo's report as one HTML file, without scripts or requests, and its table as plain text."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources

import numpy as np

from eigentrace.demo.charts import histogram_svg, spectrum_svg
from eigentrace.errors import InputError
from eigentrace.rendering.png import encode_png


@dataclass(frozen=True)
class MethodRow:
    """The results of one method."""

    method: str
    keep: int | None
    """K, the number of directions kept; None if the method keeps none."""
    auc: float
    """In percent."""
    ap: float
    """In percent."""
    fit_seconds: float
    score_seconds: float


@dataclass(frozen=True)
class Example:
    """One training image with its given label, its true label and its score."""

    row: int
    image: np.ndarray  # (H, W) uint8
    given: int
    true: int
    score: float

    @property
    def is_wrong(self) -> bool:
        """Whether the given label differs from the true one."""
        return self.given != self.true


@dataclass(frozen=True)
class Fact:
    """A key figure with its description."""

    value: str
    label: str


@dataclass(frozen=True)
class Note:
    """A term on the page with its explanation."""

    term: str
    text: str


@dataclass(frozen=True)
class Report:
    """The content of the page."""

    title: str
    lede: str
    facts: Sequence[Fact]
    methods: Sequence[MethodRow]
    eigenvalues: np.ndarray  # (K,)
    residuals: np.ndarray | None  # (K,), if the fit has error bounds
    scores: np.ndarray  # (N,) self-influence
    is_wrong: np.ndarray  # (N,) bool
    examples: Sequence[Example]
    notes: Sequence[Note]

    def __post_init__(self) -> None:
        if self.scores.shape != self.is_wrong.shape or self.scores.ndim != 1:
            raise InputError(
                f"scores has shape {self.scores.shape} and is_wrong {self.is_wrong.shape}: pass one value of each for "
                "every training example."
            )


HEADINGS = ("method", "K", "AUC %", "AP %", "fit s", "score s")


def cells(row: MethodRow) -> tuple[str, ...]:
    """Format one method's values, in the order of `HEADINGS`."""
    return (
        row.method,
        "–" if row.keep is None else str(row.keep),
        f"{row.auc:.1f}",
        f"{row.ap:.1f}",
        f"{row.fit_seconds:.1f}",
        f"{row.score_seconds:.1f}",
    )


def methods_table(rows: Sequence[MethodRow]) -> str:
    """Format the methods as an aligned plain-text table, with names on the left and numbers on the right.

    >>> print(methods_table([MethodRow("Loss", None, 99.7, 99.0, 0.0, 1.25)]))
    method  K  AUC %  AP %  fit s  score s
    Loss    –   99.7  99.0    0.0      1.2
    """
    lines = [HEADINGS, *(cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADINGS))]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))])
        for line in lines
    )


# The content security policy makes the browser block all requests, whatever the page contains.
_HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>
{style}</style>
</head>
"""


def render_page(report: Report) -> str:
    """Return a report as the text of an HTML file."""
    style = resources.files("eigentrace.demo").joinpath("style.css").read_text(encoding="utf-8")
    sections = [
        _section("methods", "How the methods compare", _methods(report.methods)),
        f'<div class="pair">{_histogram(report)}{_spectrum(report)}</div>',
        _section("top", "The most self-influential training images", _gallery(report.examples)),
        _section("notes", "How to read this", _notes(report.notes)),
    ]
    return (
        _HEAD.format(title=escape(report.title), style=style)
        + f'<body>\n<main>\n<header>\n<p class="brand">eigentrace</p>\n<h1>{escape(report.title)}</h1>\n'
        + f'<p class="lede">{escape(report.lede)}</p>\n{_facts(report.facts)}</header>\n'
        + "\n".join(sections)
        + "\n</main>\n</body>\n</html>\n"
    )


def _section(name: str, heading: str, body: str) -> str:
    return f'<section aria-labelledby="{name}">\n<h2 id="{name}">{escape(heading)}</h2>\n{body}</section>'


def _facts(facts: Sequence[Fact]) -> str:
    items = [f"<div><dt>{escape(f.label)}</dt><dd>{escape(f.value)}</dd></div>\n" for f in facts]
    return f'<dl class="facts">\n{"".join(items)}</dl>\n'


def _methods(rows: Sequence[MethodRow]) -> str:
    names = "".join(f'<th scope="col">{escape(name)}</th>' for name in HEADINGS)
    head = f'<thead><tr>{names}<th class="wide" scope="col">AP, out of 100</th></tr></thead>'
    best_auc, best_ap = (max((getattr(row, name) for row in rows), default=0.0) for name in ("auc", "ap"))
    body = "\n".join(_method(row, row.auc == best_auc, row.ap == best_ap) for row in rows)
    return (
        '<p class="hint">Each method ranks all training examples; wrong labels should come first. AUC and AP '
        "measure how well it does. The best values are bold.</p>\n"
        f'<div class="scroll"><table>\n{head}\n<tbody>\n{body}\n</tbody>\n</table></div>\n'
    )


def _method(row: MethodRow, best_auc: bool, best_ap: bool) -> str:
    name, keep, auc, ap, *seconds = (escape(cell) for cell in cells(row))
    auc, ap = (f"<b>{number}</b>" if best else number for number, best in ((auc, best_auc), (ap, best_ap)))
    numbers = "".join(f"<td>{cell}</td>" for cell in (keep, auc, ap, *seconds))
    # The bar is hidden from screen readers, because the same number is in another cell of the row.
    bar = (
        '<svg viewBox="0 0 100 8" aria-hidden="true" preserveAspectRatio="none">'
        '<rect class="track" width="100" height="8"/>'
        f'<rect class="bar" width="{row.ap:.1f}" height="8"/></svg>'
    )
    return f'<tr><th scope="row">{name}</th>{numbers}<td class="wide">{bar}</td></tr>'


def _histogram(report: Report) -> str:
    num_wrong = int(report.is_wrong.sum())
    legend = (
        f'<span class="key right"></span>right label ({len(report.is_wrong) - num_wrong:,})'
        f'<span class="key wrong"></span>wrong label ({num_wrong:,})'
    )
    caption = (
        f'<p class="legend">{legend}</p>'
        '<p class="hint">Number of training examples by score. The less the two groups overlap, the better.</p>'
    )
    return _figure("histogram", "Self-influence", caption, histogram_svg(report.scores, report.is_wrong))


def _spectrum(report: Report) -> str:
    legend = '<span class="key positive"></span>positive'
    if (report.eigenvalues < 0).any():
        legend += '<span class="key negative"></span>negative'
    bars = " Bars are error bounds; some are too short to see." if report.residuals is not None else ""
    caption = (
        f'<p class="legend">{legend}</p>'
        f'<p class="hint">The eigenvalues of the kept directions, in descending order.{bars}</p>'
    )
    return _figure("spectrum", "Spectrum", caption, spectrum_svg(report.eigenvalues, report.residuals))


def _figure(name: str, heading: str, caption: str, plot: str) -> str:
    return _section(name, heading, f"<figure><figcaption>{caption}</figcaption>{plot}</figure>\n")


def _gallery(examples: Sequence[Example]) -> str:
    found = sum(example.is_wrong for example in examples)
    cards = "\n".join(_card(rank, example) for rank, example in enumerate(examples, start=1))
    dashed = (
        " A dashed frame marks an image with a right label, which may be hard to read or unusual."
        if found < len(examples)
        else ""
    )
    return (
        f'<p class="hint">{found} of these {len(examples)} carry a wrong label.{dashed}</p>\n'
        f'<ol class="gallery">\n{cards}\n</ol>\n'
    )


def _card(rank: int, example: Example) -> str:
    # The style sheet hides <i> elements on narrow screens.
    height, width = example.image.shape
    kind, verdict = ("hit", "✓ wrong") if example.is_wrong else ("miss", "✗ right")
    alt = f"Training image {example.row}, labelled {example.given}, showing {example.true}"
    return (
        f'<li class="{kind}">'
        f'<img src="{data_uri(example.image)}" alt="{escape(alt)}" width="{width}" height="{height}">'
        f'<p><span class="rank">#{rank}<i> · row {example.row}</i></span>'
        f'<span class="labels"><span>given <b>{example.given}</b></span><i> · </i>'
        f"<span>true <b>{example.true}</b></span></span>"
        f'<span class="verdict">{verdict}<i> label</i></span>'
        f'<span class="rank">score {_short(example.score)}</span></p></li>'
    )


def _short(score: float) -> str:
    # Three significant digits, without an exponent for scores of usual size.
    return f"{score:,.0f}" if 100 <= abs(score) < 1e6 else f"{score:.3g}"


def _notes(notes: Sequence[Note]) -> str:
    return "<dl>\n" + "".join(f"<dt>{escape(n.term)}</dt><dd>{escape(n.text)}</dd>\n" for n in notes) + "</dl>\n"


def data_uri(image: np.ndarray) -> str:  # (H, W) uint8
    """Return a grey image as the value of an `src` attribute.

    Raises:
        InputError: If the image is not a two-dimensional uint8 array with at least one pixel.
    """
    if image.ndim != 2 or image.dtype != np.uint8 or image.size == 0:
        raise InputError(
            f"A grey image must be a (height, width) uint8 array, got {image.dtype} of shape {image.shape}: "
            "scale values to 0-255 and drop the channel dimension."
        )
    return "data:image/png;base64," + base64.b64encode(encode_png(image)).decode("ascii")
