"""The matvecs against a Hessian and a Gauss-Newton matrix written down in float64."""

import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import eigentrace as et
from eigentrace.curvature.checks import check_curvature
from eigentrace.curvature.operator import Curvature, working_form
from eigentrace.curvature.products import Differentiation, hessian_forward
from eigentrace.data import as_data
from eigentrace.errors import PrecisionWarning, UnsupportedError
from tests.helpers.expecting import refused, warned
from tests.helpers.models import CASES, dense_hessian

# Two float64 derivations of the same matrix differ by rounding only.
EXACT = 1e-10


def relative(a, b):
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("kind", ["hessian", "gauss-newton"])
@pytest.mark.parametrize("form", list(Differentiation))
@pytest.mark.parametrize("name", CASES)
def test_matvec_matches_dense_matrix(cases, name, kind, form):
    case = cases[name]
    H = dense_hessian(case, kind)
    curvature = Curvature(case.task, as_data(case.batches), None, kind, form=form)
    V = torch.randn(3, case.task.layout.numel, dtype=torch.float64)
    with case.task.session():
        single = torch.stack([curvature.matvec(v) for v in V])
        together = curvature.matmat(V)
    assert relative(single, V @ H) < EXACT
    assert relative(together, V @ H) < EXACT


def test_uneven_batches_do_not_bias():
    # Averaging per batch instead of per example is 154% off here (a peer does it).
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x, y = torch.randn(64, 3).double(), torch.randint(0, 2, (64,))
    x[60:] *= 10
    task, dataset = et.classification(model), TensorDataset(x, y)
    v = torch.randn(task.layout.numel, dtype=torch.float64)
    with task.session():
        found = [Curvature(task, et.Data(dataset, batch_size=b), None).matvec(v) for b in (1, 7, 60, 64)]
    for other in found[1:]:
        assert relative(other, found[0]) < EXACT


def test_rows_restrict_to_a_sample(cases):
    case = cases["mlp"]
    rows = np.array([0, 3, 9, 16])
    x, y = (torch.cat([b[i] for b in case.batches])[rows] for i in (0, 1))
    v = torch.randn(case.task.layout.numel, dtype=torch.float64)
    with case.task.session():
        sampled = Curvature(case.task, as_data(case.batches), rows).matvec(v)
        alone = Curvature(case.task, as_data([(x, y)]), None).matvec(v)
    assert relative(sampled, alone) < EXACT


def test_layer_norm_weights_agree_with_finite_differences():
    # The form with jacrev is silently wrong here by a quarter.
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 2)).double()
    x, y = torch.randn(20, 3).double(), torch.randint(0, 2, (20,))
    task = et.classification(model, params="1.*")
    v = torch.randn(task.layout.numel, dtype=torch.float64)

    def gradient(at):
        values = task.layout.unflatten(at)
        return task.layout.flatten(torch.func.grad(lambda p: task.losses(p, (x, y)).mean())(values))

    with task.session():
        exact = Curvature(task, as_data([(x, y)]), None).matvec(v)
        difference = (gradient(task.vector + 1e-5 * v) - gradient(task.vector - 1e-5 * v)) / 2e-5
    assert relative(exact, difference) < 1e-8  # the square of the step, plus rounding over the step


def test_bf16_autocast_is_close_to_fp32():
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    x, y = torch.randn(40, 8), torch.randint(0, 3, (40,))
    task, data = et.classification(model), as_data([(x, y)])
    v = torch.randn(task.layout.numel)
    with task.session():
        full = Curvature(task, data, None, "gauss-newton").matvec(v)
        half = Curvature(task, data, None, "gauss-newton", precision="bf16").matvec(v)
    assert half.dtype == torch.float32
    assert 0 < relative(half, full) < 0.05  # bfloat16 carries eight bits


