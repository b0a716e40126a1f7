"""The scores of the paper's tables on digits, and ours: how well they find wrong labels, and how fast."""

import argparse
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from statistics import mean, median, stdev
from typing import Any

import torch
from torch import Tensor

import eigentrace as et
from eigentrace.errors import ConvergenceWarning, EigentraceWarning, InputError
from eigentrace.evaluate import retrieval
from experiments.digits.parts.large_network import with_small_top
from experiments.digits.parts.noise import NoisyDigits, Subject, dataset
from experiments.shared.frame import Part
from harness.command import positive
from harness.measure import Cell, reason, with_seconds
from harness.record import Notes, Record, shown, table

Rows = Iterator[tuple[str, Callable[[], Cell]]]

FRESH, FIXED, ALL = "Arnoldi", "Arnoldi, one sample", "Arnoldi, all digits"
TAIL, TAIL_ALL = "Arnoldi, tail", "Arnoldi, tail, all digits"
LISSA, LISSA_TOP = "LiSSA", "LiSSA, 10% of Θ"
FAMILIES = (
    *(LISSA, LISSA_TOP, "TracIn", "RandProj", "RandSelect"),
    *(FRESH, FIXED, ALL, TAIL, TAIL_ALL, "Loss", "Mean loss"),
)
"""Names of methods in the order of the tables; rows add a setting, as in "RandProj, K=10"."""


@dataclass(frozen=True)
class Size:
    """Sizes of the methods."""

    keeps: tuple[int, ...] = (10, 100)
    """K."""
    steps: int = 200
    sample: int = 512
    draws: int = 20
    """Seeds of RandProj and RandSelect."""
    depths: tuple[int, int] = (10, 100)
    """r of LiSSA on all and on a tenth of the parameters."""


SMALL = Size(keeps=(1, 3), steps=4, sample=32, draws=2, depths=(1, 2))


def lissa_option(parser: argparse.ArgumentParser) -> None:
    """Add the option for the number of digits that LiSSA is scored on."""
    parser.add_argument(
        "--lissa-rows", type=positive, default=640, help="random digits that LiSSA scores, and others are judged on too"
    )


QUALITY = ("auc", "ap")
SHARED = ("shared_auc", "shared_ap")
"""AUC and AP on the digits that LiSSA scores."""


@dataclass(frozen=True)
class Timed:
    """The result of a call, its time, and its warnings."""

    value: Any
    seconds: float
    warning: str | None
    unsettled: str | None
    """Warnings that the last eigenpairs have not converged, which concern only scores that use these."""


def timed(work: Callable[[], Any], device: torch.device) -> Timed:
    """Time a call, including the device's queue; warnings of eigentrace are recorded instead of printed."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", EigentraceWarning)
        value, seconds = with_seconds(work, device)
    told = [w for w in caught if issubclass(w.category, EigentraceWarning)]
    unsettled = [str(w.message) for w in told if issubclass(w.category, ConvergenceWarning)]
    others = [str(w.message) for w in told if not issubclass(w.category, ConvergenceWarning)]
    return Timed(value, seconds, next(iter(others), None), next(iter(unsettled), None))


def once(work: Callable[[], Any]) -> Callable[[], Any]:
    """Return a function that does some work on the first call only; a failure is raised again on later calls."""

    @cache
    def outcome() -> tuple[Any, str | None]:
        try:
            return work(), None
        except Exception as error:  # stored as text, since an exception keeps the tensors of the failed call alive
            return None, reason(error)

    def ask() -> Any:
        value, failure = outcome()
        if failure is not None:
            raise RuntimeError(failure)
        return value

    return ask


def gradient_rows(subject: Subject, size: Size) -> Rows:
    """Rows of gradient similarity: exact, at one and at all checkpoints; random projections; random parameters."""
    task, checkpoints = subject.task, subject.checkpoints
    yield "TracIn, C=1", lambda: _measured(subject, [et.TracIn()])
    yield f"TracIn, C={len(checkpoints)}", lambda: _measured(subject, [et.TracIn(checkpoints=checkpoints)])
    for make in (et.RandProj, et.RandSelect):
        for keep in size.keeps:
            methods = [make(keep=min(keep, task.layout.numel), seed=seed) for seed in range(size.draws)]
            yield f"{make.__name__}, K={keep}", lambda methods=methods: _measured(subject, methods)  # type: ignore[misc]


def truncated_arnoldi(size: Size, seed: int, sample: int | None) -> et.Arnoldi:
    """The paper's estimator, but all products on one sample: the Hessian's top eigenpairs, without a tail."""
    return et.Arnoldi(
        *(size.steps, max(size.keeps)), curvature="hessian", tail=None, sample=sample, seed=seed, compile=False
    )


def own_arnoldi(size: Size, seed: int, sample: int | None) -> et.Arnoldi:
    """The estimator of eigentrace: Gauss-Newton with a tail."""
    return et.Arnoldi(size.steps, max(size.keeps), sample=sample, seed=seed, compile=False)


def arnoldi_rows(subject: Subject, size: Size, *, every: bool = True) -> Rows:
    """Rows of the paper's estimator and ours, for several K of one fit each; `every` adds other samples."""
    seed, sample = subject.seed, size.sample
    methods = {FRESH: et.Arnoldi.as_published(size.steps, max(size.keeps), sample, seed=seed, compile=False)}
    if every:
        methods |= {FIXED: truncated_arnoldi(size, seed, sample)}
        methods |= {ALL: truncated_arnoldi(size, seed, None)}
    methods |= {TAIL: own_arnoldi(size, seed, sample)}
    if every:
        methods |= {TAIL_ALL: own_arnoldi(size, seed, None)}
    for family, method in methods.items():
        fit = once(partial(timed, partial(method.fit, subject.task, subject.digits.data), _device(subject)))
        for keep in size.keeps:
            yield f"{family}, K={keep}", lambda fit=fit, keep=keep: _cut(subject, fit(), keep)  # type: ignore[misc]


