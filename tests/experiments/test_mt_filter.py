"""Selections from the noisy corpus: scores are kept, choices are right, and looking does not change a training."""

import json
import re
from argparse import ArgumentTypeError, Namespace
from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score, roc_auc_score

from experiments.shared.frame import Session, main
from experiments.translation.mt_filter import EXPERIMENT, kept_of, measure_scores, ranking
from experiments.translation.parts import selection
from experiments.translation.parts.bleu import SETS
from experiments.translation.parts.mt_filter_page import PAPER, PER_WAY, SELECTIONS, label, part_name
from experiments.translation.parts.network import OUR_WAY, PAPER_WAY
from experiments.translation.parts.noisy_corpus import CLEAN, KINDS
from experiments.translation.parts.selection import (
    LOSS,
    NONE,
    ORACLE,
    PER_TOKEN,
    PREFILTER,
    PUBLISHED,
    RAND_PROJ,
    RANDOM,
    RETRAINED,
    SCORES,
    SMALL_STEPS,
    Bench,
    bleu_key,
    lowest,
    over_seeds,
    retrained,
)
from experiments.translation.parts.transformer import Recipe, make_transformer, train_transformer
from harness.measure import Run
from tests.helpers.drawings import words_on
from tests.helpers.expecting import refused
from tests.helpers.places import DOCS

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cache")
    info = {"date": "2026-01-01", "torch": "", "eigentrace": "", "python": "", "command": ""}
    settings = Namespace(data=None, cache=folder, small=True, seeds=2, missing=False)
    return Bench.of(Session(Run(CPU, True, 0.0, info, False), settings, folder / "x.json"))


@pytest.fixture
def made_up(bench, monkeypatch):
    """Scores that cost nothing: how long a target is, and a count of how often they are computed."""
    calls = []

    def work(network, data):
        calls.append(1)
        return torch.from_numpy(bench.pairs.target_lengths[bench.ordered.order].astype(float) ** 2)

    monkeypatch.setitem(SCORES, "made up", (work, 2))
    monkeypatch.setitem(bench.__dict__, "network", None)
    return calls


def test_scores_are_kept_and_in_the_order_of_the_corpus(bench, made_up):
    first = bench.scores("made up")
    assert np.array_equal(first, bench.pairs.target_lengths**2)
    assert np.allclose(bench.scores("made up" + PER_TOKEN), 1)
    assert np.array_equal(Bench(bench.session, bench.corpora, bench.corpus, bench.pairs).scores("made up"), first)
    assert len(made_up) == 1
    assert bench.seconds("made up" + PER_TOKEN) >= 0


def test_published_scores_are_taken_where_the_cache_has_none(bench, made_up, tmp_path):
    published, cache = tmp_path / "published", tmp_path / "cache"
    there = replace(bench, corpora=replace(bench.corpora, cache=published))
    assert np.array_equal(there.scores("made up"), bench.pairs.target_lengths**2)
    before = len(made_up)
    elsewhere = replace(bench, corpora=replace(bench.corpora, cache=cache), published=published)
    assert np.array_equal(elsewhere.scores("made up"), there.scores("made up"))
    assert len(made_up) == before
    assert not cache.exists()
    own = replace(elsewhere, published=None)
    assert np.array_equal(own.scores("made up"), there.scores("made up"))
    assert len(made_up) == before + 1


def test_scores_that_are_measured_are_made_here(bench, made_up, tmp_path, monkeypatch):
    for name in set(SCORES) - {"made up"}:
        monkeypatch.delitem(SCORES, name)
    monkeypatch.setattr(selection, "load_network", lambda session: (Namespace(facts={}), None))
    bench.scores("made up")
    before = len(made_up)
    elsewhere = replace(bench, corpora=replace(bench.corpora, cache=tmp_path), published=bench.corpora.cache)
    monkeypatch.setattr(Bench, "of", staticmethod(lambda session: elsewhere))
    measure_scores(bench.session)
    assert len(made_up) == before + 1


