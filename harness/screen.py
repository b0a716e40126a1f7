"""Print the tables of a generated page in a terminal."""

import html
import re
from collections.abc import Sequence
from pathlib import Path

_VERDICT = "## What it shows"
_RUNS = "| made by"
_RULE = re.compile(r":?-+:?")


def shown_tables(page: Path, numbers: Path) -> list[str]:
    """Return the tables of each machine as text, and the paths of page and numbers."""
    return [*_sections(page.read_text(encoding="utf-8")), "", f"Page: {page}", f"Numbers: {numbers}"]


def _sections(page: str) -> list[str]:
    """Return the sections of machines: aligned tables, notes and remarks, without figures and runs."""
    found: list[str] = []
    block: list[str] = []
    is_machine = False
    for line in [*page.splitlines(), ""]:
        if line.startswith("## "):
            is_machine = line != _VERDICT
        if not is_machine:
            continue
        if line.startswith("|"):
            block.append(line)
            continue
        if block and not block[0].startswith(_RUNS):
            found += _columns(block)
        block = []
        if not line.startswith("![") and (line.strip() or (found and found[-1])):
            found.append(_plain(line))
    return found[:-1] if found and not found[-1] else found


def _columns(lines: Sequence[str]) -> list[str]:
    """Align the columns of a table, whose markup is removed for the terminal."""
    rows = [[_plain(cell) for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    rows = [row for row in rows if not all(_RULE.fullmatch(cell) for cell in row)]
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lined = [[row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))] for row in rows]
    text = ["  ".join(row).rstrip() for row in lined]
    return [text[0], "-" * max(map(len, text)), *text[1:]]


def _plain(text: str) -> str:
    text = re.sub(r"<sup>(\d+)</sup>", r"[\1]", text.strip())
    return html.unescape(re.sub(r"\\([\\`*_\[\]|~$#])", r"\1", text))
