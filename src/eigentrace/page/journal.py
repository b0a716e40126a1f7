"""Append-only log of decisions on a run's rows, one JSON line per decision; it survives a killed server."""

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
from eigentrace.disk.bounded import open_regular, parsed
from eigentrace.disk.lock import locked
from eigentrace.errors import BusyError, InputError, MismatchError
from eigentrace.numeric.hashing import hash_text
from eigentrace.store.folder import Folder

WORDS = ("none", "drop", "keep", "relabel")
RELABEL = WORDS.index("relabel")
CLEAR = "clear"
# A decision on more rows is written as a bit mask over the run.
_LISTED = 1000
# The checksum of a line.
_SUM = "sum"
# Maximum number of classes, and of bytes of the log and of its lines besides the bit mask.
_MOST_CLASSES, _MOST_BYTES, _LINE = 1 << 31, 1 << 28, 1 << 16


@dataclass(frozen=True)
class Act:
    """One decision on one or more rows."""

    time: str
    decision: str
    rows: str | tuple[int, ...]
    """Row numbers, or a compressed bit mask over all rows, in base64."""
    count: int
    new_label: int | None = None
    """The class that rows are relabelled as; None for the model's prediction."""
    rule: dict[str, Any] | None = None

    @staticmethod
    def of(decision: str, rows: np.ndarray, num_rows: int, new_label: int | None, rule: dict[str, Any] | None) -> "Act":
        """Create an act in the form in which it is written."""
        held = tuple(rows.tolist()) if len(rows) <= _LISTED else _packed(rows, num_rows)
        return Act(datetime.now(UTC).isoformat(timespec="seconds"), decision, held, len(rows), new_label, rule)

    @staticmethod
    def read(found: dict[str, Any], num_rows: int) -> "Act":
        """Create an act from a line of the log; raise ValueError or TypeError unless all of it is valid."""
        act = Act(**found | {"rows": found["rows"] if isinstance(found["rows"], str) else tuple(found["rows"])})
        if act.decision not in (*WORDS[1:], CLEAR):
            raise ValueError(f"its decision is {str(act.decision)[:40]!r}")
        listed = () if isinstance(act.rows, str) else act.rows
        if not all(type(row) is int and 0 <= row < num_rows for row in listed):
            raise ValueError(f"its rows are not numbers from 0 to {num_rows - 1}")
        if type(act.count) is not int or len(act.numbers(num_rows)) != act.count:
            raise ValueError(f"it does not have as many rows as its count, {act.count}")
        if act.new_label is not None and not (type(act.new_label) is int and 0 <= act.new_label < _MOST_CLASSES):
            raise ValueError(f"its new label is {act.new_label}")
        if not isinstance(act.time, str) or not isinstance(act.reason, str):
            raise ValueError("its time is not text")
        return act

    def numbers(self, num_rows: int) -> np.ndarray:  # (n,)
        """Return the row numbers of the decision."""
        if not isinstance(self.rows, str):
            return np.array(self.rows, dtype=np.int64)
        size = -(-num_rows // 8)
        unpacking = zlib.decompressobj()
        # At most the bytes of the mask are decompressed, however many there are.
        bits = unpacking.decompress(base64.b64decode(self.rows), size + 1)
        if len(bits) != size or not unpacking.eof:
            raise ValueError(f"its bit mask does not have {size:,} bytes")
        return np.flatnonzero(np.unpackbits(np.frombuffer(bits, np.uint8), count=num_rows))

    @property
    def reason(self) -> str:
        """Why rows were selected: "by hand", or the rule in words."""
        if self.rule is None:
            return "by hand"
        bounds = [f"{side} {self.rule[side]:.4g}" for side in ("above", "below") if self.rule.get(side) is not None]
        label = self.rule.get("label")
        return f"{self.rule['by']} is {' and '.join(bounds)}" + (f", of label {label}" if label is not None else "")


class Journal:
    """The decisions on a run's rows. Any process may read them; the first to write keeps the write lock."""

    def __init__(self, run: Folder | Path, num_rows: int, fingerprint: str) -> None:
        folder = run if isinstance(run, Folder) else Folder(run)
        self.path, self._lock, self.num_rows = folder.decisions_file, folder.deciding, num_rows
        self._header = {"kind": "decisions", "format": 1, "rows": num_rows, "data": fingerprint}
        self._guard, self._write_lock, self._is_writer = RLock(), ExitStack(), False
        self._last_stat: tuple[int, int] | None = None
        self._reset()
        self.refresh()

    def close(self) -> None:
        """Release the write lock."""
        with self._guard:
            self._write_lock.close()
            self._is_writer = False

    def state(self) -> tuple[np.ndarray, int]:  # (N,) int8
        """Return every row's decision, as positions in WORDS, and a version number that changes with them."""
        self.refresh()
        return self._codes, self._version

    def new_label(self, row: int) -> int | None:
        """Return the class that a row was relabelled as; None if no class was named."""
        return int(self._labels[row]) if self._labels[row] >= 0 else None

    def counts(self) -> dict[str, int]:
        """Count rows by decision."""
        counts = np.bincount(self.state()[0], minlength=len(WORDS))
        return {word: int(counts[code]) for code, word in enumerate(WORDS) if code}

    def log(self, last: int = 20) -> list[dict[str, Any]]:
        """Return the last decisions that were not undone, latest first."""
        self.refresh()
        return [
            {"time": act.time, "decision": act.decision, "count": act.count, "new_label": act.new_label}
            | {"why": act.reason, "rows": list(act.rows[:5]) if not isinstance(act.rows, str) else []}
            for act in reversed(self._acts[-last:])
        ]

    def reasons(self) -> tuple[np.ndarray, list[str]]:  # (N,) int32, words
        """Return the reason for each row's decision, as positions in a list of texts; 0 means no decision."""
        with self._guard:
            codes, texts = np.zeros(self.num_rows, dtype=np.int32), ["not decided on"]
            for act in self._acts:
                rows = act.numbers(self.num_rows)
                is_clear = act.decision == CLEAR
                texts += [] if is_clear else [f"marked {act.decision}: {act.reason}"]
                codes[rows] = 0 if is_clear else len(texts) - 1
            return codes, texts

    def decide(
        self, rows: np.ndarray, decision: str, new_label: int | None = None, rule: dict[str, Any] | None = None
    ) -> int:
        """Record a decision durably, and return the number of rows that changed."""
        if decision not in (*WORDS[1:], CLEAR):
            raise InputError(f"decision must be one of {', '.join(WORDS[1:])} or {CLEAR}, got {decision!r}.")
        if len(rows) and not 0 <= rows.min() <= rows.max() < self.num_rows:
            raise InputError(f"Rows must be 0 to {self.num_rows - 1}, got {rows.min()} to {rows.max()}.")
        if not len(rows):
            return 0
        with self._guard:
            self._acquire()
            rows = np.unique(rows)
            act = Act.of(decision, rows, self.num_rows, new_label if decision == "relabel" else None, rule)
            codes, labels = self._codes[rows], self._labels[rows]
            self._write({name: value for name, value in vars(act).items() if value is not None})
            self._acts.append(act)
            self._apply(act, rows)
            return int(((codes != self._codes[rows]) | (labels != self._labels[rows])).sum())

    def undo(self) -> int:
        """Undo the last decision, and return its number of rows."""
        with self._guard:
            self._acquire()
            if not self._acts:
                return 0
            self._write({"time": datetime.now(UTC).isoformat(timespec="seconds"), "undo": True})
            undone = self._acts[-1]
            self._replay(self._acts[:-1])
            return undone.count

    def refresh(self) -> None:
        """Read decisions that another process has written; a no-op for the writer itself."""
        with self._guard:
            if self._is_writer:
                return
            try:
                stat = self.path.stat()
            except FileNotFoundError:
                return
            if (stat.st_size, stat.st_mtime_ns) != self._last_stat:
                self._last_stat = stat.st_size, stat.st_mtime_ns
                self._replay(self._read()[0])

    def _acquire(self) -> None:
        """Take the write lock, replay earlier decisions, drop a truncated last line."""
        if self._is_writer:
            return
        try:
            self._write_lock.enter_context(locked(self._lock))
        except BusyError as error:
            raise BusyError(
                f"Another page has the write lock on the decisions of this run. Close it, or decide there. {error}"
            ) from None
        try:
            acts, end = self._read()
            self._replay(acts)
            if self.path.exists() and self.path.stat().st_size != end:
                os.truncate(self.path, end)
            if not end:
                self._write(self._header)
            sync(self.path.parent)
        except OSError as error:
            self._write_lock.close()
            raise storage_error(error, self.path) from error
        except BaseException:
            self._write_lock.close()
            raise
        self._is_writer = True

    def _write(self, line: dict[str, Any]) -> None:
        """Append one line and flush it to disk; a partial write is truncated again."""
        line = json.loads(json.dumps(line))
        data = json.dumps(line if line == self._header else line | {_SUM: _sum_of(line)}).encode() + b"\n"
        # A link is not followed: the file that it names may be any file.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
        try:
            with os.fdopen(os.open(self.path, flags, 0o666), "ab", buffering=0) as file:
                end = file.tell()
                try:
                    if file.write(data) != len(data):
                        raise OSError("the line was written only in part")
                    os.fsync(file.fileno())
                except OSError:
                    file.truncate(end)
                    raise
        except OSError as error:
            raise storage_error(error, self.path) from error

    def _read(self) -> tuple[list[Act], int]:
        """Return the decisions in effect and the end of the last complete line; a truncated last line is ignored."""
        try:
            with open_regular(self.path) as file:
                if os.fstat(file.fileno()).st_size > _MOST_BYTES:
                    raise MismatchError(
                        f"{self.path} has more than {_MOST_BYTES:,} bytes. Move it away to start without decisions; it "
                        "was not changed."
                    )
                lines = file.read(_MOST_BYTES).splitlines(keepends=True)
        except FileNotFoundError:
            return [], 0
        acts: list[Act] = []
        end = 0
        for number, line in enumerate(lines):
            try:
                # Only a line without its end was torn off while it was written; any other was acknowledged.
                if number + 1 == len(lines) and not line.endswith(b"\n"):
                    break
                if len(line) > _LINE + self.num_rows // 4:
                    raise ValueError(f"it has {len(line):,} bytes")
                self._parse(parsed(line.decode(), self.path), number, acts)
            except (ValueError, LookupError, TypeError, AttributeError, OverflowError, zlib.error) as error:
                raise MismatchError(
                    f"Line {number + 1} of {self.path} is damaged or of another run ({error}). Restore the file, "
                    "or move it away to start without decisions; it was not changed."
                ) from None
            end += len(line)
        return acts, end

    def _parse(self, found: dict[str, Any], number: int, acts: list[Act]) -> None:
        """Apply the content of one line to the list of acts."""
        if number == 0:
            if found != self._header:
                raise MismatchError(f"its header is {json.dumps(found)[:200]}")
            return
        # Lines of earlier versions have no checksum.
        recorded = found.pop(_SUM, None)
        if recorded not in (None, _sum_of(found)):
            raise ValueError("its checksum differs")
        if found.get("undo"):
            acts.pop()
        else:
            acts.append(Act.read(found, self.num_rows))

    def _reset(self) -> None:
        self._codes = np.zeros(self.num_rows, dtype=np.int8)
        self._labels = np.full(self.num_rows, -1, dtype=np.int32)
        self._acts: list[Act] = []
        self._version = getattr(self, "_version", 0) + 1

    def _replay(self, acts: list[Act]) -> None:
        self._reset()
        self._acts = list(acts)
        for act in acts:
            self._apply(act, act.numbers(self.num_rows))

    def _apply(self, act: Act, rows: np.ndarray) -> None:
        self._codes[rows] = 0 if act.decision == CLEAR else WORDS.index(act.decision)
        self._version += 1
        self._labels[rows] = -1 if act.new_label is None else act.new_label


def _sum_of(line: dict[str, Any]) -> str:
    return hash_text(json.dumps(line, sort_keys=True))[:16]


def _packed(rows: np.ndarray, num_rows: int) -> str:
    mask = np.zeros(num_rows, dtype=bool)
    mask[rows] = True
    return base64.b64encode(zlib.compress(np.packbits(mask).tobytes(), 6)).decode("ascii")
