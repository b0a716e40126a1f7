"""Influence predicts what leaving examples out does, on a convex problem where both are known exactly."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import eigentrace as et
from eigentrace.errors import InputError
from eigentrace.evaluate import Loop, counterfactual, leave_out
from tests.helpers.expecting import refused

N, Q, L2 = 80, 5, 0.05


def softmax_regression(rows=None):
    """Train to the minimum by Newton's method; the examples that are left keep their weight 1/N."""
    x, y = DATA
    weights = torch.zeros(N, dtype=torch.float64)
    weights[torch.arange(N) if rows is None else torch.from_numpy(rows)] = 1 / N

    def objective(flat):
        logits = x @ flat[:12].view(3, 4).T + flat[12:]
        return weights @ F.cross_entropy(logits, y, reduction="none") + L2 / 2 * flat.square().sum()

    theta = torch.zeros(15, dtype=torch.float64)
    for _ in range(7):
        gradient, hessian = (f(objective, theta) for f in (torch.autograd.functional.jacobian, HESSIAN))
        theta = theta - torch.linalg.solve(hessian, gradient)
    model = nn.Linear(4, 3, dtype=torch.float64)
    model.load_state_dict({"weight": theta[:12].view(3, 4), "bias": theta[12:]})
    return model


HESSIAN = torch.autograd.functional.hessian
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(N + Q, 4, generator=GENERATOR, dtype=torch.float64)
Y = (X @ torch.randn(4, 3, generator=GENERATOR, dtype=torch.float64)).argmax(dim=1)
DATA, QUERIES = (X[:N], Y[:N]), (X[N:], Y[N:])


def query_losses(model):
    with torch.no_grad():
        return F.cross_entropy(model(QUERIES[0]), QUERIES[1], reduction="none")


def query_margins(model):
    return -torch.log(torch.expm1(query_losses(model)))


@pytest.fixture(scope="module")
def scores():
    task = et.classification(softmax_regression(), l2=L2)
    return et.ExactHessian().fit(task, DATA).influence(DATA, QUERIES)


TRAINER = Loop(lambda rows, seed: softmax_regression(rows), query_losses)


def test_leave_one_out_is_predicted_in_nats(scores):
    found = leave_out(TRAINER, scores, range(12), seeds=1)
    assert found.predicted.shape == found.actual.shape == (Q, 12)
    assert found.pearson > 0.99
    assert found.spearman > 0.97
    assert found.slope == pytest.approx(1.0, abs=0.1)  # second order in 1/N
    assert found.per_query.min() > 0.9
    np.testing.assert_allclose(found.predicted, scores[:, :12].numpy() / N)
    base, without = query_losses(softmax_regression()), query_losses(softmax_regression(np.arange(1, N)))
    np.testing.assert_allclose(found.actual[:, 0], (without - base).numpy(), atol=1e-12)
    assert np.isnan(found.error).all()


def test_leave_groups_out(scores):
    groups = [np.arange(5 * i, 5 * i + 5) for i in range(6)]
    found = leave_out(TRAINER, scores, groups, seeds=1)
    assert found.pearson > 0.95
    np.testing.assert_allclose(found.predicted[:, 2], scores[:, 10:15].sum(dim=1).numpy() / N)


def test_margins_change_the_other_way(scores):
    trainer = Loop(TRAINER.train, query_margins, higher_is_worse=False)
    found = leave_out(trainer, scores, range(6), seeds=1)
    assert found.spearman > 0.5
    np.testing.assert_allclose(found.predicted, -scores[:, :6].numpy() / N)


def test_chance_in_training_cancels_and_the_error_is_over_seeds():
    def noisy(rows, seed):
        noise = np.random.default_rng(seed).normal(size=2)
        return noise * 1000 + noise * (4 - len(rows)) + (4 - len(rows))

    found = leave_out(noisy, np.ones((2, 4)), [0, [1, 2]], seeds=3)
    single = leave_out(noisy, np.ones((2, 4)), [0, [1, 2]], seeds=1)
    assert abs(single.actual).max() < 20  # not a thousand: the same seed with and without
    drawn = np.array([noisy(np.arange(3), s) - noisy(np.arange(4), s) for s in seeds_of(3)])
    np.testing.assert_allclose(found.actual[:, 0], drawn.mean(axis=0))
    np.testing.assert_allclose(found.error[:, 0], drawn.std(axis=0, ddof=1) / np.sqrt(3))


