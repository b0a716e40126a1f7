"""Merge results that were measured elsewhere, validated before anything is written."""

import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from harness.places import data_file
from harness.record import Results, check_settings, merged, read, stem, taking_turns, write
from harness.refusal import refuse

_RECORD = {"title": str, "settings": dict, "cells": dict, "runs": dict}
_RUN = ("command", "torch", "eigentrace", "python")


def take_over(
    path: Path,
    files: Sequence[Path],
    name: str,
    render: Callable[[Path, bool], None],
    *,
    small: bool,
    replace: bool,
) -> None:
    """Merge files into results, all of them or none.

    Args:
        path: The results to merge into.
        files: The files to merge; later files take precedence.
        name: The name of the benchmark or experiment.
        render: Renders its pages; results that it cannot render are rejected.
        small: Whether these are small results.
        replace: Drop numbers that were measured with other settings.
    """
    found = {file: _checked(file, name, small=small) for file in files}
    with taking_turns(path.parent):
        results = read(path)
        for file, new in found.items():
            if not replace:
                check_settings(path, results, new, f"{file} has")
            results = merged(results, new)
            _try_page(file, path.stem, results, render, small=small)
        write(path, results)


def _checked(file: Path, name: str, *, small: bool) -> Results:
    """Read a file; reject it unless it contains results of this command."""
    expected = (
        f"Expected is a {stem(name, small=small)}.json that the same command{' with --small' if small else ''} wrote "
        'to another folder: {machine: {part: {"title", "settings", "cells", "runs"}}}. Nothing was merged.'
    )
    try:
        results = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        refuse(f"--merge {file} cannot be read: {error.strerror}. {expected}")
    except ValueError as error:
        refuse(f"--merge {file} is not JSON: {error}. {expected}")
    trouble = _trouble(results) or _of_another(results, name, small=small)
    if trouble:
        refuse(f"--merge {file}: {trouble}. {expected}")
    return dict(results)


def _trouble(results: Any) -> str:
    """Return the first deviation from the format of results; empty if there is none."""
    if not isinstance(results, dict) or not results:
        return "it holds no results"
    for machine, records in results.items():
        if not isinstance(records, dict):
            return f"{machine!r} is not an object of parts"
        for part, record in records.items():
            trouble = _trouble_of(record)
            if trouble:
                return f"{part!r} of {machine!r} {trouble}"
    return ""


def _trouble_of(record: Any) -> str:
    if not isinstance(record, dict):
        return "is not an object with results"
    wrong = [key for key, kind in _RECORD.items() if not isinstance(record.get(key), kind)]
    if wrong:
        return f"has no {wrong[0]!r}"
    if not all(_has_all(run) for run in record["runs"].values()):
        return f"has a run without one of {', '.join(_RUN)}"
    for name, cell in record["cells"].items():
        if not isinstance(cell, dict) or cell.get("run") not in record["runs"]:
            return f"has a cell {name!r} that does not name one of the runs"
    return ""


def _has_all(run: Any) -> bool:
    return isinstance(run, dict) and all(isinstance(run.get(key), str) for key in _RUN)


def _of_another(results: Results, name: str, *, small: bool) -> str:
    """Return which command made the results if it is not this one; empty otherwise."""
    for records in results.values():
        for record in records.values():
            for run in record["runs"].values():
                words = run["command"].split()
                module = words[2] if words[:2] == ["python", "-m"] and len(words) > 2 else ""
                if module.rpartition(".")[2] != name or ("--small" in words) != small:
                    return f"it was made by `{run['command']}`"
    return ""


def _try_page(file: Path, name: str, results: Results, render: Callable[[Path, bool], None], *, small: bool) -> None:
    """Render the page to a temporary folder, since only the page knows which numbers it needs."""
    with tempfile.TemporaryDirectory() as folder:
        write(data_file(Path(folder), name), results)
        try:
            render(Path(folder), small)
        except Exception as error:  # rendering incomplete results may raise any exception
            refuse(
                f"--merge {file} cannot be shown on the page ({type(error).__name__}: {error}): it was written by "
                "another version, or edited. Nothing was merged."
            )
