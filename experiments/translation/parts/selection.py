"""Select pairs of the noisy corpus by a score, and train a small translation network on the selection."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from statistics import mean, stdev

import numpy as np
import torch
from torch import Tensor

import eigentrace as et
from eigentrace.disk.atomic import replacing
from experiments.shared.frame import Part, Session
from experiments.shared.kept import name_of
from experiments.translation.parts.bleu import bleu_by_set
from experiments.translation.parts.corpora import LONGEST, Corpora, Ordered, Pairs
from experiments.translation.parts.network import ALL, OUR_WAY, PAPER_WAY, Estimator, Network, load_network, size_of
from experiments.translation.parts.network import options as network_options
from experiments.translation.parts.noisy_corpus import CLEAN, KINDS, NoisyCorpus
from experiments.translation.parts.prefilters import Prefiltered, learned_languages
from experiments.translation.parts.transformer import Recipe, held_out, make_transformer, train_transformer
from experiments.translation.parts.translate import SMALL_LONGEST, translated
from harness.files import made_once
from harness.measure import Cell, clocked, release, with_seconds
from harness.record import Record

KEEP = 10
NONE, PREFILTER, RANDOM, ORACLE = "none", "prefilter", "random", "clean only"
RAND_PROJ, LOSS, PER_TOKEN = "RandProj", "loss", " per token"
NOISY_FILES = ("crawl", "judged", "comparable", "wrong_language", "test")
"""The files of the noisy corpus, besides those of the network, and of the test sets of BLEU."""
RETRAINED = Recipe(width=256, depth=3, heads=4, steps=3000, tokens=4096, lr=2e-3, warm_up=500, dropout=0.2)
"""The small network: 14M parameters, with the vocabulary of the scoring network."""
SMALL_RETRAINED = Recipe(32, 1, 2, words=240, steps=36, tokens=200, row=100, lr=2e-2, warm_up=8, dropout=0.0)
STEPS, SMALL_STEPS = (750, 3000), (12, 36)
"""The numbers of steps of a training after which BLEU is measured."""
LOSS_PAIRS = 2048
"""Number of pairs of a selection on which its training loss is taken."""
PUBLISHED = Path(__file__).resolve().parents[3] / "docs" / "results" / "data" / "mt_filter_scores"
"""The scores of the published numbers, in the format of the cache."""


def _arnoldi(network: Network, data: et.Data, estimator: Estimator) -> Tensor:
    fitted, _ = network.fit(ALL, estimator)
    return fitted.distill(KEEP).self_influence(data, compute=network.compute)


def _rand_proj(network: Network, data: et.Data) -> Tensor:
    return et.RandProj(KEEP).fit(network.task(ALL), data).self_influence(data, compute=network.compute)


SCORES: dict[str, tuple[Callable[[Network, et.Data], Tensor], int]] = {
    RAND_PROJ: (_rand_proj, 2),
    PAPER_WAY: (lambda network, data: _arnoldi(network, data, PAPER_WAY), 2),
    OUR_WAY: (lambda network, data: _arnoldi(network, data, OUR_WAY), 2),
    LOSS: (lambda network, data: et.Loss().fit(network.task(ALL), data).self_influence(data), 1),
}
"""The scores: how each is computed, and the power of the number of target tokens that divides it per token."""


@lru_cache(maxsize=1)
def _tokenised(corpora: Corpora) -> tuple[Corpora, NoisyCorpus, Pairs]:
    """Assemble the corpus once for all parts of a command; return it with the files that were read."""
    return corpora, *NoisyCorpus.tokenised(corpora)


@dataclass(frozen=True)
class Bench:
    """The noisy corpus, with everything computed from it once and cached."""

    session: Session
    corpora: Corpora
    corpus: NoisyCorpus
    pairs: Pairs
    published: Path | None = PUBLISHED
    """Folder with scores of the same corpus and network from another machine; None to compute them."""

    @staticmethod
    def of(session: Session) -> "Bench":
        """Assemble the corpus of a session, or reuse that of the previous part."""
        return Bench(session, *_tokenised(Corpora.of(session)))

    @cached_property
    def network(self) -> Network:
        """The scoring network."""
        return load_network(self.session)[0]

    @cached_property
    def ordered(self) -> Ordered:
        """The corpus in the order of scoring."""
        return Ordered.of(self.pairs, size_of(self.session).batch)

    def scores(self, name: str) -> np.ndarray:  # (N,)
        """Return a score of every pair, cached."""
        if name == RANDOM:
            return np.random.default_rng([0, 15]).random(len(self.pairs))
        plain = name.removesuffix(PER_TOKEN)
        work, power = SCORES[plain]
        values = self._kept(plain, lambda: self._scored(work))["values"]
        return values / self.pairs.target_lengths.astype(float) ** power if name != plain else values

    def seconds(self, name: str) -> float:
        """Return the seconds of scoring, including the fit if there was none yet."""
        plain = name.removesuffix(PER_TOKEN)
        return float(self._kept(plain, lambda: self._scored(SCORES[plain][0]))["seconds"])

    def _scored(self, work: Callable[[Network, et.Data], Tensor]) -> dict[str, np.ndarray]:
        network, device = self.network, self.session.device
        release(device)
        values, took = with_seconds(lambda: self.ordered.back(work(network, self.ordered.data)), device)
        return {"values": values, "seconds": np.array(took)}

    def prefiltered(self) -> Prefiltered:
        """Return the pairs that the rules keep."""

        def work() -> dict[str, np.ndarray]:
            return Prefiltered.of(self.corpus.texts, learned_languages(self.corpora)).by_rule

        return Prefiltered(self._kept(PREFILTER, work))

    def _kept(self, name: str, work: Callable[[], dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
        settings = [name, size_of(self.session), self.corpora.subwords.name, self.corpus.texts.digest]
        file = f"noisy_{sha256(repr(settings).encode()).hexdigest()[:16]}.npz"
        path = self.corpora.cache / file
        if not path.exists() and self.published is not None and (self.published / file).exists():
            path = self.published / file
        made_once(path, lambda: _write(path, work()))
        with np.load(path) as found:
            return dict(found)

    def chosen(self, way: str, percent: float | None = None, among: np.ndarray | None = None) -> np.ndarray:  # (n,)
        """Return the selected rows, ascending.

        Args:
            way: NONE for all, PREFILTER, ORACLE, or a score.
            percent: Percentage of pairs to select, with the lowest scores.
            among: Rows to select from; default: all.
        """
        rows = np.arange(len(self.pairs)) if among is None else among
        if way == NONE:
            return rows
        if way == PREFILTER:
            return rows[self.prefiltered().kept[rows]]
        if way == ORACLE:
            return rows[self.corpus.kinds[rows] == CLEAN]
        return np.sort(lowest(self.scores(way), rows, percent or 100))

    def makeup(self, rows: np.ndarray) -> Cell:
        """Return the composition of a selection."""
        kinds, lengths = self.corpus.kinds[rows], self.pairs.lengths[rows]
        shares = {kind: 100 * float((kinds == kind).mean()) for kind in KINDS}
        return {
            "pairs": len(rows),
            "percent": 100 * len(rows) / len(self.pairs),
            "length": float(lengths.mean()),
            "captions": 100 * float(self.corpus.captions[rows].mean()),
            "kinds": shares,
        }


def lowest(scores: np.ndarray, rows: np.ndarray, percent: float) -> np.ndarray:  # (n,)
    """Return a percentage of the rows, at least one, with the lowest scores, lowest first."""
    count = max(1, round(len(rows) * percent / 100))
    return rows[np.argsort(scores[rows], kind="stable")[:count]]


def _write(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Write a file atomically, even if several processes write it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as unfinished, unfinished.open("wb") as file:
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]


def recipe_of(session: Session) -> tuple[Recipe, tuple[int, ...]]:
    """Return the hyperparameters of the small network, and the numbers of steps after which BLEU is measured."""
    if session.small:
        return SMALL_RETRAINED, SMALL_STEPS
    at = session.settings.retrain_steps
    return replace(RETRAINED, steps=max(at)), at


def translations(bench: Bench, rows: np.ndarray, seed: int) -> tuple[dict[int, list[list[int]]], dict[str, float]]:
    """Train on some rows and translate the test sentences, cached.

    Returns:
        Tokens by steps; seconds, and the loss per token in the end on a sample of these rows.
    """
    session, device = bench.session, bench.session.device
    recipe, at = recipe_of(session)
    test = bench.corpora.pairs("test")
    settings = (recipe, at, seed, LOSS_PAIRS, bench.corpora.subwords.name, bench.corpus.texts.digest)
    path = session.settings.cache / f"{name_of('retrained', settings, torch.from_numpy(rows), test.source)}.npz"

    def make() -> None:
        release(device)
        found: dict[str, np.ndarray] = {}
        model, pairs, source = make_transformer(recipe, device, seed), bench.pairs.to(device).take(rows), test.source

        def look(steps: int) -> None:
            if steps not in at:
                return
            model.eval()
            guesses = translated(model, source.to(device), longest=SMALL_LONGEST if session.small else LONGEST)
            found[f"tokens {steps}"] = np.array([token for one in guesses for token in one], dtype=np.uint16)
            found[f"lengths {steps}"] = np.array([len(one) for one in guesses], dtype=np.int64)

        took = clocked(lambda: train_transformer(model, pairs, recipe, seed, after=look), device)
        facts = {"seconds": took, "train_loss": held_out(model, pairs.some(LOSS_PAIRS))["loss"]}
        _write(path, found | {key: np.array(value) for key, value in facts.items()})

    made_once(path, make)
    with np.load(path) as kept:
        tokens = {k: _split(kept[f"tokens {k}"], kept[f"lengths {k}"]) for k in at}
        return tokens, {key: float(kept[key]) for key in ("seconds", "train_loss")}


def _split(tokens: np.ndarray, lengths: np.ndarray) -> list[list[int]]:
    ends = np.concatenate([[0], np.cumsum(lengths)])
    return [tokens[a:b].tolist() for a, b in pairwise(ends)]


def retrained(bench: Bench, rows: np.ndarray, seed: int) -> Cell:
    """Train on some rows and measure BLEU."""
    by_steps, facts = translations(bench, rows, seed)
    cell: Cell = dict(facts)
    for steps, tokens in by_steps.items():
        cell |= {bleu_key(name, steps): value for name, value in bleu_by_set(bench.corpora, tokens).items()}
    return cell


def measure_choice(part: Part, title: str, choose: Callable[[Bench], np.ndarray]) -> None:
    """Retrain on the selected pairs with each seed; return the composition of the selection and BLEU."""

    def work(seed: int) -> Cell:
        bench = Bench.of(part.session)
        rows = choose(bench)
        return bench.makeup(rows) | retrained(bench, rows, seed)

    for seed in part.session.seeds:
        part.cell(seeded(title, seed), partial(work, seed))


_SEED = ", seed "


def seeded(title: str, seed: int) -> str:
    """Return the name of a training's numbers: the title, with the seed unless it is the first."""
    return f"{title}{_SEED}{seed}" if seed else title


