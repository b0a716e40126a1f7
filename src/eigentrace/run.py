"""A run that was scored: columns, features and questions, with or without the model at hand."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from eigentrace.data import Data, as_data
from eigentrace.ensemble import load
from eigentrace.errors import InputError, MismatchError, StorageError, UnsupportedError
from eigentrace.explain import Explanation, explain
from eigentrace.fitted import Fitted, Unit
from eigentrace.groups import groups
from eigentrace.settings import check_counts
from eigentrace.store import Folder, Shard
from eigentrace.store.columns import Names
from eigentrace.store.shards import gaps, names_in, read_column, read_rows, unhalved
from eigentrace.store.table import ID
from eigentrace.task import Task
from eigentrace.terms import EXPONENTS, FEATURES
from eigentrace.unchanged import check_loss, comparing, difference

_SCORED = ("loss", "gradient_norm", "self_influence", "label", "prediction", "confidence")


class Run:
    """A directory of scores, opened.

    Reading needs no model. With the fit and the data (`eigentrace.score` returns a run that has both, and
    `eigentrace.open_run(path, task, data)` attaches them), new queries can be asked about and answers are exact.
    """

    def __init__(self, folder: Folder, fitted: Fitted | None = None, data: Data | None = None) -> None:
        self.folder, self.fitted, self.data = folder, fitted, data

    def __repr__(self) -> str:
        missing = "" if self.is_complete else f", {self.num_missing:,} missing"
        return f"Run({str(self.path)!r}, {self.num_rows:,} examples{missing}, {self.num_features} features each)"

    @property
    def path(self) -> Path:
        """The run's directory."""
        return self.folder.path

    @property
    def manifest(self) -> dict[str, Any]:
        """What was scored, with what, and how."""
        return self.folder.manifest

    @property
    def num_rows(self) -> int:
        """N, the examples of the data, scored or not."""
        return int(self.manifest["data"]["rows"])

    @property
    def num_features(self) -> int:
        """K, numbers stored per example."""
        return int(self.manifest["features"]["count"])

    @property
    def num_missing(self) -> int:
        """Examples that are not scored yet."""
        return sum(len(rows) for rows in gaps(self.shards, self.num_rows))

    @property
    def is_complete(self) -> bool:
        """Tell whether every example is scored."""
        return self.num_missing == 0

    @cached_property
    def shards(self) -> tuple[Shard, ...]:
        """What is on record as whole, as of when the run was opened."""
        return self.folder.record.read()

    @property
    def weights(self) -> Tensor:  # (K,)
        """One weight per feature: Σ weight φ(x) φ(z) is the score of two examples."""
        return self.folder.weights

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns there are, those of the user last."""
        held = names_in(self.folder.record.file(self.shards[0])) if self.shards else ()
        own = tuple(name for name in _SCORED if ("square_norm" if name == "gradient_norm" else name) in held)
        return own + tuple(name for name in self._user_columns if name != ID)

    @cached_property
    def _user_columns(self) -> tuple[str, ...]:
        return tuple(pq.read_schema(self.folder.columns_file).names) if self.folder.columns_file.exists() else ()

    @cached_property
    def names(self) -> Names | None:
        """The user's names of the examples, if there are any, on disk: for runs of very many."""
        return Names(self.folder.columns_file, ID) if ID in self._user_columns else None

    @cached_property
    def ids(self) -> np.ndarray | None:
        """The user's name for each example, if there are any."""
        return None if self.names is None else self.names.whole()

    def column(self, name: str) -> np.ndarray:  # (N,)
        """Return one column, in row order."""
        if name not in self.columns:
            raise InputError(f"This run has no column {name!r}. It has: {', '.join(self.columns)}.")
        return self._scored(name) if name in _SCORED else Names(self.folder.columns_file, name).whole()

    def _scored(self, name: str) -> np.ndarray:
        self._check_complete()
        held = "square_norm" if name == "gradient_norm" else name
        parts = [read_column(self.folder.record.file(shard), held).numpy() for shard in self.shards]
        found = np.concatenate(parts)
        return np.sqrt(found) if name == "gradient_norm" else found

    @cached_property
    def digests(self) -> np.ndarray | None:  # (N,) int64
        """A hash of each example's content, by which equal ones are found."""
        self._check_complete()
        files = [self.folder.record.file(shard) for shard in self.shards]
        if not all("digest" in names_in(file) for file in files):
            return None
        return np.concatenate([read_column(file, "digest").numpy() for file in files])

    def table(self) -> pa.Table:
        """Return everything but the features, one row per example."""
        self._check_complete()
        try:
            return pq.read_table(self.folder.table_file, page_checksum_verification=True)
        except (pa.ArrowInvalid, OSError) as error:
            raise StorageError(
                f"{self.folder.table_file} cannot be read ({error}). `eigentrace check RUN --repair` sets it aside if "
                "it is damaged, and the command that scored the run writes it again."
            ) from None

    def feature_chunks(self, rows_at_once: int = 65_536) -> Iterator[tuple[int, Tensor]]:
        """Yield (first row, features (n, K)) in row order, holding one chunk at a time."""
        check_counts(1, rows_at_once=rows_at_once)
        self._check_complete()
        if not self.num_features:
            raise UnsupportedError(f"{self.manifest['method']['name']} stores no features: ask with the model at hand.")
        for shard in self.shards:
            path = self.folder.record.file(shard)
            is_scaled = EXPONENTS in names_in(path)
            for low in range(0, shard.stop - shard.start, rows_at_once):
                high = min(low + rows_at_once, shard.stop - shard.start)
                chunk = read_column(path, FEATURES, low, high)
                yield (
                    shard.start + low,
                    unhalved(chunk, read_column(path, EXPONENTS, low, high)) if is_scaled else chunk,
                )

    def features_of(self, rows: np.ndarray) -> Tensor:  # (n, K)
        """Read the features of some rows, in the order asked for."""
        outside = rows[(rows < 0) | (rows >= self.num_rows)]
        if len(outside):
            raise InputError(f"Row {outside[0]} is not in this run, which has rows 0 to {self.num_rows - 1}.")
        self._check_complete()
        home = np.searchsorted([shard.start for shard in self.shards], rows, side="right") - 1
        result = torch.empty(len(rows), self.num_features, dtype=torch.float32)
        for number in np.unique(home).tolist():
            shard, here = self.shards[number], np.flatnonzero(home == number)
            path, places = self.folder.record.file(shard), (rows[here] - shard.start).tolist()
            found = read_rows(path, FEATURES, places)
            if EXPONENTS in names_in(path):
                found = unhalved(found, read_rows(path, EXPONENTS, places))
            result[here] = found.float()
        return result

    def self_influence(self, unit: Unit = None) -> "Ranking":
        """Return how much every example carries itself: high for outliers, wrong labels, memorised examples.

        Args:
            unit: None, or "nats": by how much its loss would rise without it.
        """
        return Ranking(self._scored("self_influence") / self.divisor(unit), self.names)

    def divisor(self, unit: Unit) -> float:
        """Return what scores are divided by to be in a unit."""
        if unit is None:
            return 1.0
        if unit != "nats" or not self.manifest["has_curvature"]:
            raise UnsupportedError(
                f"Scores of {self.manifest['method']['name']} have no unit {unit!r}: only methods with curvature "
                "estimate a change of loss, in 'nats'."
            )
        return float(self.manifest["num_train"])

    def groups(self, column: str, influence: Any = None) -> Any:
        """Sum self-influence, and influence if given, by a column; see `eigentrace.groups.groups`."""
        return groups(self, column, influence)

    def explain(self, queries: Any, k: int = 10, **options: Any) -> Explanation:
        """Find the strongest proponents and opponents of queries; see `eigentrace.explain.explain`."""
        return explain(self, queries, k, **options)

    def attached(self, task: Task | None, data: Any = None) -> "Run":
        """Return this run with its fit at hand, and the data if given."""
        fitted = self.fitted if task is None else load(self.folder.fit, task)
        given = self.data if data is None else as_data(data)
        if given is not None and data is not None:
            self.check_data(given, task if task is not None or fitted is None else fitted.task)
            if fitted is not None:
                check_loss(self.folder, fitted, given)
            given = comparing(self.folder, given)
        return Run(self.folder, fitted, given)

    def check_data(self, data: Data, task: Task | None = None) -> None:
        """Stop if data is not what was scored, as far as ids, labels at hand and a look at 64 examples tell."""
        if len(data) != self.num_rows:
            raise MismatchError(f"The run has {self.num_rows} examples and the data {len(data)}: give what was scored.")
        found = difference(self.folder, data, task)
        if found is not None or data.fingerprint() != self.manifest["data"]["fingerprint"]:
            where = "" if found is None else f" ({found})"
            raise MismatchError(
                f"The data is not what the run at {self.path} scored: its examples differ{where}. Give the data as it "
                "was scored, or score what it is now into another directory."
            )

    def _check_complete(self) -> None:
        if not self.is_complete:
            raise InputError(
                f"The run at {self.path} is not complete: {self.num_missing:,} of {self.num_rows:,} examples are "
                "missing. Continue it with the call or command that began it."
            )


