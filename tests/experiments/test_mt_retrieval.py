"""Exchanged translations: draws are made as the page says, and numbers are computed and laid out right."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score, roc_auc_score

import eigentrace as et
from experiments.shared.frame import main
from experiments.translation.mt_retrieval import (
    EXPERIMENT,
    PARTS,
    SCORED_BY,
    WORK,
    Draw,
    Question,
    by_rand_proj,
    by_rand_select,
    by_the_paper,
    exchanged,
    with_tail,
)
from experiments.translation.parts.mt_retrieval_page import (
    BATCHES,
    PAPER,
    PER_METHOD,
    POSITIVE,
    SELECTED,
    WAYS,
    cell_name,
)
from experiments.translation.parts.network import ALL, KEEPS, LAST, LAYERS, OUR_WAY, PAPER_WAY, Network, Size
from experiments.translation.parts.transformer import Recipe, make_transformer, train_transformer
from tests.helpers.drawings import words_on
from tests.helpers.expecting import refused
from tests.helpers.token_pairs import token_pairs

TINY = Recipe(16, 2, 2, words=40, steps=10, tokens=100, warm_up=3)
SIZE = Size(TINY, steps=22, sample=8, tail_steps=22, tail_sample=16, product_batch=8, batch=16)
DRAW = Draw(16, 4, 2)


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    train = token_pairs(40, 8, words=40, shortest=3)
    model = make_transformer(TINY, torch.device("cpu"), 0)
    train_transformer(model, train, TINY, 0)
    return Network(model.eval(), train, SIZE, tmp_path_factory.mktemp("cache") / "net.pt", {"dev": train})


@pytest.fixture(scope="module")
def question(network):
    return Question.of(network, DRAW)


def test_exchanged_targets_go_round_among_themselves(network):
    rows, targets = exchanged(network.train, DRAW, 0)
    assert len(set(rows)) == DRAW.pairs
    assert sorted(rows) == sorted(targets)
    assert int((rows != targets).sum()) == DRAW.wrong
    again, other = exchanged(network.train, DRAW, 0), exchanged(network.train, DRAW, 1)
    assert np.array_equal(again[1], targets)
    assert not np.array_equal(other[0], rows)


def test_folds_stand_one_after_the_other(network, question):
    assert len(question.pairs) == DRAW.folds * DRAW.pairs
    for fold in range(DRAW.folds):
        rows, targets = exchanged(network.train, DRAW, fold)
        here = slice(fold * DRAW.pairs, (fold + 1) * DRAW.pairs)
        assert torch.equal(question.pairs.source[here], network.train.source[rows])
        assert torch.equal(question.pairs.target[here], network.train.target[targets])
        assert np.array_equal(question.is_wrong[here], rows != targets)


def test_numbers_are_means_over_the_folds(question):
    scores = np.random.default_rng(1).random((DRAW.folds * DRAW.pairs, DRAW.folds))
    cell = question.judged(scores)
    lengths = question.pairs.target_lengths
    found = {"auc": [], "ap": [], "mean_auc": [], "mean_ap": []}
    for fold in range(DRAW.folds):
        here = slice(fold * DRAW.pairs, (fold + 1) * DRAW.pairs)
        for prefix, values in (("", scores[here, fold]), ("mean_", scores[here, fold] / lengths[here] ** 2.0)):
            found[f"{prefix}auc"].append(100 * roc_auc_score(question.is_wrong[here], values))
            found[f"{prefix}ap"].append(100 * average_precision_score(question.is_wrong[here], values))
    for key, numbers in found.items():
        assert cell[key] == pytest.approx(np.mean(numbers))
        assert cell[f"{key}_deviation"] == pytest.approx(np.std(numbers, ddof=1))


def test_the_last_layers_are_half_of_the_decoder(network):
    assert {name.rpartition(".")[0].split(".")[1] for name in network.task(LAST).layout.names} == {"1"}
    assert all(name.startswith("decoder.") for name in network.task(LAST).layout.names)
    base = replace(network, size=Size())
    with refused(et.errors.TaskError, "decoder.3"):
        base.task(LAST)


def test_the_papers_cuts_are_those_of_the_fit(network, question):
    found = by_the_paper(question, LAST)
    fitted, _ = network.fit(LAST, PAPER_WAY)
    method = network.method(PAPER_WAY)
    assert (method.curvature, method.tail, method.spread, method.sample) == ("hessian", None, True, SIZE.sample)
    for keep in KEEPS:
        for name, positive in ((PAPER_WAY, False), (POSITIVE, True)):
            cut = fitted.distill(keep, positive_only=positive)
            scores = question.ordered.back(cut.self_influence(question.ordered.data))
            assert found[name, keep]["ap"] == pytest.approx(question.judged(scores)["ap"])


def test_a_fit_is_kept_for_the_next_command(network, question):
    first = with_tail(question, LAST)
    before = network.fit(LAST, OUR_WAY)[0]
    assert before.delta > 0
    assert len([path for path in network.path.parent.iterdir() if path.is_dir()]) >= 1
    assert {key: cell["ap"] for key, cell in with_tail(question, LAST).items()} == {
        key: pytest.approx(cell["ap"]) for key, cell in first.items()
    }


def test_the_precision_of_scores_leaves_the_fit_as_it_is(network):
    coarse = replace(network, size=replace(network.size, score_precision="bf16"))
    assert (network.compute.precision, coarse.compute.precision) == ("fp32", "bf16")
    for estimator in (PAPER_WAY, OUR_WAY):
        assert coarse.method(estimator) == network.method(estimator)


def test_no_product_of_a_full_fit_has_more_numbers_than_cublas_counts():
    """Rows that are multiplied as they lie, in float32, must stay below 2³¹ numbers; those of bfloat16 are packed."""
    assert Size().basis == "bf16"
    assert max(KEEPS) * 60_524_544 < 2**31
    assert all(method.keep <= max(KEEPS) for method, *_ in SCORED_BY.values() if isinstance(method, et.RandProj))


def test_every_fold_has_rows_and_parameters_of_its_own(network, question):
    task, data = network.task(LAST), question.ordered.data
    sets = [et.RandProj(max(KEEPS), seed=seed).fit(task, data).features(data) for seed in (0, 1)]
    columns = np.stack([(question.ordered.back(rows)[:, :10] ** 2).mean(axis=1) for rows in sets], axis=1)
    assert by_rand_proj(question, LAST)["RandProj", 10]["ap"] == pytest.approx(question.judged(columns)["ap"])
    picked = by_rand_select(question, LAST)
    assert set(picked) == {("RandSelect", keep) for keep in SELECTED}


def test_every_row_of_the_table_has_its_work():
    assert list(PARTS.values()) == list(WORK)
    assert len(EXPERIMENT.parts) == 3 + len(LAYERS) * len(PARTS)
    assert [name for names in WORK.values() for name in names] == list(PER_METHOD)
    assert list(SCORED_BY) == list(WAYS)
    assert all(keep in PER_METHOD[method] for _, method, keep in PAPER)


def test_the_table_has_the_papers_numbers_beside_ours():
    keys = [(layers, method, keep) for layers in LAYERS for method, keeps in PER_METHOD.items() for keep in keeps]
    cells = {cell_name(*key): {"auc": 50 + k, "ap": k, "mean_auc": 60 + k, "mean_ap": 30} for k, key in enumerate(keys)}
    cells[cell_name(ALL, OUR_WAY, 20)] = {"failed": "no"}
    peak = {"memory": {"cells": {f"{WAYS[0]}, batch {BATCHES[0]}": {"peak": 3 * 2**30, "pairs_per_second": 1234.0}}}}
    lines = EXPERIMENT.tables({"retrieval": {"cells": cells}} | peak)
    rows = {tuple(word.strip() for word in line.split("|")[1:3]): line for line in lines if line.startswith("|")}
    number = keys.index((ALL, PAPER_WAY, 20))
    row = [word.strip() for word in rows["all layers, Arnoldi", "20"].split("|")[3:-1]]
    assert row == ["93.8", "54.4", f"{50 + number:.1f}", f"{number:.1f}", f"{60 + number:.1f}", "30.0"]
    assert "81.3 | 22.2" in rows["last 3 decoder layers, RandSelect", "1000"]
    assert "failed" in rows["all layers, Arnoldi + tail", "20"]
    assert "1,234" in rows[WAYS[0], "3.0"]
    assert len(PAPER) == 12


def test_the_figure_is_drawn_from_what_is_there():
    cells = {cell_name(ALL, "RandProj", keep): {"ap": float(keep)} for keep in KEEPS} | {"loss": {"ap": 40.0}}
    (drawing,) = EXPERIMENT.figures({"retrieval": {"cells": cells}}, small=False).values()
    texts = set(words_on(drawing()))
    assert {"RandProj", "loss", ALL} <= texts
    assert LAST not in texts
    assert EXPERIMENT.figures({}, small=False) == {}


@pytest.mark.slow
def test_a_small_run_measures_everything(tmp_path):
    argv = ["--small", "--out", str(tmp_path), "--cache", str(tmp_path / "cache")]
    assert main(EXPERIMENT, argv) == 0
    (records,) = json.loads((tmp_path / "data" / "mt_retrieval_small.json").read_text()).values()
    cells = records["retrieval"]["cells"]
    assert len(cells) == 3 + 2 * sum(len(keeps) for keeps in PER_METHOD.values())
    assert not any("failed" in cell for record in records.values() for cell in record["cells"].values())
    assert len(records["memory"]["cells"]) == len(WAYS) * len(BATCHES)
    assert cells["network"]["dev_accuracy"] > 70
    assert cells["loss"]["auc"] > 90
    assert cells[cell_name(ALL, OUR_WAY, 20)]["auc"] > 85
    page = (tmp_path / "mt_retrieval_small.md").read_text()
    assert len(re.findall(r"^\| all layers, Arnoldi +\| +20 \| +93\.8 \| +54\.4 \|", page, re.MULTILINE)) == 1
    assert str(tmp_path) not in page
    assert len(list(tmp_path.glob("figures/*.svg"))) == 1
    elsewhere = ["--small", "--out", str(tmp_path / "other"), "--cache", str(tmp_path / "cache")]
    assert main(EXPERIMENT, [*elsewhere, "--parts", "last_proj"]) == 0
    (other,) = json.loads((tmp_path / "other" / "data" / "mt_retrieval_small.json").read_text()).values()
    name = cell_name(LAST, "RandProj", 10)
    assert set(other["retrieval"]["cells"]) == {cell_name(LAST, "RandProj", keep) for keep in KEEPS}
    assert other["retrieval"]["cells"][name]["ap"] == cells[name]["ap"]
    before = (tmp_path / "data" / "mt_retrieval_small.json").read_text()
    assert main(EXPERIMENT, [*argv, "--missing"]) == 0
    assert (tmp_path / "data" / "mt_retrieval_small.json").read_text() == before
