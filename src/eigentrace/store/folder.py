"""The directory of a run: paths of its files, its manifest, and checks of what it was created with."""

import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from eigentrace.disk.atomic import replacing
from eigentrace.disk.blocks import damaged
from eigentrace.disk.bounded import check_regular, read_json
from eigentrace.disk.lock import LOCK
from eigentrace.disk.manifest import MANIFEST, manifest_text, read_manifest
from eigentrace.disk.tensor_file import TensorFile, check_recorded
from eigentrace.disk.tensors import write_tensors
from eigentrace.errors import InputError, MismatchError, StorageError
from eigentrace.numeric.hashing import hash_file
from eigentrace.store.entries import check_entries, check_request
from eigentrace.store.shards import RECORD, SHARDS, Record
from eigentrace.store.user_columns import ColumnsFile, checksums_of, same_columns

if TYPE_CHECKING:
    from torch import Tensor

KIND = "run"
# Files and directories of a run. Names common to all artifacts are in `disk`, those of fits in `fits`.
FIT, KRYLOV = "fit", "krylov"
WEIGHTS, USER_COLUMNS, TABLE = "weights.safetensors", "columns.parquet", "table.parquet"
REQUEST, DECISIONS, DECIDING, PAGE, DAMAGED = "request.json", "decisions.jsonl", "deciding", "page.html", "damaged"
WRITTEN = (MANIFEST, RECORD, USER_COLUMNS, TABLE, WEIGHTS, LOCK, FIT, SHARDS, REQUEST)
"""Files and directories that scoring writes to a run."""
# Manifest keys: the checksum of each file that is written once, and the checksums of the blocks of some.
_FILES, _BLOCKS = "files", "blocks"
_FIT_ADVICE = "Restore it from a copy, or score into a new directory. `eigentrace check RUN` lists all damaged files."
_TABLE_ADVICE = "`eigentrace check RUN --repair` sets it aside, and the command that scored the run rewrites it."
# Rows per Parquet row group of the user's columns; reading one item reads its whole group.
_GROUP_ROWS = 1 << 13
# Manifest keys that must be equal for a run to be resumed, with their descriptions in messages.
_IDENTITY = {
    "model": "a different model, weights or selection of parameters",
    "method": "different fit settings",
    "data": "different training data",
    "compute": "a different batch size, precision or engine",
    "features": "a different type or number of stored features",
}


