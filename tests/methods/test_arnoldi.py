"""What only Arnoldi has: steps, samples, restarts, cuts, the tail."""

import copy
import dataclasses
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import eigentrace as et
from eigentrace.curvature.operator import Curvature
from eigentrace.errors import (
    ConvergenceWarning,
    EigentraceWarning,
    InputError,
    NumericalError,
    TaskError,
    UnsupportedError,
)
from eigentrace.krylov.iterate import Ending
from eigentrace.numeric.rank_correlation import spearman
from tests.helpers.expecting import expect_mentions, refused, warned
from tests.helpers.models import Case, dense_gradients, dense_hessian
from tests.helpers.small import cross_entropy


@pytest.fixture(scope="module")
def problem():
    """A float32 classifier with a few hundred parameters and more data than a batch."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 3))
        x = torch.randn(300, 6)
        y = (x[:, :3] + 0.3 * torch.randn(300, 3)).argmax(dim=1)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
        for _ in range(100):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return et.classification(model), TensorDataset(x, y)


@pytest.mark.parametrize("kind", ["hessian", "gauss-newton"])
def test_with_every_direction_it_is_the_exact_inverse(cases, kind):
    case = cases["mlp"]
    size = case.task.layout.numel
    fitted = et.Arnoldi(steps=size, keep=size, curvature=kind, tail=None, sample=None).fit(case.task, case.batches)
    exact = et.ExactHessian(curvature=kind).fit(case.task, case.batches)
    assert fitted.spectrum.ending is Ending.WHOLE_SPACE
    a, b = (f.influence(case.batches, case.queries) for f in (fitted, exact))
    assert (a - b).norm() < 1e-6 * b.norm()


def algorithm_1(hessians, start, keep, diagonalise):
    """The paper's pseudocode, word by word: a Hessian for every step, one Gram-Schmidt pass, no symmetry assumed."""
    n = len(hessians)
    w, A = [start / start.norm()], torch.zeros(n + 1, n, dtype=start.dtype)
    for i in range(1, n + 1):
        new = hessians[i - 1] @ w[i - 1]
        for j in range(i):
            A[j, i - 1] = new @ w[j]
        new = new - sum(A[j, i - 1] * w[j] for j in range(i))
        A[i, i - 1] = new.norm()
        w.append(new / new.norm())
    values, vectors = diagonalise(A[:n])  # without the last row, and the last w
    order = values.abs().argsort(descending=True)[:keep]
    return values[order], vectors[:, order].T @ torch.stack(w[:n])


def symmetrised(A):
    return torch.linalg.eigh((A + A.T) / 2)


def as_computed(A):
    values, vectors = torch.linalg.eig(A)
    return values.real, vectors.real / vectors.real.norm(dim=0)


def test_as_published_is_algorithm_1(problem, monkeypatch):
    task, dataset = problem
    model = copy.deepcopy(task.model).double()
    x, y = dataset.tensors[0].double(), dataset.tensors[1]
    drawn, asked = [], []
    sample, matvec = et.Data.sample, Curvature.matvec
    monkeypatch.setattr(et.Data, "sample", lambda self, *args: drawn.append(sample(self, *args)) or drawn[-1])
    monkeypatch.setattr(Curvature, "matvec", lambda self, v: asked.append((self.rows, v.clone())) or matvec(self, v))
    steps, keep = 40, 8
    method = et.Arnoldi.as_published(steps, keep, batch=100, seed=4)
    fitted = method.fit(et.classification(model), TensorDataset(x, y))
    batches, start = [rows for rows, _ in asked[-steps:]], asked[-steps][1]
    assert len({rows.tobytes() for rows in batches}) == steps  # each product has examples of its own
    assert {rows.tobytes() for rows in batches} <= {rows.tobytes() for rows in drawn}

    flat = torch.cat([p.detach().flatten() for p in model.parameters()])

    def loss(theta, rows):
        parts = theta.split([p.numel() for p in model.parameters()])
        params = {name: part.view_as(p) for part, (name, p) in zip(parts, model.named_parameters(), strict=True)}
        return nn.functional.cross_entropy(torch.func.functional_call(model, params, x[rows]), y[rows])

    hessians = [torch.func.hessian(loss)(flat, torch.from_numpy(rows)) for rows in batches]
    one = torch.func.vmap(torch.func.grad(lambda theta, row: loss(theta, row[None])), (None, 0))
    gradients = one(flat, torch.arange(len(x)))
    values, G = algorithm_1(hessians, start, keep, symmetrised)
    own = ((gradients @ G.T).square() / values).sum(dim=1)
    assert torch.allclose(fitted.spectrum.eigenvalues, values, rtol=1e-8)
    assert torch.allclose(fitted.self_influence(TensorDataset(x, y)), own, rtol=1e-6)
    # What the paper computes with eigenvectors that need not be orthonormal ranks almost alike.
    values, G = algorithm_1(hessians, start, keep, as_computed)
    literal = ((gradients @ G.T).square() / values).sum(dim=1)
    assert spearman(literal[None].numpy(), own[None].numpy()) > 0.95