def test_the_published_scores_are_of_the_published_corpus():
    (records,) = json.loads((PUBLISHED.parent / "mt_filter.json").read_text()).values()
    files = sorted(PUBLISHED.iterdir())
    assert len(files) == 2 * len(SCORES)  # of two networks
    for file in files:
        with np.load(file) as found:
            assert found["values"].shape == (records["scores"]["cells"]["corpus"]["pairs"],)
            assert np.isfinite(found["values"]).all()


def test_the_lowest_scores_are_chosen(bench, made_up):
    assert lowest(np.array([3.0, 1, 2, 0]), np.array([0, 1, 3]), 67).tolist() == [3, 1]
    assert lowest(np.array([3.0, 1]), np.arange(2), 1).tolist() == [1]
    rows = bench.chosen("made up", 10)
    assert len(rows) == round(len(bench.pairs) / 10)
    assert np.all(np.diff(rows) > 0)
    others = np.setdiff1d(np.arange(len(bench.pairs)), rows)
    assert bench.scores("made up")[rows].max() <= bench.scores("made up")[others].min()


def test_choices_without_a_score(bench):
    assert len(bench.chosen(NONE)) == len(bench.pairs)
    assert set(bench.corpus.kinds[bench.chosen(ORACLE)]) == {CLEAN}
    kept = bench.chosen(PREFILTER)
    assert np.array_equal(np.flatnonzero(bench.prefiltered().kept), kept)
    within = bench.chosen(RANDOM, 50, among=kept)
    assert set(within) < set(kept)
    assert len(within) == round(len(kept) / 2)
    assert np.array_equal(within, bench.chosen(RANDOM, 50, among=kept))


def test_what_a_choice_consists_of(bench):
    rows = bench.chosen(PREFILTER)
    cell = bench.makeup(rows)
    assert cell["pairs"] == len(rows)
    assert sum(cell["kinds"].values()) == pytest.approx(100)
    assert cell["kinds"]["both German"] == 0
    assert cell["length"] == pytest.approx(bench.pairs.lengths[rows].mean())
    shares = kept_of(bench.prefiltered(), bench.corpus)
    assert shares[CLEAN]["all"] == 100
    assert shares["both English"] == {"AFRL": 100, "Alibaba": 100, "Microsoft": 0, "all": 0}
    assert shares["all"]["all"] == pytest.approx(cell["percent"])


def test_the_ranking_compares_each_kind_with_clean_pairs(bench):
    corpus = bench.corpus
    scores = np.random.default_rng(0).random(len(corpus))
    cell = ranking(scores, corpus)
    kinds, verdicts = corpus.kinds, np.array(corpus.texts.verdicts)
    rows = np.isin(kinds, [CLEAN, "partial"])
    assert cell["auc partial"] == pytest.approx(100 * roc_auc_score(kinds[rows] == "partial", scores[rows]))
    rows = ~np.isin(kinds, ["web crawl", "judged by people"])
    assert cell["auc"] == pytest.approx(100 * roc_auc_score(kinds[rows] != CLEAN, scores[rows]))
    assert cell["ap"] == pytest.approx(100 * average_precision_score(kinds[rows] != CLEAN, scores[rows]))
    rows = verdicts != ""
    assert cell["auc objected"] == pytest.approx(100 * roc_auc_score(verdicts[rows] != "V", scores[rows]))


def test_looking_does_not_change_a_training(bench):
    recipe = Recipe(16, 1, 2, words=240, steps=6, tokens=200, warm_up=2, dropout=0.3)
    pairs = bench.pairs.take(np.arange(40))
    plain, looked_at, seen = make_transformer(recipe, CPU, 0), make_transformer(recipe, CPU, 0), {}
    train_transformer(plain, pairs, recipe, 0)

    def look(steps):
        looked_at.eval()
        torch.rand(3)
        seen[steps] = looked_at.embedding.weight.detach().clone()

    train_transformer(looked_at, pairs, recipe, 0, after=look)
    assert list(seen) == [1, 2, 3, 4, 5, 6]
    assert torch.equal(seen[6], plain.embedding.weight)
    shorter = make_transformer(recipe, CPU, 0)
    train_transformer(shorter, pairs, Recipe(16, 1, 2, words=240, steps=2, tokens=200, warm_up=2, dropout=0.3), 0)
    assert torch.equal(seen[2], shorter.embedding.weight)


