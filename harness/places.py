"""Where results lie in a folder: pages on top, the numbers behind them in data/, what is drawn of them in figures/."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from harness.refusal import refuse

_DATA, _FIGURES = "data", "figures"


def data_link(name: str) -> str:
    """Return what a page calls the numbers behind it."""
    return f"{_DATA}/{name}.json"


def data_file(out: Path, name: str) -> Path:
    """Return where the numbers behind a page lie."""
    return out / data_link(name)


def check_layout(out: Path, name: str, merged: Sequence[Path]) -> None:
    """Refuse a folder whose numbers lie beside the page, as they once did, where they would be left out of the page.

    Args:
        out: The folder.
        name: Of the page.
        merged: Files that are merged into the numbers.
    """
    former, path = out / f"{name}.json", data_file(out, name)
    if former.exists() and not path.exists() and former.resolve() not in {file.resolve() for file in merged}:
        refuse(
            f"{former} lies where numbers were once kept; now it is {path}. Move it there (`mkdir -p {path.parent} && "
            f"mv {former} {path}`), or take it over with `--merge {former}`. Nothing was done."
        )


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
