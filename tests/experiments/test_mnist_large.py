"""The paper's first table: its network, its noise, what is measured and how it is laid out."""

import gzip
import json
import struct
import warnings
import xml.etree.ElementTree as ET
from dataclasses import replace

import numpy as np
import pytest
import torch

import eigentrace as et
from eigentrace.demo.digits import Digits, load_digits
from eigentrace.errors import ConvergenceWarning, EigentraceWarning, InputError, NumericalError
from eigentrace.evaluate import retrieval
from experiments.digits.mnist_large import EXPERIMENT, PAPER, figures, tables
from experiments.digits.parts.large_network import SMALL, Recipe, network, stream, train, trained, with_small_top
from experiments.digits.parts.noise import _FILES, Subject, noisy, read_mnist, tenth
from experiments.digits.parts.scores import (
    Size,
    _lissa,
    arnoldi_rows,
    family_of,
    gradient_rows,
    once,
    over_seeds,
    quality,
    timed,
)
from experiments.shared.frame import main
from tests.helpers.drawings import words_on
from tests.helpers.expecting import expect_mentions, refused

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def some():
    return noisy(load_digits(), 0, CPU, 60)


@pytest.fixture(scope="module")
def subject(some):
    recipe = Recipe(epochs=2, batch_size=20, lr=0.01, num_checkpoints=2)
    states = train(some.images, some.labels, recipe, 0)
    return Subject(some, network(states[-1], CPU), states, recipe, 0)


def test_a_fifth_of_all_labels_is_wrong():
    found = noisy(load_digits(), 0, CPU)
    assert int(found.is_wrong.sum()) == 1200
    assert int((found.test_labels != found.test_true_labels).sum()) == 200
    assert not torch.equal(found.is_wrong, noisy(load_digits(), 1, CPU).is_wrong)


def test_noise_has_nothing_to_do_with_other_draws_of_the_same_seed():
    found = noisy(load_digits(), 0, CPU)
    curvature = found.data.sample(512, torch.Generator().manual_seed(0))
    first = torch.randperm(6000, generator=stream(0, "order"))[:512]
    for rows in (torch.from_numpy(curvature), first):
        assert 0.1 < found.is_wrong[rows].double().mean() < 0.3


def test_training_follows_from_the_seed_and_keeps_checkpoints_evenly(some):
    recipe = Recipe(epochs=4, batch_size=30, num_checkpoints=2)
    first, second, other = (train(some.images, some.labels, recipe, seed) for seed in (0, 0, 1))
    assert len(first) == 2
    assert all(torch.equal(first[-1][name], second[-1][name]) for name in first[-1])
    assert not torch.equal(first[-1]["0.weight"], other[-1]["0.weight"])
    assert Recipe(epochs=100).checkpoint_epochs == set(range(10, 101, 10))
    assert Recipe().checkpoint_epochs == set(range(1, 11))
    assert Recipe(epochs=3).checkpoint_epochs == {1, 2, 3}


def test_the_penalty_of_the_training_is_that_of_the_task(some):
    """One step from the same weights differs by lr · λ · θ."""
    recipe = {"epochs": 1, "batch_size": 60, "momentum": 0.0}
    plain, decayed = (train(some.images, some.labels, Recipe(l2=l2, **recipe), 0)[0] for l2 in (0.0, 0.25))
    begun = train(some.images, some.labels, Recipe(lr=0.0, **recipe), 0)[0]
    assert torch.allclose(plain["7.weight"] - decayed["7.weight"], 0.1 * 0.25 * begun["7.weight"], atol=1e-7)
    made = Subject(some, network(plain, CPU), [plain], Recipe(l2=0.25), 0)
    assert set(made.task.l2.values()) == {0.25}


def test_a_training_is_done_once(some, tmp_path):
    recipe = Recipe(epochs=1, batch_size=30)
    first = trained(some.images, some.labels, recipe, 0, tmp_path, "test")
    (kept,) = tmp_path.iterdir()
    written = kept.stat().st_mtime_ns
    again = trained(some.images, some.labels, recipe, 0, tmp_path, "test")
    assert kept.stat().st_mtime_ns == written
    assert torch.equal(first[0]["9.bias"], again[0]["9.bias"])


def test_a_training_that_diverged_is_not_kept(some, tmp_path):
    with refused(NumericalError, "1e+30"):
        trained(some.images, some.labels, Recipe(epochs=3, batch_size=30, lr=1e30), 0, tmp_path, "test")
    assert not list(tmp_path.iterdir())


