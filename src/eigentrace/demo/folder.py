"""The folder a demo writes: made with care for what is already there."""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from eigentrace.demo.inputs import FUNCTION, NETWORK
from eigentrace.errors import InputError, NumericalError
from eigentrace.store.folder import REQUEST, WRITTEN

SUMMARY = "summary.json"
REPORT = "report.html"
RUN = "run"
_WORK, _OLD = f".{RUN}.partial", f".{RUN}.old.partial"
# What a demo that was killed may leave behind.
_PARTIAL = {f".{SUMMARY}.partial", f".{REPORT}.partial", _WORK, _OLD}
# What a demo writes into a run; anything else is somebody's work.
_OF_RUN = {*WRITTEN, NETWORK}


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
    run = out / RUN
    if run.exists() and not _is_demo_run(run):
        raise InputError(f"{run} is no run of a demo, and it is left alone: give a new or empty folder.")
    out.mkdir(parents=True, exist_ok=True)


@contextmanager
def new_run(out: Path) -> Iterator[Path]:
    """Give a directory to make a run in; `place` puts it where it belongs. Whatever goes wrong, nothing is left."""
    for leftover in (out / _WORK, out / _OLD):
        shutil.rmtree(leftover, ignore_errors=True)
    try:
        yield out / _WORK
    finally:
        shutil.rmtree(out / _WORK, ignore_errors=True)


def place(out: Path, on_message: Callable[[str], None]) -> None:
    """Put the new run in the place of an earlier one, which is kept beside it if somebody has worked on it."""
    run, old = out / RUN, out / _OLD
    if run.exists() and {path.name for path in run.iterdir() if not path.name.startswith(".")} - _OF_RUN:
        kept = next(path for number in count(1) if not (path := out / f"{RUN}-{number}").exists())
        run.rename(kept)
        on_message(f"Note: the earlier run holds decisions or other files, and is kept as {kept}.")
    elif run.exists():
        run.rename(old)
    (out / _WORK).rename(run)
    shutil.rmtree(old, ignore_errors=True)


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
    summary = _json(out / SUMMARY)
    return {"methods", "accuracy", "versions"} <= summary.keys()


def _is_demo_run(run: Path) -> bool:
    asked = _json(run / REQUEST).get("input")
    return isinstance(asked, dict) and asked.get("function") == FUNCTION


def _json(path: Path) -> dict[str, Any]:
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return held if isinstance(held, dict) else {}
