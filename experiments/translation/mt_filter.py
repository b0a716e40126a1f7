"""Select training pairs of a noisy corpus by self-influence, and retrain (Table 3 of the paper).

python -m experiments.translation.mt_filter --small                                # a small grammar, on a CPU
python -m experiments.translation.mt_filter --data FOLDER --parts corpus,scores    # first: the scores, kept in --cache
python -m experiments.translation.mt_filter --data FOLDER --parts none,arnoldi_10  # then any of the selections
python -m experiments.translation.mt_filter --data FOLDER --missing --workers 6    # what is not there, six at a time
"""

import sys
from dataclasses import replace
from functools import partial

import numpy as np

from eigentrace.evaluate import retrieval
from experiments.shared.frame import Experiment, Part, Session, main
from experiments.translation.parts.mt_filter_page import (
    ABOUT,
    CLAIMS,
    SELECTIONS,
    VERDICT,
    figures,
    label,
    summary,
    tables,
)
from experiments.translation.parts.network import needed, part_of
from experiments.translation.parts.noisy_corpus import CLEAN, KINDS, WITHOUT_VERDICT, NoisyCorpus, described
from experiments.translation.parts.prefilters import Prefiltered, languages_told, learned_languages
from experiments.translation.parts.selection import (
    NOISY_FILES,
    PER_TOKEN,
    SCORES,
    Bench,
    begin,
    measure_choice,
    options,
    size_of,
)
from harness.measure import Cell


def ranking(scores: np.ndarray, corpus: NoisyCorpus) -> Cell:
    """Measure how well high scores find noise among clean pairs, and rejected pairs, in percent."""
    kinds, verdicts = corpus.kinds, np.array(corpus.texts.verdicts, dtype=object)
    noise = [kind for kind in KINDS if kind != CLEAN and kind not in WITHOUT_VERDICT]
    clean, valid = kinds == CLEAN, verdicts == "V"
    everything = _found(scores, np.isin(kinds, noise), clean)
    return {
        "auc": everything["auc"],
        "ap": everything["ap"],
        **{f"auc {kind}": _found(scores, kinds == kind, clean)["auc"] for kind in noise},
        "auc objected": _found(scores, (verdicts != "") & ~valid, valid)["auc"],
        "auc misaligned": _found(scores, np.isin(verdicts, ["A", "L"]), valid)["auc"],
    }


def _found(scores: np.ndarray, wanted: np.ndarray, others: np.ndarray) -> dict[str, float | None]:
    if not wanted.any() or not others.any():
        return {"auc": None, "ap": None}
    rows = wanted | others
    result = retrieval(scores[rows], wanted[rows])
    return {"auc": 100 * result.auc, "ap": 100 * result.ap}


def kept_of(prefiltered: Prefiltered, corpus: NoisyCorpus) -> dict[str, Cell]:
    """Return the share of each kind that every rule keeps, and all rules together, in percent."""
    rules = prefiltered.by_rule | {"all": prefiltered.kept}
    everything = {rule: 100 * float(keeps.mean()) for rule, keeps in rules.items()}
    by_kind = {
        kind: {rule: 100 * float(keeps[corpus.kinds == kind].mean()) for rule, keeps in rules.items()}
        for kind, number in corpus.counts().items()
        if number
    }
    return by_kind | {"all": everything}


def measure_corpus(session: Session) -> None:
    """Record the composition of the noisy corpus, and what the rules keep of it; this needs no network."""
    part = _scores_part(session)
    bench = Bench.of(session)
    part.cell("corpus", lambda: {"kinds": described(bench.corpus), "pairs": len(bench.corpus)})
    part.cell("languages", lambda: dict(languages_told(bench.corpora, learned_languages(bench.corpora))))
    part.cell("prefilter", lambda: {"kept": kept_of(bench.prefiltered(), bench.corpus)})


def measure_scores(session: Session) -> None:
    """Score the noisy corpus with every method, and measure how well the scores separate noise from clean pairs."""
    part = _scores_part(session)
    # Seconds depend on the machine, so scores are recomputed here as well.
    bench = replace(Bench.of(session), published=None)
    part.cell("network", lambda: bench.network.facts)
    for score in SCORES:
        for name in (score, score + PER_TOKEN):
            part.cell(name, lambda name=name: _ranked(bench, name))  # type: ignore[misc]


def _scores_part(session: Session) -> Part:
    size = size_of(session)
    return session.part(part_of("scores", size.recipe), "Scores of the noisy corpus", {"network": repr(size)})


def _ranked(bench: Bench, name: str) -> Cell:
    scores = bench.scores(name)
    more = {"below 0": 100 * float((scores < 0).mean()), "seconds": bench.seconds(name)}
    return ranking(scores, bench.corpus) | more


def measure_selection(session: Session, name: str) -> None:
    """Retrain on one selection."""
    part = begin(session, part_of("selections", size_of(session).recipe), "Training on selections")
    way, percent = SELECTIONS[name]
    measure_choice(part, label(way, percent), lambda bench: bench.chosen(way, percent))


EXPERIMENT = Experiment(
    "mt_filter",
    "Selecting pairs of a noisy corpus by self-influence",
    ABOUT,
    {"corpus": measure_corpus, "scores": measure_scores}
    | {name: partial(measure_selection, name=name) for name in SELECTIONS},
    tables,
    figures,
    options,
    VERDICT,
    CLAIMS,
    summary,
    needed=needed(*NOISY_FILES),
    first=("corpus", "scores"),
    area="translation",
)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT, sys.argv[1:]))
