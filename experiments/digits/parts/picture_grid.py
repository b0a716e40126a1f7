"""A picture and its neighbours as one SVG file: strips of small grey images, framed by kind, with two labels each."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_SIZE, _GAP, _STRIP = 48, 14, 84
_WIDTH, _TOP, _ASIDE = 800, 130, 110
_FRAMES = {"proponents": "#0072b2", "opponents": "#d55e00"}
_STYLE = (
    "text { font: 13px system-ui, sans-serif; fill: #333 } .name { font-weight: 600 } "
    "image { image-rendering: pixelated } .frame { fill: none; stroke-width: 3 } "
    "@media (prefers-color-scheme: dark) { text { fill: #ddd } }"
)


@dataclass(frozen=True)
class Picture:
    """A small image with the label it was given and its true one."""

    png: str
    """In base64."""
    given: int
    true: int


@dataclass(frozen=True)
class Strip:
    """Neighbours of one side, strongest first; strips with the same title stand below each other."""

    title: str
    side: str
    """"proponents" or "opponents"."""
    pictures: Sequence[Picture]


def strips_svg(title: str, query: Picture, strips: Sequence[Strip]) -> str:
    """Draw a picture on top, and below it a block of strips for each title, two blocks to a row."""
    titles = list(dict.fromkeys(strip.title for strip in strips))
    block = 2 * _STRIP + 36
    height = _TOP + block * -(-len(titles) // 2)
    parts = [_text(16, 22, title, "start", "name"), _picture(query, 20, 40, "#808080")]
    for number, name in enumerate(titles):
        left, top = _ASIDE + (number % 2) * (_WIDTH - _ASIDE) / 2, _TOP + block * (number // 2)
        parts.append(_text(left, top + 4, name, "start", "name"))
        sides = [strip for strip in strips if strip.title == name]
        for line, strip in enumerate(sides):
            y = top + 16 + line * _STRIP
            if number % 2 == 0:
                parts.append(_text(16, y + _SIZE / 2 + 4, strip.side, "start"))
            colour = _FRAMES[strip.side]
            parts += [_picture(p, left + k * (_SIZE + _GAP), y, colour) for k, p in enumerate(strip.pictures)]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" '
        f'aria-label="{escape(title)}"><style>{_STYLE}</style>{"".join(parts)}</svg>\n'
    )


def _picture(picture: Picture, x: float, y: float, colour: str) -> str:
    return (
        f'<image x="{x:.1f}" y="{y:.1f}" width="{_SIZE}" height="{_SIZE}" href="data:image/png;base64,{picture.png}"/>'
        f'<rect class="frame" stroke="{colour}" x="{x:.1f}" y="{y:.1f}" width="{_SIZE}" height="{_SIZE}"/>'
        + _text(x + _SIZE / 2, y + _SIZE + 17, f"{picture.given} / {picture.true}", "middle")
    )


def _text(x: float, y: float, text: str, anchor: str, kind: str = "") -> str:
    style = f' class="{kind}"' if kind else ""
    return f'<text{style} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