class _NoForwardMode(torch.autograd.Function):
    """A function people write: differentiable twice, but only backwards."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * g


class _Cubed(nn.Module):
    def forward(self, x):
        return _NoForwardMode.apply(x)


def test_falls_back_to_double_backward_without_forward_mode():
    with_rule = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double()

    class Reference(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = with_rule

        def forward(self, x):
            return self.b(self.a(x) ** 3)

    without = nn.Sequential(with_rule[0], _Cubed(), with_rule[1])
    batch = (torch.randn(9, 3).double(), torch.randint(0, 2, (9,)))
    curvature = Curvature(et.classification(without), as_data([batch]), None)
    v = torch.randn(curvature.task.layout.numel, dtype=torch.float64)
    with curvature.task.session():
        assert working_form(curvature, batch) is Differentiation.REVERSE
        found = dataclasses.replace(curvature, form=Differentiation.REVERSE).matvec(v)
    reference = et.classification(Reference())
    with reference.session():
        expected = Curvature(reference, as_data([batch]), None).matvec(v)
    assert relative(found, expected) < EXACT


def test_loss_without_second_derivatives_is_refused():
    def ctc(model, batch):
        log_probs = model(batch[0]).log_softmax(-1).transpose(0, 1)
        lengths = torch.full((log_probs.shape[1],), log_probs.shape[0])
        return F.ctc_loss(log_probs, batch[1], lengths, torch.full_like(lengths, 2), reduction="none")

    batch = (torch.randn(4, 6, 3), torch.randint(1, 4, (4, 2)))
    curvature = Curvature(et.Task(nn.Linear(3, 4), ctc), as_data([batch]), None)
    with curvature.task.session(), refused(UnsupportedError, "Linear", "_ctc_loss"):
        working_form(curvature, batch)


class _Bag(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(6, 4, **options), nn.Linear(4, 3)
        nn.init.normal_(self.bag.weight)  # the padding row too

    def forward(self, tokens, *weights):
        return self.head(torch.tanh(self.bag(tokens, None, *weights)))


def _bag_as_a_product(vector, tokens, weights, labels, options):
    """Losses of a `_Bag` written as a product with counts: nothing is looked up."""
    table, matrix, bias = vector[:24].view(6, 4), vector[24:36].view(3, 4), vector[36:]
    hot = F.one_hot(tokens, 6).double()
    if options["padding_idx"] is not None:
        hot = hot * (tokens != options["padding_idx"]).unsqueeze(-1)
    counts = (hot if weights is None else hot * weights.unsqueeze(-1)).sum(1)
    if options["mode"] == "mean":
        counts = counts / counts.sum(1, keepdim=True).clamp_min(1)
    return torch.tanh(counts @ table) @ matrix.T + bias, labels


@pytest.mark.parametrize(("mode", "weighted"), [("sum", False), ("sum", True), ("mean", False)])
@pytest.mark.parametrize("padding", [None, 2])
def test_bags_of_embeddings_match_dense_matrices(mode, weighted, padding):
    options = {"mode": mode, "padding_idx": padding}
    model = _Bag(**options).double()
    tokens, labels = torch.randint(0, 6, (9, 5)), torch.randint(0, 3, (9,))
    tokens[0] = 2  # for some, an empty bag
    weights = torch.randn(9, 5).double() if weighted else None
    inputs = (tokens,) if weights is None else (tokens, weights)
    task, data = et.classification(model), as_data([(inputs, labels)])

    def loss(vector):
        return F.cross_entropy(*_bag_as_a_product(vector, tokens, weights, labels, options))

    def outputs(vector):
        return _bag_as_a_product(vector, tokens, weights, labels, options)[0]

    assert torch.allclose(outputs(task.vector), model(*inputs), rtol=1e-12)
    J = torch.autograd.functional.jacobian(outputs, task.vector)  # (B, classes, P)
    p = outputs(task.vector).softmax(-1)
    S = torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)
    dense = {
        "hessian": torch.autograd.functional.hessian(loss, task.vector),
        "gauss-newton": torch.einsum("bip,bij,bjq->pq", J, S, J) / 9,
    }
    V = torch.randn(3, task.layout.numel, dtype=torch.float64)
    for kind, H in dense.items():
        for form in Differentiation:
            curvature = Curvature(task, data, None, kind, form=form)
            with task.session():
                assert relative(torch.stack([curvature.matvec(v) for v in V]), V @ H) < EXACT
                assert relative(curvature.matmat(V), V @ H) < EXACT
    assert "forward" not in vars(model.bag)


def test_bags_that_cannot_be_looked_up_are_refused_with_a_way_out():
    batch = (torch.randint(0, 6, (9, 5)), torch.randint(0, 3, (9,)))
    model = _Bag(mode="max")
    method = et.Arnoldi(steps=4, keep=2)
    with refused(UnsupportedError, "_Bag", "_embedding_bag", "params=..."):
        method.fit(et.classification(model), [batch])
    assert len(method.fit(et.classification(model, params="head.*"), [batch]).self_influence([batch])) == 9


class _Once(torch.autograd.Function):
    """Marked as differentiable once. torch drops its second derivative in silence when only inputs are asked for."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        return 3 * ctx.saved_tensors[0] ** 2 * g


