"""Refined influence, against dense inverses in float64, and what it says about itself."""

import warnings

import numpy as np
import pytest
import torch
from torch import nn

import eigentrace as et
from eigentrace.data import as_data
from eigentrace.errors import EigentraceWarning, InputError, NumericalError, UnsupportedError
from eigentrace.numeric.seeding import generator_of
from tests.helpers.expecting import refused, warned
from tests.helpers.models import dense_gradients, dense_hessian

METHODS = {"ekfac": et.EKFAC(), "arnoldi": et.Arnoldi(steps=30, keep=8), "truncated": et.Arnoldi(30, 8, tail=None)}


def dense(case, damping, kind="gauss-newton"):
    train, asked = dense_gradients(case.task, case.batches), dense_gradients(case.task, case.queries)
    return asked @ torch.linalg.solve(dense_hessian(case, kind) + torch.diag(damping), train.T)


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
@pytest.mark.parametrize("model", ["mlp", "transformer"])
def test_converged_scores_are_those_of_the_dense_inverse(cases, model, method):
    case = cases[model]
    moments = {name: torch.rand_like(value) for name, value in case.task.params.items()}
    training = et.Training(lr_sum=20.0, second_moments=moments, weight_decay=0.1, decoupled=True)
    task = case.make_task(case.task.model)
    task.training = training
    fitted = method.fit(task, case.batches)
    damping = torch.cat([(moments[n].sqrt().flatten() + 1e-8) * (1 / 20 + 0.1) for n in task.layout.names])
    wanted = dense(case, damping)
    found = fitted.influence(case.batches, case.queries, refine="converged")
    assert float((found - wanted).norm() / wanted.norm()) < 1e-8
    number = fitted.influence(case.batches, case.queries, refine=et.Refine("converged", damping=0.03))
    wanted = dense(case, torch.full_like(damping, 0.03))
    assert float((number - wanted).norm() / wanted.norm()) < 1e-8
    nats = fitted.influence(case.batches, case.queries, refine=et.Refine("converged", damping=0.03), unit="nats")
    assert torch.allclose(nats, number / case.num_examples)


@pytest.fixture
def problem():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3)).double()
    train = torch.utils.data.TensorDataset(torch.randn(90, 6).double(), torch.randint(0, 3, (90,)))
    queries = [(torch.randn(11, 6).double(), torch.randint(0, 3, (11,)))]
    return et.classification(model), et.Data(train, batch_size=40), queries


@pytest.mark.filterwarnings("ignore:The last round still changed")
def test_more_rounds_come_closer_and_say_so(problem):
    task, train, queries = problem
    fitted = et.EKFAC().fit(task, train)
    exact = fitted.influence(train, queries, refine=et.Refine("converged", damping=0.01))
    found = [fitted.refined(train, queries, et.Refine(rounds, damping=0.01)) for rounds in (2, 4, 8)]
    gaps = [float((one.scores - exact).norm() / exact.norm()) for one in found]
    assert gaps[2] < gaps[1] < gaps[0]
    assert found[2].residuals.max() < found[0].residuals.max()
    assert found[2].agreement.mean() > found[0].agreement.mean()
    assert found[0].num_products <= 2 * 11
    assert not found[0].is_guess


def test_blocks_of_queries_that_fit_in_memory_give_the_same_answers(problem):
    task, train, queries = problem
    fitted = et.EKFAC().fit(task, train)
    settings = et.Refine("converged", damping=0.01)
    whole = fitted.refined(train, queries, settings)
    few = fitted.refined(train, queries, settings, compute=et.Compute(memory=40 * 8 * task.layout.numel))
    assert torch.allclose(few.scores, whole.scores, rtol=1e-7)
    assert few.num_products > whole.num_products  # queries in other blocks share nothing


def test_later_queries_go_on_with_what_was_computed_for_earlier_ones(problem):
    task, train, queries = problem
    fitted = et.EKFAC().fit(task, train)
    settings = et.Refine(3, damping=0.02, sample=None)
    few = et.Compute(memory=48 * 8 * task.layout.numel)  # four queries at a time
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EigentraceWarning)
        together = fitted.refined(train, queries, settings, compute=few)
        x, y = queries[0]
        parts = [[(x[start : start + 4], y[start : start + 4])] for start in (0, 4, 8)]
        alone = [fitted.refined(train, part, settings, compute=few) for part in parts]
    residuals = torch.cat([found.residuals for found in alone])
    assert together.num_products == sum(found.num_products for found in alone)
    assert torch.allclose(together.residuals[:4], residuals[:4])
    assert together.residuals[4:].mean() < 0.95 * residuals[4:].mean()


def test_the_curvature_is_that_of_a_sample_of_the_training_examples(problem):
    task, train, queries = problem
    settings = et.Refine("converged", damping=0.01, sample=30, seed=5)
    found = et.EKFAC().fit(task, train).influence(train, queries, refine=settings)
    part = train.take(train.sample(30, generator_of(5)))
    exact = et.ExactHessian(damping=0.01, curvature="gauss-newton").fit(task, part)
    assert torch.allclose(found, exact.influence(train, queries), rtol=1e-7)


