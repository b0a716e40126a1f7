"""Find questions with exchanged answers by self-influence on a fine-tuned language model, as Table 2 of the paper does.

python -m experiments.language.exchanged_answers --small                                # a toy network, on a CPU
python -m experiments.language.exchanged_answers --model FILE.gguf --data FOLDER        # minutes on a GPU
python -m experiments.language.exchanged_answers ... --parts network                    # fine-tuned once, and kept
python -m experiments.language.exchanged_answers ... --parts arnoldi,tail               # some of the scores

Parts are independent of each other, once the network is fine-tuned.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import mean, stdev

import numpy as np
import torch
from torch import Tensor

import eigentrace as et
from eigentrace.evaluate import retrieval
from eigentrace.fits.fitted import Fitted
from eigentrace.fits.projected_fit import ProjectedFit
from eigentrace.fits.weighted_directions import Block
from eigentrace.numeric.seeding import generator_of
from eigentrace.projection.directions import DenseDirections
from experiments.language.parts.exchanged_answers_page import (
    ABOUT,
    CLAIMS,
    PER_METHOD,
    POSITIVE,
    SELECTED,
    TRACIN,
    VERDICT,
    cell_name,
    summary,
    tables,
)
from experiments.language.parts.network import (
    KEEPS,
    OUR_WAY,
    PAPER_WAY,
    Network,
    load_network,
    needed,
    options,
    settings_of,
)
from experiments.language.parts.questions import Examples, Ordered
from experiments.shared.frame import Experiment, Part, Session, main
from harness.command import positive
from harness.measure import Cell, attempt, release, with_seconds


@dataclass(frozen=True)
class Draw:
    """Numbers of examples, of wrong ones among them, of folds, and of draws of random directions."""

    examples: int = 4096
    wrong: int = 256
    folds: int = 2
    draws: int = 5


SMALL_DRAW = Draw(64, 12, 2, 2)


@dataclass(frozen=True)
class Question:
    """The examples of all folds, with the wrong ones to be found in each fold."""

    network: Network
    draw: Draw
    examples: Examples
    ordered: Ordered
    is_wrong: np.ndarray

    @staticmethod
    def of(network: Network, draw: Draw) -> "Question":
        """Sample the folds."""
        folds = [exchanged(len(network.train), draw, seed) for seed in range(draw.folds)]
        rows, answers = (np.concatenate(side) for side in zip(*folds, strict=True))
        examples = network.train.take(rows, answers)
        own = network.train.take(rows).answers
        # Two exchanged answers may be equal.
        pairs = zip(examples.answers, own, strict=True)
        is_wrong = np.array([not torch.equal(shown, right) for shown, right in pairs])
        return Question(network, draw, examples, Ordered.of(examples, network.size.batch), is_wrong)

    def judged(self, scores: np.ndarray, power: int = 2) -> Cell:  # (N,) or one column per draw (N, draws)
        """Measure how well scores, as sums and per token, find the wrong answers in each fold, by each draw."""
        columns = scores.reshape(len(scores), -1)
        per_token = columns / (self.examples.answer_lengths.astype(float) ** power)[:, None]
        found: Cell = {}
        for prefix, values in (("", columns), ("mean_", per_token)):
            folds = []
            for fold in range(self.draw.folds):
                rows = slice(fold * self.draw.examples, (fold + 1) * self.draw.examples)
                folds += [retrieval(column, self.is_wrong[rows]) for column in values[rows].T]
            for key in ("auc", "ap"):
                numbers = [100 * getattr(one, key) for one in folds]
                found |= {prefix + key: mean(numbers)}
                found |= {f"{prefix}{key}_deviation": stdev(numbers)} if len(numbers) > 1 else {}
        return found

    def features(self, fitted: ProjectedFit) -> tuple[np.ndarray, float]:  # (N, K)
        """Return the features of all examples, and the seconds that they take."""
        work = partial(fitted.features, self.ordered.data, compute=self.network.compute)
        return self._back(work)

    def own(self, fitted: Fitted) -> tuple[np.ndarray, float]:  # (N,)
        """Return the self-influence of all examples, and the seconds that it takes."""
        work = partial(fitted.self_influence, self.ordered.data, compute=self.network.compute)
        return self._back(work)

    def _back(self, work: Callable[[], Tensor]) -> tuple[np.ndarray, float]:
        scores, seconds = with_seconds(work, self.network.task.layout.device)
        return self.ordered.back(scores), seconds


def exchanged(count: int, draw: Draw, seed: int) -> tuple[np.ndarray, np.ndarray]:  # (examples,), (examples,)
    """Sample some of `count` examples and exchange some answers; return the rows of questions and of answers."""
    chance = np.random.default_rng([seed, 3])
    rows = chance.permutation(count)[: draw.examples]
    wrong = chance.permutation(len(rows))[: draw.wrong]
    answers = rows.copy()
    # A cyclic shift, so that no question keeps its own answer.
    answers[wrong] = rows[np.roll(wrong, 1)]
    return rows, answers


Found = dict[tuple[str, int], Cell]
"""Results by method and K."""


def by_the_paper(question: Question) -> Found:
    """The paper's estimator for all K from one pass: without a tail, self-influence is Σ φₖ²/λₖ."""
    fitted, took = question.network.fit(PAPER_WAY)
    values = fitted.spectrum.eigenvalues.cpu().numpy()  # (K,), the largest |λ| first
    phi, seconds = question.features(fitted)
    parts = phi**2 / values
    found: Found = {}
    for keep in KEEPS:
        here = values[:keep] > 0
        more = {"fit_seconds": took, "score_seconds": seconds, "positive": int(here.sum())}
        found[PAPER_WAY, keep] = question.judged(parts[:, :keep].sum(axis=1)) | more
        found[POSITIVE, keep] = question.judged(parts[:, :keep][:, here].sum(axis=1)) | more
    return found


