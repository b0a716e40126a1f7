"""The comparison with the peers runs from end to end without any of them, and says which are not there."""

import argparse
import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

import eigentrace as et
from bench.peers import truth
from bench.peers.__main__ import main
from bench.peers.method import METHODS, is_asked
from bench.peers.networks import Recipe, accuracy, logistic, mlp, resnet, seeded, shaken, small_cnn, train
from bench.peers.ours import arnoldi, gradient, hessian, loss, mean_loss, truncated
from bench.peers.page import render
from bench.peers.problem import Examples, Problem, Spec, make_problem
from bench.peers.problems import PROBLEMS, SMALL, cifar10n
from bench.peers.worker import _best, measured, quality
from eigentrace.errors import InputError
from eigentrace.evaluate import Retrained, Subsets
from harness.command import start
from harness.record import save
from tests.helpers.expecting import expect_mentions, missing, refused
from tests.helpers.places import DOCS, ROOT

CPU = torch.device("cpu")


def toy(folder):
    """Forty points of two classes, five of them wrong."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(48, 4, generator=generator)
    labels = (images[:, 0] > 0).long()
    is_wrong = torch.arange(40) % 8 == 0
    given = torch.where(is_wrong, 1 - labels[:40], labels[:40])
    return Examples(images[:40], given, images[40:], labels[40:], is_wrong)


def pairs(folder):
    """The same without wrong labels, and with eight queries."""
    found = toy(folder)
    clean = torch.where(found.is_wrong, 1 - found.labels, found.labels)
    return replace(found, labels=clean, is_wrong=None, num_queries=8)


def spec_of(load, **options):
    recipe = Recipe(epochs=3, batch=8, lr=0.1)
    settings = {"steps": 12, "keeps": (4,), "checkpoints": 3, "proj_dim": 4, "batch": 16} | options
    return Spec(name="toy", title="Toy", load=load, build=lambda: torch.nn.Linear(4, 2), recipe=recipe, **settings)


@pytest.fixture
def problem(tmp_path):
    return make_problem(spec_of(toy), None, tmp_path, CPU)


@pytest.fixture
def asked(tmp_path):
    return make_problem(spec_of(pairs, models=2), None, tmp_path, CPU)


@pytest.fixture
def absent(monkeypatch):
    """Make every peer impossible to import, wherever this runs."""
    for name, entry in METHODS.items():
        if entry.module:
            monkeypatch.setitem(METHODS, name, replace(entry, module="no_such_package_anywhere"))


def run(out, *options):
    status = main(["--small", "--problems", "digits", "--out", str(out), "--cache", str(out / "cache"), *options])
    (problems,) = json.loads((out / "data" / "peers_small.json").read_text()).values()
    return status, problems["digits"], (out / "peers_small.md").read_text()


def test_the_whole_path_without_any_peer(tmp_path, absent):
    methods = ",".join(["arnoldi", "loss", *(name for name, entry in METHODS.items() if entry.module)])
    status, record, page = run(tmp_path, "--methods", methods)
    assert status == 0
    for name in ("arnoldi", "loss"):
        cell = record["cells"][name]
        assert 0 <= cell["ap"] <= 100
        assert cell["fit"] > 0
        assert cell["score"] > 0
        assert cell["peak"] > cell["peak_growth"] >= 0
        assert cell["version"] == f"eigentrace {et.__version__}"
    for name, entry in METHODS.items():
        if entry.module:
            assert record["cells"][name] == {"missing": "not installed", "run": record["cells"][name]["run"]}
            assert any(entry.title in line and "not installed" in line for line in page.splitlines())
    assert "scikit-learn digits" in page
    assert str(tmp_path) not in page + (tmp_path / "data" / "peers_small.json").read_text()
    # Rendered again, nothing changes; a number measured before outlives a run without the package.
    main(["--small", "--render", "--out", str(tmp_path)])
    assert (tmp_path / "peers_small.md").read_text() == page
    results = json.loads((tmp_path / "data" / "peers_small.json").read_text())
    ((machine, problems),) = results.items()
    problems["digits"]["cells"]["cleanlab"] |= {"fit": 1.0, "score": 2.0, "peak": 2**20, "auc": 77.0, "ap": 66.0}
    del problems["digits"]["cells"]["cleanlab"]["missing"]
    save(tmp_path / "data" / "peers_small.json", {machine: problems})
    _, record, page = run(tmp_path, "--methods", "cleanlab")
    assert record["cells"]["cleanlab"]["auc"] == 77.0
    assert "66.00" in page


def test_data_that_is_not_there_ends_one_problem_only(tmp_path, capsys):
    assert main(["--small", "--problems", "cifar10n", "--out", str(tmp_path), "--cache", str(tmp_path)]) == 1
    expect_mentions(capsys.readouterr().out, ["cifar10n", "InputError"])
    with refused(InputError, "--data"):
        cifar10n(None)


def test_the_recorded_command_names_no_folder():
    argv = ["--data", "/home/me/data", "--cache=/home/me/cache", "--small"]
    settings = argparse.Namespace(device=torch.device("cpu"), seconds=0.0, small=True, profile=False, replace=False)
    assert start("bench.peers", settings, argv).info["command"] == "python -m bench.peers --small"


def test_a_failing_method_becomes_one_line(problem, monkeypatch):
    class Broken:
        settings = ("a", "b")

        def self_scores(self, setting):
            return torch.full((40,), torch.nan) if setting == "a" else torch.zeros(3)

    entry = replace(METHODS["loss"], at="ours:broken")
    monkeypatch.setattr("bench.peers.ours.broken", lambda problem, folder: Broken(), raising=False)
    cell = measured(entry, problem, None)
    assert cell["failed"] == "40 of 40 scores are not finite"
    assert "expected (40,)" in cell["tried"]["b"]["failed"]


def test_the_best_setting_is_put_in_front():
    tried = {"a": {"ap": 10.0}, "b": {"ap": 30.0, "auc": 5.0}, "c": {"failed": "no"}}
    best = _best({"fit": 1.0, "tried": tried}, "ap")
    assert (best["setting"], best["ap"], best["auc"]) == ("b", 30.0, 5.0)
    assert "failed" not in best
    # Nothing is known about pairs before anyone retrained: the first setting stands for the method.
    assert _best({"tried": {"a": {}, "b": {}}}, "lds")["setting"] == "a"


def test_ours_are_what_they_say(problem, tmp_path):
    task, data = et.classification(problem.model()), et.Data(problem.train_set, batch_size=16)
    norms = et.TracIn().fit(task, data).self_influence(data)
    torch.testing.assert_close(gradient(problem, tmp_path).self_scores(""), norms)
    losses = loss(problem, tmp_path).self_scores("")
    torch.testing.assert_close(losses, et.Loss().fit(task, data).self_influence(data))
    x, y = problem.train
    each = [torch.nn.functional.cross_entropy(problem.model(s)(x), y, reduction="none") for s in problem.checkpoints]
    torch.testing.assert_close(mean_loss(problem, tmp_path).self_scores("C=3"), torch.stack(each).mean(0))
    # A linear model's Hessian is its Gauss-Newton matrix, so two roads lead to the truncated scores.
    one, other = (fitter(problem, tmp_path).self_scores("K=4") for fitter in (truncated, hessian))
    torch.testing.assert_close(one, other, rtol=2e-2, atol=1e-3)
    assert not torch.allclose(arnoldi(problem, tmp_path).self_scores("K=4"), one)


def test_pairs_are_measured_against_retraining(asked, tmp_path):
    """Scores that are the retrained losses' own slopes predict them; their negative does the opposite."""
    subsets = Subsets.random(40, 20)
    rng = torch.Generator().manual_seed(0)
    scores = torch.randn(8, 40, generator=rng, dtype=torch.float64)
    outputs = -(torch.from_numpy(subsets.masks).double() @ scores.T)  # (20, 8)
    known = Retrained(subsets.masks, outputs[:, None].numpy())
    assert quality(scores, asked, known)["lds"] == pytest.approx(100)
    assert quality(-scores, asked, known)["lds"] == pytest.approx(-100)
    assert quality(scores.T, asked, known)["failed"].startswith("scores have shape (40, 8)")
    assert quality(scores, asked, None) == {}
    cell = measured(METHODS["gradient-norm"], asked, known)
    assert cell["ensemble"]["models"] == 2
    # The average over networks is the average of their scores.
    mean = sum(gradient(asked.at(i), tmp_path).cross_scores("") for i in range(2)) / 2
    assert cell["ensemble"]["lds"] == pytest.approx(quality(mean, asked, known)["lds"])