def test_gradients_of_unit_length(problem):
    task, train, queries = problem
    settings = et.Refine("converged", damping=0.01)
    fitted = et.EKFAC().fit(task, train)
    exact = et.ExactHessian(damping=0.01, curvature="gauss-newton").fit(task, train)
    found = fitted.influence(train, queries, refine=settings, normalize="gradient")
    assert torch.allclose(found, exact.influence(train, queries, normalize="gradient"), rtol=1e-7)


def test_a_run_is_explained_by_refined_scores(problem, tmp_path):
    task, train, queries = problem
    fitted = et.Arnoldi(30, 6).fit(task, train)
    run = et.score(fitted, train, tmp_path / "run")
    settings = et.Refine("converged", damping=0.01)
    wanted = fitted.influence(train, queries, refine=settings)
    found = run.explain(queries, 5, refine=settings)
    assert np.array_equal(found.proponents.rows, wanted.topk(5, dim=1).indices)
    assert np.allclose(found.proponents.scores, wanted.topk(5, dim=1).values / 90)
    assert (found.how, found.refine) == ("exact", "converged")
    # Only a shortlist is scored, with the curvature of all examples.
    few = run.explain([3, 4], 2, refine=settings, shortlist=10)
    assert (few.how, few.shortlist) == ("rescored", 10)
    pairs = fitted.influence(train, train.take([3, 4]), refine=settings)
    assert np.allclose(few.proponents.scores, pairs.gather(1, torch.tensor(few.proponents.rows)) / 90)
    for wrong in ({"rescore": False}, {"normalize": "metric"}):
        with refused(InputError, "refine", *wrong):
            run.explain([3], refine=3, **wrong)
    with refused(InputError, "open_run"):
        et.open_run(tmp_path / "run").explain([3], refine=3)


def test_what_is_not_settled_or_guessed_is_said(problem):
    task, train, queries = problem
    fitted = et.Arnoldi(20, 3).fit(task, train)
    with warned(EigentraceWarning, "rounds", 1):
        fitted.influence(train, queries, refine=et.Refine(1, damping=1e-4))
    with warned(EigentraceWarning, "guess", "training"):
        found = fitted.refined(train, queries, 30)
    assert found.is_guess


@pytest.mark.filterwarnings("ignore:Some selected parameters are stored in bfloat16")
def test_a_solve_that_rounding_stops_ends_and_says_so():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 3)).bfloat16()
    data = [(torch.randn(40, 8).bfloat16(), torch.randint(0, 3, (40,)))]
    fitted = et.EKFAC().fit(et.classification(model), data)
    with warned(EigentraceWarning, "converge", "float64"):
        found = fitted.refined(data, [tuple(t[:1] for t in data[0])], et.Refine("converged", damping=0.01))
    assert found.num_products < 400  # of 891 parameters
    assert float(found.residuals.max()) < 0.1


def test_what_cannot_be_is_refused_with_a_way_out(problem):
    task, train, queries = problem
    with refused(UnsupportedError, "TracIn", "EKFAC"):
        et.TracIn().fit(task, train).influence(train, queries, refine=3)
    fitted = et.EKFAC().fit(task, train)
    with refused(InputError, "metric"):
        fitted.influence(train, queries, refine=3, normalize="metric")
    with refused(NumericalError, "gauss-newton", "damping"):
        fitted.influence(train, queries, refine=et.Refine(9, damping=1e-4, curvature="hessian"))
    for settings in ({"rounds": 0}, {"rounds": "all"}, {"damping": -1.0}, {"sample": 0}, {"curvature": "fisher"}):
        with refused(InputError, *settings):
            et.Refine(**settings)
    with refused(InputError, "rounds"):
        fitted.influence(train, queries, refine=True)
    with refused(InputError, "rounds", "converged", "3"):
        fitted.influence(train, queries, refine="3")
    with refused(UnsupportedError, "members"):
        et.Ensemble([fitted, fitted]).influence(train, queries, refine=3)


def test_a_positive_hessian_is_solved_too(cases):
    case = cases["mlp"]
    fitted = et.EKFAC().fit(case.task, case.batches)
    size = case.task.layout.numel
    found = fitted.influence(
        case.batches, case.queries, refine=et.Refine("converged", damping=2.0, curvature="hessian")
    )
    wanted = dense(case, torch.full((size,), 2.0, dtype=torch.float64), "hessian")
    assert float((found - wanted).norm() / wanted.norm()) < 1e-8


def test_sums_over_tokens_are_damped_as_the_means_that_were_trained_on():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 20, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 8}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).double().eval()
    tokens = torch.randint(0, 20, (12, 6))
    data = as_data([{"input_ids": tokens, "labels": tokens}])
    scores = {}
    for reduction, scale in (("mean", 1.0), ("sum", 5.0)):  # six tokens, of which five are predicted
        moments = {name: torch.full_like(p, 0.04) for name, p in model.named_parameters()}
        training = et.Training(30.0, second_moments=moments, loss_scale=scale)
        task = et.causal_lm(model, reduction=reduction, training=training)
        fitted = et.EKFAC().fit(task, data)
        scores[reduction] = fitted.influence(data, data, refine="converged")
    assert torch.allclose(scores["sum"], 5 * scores["mean"], rtol=1e-6)
