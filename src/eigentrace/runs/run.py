"""A run that was scored: columns, features and questions, with or without the model at hand."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from torch import Tensor

from eigentrace.data import Data, as_data
from eigentrace.errors import MismatchError, UnsupportedError
from eigentrace.fits.fitted import Fitted, Unit
from eigentrace.fits.load import load
from eigentrace.runs.explain import Explanation, explain
from eigentrace.runs.groups import groups
from eigentrace.runs.ranking import Ranking
from eigentrace.settings import check_counts
from eigentrace.store.folder import Folder
from eigentrace.store.reader import RunReader
from eigentrace.store.same_data import check_loss, comparing, difference
from eigentrace.task.task import Task


class Run:
    """A directory of scores, opened.

    Reading needs no model. With the fit and the data (`eigentrace.score` returns a run that has both, and
    `eigentrace.open_run(path, task, data)` attaches them), new queries can be asked about and answers are exact.
    """

    def __init__(self, folder: Folder, fitted: Fitted | None = None, data: Data | None = None) -> None:
        self.reader, self.fitted, self.data = RunReader(folder), fitted, data

    def __repr__(self) -> str:
        missing = "" if self.is_complete else f", {self.num_missing:,} missing"
        return f"Run({str(self.path)!r}, {self.num_rows:,} examples{missing}, {self.num_features} features each)"

    @property
    def folder(self) -> Folder:
        """The files of the run."""
        return self.reader.folder

    @property
    def path(self) -> Path:
        """The run's directory."""
        return self.reader.path

    @property
    def manifest(self) -> dict[str, Any]:
        """What was scored, with what, and how."""
        return self.reader.manifest

    @property
    def num_rows(self) -> int:
        """N, the examples of the data, scored or not."""
        return self.reader.num_rows

    @property
    def num_features(self) -> int:
        """K, numbers stored per example."""
        return self.reader.num_features

    @property
    def num_missing(self) -> int:
        """Examples that are not scored yet."""
        return self.reader.num_missing

    @property
    def is_complete(self) -> bool:
        """Tell whether every example is scored."""
        return self.reader.is_complete

    @property
    def weights(self) -> Tensor:  # (K,)
        """One weight per feature: Σ weight φ(x) φ(z) is the score of two examples."""
        return self.reader.weights

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns there are, those of the user last."""
        return self.reader.columns

    @property
    def ids(self) -> np.ndarray | None:
        """The user's name for each example, if there are any."""
        return None if self.reader.ids is None else self.reader.ids.whole()

    def column(self, name: str, rows: range | np.ndarray | None = None) -> np.ndarray:  # (N,) or (n,)
        """Return one column, in row order, or that of some rows, in the order asked for."""
        return self.reader.column(name, rows)

    def table(self) -> pa.Table:
        """Return everything but the features, one row per example."""
        return self.reader.table()

    def feature_chunks(self, rows_at_once: int | None = None) -> Iterator[tuple[int, Tensor]]:
        """Yield (first row, features (n, K)) in row order, holding one chunk at a time.

        Args:
            rows_at_once: Rows of a chunk at most; as many as make 32 MiB if None.
        """
        if rows_at_once is not None:
            check_counts(1, rows_at_once=rows_at_once)
        return self.reader.feature_chunks(rows_at_once)

    def features_of(self, rows: np.ndarray) -> Tensor:  # (n, K)
        """Read the features of some rows, in the order asked for."""
        return self.reader.features_of(rows)

    def self_influence(self, unit: Unit = None) -> Ranking:
        """Return how much every example carries itself: high for outliers, wrong labels, memorised examples.

        Args:
            unit: None, or "nats": by how much its loss would rise without it.
        """
        return Ranking(self.reader.column("self_influence") / self.divisor(unit), self.reader.ids)

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

    def groups(self, column: str, influence: Any = None) -> pa.Table:
        """Sum self-influence, and influence if given, by a column; see `eigentrace.runs.groups.groups`."""
        return groups(self, column, influence)

    def explain(self, queries: Any, k: int = 10, **options: Any) -> Explanation:
        """Find the strongest proponents and opponents of queries; see `eigentrace.runs.explain.explain`."""
        return explain(self.reader, queries, k, fitted=self.fitted, data=self.data, **options)

    def attached(self, task: Task | None, data: Any = None) -> "Run":
        """Return this run with its fit at hand, and the data if given."""
        return self.with_fit(self.fitted if task is None else self._load(task), data, task)

    def with_fit(self, fitted: Fitted | None, data: Any = None, task: Task | None = None) -> "Run":
        """Return this run with a fit at hand that it need not have saved, and the data if given."""
        if data is None:
            return Run(self.folder, fitted, self.data)
        given = as_data(data)
        self.check_data(given, task if fitted is None else fitted.task)
        if fitted is not None:
            check_loss(self.folder, fitted, given)
        return Run(self.folder, fitted, comparing(self.folder, given))

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

    def _load(self, task: Task) -> Fitted:
        if not self.folder.fit.exists():
            raise UnsupportedError(
                f"{self.manifest['method']['name']} saves no fit, so the run at {self.path} has none to load. Fit "
                "again; eigentrace.score(fitted, data, path) returns the run with the fit and the data at hand."
            )
        return load(self.folder.fit, task)


def open_run(path: str | Path, task: Task | None = None, data: Any = None) -> Run:
    """Open a run; with the task and the data it can also be asked about new examples, and answers exactly.

    Args:
        path: The run's directory.
        task: The model it was made with.
        data: The examples that were scored.
    """
    run = Run(Folder(path))
    _ = run.manifest, run.reader.shards  # a directory that is no run is told at once
    return run if task is None and data is None else run.attached(task, data)
