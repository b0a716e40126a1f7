"""Images ranked by self-influence, and their proponents and opponents (figures of the paper's appendix).

    python -m experiments.images.image_exemplars --small                                # digits, on a CPU
    python -m experiments.images.image_exemplars --data FOLDER                          # CIFAR-10 and photos, on a GPU
    python -m experiments.images.image_exemplars --data FOLDER --parts photos --photos-figure   # draws the photos, too

Results merge into docs/results/data/image_exemplars.json.
"""

import argparse
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import TensorDataset

import eigentrace as et
from eigentrace.errors import EigentraceWarning
from eigentrace.evaluate import retrieval, spearman
from experiments.images.parts.cifar import needed
from experiments.images.parts.exemplar_numbers import answers, bands, deciles, predicted_right
from experiments.images.parts.exemplar_page import ABOUT, NORMALISATIONS, figures, tables
from experiments.images.parts.exemplar_problems import PHOTOS, Pictures, cifar, photo_pictures, resnet20
from experiments.images.parts.resnet20 import FILES
from experiments.shared.claims import (
    NOT_SEEN,
    SEEN,
    UNDECIDED,
    Claim,
    Finding,
    Pair,
    Records,
    Sample,
    number,
    order,
    paired,
    percent,
)
from experiments.shared.frame import Experiment, Session, main
from harness.measure import Cell, synchronize

TOP_LABELS = 3
"""Number of most probable labels. The paper takes ten of a thousand; here there are ten classes."""
ACROSS, SHOWN_QUERIES = 6, 2
"""Numbers of images in a row, and of queries in a figure."""
_BATCH = 1024
"""Batch size: the paper's sample of 512 images in one batch, ours in two."""

FITS = {
    "paper": et.Arnoldi.as_published(steps=200, keep=10, batch=512, compile=False),
    "ours": et.Arnoldi(steps=200, keep=50, sample=2048, compile=False),
}
SMALL_FITS = {
    "paper": et.Arnoldi.as_published(steps=20, keep=10, batch=64),
    "ours": et.Arnoldi(steps=20, keep=12, sample=64),
}


def measure(name: str, make: Callable[[Session], Pictures], session: Session) -> None:
    """Score all images of one problem, and explain some of them."""
    if session.device.type == "cuda":
        torch.backends.cudnn.allow_tf32 = False  # small losses need full float32 precision
    pictures = make(session)
    fits = SMALL_FITS if session.small else FITS
    num_queries = 20 if session.small else 100
    settings = pictures.settings | {"fits": {k: repr(v) for k, v in fits.items()}, "queries": num_queries}
    part = session.part(name, pictures.title, settings, classes=list(pictures.classes), **pictures.facts)
    uri = pictures.uri if name != "photos" or session.settings.photos_figure else None
    data = et.Data(TensorDataset(pictures.inputs, pictures.labels), batch_size=_BATCH)
    task = et.classification(pictures.model)
    queries = np.random.default_rng(0).choice(len(pictures), min(num_queries, len(pictures)), replace=False)
    with tempfile.TemporaryDirectory() as folder:

        @cache
        def scored(fit: str) -> tuple[et.Run, Cell]:
            return _scored(fits[fit], task, data, Path(folder) / fit, session.device)

        for fit in fits:
            part.cell(f"ranked/{fit}", lambda fit=fit: _ranked_by(scored(fit), pictures, uri))  # type: ignore[misc]
        part.cell("ranked/loss", lambda: _ranked_by_loss(task, data, pictures))
        for fit in fits:
            for normalize in NORMALISATIONS[fit]:
                drawn = uri if name != "cifar_noisy" else None  # one figure of CIFAR-10 is enough
                work = partial(_explained, scored, fit, normalize, queries, pictures, drawn)
                part.cell(f"explained/{fit}/{normalize or 'none'}", work)


def _scored(
    method: et.Arnoldi, task: et.Task, data: et.Data, folder: Path, device: torch.device
) -> tuple[et.Run, Cell]:
    """Fit and score into a run, as users do; return it with its times and warnings."""
    start = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fitted = method.fit(task, data)
    synchronize(device)
    between = time.perf_counter()
    run = et.score(fitted, data, out=folder)
    synchronize(device)
    said = sorted({str(w.message) for w in caught if issubclass(w.category, EigentraceWarning)})
    took = {"fit_seconds": between - start, "score_seconds": time.perf_counter() - between}
    return run, took | {"warnings": said}


