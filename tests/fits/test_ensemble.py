"""An ensemble is the mean of its members, in everything that can be asked of a fit."""

import copy

import pytest
import torch
from torch import nn

import eigentrace as et
from eigentrace.errors import InputError, MismatchError, UnsupportedError
from tests.helpers.expecting import refused
from tests.helpers.small import examples, net

ARNOLDI = et.Arnoldi(steps=40, keep=6, sample=None)
TRUNCATED = et.Arnoldi(steps=40, keep=6, sample=None, tail=None)
PROJ = et.RandProj(keep=5)


def states(count=2):
    return [copy.deepcopy(net(seed).double().state_dict()) for seed in range(1, count + 1)]


def double_examples():
    x, y = examples(20)
    return x.double(), y


@pytest.fixture
def task():
    return et.classification(net().double())


@pytest.fixture
def batch():
    return double_examples()


def alone(method, state, batch):
    model = net().double()
    model.load_state_dict(state)
    return method.fit(et.classification(model), batch)


@pytest.mark.parametrize("method", [ARNOLDI, TRUNCATED, PROJ], ids=["tail", "truncated", "randproj"])
def test_scores_are_the_mean_of_fits_of_separate_models(task, batch, method):
    queries = tuple(t[:4] for t in batch)
    together = et.Ensemble.fit(method, task, batch, checkpoints=states())
    apart = [alone(method, state, batch) for state in states()]
    for ask in (
        lambda f: f.self_influence(batch),
        lambda f: f.self_influence(batch, normalize="gradient"),
        lambda f: f.influence(batch, queries),
        lambda f: f.influence(batch, queries, normalize="gradient"),
    ):
        expected = torch.stack([ask(fit) for fit in apart]).mean(dim=0)
        assert torch.allclose(ask(together), expected, rtol=1e-8, atol=1e-10 * float(expected.abs().max()))
        assert torch.allclose(ask(et.Ensemble(apart)), expected, rtol=1e-12)


def test_one_member_is_the_member(task, batch):
    fitted = ARNOLDI.fit(task, batch)
    assert torch.equal(et.Ensemble([fitted]).influence(batch, batch), fitted.influence(batch, batch))


def test_features_side_by_side_give_the_score(task, batch):
    fitted = et.Ensemble.fit(TRUNCATED, task, batch, checkpoints=states())
    phi = fitted.features(batch)
    assert phi.shape == (20, 12)
    assert fitted.weights.shape == (12,)
    assert torch.allclose((phi * fitted.weights) @ phi.T, fitted.influence(batch, batch), rtol=1e-8)


def test_the_cosine_is_taken_in_the_mean_metric(task, batch):
    fitted = et.Ensemble.fit(ARNOLDI, task, batch, checkpoints=states())
    own = fitted.self_influence(batch).sqrt()
    cosine = fitted.influence(batch, batch, normalize="metric")
    assert torch.allclose(cosine, fitted.influence(batch, batch) / (own[:, None] * own), rtol=1e-8)
    assert torch.allclose(cosine.diagonal(), torch.ones(20, dtype=torch.float64))


def test_members_may_be_of_different_models(batch):
    wide = nn.Sequential(nn.Linear(3, 9), nn.ReLU(), nn.Linear(9, 3)).double()
    fits = [ARNOLDI.fit(et.classification(model), batch) for model in (net().double(), wide)]
    expected = (fits[0].self_influence(batch) + fits[1].self_influence(batch)) / 2
    assert torch.allclose(et.Ensemble(fits).self_influence(batch), expected)


def test_the_unit_is_the_members(task, batch):
    curved = et.Ensemble.fit(ARNOLDI, task, batch, checkpoints=states(), num_train=500)
    assert curved.num_train == 500
    assert torch.allclose(curved.self_influence(batch, unit="nats") * 500, curved.self_influence(batch))
    mixed = et.Ensemble([ARNOLDI.fit(task, batch), PROJ.fit(task, batch)])
    assert not mixed.has_curvature
    with refused(UnsupportedError, "Ensemble", "unit='nats'"):
        mixed.self_influence(batch, unit="nats")


