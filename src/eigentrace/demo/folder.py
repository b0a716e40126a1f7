"""The folder a demo writes: made with care for what is already there."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eigentrace.errors import InputError, NumericalError

SUMMARY = "summary.json"
REPORT = "report.html"
# What a run that was killed while writing may leave behind.
_PARTIAL = {f".{SUMMARY}.partial", f".{REPORT}.partial"}


def claim(out: Path) -> None:
    """Make the folder, or make sure that it holds an earlier demo and nothing else is in danger.

    Raises:
        InputError: If `out` is a file, or has files in it that no demo wrote.
    """
    if out.exists() and not out.is_dir():
        raise InputError(f"{out} is a file and the demo writes a folder: give another path.")
    if out.is_dir() and {path.name for path in out.iterdir()} - _PARTIAL and not _is_demo(out):
        raise InputError(
            f"{out} has files in it that no demo wrote (a {SUMMARY} of ours is missing), and they are left "
            "alone: give a new or empty folder."
        )
    out.mkdir(parents=True, exist_ok=True)


def write(out: Path, summary: Mapping[str, Any], page: str) -> None:
    """Write both files, each complete or not at all.

    Raises:
        NumericalError: If the summary holds a number that is not finite, which JSON cannot express.
    """
    try:
        text = json.dumps(summary, indent=2, allow_nan=False)
    except ValueError as error:
        raise NumericalError(
            f"The summary holds a number that is not finite ({error}), so nothing was written to {out}: look "
            "at the method it belongs to before trusting any score."
        ) from error
    # The summary goes first: it is what tells a later run that the folder is a demo's.
    for name, content in ((SUMMARY, text + "\n"), (REPORT, page)):
        partial = out / f".{name}.partial"
        partial.write_text(content, encoding="utf-8")
        os.replace(partial, out / name)


def _is_demo(out: Path) -> bool:
    try:
        summary = json.loads((out / SUMMARY).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(summary, dict) and {"methods", "accuracy", "versions"} <= summary.keys()
