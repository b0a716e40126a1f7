"""Scores against retraining: the tables say what the JSON holds, and the whole path runs."""

import json

from bench.fidelity import main
from bench.fidelity_page import grid_cell, render, stored_cell, tail_cell
from harness.record import save


def record(cells):
    settings = {"lr": 0.01, "epochs": 50}
    cells = {name: cell | {"run": "2026-01-01 00:00"} for name, cell in cells.items()}
    info = {"torch": "2", "eigentrace": "0", "python": "3", "command": "python -m bench.fidelity"}
    return {"title": "mlp", "parameters": 5, "settings": settings, "cells": cells, "runs": {"2026-01-01 00:00": info}}


def page(tmp_path, cells):
    save(tmp_path / "data" / "fidelity.json", {"GPU": {"mlp": record(cells)}})
    render(tmp_path, small=False)
    return (tmp_path / "fidelity.md").read_text(encoding="utf-8")


def test_goals_are_judged(tmp_path):
    exact = {"lds": 48.0, "lds_low": 46.0, "lds_high": 50.0, "delta": 0.03}
    more = {"bytes": 4496, "captured": 0.5, "overlap": 89.0}
    text = page(
        tmp_path,
        {
            tail_cell("auto", 100): exact,
            tail_cell(None, 100): {"lds": 40.0},
            grid_cell(100, 0.1): {"lds": 52.0},
            stored_cell("auto", 100, 1024): {"lds": 44.0} | more,
        },
    )
    assert "48.0 (46.0–50.0) (≥ 43 met); 1.20 × truncated (≥ 1.4 missed)" in text
    assert "0.923 (≥ 0.95 missed)" in text  # 48 of 52
    assert "0.92 (≥ 0.9 met)" in text  # 44 of 48
    assert "89.0 (≥ 90 missed)" in text


def test_a_number_that_failed_is_said_so(tmp_path):
    text = page(tmp_path, {tail_cell("auto", 100): {"failed": "RuntimeError: no"}})
    assert "failed<sup>1</sup>" in text
    assert "RuntimeError: no" in text


def test_it_runs(tmp_path):
    places = ["--cache", str(tmp_path / "cache"), "--out", str(tmp_path / "out")]
    assert main(["--small", "--regimes", "logistic", "--device", "cpu", *places]) == 0
    found = json.loads((tmp_path / "out" / "data" / "fidelity_small.json").read_text(encoding="utf-8"))
    (regimes,) = found.values()
    cells = regimes["logistic"]["cells"]
    assert {"gradient", "truncated/10", "auto/10", "shaped/10", "auto/10/ensemble"} <= cells.keys()
    assert {"ekfac/auto", "ekfac/0.1", "refine/3", "refine/10/0.1", "refine/3/arnoldi"} <= cells.keys()
    text = (tmp_path / "out" / "fidelity_small.md").read_text(encoding="utf-8")
    assert "EK-FAC, by its damping" in text
    assert "Solved, with the damping of the training" in text
    assert all(-100 <= cell["lds"] <= 100 for cell in cells.values())
    (run,) = regimes["logistic"]["runs"].values()
    assert run["command"] == "python -m bench.fidelity --small --regimes logistic --device cpu"