def test_another_cut_is_another_cut_of_every_member(task, batch):
    fitted = et.Ensemble.fit(ARNOLDI, task, batch, checkpoints=states())
    paper = fitted.distill(keep=4, tail=None)
    expected = torch.stack([m.distill(4, None).self_influence(batch) for m in fitted.members]).mean(dim=0)
    assert torch.equal(paper.self_influence(batch), expected)


@pytest.mark.parametrize("method", [ARNOLDI, PROJ], ids=["tail", "randproj"])
def test_a_saved_ensemble_answers_the_same(task, batch, method, tmp_path):
    fitted = et.Ensemble.fit(method, task, batch, checkpoints=states())
    fitted.save(tmp_path / "fit")
    loaded = et.load(tmp_path / "fit", et.classification(net().double()))
    assert torch.equal(loaded.influence(batch, batch), fitted.influence(batch, batch))
    assert loaded.num_train == fitted.num_train
    assert loaded.method == fitted.method
    # What was read back can be written again.
    loaded.save(tmp_path / "again")
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_separate_fits_are_read_back_with_their_tasks(batch, tmp_path):
    tasks = [et.classification(net(seed).double()) for seed in (1, 2)]
    fitted = et.Ensemble([ARNOLDI.fit(task, batch) for task in tasks])
    fitted.save(tmp_path / "fit")
    loaded = et.load(tmp_path / "fit", tasks)
    assert torch.equal(loaded.self_influence(batch), fitted.self_influence(batch))
    with refused(MismatchError, tmp_path / "fit" / "member-0"):
        et.load(tmp_path / "fit", tasks[::-1])
    with refused(InputError, tmp_path / "fit", 2, 1):
        et.load(tmp_path / "fit", tasks[:1])


def test_a_save_that_fails_leaves_nothing(task, batch, tmp_path):
    mixed = et.Ensemble([ARNOLDI.fit(task, batch), et.Loss().fit(task, batch)])
    with refused(UnsupportedError, "Ensemble", "save"):
        mixed.save(tmp_path / "fit")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "there").mkdir()
    with refused(InputError, tmp_path / "there"):
        et.Ensemble([ARNOLDI.fit(task, batch)]).save(tmp_path / "there")


def test_a_single_fit_is_still_read_back(task, batch, tmp_path):
    fitted = ARNOLDI.fit(task, batch)
    fitted.save(tmp_path / "fit")
    assert torch.equal(et.load(tmp_path / "fit", task).self_influence(batch), fitted.self_influence(batch))
    with refused(InputError, "load", "Task", "list"):
        et.load(tmp_path / "fit", [task])


def test_what_is_refused(task, batch):
    with refused(InputError, "Ensemble", "[]"):
        et.Ensemble([])
    with refused(InputError, "Ensemble", "Arnoldi"):
        et.Ensemble([ARNOLDI])
    with refused(InputError, "num_train", "[20, 99]"):
        et.Ensemble([PROJ.fit(task, batch), PROJ.fit(task, batch, num_train=99)])
    with refused(InputError, "TracIn", "checkpoints"):
        et.Ensemble.fit(et.TracIn(states()), task, batch, checkpoints=states())
    with refused(InputError, "Ensemble.fit", "Task", "Sequential"):
        et.Ensemble.fit(ARNOLDI, task.model, batch, checkpoints=states())
    with refused(UnsupportedError, "Ensemble", "spectrum"):
        _ = et.Ensemble([ARNOLDI.fit(task, batch)]).spectrum
    with refused(UnsupportedError, "Ensemble", "directions"):
        _ = et.Ensemble([et.Loss().fit(task, batch)]).weights


def test_the_model_is_left_as_found(task, batch):
    before = copy.deepcopy(task.model.state_dict())
    task.model.train()
    et.Ensemble.fit(ARNOLDI, task, batch, checkpoints=states()).influence(batch, batch)
    assert task.model.training
    assert all(torch.equal(value, before[name]) for name, value in task.model.state_dict().items())
