"""The paper's table of the longer training: both halves, the penalty, and the figure."""

import json
import xml.etree.ElementTree as ET

import pytest

from experiments.digits.mnist_long import EXPERIMENT, L2, PAPER, TITLES, figures, tables
from experiments.shared.frame import main
from tests.helpers.drawings import words_on


def _record(l2, ap):
    cell = {"auc": 75.0, "ap": ap, "seconds": 1.0, "fit_seconds": 1.0, "run": "now"}
    cells = {f"{name}, seed 0": cell for name in ("TracIn, C=10", "Arnoldi, K=100", "Arnoldi, tail, K=100")}
    network = {"accuracy_train_given": 99.0, "accuracy_test_given": 70.0, "accuracy_test_true": 80.0, "run": "now"}
    return {"title": f"100 epochs, {l2}", "settings": {"l2": l2}, "cells": {"network, seed 0": network} | cells}


RESULTS = {"plain": _record(0.0, 40.0), "l2": _record(L2, 85.0)}


def test_each_half_has_its_own_numbers_of_the_paper():
    text = "\n".join(tables(RESULTS))
    halves = text.split("### ")[1:]
    assert len(halves) == 2
    for half, accuracy, tracin, arnoldi in zip(
        halves, ("69.5", "74.3"), ("72.1", "99.0"), ("42.3", "80.2"), strict=True
    ):
        rows = {cells[0]: cells for line in half.split("\n") if (cells := [c.strip() for c in line.split("|")[1:-1]])}
        assert rows["test digits, a fifth relabeled too"][1:] == ["70.0", accuracy]
        assert rows["TracIn, C=10"][4] == tracin
        assert rows["Arnoldi, K=100"][4] == arnoldi
        assert rows["Arnoldi, tail, K=100"][2] == "–"
    assert "λ = 0.005" in halves[1]
    assert "λ" not in halves[0]
    assert PAPER["plain"].keys() == PAPER["l2"].keys()
    assert len(PAPER["l2"]) == 9


def test_half_a_run_is_laid_out_too():
    assert len("\n".join(tables({"l2": RESULTS["l2"]})).split("### ")) == 2
    assert tables({}) == []
    assert figures({}, small=True) == {}


def test_the_figure_has_a_dot_for_every_number():
    drawing = figures(RESULTS, small=False)["ap"]
    dots = drawing.args[1]
    assert len(dots) == 6 + 4
    assert sum(dot.hollow for dot in dots) == 4
    assert {dot.row for dot in dots} | set(TITLES.values()) <= set(words_on(drawing()))


@pytest.mark.slow
def test_a_small_run_from_end_to_end(tmp_path):
    assert main(EXPERIMENT, ["--small", "--out", str(tmp_path), "--cache", str(tmp_path / "cache")]) == 0
    (records,) = json.loads((tmp_path / "data" / "mnist_long_small.json").read_text()).values()
    assert records["l2"]["settings"]["l2"] == L2
    for half in records.values():
        assert half["cells"]["Loss, C=1, seed 0"]["auc"] > 80
    assert len(list((tmp_path / "cache").iterdir())) == 2
    page = (tmp_path / "mnist_long_small.md").read_text()
    assert str(tmp_path) not in page
    (figure,) = tmp_path.glob("figures/*.svg")
    assert ET.parse(figure).getroot().tag.endswith("svg")
