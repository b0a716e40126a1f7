"""Both lemmas of the error analysis hold as stated here, on a small network in float64, and a small run works."""

import json

import pytest
import torch
from torch.func import functional_call, hessian

import eigentrace as et
from eigentrace.demo.digits import load_digits
from experiments.digits.error_analysis import EXPERIMENT
from experiments.digits.parts import lemmas
from experiments.digits.parts.error_page import figures, tables
from experiments.digits.parts.lemmas import (
    Eigen,
    first_order_variance,
    isotropic_noise,
    isotropic_variance,
    missed,
    quadratic,
    solved,
    truncated,
    truncation_bounds,
)
from experiments.digits.parts.small_network import make_network
from experiments.shared.frame import main
from tests.helpers.drawings import words_on
from tests.helpers.places import DOCS

DAMPING, BLOCK, BLOCKS = 0.05, 3, 8


@pytest.fixture(scope="module")
def blocks():
    """Hessians of blocks of digits, with enough damping for an inverse."""
    found = load_digits()
    images, labels = found.train_images[: BLOCK * BLOCKS].double(), found.train_labels[: BLOCK * BLOCKS]
    model = make_network(0, 1).double()
    parts = zip(images.split(BLOCK), labels.split(BLOCK), strict=True)
    return torch.stack([lemmas.hessian(model, *part, 5e-3) for part in parts]) + DAMPING * torch.eye(180).double()


@pytest.fixture(scope="module")
def H(blocks):
    return blocks.mean(dim=0)


@pytest.fixture(scope="module")
def eigen(H):
    return Eigen.of(H)


