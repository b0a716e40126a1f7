"""The class Run: columns, features, rankings and explanations of a scored run, with or without the model."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from torch import Tensor

from eigentrace.data import Data, as_data
from eigentrace.errors import InputError, MismatchError, UnsupportedError
from eigentrace.fits.fitted import Fitted, Unit
from eigentrace.fits.load import load
from eigentrace.runs.explain import Explanation, explain
from eigentrace.runs.groups import groups
from eigentrace.runs.ranking import Ranking
from eigentrace.settings import check_counts, counted
from eigentrace.store.folder import Folder
from eigentrace.store.reader import RunReader
from eigentrace.store.same_data import check_loss, comparing, difference
from eigentrace.task.task import Task


class Run:
    """An opened run: the scores and features of a corpus.

    Reading needs no model. With the fit and the data, the run can also explain new examples, and scores are exact.
    `eigentrace.score` returns a run that has both; `eigentrace.open_run(path, task, data)` attaches them.
    """

    def __init__(self, folder: Folder, fitted: Fitted | None = None, data: Data | None = None) -> None:
        self.reader, self.fitted, self.data = RunReader(folder), fitted, data

    def __repr__(self) -> str:
        missing = "" if self.is_complete else f", {self.num_missing:,} not scored"
        features = f"{counted(self.num_features, 'feature')} each"
        name = self.manifest["method"]["name"]
        return f"<Run of {name} at {self.path}: {counted(self.num_rows, 'example')}{missing}, {features}>"

    @property
    def folder(self) -> Folder:
        """The paths and files of the run."""
        return self.reader.folder

    @property
    def path(self) -> Path:
        """The run's directory."""
        return self.reader.path

    @property
    def manifest(self) -> dict[str, Any]:
        """The run's manifest: method, model, data and settings."""
        return self.reader.manifest

    @property
    def num_rows(self) -> int:
        """N, the number of examples in the data, scored or not."""
        return self.reader.num_rows

    @property
    def num_features(self) -> int:
        """K, the number of features stored per example."""
        return self.reader.num_features

    @property
    def num_missing(self) -> int:
        """Number of examples without scores."""
        return self.reader.num_missing

    @property
    def is_complete(self) -> bool:
        """Return whether every example is scored."""
        return self.reader.is_complete

    @property
    def weights(self) -> Tensor:  # (K,)
        """One weight per feature: Σ weight φ(x) φ(z) is the score of two examples."""
        return self.reader.weights

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of all columns, those of the user last."""
        return self.reader.columns

    @property
    def ids(self) -> np.ndarray | None:
        """The id of each example, or None if the data has no ids."""
        if self.reader.ids is None:
            return None
        self.reader.check_held()
        return self.reader.ids.whole()

    def rows_of(self, ids: Sequence[Any]) -> np.ndarray:  # (n,)
        """Return the row of each id, as text or a number; raise InputError if an id is missing or not unique."""
        if self.ids is None:
            raise InputError(
                f"The run at {self.path} has no ids, so that examples are named by their row. Ids come from "
                "eigentrace.Data(..., ids=...), or from the column that `eigentrace fit --id` names."
            )
        known = self.ids.astype(str)
        return np.array([self._row_of(str(name), known) for name in ids], dtype=np.int64)

    def _row_of(self, name: str, known: np.ndarray) -> int:
        rows = np.flatnonzero(known == name)
        if len(rows) != 1:
            found = f"rows {', '.join(map(str, rows[:3]))}" if len(rows) else "no row"
            raise InputError(
                f"The id {name!r} is that of {found} of the run at {self.path}. Name an example by its row."
            )
        return int(rows[0])

    def column(self, name: str, rows: range | np.ndarray | None = None) -> np.ndarray:  # (N,) or (n,)
        """Return a column in row order, or its values at the given rows in the given order."""
        return self.reader.column(name, rows)

    def table(self) -> pa.Table:
        """Return all columns, including the user's, with one row per example."""
        return self.reader.table()

    def feature_chunks(self, rows_at_once: int | None = None) -> Iterator[tuple[int, Tensor]]:
        """Yield (first row, features (n, K)) in row order, with one chunk in memory at a time.

        Args:
            rows_at_once: Maximum number of rows in a chunk. If None, as many as fit into 32 MiB, at most 65,536.
        """
        if rows_at_once is not None:
            check_counts(1, rows_at_once=rows_at_once)
        return self.reader.feature_chunks(rows_at_once)

    def features_of(self, rows: np.ndarray) -> Tensor:  # (n, K)
        """Return the features of the given rows, in the given order."""
        return self.reader.features_of(rows)

    def self_influence(self, unit: Unit = None) -> Ranking:
        """Rank examples by self-influence, which is high for outliers, wrong labels and memorised examples.

        Args:
            unit: None, or "nats" for the predicted increase of an example's loss without the example.
        """
        return Ranking(self.reader.column("self_influence") / self.divisor(unit), self.reader.ids)

    def divisor(self, unit: Unit) -> float:
        """Return the number by which scores are divided to convert them to a unit."""
        if unit is None:
            return 1.0
        if unit != "nats" or not self.manifest["has_curvature"]:
            raise UnsupportedError(
                f"Scores of {self.manifest['method']['name']} cannot be converted to unit {unit!r}. The only unit is "
                "'nats', for methods with curvature."
            )
        return float(self.manifest["num_train"])

    def groups(self, column: str, influence: Any = None) -> pa.Table:
        """Return statistics of scores per value of a column; see `eigentrace.runs.groups.groups`."""
        return groups(self, column, influence)

    def explain(self, queries: Any, k: int = 10, **options: Any) -> Explanation:
        """Return the top k proponents and opponents of each query; see `eigentrace.runs.explain.explain`."""
        return explain(self.reader, queries, k, fitted=self.fitted, data=self.data, **options)

    def attached(self, task: Task | None, data: Any = None) -> "Run":
        """Return this run with its saved fit loaded for `task`, and with the data if given."""
        return self.with_fit(self.fitted if task is None else self._load(task), data, task)

    def with_fit(self, fitted: Fitted | None, data: Any = None, task: Task | None = None) -> "Run":
        """Return this run with the given fit, which need not be saved in it, and with the data if given."""
        if data is None:
            return Run(self.folder, fitted, self.data)
        given = as_data(data)
        self.check_data(given, task if fitted is None else fitted.task)
        if fitted is not None:
            check_loss(self.folder, fitted, given)
        return Run(self.folder, fitted, comparing(self.folder, given))

    def check_data(self, data: Data, task: Task | None = None) -> None:
        """Raise MismatchError if data differs from what was scored, by its ids, labels in memory and 64 examples."""
        if len(data) != self.num_rows:
            raise MismatchError(
                f"The data must have the {self.num_rows} examples of the run, got {len(data)}. Pass the data that was "
                "scored."
            )
        found = difference(self.folder, data, task)
        if found is not None or data.fingerprint() != self.manifest["data"]["fingerprint"]:
            where = "" if found is None else f" ({found})"
            raise MismatchError(
                f"The data differs from what the run at {self.path} scored{where}. Pass the data as it was scored, or "
                "score the current data into another directory."
            )

    def _load(self, task: Task) -> Fitted:
        if not self.folder.fit.exists():
            raise UnsupportedError(
                f"{self.manifest['method']['name']} saves no fit, so the run at {self.path} has none to load. Fit "
                "again and call eigentrace.score(fitted, data, path), which returns the run with fit and data."
            )
        self.folder.check_fit()
        return load(self.folder.fit, task)


def open_run(path: str | Path, task: Task | None = None, data: Any = None) -> Run:
    """Open a run; pass the task and the data to explain new examples and to get exact scores.

    Args:
        path: The run's directory.
        task: The task that the run was scored with.
        data: The examples that were scored.
    """
    run = Run(Folder(path))
    _ = run.manifest, run.reader.shards  # raises at once if the directory is not a run
    return run if task is None and data is None else run.attached(task, data)
