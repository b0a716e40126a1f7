"""Find sentence pairs with exchanged translations by self-influence (Table 2 of the paper).

python -m experiments.translation.mt_retrieval --small                                     # a small grammar, on a CPU
python -m experiments.translation.mt_retrieval --data FOLDER                               # 15 minutes on a GPU
python -m experiments.translation.mt_retrieval --data FOLDER --parts network               # trained once, and kept
python -m experiments.translation.mt_retrieval --data FOLDER --parts all_arnoldi,all_tail  # some of the scores

Parts are independent of each other, once the network is trained.
"""

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from statistics import mean, stdev
from typing import Literal

import numpy as np
import torch
from torch import Tensor

import eigentrace as et
from eigentrace.evaluate import retrieval
from eigentrace.fits.projected_fit import ProjectedFit
from eigentrace.numeric.seeding import generator_of
from experiments.shared.frame import Experiment, Part, Session, main
from experiments.translation.parts.bleu import bleu_by_set
from experiments.translation.parts.corpora import LONGEST, Ordered, Pairs
from experiments.translation.parts.mt_retrieval_page import (
    ABOUT,
    BATCHES,
    CLAIMS,
    PER_METHOD,
    POSITIVE,
    SELECTED,
    VERDICT,
    WAYS,
    cell_name,
    figures,
    summary,
    tables,
)
from experiments.translation.parts.network import (
    ALL,
    KEEPS,
    LAST,
    OUR_WAY,
    PAPER_WAY,
    Network,
    load_network,
    needed,
    options,
    part_of,
    size_of,
    untrained_network,
)
from experiments.translation.parts.translate import SMALL_LONGEST, translated
from harness.measure import Cell, attempt, release, with_seconds

Engine = Literal["layerwise", "forward", "reverse"]

BEAM = 4
"""Beam width of the translations that BLEU is taken of."""
# Number of RandProj draws: drawing directions of 60M numbers takes longer than scoring with them.
ROW_SETS = 2

# Method, engine, and the number of gradients or tangents in memory at a time; None for as many as the engine chooses.
SCORED_BY: dict[str, tuple[et.RandSelect | et.RandProj, Engine, int | None]] = {
    WAYS[0]: (et.RandSelect(100), "reverse", max(BATCHES)),
    WAYS[1]: (et.RandSelect(100), "layerwise", None),
    WAYS[2]: (et.RandProj(20), "forward", 1),
    WAYS[3]: (et.RandProj(20), "forward", None),
    WAYS[4]: (et.RandProj(20), "layerwise", None),
}


@dataclass(frozen=True)
class Draw:
    """Numbers of pairs, of wrong pairs among them, and of folds."""

    pairs: int = 4096
    wrong: int = 256
    folds: int = 5


SMALL_DRAW = Draw(96, 12, 2)


@dataclass(frozen=True)
class Question:
    """The pairs of all folds, with the wrong ones to be found in each fold."""

    network: Network
    draw: Draw
    pairs: Pairs
    ordered: Ordered
    is_wrong: np.ndarray

    @staticmethod
    def of(network: Network, draw: Draw) -> "Question":
        """Sample the folds."""
        parts = [exchanged(network.train, draw, seed) for seed in range(draw.folds)]
        sources, targets = (np.concatenate(side) for side in zip(*parts, strict=True))
        pairs = network.train.take(sources, targets)
        ordered = Ordered.of(pairs, network.size.batch)
        # Two exchanged targets may be equal.
        is_wrong = (network.train.take(sources).target != pairs.target).any(dim=1).cpu().numpy()
        return Question(network, draw, pairs, ordered, is_wrong)

    def judged(self, scores: np.ndarray, power: int = 2) -> Cell:  # (N,) or one column per fold (N, folds)
        """Measure how well scores, as sums and per token, find the wrong pairs."""
        per_token = scores / (self.pairs.target_lengths.astype(float) ** power).reshape(-1, *[1] * (scores.ndim - 1))
        found: Cell = {}
        for prefix, values in (("", scores), ("mean_", per_token)):
            folds = []
            for fold in range(self.draw.folds):
                rows = slice(fold * self.draw.pairs, (fold + 1) * self.draw.pairs)
                column = values[rows] if values.ndim == 1 else values[rows, fold]
                folds.append(retrieval(column, self.is_wrong[rows]))
            for key in ("auc", "ap"):
                numbers = [100 * getattr(one, key) for one in folds]
                found |= {prefix + key: mean(numbers), f"{prefix}{key}_deviation": stdev(numbers)}
        return found