def test_ground_truth_is_made_once_and_fits_the_problem(tmp_path):
    spec = replace(SMALL["mnist-lr"], models=1)
    asked = make_problem(spec, None, tmp_path, CPU)
    at = truth.place(tmp_path, spec.name)
    assert truth.read_truth(at, asked) is None
    truth.make_truth(asked, tmp_path, small=True)
    known = truth.read_truth(at, asked)
    assert known.outputs.shape == (truth.SMALL_SUBSETS, truth.SMALL_SEEDS, 10)
    longer = Problem(replace(spec, recipe=replace(spec.recipe, epochs=9)), asked.examples, asked.states, [], CPU)
    with refused(ValueError, "epochs"):
        truth.read_truth(at, longer)
    fewer = Problem(spec, replace(asked.examples, num_queries=3), asked.states, [], CPU)
    with refused(ValueError, 10, 3):
        truth.read_truth(at, fewer)


def test_problems_are_trained_once(tmp_path, monkeypatch):
    first = make_problem(spec_of(toy), None, tmp_path, CPU)
    monkeypatch.setattr("bench.peers.problem.train", lambda *args: pytest.fail("trained again"))
    again = make_problem(spec_of(toy), None, tmp_path, CPU)
    assert all(torch.equal(a, again.states[0][name]) for name, a in first.states[0].items())
    assert len(again.checkpoints) == 3
    assert all(torch.equal(a, first.checkpoints[-1][name]) for name, a in first.states[0].items())
    monkeypatch.undo()
    other = make_problem(spec_of(toy, models=2), None, tmp_path, CPU)
    assert len(other.states) == 2
    assert not torch.equal(other.states[0]["weight"], other.states[1]["weight"])