def lissa_rows(subject: Subject, size: Size, *, top: bool = True) -> Rows:
    """Rows of LiSSA, one solve per gradient, on the shared digits; `top` adds that on a tenth of the parameters."""
    yield f"{LISSA}, r={size.depths[0]}", lambda: _lissa(subject, subject.task, size.depths[0])
    if top:
        model = with_small_top(subject.model)
        task = et.classification(model, params="top 10%", l2=subject.recipe.l2)
        yield f"{LISSA_TOP}, r={size.depths[1]}", lambda: _lissa(subject, task, size.depths[1])


def loss_rows(subject: Subject, size: Size) -> Rows:
    """Rows of the baselines that need no gradient."""
    yield "Loss, C=1", lambda: _measured(subject, [et.Loss()])
    checkpoints = subject.checkpoints
    yield f"Mean loss, C={len(checkpoints)}", lambda: _measured(subject, [et.MeanLoss(checkpoints)])


def measure(part: Part, subject: Subject, rows: Rows) -> None:
    """Measure the requested rows, one number per row and seed."""
    for name, work in rows:
        part.cell(f"{name}, seed {subject.seed}", work)


def over_seeds(records: Iterable[Record]) -> dict[str, Cell]:
    """Average the cells of some parts over seeds, by row in the order of the tables.

    With several seeds `*_sd` is the standard deviation over them, and `*_draws` the mean of that over draws.
    """
    by_row: dict[str, list[Cell]] = {}
    for record in records:
        for name, cell in record["cells"].items():
            by_row.setdefault(name.rpartition(", seed ")[0], []).append(cell)
    return {name: _averaged(by_row[name]) for name in sorted(by_row, key=_place)}


def trainings(records: Iterable[Record]) -> list[str]:
    """Return a note on the number of trainings, and on what standard deviations are taken over."""
    seeds = {name.rpartition(", seed ")[2] for record in records for name in record["cells"]}
    if len(seeds) < 2:
        return []
    text = f"Means over {len(seeds)} trainings, each with noise and first weights of its own"
    return [f"{text}, ± their standard deviation over trainings.", ""]


def quality(cell: Cell | None, key: str, notes: Notes | None = None) -> str:
    """Format AUC or AP in percent, with the standard deviation over draws or seeds if there are several.

    A row has one note, marked where `notes` is given.
    """
    if cell is None or (notes is None and key not in cell):
        return "–"
    text = f"{cell[key]:.1f}" if notes is None else shown(cell, key, ".1f", notes)
    return f"{text} ± {cell[f'{key}_sd']:.1f}" if f"{key}_sd" in cell else text


def seconds(cell: Cell, key: str) -> str:
    """Format a time with two significant digits."""
    value = cell.get(key)
    return "–" if value is None else f"{value:.2g}" if value < 10 else f"{value:,.0f}"


def accuracies(cell: Cell, paper: Mapping[str, float]) -> list[str]:
    """Return the table of the network's accuracy, with the paper's."""
    names = {
        "accuracy_train_given": "training digits, given labels",
        "accuracy_test_given": "test digits, a fifth relabeled too",
        "accuracy_test_true": "test digits, true labels",
    }
    rows = [(text, quality(cell, key), quality(dict(paper), key)) for key, text in names.items()]
    return table(("accuracy of the network (%)", "here", "paper"), rows)


def family_of(row: str) -> str:
    """Return the method of a row, without its setting."""
    return row.rpartition(", ")[0]


