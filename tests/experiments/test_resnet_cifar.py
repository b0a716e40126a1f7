"""Wrong labels found with a ResNet-20: the network, the noise, the numbers, and the orders read off them."""

import json
import re
from dataclasses import replace
from statistics import mean, stdev

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import eigentrace as et
from eigentrace.errors import InputError
from eigentrace.evaluate import retrieval
from experiments.images import resnet_cifar
from experiments.images.parts.cifar import digits
from experiments.images.parts.resnet20 import ACCURACY, WEIGHTS, ResNet20, _renormalised, check_accuracy, read_weights
from experiments.images.parts.resnet_cifar_page import (
    ABOUT,
    CURVATURE,
    KEEPS,
    METHODS,
    PAPER,
    PAPER_APART,
    SHARES,
    WHERE,
    cell_name,
    compared,
    orders,
)
from experiments.images.resnet_cifar import (
    EXPERIMENT,
    SMALL,
    Question,
    Size,
    noisy_tests,
    paper,
    random_projection,
)
from experiments.shared.claims import NOT_SEEN, SEEN, UNDECIDED
from experiments.shared.frame import main
from experiments.shared.orders import APART, difference
from harness.cifar import normalised
from tests.helpers.drawings import words_on
from tests.helpers.expecting import expect_mentions, refused


@pytest.fixture(scope="module")
def network():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return ResNet20(2).eval()


@pytest.fixture(scope="module")
def question(network):
    images = digits().first(40, 30)
    train, test = (F.avg_pool2d(x, 4) for x in (images.train, images.test))
    size = replace(SMALL, steps=24, counted=24, sample=20, draws=2, batch=20)
    data = et.Data(TensorDataset(train, images.labels), batch_size=20)
    return Question(et.classification(network, "top 10%"), size, data, noisy_tests(test, images.test_labels, 2))


def test_the_network_has_the_size_that_the_page_tells():
    assert f"{sum(p.numel() for p in ResNet20().parameters()):,} parameters" in ABOUT
    assert f"each on {Size().sample:,} new images" in ABOUT
    assert f"{Size().draws} draws" in ABOUT
    assert (Size().noises, Size().tests) == (5, 5000)


def test_a_shortcut_takes_every_second_pixel_and_pads_channels_on_both_sides(network):
    block = network.layer2[0]
    with torch.no_grad():
        kept = block.bn2.weight.clone(), block.bn2.bias.clone()
        block.bn2.weight.zero_()
        block.bn2.bias.zero_()  # only the shortcut is left
        x = torch.rand(1, 2, 4, 4)
        out = block(x)
        block.bn2.weight.copy_(kept[0])
        block.bn2.bias.copy_(kept[1])
    assert torch.equal(out[:, 1:3], x[:, :, ::2, ::2])
    assert not out[:, [0, 3]].any()


def test_published_weights_are_read_by_name_and_others_refused(tmp_path):
    with refused(InputError, tmp_path, WEIGHTS, "akamaster"):
        read_weights(tmp_path)
    model = ResNet20().eval()
    arrays = {k: v.numpy() for k, v in model.state_dict().items() if not k.endswith("num_batches_tracked")}
    np.savez(tmp_path / WEIGHTS, **arrays)
    found = read_weights(tmp_path)
    assert not found.training
    assert torch.equal(found(torch.ones(1, 3, 32, 32)), model(torch.ones(1, 3, 32, 32)))
    np.savez(tmp_path / WEIGHTS, **(arrays | {"linear.bias": np.zeros(9, np.float32)}))
    with refused(InputError, WEIGHTS, "'linear.bias'"):
        read_weights(tmp_path)


def test_a_network_of_another_accuracy_is_refused_by_what_its_images_allow():
    check_accuracy(ACCURACY - 0.05, 300)
    with refused(InputError, "86.7%", "5,000", "91.7%"):
        check_accuracy(ACCURACY - 0.05, 5000)
    with refused(InputError, "100.0%"):
        check_accuracy(1.0, 5000)


