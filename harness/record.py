"""Results of many runs, merged into one JSON file from which tables are rendered.

`{machine: {model: {"title", "parameters", "settings", "cells": {name: cell}, "runs": {date: run}}}}`, where a cell
holds numbers, or "failed" with the reason, and the date of the run it comes from.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from eigentrace.disk.atomic import replacing
from harness.measure import Cell, Run, described
from harness.models import MODELS
from harness.places import data_link
from harness.refusal import differences, refuse

Record = dict[str, Any]
Results = dict[str, dict[str, Record]]

_LONGEST_LINE = 600
"""Letters of a record in a file that is not broken into lines for its parts."""


def stem(name: str, *, small: bool) -> str:
    """Return the first part of a benchmark's file names; small results have separate files."""
    return f"{name}_small" if small else name


def read(path: Path) -> Results:
    """Read results; empty if there is no such file."""
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except ValueError as error:
        refuse(f"{path} is not JSON: {error}. Restore it with git, or move it away. Nothing was written.")


def write(path: Path, results: Results) -> None:
    """Write results atomically, with models in the order of the tables."""
    order = list(MODELS)
    ordered = {
        machine: dict(sorted(models.items(), key=lambda item: order.index(item[0]) if item[0] in order else len(order)))
        for machine, models in sorted(results.items())
    }
    save(path, ordered)


def save(path: Path, results: Any) -> None:
    """Write results as JSON that is there as a whole or not at all, with a line for each record of numbers.

    A record or list without records in it takes one line unless that would be long, and single values that follow each
    other share lines.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as unfinished:
        unfinished.write_text(_lines_of(json.loads(json.dumps(results))) + "\n", encoding="utf-8")


def _lines_of(value: Any, indent: str = "") -> str:
    line = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, dict | list) or not value or (len(line) <= _LONGEST_LINE and not _has_records(value)):
        return line
    inner = indent + " "
    if isinstance(value, list):
        begin, items, end = "[", [(_lines_of(item, inner), item) for item in value], "]"
    else:
        named = [(json.dumps(name, ensure_ascii=False), item) for name, item in value.items()]
        begin, items, end = "{", [(f"{name}: {_lines_of(item, inner)}", item) for name, item in named], "}"
    lines: list[str] = []
    joins = False
    for text, item in items:
        is_plain = not isinstance(item, dict | list)
        if joins and is_plain and len(lines[-1]) + len(text) < _LONGEST_LINE:
            lines[-1] += f", {text}"  # single values that follow each other share lines
        else:
            lines.append(text)
        joins = is_plain
    return f"{begin}\n{inner}" + f",\n{inner}".join(lines) + f"\n{indent}{end}"


def _has_records(value: dict[str, Any] | list[Any]) -> bool:
    inside = value.values() if isinstance(value, dict) else value
    return any(
        (isinstance(item, dict) and item != {}) or (isinstance(item, list) and _has_records(item)) for item in inside
    )


def merged(old: Results, new: Results) -> Results:
    """Merge cell by cell, preferring new cells; but a failure never replaces a number."""
    return {
        machine: {
            model: _merged_record(old.get(machine, {}).get(model), new.get(machine, {}).get(model))
            for model in old.get(machine, {}) | new.get(machine, {})
        }
        for machine in old | new
    }


def _merged_record(old: Record | None, new: Record | None) -> Record:
    if old is None or new is None:
        return old or new or {}
    if differences(old["settings"], new["settings"]):
        return new  # numbers with different settings must not be mixed in one row
    before = old["cells"]
    cells = before | {k: cell for k, cell in new["cells"].items() if is_number(cell) or not is_number(before.get(k))}
    used = {cell["run"] for cell in cells.values()}
    runs = {date: info for date, info in sorted((old["runs"] | new["runs"]).items()) if date in used}
    return new | {"cells": cells, "runs": runs}


def is_number(cell: Cell | None) -> bool:
    """Return whether a cell contains a measurement rather than a failure."""
    return cell is not None and "failed" not in cell and "missing" not in cell


def add(path: Path, new: Results, *, replace: bool = False) -> Results:
    """Merge results into a file that other processes may be writing too; return its new content.

    Args:
        path: The file.
        new: The results to add.
        replace: Drop numbers that were measured with other settings instead of rejecting the new ones.
    """
    with taking_turns(path.parent):
        old = read(path)
        if not replace:
            check_settings(path, old, new)
        results = merged(old, new)
        write(path, results)
        return results


def check_settings(path: Path, old: Results, new: Results, whose: str = "this command has") -> None:
    """Reject new results whose settings differ from those of existing numbers, which would be dropped.

    Args:
        path: The file of the existing results.
        old: The existing results.
        new: The results to merge.
        whose: The source of the new results, for the message.
    """
    for machine, records in new.items():
        for model, record in records.items():
            there = old.get(machine, {}).get(model)
            if there is None or not any(is_number(cell) for cell in there["cells"].values()):
                continue
            lines = differences(there["settings"], record["settings"])
            if lines:
                commands = dict.fromkeys(run["command"] for run in there["runs"].values() if "command" in run)
                refuse(
                    f"{path} holds numbers of {model!r} on {machine} with other settings than {whose}. Do not mix them "
                    "in one table:\n" + "\n".join(lines) + "\nGive the same options as then"
                    f"{''.join(f' (`{command}`)' for command in list(commands)[-1:])}, or another --out, or --replace "
                    "to drop the existing numbers. Nothing was written."
                )


@contextmanager
def taking_turns(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, so that other processes that write to it wait."""
    import fcntl

    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


