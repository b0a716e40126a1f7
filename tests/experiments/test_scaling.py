"""Time against the size of the model: what runs, how few products are extrapolated, and what the page says."""

import json
from dataclasses import replace
from xml.etree import ElementTree

import pytest
import torch

import eigentrace as et
from experiments.images.parts.scaling_page import (
    FIXED,
    FRESH,
    Point,
    extrapolated,
    figures,
    points,
    straight,
    tables,
)
from experiments.images.scaling import EXPERIMENT, HALF, NAMES, make_subject, method, orthogonalise, published
from experiments.shared.frame import main
from harness.fits import ByRow, fit
from harness.measure import Run
from harness.models import SMALL
from tests.helpers.drawings import words_on

CPU = Run(torch.device("cpu"), True, 0.0, {})
PARTS = {"checks": 1.0, "first product": 2.0, "products": 3.0, "orthogonalisation": 100.0, "eigenvectors": 0.5}


def fitted(steps, seconds):
    return {"seconds": seconds, "parts": PARTS, "peak": None, "settings": {"steps": steps}, "warnings": [], "run": "d"}


def record(parameters, cells):
    return {"title": f"net {parameters}", "settings": {"steps": 200}, "facts": {"parameters": parameters}} | {
        "cells": cells,
        "runs": {},
    }


def test_the_upper_half_is_half_of_the_parameters_and_ends_at_the_head():
    whole, half = make_subject("vit_l_32", CPU), make_subject(HALF, CPU)
    assert 0.5 <= half.task.layout.numel / whole.task.layout.numel < 0.65
    assert "head.weight" in half.task.params
    assert "patches.weight" not in half.task.params


def test_fits_are_the_papers_and_ours():
    full = replace(CPU, small=False)
    paper, ours = method("hessian", 200, full), method("gauss-newton", 15, full)
    assert (paper.steps, paper.sample, paper.curvature, paper.tail) == (200, 512, "hessian", None)
    assert (ours.steps, ours.keep, ours.curvature, ours.tail) == (15, 15, "gauss-newton", "auto")
    assert paper.compile is False


def test_orthogonalisation_runs_all_steps():
    found = orthogonalise(make_subject("vit_b_32", CPU), et.Arnoldi(steps=6, keep=2), CPU)
    assert found["steps"] == 6
    assert found["seconds"] > 0


def test_a_fit_is_put_together_from_few_products_and_all_of_the_orthogonalisation():
    # 1 to check, 2 for the first product, 199 more of 3 / 3 seconds each, 40 to orthogonalise, and the eigenvectors
    assert extrapolated(fitted(4, 999.0), {"seconds": 40.0}, 200) == pytest.approx(1 + 2 + 199 + 40 + 0.5)


def test_what_was_measured_comes_before_what_was_extrapolated():
    few, whole = fitted(4, 999.0), {"seconds": 40.0, "steps": 200, "run": "d"}
    (point,) = points({"a": record(10, {"hessian/4": few, "orthogonalisation/200": whole})})
    assert (point.extrapolated_from, point.seconds) == (4, pytest.approx(242.5))
    cells = {"hessian/4": few, "orthogonalisation/200": whole, "hessian/200": fitted(200, 230.0)}
    (point,) = points({"a": record(10, cells)})
    assert (point.extrapolated_from, point.seconds) == (None, 230.0)
    assert points({"a": record(10, {"hessian/4": few})}) == []


def test_a_line_is_fitted_by_least_squares():
    rows = [Point("m", int(x * 1e6), "hessian", 3 + 2 * x, None, {}) for x in (1, 2, 5)]
    line = straight(rows)
    assert (line.start, line.rate, line.r2) == pytest.approx((3, 2, 1))
    bent = straight([*rows, Point("m", 3_000_000, "hessian", 30.0, None, {})])
    assert 0 < bent.r2 < 0.9
    assert straight(rows[:2]) is None