def test_images_get_the_normalisation_of_the_training():
    pixels = np.random.default_rng(0).integers(0, 256, (2, 3, 4, 4), dtype=np.uint8)
    mean, std = (torch.tensor(v)[:, None, None] for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    wanted = (torch.from_numpy(pixels) / 255 - mean) / std
    assert torch.allclose(_renormalised(normalised(pixels)), wanted, atol=1e-5)


def test_each_draw_of_the_noise_is_judged_as_if_it_were_scored_alone(question):
    noisy = question.noisy
    assert [len(rows) for rows in noisy.wrong] == [3, 3]
    assert not torch.equal(*noisy.wrong)
    scores = et.Loss().fit(question.task, question.train).self_influence(question.scored)
    cell = noisy.judged(torch.stack([scores, -scores]))
    start = noisy.count
    for draw, rows in enumerate(noisy.wrong):
        labels, is_wrong = noisy.labels[: noisy.count].clone(), torch.zeros(noisy.count, dtype=torch.bool)
        assert (noisy.labels[start : start + len(rows)] != labels[rows]).all()
        labels[rows], is_wrong[rows] = noisy.labels[start : start + len(rows)], True
        start += len(rows)
        with torch.no_grad():
            alone = F.cross_entropy(question.task.model(noisy.images[: noisy.count]), labels, reduction="none")
        assert cell["ap"][0][draw] == pytest.approx(100 * retrieval(alone, is_wrong).ap)
        assert cell["auc"][1][draw] == pytest.approx(100 * retrieval(-alone, is_wrong).auc)


def test_the_papers_estimator_counts_positive_eigenvalues_only(question):
    cells = paper(question, 0)
    size = question.size
    method = et.Arnoldi(size.steps, size.counted, "hessian", None, sample=size.sample, spread=True, compile=False)
    fitted = method.fit(question.task, question.train)
    values = fitted.spectrum.eigenvalues
    assert cells[10]["negative"] == pytest.approx(float(100 * -values[values < 0].sum() / values.abs().sum()))
    assert 0 < cells[10]["negative"] < 100
    assert cells[20]["directions"] == int((values[:20] > 0).sum()) < 20
    scores = fitted.distill(20, positive_only=True).self_influence(question.scored)
    assert cells[20]["ap"] == question.noisy.judged(scores[None])["ap"]


def test_draws_are_groups_of_rows(question):
    rows = et.RandProj(40, seed=0).fit(question.task, question.train).features(question.scored).square()
    cell = random_projection(question, 0)[10]
    wanted = question.noisy.judged(torch.stack([rows[:, s : s + 10].sum(dim=1) for s in (0, 20)]))
    assert np.allclose(cell["ap"], wanted["ap"])
    assert np.shape(cell["ap"]) == (2, 2)


def test_a_difference_counts_noise_by_pairs_and_fits_by_themselves():
    first, second = [[60.0, 62.0, 61.0], [62.0, 64.0, 63.0]], [[60.0, 61.0, 61.5]]
    found = difference(first, second)
    gaps = [61 - 60, 63 - 61, 62 - 61.5]
    assert found.mean == pytest.approx(mean(gaps))
    assert found.error == pytest.approx((stdev(gaps) ** 2 / 3 + stdev([61, 63]) ** 2 / 2) ** 0.5)
    assert found.one_sign
    assert not found.is_apart
    assert difference([[60.0, 62.0, 64.0]], [[50.0, 52.1, 54.0]]).is_apart
    assert not difference([[60.0] * 9 + [50.0]], [[51.0] * 10]).one_sign
    assert not difference([[60.0, 61.0]], [[60.0, 61.0]]).is_apart


def hand_made(gap_of_curvature, gap_of_shares, wobble):
    """Cells in which Arnoldi is ahead by one gap, and the top tenth by the other, with noise that does not pair."""
    records = {}
    for part in SHARES:
        cells = {"network": {"accuracy": 91.7, "tests": 5000, "parameters": 10, "all_parameters": 20}}
        for number, method in enumerate(METHODS):
            for keep in KEEPS:
                level = (
                    60 + (gap_of_curvature if method == "Arnoldi" else 0) + (gap_of_shares if part == "top10" else 0)
                )
                ap = [level + wobble * (-1) ** (seed + number + (part == "all")) for seed in range(5)]
                fit = {"ap": [ap], "auc": [[v + 30 for v in ap]], "directions": 9, "negative": 6.0}
                cells[cell_name(method, keep, 0)] = fit | {"fit_seconds": 1.0, "score_seconds": 1.0}
        records[part] = {"title": part, "cells": cells}
    return records


def verdicts(records, claim):
    return [order.verdict(found) for order, found in compared(records) if order.claim == claim]


def test_verdicts_follow_from_the_numbers():
    ahead = hand_made(5.0, 5.0, 0.1)
    assert verdicts(ahead, WHERE) == ["seen"] * 4
    assert verdicts(ahead, CURVATURE) == ["seen", "told apart", "told apart", "opposite", "opposite", "opposite"]
    level, top, curvature, number, negative = (claim.on(ahead) for claim in EXPERIMENT.claims)
    assert [found.outcome for found in (level, top, curvature, number, negative)] == [
        SEEN, SEEN, NOT_SEEN, UNDECIDED, SEEN,
    ]  # fmt: skip
    expect_mentions(level.evidence, ["Arnoldi 65 to 70"])
    expect_mentions(top.brief, ["Of 4 orders", "4 seen"])
    expect_mentions(curvature.brief, ["1 seen, 3 opposite"])
    expect_mentions(negative.evidence, ["6.0%"])
    behind = hand_made(-5.0, -5.0, 0.1)
    assert verdicts(behind, WHERE) == ["opposite"] * 4
    unclear = hand_made(0.5, 0.5, 3.0)
    assert set(verdicts(unclear, WHERE)) == {"cannot be told"}
    assert set(verdicts(unclear, CURVATURE)) == {"cannot be told", "not told apart"}
    assert {claim.on({}).outcome for claim in EXPERIMENT.claims} == {UNDECIDED}


def test_the_papers_orders_are_those_of_its_table():
    by_claim = {claim: [o.paper for o in orders() if o.claim == claim] for claim in (CURVATURE, WHERE)}
    assert by_claim[CURVATURE] == pytest.approx([2.1, -1.1, 0.8, -2.5, -2.0, -1.8])
    assert by_claim[WHERE] == pytest.approx([7.4, 3.9, 3.3, 3.2])
    assert pytest.approx(APART * (2 * 0.7**2 / 5) ** 0.5) == PAPER_APART
    assert len(PAPER) == len(SHARES) * len(KEEPS) * 2


def test_the_table_has_the_papers_numbers_beside_ours_and_says_what_failed():
    records = hand_made(5.0, 5.0, 1.0)
    records["top10"]["cells"][cell_name("Arnoldi", 10, 1)] = {
        key: value if key != "ap" else [[v + 2 for v in value[0]]]
        for key, value in records["top10"]["cells"][cell_name("Arnoldi", 10, 0)].items()
    }
    records["all"]["cells"]["loss"] = {"failed": "no memory"}
    page = "\n".join(EXPERIMENT.tables(records))
    (row,) = re.findall(r"^\| top 10%, Arnoldi +\| +10 \|(.*)\|$", page, re.MULTILINE)
    spread = f"{stdev([1, -1, 1, -1, 1]):.1f}"
    assert [word.strip() for word in row.split("|")] == ["94.2", "64.4", "100.2", spread, "71.2", spread, "1.4"]
    assert "91.7% of 5,000 test images" in page
    assert "no memory" in page
    (drawing,) = EXPERIMENT.figures(records, small=False).values()
    assert {"Arnoldi", "RandProj", "K = 10"} <= set(words_on(drawing()))
    assert EXPERIMENT.figures({}, small=False) == {}
    assert EXPERIMENT.tables({})


def test_the_network_is_asked_for_with_its_images(tmp_path, capsys):
    for name in ("cifar10_train_00000.npz", "cifar10_test_00000.npz"):
        (tmp_path / name).touch()
    with pytest.raises(SystemExit):
        main(EXPERIMENT, ["--data", str(tmp_path), "--out", str(tmp_path / "out")])
    expect_mentions(capsys.readouterr().err, [WEIGHTS, "akamaster"])


def test_numbers_are_measured_once(tmp_path, monkeypatch):
    size = replace(SMALL, examples=60, tests=40, noises=2, draws=2, sample=30)
    monkeypatch.setattr(resnet_cifar, "SMALL", size)
    argv = ["--small", "--seeds", "1", "--parts", "top10", "--out", str(tmp_path), "--cache", str(tmp_path / "cache")]
    assert main(EXPERIMENT, argv) == 0
    path = tmp_path / "data" / "resnet_cifar_small.json"
    before = path.read_text()
    (records,) = json.loads(before).values()
    assert len(records["top10"]["cells"]) == 3 + len(METHODS) * len(KEEPS)
    assert np.shape(records["top10"]["cells"][cell_name("RandProj", 20, 0)]["ap"]) == (2, 2)
    assert main(EXPERIMENT, [*argv, "--missing"]) == 0
    assert path.read_text() == before
    argv[2] = "2"
    assert main(EXPERIMENT, [*argv, "--missing"]) == 0
    (records,) = json.loads(path.read_text()).values()
    assert len(records["top10"]["cells"]) == 3 + (2 * len(METHODS) - 1) * len(KEEPS)
    assert str(tmp_path) not in (tmp_path / "resnet_cifar_small.md").read_text()


@pytest.mark.slow
def test_a_small_run_measures_everything(tmp_path):
    assert main(EXPERIMENT, ["--small", "--out", str(tmp_path), "--cache", str(tmp_path / "cache")]) == 0
    (records,) = json.loads((tmp_path / "data" / "resnet_cifar_small.json").read_text()).values()
    assert set(records) == set(SHARES)
    assert not any("failed" in cell for record in records.values() for cell in record["cells"].values())
    assert np.mean(records["all"]["cells"]["loss"]["auc"]) > 90
    assert np.mean(records["top10"]["cells"][cell_name("Arnoldi", 10, 0)]["auc"]) > 85
    assert len(compared(records)) == len(list(orders()))