def exchanged(train: Pairs, draw: Draw, seed: int) -> tuple[np.ndarray, np.ndarray]:  # (pairs,), (pairs,)
    """Sample training pairs and exchange some targets; return the rows of sources and of targets."""
    chance = np.random.default_rng([seed, 3])
    rows = chance.permutation(len(train))[: draw.pairs]
    wrong = chance.permutation(draw.pairs)[: draw.wrong]
    targets = rows.copy()
    # A cyclic shift, so that no source keeps its own target.
    targets[wrong] = rows[np.roll(wrong, 1)]
    return rows, targets


Found = dict[tuple[str, int], Cell]
"""Results by method and K."""


def by_the_paper(question: Question, layers: str) -> Found:
    """The paper's estimator for all K from one pass: without a tail, self-influence is Σ φₖ²/λₖ."""
    fitted, took = question.network.fit(layers, PAPER_WAY)
    values = fitted.spectrum.eigenvalues.cpu().numpy()  # (K,), the largest |λ| first
    phi, seconds = with_seconds(lambda: _features(fitted, question), fitted.task.layout.device)
    parts = question.ordered.back(phi) ** 2 / values
    found: Found = {}
    for keep in KEEPS:
        here = values[:keep] > 0
        more = {"fit_seconds": took, "score_seconds": seconds, "parameters": fitted.task.layout.numel}
        more["positive"] = int(here.sum())
        found[PAPER_WAY, keep] = question.judged(parts[:, :keep].sum(axis=1)) | more
        found[POSITIVE, keep] = question.judged(parts[:, :keep][:, here].sum(axis=1)) | more
    return found


def with_tail(question: Question, layers: str) -> Found:
    """The estimator of eigentrace with a tail, for both K from one fit."""
    network, data = question.network, question.ordered.data
    fitted, took = network.fit(layers, OUR_WAY)
    found: Found = {}
    for keep in KEEPS:
        cut = fitted.distill(keep)
        own = partial(cut.self_influence, data, compute=network.compute)
        scores, seconds = with_seconds(own, cut.task.layout.device)
        more = {"fit_seconds": took, "score_seconds": seconds, "parameters": fitted.task.layout.numel}
        more["positive"] = int((cut.spectrum.eigenvalues > 0).sum())
        found[OUR_WAY, keep] = question.judged(question.ordered.back(scores)) | more
    return found


def by_rand_proj(question: Question, layers: str) -> Found:
    """Random projections, with sets of directions that folds use in turn."""
    sets = [_squares(question, layers, et.RandProj(max(KEEPS), seed=seed)) for seed in range(ROW_SETS)]
    squares = np.stack(sets, axis=1)  # (N, sets, K)
    turns = squares[:, np.arange(question.draw.folds) % ROW_SETS]
    return {("RandProj", keep): question.judged(turns[:, :, :keep].mean(axis=2)) for keep in KEEPS}


def by_rand_select(question: Question, layers: str) -> Found:
    """Random parameters, selected anew for each fold."""
    folds, most = question.draw.folds, max(SELECTED)
    squares = _squares(question, layers, et.RandSelect(folds * most))
    # In the order of the network's parameters.
    mixed = torch.randperm(folds * most, generator=generator_of(0)).numpy().reshape(folds, most)
    return {
        ("RandSelect", keep): question.judged(np.stack([squares[:, one[:keep]].sum(axis=1) for one in mixed], axis=1))
        for keep in SELECTED
    }


def _squares(question: Question, layers: str, method: et.RandProj | et.RandSelect) -> np.ndarray:  # (N, K)
    fitted = method.fit(question.network.task(layers), question.ordered.data)
    return question.ordered.back(_features(fitted, question)) ** 2


def _features(fitted: ProjectedFit, question: Question) -> Tensor:  # (N, K)
    return fitted.features(question.ordered.data, compute=question.network.compute)


Work = Callable[[Question, str], Found]
WORK: dict[Work, tuple[str, ...]] = {
    by_rand_select: ("RandSelect",),
    by_rand_proj: ("RandProj",),
    by_the_paper: (PAPER_WAY, POSITIVE),
    with_tail: (OUR_WAY,),
}
"""The methods by part."""
PARTS = {"select": by_rand_select, "proj": by_rand_proj, "arnoldi": by_the_paper, "tail": with_tail}


def measure_network(session: Session) -> None:
    """Train the network, and measure its quality and that of its loss as a score."""
    part, draw = _part(session)
    if part.has("network") and part.has("loss"):
        return
    network, _ = load_network(session)
    part.cell("network", lambda: network.facts)
    question = Question.of(network, draw)
    part.cell("loss", lambda: question.judged(_loss(question), power=1))