@pytest.mark.parametrize(("size", "most", "expected"), [(1437, 512, 479), (6000, 512, 500), (5000, 1000, 1000)])
def test_even_batches_leave_no_smaller_one(size, most, expected):
    labels = torch.zeros(size, dtype=torch.long)
    examples = Examples(labels, labels, labels, labels)
    assert Problem(spec_of(toy), examples, [], [], CPU).even_batch(most) == expected


def test_a_prime_number_of_examples_is_one_batch():
    labels = torch.zeros(1433, dtype=torch.long)
    assert Problem(spec_of(toy), Examples(labels, labels, labels, labels), [], [], CPU).even_batch() == 1433


@pytest.mark.parametrize(
    ("build", "shape", "count"),
    [
        (small_cnn, (1, 8, 8), 29_914),
        (logistic, (1, 28, 28), 7_850),
        (mlp, (1, 28, 28), 109_386),
        (resnet, (3, 32, 32), None),
    ],
)
def test_networks_give_ten_logits(build, shape, count):
    state = torch.get_rng_state()
    model = seeded(build, 3).eval()
    assert torch.equal(torch.get_rng_state(), state)
    assert model(torch.zeros(2, *shape)).shape == (2, 10)
    if count:
        assert sum(p.numel() for p in model.parameters()) == count
    again = seeded(build, 3)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_training_follows_the_optimizer(problem):
    """One step on one batch is a gradient step; more of them learn."""
    x, y = problem.train
    model = seeded(lambda: torch.nn.Linear(4, 2), 0)
    before = model.weight.detach().clone()
    torch.nn.functional.cross_entropy(model(x), y).backward()
    expected = before - 0.5 * (model.weight.grad + 0.1 * before)
    model.zero_grad()
    train(model, x, y, Recipe(epochs=1, batch=40, lr=0.5, weight_decay=0.1), seed=0)
    torch.testing.assert_close(model.weight.detach(), expected)
    train(model, x, y, Recipe(epochs=30, batch=8, lr=0.2, cosine=True), seed=0)
    assert accuracy(model, x, y) > 70


