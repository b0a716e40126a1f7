"""Arnoldi in the metric of EK-FAC, against dense generalised eigenproblems and inverses in float64."""

import contextlib
import copy
import warnings

import pytest
import torch
from torch import nn

import eigentrace as et
from eigentrace.curvature.operator import Curvature
from eigentrace.data import as_data
from eigentrace.errors import EigentraceWarning, InputError, MismatchError, NumericalError
from eigentrace.projection import Job, gradients
from tests.helpers.expecting import refused

PENALTY = {"0.weight": 0.02}
pytestmark = pytest.mark.filterwarnings("ignore:The damping of this fit is a guess")


def dense(task, data, metric):
    """Return H, M and the gradients of the examples."""
    eye = torch.eye(task.layout.numel, dtype=torch.float64)
    H = Curvature(task, as_data(data), None, "gauss-newton").matmat(eye)
    return H, metric.times(eye, 0.0), torch.cat(list(gradients(Job.of(task, "losses"), as_data(data))))


def trained(task, training):
    """Return the task with a record of the training."""
    return et.classification(task.model, l2=PENALTY, training=training)


def relative(a, b):
    return float((a - b).norm() / b.norm())


@pytest.fixture(scope="module")
def problem():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    data = [(torch.randn(n, 5, dtype=torch.float64), torch.randint(0, 3, (n,))) for n in (12, 7, 11)]
    return et.classification(model, l2=PENALTY), data


@pytest.fixture(scope="module")
def whole(problem):
    """A fit that keeps all pairs, damped as its training is said to have been."""
    task, data = problem
    task = trained(task, et.Training(lr_sum=20.0, momentum=0.5))
    return et.Arnoldi(steps=200, keep=task.layout.numel, tail="ekfac", sample=None).fit(task, data)


def test_pairs_solve_the_generalised_eigenproblem(problem, whole):
    task, data = problem
    H, M, _ = dense(task, data, whole.metric)
    eye = torch.eye(len(H), dtype=torch.float64)
    A, B = H + whole.damping * eye, M + whole.damping * eye
    U, values = whole.pairs.directions, whole.spectrum.eigenvalues
    assert relative(U @ B @ U.T, eye[: len(U), : len(U)]) < 1e-10
    assert relative(A @ U.T, (B @ U.T) * values) < 1e-9
    lower = torch.linalg.cholesky(B)
    exact = torch.linalg.eigvalsh(torch.linalg.inv(lower) @ A @ torch.linalg.inv(lower).T)
    off = (values[:, None] - exact).abs()
    assert off.min(dim=1).values.max() < 1e-8
    # The iteration ends where only pairs are left along which the metric is right.
    assert off.min(dim=0).values[(exact - 1).abs() > 1e-6].max() < 1e-8
    assert len(values) >= int(((exact - 1).abs() > 1e-6).sum())
    assert torch.equal(values.log().abs().argsort(descending=True, stable=True), torch.arange(len(values)))
    assert values.min() < 0.5
    assert values.max() > 1.5


def test_all_pairs_give_the_exact_inverse_at_any_damping(problem, whole):
    task, data = problem
    H, _, G = dense(task, data, whole.metric)
    eye = torch.eye(len(H), dtype=torch.float64)
    for damping in (whole.damping, 0.1 * whole.damping, 20 * whole.damping):
        fit = whole.damped(damping)
        exact = G @ torch.linalg.inv(H + damping * eye) @ G.T
        assert relative(fit.influence(data, data), exact) < 1e-9
        assert relative(fit.self_influence(data), exact.diag()) < 1e-9
        assert fit.damping == fit.method["damping"] == damping


@pytest.mark.parametrize("keep", [1, 6, 20])
def test_few_pairs_correct_the_metric_along_them_alone(problem, whole, keep):
    task, data = problem
    _, M, G = dense(task, data, whole.metric)
    U, values = whole.pairs.directions[:keep], whole.spectrum.eigenvalues[:keep]
    inverse = torch.linalg.inv(M + whole.damping * torch.eye(len(M), dtype=torch.float64))
    inverse = inverse + U.T @ torch.diag(1 / values - 1) @ U
    fit = whole.distill(keep)
    assert relative(fit.influence(data, data), G @ inverse @ G.T) < 1e-10
    assert relative(fit.self_influence(data), (G @ inverse @ G.T).diag()) < 1e-10
    unit = G / G.norm(dim=1, keepdim=True)
    assert relative(fit.influence(data, data, normalize="gradient"), unit @ inverse @ unit.T) < 1e-10
    assert relative(fit.self_influence(data, normalize="gradient"), (unit @ inverse @ unit.T).diag()) < 1e-10
    assert len(fit.spectrum.eigenvalues) == fit.method["keep"] == keep


