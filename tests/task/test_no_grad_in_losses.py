"""What a loss computes under `torch.no_grad()` is a constant for every engine and every curvature product."""

import functools

import pytest
import torch
from torch import nn

import eigentrace as et
from eigentrace.curvature.operator import Curvature
from eigentrace.curvature.products import Differentiation

FUNCTIONS = {}


def constant(name):
    def add(function):
        FUNCTIONS[name] = function
        return function

    return add


@constant("focal weights")
def focal(logits, labels, stop):
    losses = nn.functional.cross_entropy(logits, labels, reduction="none")
    return stop(lambda: (1 - torch.exp(-losses)) ** 2) * losses


@constant("distillation targets")
def distilled(logits, labels, stop):
    target = stop(lambda: torch.softmax(logits.roll(1, dims=1) / 2, dim=1))
    return -(target * torch.log_softmax(logits, dim=1)).sum(1)


@constant("a tuple of results")
def ranked(logits, labels, stop):
    highest, _ = stop(lambda: logits.max(dim=1))
    return nn.functional.cross_entropy(logits, labels, reduction="none") * highest.square()


def no_grad(function):
    with torch.no_grad():
        return function()


def decorated(function):
    @torch.no_grad()
    def called():
        return function()

    return called()


def switched(function):
    with torch.set_grad_enabled(False):
        return function()


def nested(function):
    with torch.no_grad(), torch.enable_grad(), torch.no_grad():
        return function()


def detached(function):
    found = function()
    return tuple(part.detach() for part in found) if isinstance(found, tuple) else found.detach()


STOPS = [no_grad, decorated, switched, nested]


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def examples(size=12):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(size, 4, generator=generator, dtype=torch.float64)
    return et.Data(torch.utils.data.TensorDataset(x, x[:, :3].argmax(1)), batch_size=size)


def task(model, name, stop):
    return et.Task(model, lambda m, b: FUNCTIONS[name](m(b[0]), b[1], stop))


def same(a, b):
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_features_of_every_engine(model, name, stop):
    found = []
    for made in (task(model, name, detached), task(model, name, stop)):
        fitted = et.RandProj(keep=4, seed=3).fit(made, examples())
        found += [
            fitted.features(examples(), compute=et.Compute(engine=engine)) for engine in ("forward", "reverse", "auto")
        ]
    for other in found[1:]:
        same(found[0], other)


@pytest.mark.parametrize("form", Differentiation)
@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_hessian_products(model, name, stop, form):
    v = torch.randn(43, dtype=torch.float64)
    products = []
    for made in (task(model, name, detached), task(model, name, stop)):
        with made.session():
            products.append(Curvature(made, examples(), None, form=form).matvec(v))
    same(*products)


def test_the_model_s_own_blocks(model):
    class Gated(nn.Module):
        def __init__(self, inner, stop):
            super().__init__()
            self.inner, self.stop = inner, stop

        def forward(self, x):
            out = self.inner(x)
            return out * torch.sigmoid(self.stop(lambda: out * 3))

    v = torch.randn(43, dtype=torch.float64)
    products = []
    for stop in (detached, no_grad):
        made = et.classification(Gated(model, stop))
        with made.session():
            data = examples()
            products += [Curvature(made, data, None, kind, form=form).matvec(v)
                         for kind in ("hessian", "gauss-newton") for form in Differentiation]  # fmt: skip
    for one, other in zip(products[:6], products[6:], strict=True):
        same(one, other)


def test_no_grad_is_as_it_was_afterwards(model):
    before = torch.no_grad.__enter__, torch.no_grad.__exit__, torch.set_grad_enabled.__enter__
    made = task(model, "focal weights", no_grad)
    et.TracIn().fit(made, examples())
    assert before == (torch.no_grad.__enter__, torch.no_grad.__exit__, torch.set_grad_enabled.__enter__)


def test_blocks_around_the_library_change_nothing(model):
    made = task(model, "focal weights", detached)
    fit = functools.partial(et.TracIn().fit, made, examples())
    with torch.no_grad():
        inside = fit().self_influence(examples())
    same(fit().self_influence(examples()), inside)
