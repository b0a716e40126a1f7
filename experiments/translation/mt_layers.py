"""Exchanged translations by layers, curvature, K and seeds: where Arnoldi and random projections part.

python -m experiments.translation.mt_layers --small                            # a small grammar, on a CPU
python -m experiments.translation.mt_layers --data FOLDER --precision bf16     # on a GPU
python -m experiments.translation.mt_layers --data FOLDER --parts encoder_0    # some of it

The network is that of 2,000 steps and dropout 0.3, trained if `mt_training` has not left it in --cache.
"""

import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import cast

import numpy as np
import torch
from torch import Tensor

import eigentrace as et
from eigentrace.evaluate import spearman
from eigentrace.fits.eigen_fit import EigenFit
from experiments.shared.frame import Experiment, Part, Session, main
from experiments.translation.mt_retrieval import SMALL_DRAW, Draw, Question
from experiments.translation.parts.corpora import Ordered
from experiments.translation.parts.mt_layers_page import (
    ABOUT,
    ARNOLDI,
    CLAIMS,
    GAUSS_NEWTON,
    KEPT,
    PLAIN,
    PROJECTIONS,
    RAND_PROJ,
    SELECTIONS,
    STARTS,
    VERDICT,
    cell_of,
    figures,
    tables,
)
from experiments.translation.parts.network import (
    ALL,
    DECODER,
    EMBEDDING,
    ENCODER,
    FIRST,
    NO_EMBEDDING,
    Network,
    Size,
    load_network,
    needed,
    options,
    size_of,
)
from harness.measure import Cell, attempt, release, with_seconds

DRAW = Draw(folds=2)
BLOCKS = {
    ALL: (EMBEDDING, ENCODER, DECODER),
    NO_EMBEDDING: (ENCODER, DECODER),
    ENCODER: (ENCODER,),
    DECODER: (DECODER,),
}
"""What each selection of layers consists of."""
Found = dict[str, Cell]
"""Results by the names of their cells."""


def by_arnoldi(question: Question, layers: str, curvature: str, seed: int) -> Found:
    """Fit once as the paper does, and judge every K, with and without the division by λ."""
    network, size = question.network, question.network.size
    most = max(KEPT)
    published = et.Arnoldi.as_published(
        max(size.steps, most),
        most,
        size.sample,
        seed=seed,
        precision=size.precision,
        basis=et.Basis(dtype=size.basis),
        compile=False,
    )
    method = replace(published, curvature="hessian" if curvature == ARNOLDI else "gauss-newton")
    task = network.task(layers)
    data = Ordered.of(network.train, size.product_batch).data
    device = task.layout.device
    fitted, took = with_seconds(lambda: cast(EigenFit, method.fit(task, data)), device)
    phi, seconds = with_seconds(lambda: fitted.features(question.ordered.data, compute=network.compute), device)
    squares = question.ordered.back(phi) ** 2
    values = fitted.spectrum.eigenvalues.double().cpu().numpy()  # (K,), the largest |λ| first
    found: Found = {}
    for keep in KEPT:
        facts: Cell = {"fit_seconds": took, "score_seconds": seconds, "positive": int((values[:keep] > 0).sum())}
        facts |= {"largest": float(values[0]), "smallest": float(values[keep - 1])}
        facts |= _shares(network, fitted, keep) if layers == ALL else {}
        scores = (squares[:, :keep] / values[:keep]).sum(axis=1)
        found[cell_of(layers, curvature, keep, seed)] = _judged(question, scores) | facts
        if curvature == ARNOLDI:
            found[cell_of(layers, PLAIN, keep, seed)] = _judged(question, squares[:, :keep].sum(axis=1))
    return found


def _shares(network: Network, fitted: EigenFit, keep: int) -> Cell:
    """Return the parts of the squared lengths of the first K directions that lie in each block of layers."""
    layout, directions = fitted.task.layout, fitted.eigenpairs.directions[:keep]
    sums = {}
    for block in BLOCKS[ALL]:
        spans = [layout.span(name) for name in network.task(block).layout.names]
        sums[block] = sum(float(directions[:, span].float().square().sum()) for span in spans)
    total = sum(sums.values())
    return {f"share_{name}": value / total for name, value in sums.items()}


