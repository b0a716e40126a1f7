"""What people decided, written down act by act: a file that only grows, and that a killed server leaves whole."""

import base64
import json
import os
import zlib
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from threading import RLock
from typing import Any

import numpy as np

from eigentrace.disk.atomic import storage_error, sync
from eigentrace.disk.lock import locked
from eigentrace.errors import BusyError, InputError, MismatchError
from eigentrace.store.folder import Folder

WORDS = ("none", "drop", "keep", "relabel")
RELABEL = WORDS.index("relabel")
CLEAR = "clear"
# From so many rows on an act is written as one bit per row of the run.
_LISTED = 1000


@dataclass(frozen=True)
class Act:
    """One decision on some rows."""

    time: str
    decision: str
    rows: str | tuple[int, ...]
    """Row numbers, or one bit per row, compressed."""
    count: int
    new_label: int | None = None
    """The class that rows are given; None for the one the model predicts."""
    rule: dict[str, Any] | None = None

    @staticmethod
    def of(decision: str, rows: np.ndarray, num_rows: int, new_label: int | None, rule: dict[str, Any] | None) -> "Act":
        """Put a decision into a form that can be written."""
        held = tuple(rows.tolist()) if len(rows) <= _LISTED else _packed(rows, num_rows)
        return Act(datetime.now(UTC).isoformat(timespec="seconds"), decision, held, len(rows), new_label, rule)

    def numbers(self, num_rows: int) -> np.ndarray:  # (n,)
        """Return the rows it is about."""
        if not isinstance(self.rows, str):
            return np.array(self.rows, dtype=np.int64)
        bits = np.frombuffer(zlib.decompress(base64.b64decode(self.rows)), np.uint8)
        return np.flatnonzero(np.unpackbits(bits, count=num_rows))

    @property
    def words(self) -> str:
        """Say why rows were decided on like this."""
        if self.rule is None:
            return "by hand"
        bounds = [f"{side} {self.rule[side]:.4g}" for side in ("above", "below") if self.rule.get(side) is not None]
        label = self.rule.get("label")
        return f"{self.rule['by']} is {' and '.join(bounds)}" + (f", of label {label}" if label is not None else "")