def columns(size, count, seed=0):
    return torch.randn(size, count, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_the_layerwise_hessian_is_the_exact_one():
    digits = load_digits()
    images, labels = digits.train_images[:6].double(), digits.train_labels[:6]
    model = make_network(0, 1).double()
    layout = et.classification(model).layout

    def mean_loss(flat):
        outputs = functional_call(model, layout.unflatten(flat), (images,))
        weights = [w for name, w in layout.unflatten(flat).items() if name.endswith("weight")]
        return torch.nn.functional.cross_entropy(outputs, labels) + 0.3 / 2 * sum(w.square().sum() for w in weights)

    start = layout.flatten(dict(model.named_parameters())).detach()
    torch.testing.assert_close(
        lemmas.hessian(model, images, labels, 0.3), hessian(mean_loss)(start), rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("keep", [1, 20, 150])
def test_truncation_leaves_out_the_other_terms(H, eigen, keep):
    """The proof in the paper squares the eigenvalues, which this identity does not."""
    g, theta = columns(len(H), 4), columns(len(H), 4, seed=1)
    error = quadratic(H, g, theta) - truncated(eigen, keep, g, theta)
    rest = eigen.vectors[:, keep:].T @ theta
    torch.testing.assert_close(error, (eigen.values[keep:, None] * rest.square()).sum(dim=0) / 2)
    bound, tight = truncation_bounds(eigen, keep, theta)
    assert (error.abs() <= tight).all()
    assert (tight <= bound).all()


def test_the_bound_of_truncation_is_attained(H, eigen):
    """Along the first eigenvector left out, the error equals the bound: no smaller constant would do."""
    keep = 7
    theta = 3.0 * eigen.vectors[:, keep, None]
    g = columns(len(H), 1)
    bound, tight = truncation_bounds(eigen, keep, theta)
    error = (quadratic(H, g, theta) - truncated(eigen, keep, g, theta)).abs()
    torch.testing.assert_close(error, bound)
    torch.testing.assert_close(error, tight)


def test_negative_eigenvalues_break_the_lower_bound_but_not_the_upper_one(H, eigen):
    indefinite = H - 0.5 * torch.outer(eigen.vectors[:, 30], eigen.vectors[:, 30])
    known, g = Eigen.of(indefinite), columns(len(H), 1)
    keep = int((known.values > 0).int().argmin())  # the first negative eigenvalue is the next
    theta = known.vectors[:, keep, None]
    error = quadratic(indefinite, g, theta) - truncated(known, keep, g, theta)
    assert error < 0
    assert error.abs() <= truncation_bounds(known, keep, theta)[0] * (1 + 1e-12)


def test_restricting_the_linear_term_too_has_no_such_bound(H, eigen):
    """Q on the span of the first k eigenvectors loses ⟨g, θ⟩ beyond it, which is of first order in θ."""
    keep = 20
    g, kept = columns(len(H), 1), eigen.vectors[:, :keep]
    theta = -1e-4 * (g - kept @ (kept.T @ g))
    error = quadratic(H, g, theta) - quadratic(H, g, kept @ (kept.T @ theta))
    assert error > 100 * truncation_bounds(eigen, keep, theta)[0]


def test_an_error_along_an_eigenvector_costs_its_eigenvalue(H, eigen):
    g = columns(len(H), 3)
    theta = torch.linalg.solve(H, g)
    for k in (0, 5, 100):
        moved = theta + 0.2 * eigen.vectors[:, k, None]
        change = quadratic(H, g, moved) - quadratic(H, g, theta)
        torch.testing.assert_close(change, (eigen.values[k] * 0.2**2 / 2).expand(3), rtol=1e-6, atol=1e-9)


def test_the_best_point_of_the_span_misses_the_terms_of_the_others(H, eigen):
    g, keep = columns(len(H), 3), 40
    kept = eigen.vectors[:, :keep]
    within = kept @ ((kept.T @ g) / eigen.values[:keep, None])
    change = quadratic(H, g, within) - quadratic(H, g, torch.linalg.solve(H, g))
    torch.testing.assert_close(missed(eigen, keep, g), change)


def test_the_variance_is_that_of_small_noise_from_mini_batches(blocks, H, eigen):
    """Every mini-batch is a draw. Shrinking their noise tenfold makes the error of first order ten times smaller."""
    u = columns(len(H), 2)
    y = torch.linalg.solve(H, u)
    off = {}
    for scale in (1e-3, 1e-4):
        noise = scale * (blocks - H)
        found = torch.stack([eigen.vectors.T @ torch.linalg.solve(H + part, u) for part in noise])
        expected = first_order_variance(eigen.values, torch.stack([eigen.vectors.T @ (part @ y) for part in noise]))
        there = expected > 1e-6 * expected.max()
        off[scale] = (found.var(dim=0, correction=0)[there] / expected[there] - 1).abs().max().item()
    assert off[1e-3] < 0.2
    assert off[1e-4] < off[1e-3] / 5


def test_isotropic_noise_has_the_variance_of_its_formula(eigen):
    deviation, count = 0.3, 4000
    generator = torch.Generator().manual_seed(0)
    y = torch.tensor([2.0, -1.0, 0.0, 0.5], dtype=torch.float64)
    basis = torch.linalg.qr(columns(4, 4)).Q
    draws = torch.stack([basis.T @ (isotropic_noise(4, deviation, generator) @ (basis @ y)) for _ in range(count)])
    expected = isotropic_variance(y[:, None], deviation)[:, 0]
    # The relative error of a variance of 4,000 draws is √(2/4000) = 2.2%.
    torch.testing.assert_close(draws.var(dim=0), expected, rtol=0.1, atol=0)


def test_solving_tells_whether_a_matrix_is_definite(H):
    U = columns(len(H), 2)
    definite = H @ H + torch.eye(len(H)).double()
    for A, expected in ((definite, True), (-definite, False), (H - 0.5 * torch.eye(len(H)).double(), False)):
        found, is_definite = solved(A, U)
        assert is_definite is expected
        torch.testing.assert_close(A @ found, U, rtol=0, atol=1e-7)


def test_a_page_without_numbers_has_no_figures():
    assert figures({}, small=False) == {}
    assert tables({}) == []
    failed = {"quadratic": {"cells": {"k=1": {"failed": "out of luck"}}}}
    assert any("out of luck" in line for line in tables(failed))
    assert figures(failed, small=False) == {}


@pytest.fixture(scope="module")
def published():
    (records,) = json.loads((DOCS / "results" / "data" / "error_analysis.json").read_text()).values()
    return {name: record["cells"] for name, record in records.items()}


def test_the_published_numbers_of_the_first_lemma_say_what_the_page_says(published):
    cells = published["quadratic"]
    assert published["network"]["network"]["negative"] == 29
    truncations = {int(name[2:]): cell for name, cell in cells.items() if name.startswith("k=")}
    assert all(cell["largest_share_of_bound"] < 0.03 < 1 / 30 for cell in truncations.values())
    assert all(truncations[k]["largest_share_of_bound"] < 1e-4 for k in truncations if k <= 10)
    assert all(cell["negative"] > 0 for cell in truncations.values())
    assert round(100 * truncations[100]["missed"]) == 92
    assert round(100 * truncations[1000]["missed"]) == 29
    for cell in (cell for name, cell in cells.items() if name.startswith("error")):
        assert cell["difference"] < 1e-7
        assert abs(cell["objective"] / cell["predicted"] - 1) < 0.3


def test_the_published_numbers_of_the_second_lemma_say_what_the_page_says(published):
    cells = published["noise"]
    assert round(cells["alignment"]["slope_batches"] - 2, 2) == -1.34
    bands = [cell for cell in cells.values() if "band" in cell]
    for damping, first in ((3.0, 800), (0.1, 12_800)):
        real = [c for c in bands if c["kind"] == "mini-batches" and c["damping"] == damping]
        assert all(2 / 3 < cell["ratio"] < 4 / 3 for cell in real if cell["b"] >= first)
        assert not all(2 / 3 < cell["ratio"] < 4 / 3 for cell in real if cell["b"] < first)
    undamped = [cell for cell in cells.values() if cell.get("damping") == 0]
    assert all(cell["definite"] == 0 for cell in undamped if "band" not in cell)
    real = [c for c in undamped if "band" in c and c["kind"] == "mini-batches" and c["b"] >= 800]
    assert all(cell["ratio"] > 4 for cell in real)
    for kind, lowest in (("mini-batches", -1), ("Gaussian noise", 0)):
        own = [c for c in bands if (c["kind"], c["damping"], c["b"]) == (kind, 3.0, 12_800)]
        own.sort(key=lambda cell: -cell["eigenvalue"])
        measured = [cell["measured"] for cell in own]
        assert measured.index(min(measured)) == lowest % len(own)
        assert kind == "mini-batches" or measured.index(max(measured)) == len(own) - 1


def test_a_small_run_measures_both_lemmas(tmp_path):
    assert main(EXPERIMENT, ["--small", "--out", str(tmp_path), "--cache", str(tmp_path / "cache")]) == 0
    (parts,) = json.loads((tmp_path / "data" / "error_analysis_small.json").read_text()).values()
    cells = {part: record["cells"] for part, record in parts.items()}
    assert cells["network"]["network"]["parameters"] == 312
    assert cells["network"]["network"]["beyond"] < 1e-12
    for keep in (1, 10, 100):
        assert 0 < cells["quadratic"][f"k={keep}"]["largest_share_of_tight"] <= 1
        assert cells["quadratic"][f"error, k={keep}"]["difference"] < 1e-6
    assert cells["noise"]["alignment"]["slope_batches"] > cells["noise"]["alignment"]["slope_gaussian"] + 0.2
    small_noise = cells["noise"]["mini-batches, damping 0.5, b=200000, ranks 1–10"]
    assert small_noise["ratio"] == pytest.approx(1, abs=0.9)
    page = (tmp_path / "error_analysis_small.md").read_text()
    assert str(tmp_path) not in page
    pictures = list(tmp_path.glob("figures/*.svg"))
    assert len(pictures) == 2
    assert all(picture.name in page for picture in pictures)
    assert any("mini-batches, Lemma 2" in words_on(picture.read_text()) for picture in pictures)
