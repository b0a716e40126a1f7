"""The small network's experiment: the network is the paper's, distances are right, and a small run goes end to end."""

import json

import pytest
import torch

import eigentrace as et
from eigentrace.demo.digits import load_digits
from experiments.digits.mnist_small import EXPERIMENT, projected_eigenvalues, wasserstein
from experiments.digits.parts.mnist_small_page import CLAIMS, figures, summary, tables
from experiments.digits.parts.noise import noisy
from experiments.digits.parts.small_network import (
    Recipe,
    gradient_norm,
    make_network,
    network,
    objective,
    train,
    trained,
)
from experiments.shared.claims import SEEN, UNDECIDED
from experiments.shared.frame import main
from tests.helpers.drawings import words_on

TOY = Recipe(2, epochs=2, batch_size=10, num_checkpoints=2, iterations=2)


@pytest.fixture(scope="module")
def digits():
    return noisy(load_digits(), 0, torch.device("cpu"), 20)


def test_the_network_has_the_parameters_of_the_paper():
    model = make_network(0)
    assert sum(p.numel() for p in model.parameters()) == 2616
    convolutions = [m for m in model if isinstance(m, torch.nn.Conv2d)]
    assert [m.stride[0] for m in convolutions] == [1, 2, 1, 2, 1, 1]
    assert model(torch.zeros(3, 1, 28, 28)).shape == (3, 10)


def test_training_follows_from_the_seed(digits):
    first, second = (train(digits.images, digits.labels, TOY, 3) for _ in range(2))
    other = train(digits.images, digits.labels, TOY, 4)
    assert len(first.checkpoints) == 2
    assert all(torch.equal(first.final[name], second.final[name]) for name in first.final)
    assert not torch.equal(first.final["0.weight"], other.final["0.weight"])


def test_a_training_comes_back_from_the_cache(digits, tmp_path):
    first = trained(digits.images, digits.labels, TOY, 0, tmp_path)
    files = list(tmp_path.iterdir())
    again = trained(digits.images, digits.labels, TOY, 0, tmp_path)
    assert list(tmp_path.iterdir()) == files
    assert torch.equal(first.final["0.weight"], again.final["0.weight"])
    assert network(again, TOY, torch.device("cpu"))[0].weight.dtype == torch.float64


def test_the_second_stage_reaches_a_minimum():
    recipe = Recipe(2, l2=0.1, epochs=1, num_checkpoints=1, iterations=60)
    some = noisy(load_digits(), 0, torch.device("cpu"), 20)
    model = network(train(some.images, some.labels, recipe, 0), recipe, torch.device("cpu"))
    assert gradient_norm(model, some.images.double(), some.labels, recipe.l2) < 1e-5