def test_another_damping_solves_in_the_span_of_the_kept_pairs(problem, whole):
    task, data = problem
    H, M, _ = dense(task, data, whole.metric)
    eye, fit, damping = torch.eye(len(H), dtype=torch.float64), whole.distill(7), 4 * whole.damping
    moved = fit.damped(damping)
    U, W = fit.pairs.directions, moved.pairs.directions
    assert relative(W @ (M + damping * eye) @ W.T, eye[:7, :7]) < 1e-10
    inside = W @ (H + damping * eye) @ W.T
    assert relative(inside, torch.diag(moved.spectrum.eigenvalues)) < 1e-9
    assert torch.linalg.matrix_rank(torch.cat([U, W])) == 7
    assert moved.spectrum.residuals is None


def test_kept_pairs_save_products_of_a_solve(problem, whole):
    task, data = problem
    H, _, G = dense(task, data, whole.metric)
    exact = G @ torch.linalg.inv(H + 0.05 * torch.eye(len(H), dtype=torch.float64)) @ G.T
    off = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for fit in (et.EKFAC(sample=None).fit(task, data), whole.distill(15), whole):
            one = [fit.refined([(x[:1], y[:1])], [(x[:1], y[:1])], et.Refine(1, 0.05, None), curvature_data=data)
                   for x, y in data]  # fmt: skip
            off.append(max(float(found.residuals.max()) for found in one))
        found = whole.distill(15).refined(data, data, et.Refine("converged", damping=0.05, sample=None))
    assert off[0] > 2 * off[1] > 1e6 * off[2]
    assert relative(found.scores, exact) < 1e-8


def test_a_damping_for_each_parameter_is_solved_for_as_well(problem, whole):
    task, data = problem
    H = dense(task, data, whole.metric)[0]
    extra = torch.linspace(0.01, 0.3, len(H), dtype=torch.float64)
    precondition = whole._preconditioner(extra)
    eye = torch.eye(len(H), dtype=torch.float64)
    matrix = precondition(eye)
    assert relative(matrix, matrix.T) < 1e-10
    assert torch.linalg.eigvalsh(matrix).min() > 0
    # Nearly all of the space is in the span of the pairs, where the inverse is exact.
    exact = torch.linalg.inv(H + torch.diag(extra))
    alone = et.EKFAC(sample=None).fit(task, data)._preconditioner(extra)(eye)
    assert relative(matrix, exact) < 0.02 < 0.1 * relative(alone, exact)


def test_the_sample_and_the_seed_are_those_of_ekfac(problem):
    task, data = problem
    fit = et.Arnoldi(steps=12, keep=4, tail="ekfac", sample=9, seed=3).fit(task, data)
    alone = et.EKFAC(9, seed=3).fit(task, data)
    assert all(torch.equal(values, alone.metric.diagonal[name]) for name, values in fit.metric.diagonal.items())
    assert fit.method["examples"] == 9
    assert (fit.method["name"], fit.method["keep"], fit.method["tail"]) == ("Arnoldi", 4, "ekfac")


def test_the_damping_is_that_of_the_training_or_said_to_be_guessed(problem, whole):
    task, data = problem
    assert whole.damping == pytest.approx(0.5 / 20)
    moments = {name: values.detach().square() + 0.1 for name, values in task.params.items()}
    adam = et.Training(lr_sum=2.0, second_moments=moments)
    method = et.Arnoldi(steps=6, keep=2, tail="ekfac", sample=None)
    given = trained(task, adam)
    assert method.fit(given, data).damping == pytest.approx(float(adam.damping(task.layout).mean()))
    with pytest.warns(EigentraceWarning, match="damping of this fit is a guess"):
        fit = method.fit(task, data)
    assert fit.damping == pytest.approx(10 * fit.metric.mean)


