"""The whole demo: train a network, score its training data with every method, compare them, write the report."""

import platform
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import eigentrace as et
from eigentrace.demo.experiment import Accuracy, Trained, train_on_wrong_labels
from eigentrace.demo.folder import RUN, claim, new_run, place, write
from eigentrace.demo.inputs import CLASSES, inputs_of, keep_network, keep_request, request_of
from eigentrace.demo.present import make_report
from eigentrace.demo.report import MethodRow, render_page
from eigentrace.errors import EigentraceWarning
from eigentrace.evaluate import retrieval
from eigentrace.loading import Inputs

KEEP = 50
DEFAULT_STEPS = 100


@dataclass(frozen=True)
class Summary:
    """The results of a demo, as written to summary.json."""

    methods: tuple[MethodRow, ...]
    accuracy: Accuracy
    seed: int
    steps: int
    sample: int
    parameters: int
    versions: dict[str, str]


def run_demo(
    out: Path,
    *,
    seed: int = 0,
    steps: int = DEFAULT_STEPS,
    sample: int = 512,
    epochs: int = 10,
    size: int = 6000,
    on_message: Callable[[str], None] = lambda message: None,
) -> Summary:
    """Find wrong labels by self-influence with six methods; write summary.json, report.html and a run.

    Args:
        out: Folder for the two files and the run; created if it does not exist. An earlier demo in it is replaced; if
            its run contains decisions, the run is renamed instead.
        seed: Seed of the changed labels, the training and the methods.
        steps: Number of Arnoldi steps. Fewer than 50 also lower the number of directions that Arnoldi keeps.
        sample: Number of training examples that the curvature is averaged over.
        epochs: Number of training epochs.
        size: Number of training images to use; the paper's experiment has 6,000.
        on_message: Called with progress messages.

    Raises:
        InputError: If `out` contains files that no demo wrote.
    """
    claim(out)
    trained = train_on_wrong_labels(seed, epochs, size, on_message)
    inputs = inputs_of(trained)
    task, data = inputs.task, inputs.data
    compare = _Comparison(data, trained.is_wrong, on_message)

    compare.add("Loss", None, lambda: et.Loss().fit(task, data))
    compare.add("TracIn", None, lambda: et.TracIn(checkpoints=trained.checkpoints).fit(task, data))
    compare.add("RandProj", KEEP, lambda: et.RandProj(keep=KEEP, seed=seed).fit(task, data))
    compare.add("RandSelect", KEEP, lambda: et.RandSelect(keep=KEEP, seed=seed).fit(task, data))
    on_message(f"Arnoldi: {steps} products with the curvature of {min(sample, len(data))} examples")
    settings: dict[str, Any] = {"steps": steps, "keep": min(KEEP, steps), "sample": sample, "seed": seed}
    fitted, seconds = compare.fit(lambda: et.Arnoldi(**settings).fit(task, data))
    keep = len(fitted.spectrum.eigenvalues)
    truncated = fitted.distill(tail=None)
    compare.score("Arnoldi (truncated)", keep, lambda: truncated.self_influence(data), seconds)
    with new_run(out) as folder:
        scoring = _start_run(folder, fitted, inputs, request_of(out / RUN, settings))
        scores = compare.score("Arnoldi (tail)", keep, scoring, seconds)
        keep_network(folder, trained)
        summary = Summary(
            methods=tuple(compare.rows),
            accuracy=trained.accuracy,
            seed=seed,
            steps=steps,
            sample=sample,
            parameters=trained.num_parameters,
            versions=_versions(),
        )
        _write(out, summary, trained, scores, fitted.spectrum)
        place(out, on_message)
    return summary


def _start_run(folder: Path, fitted: et.Fitted, inputs: Inputs, request: dict[str, Any]) -> Callable[[], Tensor]:
    """Create a run, and return a function that scores every example into it and returns their self-influence."""
    keep_request(folder, request)
    fitted.save(folder / "fit")

    def score() -> Tensor:  # (N,)
        how = request | {"classes": list(CLASSES)}
        run = et.score(fitted, inputs.data, folder, columns=inputs.columns, how=how)
        return torch.from_numpy(run.column("self_influence"))

    return score


class _Comparison:
    """A table of how well each method ranks the wrong labels, filled one method at a time."""

    def __init__(self, data: et.Data, is_wrong: Tensor, on_message: Callable[[str], None]) -> None:
        self.data, self.is_wrong, self.on_message = data, is_wrong, on_message
        self.rows: list[MethodRow] = []

    def add(self, name: str, keep: int | None, fit: Callable[[], Any]) -> None:
        """Fit a method, score the training data and add the result to the table."""
        fitted, seconds = self.fit(fit)
        self.score(name, keep, lambda: fitted.self_influence(self.data), seconds)

    def fit(self, fit: Callable[[], Any]) -> tuple[Any, float]:
        """Fit a method, reporting its warnings as messages; return the fit and the seconds it took."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", EigentraceWarning)
            fitted, seconds = _timed(fit)
        for warning in caught:
            if issubclass(warning.category, EigentraceWarning):
                self.on_message(f"Note: {warning.message}")
            else:
                warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
        return fitted, seconds

    def score(self, name: str, keep: int | None, scoring: Callable[[], Tensor], fit_seconds: float) -> Tensor:  # (N,)
        """Add a fitted method to the table, and return the self-influence of every example."""
        scores, score_seconds = _timed(scoring)
        quality = retrieval(scores, self.is_wrong)
        row = MethodRow(name, keep, 100 * quality.auc, 100 * quality.ap, fit_seconds, score_seconds)
        self.rows.append(row)
        self.on_message(
            f"{name}: AUC {row.auc:.1f}%, AP {row.ap:.1f}%, fitted in {fit_seconds:.1f} s, "
            f"scored in {score_seconds:.1f} s"
        )
        return scores


def _timed(work: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    result = work()
    return result, time.perf_counter() - start


def _write(out: Path, summary: Summary, trained: Trained, scores: Tensor, spectrum: Any) -> None:
    residuals = None if spectrum.residuals is None else _as_array(spectrum.residuals)
    report = make_report(trained, summary.methods, _as_array(scores), _as_array(spectrum.eigenvalues), residuals)
    write(out, asdict(summary), render_page(report))


def _as_array(values: Tensor) -> np.ndarray:
    return values.detach().cpu().double().numpy()


def _versions() -> dict[str, str]:
    return {
        "eigentrace": et.__version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }
