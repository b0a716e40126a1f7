"""The layout of a folder of results: pages on top, their numbers in data/, their figures in figures/."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from harness.refusal import refuse

_DATA, _FIGURES = "data", "figures"


def data_link(name: str) -> str:
    """Return the link of a page to its numbers."""
    return f"{_DATA}/{name}.json"


def data_file(out: Path, name: str) -> Path:
    """Return the path of the numbers of a page."""
    return out / data_link(name)


def check_layout(out: Path, name: str, merged: Sequence[Path]) -> None:
    """Exit with a message if the numbers are next to the page, their former place, where they would be ignored.

    Args:
        out: The folder of results.
        name: The name of the page.
        merged: Files to be merged into the numbers.
    """
    former, path = out / f"{name}.json", data_file(out, name)
    if former.exists() and not path.exists() and former.resolve() not in {file.resolve() for file in merged}:
        refuse(
            f"{former} lies where numbers were once kept; now it is {path}. Move it there (`mkdir -p {path.parent} && "
            f"mv {former} {path}`), or take it over with `--merge {former}`. Nothing was done."
        )


def page_file(out: Path, name: str) -> Path:
    """Return the path of a page."""
    return out / f"{name}.md"


def save_page(out: Path, name: str, lines: Iterable[str]) -> None:
    """Write the lines of a page to its file."""
    out.mkdir(parents=True, exist_ok=True)
    page_file(out, name).write_text("\n".join(lines) + "\n", encoding="utf-8")


def figure_link(name: str) -> str:
    """Return the link of a page to a figure."""
    return f"{_FIGURES}/{name}.svg"


def save_figure(out: Path, name: str, svg: str) -> None:
    """Write a figure to the path that its page links to."""
    path = out / figure_link(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(svg, encoding="utf-8")