def _ranked_by_loss(task: et.Task, data: et.Data, pictures: Pictures) -> Cell:
    start = time.perf_counter()
    losses = et.Loss().fit(task, data).self_influence(data).cpu().numpy()
    took = time.perf_counter() - start
    return ranked(losses, losses, pictures, None) | {"score_seconds": took}


def _ranked_by(scored: tuple[et.Run, Cell], pictures: Pictures, uri: Callable[[int], str] | None) -> Cell:
    run, took = scored
    return ranked(run.self_influence().values, run.column("loss"), pictures, uri) | took


def ranked(values: np.ndarray, losses: np.ndarray, pictures: Pictures, uri: Callable[[int], str] | None) -> Cell:
    """Describe a ranking: wrong labels by decile, and random images of its top, middle and bottom."""
    bad = pictures.is_bad.cpu().numpy()
    labels = pictures.labels.cpu().numpy()
    right = predicted_right(pictures.model, pictures.inputs, pictures.labels)
    cell: Cell = {
        "spearman_with_loss": float(spearman(values[None], losses[None])[0]),
        "negative": float((values < 0).mean()),
        "right_by_decile": deciles(values, right),
    }
    if bad.any():
        found = retrieval(values, bad)
        cell |= {"auc": 100 * found.auc, "ap": 100 * found.ap, "bad_by_decile": deciles(values, bad)}
    shown = bands(values, ACROSS, seed=0)
    cell["bands"] = {
        band: [[int(row), round(float(share), 3), int(labels[row]), bool(bad[row])] for row, share in rows]
        for band, rows in shown.items()
    }
    if uri is not None:
        cell["pictures"] = {str(row): uri(row) for band in cell["bands"].values() for row, *_ in band}
    return cell


def _explained(
    scored: Callable[[str], tuple[et.Run, Cell]],
    fit: str,
    normalize: Any,
    queries: np.ndarray,
    pictures: Pictures,
    uri: Callable[[int], str] | None,
) -> Cell:
    """Explain queries by five proponents and opponents each; the query itself is a candidate."""
    run = scored(fit)[0]
    start = time.perf_counter()
    found = run.explain(
        queries, k=5, normalize=normalize, top_labels=TOP_LABELS, exclude=None, device=pictures.inputs.device
    )
    took = time.perf_counter() - start
    rows = torch.from_numpy(queries).to(pictures.inputs.device)
    with torch.no_grad():
        probable = pictures.model(pictures.inputs[rows]).topk(TOP_LABELS, dim=1).indices
    is_candidate = (probable == pictures.labels[rows, None]).any(dim=1).cpu().numpy()
    cell = answers(found, queries, run.column("label"), run.column("gradient_norm"), is_candidate)
    cell |= {"seconds": took, "how": found.how}
    labels = run.column("label")
    sides = {"proponents": found.proponents.rows, "opponents": found.opponents.rows}
    cell["shown"] = [
        {"query": [int(query), int(labels[query])]}
        | {side: [[int(r), int(labels[r])] for r in rows[number] if r >= 0] for side, rows in sides.items()}
        for number, query in enumerate(queries[:SHOWN_QUERIES])
    ]
    if uri is not None:
        used = {row for shown in cell["shown"] for side in sides for row, _ in [*shown[side], shown["query"]]}
        cell["pictures"] = {str(row): uri(row) for row in sorted(used)}
    return cell


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cache", type=Path, default=Path("runs/experiments"), help="where trained networks are kept")
    parser.add_argument(
        "--photos-figure",
        action="store_true",
        help="draw the photos as well: they come under ImageNet's terms, for research only",
    )


def _wrong_on_top(records: Records, problem: str) -> list[Pair]:
    tenth = int(number(records, problem, "settings", "examples")) // 10
    place = (problem, "cells", "ranked/paper", "bad_by_decile")
    return [paired("top tenth against bottom tenth, ", (percent(records, (*place, end), tenth) for end in (9, 0)))]


def _misread_on_top(records: Records) -> list[Pair]:
    tenth = int(number(records, "cifar", "settings", "examples")) // 10
    place = ("cifar", "cells", "ranked/paper", "right_by_decile")
    return [paired("bottom tenth against top tenth, ", (percent(records, (*place, end), tenth) for end in (0, 9)))]


