"""A query image with its proponents and opponents: strips of small images with two labels each, framed by kind."""

from collections.abc import Sequence
from dataclasses import dataclass

from harness.plot import BLUE, VERMILION, Sheet

_SIZE, _GAP, _STRIP = 48, 14, 76
_WIDTH, _TOP, _ASIDE = 770, 130, 110
_FRAMES = {"proponents": BLUE, "opponents": VERMILION}


@dataclass(frozen=True)
class Picture:
    """A small image with its given and true labels."""

    png: str
    """The PNG file in base64."""
    given: int
    true: int

    @property
    def labels(self) -> str:
        """The labels below the image."""
        return f"{self.given} / {self.true}"


@dataclass(frozen=True)
class Strip:
    """Images of one side, strongest first; strips with the same title are stacked."""

    title: str
    side: str
    """"proponents" or "opponents"."""
    pictures: Sequence[Picture]


def strips_svg(title: str, query: Picture, strips: Sequence[Strip]) -> str:
    """Draw the query on top, and below it a block of strips for each title, two blocks per row."""
    titles = list(dict.fromkeys(strip.title for strip in strips))
    block = 2 * _STRIP + 36
    sheet = Sheet()
    sheet.write(16, 22, title, size=12, bold=True)
    sheet.show(20, 40, _SIZE, query.png, query.labels)
    for number, name in enumerate(titles):
        left, top = _ASIDE + (number % 2) * (_WIDTH - _ASIDE) / 2, _TOP + block * (number // 2)
        sheet.write(left, top + 4, name, bold=True)
        for line, strip in enumerate(strip for strip in strips if strip.title == name):
            y = top + 16 + line * _STRIP
            if number % 2 == 0:
                sheet.write(16, y + _SIZE / 2 + 4, strip.side)
            for place, picture in enumerate(strip.pictures):
                x = left + place * (_SIZE + _GAP)
                sheet.show(x, y, _SIZE, picture.png, picture.labels, _FRAMES[strip.side])
    return sheet.svg(title, _WIDTH, _TOP + block * -(-len(titles) // 2))
