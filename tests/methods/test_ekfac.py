"""EK-FAC, against gradients written out one example at a time and dense inverses in float64."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import eigentrace as et
from eigentrace.curvature.drawn import DrawnGradients
from eigentrace.curvature.operator import Curvature
from eigentrace.data import as_data
from eigentrace.errors import InputError, MismatchError, NumericalError, UnsupportedError
from eigentrace.fits import kronecker_metric
from eigentrace.fits.kronecker_metric import measured_metric
from eigentrace.projection import Job, gradients
from tests.helpers.checking import Net, numbers, one_at_a_time, wavy, weight
from tests.helpers.expecting import refused
from tests.helpers.models import ConvNet, TinyTransformer


def forward(self, tokens, image):
    h = self.n(self.e(tokens))
    h = self.t(self.a(h).tanh()) + self.p
    seen = self.u(self.d(self.c(image).relu())).flatten(1)
    return torch.cat(
        [(h @ self.e.weight.T).sum(dim=1), self.l(self.r(self.o(tokens).sum(dim=1))), seen * self.s], dim=1
    )


def network():
    """Tied and untied lookups, plain, tied, convolved, grouped and transposed layers, norms, and one without a rule."""
    layers = {"e": nn.Embedding(5, 4), "a": nn.Linear(4, 4), "t": nn.Linear(4, 4), "n": nn.LayerNorm(4)}
    layers |= {"o": nn.Embedding(5, 3), "r": nn.PReLU(3), "l": nn.Linear(3, 2)}
    layers |= {"c": nn.Conv2d(2, 4, 3, padding=1), "d": nn.Conv2d(4, 8, 2, groups=2)}
    model = Net(forward, **layers, u=nn.ConvTranspose2d(8, 2, 2), p=weight(1, 3, 4), s=weight())
    model.t.weight = model.a.weight
    return model


def batches():
    return [(torch.randint(0, 5, (n, 3)), numbers(n, 2, 3, 3)) for n in (4, 1, 6)]


@pytest.fixture
def fitted():
    task, data = et.Task(network(), wavy, l2={"a.*": 0.3, "l.bias": 0.2, "l.weight": 0.5}), batches()
    return et.EKFAC(labels="data", damping=0.02).fit(task, data), task, data


def basis_of(metric):  # (P, P)
    """The basis as a dense matrix, by undoing the rotation of unit vectors: the inverse of a diagonal of ones."""
    eye = torch.eye(metric.layout.numel, dtype=torch.float64)
    columns = []
    for name, values in metric.diagonal.items():
        for at in range(values.numel()):
            chosen = {other: torch.full_like(v, 1e300) for other, v in metric.diagonal.items()}
            chosen[name] = chosen[name].flatten().index_fill(0, torch.tensor([at]), 1.0).view_as(values)
            projector = replace(metric, diagonal=chosen).inverse(eye, 0.0)
            columns.append(torch.linalg.eigh(projector).eigenvectors[:, -1])
    return torch.stack(columns, dim=1)


def test_the_diagonal_is_exact_in_an_orthonormal_basis(fitted):
    found, task, data = fitted
    whole = one_at_a_time(task, data)[0]
    basis = basis_of(found.metric)
    assert torch.allclose(basis.T @ basis, torch.eye(task.layout.numel).double(), atol=1e-8)
    penalty = torch.cat([torch.full((task.layout.span(n).stop - task.layout.span(n).start,), task.l2[n])
                         for n in task.layout.names]).double()  # fmt: skip
    wanted = (whole @ basis).square().mean(0) + basis.square().T @ penalty
    held = torch.cat([values.flatten() for values in found.metric.diagonal.values()])
    assert torch.allclose(held, wanted, atol=1e-10)
    assert {name: one.bias for name, one in found.metric.joined.items()} == {
        "l.weight": "l.bias", "c.weight": "c.bias", "d.weight": "d.bias",
    }  # fmt: skip
    # The bases of a joined matrix diagonalise the covariance of its inputs with a 1.
    inputs = torch.cat([task.model.r(task.model.o(tokens).sum(1)) for tokens, _ in data])
    inputs = torch.cat([inputs, torch.ones(len(inputs), 1).double()], 1).detach()
    rotated = inputs @ found.metric.bases["l.weight"][1]
    assert torch.allclose(rotated.T @ rotated, torch.diag(rotated.square().sum(0)), atol=1e-9)


@pytest.mark.parametrize("memory", [None, 2000])
def test_scores_are_products_with_the_dense_inverse(fitted, memory):
    found, task, data = fitted
    compute = et.Compute(memory=memory)
    whole = one_at_a_time(task, data)[0]
    basis, values = basis_of(found.metric), torch.cat([v.flatten() for v in found.metric.diagonal.values()])
    wanted = whole @ basis @ torch.diag(1 / (values + 0.02)) @ basis.T @ whole.T
    assert torch.allclose(found.influence(data, data, compute=compute), wanted, atol=1e-9)
    assert torch.allclose(found.self_influence(data, compute=compute), wanted.diagonal(), atol=1e-9)
    reverse = et.Compute(engine="reverse", memory=memory)
    assert torch.allclose(found.self_influence(data, compute=reverse), wanted.diagonal(), atol=1e-9)
    lengths = whole.norm(dim=1)
    unit = found.self_influence(data, normalize="gradient", compute=compute)
    assert torch.allclose(unit, wanted.diagonal() / lengths.square(), atol=1e-9)
    unit = found.influence(data, data, normalize="gradient", compute=compute)
    assert torch.allclose(unit, wanted / lengths / lengths[:, None], atol=1e-9)
    again = found.damped(0.7).influence(data, data)
    assert torch.allclose(again, whole @ basis @ torch.diag(1 / (values + 0.7)) @ basis.T @ whole.T, atol=1e-9)


def test_a_curvature_of_that_form_is_inverted_exactly():
    # One output and squared errors: the Gauss-Newton matrix is the covariance of the inputs, which has this form.
    model, x = nn.Linear(6, 1).double(), numbers(40, 6)
    loss = {"outputs": lambda m, b: m(b[0]), "output_loss": lambda o, b: (o[:, 0] - b[1]).square()}
    task, data = et.Task(model, **loss, l2=0.1), [(x, numbers(40))]
    exact = et.ExactHessian(damping=0.01, curvature="gauss-newton").fit(task, data)
    found = et.EKFAC(damping=0.01).fit(task, data)
    assert torch.allclose(found.influence(data, data), exact.influence(data, data), rtol=1e-8)
    assert torch.allclose(found.self_influence(data, unit="nats"), exact.self_influence(data, unit="nats"), rtol=1e-8)


@pytest.mark.parametrize("kind", ["perceptron", "convolutions", "tokens"])
def test_drawn_labels_measure_the_gauss_newton_matrix(kind):
    # Untrained: a trained network draws the labels that carry most of its curvature too rarely for a test.
    torch.manual_seed(0)
    if kind == "tokens":
        model, batch = TinyTransformer().double(), (torch.randint(0, 7, (6, 5)), torch.ones(6, 5).long())
        losses = lambda o, b: F.cross_entropy(o.transpose(1, 2), b[0], reduction="none").mean(1)  # noqa: E731
        task = et.Task(model, outputs=lambda m, b: m(*b), output_loss=losses)
    else:
        models = {"perceptron": nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), "convolutions": ConvNet()}
        shape = {"perceptron": (6, 4), "convolutions": (6, 1, 6, 6)}[kind]
        task, batch = et.classification(models[kind].double()), (numbers(*shape), torch.zeros(6).long())
    fitted = et.EKFAC(sample=None).fit(task, [tuple(part.repeat(100, *[1] * (part.ndim - 1)) for part in batch)] * 5)
    with task.session():
        curvature = Curvature(task, as_data([batch]), None, "gauss-newton")
        dense = curvature.matmat(torch.eye(task.layout.numel).double())
    basis = basis_of(fitted.metric)
    held = torch.cat([values.flatten() for values in fitted.metric.diagonal.values()])
    wanted = (basis * (dense @ basis)).sum(0)
    assert float((held - wanted).norm() / wanted.norm()) < 0.1
    assert fitted.damping == pytest.approx(0.5 * float(held.mean()))


def test_gradients_are_those_of_the_drawn_labels():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    task, data = et.classification(model), as_data([(numbers(9, 4), torch.randint(0, 3, (9,)))])
    drawn = DrawnGradients(task, 3)
    job = replace(Job.of(task, "losses"), function=drawn, prepare=drawn.prepare)
    with task.session():
        whole = torch.cat(list(gradients(job, data)))
        _, labels, roots, _ = drawn.prepare(data.first(9).values, np.arange(9))
        metric = measured_metric([job], data)
    relabelled = [(data.first(9).values[0], labels)]
    wanted = roots[:, None] * one_at_a_time(task, relabelled)[0]
    assert torch.allclose(whole, wanted, atol=1e-12)
    basis, held = basis_of(metric), torch.cat([v.flatten() for v in metric.diagonal.values()])
    assert torch.allclose(held, (wanted @ basis).square().mean(0), atol=1e-12)


def test_confident_models_need_few_draws():
    # As few labels drawn from the model as this would mostly be those of no gradient.
    torch.manual_seed(0)
    model = nn.Linear(5, 4).double()
    with torch.no_grad():
        model.weight *= 12
    task, data = et.classification(model), [(numbers(60, 5), torch.zeros(60).long())]
    fits = [et.EKFAC(sample=None, draws=draws, seed=1).fit(task, data) for draws in ("auto", 4, 60)]
    means = [fit.metric.mean for fit in fits]
    assert [fit.method["draws"] for fit in fits] == [4, 4, 60]
    assert means[0] == means[1] == pytest.approx(means[2], rel=0.1)
    with task.session():
        curvature = Curvature(task, as_data(data), None, "gauss-newton")
        trace = curvature.matmat(torch.eye(task.layout.numel).double()).trace() / task.layout.numel
    assert means[2] == pytest.approx(float(trace), rel=0.03)


def test_a_fit_is_saved_and_loaded(fitted, tmp_path):
    found, task, data = fitted
    found.save(tmp_path / "fit")
    loaded = et.load(tmp_path / "fit", task)
    assert torch.equal(loaded.influence(data, data), found.influence(data, data))
    assert (loaded.damping, repr(loaded)) == (found.damping, repr(found))
    loaded.check_saved(tmp_path / "fit")
    with refused(MismatchError, "fit"):
        found.damped(3.0).check_saved(tmp_path / "fit")


def test_a_run_is_scored_and_explained_by_it(fitted, tmp_path):
    found, task, data = fitted
    run = et.score(found, data, tmp_path / "run")
    assert np.allclose(run.column("self_influence"), found.self_influence(data).numpy())
    explained = et.open_run(tmp_path / "run", task, data).explain(3, 4, exclude="self")
    wanted = found.influence(data, data)[3]
    wanted[3] = -torch.inf
    assert explained.proponents.rows[0].tolist() == wanted.topk(4).indices.tolist()


def varied(kind):
    """A forward that uses its first layer in another way in batches of large inputs."""

    def forward(self, x):
        h = self.b(x).tanh()
        if float(x.abs().max()) > 10:
            extra = {"weight": lambda: F.linear(h, self.b.weight), "bias": lambda: h * self.b.bias, "own": lambda: h}
            extra |= {"exponential": lambda: h * self.b.bias.exp(), "matrix": lambda: h @ self.b.weight.exp()}
            h = extra[kind]().tanh()
        return self.c(h)

    return Net(forward, b=nn.Linear(3, 3), c=nn.Linear(3, 3))


def held_and_wanted(found, task, batches):
    whole, basis = one_at_a_time(task, batches)[0], basis_of(found.metric)
    held = torch.cat([values.flatten() for values in found.metric.diagonal.values()])
    return held, (whole @ basis).square().mean(0)


@pytest.mark.parametrize("kind", ["weight", "bias", "own", "exponential", "matrix"])
def test_a_bias_belongs_to_its_matrix_only_while_every_batch_says_so(kind):
    torch.manual_seed(0)
    usual, other = [(numbers(n, 3),) for n in (4, 3)], [(numbers(6, 3) + 20,)]
    task = et.Task(varied(kind), wavy)
    found = et.EKFAC(labels="data").fit(task, [*usual, *other])
    assert ("b.weight" in found.metric.joined) == (kind == "own")
    assert torch.allclose(*held_and_wanted(found, task, [*usual, *other]), atol=1e-10)
    # Also where only the examples that are scored are treated differently.
    found = et.EKFAC(labels="data").fit(task, usual)
    assert "b.weight" in found.metric.joined
    for data in (other, [*usual, *other]):
        assert torch.allclose(found.self_influence(data), found.influence(data, data).diagonal(), atol=1e-10)


def test_gradients_of_zero_do_not_show_where_a_bias_belongs():
    # A square layer without inputs in the first batch: sums of both sides are zero, as is the gradient of the bias.
    def gated(self, x):
        gate = x[:, :1].relu()
        return self.c(self.b(x * gate).relu() * gate + x)

    torch.manual_seed(0)
    first, second = numbers(4, 3), numbers(6, 3)
    first[:, 0], second[:, 0] = -first[:, 0].abs(), second[:, 0].abs()
    task = et.Task(Net(gated, b=nn.Linear(3, 3), c=nn.Linear(3, 3)), wavy)
    found = et.EKFAC(labels="data").fit(task, [(first,), (second,)])
    assert torch.allclose(*held_and_wanted(found, task, [(first,), (second,)]), atol=1e-10)
    assert "b.weight" not in found.metric.joined


@pytest.mark.filterwarnings("ignore:Some selected parameters are stored in bfloat16")
def test_biases_belong_to_their_matrices_in_half_precision_too():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).bfloat16()
    data = [(torch.randn(8, 6, 4).bfloat16(),)]
    found = et.EKFAC(labels="data").fit(et.Task(model, lambda m, b: m(b[0]).float().square().sum((1, 2))), data)
    assert {one.bias for one in found.metric.joined.values()} == {"0.bias", "2.bias"}


def test_padding_does_not_change_a_fit():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 7)).double()

    def loss(outputs, batch):
        return F.cross_entropy(outputs.transpose(1, 2), batch[1], reduction="none", ignore_index=-100).sum(1)

    task = et.Task(model, outputs=lambda m, b: m(b[0]), output_loss=loss)
    tokens, labels = torch.randint(0, 7, (6, 3)), torch.randint(0, 7, (6, 3))
    padded = [(F.pad(tokens, (0, 5), value=2), F.pad(labels, (0, 5), value=-100))]
    for settings in ({}, {"labels": "data"}):
        found = [
            et.EKFAC(**settings).fit(task, data).influence(padded, padded) for data in ([(tokens, labels)], padded)
        ]
        assert torch.allclose(*found, rtol=1e-8)


def test_outputs_may_be_one_number_per_example():
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1), nn.Flatten(0)).double()
    data = [(numbers(7, 4), torch.rand(7).double())]

    def loss(outputs, batch):
        return F.binary_cross_entropy_with_logits(outputs, batch[1], reduction="none")

    found = et.EKFAC().fit(et.Task(model, outputs=lambda m, b: m(b[0]), output_loss=loss), data)
    column = et.Task(model[:-1], outputs=lambda m, b: m(b[0]), output_loss=lambda o, b: loss(o[:, 0], b))
    assert torch.allclose(found.influence(data, data), et.EKFAC().fit(column, data).influence(data, data))


def test_sides_that_are_too_wide_keep_the_standard_basis(monkeypatch, capsys):
    monkeypatch.setattr(kronecker_metric, "WIDEST_SIDE", 4)
    monkeypatch.setattr("eigentrace.fits.kronecker.WIDEST_SIDE", 4)
    task, data = et.Task(network(), wavy), batches()
    found = et.EKFAC(labels="data").fit(task, data)
    assert found.metric.bases["c.weight"][1] is None
    assert found.metric.unrotated["c.weight"] == found.method["unrotated"]["c.weight"] == ["right"]
    assert "c.weight (right)" in capsys.readouterr().err
    whole, basis = one_at_a_time(task, data)[0], basis_of(found.metric)
    held = torch.cat([values.flatten() for values in found.metric.diagonal.values()])
    assert torch.allclose(held, (whole @ basis).square().mean(0), atol=1e-10)


def test_what_cannot_be_is_refused_with_a_way_out():
    model = nn.Linear(3, 2)
    data = [(torch.randn(8, 3), torch.randint(0, 2, (8,)))]
    plain = et.Task(model, lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction="none"))
    with refused(InputError, "labels='data'"):
        et.EKFAC().fit(plain, data)
    for settings in ({"damping": 0.0}, {"sample": 0}, {"labels": "own"}, {"draws": 0}):
        with refused(InputError, *settings):
            et.EKFAC(**settings)
    fitted = et.EKFAC().fit(et.classification(model), data)
    with refused(UnsupportedError, "EKFAC"):
        fitted.features(data)
    flat = et.Task(model, outputs=lambda m, b: m(b[0]), output_loss=lambda o, b: o.sum(1))
    with refused(NumericalError, "zero"):
        et.EKFAC().fit(flat, data)