def seeds_of(count):
    seen = []
    leave_out(lambda rows, seed: (seen.append(seed), [0.0, 1.0])[1], np.ones((2, 4)), [0], seeds=count)
    return sorted(set(seen), key=seen.index)


def test_nothing_changes():
    found = leave_out(lambda rows, seed: [1.0, 2.0], np.zeros((2, 4)), [0, 1], seeds=2)
    assert np.isnan([found.pearson, found.spearman, found.slope]).all()
    assert np.isnan(found.per_query).all()
    assert (found.error == 0).all()


def test_counterfactual_on_the_convex_problem(scores):
    found = counterfactual(TRAINER, scores, 6, seeds=1, draws=4)
    assert found.dropped.shape == (Q, 6)
    assert found.random_actual.shape == found.random_predicted.shape == (Q, 4)
    top = scores.topk(6, dim=1)
    np.testing.assert_array_equal(found.dropped, top.indices.numpy())
    np.testing.assert_allclose(found.predicted, top.values.sum(dim=1).numpy() / N)
    rest = np.setdiff1d(np.arange(N), found.dropped[2])
    change = query_losses(softmax_regression(rest)) - query_losses(softmax_regression())
    assert found.actual[2] == pytest.approx(float(change[2]), abs=1e-12)
    # Removing the strongest proponents hurts, more than anything at random, and about as much as was said.
    assert found.wins == 1.0
    assert (found.actual > 0).all()
    assert np.corrcoef(found.predicted, found.actual)[0, 1] > 0.9
    pooled = [found.random_predicted.ravel(), found.random_actual.ravel()]
    assert np.corrcoef(*pooled)[0, 1] > 0.9
    assert len(str(found).splitlines()) == Q + 1


def test_counterfactual_of_margins(scores):
    trainer = Loop(TRAINER.train, query_margins, higher_is_worse=False)
    found = counterfactual(trainer, scores, 6, seeds=1, draws=2)
    assert (found.actual < 0).all()
    assert (found.predicted < 0).all()
    assert found.wins == 1.0


def test_models_are_shared_through_the_cache(tmp_path):
    calls = []

    def train(rows, seed):
        calls.append(len(rows))
        return [float(rows.sum())]

    trainer = Loop(train, recipe="sum")
    leave_out(trainer, np.arange(6.0)[None], [5, 1], seeds=2, cache=tmp_path)
    assert len(calls) == 3 * 2
    counterfactual(trainer, np.arange(6.0)[None], 1, seeds=2, draws=1, cache=tmp_path)
    assert (
        len(calls) <= 3 * 2 + 2
    )  # the whole data and row 5 were there; one random row is new, if it is not among them


@pytest.mark.parametrize(
    ("call", "mentions"),
    [
        (lambda: leave_out(TRAINER, np.ones((3, N)), [0], seeds=1), ("scores", 5, 3)),
        (lambda: leave_out(TRAINER, np.ones(N), [0]), ("scores", f"({N},)")),
        (lambda: leave_out(TRAINER, np.full((Q, N), np.nan), [0]), ("scores", "NaN", f"{Q * N} of {Q * N}")),
        (lambda: leave_out(TRAINER, np.ones((Q, N)), [N]), (N, 0, N - 1)),
        (lambda: leave_out(TRAINER, np.ones((Q, N)), [0], seeds=0), ("seeds", 0)),
        (lambda: counterfactual(TRAINER, np.ones((Q, N)), N), ("drop=80", 80)),
        (lambda: counterfactual(TRAINER, np.ones((Q, N)), 0), ("drop", 0)),
        (lambda: counterfactual(TRAINER, np.ones((Q, N)), 1, draws=0), ("draws", 0)),
    ],
)
def test_refuses(call, mentions):
    with refused(InputError, *mentions):
        call()