def over_seeds(record: Record) -> Record:
    """Summarise the trainings of each selection by means and, if there are several, standard deviations."""
    trainings: dict[str, list[Cell]] = {}
    for name, cell in record["cells"].items():
        trainings.setdefault(name.partition(_SEED)[0], []).append(cell)
    return record | {"cells": {title: _mean(cells) for title, cells in trainings.items()}}


def _mean(trainings: list[Cell]) -> Cell:
    """Average over trainings; the composition is the same for all, and failures count only if all failed."""
    cells = [cell for cell in trainings if "failed" not in cell] or trainings
    found = dict(cells[0])
    for key in [key for key in found if "@" in key or key == "train_loss"]:
        values = [cell[key] for cell in cells if key in cell]
        found |= {key: mean(values), f"{key}_deviation": stdev(values)} if len(values) > 1 else {}
    return found | {"trainings": len(cells)}


def bleu_key(name: str, steps: int) -> str:
    """Return the name of the BLEU of a test set after some steps."""
    return f"{name} @{steps}"


def begin(session: Session, name: str, title: str) -> Part:
    """Begin a part whose numbers come from retraining."""
    recipe, at = recipe_of(session)
    settings = {"network": repr(size_of(session)), "retrained": repr(recipe), "at": list(at)}
    return session.part(name, title, settings)


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of experiments that retrain."""
    network_options(parser)
    parser.add_argument(
        "--retrain-steps",
        type=_steps,
        default=STEPS,
        help="after how many steps BLEU is taken, ascending, the last being the whole training: " + _joined(STEPS),
    )


def _steps(text: str) -> tuple[int, ...]:
    try:
        found = tuple(int(word) for word in text.split(","))
    except ValueError:
        found = ()
    if not found or found[0] < 1 or any(a >= b for a, b in pairwise(found)):
        raise argparse.ArgumentTypeError(f"{text!r}: give ascending numbers of steps such as {_joined(STEPS)}")
    return found


def _joined(steps: Sequence[int]) -> str:
    return ",".join(str(number) for number in steps)