def test_what_several_numbers_need_is_done_once_even_if_it_fails():
    calls = []

    def fails():
        calls.append(1)
        raise torch.OutOfMemoryError("CUDA out of memory")

    ask, answer = once(fails), once(lambda: calls.append(2) or "made")
    for _ in range(3):
        with refused(RuntimeError, "OutOfMemoryError: CUDA out of memory"):
            ask()
        assert answer() == "made"
    assert calls == [1, 2]


def test_a_tenth_of_the_parameters_can_be_selected(subject):
    cut = with_small_top(subject.model)
    assert torch.allclose(cut(subject.digits.images), subject.model(subject.digits.images), atol=1e-5)
    coverage = et.classification(cut, params="top 10%").coverage
    assert et.classification(subject.model).coverage.selected == coverage.total == 824_458
    assert coverage.selected == 2570 + 26 * 3137


def test_numbers_are_those_of_the_method(subject):
    cells = {name: work for name, work in gradient_rows(subject, Size(keeps=(2,), draws=2))}
    data = subject.digits.data
    by_hand = retrieval(et.TracIn().fit(subject.task, data).self_influence(data), subject.digits.is_wrong)
    assert cells["TracIn, C=1"]()["ap"] == pytest.approx(100 * by_hand.ap)
    draws = [et.RandSelect(keep=2, seed=seed).fit(subject.task, data).self_influence(data) for seed in (0, 1)]
    aucs = [100 * retrieval(scores, subject.digits.is_wrong).auc for scores in draws]
    cell = cells["RandSelect, K=2"]()
    assert cell["auc"] == pytest.approx(sum(aucs) / 2)
    assert cell["auc_sd"] == pytest.approx(abs(aucs[0] - aucs[1]) / 2**0.5)
    assert quality(cell, "auc").count("±") == 1


def test_only_cuts_with_the_last_pairs_say_that_these_have_not_settled():
    def fits():
        warnings.warn("the last pairs", ConvergenceWarning, stacklevel=1)
        warnings.warn("kinks", EigentraceWarning, stacklevel=1)

    found = timed(fits, CPU)
    assert (found.warning, found.unsettled) == ("kinks", "the last pairs")


def test_every_cut_has_what_was_warned_of_the_fit(subject):
    rows = dict(arnoldi_rows(subject, Size(keeps=(1, 2), steps=2, sample=20), every=False))
    tail = [rows[f"Arnoldi, tail, K={keep}"]().get("note", "") for keep in (1, 2)]
    assert "converged" not in tail[0]
    assert "not converged" in tail[1]


def test_every_method_is_judged_on_the_digits_that_lissa_scores(subject):
    shared = subject.sharing(20)
    rows = shared.shared
    assert len(set(rows.tolist())) == 20
    assert torch.equal(rows, subject.sharing(20).shared)
    assert not torch.equal(rows, replace(subject, seed=1).sharing(20).shared)
    scores = et.TracIn().fit(subject.task, subject.digits.data).self_influence(subject.digits.data)
    cell = dict(gradient_rows(shared, Size(keeps=(), draws=1)))["TracIn, C=1"]()
    by_hand = [retrieval(scores[some], subject.digits.is_wrong[some]).ap for some in (slice(None), rows)]
    assert [cell["ap"], cell["shared_ap"]] == pytest.approx([100 * ap for ap in by_hand])


def test_lissa_says_that_its_time_is_extrapolated(subject):
    cut = with_small_top(subject.model)
    shared = subject.sharing(20)
    cell = _lissa(shared, et.classification(cut, params="9.*"), 1)
    assert cell["rows"] == 20
    assert cell["shared_ap"] == cell["ap"]
    with refused(InputError, "sharing"):
        _lissa(subject, shared.task, 1)
    assert "20 random digits" in cell["note"]
    assert "times 3" in cell["note"]


def _results():
    def cell(auc):
        return {"auc": auc, "ap": 90.0, "seconds": 0.25, "fit_seconds": 12.0, "run": "now"}

    names = {"arnoldi": "Arnoldi, K=10", "gradients": "RandProj, K=100", "losses": "Loss, C=1"}
    found = {part: {"cells": {f"{name}, seed {s}": cell(70.0 + 2 * s) for s in (0, 1)}} for part, name in names.items()}
    for drawn in found["gradients"]["cells"].values():
        drawn |= {"auc_sd": 0.3, "ap_sd": 0.7}
    for seed, one in enumerate(found["arnoldi"]["cells"].values()):
        one["shared_ap"] = 77.0 + 4 * seed
    found["arnoldi"]["cells"]["Arnoldi, all digits, K=10, seed 0"] = cell(70.0)
    found["losses"]["cells"]["Mean loss, C=10, seed 0"] = {"failed": "it did", "run": "now"}
    return found