def test_every_copy_of_a_repeated_eigenvalue_is_found():
    # Two identical, disconnected halves: every eigenvalue of the curvature comes twice, and again for the bias.
    class Twins(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.tensor([0.3, -0.2, 0.5, 0.3, -0.2, 0.5], dtype=torch.float64))

        def forward(self, x):
            return (x @ self.w[:3]).tanh() ** 2 + (x @ self.w[3:]).tanh() ** 2

    task = et.Task(Twins(), lambda model, batch: model(batch), l2=0.1)
    data = et.Data.from_batches([torch.randn(20, 3, dtype=torch.float64)])
    values = et.Arnoldi(steps=6, keep=6, tail=None).fit(task, data).spectrum.eigenvalues
    assert torch.allclose(values[::2], values[1::2], rtol=1e-10)
    assert len(values) == 6


def test_restart_equals_no_restart(problem):
    task, data = problem
    plain = et.Arnoldi(steps=120, keep=10).fit(task, data)
    restarted = et.Arnoldi(steps=120, keep=10, basis=et.Basis(max_vectors=40)).fit(task, data)
    assert torch.allclose(plain.spectrum.eigenvalues, restarted.spectrum.eigenvalues, rtol=1e-4)
    a, b = (f.self_influence(data) for f in (plain, restarted))
    assert torch.allclose(a, b, rtol=1e-3)


def test_a_smaller_cut_equals_a_smaller_fit(problem):
    task, data = problem
    large = et.Arnoldi(steps=100, keep=30).fit(task, data)
    small = et.Arnoldi(steps=100, keep=8).fit(task, data)
    cut = large.distill(keep=8)
    assert torch.equal(cut.self_influence(data), small.self_influence(data))
    assert cut.delta == small.delta == pytest.approx(float(small.spectrum.eigenvalues[-1]))
    # and back: a cut of a cut still has the whole fit behind it
    assert torch.equal(cut.distill(keep=30).self_influence(data), large.self_influence(data))
    assert cut.distill(tail=None).delta is None
    assert cut.distill(tail=0.5).delta == pytest.approx(0.5)
    with refused(InputError, "keep=31", 30):
        large.distill(keep=31)


def test_cuts_change_nothing_about_the_fit_they_come_from(problem):
    task, data = problem
    fitted = et.Arnoldi(steps=60, keep=10).fit(task, data)
    before = fitted.self_influence(data)
    fitted.distill(keep=3, tail=None, positive_only=True)
    assert torch.equal(fitted.self_influence(data), before)
    with pytest.raises(dataclasses.FrozenInstanceError):
        fitted.cut = None


def test_positive_only_leaves_negative_curvature_out(cases):
    case = cases["mlp"]
    task = et.classification(case.task.model)  # without the penalty the Hessian is indefinite
    whole = et.Arnoldi(steps=100, keep=20, curvature="hessian", tail=None, sample=None).fit(task, case.batches)
    assert (whole.spectrum.eigenvalues < 0).any()
    positive = whole.distill(positive_only=True)
    assert (positive.spectrum.eigenvalues > 0).all()
    assert positive.features(case.batches).shape[1] == int((whole.spectrum.eigenvalues > 0).sum())
    assert (positive.self_influence(case.batches) >= 0).all()
    # under a tail, negative directions count as flat either way
    a, b = (whole.distill(tail=0.1, positive_only=p).influence(case.batches, case.queries) for p in (False, True))
    assert torch.allclose(a, b)


def test_the_tail_brings_scores_closer_to_the_exact_ones(cases):
    case = cases["mlp"]
    exact = et.ExactHessian(curvature="gauss-newton").fit(case.task, case.batches).influence(case.batches, case.queries)
    tailed = et.Arnoldi(steps=100, keep=10, sample=None).fit(case.task, case.batches)
    scores = {t: tailed.distill(tail=t).influence(case.batches, case.queries).flatten() for t in ("auto", None)}
    correlation = {t: float(torch.corrcoef(torch.stack([s, exact.flatten()]))[0, 1]) for t, s in scores.items()}
    assert correlation["auto"] > correlation[None]