def test_shaken_images_are_shifts_and_mirrors():
    images = torch.arange(1.0, 26).reshape(1, 1, 5, 5).repeat(64, 1, 1, 1)
    moved = shaken(images, torch.Generator().manual_seed(0), most=1)
    padded = torch.nn.functional.pad(images[:1], (1,) * 4)
    shifts = [padded[:, :, i : i + 5, j : j + 5] for i in range(3) for j in range(3)]
    allowed = torch.cat([*shifts, *(shift.flip(3) for shift in shifts)])
    same = (moved[:, None] == allowed[None]).flatten(2).all(2)
    assert same.any(1).all()
    assert same.any(0).sum() > 10


def test_every_method_has_a_title_a_place_and_a_page():
    page = (DOCS / "peers.md").read_text()
    for name, entry in METHODS.items():
        module, function = entry.at.split(":")
        source = ROOT / "bench" / "peers" / f"{module}.py"
        assert f"def {function}(" in source.read_text(), name
        assert f"`{name}`" in page
    for name in PROBLEMS:
        assert f"`{name}`" in page
    assert len({entry.title for entry in METHODS.values()}) == len(METHODS)


def test_methods_without_pairs_are_not_asked_about_them(problem, asked):
    assert is_asked(METHODS["loss"], problem)
    assert not is_asked(METHODS["loss"], asked)
    assert is_asked(METHODS["arnoldi"], asked)


WORK = """
import json, torch
from bench.peers.worker import Memory, spent

CPU = torch.device("cpu")
memory = Memory(CPU)
took = spent(lambda: sum(torch.rand(200, 200).mm(torch.rand(200, 200)).sum() for _ in range(50)), CPU)
held = torch.ones(2**24)
print(json.dumps(memory.numbers() | {"cpu": took.cpu, "wall": took.wall, "held": held.nbytes}))
"""


def test_seconds_and_memory_are_those_of_the_work():
    # In a process of its own, as the worker runs: memory that other tests leave to the collector is none of its.
    done = subprocess.run([sys.executable, "-c", WORK], cwd=ROOT, capture_output=True, text=True, check=True)
    numbers = json.loads(done.stdout)
    assert numbers["cpu"] > 0
    assert numbers["wall"] > 0
    assert numbers["peak_growth"] > 0.9 * numbers["held"]
    assert numbers["peak"] < 2**36


def test_goals_are_judged_against_the_fastest_peer(tmp_path):
    def cell(fit, score):
        return {"run": "2026-01-01", "fit": fit, "score": score, "peak": 2**30, "auc": 99.0, "ap": 98.0, "setting": "s"}

    cells = {"arnoldi": cell(10.0, 0.2), "captum-arnoldi": cell(30.0, 3.0), "dattri-arnoldi": cell(20.0, 0.9)}
    cells["trak"] = cell(1.0, 4.0) | {"load": 3.0}
    cells["arnoldi"]["load"] = 0.5
    cells["kronfluence"] = {"run": "2026-01-01", "failed": "RuntimeError: broken | pipe"}
    facts = {"num_train": 40, "num_queries": 0, "num_wrong": 5, "train_accuracy": 80.0, "test_accuracy": 90.0}
    info = {"command": "c", "torch": "t", "eigentrace": "e", "python": "p"}
    record = {
        "title": "T",
        "parameters": 9,
        "settings": {},
        "facts": facts,
        "cells": cells,
        "runs": {"2026-01-01": info},
    }
    save(tmp_path / "data" / "peers.json", {"CPU": {"digits": record}})
    render(tmp_path, small=False)
    page = (tmp_path / "peers.md").read_text()
    goals = [line for line in page.splitlines() if line.startswith("- ")]
    for mentions in (
        ["eigentrace Arnoldi", "dattri Arnoldi", 2, "(≥ 1 met)"],
        ["dattri Arnoldi", 4.5, "(≥ 5 missed)"],
        ["TRAK", 0.1, "(≥ 1 missed)"],
    ):
        assert any(not missing(line, mentions) for line in goals), mentions
    assert "load 0.5 to 3.0" in page
    assert "failed<sup>1</sup>" in page
    assert "broken \\| pipe" in page