@dataclass(frozen=True)
class Ranking:
    """One number per example, and the examples in the order of it."""

    values: np.ndarray  # (N,)
    names: Names | None = None

    @cached_property
    def ids(self) -> np.ndarray | None:  # (N,)
        """The user's name for each example, if there are any."""
        return None if self.names is None else self.names.whole()

    @property
    def rows(self) -> np.ndarray:  # (N,)
        """The row of each value, counted from 0."""
        return np.arange(len(self.values))

    def top(self, n: int = 20) -> "Top":
        """Return the n highest, the highest first; equal ones in row order."""
        check_counts(1, n=n)
        n = min(n, len(self.values))
        order = np.where(np.isnan(self.values), -np.inf, self.values)
        # Only a few of many are asked for: sort no more than may be among them.
        bound = np.partition(order, len(order) - n)[len(order) - n]
        candidates = np.flatnonzero(order >= bound)
        rows = candidates[np.argsort(-order[candidates], kind="stable")][:n]
        return Top(rows, self.values[rows], None if self.names is None else self.names.of(rows))

    def quantile(self, q: Any) -> Any:
        """Return the value below which a share q of the examples lies."""
        return np.nanquantile(self.values, q)


@dataclass(frozen=True)
class Top:
    """The first of a ranking."""

    rows: np.ndarray  # (n,)
    scores: np.ndarray  # (n,)
    ids: np.ndarray | None  # (n,)

    def __len__(self) -> int:
        return len(self.rows)

    def __str__(self) -> str:
        names = self.rows if self.ids is None else self.ids
        return "\n".join(f"{score:12.5g}  {name}" for score, name in zip(self.scores, names, strict=True))


def open_run(path: str | Path, task: Task | None = None, data: Any = None) -> Run:
    """Open a run; with the task and the data it can also be asked about new examples, and answers exactly.

    Args:
        path: The run's directory.
        task: The model it was made with.
        data: The examples that were scored.
    """
    run = Run(Folder(path))
    _ = run.manifest, run.shards  # a directory that is no run is told at once
    return run if task is None and data is None else run.attached(task, data)
