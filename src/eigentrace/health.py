"""Is a run what it says it is? Every file looked at, every checksum taken again, and what is bad set aside."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from eigentrace.artifact import read_tensors
from eigentrace.errors import EigentraceError, MismatchError
from eigentrace.lock import locked
from eigentrace.store import Folder, Shard
from eigentrace.store.shards import fault_of, gaps, recovered

_ASIDE = "damaged"


@dataclass(frozen=True)
class Fault:
    """Something that is wrong with a run."""

    path: Path
    what: str
    fix: str

    def __str__(self) -> str:
        return f"{self.path} {self.what}. {self.fix}"


@dataclass(frozen=True)
class Health:
    """What a check found."""

    faults: tuple[Fault, ...]
    num_rows: int
    num_missing: int
    """Rows that are not scored yet, those of damaged shards included."""

    @property
    def is_good(self) -> bool:
        """Tell whether nothing is wrong and nothing missing."""
        return not self.faults and not self.num_missing

    def __str__(self) -> str:
        missing = f"{self.num_missing:,} of {self.num_rows:,} rows are missing" if self.num_missing else ""
        whole = f"{self.num_rows:,} rows, all of them whole" if self.is_good else ""
        return "\n".join([*map(str, self.faults), *filter(None, (missing, whole))])


def check(path: str | Path, repair: bool = False) -> Health:
    """Look at every file of a run.

    Args:
        path: The run's directory.
        repair: Set damaged shards aside (in `damaged/`, nothing is deleted) and take lost ones back on record, so that
            scoring the run again does only what is missing.
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
        raise MismatchError(f"{folder.path} is no directory. Give the path of a run.")
    return folder.manifest


def _look(folder: Folder) -> tuple[tuple[Shard, ...], list[Fault]]:
    """Return the shards that are whole, and everything that is wrong."""
    faults: list[Fault] = []
    try:
        recorded = folder.record.read()
    except EigentraceError:
        recorded = ()
        faults.append(Fault(folder.record.path, "is damaged", "Repairing makes it again from the shards."))
    good = []
    for shard in recorded:
        file = folder.record.file(shard)
        wrong = fault_of(file, shard)
        if wrong is None:
            good.append(shard)
        else:
            span = f"Repairing scores rows {shard.start:,} to {shard.stop - 1:,} again."
            faults.append(Fault(file, wrong, span))
    known = {shard.name for shard in recorded}
    for file in sorted(folder.record.folder.glob("*.safetensors")):
        if file.name not in known:
            found = recovered(file)
            what = "is not on record" if found else "is not on record and damaged"
            faults.append(Fault(file, what, "Repairing takes it back." if found else "Repairing sets it aside."))
            good += [found] if found else []
    faults += _others(folder)
    return tuple(sorted(good, key=lambda shard: shard.start)), faults


def _others(folder: Folder) -> Iterator[Fault]:
    weights = folder.path / "weights.safetensors"
    fit = sorted(folder.fit.rglob("*.safetensors")) if folder.fit.is_dir() else []
    if not fit:
        yield Fault(folder.fit, "is missing", "Copy the fit back, or fit again in another directory.")
    for file in (weights, *fit):
        try:
            read_tensors(file)
        except EigentraceError as error:
            yield Fault(file, f"cannot be read ({error})", "Restore it, or fit again in another directory.")
    for file in (folder.columns_file, folder.table_file):
        if file.exists():
            try:
                pq.ParquetFile(file).read_row_group(0)
            except (pa.ArrowInvalid, OSError) as error:
                fix = "It is written again by scoring." if file == folder.table_file else "Restore it."
                yield Fault(file, f"cannot be read ({error})", fix)


def _repair(folder: Folder, good: tuple[Shard, ...], faults: list[Fault]) -> None:
    kept = {shard.name for shard in good}
    for fault in faults:
        is_bad_shard = fault.path.parent == folder.record.folder and fault.path.name not in kept
        if fault.path.exists() and (is_bad_shard or fault.path in (folder.table_file, folder.record.path)):
            _set_aside(folder, fault.path)
    if faults:
        folder.record.write(good)


def _set_aside(folder: Folder, file: Path) -> None:
    aside = folder.path / _ASIDE
    aside.mkdir(exist_ok=True)
    number = 0
    while (target := aside / f"{file.name}.{number}").exists():
        number += 1
    file.rename(target)
