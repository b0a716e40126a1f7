"""Reader of a run's manifest, columns and features; it imports torch only to read features."""

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from eigentrace.errors import InputError, MismatchError, StorageError, UnsupportedError
from eigentrace.fits.cut import Cut, delta_of
from eigentrace.fits.file_names import EIGENPAIRS
from eigentrace.store.columns import DIGEST, EXPONENTS, FEATURES, ID, ScoredColumn, named, of_tensors
from eigentrace.store.folder import Folder
from eigentrace.store.shards import CHECK_ADVICE, Shard, gaps, unhalved
from eigentrace.store.user_columns import Names

if TYPE_CHECKING:
    from torch import Tensor

Rows = range | np.ndarray

# Rows without scores that columns of an incomplete run may have, and as a multiple of those with scores: a manifest can
# name any number of rows, and a column has a value for each.
_MISSING, _TIMES_MISSING = 1 << 24, 9
# Maximum size of a chunk of features, in bytes and in rows.
_CHUNK_BYTES, _CHUNK_ROWS = 2**25, 65_536


class RunReader:
    """Read-only access to a run without a model; the list of shards is read once, on first use.

    Args:
        folder: The run's directory.
    """

    def __init__(self, folder: Folder | str | Path) -> None:
        self.folder = folder if isinstance(folder, Folder) else Folder(folder)
        # Shards whose files were seen to have their rows.
        self._sized: set[Shard] = set()

    @property
    def path(self) -> Path:
        """The run's directory."""
        return self.folder.path

    @property
    def manifest(self) -> dict[str, Any]:
        """The run's manifest: method, model, data and settings."""
        return self.folder.manifest

    @cached_property
    def request(self) -> dict[str, Any] | None:
        """The recorded settings of the `fit` command that created the run, or None."""
        return self.folder.request

    @property
    def num_rows(self) -> int:
        """N, the number of examples in the data, scored or not."""
        return int(self.manifest["data"]["rows"])

    @property
    def num_features(self) -> int:
        """K, the number of features stored per example."""
        return int(self.manifest["features"]["count"])

    @property
    def scores_pairs(self) -> bool:
        """Return whether the method scores pairs of examples, not only single examples."""
        return bool(self.manifest.get("pairs", True))

    @property
    def holds_everything(self) -> bool:
        """Return whether the stored features give whole scores, not only the part in the kept directions."""
        return self.manifest["features"]["hold"] == "everything"

    @cached_property
    def shards(self) -> tuple[Shard, ...]:
        """The shards listed in `shards.json`, in row order."""
        found = self.folder.record.read()
        if found and found[-1].stop > self.num_rows:
            raise MismatchError(
                f"{self.folder.record.path} lists rows up to {found[-1].stop}, but the run has {self.num_rows} rows. "
                "Restore shards.json or manifest.json: one of them belongs to another run or is damaged."
            )
        return found

    @cached_property
    def num_missing(self) -> int:
        """Number of examples without scores."""
        return sum(len(rows) for rows in gaps(self.shards, self.num_rows))

    @property
    def is_complete(self) -> bool:
        """Return whether every example is scored."""
        return self.num_missing == 0

    def check_complete(self) -> None:
        """Raise InputError unless every example is scored."""
        if not self.is_complete:
            raise InputError(
                f"The run at {self.path} is not complete: {self.num_missing:,} of {self.num_rows:,} examples are "
                "missing. Resume it with the call or command that created it."
            )

    # Columns.

    @cached_property
    def scored(self) -> tuple[ScoredColumn, ...]:
        """The columns that scoring wrote."""
        recorded = self.manifest.get("columns")
        return of_tensors(self._tensors) if recorded is None else named(recorded)

    @cached_property
    def _tensors(self) -> tuple[str, ...]:
        return self.folder.record.names(self.shards[0]) if self.shards else ()

    @cached_property
    def user_columns(self) -> tuple[str, ...]:
        """Names of the user's columns, without the ids."""
        return tuple(name for name in self._given if name != ID)

    @cached_property
    def _given(self) -> tuple[str, ...]:
        given = self.folder.user_columns
        return () if given is None else given.names

    def user_table(self) -> pa.Table:
        """Return the user's columns, including the ids."""
        given = self.folder.user_columns
        self.check_held()
        return pa.table({}) if given is None else given.table()

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of all columns, those of the user last."""
        return (*(column.name for column in self.scored), *self.user_columns)

    def column(self, name: str, rows: Rows | None = None, *, partial: bool = False) -> np.ndarray:  # (N,) or (n,)
        """Return a column in row order, or its values at the given rows in the given order.

        Args:
            name: One of `columns`.
            rows: A range, or an array of any shape; all rows if None.
            partial: Allow missing rows, whose values are NaN, or -1 in columns of class numbers.
        """
        column = next((column for column in self.scored if column.name == name), None)
        if column is None and name not in self.user_columns:
            raise InputError(f"The run has no column {name!r}. Its columns are {', '.join(self.columns)}.")
        if partial:
            self._check_missing()
        else:
            self.check_complete()
        if column is None:
            held = self._user_column(name)
            return held.whole() if rows is None else held.of(np.asarray(rows))
        return column.read(self._read(column.stored_as, rows, column.missing))

    def check_held(self) -> None:
        """Raise an error unless the shards have the run's rows, before memory is reserved for each row."""
        self._check_missing()
        self._check_sizes(range(self.num_rows))

    def _check_missing(self) -> None:
        if self.num_missing > max(_MISSING, _TIMES_MISSING * (self.num_rows - self.num_missing)):
            raise InputError(
                f"The run at {self.path} has scores of only {self.num_rows - self.num_missing:,} of {self.num_rows:,} "
                "examples. Resume it with the call or command that created it."
            )

    def _check_sizes(self, rows: range) -> None:
        """Raise StorageError unless the files of these rows' shards have as many rows as shards.json says."""
        for shard in self.shards:
            if shard.start < rows.stop and rows.start < shard.stop and shard not in self._sized:
                self.folder.record.names(shard)
                self._sized.add(shard)

    def digests(self, rows: Rows | None = None) -> np.ndarray | None:  # (N,) or (n,) int64
        """Return the digest of each example, by which exact duplicates are found; None if any example has none."""
        self.check_complete()
        return self._read(DIGEST, rows) if self.has_digests else None

    @cached_property
    def has_digests(self) -> bool:
        """Return whether all scored examples have a digest."""
        return all(DIGEST in self.folder.record.names(shard) for shard in self.shards)

    @cached_property
    def ids(self) -> Names | None:
        """The ids of the examples, read from disk on access; None if the data has no ids."""
        return self._user_column(ID) if ID in self._given else None

    def _user_column(self, name: str) -> Names:
        given = self.folder.user_columns
        if given is None:
            raise StorageError(f"{self.folder.columns_file} is missing. {CHECK_ADVICE}")
        return Names(given, name)

    def table(self) -> pa.Table:
        """Return all columns, including the user's, with one row per example."""
        self.check_complete()
        self.check_held()
        return self.folder.table.table()

    def _read(self, tensor: str, rows: Rows | None, missing: float = np.nan) -> np.ndarray:
        """Read all rows of a stored tensor, or the given ones, across shards."""
        wanted: Rows = range(self.num_rows) if rows is None else rows
        if isinstance(wanted, range):
            self._check_sizes(wanted)
        shape = (len(wanted),) if isinstance(wanted, range) else wanted.shape
        parts = self._stretches(tensor, wanted) if isinstance(wanted, range) else self._picked(tensor, wanted)
        found: np.ndarray | None = None
        for place, values in parts:
            if len(values) == len(wanted) and isinstance(place, slice):
                return values
            if found is None:
                found = np.empty((*shape, *values.shape[1:]), values.dtype)
                if not self.is_complete:
                    found.fill(missing)
            found[place] = values
        return np.full(shape, missing, np.float32) if found is None else found

    def _stretches(self, tensor: str, rows: range) -> Iterator[tuple[slice, np.ndarray]]:
        for shard in self.shards:
            low, high = max(rows.start, shard.start), min(rows.stop, shard.stop)
            if low < high:
                part = self.folder.record.column(shard, tensor, low - shard.start, high - shard.start)
                yield slice(low - rows.start, high - rows.start), part

    def _picked(self, tensor: str, rows: np.ndarray) -> Iterator[tuple[Any, np.ndarray]]:
        self._check_rows(rows)
        home = np.searchsorted([shard.start for shard in self.shards], rows, side="right") - 1
        for number in np.unique(home).tolist():
            shard, here = self.shards[number], np.nonzero(home == number)
            yield here, self.folder.record.rows(shard, tensor, rows[here] - shard.start)

    def _check_rows(self, rows: np.ndarray) -> None:
        outside = rows[(rows < 0) | (rows >= self.num_rows)]
        if outside.size:
            raise InputError(f"Row {outside.flat[0]} is not in this run, which has rows 0 to {self.num_rows - 1}.")

    # Features.

    @property
    def weights(self) -> "Tensor":  # (K,)
        """One weight per feature: Σ weight φ(x) φ(z) is the score of two examples."""
        return self.folder.weights

    def feature_chunks(self, rows_at_once: int | None = None) -> "Iterator[tuple[int, Tensor]]":
        """Yield (first row, features (n, K)) in row order, with one chunk in memory at a time.

        Args:
            rows_at_once: Maximum number of rows in a chunk. If None, as many as fit into 32 MiB, at most 65,536.
        """
        import torch

        self._check_features()
        fitting = max(1, _CHUNK_BYTES // (4 * self.num_features))
        step = rows_at_once or min(_CHUNK_ROWS, 2 ** (fitting.bit_length() - 1))
        for shard in self.shards:
            start = shard.start
            while start < shard.stop:
                # Chunks end at multiples of the step, as in the search; joining pieces there would copy every feature.
                stop = min((start // step + 1) * step, shard.stop)
                yield start, torch.from_numpy(self._unscaled(range(start, stop)))
                start = stop

    def features_of(self, rows: np.ndarray) -> "Tensor":  # (n, K)
        """Return the features of the given rows, in the given order."""
        import torch

        self._check_features()
        if not np.size(rows):
            return torch.empty(*np.shape(rows), self.num_features, dtype=torch.float32)
        return torch.from_numpy(self._unscaled(np.asarray(rows))).float()

    def _check_features(self) -> None:
        self.check_complete()
        if not self.num_features:
            raise UnsupportedError(f"{self.manifest['method']['name']} stores no features. Pass the task and the data.")

    def _unscaled(self, rows: Rows) -> np.ndarray:  # (n, K)
        found = self._read(FEATURES, rows)
        if found.shape[-1] != self.num_features:
            raise StorageError(
                f"The shards of {self.path} have {found.shape[-1]} features, expected {self.num_features}. "
                f"{CHECK_ADVICE}"
            )
        return unhalved(found, self._read(EXPONENTS, rows)) if EXPONENTS in self._tensors else found

    # The fit.

    @cached_property
    def eigenvalues(self) -> np.ndarray:  # (M,)
        """Eigenvalues of the curvature, largest absolute value first; empty if the method computes none."""
        file = self.folder.listed(self.folder.fit / EIGENPAIRS)
        if file is None:
            return np.empty(0)
        found = np.asarray(file.read("eigenvalues"), dtype=np.float64)
        return found[np.argsort(-np.abs(found), kind="stable")]

    @property
    def delta(self) -> float | None:
        """δ, the number that replaces the eigenvalues of the tail; None without a tail."""
        cut = self.manifest["method"].get("cut")
        if not cut or not len(self.eigenvalues):
            return None
        try:
            return delta_of(Cut(**cut), np.abs(self.eigenvalues).tolist())
        except (TypeError, ValueError) as error:
            raise MismatchError(
                f"{self.folder.manifest_file} has a cut {cut} that cannot be used ({error}). Restore it."
            ) from None

    @property
    def reliability(self) -> float | None:
        """Rank agreement of self-influence between two fits on halves of the curvature sample; None if not measured."""
        return (self.manifest["method"].get("agreement") or {}).get("self_influence")

    @property
    def calibration(self) -> float | None:
        """Mean self-influence under the measured curvature, divided by that of the fit; None if not measured."""
        return self.manifest.get("calibration")
