"""The experiment on memorised noise runs, merges what it finds and writes its page."""

import json

import pytest
import torch

from experiments.images.memorised_noise import main
from experiments.images.parts.noise_problems import ResNet, augmented, cross_validated, digits, train
from experiments.images.parts.noise_scores import _label_ridge, _left_out, _whitened
from harness.record import save
from tests.helpers.expecting import refused


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    assert main(["--small", "--groups", "checkpoints", "--out", str(folder)]) == 0
    return folder


def test_a_small_run_writes_numbers_and_a_page(out):
    found = json.loads((out / "data" / "memorised_noise_small.json").read_text())["digits"]["seeds"]["0"]
    assert found["facts"]["examples"] == 600
    assert found["facts"]["accuracy_given_wrong"] > 0.8
    assert found["scores"]["mean loss over all epochs (tracker)"]["ap"] > 60
    page = (out / "memorised_noise_small.md").read_text()
    assert "| mean loss over all epochs (tracker) |" in page.replace("  ", " ").replace("  ", " ")
    assert str(out) not in page


def test_results_merge_score_by_score(out, tmp_path):
    other = {"digits": {"title": "t", "seeds": {"0": {"facts": {}, "run": {}, "scores": {}}}}}
    source = json.loads((out / "data" / "memorised_noise_small.json").read_text())
    other["digits"] |= {"title": source["digits"]["title"]}
    entry = source["digits"]["seeds"]["0"]
    cell = {"ap": 1.0, "auc": 2.0, "seconds": 3.0, "group": "one"}
    failure = {"mean loss over all epochs (tracker)": {"failed": "no", "group": "checkpoints"}}  # replaces no number
    other["digits"]["seeds"]["0"] = entry | {"scores": {"another": cell} | failure}
    (tmp_path / "other.json").write_text(json.dumps(other))
    save(tmp_path / "data" / "memorised_noise_small.json", source)
    assert main(["--small", "--merge", str(tmp_path / "other.json"), "--out", str(tmp_path)]) == 0
    merged = json.loads((tmp_path / "data" / "memorised_noise_small.json").read_text())
    assert merged["digits"]["seeds"]["0"]["scores"] == entry["scores"] | {"another": cell}


def test_cifar_needs_its_data(tmp_path):
    with refused(SystemExit, "--data"):
        main(["--small", "--problems", "memorised", "--out", str(tmp_path)])


def test_training_follows_from_the_seed():
    problem = digits(0, small=True)
    first, second = (train(problem, torch.arange(600), 3).state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_every_example_is_scored_by_a_fold_without_it():
    problem = digits(0, small=True)
    assert cross_validated(problem, 2, 0).isfinite().all()


def test_augmenting_moves_pixels_and_invents_none():
    images = torch.arange(2 * 3 * 8 * 8).float().view(2, 3, 8, 8) + 1
    moved = augmented(images, torch.Generator().manual_seed(0))
    assert moved.shape == images.shape
    for before, after in zip(images, moved, strict=True):
        assert set(after.flatten().tolist()) <= set(before.flatten().tolist()) | {0.0}
    assert ResNet(4)(moved).shape == (2, 10)


def test_left_out_predictions_are_regressions_without_the_example():
    phi = torch.nn.functional.normalize(torch.randn(12, 5, dtype=torch.float64))
    K, ridge = phi @ phi.T, 0.01
    labels = torch.arange(12) % 3
    margin, given = _left_out(K, ridge), _label_ridge(K, labels, ridge)
    targets = torch.nn.functional.one_hot(labels).double() - 1 / 3
    for i in range(12):
        kept = torch.arange(12) != i
        solved = torch.linalg.inv(K[kept][:, kept] + ridge * 12 * torch.eye(11))
        assert torch.allclose(margin[i], 1 - K[i, kept] @ solved.sum(dim=1))
        predicted = K[i, kept] @ solved @ targets[kept]
        assert torch.allclose(given[i], predicted[torch.arange(3) != labels[i]].max() - predicted[labels[i]])
    whole = torch.linalg.inv(phi.T @ phi / 12 + ridge * torch.eye(5))
    assert torch.allclose(-_whitened(K, ridge), phi @ whole @ phi.mean(dim=0))
