"""Where results lie in a folder: pages on top, the numbers behind them in data/, what is drawn of them in figures/."""

from collections.abc import Iterable
from pathlib import Path

_FIGURES = "figures"


def page_file(out: Path, name: str) -> Path:
    """Return where a page lies."""
    return out / f"{name}.md"


def save_page(out: Path, name: str, lines: Iterable[str]) -> None:
    """Write a page from its lines."""
    out.mkdir(parents=True, exist_ok=True)
    page_file(out, name).write_text("\n".join(lines) + "\n", encoding="utf-8")


def figure_link(name: str) -> str:
    """Return what a page calls a figure."""
    return f"{_FIGURES}/{name}.svg"


def save_figure(out: Path, name: str, svg: str) -> None:
    """Write a figure where its page looks for it."""
    path = out / figure_link(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(svg, encoding="utf-8")
