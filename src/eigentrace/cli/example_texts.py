"""Texts of a run's examples for the terminal, read from its dataset without the model."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from eigentrace.errors import EigentraceError
from eigentrace.loading import show_of
from eigentrace.rendering import Show
from eigentrace.runs.run import Run

Texts = Callable[[np.ndarray], list[str]]
"""Given rows, returns the text of each."""

# Opening a dataset reads the columns of ids and labels: datasets up to this size take at most a few seconds.
_MOST_BYTES = 500_000_000
_TASKS = ("text-classification", "seq2seq", "causal-lm")


def texts_of(run: Run, wanted: bool | None) -> tuple[Texts | None, str]:
    """Return a reader of the texts of a run, or None with the reason if there is one to report.

    Args:
        run: A run of a dataset of texts. The dataset is not opened for other runs, and no function is called.
        wanted: Whether to read the texts; None if the dataset is small.
    """
    asked = (run.reader.request or {}).get("input", {})
    if wanted is False or asked.get("task") not in _TASKS or "function" in asked:
        return None, ""
    try:
        if wanted is None and _size(Path(asked.get("resolved", {}).get("dataset", asked["dataset"]))) > _MOST_BYTES:
            return None, "The dataset is large: --texts reads and shows the texts."
        show = show_of(run.reader.request or {}, run.path)
    except (EigentraceError, OSError) as error:
        return None, f"The texts cannot be shown: {error}"
    return (None, "") if show is None else (_reader(show), "")


def _size(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


def _reader(show: Show) -> Texts:
    def texts(rows: np.ndarray) -> list[str]:
        shown = show([int(row) for row in rows])
        return [" → ".join(text for text in (one.text, one.target) if text is not None) for one in shown]

    return texts
