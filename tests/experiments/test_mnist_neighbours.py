"""Proponents and opponents of digits: which are asked about, what is counted, and the figures."""

import json
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest
import torch

import eigentrace as et
from eigentrace.demo.cnn import make_cnn
from eigentrace.demo.digits import load_digits
from experiments.digits.mnist_neighbours import (
    EXPERIMENT,
    PAPER,
    SHOWN,
    Neighbours,
    _pictured,
    figures,
    neighbours,
    own_proponents,
    queries_of,
    shares,
    tables,
)
from experiments.digits.parts.noise import dataset, noisy
from experiments.shared.frame import main
from tests.helpers.drawings import pictures_on, words_on

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def digits():
    return noisy(load_digits(), 0, CPU, 40)


def test_the_rule_picks_digits_like_the_papers(digits):
    right, wrong = (queries_of(digits, kind, 0, 100) for kind in ("right", "wrong"))
    given, true = digits.test_labels, digits.test_true_labels
    assert len(right) == len(wrong) == 101
    assert (given[right] == true[right]).all()
    assert (given[wrong] != true[wrong]).all()
    assert true[right[0]] == 5
    assert true[wrong[0]] == 4
    assert len(set(wrong[1:].tolist())) == 100
    assert torch.equal(wrong, queries_of(digits, "wrong", 0, 100))
    assert not torch.equal(wrong, queries_of(digits, "wrong", 1, 100))


def test_a_4_labeled_9_goes_before_other_wrong_labels(digits):
    labels = digits.test_true_labels.clone()
    row = int((labels == 4).nonzero()[-1])
    labels[row] = 9
    labels[int((labels == 7).nonzero()[0])] = 0
    assert queries_of(replace(digits, test_labels=labels), "wrong", 0, 5).tolist()[0] == row


def test_neighbours_are_the_extremes_of_influence(digits):
    model = make_cnn(0).eval()
    fitted = et.RandSelect(keep=4).fit(et.classification(model), digits.data)
    queries = torch.tensor([3, 8])
    found = neighbours(fitted, digits, queries, None)
    asked = dataset(digits.test_images[queries], digits.test_labels[queries])
    scores = fitted.influence(digits.data, asked)
    order = scores.argsort(dim=1)
    for query in range(2):
        assert set(scores[query, found.rows["opponents"][query]].tolist()) == set(
            scores[query, order[query, :SHOWN]].tolist()
        )
        assert scores[query, found.rows["proponents"][query, 0]] == scores[query].max()


def test_of_its_own_proponents_are_counted_those_that_are_the_digit_itself(digits):
    fitted = et.TracIn().fit(et.classification(make_cnn(0).eval()), digits.data)
    # A digit is as much like itself as can be at unit length; otherwise longer gradients may come first.
    assert own_proponents(fitted, digits, 0, 10, "gradient")["itself"] == 100
    rows = torch.arange(len(digits.labels))
    scores = fitted.influence(digits.data, digits.data)
    share = 100 * float((scores.argmax(dim=1) == rows).double().mean())
    assert own_proponents(fitted, digits, 0, len(rows), None)["itself"] == pytest.approx(share)
    assert share < 100


def test_shares_count_labels_digits_and_noise(digits):
    """The first query is that of the figure and does not count."""
    right, wrong = (~digits.is_wrong).nonzero()[:, 0], digits.is_wrong.nonzero()[:, 0]
    rows = torch.stack([wrong[[0, 0, 0, 0, 0]], torch.cat([right[:3], wrong[:2]])])
    query = int((digits.test_labels == digits.test_true_labels).nonzero()[0])
    found = Neighbours(torch.tensor([query, query]), {"proponents": rows})
    cell = shares(digits, found, "proponents")
    label = digits.test_labels[query]
    assert cell["wrong"] == 40
    assert cell["same_given"] == 20 * int((digits.labels[rows[1]] == label).sum())
    assert cell["same_digit"] == 20 * int((digits.true_labels[rows[1]] == label).sum())


def _results(digits):
    cells = {}
    for name, wrong in (("paper", 30.0), ("tail", 10.0)):
        for kind, side, normalised in PAPER:
            found = Neighbours(queries_of(digits, kind, 0, 3), {side: torch.arange(20).view(4, SHOWN)})
            cell = {"same_given": 90.0, "same_digit": 80.0, "wrong": wrong, "run": "now"}
            cells[f"{name}, {kind}, {side}, {normalised}, seed 0"] = cell | {"figure": _pictured(digits, found, side)}
    return {"neighbours": {"cells": cells}}


def test_the_table_has_the_words_of_the_paper_in_the_right_rows(digits):
    lines = tables(_results(digits))
    end = lines.index("")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[:end]]
    assert len(rows) == 2 + 16 + 4
    assert len(lines[end + 1 :]) == 2 + 5
    said = ["wrong label, opponents, gradients as they are", "paper's estimator", "90%", "80%", "30%", "9s labeled 4"]
    assert said in rows
    assert ["right label, proponents, gradients at unit length", "with tail", "90%", "80%", "10%", "–"] in rows


def test_figures_show_the_digit_and_all_its_neighbours(digits):
    drawn = figures(_results(digits), small=False)
    assert set(drawn) == {"right", "wrong"}
    svg = drawn["wrong"]()
    assert pictures_on(svg) == 1 + 8 * SHOWN
    query = queries_of(digits, "wrong", 0, 3)[0]
    assert f"{int(digits.test_labels[query])} / {int(digits.test_true_labels[query])}" in words_on(svg)
    assert figures({"neighbours": {"cells": {}}}, small=False) == {}


@pytest.mark.slow
def test_a_small_run_from_end_to_end(tmp_path):
    assert main(EXPERIMENT, ["--small", "--out", str(tmp_path), "--cache", str(tmp_path / "cache")]) == 0
    (records,) = json.loads((tmp_path / "data" / "mnist_neighbours_small.json").read_text()).values()
    cells = records["neighbours"]["cells"]
    assert len(cells) == (3 + 2) * (1 + 2 * 2)
    assert cells["tail, right, proponents, yes, seed 0"]["same_given"] > 80
    assert cells["tail, right, opponents, yes, seed 0"]["same_given"] < 20
    page = (tmp_path / "mnist_neighbours_small.md").read_text()
    assert str(tmp_path) not in page
    assert len([ET.parse(figure) for figure in tmp_path.glob("figures/*.svg")]) == 2