def test_a_fixed_sample_is_drawn_once_and_by_seed(problem):
    task, data = problem
    a, b, c = (et.Arnoldi(steps=40, keep=5, sample=100, seed=s).fit(task, data) for s in (1, 1, 2))
    assert torch.equal(a.spectrum.eigenvalues, b.spectrum.eigenvalues)
    assert not torch.allclose(a.spectrum.eigenvalues, c.spectrum.eigenvalues, rtol=1e-3)
    whole = et.Arnoldi(steps=40, keep=5, sample=None).fit(task, data)
    capped = et.Arnoldi(steps=40, keep=5, sample=10_000).fit(task, data)
    assert torch.equal(whole.spectrum.eigenvalues, capped.spectrum.eigenvalues)
    assert (a.num_train, whole.num_train) == (300, 300)


def test_spread_draws_new_examples_at_every_step(problem):
    task, data = problem
    spread = et.Arnoldi(steps=60, keep=5, sample=100, spread=True).fit(task, data)
    whole = et.Arnoldi(steps=60, keep=5, sample=None).fit(task, data)
    assert spread.spectrum.residuals is None
    assert spread.spectrum.converged is None
    assert torch.allclose(spread.spectrum.eigenvalues[:2], whole.spectrum.eigenvalues[:2], rtol=0.3)
    again = et.Arnoldi(steps=60, keep=5, sample=100, spread=True).fit(task, data)
    assert torch.equal(spread.self_influence(data), again.self_influence(data))


def test_eigenvalues_match_the_dense_curvature(cases):
    case = cases["transformer"]
    values = torch.linalg.eigvalsh(dense_hessian(case, "hessian"))
    exact = values[values.abs().argsort(descending=True)][:10]
    found = et.Arnoldi(steps=80, keep=10, curvature="hessian", sample=None).fit(case.task, case.batches)
    assert torch.allclose(found.spectrum.eigenvalues, exact, rtol=1e-8)
    assert (found.spectrum.residuals < 1e-6).all()


def test_too_few_steps_are_told(problem):
    task, data = problem
    with warned(ConvergenceWarning, "steps", "keep", 12):
        fitted = et.Arnoldi(steps=12, keep=12).fit(task, data)
    assert fitted.spectrum.converged is False


@pytest.mark.parametrize(("dtype", "tol"), [(torch.float64, 1e-7), (torch.float32, 2e-2)])
def test_at_the_numerical_rank_the_tail_is_a_damped_inverse(dtype, tol):
    # Six examples and three classes: Gauss-Newton has rank 12 of 18, so pairs at rounding level are asked for.
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model, x, y = nn.Linear(5, 3).double(), torch.randn(6, 5).double(), torch.tensor([0, 1, 2, 2, 1, 0])
    double = Case(et.classification(model), [(x, y)], [(x[:2] + 0.3, y[1:3])])
    H = dense_hessian(double, "gauss-newton")
    train, asked = (dense_gradients(double.task, b) for b in (double.batches, double.queries))
    single = et.classification(nn.Linear(5, 3).to(dtype))
    single.model.load_state_dict({name: value.to(dtype) for name, value in model.state_dict().items()})
    batches, queries = ([(a.to(dtype), b) for a, b in group] for group in (double.batches, double.queries))
    fitted = et.Arnoldi(steps=18, keep=18, sample=None).fit(single, batches)
    assert 12 <= len(fitted.spectrum.eigenvalues) < 18
    largest = float(fitted.spectrum.eigenvalues[0])
    assert fitted.delta >= 0.999e-4 * largest
    damped = torch.linalg.inv(H + fitted.delta * torch.eye(18).double())
    expected = asked @ damped @ train.T
    assert (fitted.influence(batches, queries) - expected).norm() < tol * expected.norm()
    assert (fitted.self_influence(batches) > 0).all()


def test_an_unsettled_delta_is_never_too_large(problem):
    # Ritz values of a positive matrix stay below the eigenvalues they tend to, so too few steps make δ too small.
    task, data = problem
    settled = et.Arnoldi(steps=100, keep=12).fit(task, data)
    with warned(ConvergenceWarning, "steps", "keep", 12, 14):
        hasty = et.Arnoldi(steps=14, keep=12).fit(task, data)
    assert hasty.delta < settled.delta
    assert (hasty.self_influence(data) > 0).all()