def test_the_page_has_the_papers_times_in_its_rows_and_the_figure_is_well_formed():
    records = {
        name: record((number + 1) * 10_000_000, {f"{kind}/200": fitted(200, 5.0 + number + len(kind))})
        | {"title": name}
        for number, name in enumerate(NAMES)
        for kind in ("hessian",)
    }
    records["vit_b_32"]["cells"]["gauss-newton/200"] = {"failed": "out of memory", "run": "d"}
    lines = tables(records)
    (large,) = [line for line in lines if line.startswith("| vit_l_32 ")]
    (translation,) = [line for line in lines if line.startswith("| transformer_base ")]
    assert "15 h" in large
    assert "139 min" in translation
    assert sum("15 h" in line or "139 min" in line for line in lines) == 2
    assert any(line.startswith("Not measured: vit_b_32, gauss-newton/200: out of memory") for line in lines)
    assert {*NAMES, "hessian"} <= set(words_on(figures(records, small=False)["seconds"]()))
    assert figures({}, small=True) == {}


def test_the_papers_way_draws_new_examples_and_holds_every_vector():
    found = published(replace(CPU, small=False))
    assert (found.steps, found.sample, found.spread, found.curvature, found.tail) == (200, 512, True, "hessian", None)
    assert (found.basis.dtype, found.basis.max_vectors, found.basis.place) == ("bf16", None, "device")
    assert (found.precision, found.compile) == ("bf16", False)


def test_examples_are_made_from_their_row_numbers():
    made = ByRow(SMALL["vit_b_32"], CPU.device, 3)
    (pixels, label), again, other = made[1], made[1], made[2]
    assert pixels.shape == (3, 56, 56)
    assert label.shape == ()
    assert torch.equal(pixels, again[0])
    assert not torch.equal(pixels, other[0])
    assert len(list(made)) == len(made) == 3


def test_a_fit_with_new_examples_is_timed_by_parts(monkeypatch):
    rows, read = set(), ByRow.__getitem__
    monkeypatch.setattr(ByRow, "__getitem__", lambda made, row: rows.add(int(row)) or read(made, row))
    method = replace(published(CPU), steps=4)
    cell = fit(make_subject("vit_b_32", CPU), method, CPU, 4)
    assert set(cell["parts"]) == {"checks", "first product", "products", "orthogonalisation", "eigenvectors"}
    assert all(seconds > 0 for seconds in cell["parts"].values())
    assert cell["settings"]["batch"] == 4
    # the sample that is checked, and another for each of four products
    assert len(rows) >= 5 * method.sample


def whole(cell, vectors):
    settings = {"steps": 200, "sample": 512, "batch": 64, "vectors": vectors}
    return {"title": "net", "settings": settings, "facts": {"parameters": 10}, "cells": {"fit": cell}, "runs": {}}


def test_fits_with_all_products_have_a_table_of_their_own():
    records = {FRESH: whole(fitted(200, 300.0), 200), FIXED: whole({"failed": "out of memory", "run": "d"}, 100)}
    assert points(records) == []
    assert figures(records, small=False) == {}
    lines = tables(records)
    assert any(line.startswith("All 200 products of net") for line in lines)
    (fresh,) = [line for line in lines if "512 new examples" in line]
    # seconds, 2 + 3 of products, the other parts, and 3 seconds / 199 products
    assert [cell.strip() for cell in fresh.split("|")[2:-1]] == [
        *("64", "300.0", "5.0", "100.0", "0.5", "1.0", "15", "–", "15 h")
    ]
    (fixed,) = [line for line in lines if "restarts at 100 vectors" in line]
    assert "out of memory" in fixed


@pytest.mark.slow
def test_the_small_run_measures_every_part(tmp_path):
    assert main(EXPERIMENT, ["--small", "--out", str(tmp_path)]) == 0
    (records,) = json.loads((tmp_path / "data" / "scaling_small.json").read_text()).values()
    assert set(records) == {*NAMES, "offload", FRESH, FIXED}
    for name in (FRESH, FIXED):
        assert records[name]["cells"]["fit"]["seconds"] > 0
    for name in NAMES:
        assert set(records[name]["cells"]) == {"hessian/8", "gauss-newton/8"}
        assert all(cell["seconds"] > 0 for cell in records[name]["cells"].values())
    assert set(records["offload"]["cells"]) == {"device", "host"}
    few = ["--small", "--steps", "4", "--parts", "transformer_base", "--missing", "--out", str(tmp_path)]
    assert main(EXPERIMENT, few) == 0
    (records,) = json.loads((tmp_path / "data" / "scaling_small.json").read_text()).values()
    assert "orthogonalisation/8" in records["transformer_base"]["cells"]
    assert "hessian, all models" in (tmp_path / "scaling_small.md").read_text()
    (figure,) = tmp_path.glob("figures/*.svg")
    ElementTree.fromstring(figure.read_text())
