"""Plots and sheets of small images as SVG files, drawn with matplotlib on white, for light and dark pages.

matplotlib is in the development group and is imported only for drawing, so that benchmarks run without it.
"""

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from io import BytesIO, StringIO
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Drawing = Callable[[], str]
"""Draws a figure when called, and returns it as the text of an SVG file."""

BLUE, VERMILION, GREEN = "#0072b2", "#d55e00", "#009e73"
# Okabe and Ito's colours for colour-blind readers, without their yellow, which is pale on white.
_COLOURS = (BLUE, VERMILION, GREEN, "#cc79a7", "#e69f00", "#56b4e9", "#000000")
_MARKERS = "osD^vPX"
_GREY = "#6b6b6b"
_CONTROL_DASHES = ("--", ":", "-.")
_WIDTH, _HEIGHT = 8.4, 4.4
"""Size of a panel in inches."""
_POINTS = 72
"""Points per inch; sheets are measured in points."""
_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",  # text is kept as text, which can be searched and read aloud, and makes files small
    "svg.hashsalt": "eigentrace",  # makes element ids reproducible
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": _GREY,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
}


def can_draw() -> bool:
    """Return whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def undrawn(command: str) -> str:
    """Return the note of a page without figures, with the command that draws them."""
    return f"No figures: matplotlib was not installed. `pip install matplotlib`, then `{command} --render` draws them."


def _svg(title: str, width: float, height: float, draw: Callable[["Figure"], None]) -> str:
    """Draw a figure in the same style on every machine; return SVG without a date."""
    from matplotlib import style
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    text = StringIO()
    with style.context(["default", _STYLE]):
        figure = Figure(
            figsize=(width, height), layout=ConstrainedLayoutEngine(h_pad=0.12, w_pad=0.12), facecolor="white"
        )
        draw(figure)
        FigureCanvasSVG(figure).print_svg(text, metadata={"Title": title, "Date": None, "Creator": None})
    # One line, so that listings and diffs stay short.
    return " ".join(text.getvalue().replace("base64,\n", "base64,").split()) + "\n"


@dataclass(frozen=True, eq=False)
class Curve:
    """A line of a plot."""

    name: str
    across: Sequence[float] = ()
    """(points,), ascending."""
    up: Sequence[float] = ()
    """(points,)"""
    spread: Sequence[float] | None = None
    """(points,), drawn as a band on both sides."""
    level: float | None = None
    """A level drawn as a dashed horizontal line in the colour of the curve."""
    is_control: bool = False
    """Whether to draw it as a grey dashed line."""
    colour: int | None = None
    """Index of its colour, to use the same colour in several plots; default: the next one."""

    @property
    def end(self) -> float | None:
        """The last value, or the level if there are no points."""
        return float(self.up[-1]) if len(self.up) else self.level


def curves_svg(panels: Mapping[str, Sequence[Curve]], across: str, up: str, *, log: bool = False) -> str:
    """Draw one panel per title, stacked, with the names of curves next to it in the order of their last values.

    Args:
        panels: Curves by the title of their panel.
        across: Label of the horizontal axis.
        up: Label of the vertical axis.
        log: Make both axes logarithmic, and label the points that there are on the horizontal one.
    """

    def draw(figure: "Figure") -> None:
        for (title, curves), axes in zip(panels.items(), _panels(figure, len(panels)), strict=True):
            axes.set_title(title)
            shown = [curve for curve in curves if curve.end is not None]
            if shown:
                _draw_curves(axes, shown, log=log)
                axes.set(xlabel=across, ylabel=up)
            else:
                axes.set_axis_off()

    return _svg("; ".join(panels), _WIDTH, _HEIGHT * max(1, len(panels)), draw)


def _panels(figure: "Figure", count: int) -> list["Axes"]:
    return list(figure.subplots(count, squeeze=False)[:, 0]) if count else []


def _draw_curves(axes: "Axes", curves: Sequence[Curve], *, log: bool) -> None:
    if log:
        axes.set(xscale="log", yscale="log")
        _plain_ticks(axes, sorted({place for curve in curves for place in curve.across}), curves)
    handles: dict[str, Any] = {}
    number = controls = 0
    for curve in curves:
        place = number if curve.colour is None else curve.colour
        look: dict[str, Any] = {"color": _COLOURS[place % len(_COLOURS)], "marker": _MARKERS[place % len(_MARKERS)]}
        if curve.is_control:
            look = {"color": _GREY, "linestyle": _CONTROL_DASHES[controls % len(_CONTROL_DASHES)]}
            look |= {"marker": "."} if len(curve.up) == 1 else {}
        number, controls = number + (not curve.is_control), controls + curve.is_control
        (handles[curve.name],) = axes.plot(curve.across, curve.up, label=curve.name, **look)
        if curve.level is not None:
            line = axes.axhline(curve.level, color=look["color"], linewidth=1.2, linestyle="--")
            handles[curve.name] = handles[curve.name] if len(curve.up) else line
        if curve.spread is not None:
            _draw_spread(axes, curve, look["color"])
    _name_aside(axes, {curve.name: handles[curve.name] for curve in sorted(curves, key=lambda c: -(c.end or 0.0))})


def _draw_spread(axes: "Axes", curve: Curve, colour: str) -> None:
    spread = list(curve.spread or ())
    low, high = ([y + sign * s for y, s in zip(curve.up, spread, strict=True)] for sign in (-1, 1))
    if len(curve.up) == 1:  # a band of one point would be invisible
        axes.vlines(list(curve.across), low, high, color=colour, linewidth=1.2)
    else:
        axes.fill_between(list(curve.across), low, high, color=colour, alpha=0.15, linewidth=0)


def _plain_ticks(axes: "Axes", places: Sequence[float], curves: Sequence[Curve]) -> None:
    """Label logarithmic axes with plain numbers: horizontally at the data points, vertically at round values."""
    from matplotlib.ticker import FixedLocator, LogLocator, MaxNLocator, NullLocator

    if places:
        axes.xaxis.set_major_locator(FixedLocator(list(places)))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(_plain)
    heights = [h for curve in curves for h in (*curve.up, *([] if curve.level is None else [curve.level]))]
    ratio = max(heights) / min(heights)
    steps = (1.0,) if ratio > 1e3 else (1.0, 2.0, 5.0) if ratio > 10 else (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0)
    axes.yaxis.set_major_locator(LogLocator(subs=steps) if ratio > 4 else MaxNLocator(6))
    axes.yaxis.set_minor_locator(NullLocator())
    if min(heights) >= 1e-3 and max(heights) < 1e6:
        axes.yaxis.set_major_formatter(_plain)
    axes.margins(y=0.1)


def _plain(value: float, _: float) -> str:
    """Format a number of an axis without a power of ten."""
    return f"{value:,.10g}"


def _name_aside(axes: "Axes", handles: Mapping[str, Any]) -> None:
    """Write the legend to the right of a panel, where it covers nothing."""
    axes.legend(list(handles.values()), list(handles), loc="center left", bbox_to_anchor=(1.01, 0.5))


@dataclass(frozen=True)
class Mark:
    """A point of a plot of quality against time."""

    family: str
    """The method; marks of the same method are connected by a line."""
    seconds: float
    ap: float
    """Average precision in percent."""


def trade_off_svg(panels: Mapping[str, Sequence[Mark]], families: Sequence[str], across: str) -> str:
    """Draw AP against seconds in panels with the same axes, where AP has a logarithmic scale towards 100.

    Args:
        panels: Marks by the title of their panel.
        families: All methods, in the order of colours and markers.
        across: Label of the horizontal axis.
    """
    ticks = (50, 80, 90, 95, 98, 99)
    marks = [mark for panel in panels.values() for mark in panel]

    def missing(mark: Mark) -> float:
        return max(0.1, 100 - mark.ap)

    def draw(figure: "Figure") -> None:
        for (title, panel), axes in zip(panels.items(), _panels(figure, len(panels)), strict=True):
            axes.set(title=title, xscale="log", yscale="log", xlabel=across, ylabel="AP (%)")
            for number, family in enumerate(families):
                own = [mark for mark in panel if mark.family == family]
                look: dict[str, Any] = {"color": _COLOURS[number % len(_COLOURS)]}
                look["marker"] = _MARKERS[(number + number // len(_COLOURS)) % len(_MARKERS)]
                if own:
                    axes.plot([m.seconds for m in own], [missing(m) for m in own], label=family, **look)
            axes.set_yticks([100 - tick for tick in ticks], [f"{tick}" for tick in ticks])
            axes.minorticks_off()
            axes.xaxis.set_major_formatter(_plain)
            times = [mark.seconds for mark in marks]
            axes.set_xlim(min(times) / 2, max(times) * 2)
            axes.set_ylim(max(60, *map(missing, marks)) * 1.2, min(0.8, *map(missing, marks)) / 1.2)
            handles, names = axes.get_legend_handles_labels()
            _name_aside(axes, dict(zip(names, handles, strict=True)))

    return _svg("AP against the time to score: " + "; ".join(panels), _WIDTH, _HEIGHT * len(panels), draw)


@dataclass(frozen=True)
class Dot:
    """A percentage in a dot plot."""

    row: str
    series: str
    value: float
    hollow: bool = False


def dots_svg(title: str, dots: Sequence[Dot], across: str) -> str:
    """Draw a dot plot from 0 to 100, with rows and series in the order of first occurrence."""
    rows, series = list(dict.fromkeys(dot.row for dot in dots)), list(dict.fromkeys(dot.series for dot in dots))

    def draw(figure: "Figure") -> None:
        axes = figure.add_subplot(title=title, xlabel=across, xlim=(-2, 102), ylim=(len(rows) - 0.4, -0.6))
        axes.set_yticks(range(len(rows)), rows)
        handles: dict[str, Any] = {}
        for number, name in enumerate(series):
            look: dict[str, Any] = {
                "color": _COLOURS[number],
                "marker": _MARKERS[number],
                "linestyle": "none",
                "markersize": 7,
            }
            for hollow in (False, True):
                own = [dot for dot in dots if dot.series == name and dot.hollow == hollow]
                fill: dict[str, Any] = {"markerfacecolor": "none", "markeredgewidth": 1.6} if hollow else {}
                (drawn,) = axes.plot([d.value for d in own], [rows.index(d.row) for d in own], **look, **fill)
                handles.setdefault(name, drawn)
        axes.legend(
            list(handles.values()), list(handles), loc="upper left", bbox_to_anchor=(0, -0.16), ncols=len(series)
        )

    return _svg(title, _WIDTH, 1.4 + 0.3 * len(rows), draw)


@dataclass(frozen=True)
class Spot:
    """A point of a plot of growth."""

    name: str
    across: float
    up: float
    hollow: bool = False


def growth_svg(
    title: str,
    groups: Mapping[str, Sequence[Spot]],
    trends: Mapping[str, tuple[float, float]],
    across: str,
    up: str,
) -> str:
    """Draw points on axes that start at zero, with a name for each horizontal position and lines through some groups.

    Args:
        title: Above the plot.
        groups: Points by the name of their group.
        trends: Start and rate of a group's line.
        across: Label of the horizontal axis.
        up: Label of the vertical axis.
    """

    def draw(figure: "Figure") -> None:
        axes = figure.add_subplot(title=title, xlabel=across, ylabel=up)
        spots = [spot for group in groups.values() for spot in group]
        right, top = 1.15 * max(spot.across for spot in spots), 1.2 * max(spot.up for spot in spots)
        for number, (name, group) in enumerate(groups.items()):
            colour, marker = _COLOURS[number], _MARKERS[number]
            for spot in group:
                fill = "none" if spot.hollow else colour
                axes.plot(spot.across, spot.up, marker, color=colour, markerfacecolor=fill, markersize=6)
            axes.plot([], [], marker, color=colour, label=name)
            if name in trends:
                start, rate = trends[name]
                # Begin where the line is zero, if this is to the right of the origin.
                begin = max(0.0, -start / rate) if rate > 0 else 0.0
                axes.plot([begin, right], [start + rate * begin, start + rate * right], "--", color=colour, lw=1.2)
        axes.set(xlim=(0, right), ylim=(0, top))
        _name_spots(axes, spots)
        axes.legend(loc="upper left", title="hollow: extrapolated; dashed: least squares", alignment="left")

    return _svg(title, _WIDTH, _HEIGHT, draw)


def _name_spots(axes: "Axes", spots: Sequence[Spot]) -> None:
    """Write names alternately above and below the points, so that names of neighbours do not overlap."""
    for number, name in enumerate(dict.fromkeys(spot.name for spot in sorted(spots, key=lambda spot: spot.across))):
        own = [spot for spot in spots if spot.name == name]
        is_above = number % 2 == 0
        up = (max if is_above else min)(spot.up for spot in own)
        # Names below are right-aligned: the next point to the right may be lower.
        place: dict[str, Any] = {"xytext": (0, 9), "ha": "center"} if is_above else {"xytext": (6, -16), "ha": "right"}
        axes.annotate(name, (own[0].across, up), textcoords="offset points", **place)


@dataclass(frozen=True)
class Words:
    """A line of text on a sheet."""

    x: float
    y: float
    """Of the line's foot."""
    text: str
    size: float = 10
    bold: bool = False
    centred: bool = False