class Recorder:
    """Writes the cells of one model as they are measured."""

    def __init__(self, run: Run, path: Path, model: str, record: Record) -> None:
        self.run, self.path, self.model, self.record = run, path, model, record
        self.machine = described(run.device)
        self.not_repeated = 0
        """Number of earlier measurements that were kept because the new ones failed."""
        if not run.replace:
            check_settings(path, read(path), {self.machine: {model: record}})

    def add(self, name: str, cell: Cell) -> Cell:
        """Merge one cell into the file; if it failed, an existing number is kept, with a message."""
        info = dict(self.run.info)
        date = info.pop("date")
        record = self.record | {"cells": {name: cell | {"run": date}}, "runs": {date: info}}
        results = add(self.path, {self.machine: {self.model: record}}, replace=self.run.replace)
        kept = results[self.machine][self.model]["cells"][name]
        if "failed" in cell and is_number(kept):
            self.not_repeated += 1
            print(f"{self.model}/{name} failed: the number of {kept['run'][:16]} is kept.", flush=True)
        return cell


class Notes:
    """Footnotes of a table, where equal texts share a number."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def mark(self, text: str) -> str:
        """Return the mark of a note."""
        if text not in self.texts:
            self.texts.append(text)
        return f"<sup>{self.texts.index(text) + 1}</sup>"

    def lines(self) -> list[str]:
        """Return the notes as Markdown lines."""
        return [f"<sup>{number}</sup> {_safe(text)}  " for number, text in enumerate(self.texts, start=1)]


def shown(cell: Cell | None, key: str, pattern: str, notes: Notes) -> str:
    """Format one number of a cell, or the reason why it is missing."""
    if cell is None:
        return "–"
    mark = notes.mark(cell["note"]) if "note" in cell else ""
    if "failed" in cell:
        memory = "out of memory" in cell["failed"].lower() or "OutOfMemory" in cell["failed"]
        return ("out of memory" if memory else "failed") + notes.mark(cell["failed"])
    value = cell.get(key)
    return "–" if value is None else format(value, pattern) + mark


def judged(text: str, value: float | None, goal: float | None, *, at_least: bool = False) -> str:
    """Append to a number whether it reaches its goal, if it has one."""
    if value is None or goal is None:
        return text
    met = value >= goal if at_least else value <= goal
    return f"{text} ({'≥' if at_least else '≤'} {goal:,g} {'met' if met else 'missed'})"


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Format a Markdown table, with names aligned left and numbers right."""
    lines = [list(headings), *(list(row) for row in rows)]
    widths = [max(3, *(len(line[column]) for line in lines)) for column in range(len(headings))]
    rule = [":" + "-" * (widths[0] - 1), *("-" * (width - 1) + ":" for width in widths[1:])]
    cells = [lines[0], rule, *lines[1:]]
    return [
        "| "
        + " | ".join([line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))])
        + " |"
        for line in cells
    ]


def runs_of(models: dict[str, Record], module: str = "") -> list[str]:
    """List the runs that measured the numbers of a machine.

    Args:
        models: The results of the machine.
        module: The current name of the command, if it differs from the recorded one.
    """
    runs = {date: info for record in models.values() for date, info in record["runs"].items()}
    rows = [
        (f"`{_today(info['command'], module)}`", date[:16], info["torch"], info["eigentrace"], info["python"])
        for date, info in sorted(runs.items())
    ]
    return table(("made by", "at (UTC)", "torch", "eigentrace", "Python"), rows)


def _today(command: str, module: str) -> str:
    """Return a recorded command with the current module name: modules have moved since some runs."""
    return re.sub(r"(?<=^python -m )\S+", module, command) if module else command


def heading(title: str, command: str, name: str) -> list[str]:
    """Return the first lines of a generated page."""
    return [
        f"<!-- Generated from {data_link(name)} by `{command} --render`: edits here are lost. -->",
        "",
        f"# {title}",
        "",
        f"Generated from [{name}.json]({data_link(name)}) by `{command} --render`. What the numbers say, and what "
        "stands behind the goals that are missed, is on [the page of results](README.md).",
    ]


def memory(cell: Cell | None, notes: Notes) -> str:
    """Format the peak memory of a cell in GiB."""
    if cell is not None and cell.get("peak") is not None:
        cell = cell | {"peak": cell["peak"] / 2**30}
    return shown(cell, "peak", ".1f", notes)


def millions(count: int) -> str:
    """Format a number of parameters in millions."""
    return f"{count / 1e6:.1f}M" if count >= 1e6 else f"{count / 1e3:.0f}k"


def _safe(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