def setting_of(row: str) -> int:
    """Return the number in a row's setting."""
    return int(row.rpartition("=")[2])


def _place(row: str) -> tuple[int, int]:
    family = family_of(row)
    return (FAMILIES.index(family), setting_of(row)) if family in FAMILIES else (len(FAMILIES), 0)


def _averaged(cells: list[Cell]) -> Cell:
    good = [cell for cell in cells if "failed" not in cell]
    if len(good) < 2:
        return (good or cells)[0]
    keys = [key for key, value in good[0].items() if isinstance(value, int | float)]
    means = {key: mean(cell[key] for cell in good if key in cell) for key in keys}
    judged = [key for key in (*QUALITY, *SHARED) if all(key in cell for cell in good)]
    drawn = {f"{key}_draws": means[f"{key}_sd"] for key in judged if f"{key}_sd" in means}
    over_trainings = {f"{key}_sd": stdev(cell[key] for cell in good) for key in judged}
    return good[0] | means | drawn | over_trainings | {"trainings": len(good)}


def _measured(subject: Subject, methods: list[Any]) -> Cell:
    """Fit and score; several draws of a method are summarised by mean, standard deviation and median time."""
    data, device = subject.digits.data, _device(subject)
    fits = (timed(partial(method.fit, subject.task, data), device) for method in methods)
    cells = [_scored(subject, fit.value, fit, warm=len(methods) == 1) for fit in fits]
    if len(cells) == 1:
        return cells[0]
    judged = [key for key in (*QUALITY, *SHARED) if key in cells[0]]
    spread = {f"{key}_sd": stdev(cell[key] for cell in cells) for key in judged}
    quality_of = {key: mean(cell[key] for cell in cells) for key in judged}
    return quality_of | spread | {k: median(cell[k] for cell in cells) for k in ("seconds", "fit_seconds")}


def _cut(subject: Subject, fit: Timed, keep: int) -> Cell:
    found = len(fit.value.spectrum.eigenvalues)  # fewer if no more curvature is left
    cell = _scored(subject, fit.value.distill(keep=min(keep, found)), fit)
    told = [text for text in (fit.warning, fit.unsettled if keep >= found else None) if text is not None]
    return cell | {"note": " ".join(told)} if told else cell


def _scored(subject: Subject, fitted: et.Fitted, fit: Timed, *, warm: bool = True) -> Cell:
    if warm:
        warm_up(fitted, subject.digits)
    scores = timed(lambda: fitted.self_influence(subject.digits.data), _device(subject))
    cell = _judged(scores.value, subject) | {"seconds": scores.seconds, "fit_seconds": fit.seconds}
    return cell if fit.warning is None else cell | {"note": fit.warning}


def warm_up(fitted: et.Fitted, digits: NoisyDigits, count: int = 64) -> None:
    """Score a few digits, to keep one-time costs out of the next measurement."""
    fitted.self_influence(dataset(digits.images[:count], digits.labels[:count]))


def _lissa(subject: Subject, task: et.Task, depth: int) -> Cell:
    digits, device, rows = subject.digits, _device(subject), subject.shared
    if rows is None:
        raise InputError("LiSSA scores the digits that all methods share: draw them with subject.sharing(count).")
    number = len(digits.labels)
    fit = timed(lambda: et.Lissa(depth=depth, curvature="hessian", seed=subject.seed).fit(task, digits.data), device)
    some = dataset(digits.images[rows], digits.labels[rows])
    warm_up(fit.value, digits, 1)
    scores = timed(lambda: fit.value.self_influence(some), device)
    cell = _quality(scores.value, digits.is_wrong[rows], QUALITY) | _quality(
        scores.value, digits.is_wrong[rows], SHARED
    )
    cell |= {"fit_seconds": fit.seconds, "rows": len(rows), "seconds": scores.seconds * number / len(rows)}
    if len(rows) < number:
        cell |= {"note": f"AUC and AP on {len(rows):,} random digits; T is that of these, times {number / len(rows):g}"}
    return cell


def _judged(scores: Tensor, subject: Subject) -> Cell:
    """Measure how well scores find the wrong labels among all digits, and among those that are shared."""
    scores, is_wrong = scores.cpu(), subject.digits.is_wrong.cpu()
    cell = _quality(scores, is_wrong, QUALITY)
    if subject.shared is None:
        return cell
    rows = subject.shared.cpu()
    return cell | _quality(scores[rows], is_wrong[rows], SHARED)


def _quality(scores: Tensor, is_wrong: Tensor, keys: tuple[str, str]) -> Cell:
    found = retrieval(scores.cpu(), is_wrong.cpu())
    return dict(zip(keys, (100 * found.auc, 100 * found.ap), strict=True))


def _device(subject: Subject) -> torch.device:
    return subject.digits.images.device