def _norms(records: Records) -> list[Pair]:
    """Quantiles of norms, each the mean over pictures of which one has the deviation of a uniform number."""
    pairs = []
    for problem, title in (("cifar", "CIFAR-10"), ("photos", "photos")):
        places = [
            (problem, "cells", f"explained/paper/{way}", "proponents_norm_quantile") for way in ("none", "gradient")
        ]
        deviation = 100 / (12 * number(records, problem, "cells", "explained/paper/none", "candidates")) ** 0.5
        samples = (Sample({"": 100 * number(records, *place)}, {"": place}, deviation) for place in places)
        pairs.append(paired(f"{title}: ", samples))
    return pairs


_OWN = (
    ("cifar", "gradient", "whole gradients, residual network"),
    ("cifar_resnet20", "gradient", "whole gradients, ResNet-20"),
    ("cifar", "features", "features, residual network"),
    ("cifar_resnet20", "features", "features, ResNet-20"),
)
"""Networks and lengths that the claim about a picture's own strongest proponent is judged by."""


def _own_first(records: Records) -> Finding:
    told, found = [], []
    for problem, way, title in _OWN:
        cell = (problem, "cells", f"explained/paper/{way}")
        share = percent(records, (*cell, "own_first"), int(number(records, *cell, "candidates")))
        found.append(share)
        told.append(f"{share.mean:.0f}% ({title})")
    sure = [share.mean - 50 for share in found], [2 * (share.deviation or 0.0) for share in found]
    all_most = all(gap > needed for gap, needed in zip(*sure, strict=True))
    few = all(gap < -needed for gap, needed in zip(*sure, strict=True))
    by = "of about 100 pictures, 1 training each; seen if most pictures are on every network, by either length."
    return Finding(SEEN if all_most else NOT_SEEN if few else UNDECIDED, f"{', '.join(told)} {by}")


CLAIMS = (
    order(
        "High self-influence marks wrong labels that people gave to CIFAR-10 (paper: pictures of ImageNet).",
        "Percent of wrong labels",
        lambda records: _wrong_on_top(records, "cifar_noisy"),
        is_main=True,
    ),
    order(
        "High self-influence marks doubtful labels of 250 photos of ImageNet (paper: pictures).",
        "Percent of doubtful labels",
        lambda records: _wrong_on_top(records, "photos"),
    ),
    order(
        "High self-influence marks what the network gets wrong in CIFAR-10 as published (paper: pictures).",
        "Percent predicted as labelled",
        _misread_on_top,
    ),
    order(
        "Proponents are outliers of large norm, unless gradients have unit length (paper: two pictures).",
        "Mean quantile of their norm, as they are against unit length",
        _norms,
    ),
    Claim(
        "With unit gradients, a picture is its own strongest proponent (paper: one picture).", _own_first, is_main=True
    ),
)

VERDICT = """\
Ten directions tell classes and kinds apart, not single pictures: scaled by the length of the whole gradient, hardly a
picture is its own strongest proponent, and scaled by that of its features it depends on the network. With the tail and
gradients at unit length every picture is. The loss alone ranks nearly the same pictures at the top, and marks wrong
labels of people better than either estimator. The network of the photos has learned all 250 by heart, and neither
self-influence nor the loss finds their doubtful labels.

Rescored means that the strongest were sought among 2,000 candidates. Seconds of the photos were taken while other
programs used the same GPU, so they compare with each other only."""

EXPERIMENT = Experiment(
    name="image_exemplars",
    title="Pictures by self-influence, and who speaks for them",
    about=ABOUT,
    parts={
        "cifar": partial(measure, "cifar", partial(cifar, noisy=False)),
        "cifar_noisy": partial(measure, "cifar_noisy", partial(cifar, noisy=True)),
        "cifar_resnet20": partial(measure, "cifar_resnet20", resnet20),
        "photos": partial(measure, "photos", photo_pictures),
    },
    tables=tables,
    figures=figures,
    options=_options,
    needed=needed(lambda settings, part: part == "cifar_noisy", {"photos": [(PHOTOS,)], "cifar_resnet20": FILES}),
    verdict=VERDICT,
    claims=CLAIMS,
    summary=lambda records: [
        "The paper shows pictures here, and no numbers: the tables are on the experiment's own page."
    ],
    area="images",
)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT, sys.argv[1:]))