def measure_bleu(session: Session) -> None:
    """Translate the test sentences by beam search, as the paper's network is judged."""
    part, _ = _part(session)

    def work() -> Cell:
        network, corpora = load_network(session)
        source = corpora.pairs("test").source.to(session.device)
        longest = SMALL_LONGEST if session.small else LONGEST
        guesses, seconds = with_seconds(
            lambda: translated(network.model, source, beam=BEAM, longest=longest), session.device
        )
        return {**bleu_by_set(corpora, guesses), "beam": BEAM, "seconds": seconds}

    part.cell("bleu", work)


def measure(session: Session, layers: str, work: Work) -> None:
    """Measure one kind of score on the same five folds as all others."""
    part, draw = _part(session)
    if _has(part, layers, work):
        return
    network, _ = load_network(session)
    release(session.device)
    found = attempt(lambda: {"found": work(Question.of(network, draw), layers)})
    for key in _keys(work):
        part.add(cell_name(layers, *key), dict(found if "failed" in found else found["found"][key]))


def _part(session: Session) -> tuple[Part, Draw]:
    draw = SMALL_DRAW if session.small else Draw()
    size = size_of(session)
    settings = asdict(size) | {"draw": asdict(draw)}
    return session.part(part_of("retrieval", size.recipe), "Exchanged translations found", settings), draw


def _keys(work: Work) -> list[tuple[str, int]]:
    return [(method, keep) for method in WORK[work] for keep in PER_METHOD[method]]


def _loss(question: Question) -> np.ndarray:
    fitted = et.Loss().fit(question.network.task(ALL), question.ordered.data)
    return question.ordered.back(fitted.self_influence(question.ordered.data))


def _has(part: Part, layers: str, work: Work) -> bool:
    return all(part.has(cell_name(layers, *key)) for key in _keys(work))


def measure_memory(session: Session) -> None:
    """Measure time and memory of scoring by method, engine and batch size."""
    count = 128 if session.small else max(BATCHES)
    settings = asdict(size_of(session)) | {"pairs": count, "weights": "random"}
    part = session.part("memory", "Memory of scoring", settings)
    names = {(way, size): f"{way}, batch {size}" for way in WAYS for size in BATCHES}
    if all(part.has(name) for name in names.values()):
        return
    network = untrained_network(session)
    data = Ordered.of(network.train.some(count), max(BATCHES)).data
    held: dict[et.RandSelect | et.RandProj, ProjectedFit] = {}
    for (way, size), name in names.items():
        part.cell(name, lambda way=way, size=size: _memory(network, data, way, size, held))  # type: ignore[misc]


def _memory(
    network: Network, data: et.Data, way: str, size: int, held: dict[et.RandSelect | et.RandProj, ProjectedFit]
) -> Cell:
    """Score with one set of directions at a time, so that others do not count as memory."""
    method, engine, at_once = SCORED_BY[way]
    task = network.task(ALL)
    device = task.layout.device
    if method not in held:
        held.clear()
        held[method] = method.fit(task, data)
    fitted = held[method]
    each = task.layout.numel * task.layout.dtype.itemsize
    memory = None if at_once is None else 2 * each * min(size, at_once)
    compute = et.Compute(engine=engine, precision=network.size.score_precision, memory=memory, batch=size)
    release(device)
    _, seconds = with_seconds(lambda: fitted.self_influence(data.rebatched(size), compute=compute), device)
    cell: Cell = {"pairs_per_second": len(data) / seconds}
    if device.type == "cuda":
        cell["peak"] = torch.cuda.max_memory_allocated(device)
        if engine == "reverse" and each * size > torch.cuda.get_device_properties(device).total_memory:
            cell["note"] = (
                f"{size} whole gradients take {each * size / 2**30:.0f} GiB, more than the GPU has: they went through "
                "in parts of as many as fit."
            )
    return cell


EXPERIMENT = Experiment(
    "mt_retrieval",
    "Exchanged translations found by self-influence",
    ABOUT,
    {
        "network": measure_network,
        "bleu": measure_bleu,
        **{
            f"{word}_{name}": partial(measure, layers=layers, work=work)
            for word, layers in (("all", ALL), ("last", LAST))
            for name, work in PARTS.items()
        },
        "memory": measure_memory,
    },
    tables,
    figures,
    options,
    VERDICT,
    CLAIMS,
    summary,
    needed=needed("test"),
    first=("network", "all_arnoldi", "all_tail", "last_arnoldi", "last_tail", "memory"),
    area="translation",
)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT, sys.argv[1:]))