class Folder:
    """The paths of a run's files, with methods that read and write them without a model."""

    def __init__(self, path: str | Path) -> None:
        if not isinstance(path, str | Path):
            raise InputError(f"The path of a run must be a str or Path, got {type(path).__name__}.")
        self.path = Path(path).absolute()  # the caller may change directories
        self.record = Record(self.path)
        self.manifest_file = self.path / MANIFEST
        self.fit, self.krylov = self.path / FIT, self.path / KRYLOV
        self.weights_file = self.path / WEIGHTS
        self.columns_file, self.table_file = self.path / USER_COLUMNS, self.path / TABLE
        self.request_file, self.decisions_file = self.path / REQUEST, self.path / DECISIONS
        self.deciding, self.page_file = self.path / DECIDING, self.path / PAGE
        self.damaged = self.path / DAMAGED

    @property
    def exists(self) -> bool:
        """Return whether the directory contains a run, complete or not."""
        return self.manifest_file.exists()

    @property
    def has_fit_begun(self) -> bool:
        """Return whether the directory contains a fit or a partial fit, which is bound to its data."""
        return self.fit.exists() or (self.krylov / MANIFEST).exists()

    @property
    def request(self) -> dict[str, Any] | None:
        """The recorded settings of the `fit` command that created the run, or None."""
        how = self.manifest.get("how") if self.exists else None
        if _is_request(how):
            return how
        try:
            found = read_json(self.request_file)
        except (OSError, ValueError):
            return None
        if not _is_request(found):
            return None
        check_request(found, self.request_file)
        return found

    def refuse_foreign(self) -> None:
        """Raise InputError if the directory contains no run but unrelated files; nothing is changed."""
        if self.exists or not self.path.is_dir():
            return
        ours = (REQUEST, FIT, KRYLOV, WEIGHTS, USER_COLUMNS)
        begun = tuple(f".{name}." for name in (*ours, LOCK, MANIFEST))
        names = sorted(path.name for path in self.path.iterdir())
        others = [name for name in names if name not in (*ours, LOCK) and not name.startswith(begun)]
        if others:
            raise InputError(
                f"{self.path} is not a run and contains other files ({', '.join(others[:3])}). Choose a new directory; "
                "nothing was changed."
            )

    @cached_property
    def manifest(self) -> dict[str, Any]:
        """The run's manifest: method, model, data and settings. A missing key raises MismatchError."""
        found = read_manifest(self.path, KIND)
        check_entries(found, self.manifest_file)
        return found

    @cached_property
    def weights(self) -> "Tensor":  # (K,) float64
        """One weight per stored feature: Σ weight φ(x) φ(z) is the score of two examples."""
        import torch

        file = self.listed(self.weights_file)
        if file is None:
            raise StorageError(f"{self.weights_file} is missing. {_FIT_ADVICE}")
        weights, count = file.read("weights"), self.manifest["features"]["count"]
        if weights.shape != (count,) or weights.dtype != np.float64:
            what = f"it has weights of shape {weights.shape} and type {weights.dtype}, expected ({count},) float64"
            raise damaged(self.weights_file, what, _FIT_ADVICE)
        return torch.from_numpy(weights)

    @cached_property
    def user_columns(self) -> ColumnsFile | None:
        """The file of ids and user columns; None if the run has none."""
        if not self._is_listed(self.columns_file):
            return None
        sums, sha256 = (self.manifest.get(key, {}).get(USER_COLUMNS) for key in (_BLOCKS, _FILES))
        return ColumnsFile(self.columns_file, self.manifest["data"]["rows"], sums, sha256)

    @property
    def table(self) -> ColumnsFile:
        """The file of all columns of a complete run, which is written once it is complete."""
        return ColumnsFile(self.table_file, self.manifest["data"]["rows"], advice=_TABLE_ADVICE)

    @property
    def recorded(self) -> Mapping[str, str]:
        """The checksums of the files that are written once, by their names in the run's directory."""
        return self.manifest.get(_FILES, {})

    def listed(self, path: Path) -> TensorFile | None:
        """Return a tensor file that the manifest lists, verified when read; None if the run has none of this name."""
        if not self._is_listed(path):
            return None
        return TensorFile(path, _FIT_ADVICE, self.recorded.get(self._name(path)))

    def check_fit(self) -> None:
        """Raise StorageError unless all files of the fit are as they were when the manifest was written."""
        for name, sha256 in self.recorded.items():
            path = self.path / name
            if path.is_relative_to(self.fit):
                check_recorded(path, sha256, _FIT_ADVICE)

    def _is_listed(self, path: Path) -> bool:
        """Return whether a file belongs to the run; manifests of some tools list no files, and then it must exist."""
        files = self.manifest.get(_FILES)
        return path.exists() if files is None else self._name(path) in files

    def _name(self, path: Path) -> str:
        return path.relative_to(self.path).as_posix()

    def begin(self, manifest: Mapping[str, Any], weights: "Tensor", columns: pa.Table | None) -> None:
        """Write weights, user columns and manifest of a new run, the manifest last: it exists only if all others do."""
        self.path.mkdir(parents=True, exist_ok=True)
        with replacing(self.weights_file) as partial:
            write_tensors({"weights": weights.cpu().double()}, partial, checksums=True)
        if columns is not None:
            with replacing(self.columns_file) as partial:
                pq.write_table(columns, partial, row_group_size=_GROUP_ROWS)
        lasting = self.lasting()
        for path in lasting:
            check_regular(path)
        sums = {_FILES: {self._name(path): hash_file(path) for path in lasting}}
        sums |= {} if columns is None else {_BLOCKS: {USER_COLUMNS: checksums_of(self.columns_file)}}
        with replacing(self.manifest_file) as partial:
            partial.write_text(manifest_text({**manifest, **sums}))
        for read in ("manifest", "weights", "user_columns"):
            self.__dict__.pop(read, None)

    def lasting(self) -> list[Path]:
        """Return the existing files that are written once, before the manifest, and never overwritten."""
        fit = sorted(path for path in self.fit.rglob("*") if path.is_file())
        return [path for path in (self.weights_file, self.columns_file, *fit) if path.exists()]

    def check_same(self, manifest: Mapping[str, Any], columns: pa.Table | None) -> None:
        """Raise MismatchError unless the run was created with the same model, settings, data and user columns."""
        for key, words in _IDENTITY.items():
            held, asked = self.manifest[key], manifest[key]
            if held != asked:
                raise MismatchError(
                    f"The run at {self.path} was created with {words}: {_differing(held, asked)}. "
                    "Resume with the same ones, or choose another directory; nothing was changed."
                )
        if columns is not None and not (
            self.user_columns is not None and same_columns(self.user_columns.table(), columns)
        ):
            raise MismatchError(
                f"The run at {self.path} was created with different ids or columns, got {columns.column_names}. Omit "
                "them to resume with those of the run, or choose another directory; nothing was changed."
            )


def _is_request(found: Any) -> bool:
    return isinstance(found, dict) and isinstance(found.get("input"), dict)


def _differing(held: Any, asked: Any) -> str:
    if not isinstance(held, dict) or not isinstance(asked, dict):
        return f"the run has {_short(held)}, got {_short(asked)}"
    keys = [key for key in sorted({*held, *asked}) if held.get(key) != asked.get(key)]
    return "; ".join(f"{key} is {_short(held.get(key))} in the run, got {_short(asked.get(key))}" for key in keys)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:24]}…"