def test_the_paper_stands_beside_the_mean_over_seeds():
    rows = [[word.strip() for word in line.split("|")[1:-1]] for line in tables(_results()) if line.startswith("|")]
    by_name = {row[0]: row[1:] for row in rows}
    over_seeds_too = ["79.0 ± 2.8", "71.0 ± 1.4", "95.0", "90.0 ± 0.0", "84.0", "0.25", "0.2", "12", "353"]
    assert by_name["Arnoldi, K=10"] == over_seeds_too
    drawn = ["–", "71.0 ± 1.4", "98.6", "90.0 ± 0.0", "93.9", "0.25", "1.9", "12", "–"]
    assert by_name["RandProj, K=100"] == drawn
    assert "Standard deviation of AP over draws of one training: RandProj, K=100 0.7." in tables(_results())
    (once_only,) = (name for name in by_name if name.startswith("Arnoldi, all digits, K=10"))
    assert once_only.endswith("<sup>1</sup>")
    assert tables(_results())[0].startswith("Means over 2 trainings")
    assert by_name["Mean loss, C=10"][1].startswith("failed")
    assert list(over_seeds(_results().values()))[:2] == ["RandProj, K=100", "Arnoldi, K=10"]


def test_the_figure_holds_both_panels():
    words = words_on(figures(_results(), small=False)["trade_off"]())
    assert {"Here", "In the paper, on a V100", *(family_of(name) for name in PAPER)} <= set(words)
    assert words.count("LiSSA") == 1
    assert figures({}, small=False) == {}


def _mnist(count):
    random = np.random.default_rng(0)
    return {
        name: random.integers(0, 256 if name[0] == "x" else 10, (count, 28, 28) if name[0] == "x" else count, np.uint8)
        for name in _FILES
    }


def test_both_kinds_of_files_are_read_alike(tmp_path):
    arrays = _mnist(40)
    (tmp_path / "npz").mkdir()
    np.savez(tmp_path / "npz" / "mnist.npz", **arrays)
    for name, (file, _) in _FILES.items():
        values = arrays[name]
        head = struct.pack(f">BBBB{values.ndim}i", 0, 0, 8, values.ndim, *values.shape)
        (tmp_path / file).write_bytes(gzip.compress(head + values.tobytes()))
    packed, published = read_mnist(tmp_path / "npz", download=False), read_mnist(tmp_path, download=False)
    assert torch.equal(packed.train_images, published.train_images)
    assert torch.equal(packed.test_labels, published.test_labels)
    assert packed.train_images.shape == (40, 1, 28, 28)
    assert packed.train_images.max() <= 1


def test_each_seed_takes_another_tenth():
    whole = Digits(torch.arange(100), torch.arange(100), torch.arange(50), torch.arange(50))
    first, second = tenth(whole, 0), tenth(whole, 1)
    assert torch.equal(first.train_images, first.train_labels)
    assert len(set(first.train_labels.tolist())) == 10
    assert len(first.test_labels) == 5
    assert set(first.train_labels.tolist()) != set(second.train_labels.tolist())


def test_all_of_mnist_needs_a_folder(tmp_path, capsys):
    given = ["--small", "--download", "--parts", "losses", "--out", str(tmp_path), "--cache", str(tmp_path)]
    with refused(SystemExit, 2):
        main(EXPERIMENT, given)
    expect_mentions(capsys.readouterr().err, ["--download", "--data"])


@pytest.mark.slow
def test_a_small_run_from_end_to_end(tmp_path):
    assert main(EXPERIMENT, ["--small", "--out", str(tmp_path), "--cache", str(tmp_path / "cache")]) == 0
    (records,) = json.loads((tmp_path / "data" / "mnist_large_small.json").read_text()).values()
    assert records["losses"]["cells"]["Loss, C=1, seed 0"]["auc"] > 90
    assert records["arnoldi"]["cells"]["Arnoldi, tail, K=3, seed 0"]["auc"] > 80
    assert len(list((tmp_path / "cache").iterdir())) == 1
    assert SMALL.epochs == records["losses"]["settings"]["epochs"]
    page = (tmp_path / "mnist_large_small.md").read_text()
    assert "random digits" in page
    assert str(tmp_path) not in page
    (figure,) = tmp_path.glob("figures/*.svg")
    assert ET.parse(figure).getroot().tag.endswith("svg")
