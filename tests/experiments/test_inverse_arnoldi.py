"""The experiment on the inverse Hessian: cuts of one fit, the paper's numbers in their rows, and a small run."""

import json

import pytest

import eigentrace as et
from experiments.digits.inverse_arnoldi import EXPERIMENT, INVERSE, figures, self_influence, tables
from experiments.shared.frame import main
from tests.helpers.drawings import words_on
from tests.helpers.small import examples, fit


def _records():
    cells = {"Loss, C=1, seed 0": {"auc": 99.0, "ap": 96.0, "seconds": 0.1, "fit_seconds": 0.1}}
    for family, ap in ((INVERSE, 90.0), ("Arnoldi", 85.0), ("Arnoldi, tail", 95.0)):
        for keep in (10, 100):
            cell = {"auc": ap + 1, "ap": ap, "seconds": 1.0, "fit_seconds": 20.0, "share": 0.9}
            cells[f"{family}, K={keep}, seed 0"] = cell
    return {"inverse": {"cells": cells}}


def _row(lines, start):
    return next([cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith(f"| {start}"))


def test_the_paper_stands_beside_ours():
    lines = tables(_records())
    assert _row(lines, f"{INVERSE}, K=10 ")[1:5] == ["91.0", "97.9", "90.0", "91.9"]
    assert _row(lines, f"{INVERSE}, K=100")[1:5] == ["91.0", "97.9", "90.0", "92.8"]
    assert _row(lines, "Arnoldi, K=10 ")[1:5] == ["86.0", "95.0", "85.0", "84.0"]
    assert _row(lines, "Arnoldi, K=100")[1:5] == ["86.0", "98.2", "85.0", "92.9"]
    assert _row(lines, "Arnoldi, tail, K=10 ")[1:5] == ["96.0", "–", "95.0", "–"]


def test_the_first_pairs_score_as_a_fit_that_keeps_no_more():
    method = et.InverseArnoldi(steps=8, keep=6, solver=et.Lissa(depth=3, damping=0.1))
    fewer = et.InverseArnoldi(steps=8, keep=2, solver=method.solver)
    data = examples()
    fitted = fit(method=method)
    scores = self_influence(fitted.features(data), fitted.blocks[0].weights, 2)
    assert scores.float().tolist() == pytest.approx(fit(method=fewer).self_influence(data).tolist(), rel=1e-4)


def test_figures_are_well_formed():
    (drawing,) = figures(_records(), small=False).values()
    assert any("paper" in word for word in words_on(drawing()))
    assert figures({}, small=False) == {}


def test_a_number_that_failed_leaves_the_rest():
    records = _records()
    records["inverse"]["cells"][f"{INVERSE}, K=100, seed 0"] = {"failed": "LiSSA diverged"}
    assert any("LiSSA diverged" in line for line in tables(records))
    assert figures(records, small=True)


@pytest.mark.slow
def test_a_small_run_measures_everything(tmp_path):
    assert main(EXPERIMENT, ["--small", "--out", str(tmp_path), "--cache", str(tmp_path / "cache")]) == 0
    (parts,) = json.loads((tmp_path / "data" / "inverse_arnoldi_small.json").read_text()).values()
    cells = parts["inverse"]["cells"]
    assert cells["Loss, C=1, seed 0"]["auc"] > 80
    assert {f"{INVERSE}, K={keep}, seed 0" for keep in (3, 6)} <= cells.keys()
    assert all("failed" not in cell for cell in cells.values())
    page = (tmp_path / "inverse_arnoldi_small.md").read_text()
    (picture,) = tmp_path.glob("figures/*.svg")
    assert picture.name in page
    assert str(tmp_path) not in page