@dataclass(frozen=True)
class Placed:
    """A square image on a sheet."""

    x: float
    y: float
    side: float
    data: bytes
    """The bytes of an image file."""
    frame: str | None = None
    """A colour."""


@dataclass
class Sheet:
    """A sheet of text and small images, placed in points to the right of and below the upper left corner."""

    words: list[Words] = field(default_factory=list)
    pictures: list[Placed] = field(default_factory=list)

    def write(self, x: float, y: float, text: str, *, size: float = 10, bold: bool = False) -> None:
        """Add a line of text."""
        self.words.append(Words(x, y, text, size, bold))

    def show(self, x: float, y: float, side: float, uri: str, under: str, frame: str | None = None) -> None:
        """Add an image, given as base64 or a data URI, with a line of text below it and optionally a coloured frame."""
        self.pictures.append(Placed(x, y, side, base64.b64decode(uri.rpartition(",")[2]), frame))
        self.words.append(Words(x + side / 2, y + side + 10, under, 8, centred=True))

    def svg(self, title: str, width: float, height: float) -> str:
        """Draw the sheet with a size in points."""

        def draw(figure: "Figure") -> None:
            figure.set_layout_engine("none")
            axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))
            axes.set_axis_off()
            for picture in self.pictures:
                _draw_picture(axes, picture)
            for words in self.words:
                anchor, weight = ("center" if words.centred else "left"), ("bold" if words.bold else "normal")
                axes.text(words.x, words.y, words.text, size=words.size, weight=weight, ha=anchor, va="baseline")

        return _svg(title, width / _POINTS, height / _POINTS, draw)


def _draw_picture(axes: "Axes", picture: Placed) -> None:
    from matplotlib.patches import Rectangle
    from PIL import Image

    x, y, side = picture.x, picture.y, picture.side
    with Image.open(BytesIO(picture.data)) as image:
        pixels = image.convert("RGB")
    axes.imshow(pixels, extent=(x, x + side, y + side, y), aspect="auto", interpolation="none")
    if picture.frame is not None:
        axes.add_patch(Rectangle((x, y), side, side, fill=False, edgecolor=picture.frame, linewidth=2))