def test_finite_differences_show_a_dropped_second_derivative():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(2, 2)

        def forward(self, x):
            return _Once.apply(self.a(x))

    task, data = et.classification(Model()), as_data([(torch.randn(8, 2), torch.tensor([0, 1] * 4))])
    with task.session(), warned(PrecisionWarning, "Hessian", "curvature='gauss-newton'"):
        check_curvature(Curvature(task, data, None), torch.Generator())


def test_a_large_sample_streams_and_gives_the_same(cases, monkeypatch):
    case = cases["mlp"]
    v = torch.randn(case.task.layout.numel, dtype=torch.float64)
    with case.task.session():
        held = Curvature(case.task, as_data(case.batches), None).matvec(v)
        monkeypatch.setattr("eigentrace.curvature.operator.HELD_EXAMPLES", 3)
        streamed = Curvature(case.task, as_data(case.batches), None).matvec(v)
    assert torch.equal(held, streamed)


def test_vectors_that_do_not_fit_together_are_multiplied_in_smaller_groups(cases, monkeypatch):
    case, tried = cases["mlp"], []

    def small(function, chunk_size):
        tried.append(chunk_size)
        if chunk_size > 3:
            raise torch.OutOfMemoryError("too large")
        return torch.func.vmap(function, chunk_size=chunk_size)

    monkeypatch.setattr("eigentrace.curvature.operator.vmap", small)
    vectors = torch.randn(10, case.task.layout.numel, dtype=torch.float64)
    curvature = Curvature(case.task, as_data(case.batches), None, "gauss-newton")
    with case.task.session():
        found = curvature.matmat(vectors)
    assert torch.allclose(found, vectors @ dense_hessian(case, "gauss-newton"), atol=1e-9)
    assert tried[:3] == [10, 5, 2]
    assert set(tried[3:]) <= {2}  # other batches do not try again what did not fit


def test_product_is_linear_and_symmetric(cases):
    task, batch = cases["conv"].task, cases["conv"].batches[0]
    u, v = torch.randn(2, task.layout.numel, dtype=torch.float64)

    def product(w):
        return task.layout.flatten(hessian_forward(task, task.params, task.layout.unflatten(w), batch))

    with task.session():
        assert relative(product(2 * u - v), 2 * product(u) - product(v)) < EXACT
        assert abs(float(u @ product(v) - v @ product(u))) < EXACT * float(u.norm() * product(v).norm())


def test_several_outputs_work_forward_and_are_refused_backward():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(3, 2)

        def forward(self, x):
            return self.a(x), self.a(x).tanh()

    def output_loss(outputs, batch):
        return sum(o.square().sum(dim=1) for o in outputs)

    batch = torch.randn(5, 3)
    task = et.Task(Two(), outputs=lambda m, b: m(b), output_loss=output_loss)
    curvature = Curvature(task, et.Data.from_batches([batch]), None, "gauss-newton", form=Differentiation.FORWARD)
    with task.session():
        assert curvature.matvec(torch.ones(task.layout.numel)).isfinite().all()
        with refused(UnsupportedError, "tuple"):
            dataclasses.replace(curvature, form=Differentiation.REVERSE).matvec(torch.ones(task.layout.numel))