def with_tail(question: Question) -> Found:
    """The estimator of eigentrace with a tail, for both K from one fit."""
    fitted, took = question.network.fit(OUR_WAY)
    found: Found = {}
    for keep in KEEPS:
        cut = fitted.distill(keep)
        scores, seconds = question.own(cut)
        more = {"fit_seconds": took, "score_seconds": seconds}
        more["positive"] = int((cut.spectrum.eigenvalues > 0).sum())
        found[OUR_WAY, keep] = question.judged(scores) | more
    return found


def by_rand_proj(question: Question) -> Found:
    """Random projections, on other directions for each draw; those of all draws are scored in one pass."""
    fitted, took = with_seconds(lambda: projections(question), question.network.task.layout.device)
    phi, seconds = question.features(fitted)
    squares = (phi**2).reshape(len(phi), question.draw.draws, max(KEEPS))
    more = {"fit_seconds": took, "score_seconds": seconds}
    return {("RandProj", keep): question.judged(squares[:, :, :keep].mean(axis=2)) | more for keep in KEEPS}


def projections(question: Question) -> ProjectedFit:
    """Fit `RandProj` with the directions of all draws, one draw after the other.

    They are drawn on the device, not by the method, which draws on the CPU: half a minute for each 20 of this network.
    """
    network, count = question.network, question.draw.draws * max(KEEPS)
    fitted = et.RandProj(1).fit(network.task, question.ordered.data)
    layout = fitted.task.layout
    dtype = torch.bfloat16 if network.size.score_precision == "bf16" else layout.dtype
    generator = torch.Generator(layout.device).manual_seed(0)
    rows = torch.empty(count, layout.numel, dtype=dtype, device=layout.device)
    for row in rows:
        row.normal_(generator=generator)
    weights = torch.full((count,), 1 / count, dtype=torch.float64)
    return replace(fitted, blocks=(Block(DenseDirections(rows, layout), weights),))


def by_rand_select(question: Question) -> Found:
    """Random parameters, selected anew for each draw; those of all draws are scored in one pass."""
    draws, most = question.draw.draws, max(SELECTED)
    work = partial(et.RandSelect(draws * most).fit, question.network.task, question.ordered.data)
    fitted, took = with_seconds(work, question.network.task.layout.device)
    phi, seconds = question.features(fitted)
    # In the order of the network's parameters.
    mixed = torch.randperm(draws * most, generator=generator_of(0)).numpy().reshape(draws, most)
    more = {"fit_seconds": took, "score_seconds": seconds}
    return {
        ("RandSelect", keep): question.judged(np.stack([(phi[:, one[:keep]] ** 2).sum(axis=1) for one in mixed], 1))
        | more
        for keep in SELECTED
    }


def by_tracin(question: Question) -> Found:
    """The squared norm of the gradient: TracIn at the last checkpoint."""
    fitted = et.TracIn().fit(question.network.task, question.ordered.data)
    scores, seconds = question.own(fitted)
    return {(TRACIN, 0): question.judged(scores) | {"fit_seconds": 0.0, "score_seconds": seconds}}


def by_loss(question: Question) -> Cell:
    """The loss."""
    fitted = et.Loss().fit(question.network.task, question.ordered.data)
    scores, seconds = question.own(fitted)
    return question.judged(scores, power=1) | {"fit_seconds": 0.0, "score_seconds": seconds}


Work = Callable[[Question], Found]
WORK: dict[str, tuple[Work, tuple[str, ...]]] = {
    "arnoldi": (by_the_paper, (PAPER_WAY, POSITIVE)),
    "tail": (with_tail, (OUR_WAY,)),
    "select": (by_rand_select, ("RandSelect",)),
    "proj": (by_rand_proj, ("RandProj",)),
    "tracin": (by_tracin, (TRACIN,)),
}
"""What each part computes, and its methods."""


def measure_network(session: Session) -> None:
    """Fine-tune the network, and measure its quality and that of its loss as a score."""
    part, draw = _part(session)
    if part.has("network") and part.has("loss"):
        return
    network = load_network(session)
    part.cell("network", lambda: network.facts)
    part.cell("loss", lambda: by_loss(Question.of(network, draw)))


def measure(session: Session, name: str) -> None:
    """Measure one kind of score on the same folds as all others."""
    work, methods = WORK[name]
    part, draw = _part(session)
    keys = [(method, keep) for method in methods for keep in PER_METHOD[method]]
    if all(part.has(cell_name(*key)) for key in keys):
        return
    network = load_network(session)
    release(session.device)
    found = attempt(lambda: {"found": work(Question.of(network, draw))})
    for key in keys:
        part.add(cell_name(*key), dict(found if "failed" in found else found["found"][key]))


def _part(session: Session) -> tuple[Part, Draw]:
    draw = SMALL_DRAW if session.small else Draw(folds=session.settings.folds)
    settings = settings_of(session) | {"draw": asdict(draw)}
    return session.part("answers", "Exchanged answers found", settings), draw


def all_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the network and of the folds."""
    options(parser)
    parser.add_argument("--folds", type=positive, default=Draw.folds, help="folds of 4,096 examples")


EXPERIMENT = Experiment(
    "exchanged_answers",
    "Exchanged answers found by self-influence on a language model",
    ABOUT,
    {"network": measure_network, **{name: partial(measure, name=name) for name in WORK}},
    tables,
    options=all_options,
    verdict=VERDICT,
    claims=CLAIMS,
    summary=summary,
    needed=needed(),
    first=("network", "arnoldi", "tail"),
    area="language",
)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT, sys.argv[1:]))