def test_trainings_are_kept_and_follow_from_their_seed(bench, monkeypatch):
    rows = bench.chosen(ORACLE)[:60]
    cells = [retrained(bench, rows, seed) for seed in (0, 1)]
    for cell in cells:
        assert all(0 <= cell[bleu_key(name, steps)] <= 100 for name in SETS for steps in SMALL_STEPS)
    assert cells[0] != cells[1]
    monkeypatch.setattr(selection, "train_transformer", None)
    assert [retrained(bench, rows, seed) for seed in (0, 1)] == cells
    with pytest.raises(TypeError):
        retrained(bench, rows[1:], 0)


def test_another_seed_adds_a_training_to_those_that_are_there(bench, tmp_path, monkeypatch):
    monkeypatch.setattr(selection.Bench, "of", lambda session: bench)
    monkeypatch.setattr(selection, "retrained", lambda bench, rows, seed: {bleu_key(SETS[0], 36): 10.0 + seed})
    path = tmp_path / "x.json"
    for seeds, expected in ((1, {"none"}), (3, {"none", "none, seed 1", "none, seed 2"})):
        settings = Namespace(**vars(bench.session.settings) | {"seeds": seeds, "missing": True})
        session = Session(bench.session.run, settings, path)
        part = selection.begin(session, "selections", "")
        selection.measure_choice(part, NONE, lambda bench: bench.chosen(NONE))
        (records,) = json.loads(path.read_text()).values()
        assert set(records["selections"]["cells"]) == expected
    (found,) = over_seeds(records["selections"])["cells"].values()
    assert found[bleu_key(SETS[0], 36)] == pytest.approx(11.0)
    assert found[bleu_key(SETS[0], 36) + "_deviation"] == pytest.approx(1.0)
    assert found["pairs"] == len(bench.pairs)
    assert found["trainings"] == 3


def test_a_training_that_failed_counts_only_if_all_did():
    key = bleu_key(SETS[0], 30)
    cells = {"none": {"failed": "no"}, "none, seed 1": {key: 4.0}, PREFILTER: {"failed": "why"}}
    found = over_seeds({"cells": cells})["cells"]
    assert found == {"none": {key: 4.0, "trainings": 1}, PREFILTER: {"failed": "why", "trainings": 1}}


def test_steps_ascend():
    assert selection._steps("10,20") == (10, 20)
    for text in ("", "a", "20,10", "0,5"):
        with refused(ArgumentTypeError, repr(text)):
            selection._steps(text)


def test_the_network_that_is_trained_again_has_the_size_the_page_says():
    count = sum(p.numel() for p in make_transformer(RETRAINED, CPU, 0).parameters())
    assert 13.5e6 < count < 14e6


def test_every_selection_is_a_part():
    assert list(EXPERIMENT.parts) == ["corpus", "scores", *SELECTIONS]
    assert all(part_name(*key) in SELECTIONS for key in PAPER)
    assert SELECTIONS["arnoldi_tail_per_token_25"] == (OUR_WAY + PER_TOKEN, 25)
    assert {way.removesuffix(PER_TOKEN) for way in PER_WAY} == {*SCORES, RANDOM}
    assert len(PAPER) == 8


def test_the_table_has_the_papers_numbers_beside_ours():
    cells = {label(PAPER_WAY, 5): {bleu_key(SETS[0], 10): 3.25, bleu_key(SETS[1], 30): 20.0, "percent": 5.0}}
    cells[label(RAND_PROJ, 1)] = {"failed": "no"}
    cells[PREFILTER] = {"percent": 66.9, "pairs": 1234, "captions": 2.0, "kinds": {kind: 1.0 for kind in KINDS}}
    lines = EXPERIMENT.tables({"selections": {"cells": cells, "settings": {"at": [10, 30]}}})
    rows = {tuple(w.strip() for w in line.split("|")[1:3]): line.split("|")[3:-1] for line in lines if "|" in line}
    rows = {key: [word.strip() for word in row] for key, row in rows.items()}
    assert rows[PAPER_WAY, "5"] == ["24.0", "30.3", "3.2", "–", "–", "20.0", "1"]
    assert rows[PREFILTER, "67"][:2] == ["11.7", "22.6"]
    assert rows[RAND_PROJ, "1"][2].startswith("failed")
    assert rows[PREFILTER, "1,234"][:3] == ["–", "2.0", "1.0"]