def test_the_task_has_the_penalty_the_network_is_trained_with(digits):
    """The second derivative of the objective along a direction is that of the task's exact Hessian."""
    recipe = Recipe(1)
    model = make_network(0, 1).double()
    images, labels = digits.images[:4].double(), digits.labels[:4]
    task = et.classification(model, l2=recipe.penalised)
    fitted = et.ExactHessian(damping=1e-8).fit(task, (images, labels))
    direction = torch.randn(task.layout.numel, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    values = fitted.spectrum.eigenvalues - 1e-8
    expected = (values * (fitted.eigenpairs.directions @ direction).square()).sum()

    names = [name for name, _ in model.named_parameters()]
    gradients = torch.autograd.grad(
        objective(model, images, labels, recipe.l2), list(model.parameters()), create_graph=True
    )
    flat = task.layout.flatten(dict(zip(names, gradients, strict=True)))
    product = torch.autograd.grad(flat @ direction, list(model.parameters()))
    found = task.layout.flatten(dict(zip(names, product, strict=True))) @ direction
    assert found.item() == pytest.approx(expected.item(), rel=1e-9)


def test_the_distance_moves_each_number_to_its_match():
    assert wasserstein(torch.tensor([3.0, -1.0, 0.0]), torch.tensor([0.0, 3.0, -1.0])) == 0
    assert wasserstein(torch.tensor([2.0, 5.0]), torch.tensor([4.0, 1.0])) == 1.0


def test_projected_eigenvalues_are_those_of_the_restriction():
    """All rows give back every eigenvalue; fewer lie within the exact ones, as Cauchy's theorem has it."""
    spectrum = torch.linspace(4.0, -1.0, 12, dtype=torch.float64)
    whole = projected_eigenvalues(spectrum, 12, 0, orthonormal=True)
    assert wasserstein(whole, spectrum) < 1e-12
    some = projected_eigenvalues(spectrum, 5, 0, orthonormal=True).sort(descending=True).values
    assert (some <= spectrum[:5] + 1e-12).all()
    assert (some >= spectrum[-5:] - 1e-12).all()


def test_gaussian_rows_are_right_on_average():
    spectrum = torch.tensor([5.0] + [0.0] * 30, dtype=torch.float64)
    largest = [projected_eigenvalues(spectrum, 50, seed, orthonormal=False).max() for seed in range(200)]
    assert torch.stack(largest).mean().item() == pytest.approx(5.0, rel=0.05)


def _records():
    keeps = (5, 10)
    eigenvalues = {"exact": {"largest": 4.0, "smallest": 0.0, "negative": 0, "deviation": 0.5}}
    found = {"exact Hessian": {"auc": 90.0, "ap": 70.0}, "loss": {"auc": 99.0, "ap": 95.0}}
    for keep in keeps:
        eigenvalues[f"Arnoldi, K={keep}"] = {"distance": 1e-6 * keep}
        for kind in ("RandProj", "RandProj, Gaussian"):
            eigenvalues[f"{kind}, K={keep}"] = {"distance": 0.5 / keep, "distance_sd": 0.01}
        found[f"Arnoldi, K={keep}"] = {"auc": 85.0 + keep, "ap": 60.0 + keep}
        found[f"Arnoldi, tail, K={keep}"] = {"auc": 95.0, "ap": 90.0}
        found[f"RandProj, K={keep}"] = {"auc": 92.0, "ap": 65.0, "auc_sd": 1.0, "ap_sd": 2.0}
    network_cell = {"accuracy_test_given": 71.2, "accuracy_test_true": 90.1, "gradient_norm": 1e-6}
    return {
        "network": {"cells": {"network": network_cell}},
        "eigenvalues": {"cells": eigenvalues},
        "retrieval": {"cells": found},
    }


def _row(lines, start):
    return next([cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith(f"| {start}"))


def test_the_paper_stands_beside_ours():
    lines = tables(_records())
    assert _row(lines, "accuracy on test digits, a fifth relabeled")[1:] == ["71.2", "73.8"]
    assert _row(lines, "accuracy on test digits, true")[1:] == ["90.1", "92.3"]
    assert _row(lines, "RandProj, K=5 ")[1:3] == ["92.0 ± 1.0", "65.0 ± 2.0"]


def test_numbers_that_failed_or_are_missing_leave_the_rest():
    records = _records()
    records["retrieval"]["cells"]["Arnoldi, K=10"] = {"failed": "out of luck"}
    del records["network"], records["eigenvalues"]
    assert any("out of luck" in line for line in tables(records))
    assert figures(records, small=False).keys() == {"auc", "ap"}
    assert figures({}, small=False) == {}
    assert tables({}) == []


def _outcomes(records):
    return [claim.on(records).outcome for claim in CLAIMS]


def test_claims_are_judged_at_every_k():
    records = _records()
    assert _outcomes(records) == [SEEN, UNDECIDED, SEEN, UNDECIDED]
    records["retrieval"]["cells"]["RandProj, K=5"]["auc"] = 80.0
    records["retrieval"]["cells"]["exact Hessian"]["auc"] = 88.0
    assert _outcomes(records) == [SEEN, SEEN, SEEN, SEEN]


def test_the_exact_hessian_is_no_measure_outside_of_a_minimum():
    records = _records()
    records["retrieval"]["cells"]["exact Hessian"]["auc"] = 80.0
    assert _outcomes(records)[3] == SEEN
    records["eigenvalues"]["cells"]["exact"]["negative"] = 2
    assert CLAIMS[3].on(records).outcome == UNDECIDED
    assert "2 exact eigenvalues are below zero" in CLAIMS[3].on(records).evidence


def test_no_claim_is_made_before_there_are_numbers():
    records = _records()
    for keep in (5, 10):
        del records["retrieval"]["cells"][f"RandProj, K={keep}"]
    del records["retrieval"]["cells"]["exact Hessian"]
    assert _outcomes(records) == [SEEN, UNDECIDED, SEEN, UNDECIDED]
    assert _outcomes({}) == [UNDECIDED] * 4
    assert summary({}) == []


def test_figures_are_well_formed():
    drawn = figures(_records(), small=False)
    assert drawn.keys() == {"eigenvalues", "auc", "ap"}
    assert "deviation of exact" in words_on(drawn["eigenvalues"]())
    assert all("exact Hessian" in words_on(drawn[key]()) for key in ("auc", "ap"))


@pytest.mark.slow
def test_a_small_run_measures_everything(tmp_path):
    assert main(EXPERIMENT, ["--small", "--out", str(tmp_path), "--cache", str(tmp_path / "cache")]) == 0
    (parts,) = json.loads((tmp_path / "data" / "mnist_small_small.json").read_text()).values()
    cells = {part: record["cells"] for part, record in parts.items()}
    assert cells["network"]["network"]["parameters"] == 312
    assert cells["eigenvalues"]["Arnoldi, K=5"]["distance"] < 1e-6 * cells["eigenvalues"]["exact"]["largest"]
    assert cells["eigenvalues"]["RandProj, K=5"]["distance"] > cells["eigenvalues"]["exact"]["deviation"]
    assert cells["retrieval"]["loss"]["auc"] > 70
    assert {"exact Hessian", "LiSSA, r=3", "TracIn, C=4", "Arnoldi, tail, K=16"} <= cells["retrieval"].keys()
    page = (tmp_path / "mnist_small_small.md").read_text()
    assert str(tmp_path) not in page
    pictures = list(tmp_path.glob("figures/*.svg"))
    assert len(pictures) == 3
    assert all(picture.name in page for picture in pictures)
