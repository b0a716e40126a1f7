"""The checks before an iteration: each warning names its own cause."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import eigentrace as et
from eigentrace.curvature.checks import check_curvature
from eigentrace.curvature.operator import Curvature
from eigentrace.curvature.products import Differentiation
from eigentrace.data import as_data
from eigentrace.errors import PrecisionWarning
from tests.helpers.expecting import warned

SATURATED = ("float32", "task.double()", "probabilities", 0, 1)


def certain(least):
    """A linear classifier and 40 examples about which it is right, by a gap between logits of at least `least`."""
    generator = torch.Generator().manual_seed(0)
    model, x = nn.Linear(5, 3), torch.randn(4000, 5, generator=generator)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 10
    with torch.no_grad():
        logits = model(x)
    gaps = logits.topk(2, dim=1).values.diff(dim=1).abs()[:, 0]
    rows = gaps.argsort()[(gaps < least).sum() :][:40].flip(0)  # the most certain first
    return et.classification(model), x[rows], logits[rows].argmax(dim=1)


def largest_eigenvalue(task, x):
    """λ₁ of the Gauss-Newton matrix, from probabilities whose difference to 1 is not lost."""
    logits = F.linear(x.double(), task.params["weight"].double(), task.params["bias"].double())
    p = logits.softmax(dim=1)
    rest = torch.stack([(logits[:, [d for d in range(3) if d != c]]).logsumexp(1) for c in range(3)], dim=1)
    away = torch.sigmoid(rest - logits)  # 1 − p
    S = -p.unsqueeze(2) * p.unsqueeze(1)
    S.diagonal(dim1=1, dim2=2).copy_(p * away)
    inputs = torch.cat([x.double(), torch.ones(len(x), 1, dtype=torch.float64)], dim=1)
    H = torch.einsum("ncd,ni,nj->cidj", S, inputs, inputs).reshape(18, 18) / len(x)
    return float(torch.linalg.eigvalsh(H)[-1])


def test_a_saturated_loss_is_named_with_a_way_out():
    task, x, y = certain(18.0)
    task_double, expected = task.double(), largest_eigenvalue(task, x)
    method = et.Arnoldi(steps=18, keep=2)
    with warned(PrecisionWarning, *SATURATED) as caught:
        found = method.fit(task, (x, y)).spectrum.eigenvalues[0]
    assert not [w for w in caught if "unusual" in str(w.message)]
    assert abs(float(found) / expected - 1) > 0.2
    exact = method.fit(task_double, (x, y)).spectrum.eigenvalues[0]
    assert float(exact) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("has_outputs", [True, False])
def test_a_saturated_loss_is_named_with_the_hessian_too(has_outputs):
    task, x, y = certain(18.0)
    method = et.Arnoldi(steps=18, keep=2, curvature="hessian")
    own = task if has_outputs else et.Task(task.model, lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction="none"))
    with warned(PrecisionWarning, *SATURATED) as caught:
        method.fit(own, (x, y))
    assert len(caught) == 1, "one cause, one warning"


class _Wrong(torch.autograd.Function):
    """Its second derivative is missing a part."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 3 * x.detach() * x * g


def _check_hessian(model, loss, x, y):
    curvature = Curvature(et.Task(model, loss), as_data([(x, y)]), None, "hessian", form=Differentiation.REVERSE)
    with curvature.task.session():
        check_curvature(curvature, torch.Generator().manual_seed(0))


def test_a_wrong_second_derivative_is_told_by_differences():
    with warned(PrecisionWarning, "Hessian", "difference", "curvature='gauss-newton'"):
        _check_hessian(
            nn.Linear(5, 3), lambda m, b: _Wrong.apply(m(b[0])).sum(1), torch.randn(40, 5), torch.zeros(40).long()
        )


def test_a_steep_loss_is_no_wrong_derivative():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 10)), torch.randn(2000, 20)
    with torch.no_grad():
        model[-1].weight *= 80  # finite differences of float32 gradients are not accurate
        y = model(x).argmax(1)
        rows = (F.cross_entropy(model(x), y, reduction="none") < 1e-2).nonzero().flatten()[:64]
    _check_hessian(model, lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction="none"), x[rows], y[rows])


def test_saturated_batches_do_not_matter_beside_others_with_more_curvature():
    (task, x, y), (_, others, labels) = certain(18.0), certain(1.0)
    x, y = torch.cat([x, others]), torch.cat([y, labels])
    found = et.Arnoldi(steps=18, keep=2).fit(task, et.Data(TensorDataset(x, y), batch_size=8))
    assert float(found.spectrum.eigenvalues[0]) == pytest.approx(largest_eigenvalue(task, x), rel=1e-3)


class _OneSided(torch.autograd.Function):
    """Its forward and reverse derivatives disagree."""

    @staticmethod
    def forward(x):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, g):
        return g * torch.linspace(0, 2, g.shape[1], dtype=g.dtype)

    @staticmethod
    def jvp(ctx, t):
        return t * 1.0


class _Custom(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.last(_OneSided.apply(self.first(x)))


def test_inconsistent_derivative_rules_of_the_model_are_named():
    batch = (torch.randn(40, 5), torch.randint(0, 3, (40,)))
    task = et.classification(_Custom())
    curvature = Curvature(task, as_data([batch]), None, "gauss-newton")
    with task.session(), warned(PrecisionWarning, "derivative rules", "operations") as caught:
        check_curvature(curvature, torch.Generator().manual_seed(0))
    assert not [w for w in caught if "probabilities" in str(w.message)]