def test_nothing_but_negative_curvature_is_a_gradient_product(cases):
    class Cap(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.tensor([0.1, -0.2, 0.3], dtype=torch.float64))

        def forward(self, x):
            return (x @ self.w).cos()

    task = et.Task(Cap(), lambda model, batch: model(batch))
    data = et.Data.from_batches([0.3 * torch.randn(20, 3, dtype=torch.float64)])
    fitted = et.Arnoldi(steps=3, keep=3).fit(task, data)
    assert (fitted.spectrum.eigenvalues < 0).all()
    product = et.TracIn().fit(task, data).influence(data, data)
    assert torch.allclose(fitted.influence(data, data), product / fitted.delta)
    assert fitted.delta == pytest.approx(float(fitted.spectrum.eigenvalues[-1].abs()))


def test_layers_are_restricted_by_one_argument(cases):
    case = cases["mlp"]
    last = et.classification(case.task.model, params="4.*", l2=0.1)
    train = dense_gradients(last, case.batches)
    assert train.shape[1] == last.coverage.selected == 18
    found = et.TracIn().fit(last, case.batches).influence(case.batches, case.batches)
    assert torch.allclose(found, train @ train.T)
    expect_mentions(str(last.coverage), ["34%", 53, 18, 2])


def test_a_loss_only_task_uses_the_hessian(cases):
    case = cases["mlp"]
    task = et.Task(case.task.model, cross_entropy, l2=0.1)
    assert et.Arnoldi(steps=30, keep=5).fit(task, case.batches).method["curvature"] == "auto"
    with refused(InputError, "curvature='gauss-newton'", "outputs", "output_loss"):
        et.Arnoldi(curvature="gauss-newton").fit(task, case.batches)


def test_gradient_methods_have_no_spectrum(problem):
    task, data = problem
    fitted = et.RandProj(4).fit(task, data)
    with refused(UnsupportedError, "RandProj", "spectrum"):
        _ = fitted.spectrum
    with refused(UnsupportedError, "RandProj", "eigenpairs"):
        fitted.distill(keep=2)


def test_the_callers_autocast_does_not_leak_in(problem):
    task, data = problem
    fitted = et.Arnoldi(steps=40, keep=5).fit(task, data)
    with torch.autocast("cpu", torch.bfloat16):
        inside = fitted.self_influence(data)
    assert torch.equal(inside, fitted.self_influence(data))


@pytest.mark.parametrize("method", [et.Arnoldi(steps=30, keep=3, sample=50, spread=True), et.Lissa(depth=50)])
def test_a_bad_row_is_never_passed_over(problem, method):
    task, data = problem
    x, y = data.tensors
    bad = y.clone()
    bad[150:160] = 7  # ten labels that are no class, in the middle of the data
    with refused(NumericalError, "row", 7, 3):
        method.fit(task, TensorDataset(x, bad)).influence(data, (x[:2], y[:2]))


def test_numpy_settings_can_be_saved(problem, tmp_path):
    task, data = problem
    fitted = et.Arnoldi(steps=np.int64(40), keep=np.int64(3), tail=np.float32(0.5)).fit(task, data)
    fitted.save(tmp_path / "fit")
    loaded = et.load(tmp_path / "fit", task)
    assert loaded.delta == pytest.approx(0.5)
    assert loaded.method["keep"] == 3


@pytest.mark.parametrize("cast", ["model", "loss"])
def test_the_exact_hessian_says_what_does_not_run_in_float64(cast):
    class Casting(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(3, 2)

        def forward(self, x):
            return self.a(x.float() if cast == "model" else x)

    def loss(model, batch):
        weight = torch.tensor([1.0, 2.0]) if cast == "loss" else None
        return nn.functional.cross_entropy(model(batch[0]), batch[1], weight=weight, reduction="none")

    data = [(torch.randn(6, 3), torch.tensor([0, 1] * 3))]
    with refused(TaskError, "float64", "float32"):
        et.ExactHessian(damping=1.0).fit(et.Task(Casting(), loss), data)


def test_a_loss_that_is_not_convex_in_the_outputs_is_told():
    model, data = nn.Linear(3, 2).double(), (torch.randn(8, 3).double(),)
    tasks = {
        convex: et.Task(
            model,
            outputs=lambda m, b: m(b[0]),
            output_loss=lambda o, b, f=torch.square if convex else torch.cos: f(o).sum(dim=1),
        )
        for convex in (True, False)
    }
    with warned(EigentraceWarning, "output_loss", "curvature='hessian'"):
        et.Arnoldi(steps=8, keep=4).fit(tasks[False], data)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        et.Arnoldi(steps=8, keep=4).fit(tasks[True], data)
        et.Arnoldi(steps=8, keep=4, curvature="hessian").fit(tasks[False], data)


def test_its_docstring_explains_every_setting():
    for field in dataclasses.fields(et.Arnoldi):
        assert f"\n        {field.name}: " in et.Arnoldi.__doc__