def test_figures_are_drawn_from_what_is_there():
    cells = {label(way, 25): {bleu_key(SETS[1], 30): 1.0} for way in PER_WAY}
    drawn = EXPERIMENT.figures({"selections": {"cells": cells, "settings": {"at": [10, 30]}}}, small=False)
    assert list(drawn) == [SETS[1], f"{SETS[1]}_per_token"]
    found = [set(words_on(drawing())) for drawing in drawn.values()]
    assert {*SCORES, RANDOM} <= found[0]
    assert {*SCORES, RANDOM} <= found[1]
    assert EXPERIMENT.figures({}, small=False) == {}


@pytest.mark.slow
def test_a_small_run_measures_everything(tmp_path):
    argv = ["--small", "--out", str(tmp_path), "--cache", str(tmp_path / "cache")]
    assert main(EXPERIMENT, argv) == 0
    (records,) = json.loads((tmp_path / "data" / "mt_filter_small.json").read_text()).values()
    scores, selections = records["scores"]["cells"], records["selections"]["cells"]
    assert len(scores) == 4 + 2 * len(SCORES)
    assert len(selections) == len(SELECTIONS)
    assert not any("failed" in cell for record in records.values() for cell in record["cells"].values())
    assert min(scores[score]["auc"] for score in SCORES) > 85
    assert selections[ORACLE]["captions"] > 20
    random = selections[label(RANDOM, 10)]["kinds"][CLEAN]
    for way in (PAPER_WAY, OUR_WAY, LOSS):
        assert selections[label(way, 10)]["kinds"][CLEAN] > 2 * random
    page = (tmp_path / "mt_filter_small.md").read_text()
    assert re.search(r"\| Arnoldi +\| +10 \| +25\.0 \| +30\.8 \|", page)
    assert str(tmp_path) not in page
    assert len(list(tmp_path.glob("figures/*.svg"))) == 2 * len(SETS)
    before = (tmp_path / "data" / "mt_filter_small.json").read_text()
    assert main(EXPERIMENT, [*argv, "--missing"]) == 0
    assert (tmp_path / "data" / "mt_filter_small.json").read_text() == before


def test_the_advice_on_sentence_pairs_has_the_numbers_of_the_results():
    records = json.loads((DOCS / "results" / "data" / "mt_filter.json").read_text())["NVIDIA H200"]
    ranked, trained = records["scores"]["cells"], over_seeds(records["selections"])["cells"]
    ways = {
        "loss, mean over tokens": LOSS + PER_TOKEN,
        "loss, sum over tokens": LOSS,
        "self-influence with tail, per token": OUR_WAY + PER_TOKEN,
        "self-influence with tail, of sums": OUR_WAY,
        "self-influence truncated (K = 10), per token": PAPER_WAY + PER_TOKEN,
        "self-influence truncated (K = 10), of sums": PAPER_WAY,
        "all pairs": NONE,
        "half at random": RANDOM,
    }
    section = (DOCS / "which_score.md").read_text().partition("## Sentence pairs")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")][2:]
    found = {name.strip(): [number.strip() for number in numbers] for name, *numbers in rows}
    expected = {}
    for name, way in ways.items():
        cell = trained[label(way, None if way == NONE else 50)]
        auc = f"{ranked[way]['auc']:.1f}" if way in ranked else ""
        expected[name] = [auc, f"{cell['multi30k @3000']:.1f}", f"{cell['newstest2016 @3000']:.1f}"]
    assert found == expected
