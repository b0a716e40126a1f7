"""The output folder of a demo, which never overwrites files that a demo did not write."""

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
# Files that a killed demo may leave.
_PARTIAL = {f".{SUMMARY}.partial", f".{REPORT}.partial", _WORK, _OLD}
# Files that a demo writes into a run; all others are the user's.
_OF_RUN = {*WRITTEN, NETWORK}


def claim(out: Path) -> None:
    """Create the folder, or check that it contains an earlier demo, whose files may be replaced.

    Raises:
        InputError: If `out` is a file, or contains files that no demo wrote.
    """
    if out.exists() and not out.is_dir():
        raise InputError(f"{out} is a file, but the demo writes a folder: choose another path.")
    if out.is_dir() and {path.name for path in out.iterdir()} - _PARTIAL and not _is_demo(out):
        raise InputError(
            f"{out} contains files that no demo wrote (the {SUMMARY} of a demo is missing). Nothing was changed: "
            "choose a new or empty folder."
        )
    run = out / RUN
    if run.exists() and not _is_demo_run(run):
        raise InputError(f"{run} is not the run of a demo. Nothing was changed: choose a new or empty folder.")
    out.mkdir(parents=True, exist_ok=True)


@contextmanager
def new_run(out: Path) -> Iterator[Path]:
    """Yield a temporary directory for a run, which `place` moves to its place; after an error it is removed."""
    for leftover in (out / _WORK, out / _OLD):
        shutil.rmtree(leftover, ignore_errors=True)
    try:
        yield out / _WORK
    finally:
        shutil.rmtree(out / _WORK, ignore_errors=True)


def place(out: Path, on_message: Callable[[str], None]) -> None:
    """Replace an earlier run by the new one; an earlier run with the user's files is renamed instead of deleted."""
    run, old = out / RUN, out / _OLD
    if run.exists() and {path.name for path in run.iterdir() if not path.name.startswith(".")} - _OF_RUN:
        kept = next(path for number in count(1) if not (path := out / f"{RUN}-{number}").exists())
        run.rename(kept)
        on_message(f"Note: the earlier run contains decisions or other files and was renamed to {kept}.")
    elif run.exists():
        run.rename(old)
    (out / _WORK).rename(run)
    shutil.rmtree(old, ignore_errors=True)


def write(out: Path, summary: Mapping[str, Any], page: str) -> None:
    """Write the summary and the report, each atomically.

    Raises:
        NumericalError: If the summary contains a number that is not finite, which JSON cannot store.
    """
    try:
        text = json.dumps(summary, indent=2, allow_nan=False)
    except ValueError as error:
        raise NumericalError(
            f"The summary contains a number that is not finite ({error}), so nothing was written to {out}. Check the "
            "messages of the methods above: one of them has failed."
        ) from error
    # The summary is written first, because a later demo recognises the folder by it.
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