def _judged(question: Question, scores: np.ndarray) -> Cell:
    """Measure how well scores find the wrong pairs, and how they go with the number of target tokens."""
    lengths = question.pairs.target_lengths.astype(float)
    return question.judged(scores) | {"spearman_length": float(spearman(scores[None], lengths[None])[0])}


def by_projections(question: Question, seed: int) -> Found:
    """Draw directions once for every block of layers; those of several blocks are the blocks' side by side."""
    network = question.network
    features: dict[str, Tensor] = {}
    for number, block in enumerate(BLOCKS[ALL]):
        release(network.train.source.device)
        method = et.RandProj(max(KEPT), seed=seed + PROJECTIONS * number)
        fitted = method.fit(network.task(block), question.ordered.data)
        features[block] = fitted.features(question.ordered.data, compute=network.compute)
    found: Found = {}
    for layers in SELECTIONS:
        phi = torch.stack([features[block] for block in BLOCKS[layers]]).sum(dim=0)
        squares = question.ordered.back(phi) ** 2
        for keep in KEPT:
            cell = _judged(question, squares[:, :keep].mean(axis=1))
            found[cell_of(layers, RAND_PROJ, keep, seed)] = cell
    return found


def measure_network(session: Session) -> None:
    """Train or load the network, and measure its quality and that of its loss as a score."""
    part, size, draw = _part(session)
    if part.has("network") and part.has("loss"):
        return
    network, _ = load_network(session, size)
    part.cell("network", lambda: network.facts)
    question = Question.of(network, draw)
    fitted = et.Loss().fit(network.task(ALL), question.ordered.data)
    scores = question.ordered.back(fitted.self_influence(question.ordered.data))
    part.cell("loss", lambda: question.judged(scores, power=1))


def measure_arnoldi(session: Session, layers: str, curvature: str, seed: int) -> None:
    """Measure one fit."""
    methods = (ARNOLDI, PLAIN) if curvature == ARNOLDI else (curvature,)
    names = [cell_of(layers, method, keep, seed) for method in methods for keep in KEPT]
    _measure(session, names, lambda question: by_arnoldi(question, layers, curvature, seed))


def measure_projections(session: Session, seed: int) -> None:
    """Measure one draw of random directions."""
    names = [cell_of(layers, RAND_PROJ, keep, seed) for layers in SELECTIONS for keep in KEPT]
    _measure(session, names, lambda question: by_projections(question, seed))


def _measure(session: Session, names: list[str], work: Callable[[Question], Found]) -> None:
    part, size, draw = _part(session)
    if all(part.has(name) for name in names):
        return
    network, _ = load_network(session, size)
    release(session.device)
    found = attempt(lambda: {"found": work(Question.of(network, draw))})
    for name in names:
        part.add(name, dict(found if "failed" in found else found["found"][name]))


def _part(session: Session) -> tuple[Part, Size, Draw]:
    size = size_of(session)
    if not session.small:
        size = replace(size, recipe=FIRST)
    draw = replace(SMALL_DRAW if session.small else DRAW, folds=2)
    return session.part("layers", "Exchanged translations found", asdict(size) | {"draw": asdict(draw)}), size, draw


_WORDS = {ALL: "all", NO_EMBEDDING: "no_embedding", ENCODER: "encoder", DECODER: "decoder"}
EXPERIMENT = Experiment(
    "mt_layers",
    "Exchanged translations by layers, curvature and K",
    ABOUT,
    {
        "network": measure_network,
        **{
            f"{_WORDS[layers]}_{seed}": partial(measure_arnoldi, layers=layers, curvature=ARNOLDI, seed=seed)
            for seed in range(STARTS)
            for layers in SELECTIONS
        },
        **{
            f"gauss_newton_{seed}": partial(measure_arnoldi, layers=ALL, curvature=GAUSS_NEWTON, seed=seed)
            for seed in range(STARTS)
        },
        **{f"proj_{seed}": partial(measure_projections, seed=seed) for seed in range(PROJECTIONS)},
    },
    tables,
    figures,
    options,
    VERDICT,
    CLAIMS,
    needed=needed(),
    first=("network",),
    area="translation",
)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT, sys.argv[1:]))
