"""Integrity check of a run: verify the checksum of every file, and set damaged files aside."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from eigentrace.disk.bounded import check_regular
from eigentrace.disk.lock import locked
from eigentrace.errors import EigentraceError, MismatchError, StorageError, UnsupportedError
from eigentrace.numeric.hashing import hash_file
from eigentrace.settings import counted
from eigentrace.store import Folder, Shard
from eigentrace.store.shards import fault_of, gaps, recovered

# Rows of the table that are read at a time.
_ROWS_AT_ONCE = 1 << 16


@dataclass(frozen=True)
class Fault:
    """A problem with one file of a run, and how to fix it."""

    path: Path
    what: str
    fix: str

    def __str__(self) -> str:
        return f"{self.path} {self.what}. {self.fix}"


@dataclass(frozen=True)
class Health:
    """The result of `check`: faults, and the number of missing rows."""

    faults: tuple[Fault, ...]
    num_rows: int
    num_missing: int
    """Number of rows without scores, including those in damaged shards."""

    @property
    def is_good(self) -> bool:
        """Return whether there are no faults and no missing rows."""
        return not self.faults and not self.num_missing

    def __repr__(self) -> str:
        found = f"{counted(len(self.faults), 'fault')}, {self.num_missing:,} of {counted(self.num_rows, 'row')} missing"
        return f"<Health: {found}>"

    def __str__(self) -> str:
        missing = f"{self.num_missing:,} of {self.num_rows:,} rows are missing" if self.num_missing else ""
        whole = f"All {self.num_rows:,} rows are present and intact" if self.is_good else ""
        return "\n".join([*map(str, self.faults), *filter(None, (missing, whole))])


def check(path: str | Path, repair: bool = False) -> Health:
    """Check every file of a run, and optionally repair the run.

    Args:
        path: The run's directory.
        repair: Move damaged shards to `damaged/` (nothing is deleted) and add intact shards that are missing from
            `shards.json`, so that scoring the run again computes only missing rows.
    """
    folder = Folder(path)
    rows = int(_manifest(folder)["data"]["rows"])
    if not repair:
        shards, faults = _look(folder)
    else:
        with locked(folder.path):
            shards, faults = _look(folder)
            _repair(folder, shards, faults)
    missing = sum(len(gap) for gap in gaps(shards, rows))
    return Health(tuple(faults), rows, missing)


def _manifest(folder: Folder) -> dict:
    if not folder.path.is_dir():
        raise MismatchError(f"{folder.path} is not a directory. Pass the directory of a run.")
    return folder.manifest


def _look(folder: Folder) -> tuple[tuple[Shard, ...], list[Fault]]:
    """Return the intact shards and all faults."""
    faults: list[Fault] = []
    try:
        recorded = folder.record.read()
    except UnsupportedError:  # of another version: intact, as far as this version can tell
        raise
    except EigentraceError:
        recorded = ()
        what = "is damaged" if folder.record.path.exists() else "is missing"
        faults.append(Fault(folder.record.path, what, "Repairing rebuilds it from the shards."))
    good: list[Shard] = []
    for shard in recorded:
        file = folder.record.file(shard)
        wrong = fault_of(file, shard) or _lacking(folder, shard)
        if wrong is None:
            good.append(shard)
        else:
            span = f"Repairing scores rows {shard.start:,} to {shard.stop - 1:,} again."
            faults.append(Fault(file, wrong, span))
    known = {shard.name for shard in recorded}
    for file in sorted(folder.record.folder.glob("*.safetensors")):
        if file.name not in known:
            found = recovered(file)
            is_lost = found is not None and found.name == file.name and not _overlaps(found, good)
            why = (
                ""
                if is_lost
                else " and damaged"
                if found is None
                else " and contains rows that are also in other shards"
            )
            fix = "Repairing adds it again." if is_lost else "Repairing sets it aside."
            faults.append(Fault(file, f"is not listed in shards.json{why}", fix))
            good += [found] if found is not None and is_lost else []
    shards = tuple(sorted(good, key=lambda shard: shard.start))
    is_complete = not any(gaps(shards, int(folder.manifest["data"]["rows"])))
    return shards, [*faults, *_lasting(folder), *_table(folder, is_complete)]


def _lacking(folder: Folder, shard: Shard) -> str | None:
    """Describe how an unchanged file differs from what shards.json says of its rows; None if it does not."""
    try:
        folder.record.names(shard)
    except StorageError as error:
        return f"does not have the listed rows ({error})"
    return None


def _overlaps(shard: Shard, others: list[Shard]) -> bool:
    return any(shard.start < other.stop and other.start < shard.stop for other in others)


def _lasting(folder: Folder) -> Iterator[Fault]:
    """Yield a fault for each file whose checksum differs from the one in the manifest."""
    for name, expected in folder.recorded.items():
        file = folder.path / name
        fix = "Restore it from a copy." if file == folder.columns_file else "Restore it, or fit into a new directory."
        try:
            check_regular(file)
            if hash_file(file) != expected:
                yield Fault(file, "has changed since it was written (its checksum differs)", fix)
        except FileNotFoundError:
            yield Fault(file, "is missing", fix)
        except (MismatchError, OSError) as error:
            yield Fault(file, f"cannot be read ({error})", fix)


def _table(folder: Folder, is_complete: bool) -> Iterator[Fault]:
    file, fix = folder.table_file, "Score the run again to rewrite it."
    if not file.exists():
        if is_complete:
            yield Fault(file, "is missing", fix)
        return
    try:
        for _ in folder.table.batches(_ROWS_AT_ONCE):
            pass
    except (EigentraceError, OSError) as error:
        yield Fault(file, f"cannot be read ({error})", fix)


def _repair(folder: Folder, good: tuple[Shard, ...], faults: list[Fault]) -> None:
    kept = {shard.name for shard in good}
    if folder.record.path.is_file() and any(fault.path == folder.record.path for fault in faults):
        # Not copied: it may be large, or a hole. Without it, another repair finds the shards.
        folder.record.path.rename(_aside(folder, folder.record.path))
    if faults:
        folder.record.write(good)
    for fault in faults:
        is_bad_shard = fault.path.parent == folder.record.folder and fault.path.name not in kept
        if fault.path.exists() and (is_bad_shard or fault.path == folder.table_file):
            fault.path.rename(_aside(folder, fault.path))


def _aside(folder: Folder, file: Path) -> Path:
    """Return an unused path in `damaged/` for this file."""
    aside = folder.damaged
    aside.mkdir(exist_ok=True)
    number = 0
    while (target := aside / f"{file.name}.{number}").exists():
        number += 1
    return target