class Journal:
    """The decisions on a run's rows. Anybody may read them; the first who decides is the only one until it ends."""

    def __init__(self, run: Folder | Path, num_rows: int, fingerprint: str) -> None:
        folder = run if isinstance(run, Folder) else Folder(run)
        self.path, self._lock, self.num_rows = folder.decisions_file, folder.deciding, num_rows
        self._header = {"kind": "decisions", "format": 1, "rows": num_rows, "data": fingerprint}
        self._guard, self._holding, self._is_ours = RLock(), ExitStack(), False
        self._seen: tuple[int, int] | None = None
        self._forget()
        self.refresh()

    def close(self) -> None:
        """Let others decide."""
        with self._guard:
            self._holding.close()
            self._is_ours = False

    def state(self) -> tuple[np.ndarray, int]:  # (N,) int8
        """Return the decision on every row, as positions among the words, and a number that changes with them."""
        self.refresh()
        return self._codes, self._version

    def new_label(self, row: int) -> int | None:
        """Return the class that a row is given, if somebody named one."""
        return int(self._labels[row]) if self._labels[row] >= 0 else None

    def counts(self) -> dict[str, int]:
        """Count rows by decision."""
        counts = np.bincount(self.state()[0], minlength=len(WORDS))
        return {word: int(counts[code]) for code, word in enumerate(WORDS) if code}

    def log(self, last: int = 20) -> list[dict[str, Any]]:
        """Return the last acts that stand, the latest first."""
        self.refresh()
        return [
            {"time": act.time, "decision": act.decision, "count": act.count, "new_label": act.new_label}
            | {"why": act.words, "rows": list(act.rows[:5]) if not isinstance(act.rows, str) else []}
            for act in reversed(self._acts[-last:])
        ]

    def reasons(self) -> tuple[np.ndarray, list[str]]:  # (N,) int32, words
        """Return why each row is as it is, as positions among words, of which the first is for rows never decided."""
        with self._guard:
            said, words = np.zeros(self.num_rows, dtype=np.int32), ["not decided on"]
            for act in self._acts:
                rows = act.numbers(self.num_rows)
                is_clear = act.decision == CLEAR
                words += [] if is_clear else [f"marked {act.decision}: {act.words}"]
                said[rows] = 0 if is_clear else len(words) - 1
            return said, words

    def decide(
        self, rows: np.ndarray, decision: str, new_label: int | None = None, rule: dict[str, Any] | None = None
    ) -> int:
        """Decide on some rows, on the disk before this returns; tell on how many something changed."""
        if decision not in (*WORDS[1:], CLEAR):
            raise InputError(f"decision must be one of {', '.join(WORDS[1:])} or {CLEAR}, got {decision!r}.")
        if len(rows) and not 0 <= rows.min() <= rows.max() < self.num_rows:
            raise InputError(f"Rows of this run are 0 to {self.num_rows - 1}, got {rows.min()} to {rows.max()}.")
        if not len(rows):
            return 0
        with self._guard:
            self._hold()
            rows = np.unique(rows)
            act = Act.of(decision, rows, self.num_rows, new_label if decision == "relabel" else None, rule)
            codes, labels = self._codes[rows], self._labels[rows]
            self._write({name: value for name, value in vars(act).items() if value is not None})
            self._acts.append(act)
            self._apply(act, rows)
            return int(((codes != self._codes[rows]) | (labels != self._labels[rows])).sum())

    def undo(self) -> int:
        """Take the last act back; tell on how many rows it was."""
        with self._guard:
            self._hold()
            if not self._acts:
                return 0
            self._write({"time": datetime.now(UTC).isoformat(timespec="seconds"), "undo": True})
            undone = self._acts[-1]
            self._replay(self._acts[:-1])
            return undone.count

    def refresh(self) -> None:
        """Read what another server has written since; its own a server knows."""
        with self._guard:
            if self._is_ours:
                return
            try:
                about = self.path.stat()
            except FileNotFoundError:
                return
            if (about.st_size, about.st_mtime_ns) != self._seen:
                self._seen = about.st_size, about.st_mtime_ns
                self._replay(self._read()[0])

    def _hold(self) -> None:
        """Become the one who decides, with all that others decided before and without a line that was torn off."""
        if self._is_ours:
            return
        try:
            self._holding.enter_context(locked(self._lock))
        except BusyError as error:
            raise BusyError(f"Another page decides on this run already, and only one can. {error}") from None
        try:
            acts, end = self._read()
            self._replay(acts)
            if self.path.exists() and self.path.stat().st_size != end:
                os.truncate(self.path, end)
            if not end:
                self._write(self._header)
            sync(self.path.parent)
        except OSError as error:
            self._holding.close()
            raise storage_error(error, self.path) from error
        except BaseException:
            self._holding.close()
            raise
        self._is_ours = True

    def _write(self, line: dict[str, Any]) -> None:
        """Append one line, and return when it is on the disk; what could not be written whole is taken back."""
        data = json.dumps(line).encode() + b"\n"
        try:
            with self.path.open("ab", buffering=0) as file:
                end = file.tell()
                try:
                    if file.write(data) != len(data):
                        raise OSError("only a part was written")
                    os.fsync(file.fileno())
                except OSError:
                    file.truncate(end)
                    raise
        except OSError as error:
            raise storage_error(error, self.path) from error

    def _read(self) -> tuple[list[Act], int]:
        """Return the acts that stand, and where the last whole line ends; a last line that was torn off counts not."""
        try:
            lines = self.path.read_bytes().splitlines(keepends=True)
        except FileNotFoundError:
            return [], 0
        acts: list[Act] = []
        end = 0
        for number, line in enumerate(lines):
            try:
                if not line.endswith(b"\n"):
                    raise ValueError("it has no end")
                self._take(json.loads(line), number, acts)
            except (ValueError, LookupError, TypeError, AttributeError, zlib.error) as error:
                if isinstance(error, MismatchError) or number + 1 < len(lines):
                    raise MismatchError(
                        f"Line {number + 1} of {self.path} is damaged or of another run ({error}). Restore the file, "
                        "or move it away to begin anew; nothing was changed."
                    ) from None
                break
            end += len(line)
        return acts, end

    def _take(self, found: dict[str, Any], number: int, acts: list[Act]) -> None:
        if number == 0:
            if found != self._header:
                raise MismatchError(f"it says {json.dumps(found)[:200]}")
        elif found.get("undo"):
            acts.pop()
        else:
            rows = found.pop("rows")
            act = Act(rows=rows if isinstance(rows, str) else tuple(map(int, rows)), **found)
            numbers = act.numbers(self.num_rows)
            if len(numbers) and not 0 <= numbers.min() <= numbers.max() < self.num_rows:
                raise ValueError("it names rows that are not there")
            acts.append(act)

    def _forget(self) -> None:
        self._codes = np.zeros(self.num_rows, dtype=np.int8)
        self._labels = np.full(self.num_rows, -1, dtype=np.int32)
        self._acts: list[Act] = []
        self._version = getattr(self, "_version", 0) + 1

    def _replay(self, acts: list[Act]) -> None:
        self._forget()
        self._acts = list(acts)
        for act in acts:
            self._apply(act, act.numbers(self.num_rows))

    def _apply(self, act: Act, rows: np.ndarray) -> None:
        self._codes[rows] = 0 if act.decision == CLEAR else WORDS.index(act.decision)
        self._version += 1
        self._labels[rows] = -1 if act.new_label is None else act.new_label


def _packed(rows: np.ndarray, num_rows: int) -> str:
    mask = np.zeros(num_rows, dtype=bool)
    mask[rows] = True
    return base64.b64encode(zlib.compress(np.packbits(mask).tobytes(), 6)).decode("ascii")
