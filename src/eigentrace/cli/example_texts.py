"""Texts of a run's examples for the terminal, read from its dataset without the model."""

from collections.abc import Callable
from glob import has_magic
from itertools import islice
from pathlib import Path

import numpy as np

from eigentrace.errors import EigentraceError, InputError
from eigentrace.formats.files import find_files
from eigentrace.loading import show_of
from eigentrace.rendering import Show
from eigentrace.runs.run import Run

Texts = Callable[[np.ndarray], list[str]]
"""Given rows, returns the text of each."""

# Opening a dataset reads the columns of ids and labels: datasets up to this size take at most a few seconds.
# A path that a run names may be anything, such as a pipe or the whole disk, which are not read unasked.
_MOST_BYTES, _MOST_FILES = 500_000_000, 1000
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
        path = Path(asked.get("resolved", {}).get("dataset", asked["dataset"]))
        if wanted is None and not _is_small(path):
            return None, f"{path} is large or no regular file or folder: --texts reads and shows its texts."
        show = show_of(run.reader.request or {}, run.path)
    except (EigentraceError, OSError) as error:
        return None, f"The texts cannot be shown: {error}"
    return (None, "") if show is None else (_reader(show), "")


def _is_small(path: Path) -> bool:
    """Return whether a path is a regular file, a pattern or a folder of few files, of a limited size, or not there."""
    if not path.exists():
        if not has_magic(str(path)):
            return True
        try:
            files = list(find_files(path, most=_MOST_FILES).paths)
        except InputError:
            return False
    else:
        files = list(islice(path.rglob("*"), _MOST_FILES + 1)) if path.is_dir() else [path]
    regular = [file for file in files if file.is_file()]
    return bool(regular) and len(files) <= _MOST_FILES and sum(f.stat().st_size for f in regular) <= _MOST_BYTES


def _reader(show: Show) -> Texts:
    def texts(rows: np.ndarray) -> list[str]:
        shown = show([int(row) for row in rows])
        return [" → ".join(text for text in (one.text, one.target) if text is not None) for one in shown]

    return texts
