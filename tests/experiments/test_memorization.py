"""The experiment on memorisation: networks are the trainer's, correlations are right, and a small run works."""

import argparse
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from eigentrace.evaluate import ManyModels, Retrained, Subsets
from eigentrace.evaluate.subsets import TrainingJob
from experiments.images.memorization import EXPERIMENT, memorised, predicted, reliability, train
from experiments.images.parts.memorised_page import figures, tables
from experiments.images.parts.memorised_problems import CIFAR, SMALL, VEHICLES, cifar, convolutional, digits
from experiments.shared.frame import main
from tests.helpers.drawings import words_on
from tests.helpers.expecting import expect_mentions
from tests.helpers.places import DOCS

SESSION = SimpleNamespace(small=True, settings=argparse.Namespace(data=None), device=torch.device("cpu"))


def test_the_network_that_is_scored_is_trained_as_those_on_subsets():
    problem = digits(SESSION, SMALL)
    trainer = ManyModels(problem.model, *[(problem.inputs, problem.labels)] * 2, SMALL.sgd)
    network = train(trainer, problem, SMALL, 3)
    expected = trainer.outputs([TrainingJob(np.arange(SMALL.examples), 3)])[0]
    losses = torch.nn.functional.cross_entropy(network.model(problem.inputs), problem.labels, reduction="none")
    torch.testing.assert_close(losses, expected, rtol=1e-3, atol=1e-4)
    assert len(network.checkpoints) == SMALL.checkpoints
    torch.testing.assert_close(network.checkpoints[-1]["0.weight"], network.model[0].weight.detach())
    assert not torch.equal(network.checkpoints[0]["0.weight"], network.checkpoints[-1]["0.weight"])


def test_the_cut_has_vehicles_only_with_labels_from_zero():
    problem = cifar(SESSION, SMALL)
    assert problem.inputs.shape == (SMALL.examples, 3, 16, 16)
    assert set(problem.labels.tolist()) == set(range(len(VEHICLES))) == set(problem.test_labels.tolist())
    assert 0 < problem.is_wrong.float().mean() < 0.5
    assert problem.model(problem.inputs[:2]).shape == (2, len(VEHICLES))


def test_the_network_has_eight_convolutions_and_keeps_no_statistics():
    model = convolutional(CIFAR.width, 10)
    assert sum(isinstance(m, torch.nn.Conv2d) for m in model) == 8
    assert not list(model.buffers())


def test_correlations_are_averaged_over_networks_with_an_interval():
    rng = np.random.default_rng(0)
    truth = rng.standard_normal(300)
    mean, low, high = predicted(np.stack([truth, -truth, truth]), truth)
    assert (mean, low, high) == pytest.approx((1 / 3, 1 / 3, 1 / 3))
    noisy = np.stack([truth + rng.standard_normal(300)])
    mean, low, high = predicted(noisy, truth)
    assert low < mean < high
    # The interval of a correlation r of n pairs is about ±1.96(1 - r²)/√n wide.
    assert high - low == pytest.approx(2 * 1.96 * (1 - mean**2) / 300**0.5, rel=0.3)


def test_reliability_is_one_without_noise_and_zero_for_noise_alone():
    masks = Subsets.random(200, 100, 0.7).masks
    rng, gain = np.random.default_rng(0), np.linspace(0.1, 1.0, 200)
    exact = Retrained(masks, (2 - masks * gain)[:, None])
    assert reliability(exact)["reliability_loss"] == pytest.approx(1)
    np.testing.assert_allclose(memorised(exact)["loss"].values, gain)
    np.testing.assert_allclose(memorised(exact)["probability"].values, np.exp(gain - 2) - np.exp(-2))
    noise = Retrained(masks, rng.random((100, 1, 200)))
    assert abs(reliability(noise)["reliability_loss"]) < 0.3


def test_numbers_that_failed_leave_the_rest():
    cells = {"networks": {"failed": "out of luck"}, "loss": {"probability": 0.5, "loss": 0.25, "auc": 90.0, "ap": 80.0}}
    records = {"digits": {"title": "Digits", "cells": cells}}
    lines = tables(records)
    assert any("out of luck" in line for line in lines)
    assert any(line.startswith("| loss") and "0.250" in line for line in lines)
    (drawn,) = figures(records, small=False).values()
    assert "loss" in words_on(drawn())
    assert figures({}, small=False) == {}


def test_cifar_needs_its_data(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(EXPERIMENT, ["--parts", "digits,cifar_cut", "--data", str(tmp_path), "--out", str(tmp_path / "out")])
    expect_mentions(capsys.readouterr().err, ["--data", "--parts digits", "cifar10n_labels_00000_14999.npz"])


@pytest.mark.parametrize("part", ["digits", "cifar_cut"])
def test_the_published_numbers_say_what_the_page_says(part):
    (records,) = json.loads((DOCS / "results" / "data" / "memorization.json").read_text()).values()
    cells = records[part]["cells"]
    scores = {name: cell for name, cell in cells.items() if "probability" in cell}
    best, second = scores.pop("mean loss, 10 checkpoints"), scores.pop("TracIn, 10 checkpoints")
    by_arnoldi = [cell for name, cell in scores.items() if name.startswith("Arnoldi")]
    assert len(by_arnoldi) == 4
    networks = cells["networks"]
    for measure in ("probability", "loss"):
        low, high = f"{measure}_low", f"{measure}_high"
        assert best[low] > max(cell[high] for cell in (second, *scores.values()))
        assert second[low] > max(cell[high] for cell in (scores.values() if part == "digits" else by_arnoldi))
        assert part == "digits" or second[low] < scores["loss"][high]
        assert max(cell[low] for cell in scores.values()) < min(cell[high] for cell in scores.values())
        assert best[high] < networks[f"reliability_{measure}"] ** 0.5 - 0.1
        assert networks[f"mean_wrong_{measure}"] > networks[f"mean_right_{measure}"]
    auc = cells["memorisation, loss"]["auc"]
    assert auc > 99 if part == "digits" else 60 < auc < 80
    assert (networks["mean_right_probability"] > 0.5) is (part == "cifar_cut")


def test_a_small_run_compares_every_score(tmp_path):
    command = ["--small", "--parts", "digits,cifar_cut", "--out", str(tmp_path), "--cache", str(tmp_path / "cache")]
    assert main(EXPERIMENT, command) == 0
    (parts,) = json.loads((tmp_path / "data" / "memorization_small.json").read_text()).values()
    for record in parts.values():
        cells = record["cells"]
        assert cells["networks"]["examples"] == SMALL.examples
        assert cells["networks"]["subsets"] == SMALL.networks
        assert {"Arnoldi, truncated, K=4", "Arnoldi, tail, K=4", "loss", "mean loss, 2 checkpoints"} < cells.keys()
        assert all(-1 <= cells["loss"][key] <= 1 for key in ("probability", "loss_low", "loss_high"))
    page = (tmp_path / "memorization_small.md").read_text()
    assert str(tmp_path) not in page
    (picture,) = tmp_path.glob("figures/*.svg")
    assert picture.name in page
