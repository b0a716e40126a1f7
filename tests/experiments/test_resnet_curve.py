"""Dropping by self-influence: trainings are repeatable, curves drop what they say, the page tells the truth."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from eigentrace.evaluate.subsets import model_seed
from experiments.images.parts.cifar import digits
from experiments.images.parts.noise_problems import ResNet, accuracy
from experiments.images.parts.resnet import Recipe, train_resnet
from experiments.images.resnet_curve import (
    ENDS,
    EXPERIMENT,
    RANDOM,
    SCORES,
    SMALL,
    Size,
    Trained,
    _agreement,
    _curves,
    _verdict,
    cell_name,
    scored,
)
from experiments.shared.frame import main
from tests.helpers.drawings import words_on

TINY = Recipe(width=2, epochs=1, batch_size=20, augment=False)
SIZE = Size(60, 20, (0.5,), 2, 10, 20, 10, 3, 40, 4, TINY)


@pytest.fixture(scope="module")
def trained():
    images = digits().first(60, 20).every(SIZE.stride)
    labels = images.human_labels()
    return Trained(images, labels, train_resnet(images.train, labels, torch.arange(60), TINY, 0), SIZE)


def test_the_network_has_the_size_that_the_page_tells():
    assert f"{sum(p.numel() for p in ResNet(Recipe().width).parameters()):,} parameters" in EXPERIMENT.about


def test_the_page_tells_how_many_trainings_a_curve_takes():
    size = Size()
    assert (len(size.shares), size.seeds, size.recipe.epochs) == (4, 3, 20)
    assert "20 epochs" in EXPERIMENT.about
    assert "four shares, three seeds" in EXPERIMENT.about


def test_batches_are_of_one_size_whatever_is_dropped():
    size = Size()
    left = [size.examples - round(share * size.examples) for share in (0, *size.shares)]
    assert {count % size.recipe.batch_size for count in left} == {0}


def test_training_follows_from_the_seed(trained):
    images, rows = trained.images.train, torch.arange(40)
    first, second, other = (train_resnet(images, trained.labels, rows, TINY, seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["head.weight"], other["head.weight"])


@pytest.mark.parametrize("name", SCORES)
def test_every_training_image_is_scored(trained, name):
    scores = trained.score(name)
    assert scores.shape == (60,)
    assert scores.isfinite().all()
    assert torch.equal(scores, trained.score(name))


def test_scores_are_kept_with_the_time_they_took(trained, tmp_path):
    first, second = (scored(trained, tmp_path, "loss") for _ in range(2))
    assert torch.equal(first[0], trained.score("loss"))
    assert torch.equal(first[0], second[0])
    assert first[1] == second[1] > 0
    scored(replace(trained, labels=trained.labels.flip(0)), tmp_path, "loss")
    scored(replace(trained, size=replace(SIZE, tail_keep=2)), tmp_path, "loss")
    scored(replace(trained, size=replace(SIZE, tail_keep=2)), tmp_path, "tail")
    assert len(list(tmp_path.glob("resnet_loss_*.pt"))) == 2
    assert len(list(tmp_path.iterdir())) == 3


def test_ranks_are_correlated():
    scores = torch.arange(10.0)
    assert _agreement(scores, scores.exp()) == pytest.approx(1)
    assert _agreement(scores, -scores) == pytest.approx(-1)


def test_curves_drop_what_they_say_and_share_their_control(trained, tmp_path):
    scores = torch.arange(60.0)
    top, bottom = (_curves(trained, tmp_path, lambda name: (scores, 0.0), "loss", end) for end in ENDS)
    assert top.shares.tolist() == [0, 0.5]
    assert np.array_equal(top.values[RANDOM], bottom.values[RANDOM])
    images, left = trained.images, torch.arange(30)
    for rows, found in ((left, top), (left + 30, bottom), (torch.arange(60), None)):
        models = [train_resnet(images.train, trained.labels, rows, TINY, model_seed(0, j)) for j in range(SIZE.seeds)]
        expected = [accuracy(model, images.test, images.test_labels) for model in models]
        values = top.values[RANDOM][0] if found is None else found.values["loss"][1]
        assert values.tolist() == pytest.approx(expected)


def _cells(top, bottom):
    shares = [0.0, 0.1, 0.5]
    values = {"top": top, "bottom": bottom}
    cells = {
        cell_name(end, score): {"shares": shares, "values": [[70, 71], [68, 69], values[end]]}
        for end in ENDS
        for score in SCORES
    }
    return cells | {RANDOM: {"shares": shares, "values": [[70, 71], [69, 70], [65, 66]]}}


@pytest.mark.parametrize(
    ("top", "bottom", "says"),
    [
        ([60, 61], [50, 51], "the bottom hurts more, as in the paper"),
        ([50, 51], [60, 61], "the top hurts more, unlike in the paper"),
        ([50, 60], [52, 57], "no difference beyond the spread"),
    ],
)
def test_the_verdict_follows_from_the_numbers(top, bottom, says):
    assert says in _verdict(_cells(top, bottom))


def test_the_table_holds_every_curve_and_what_failed():
    cells = _cells([60, 61], [50, 51])
    cells[cell_name("top", "tail")] = {"failed": "out of luck"}
    page = "\n".join(EXPERIMENT.tables({"clean": {"title": "Published labels", "cells": cells}}))
    assert "60.5 ± 0.7" in page
    assert page.count("failed") == 3
    assert "out of luck" in page
    assert "not both measured" in "\n".join(EXPERIMENT.tables({"clean": {"title": "t", "cells": {}}}))


def test_figures_show_both_ends_the_control_and_the_level():
    cells = _cells([60, 61], [50, 51])
    figures = EXPERIMENT.figures({"worse": {"cells": cells}}, small=False)
    assert set(figures) == {f"worse_{score}" for score in SCORES}
    for drawing in figures.values():
        assert {*(f"{end} dropped" for end in ENDS), RANDOM, "all data"} <= set(words_on(drawing()))


@pytest.mark.slow
def test_a_small_run_measures_everything(tmp_path):
    argv = ["--small", "--out", str(tmp_path), "--cache", str(tmp_path / "cache")]
    assert main(EXPERIMENT, argv) == 0
    (records,) = json.loads((tmp_path / "data" / "resnet_curve_small.json").read_text()).values()
    cells = records["clean"]["cells"]
    assert not any("failed" in cell for cell in cells.values())
    assert cells["network"]["accuracy"] > 70
    full = np.mean(cells[RANDOM]["values"][0])
    assert full > 70
    for end in ENDS:
        for score in SCORES:
            values = np.array(cells[cell_name(end, score)]["values"])
            assert values.shape == (1 + len(SMALL.shares), SMALL.seeds)
            assert values[-1].mean() < full
    assert len(list(tmp_path.glob("figures/*.svg"))) == len(SCORES)
    assert str(tmp_path) not in (tmp_path / "resnet_curve_small.md").read_text()
    before = (tmp_path / "data" / "resnet_curve_small.json").read_text()
    assert main(EXPERIMENT, [*argv, "--missing"]) == 0
    assert (tmp_path / "data" / "resnet_curve_small.json").read_text() == before