def test_a_saved_fit_answers_with_the_same_numbers(problem, whole, tmp_path):
    task, data = problem
    fit = whole.distill(5)
    fit.save(tmp_path / "fit")
    again = et.load(tmp_path / "fit", task)
    assert torch.equal(again.influence(data, data), fit.influence(data, data))
    assert torch.equal(again.self_influence(data), fit.self_influence(data))
    assert repr(again) == repr(fit)
    assert torch.equal(again.damped(0.1).self_influence(data), fit.damped(0.1).self_influence(data))
    fit.check_saved(tmp_path / "fit")
    with refused(MismatchError, "another fit"):
        whole.distill(4).check_saved(tmp_path / "fit")


def test_vectors_in_bfloat16_change_little(problem, whole):
    task, data = problem
    model = copy.deepcopy(task.model).float()
    single = et.classification(model, l2=PENALTY, training=whole.task.training)
    batches = [(x.float(), y) for x, y in data]
    exact = whole.distill(15).influence(data, data)
    for dtype, limit in (("fp32", 1e-3), ("bf16", 0.05)):
        method = et.Arnoldi(steps=200, keep=15, tail="ekfac", sample=None, basis=et.Basis(dtype=dtype))
        assert relative(method.fit(single, batches).influence(batches, batches).double(), exact) < limit


def test_an_iteration_that_was_ended_goes_on(problem, tmp_path, monkeypatch):
    task, data = problem
    method = et.Arnoldi(steps=20, keep=6, tail="ekfac", sample=None)
    wanted = method.fit(task, data).influence(data, data)
    multiply, calls = Curvature.matvec, []

    def ends(self, v):
        calls.append(1)
        if len(calls) == 12:
            raise KeyboardInterrupt
        return multiply(self, v)

    monkeypatch.setattr(Curvature, "matvec", ends)
    with pytest.raises(KeyboardInterrupt):
        method.fit(task, data, resume=tmp_path / "state")
    found = method.fit(task, data, resume=tmp_path / "state").influence(data, data)
    assert torch.equal(found, wanted)
    with refused(MismatchError, "metric"):
        et.Arnoldi(steps=20, keep=6, sample=None).fit(task, data, resume=tmp_path / "state")


@pytest.mark.parametrize(
    "settings", [{"curvature": "hessian"}, {"spread": True}, {"positive_only": True}, {"coordinates": 10}]
)
def test_settings_that_have_no_meaning_here_are_refused(settings):
    with refused(InputError, "tail='ekfac' needs"):
        et.Arnoldi(tail="ekfac", **settings)


def test_cuts_that_have_no_meaning_here_are_refused(whole):
    for arguments in ({"tail": 0.1}, {"tail": None}, {"positive_only": True}, {"tail": "shaped", "delta": 0.1}):
        with refused(InputError, "metric of EK-FAC"):
            whole.distill(3, **arguments)
    with refused(InputError, "too large"):
        whole.distill(len(whole.pairs.directions) + 1)
    with refused(InputError, "keep"):
        whole.distill(0)
    with refused(InputError, "damping"):
        whole.damped(0.0)


def test_vectors_that_lost_their_independence_are_refused_or_right():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 4))
    data = [(torch.randn(60, 6), torch.randint(0, 4, (60,)))]
    task = et.classification(model, training=et.Training(lr_sum=1.0))
    wanted = et.Arnoldi(200, 20, tail="ekfac", sample=None).fit(task, data)
    for steps in (30, 200):
        method = et.Arnoldi(steps, 20, tail="ekfac", sample=None, basis=et.Basis(dtype="bf16"))
        with contextlib.suppress(NumericalError):
            found = method.fit(task, data)
            assert relative(found.self_influence(data), wanted.self_influence(data)) < 0.05
            assert torch.allclose(found.spectrum.eigenvalues[:3], wanted.spectrum.eigenvalues[:3], rtol=0.05)
            continue
        assert steps == 200
        with refused(NumericalError, "fewer steps"):
            method.fit(task, data)


def test_an_iteration_is_not_resumed_with_another_damping(problem, tmp_path):
    task, data = problem
    method = et.Arnoldi(steps=12, keep=4, tail="ekfac", sample=None)
    method.fit(task, data, resume=tmp_path / "state")
    with refused(MismatchError, "metric damping"):
        method.fit(trained(task, et.Training(lr_sum=20.0)), data, resume=tmp_path / "state")


def test_agreement_of_halves_is_measured_on_request(problem):
    task, data = problem
    fit = et.Arnoldi(steps=12, keep=4, tail="ekfac", sample=None, reliability=True).fit(task, data)
    assert -1 <= fit.reliability.self_influence <= 1
