"""Compiled products: the trace and its pieces against the eager product, then the compiler itself."""

import dataclasses
import warnings
from collections import namedtuple

import numpy as np
import pytest
import torch
from torch import nn

import eigentrace as et
from eigentrace.curvature import compiled
from eigentrace.curvature.compiled import CompiledProduct, _bounds, _longest_repeat, pays, signature
from eigentrace.curvature.operator import Curvature, compiling_pays
from eigentrace.curvature.products import Differentiation, product_of
from eigentrace.data import as_data
from eigentrace.errors import EigentraceWarning, InputError
from tests.helpers.expecting import refused, warned
from tests.helpers.models import CASES


def relative(a, b):
    return float((a - b).norm() / b.norm())


@pytest.fixture
def uncompiled(monkeypatch):
    """Run pieces as they were traced: everything but the compiler, which takes most of a minute on a CPU."""
    modules = []
    monkeypatch.setattr(compiled, "inductor", lambda module: modules.append(module) or module)
    return modules


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        q, k, v = self.mix(self.norm(x)).chunk(3, dim=-1)
        x = x + nn.functional.scaled_dot_product_attention(q, k, v)
        return x + self.down(nn.functional.gelu(self.up(x)))


class Deep(nn.Module):
    """Equal layers, one after the other."""

    def __init__(self, layers: int, width: int = 8) -> None:
        super().__init__()
        self.layers, self.head = nn.Sequential(*(Block(width) for _ in range(layers))), nn.Linear(width, 3)

    def forward(self, x):
        return self.head(self.layers(x)[:, 0])


def deep(layers, sizes=(4, 4, 2), dtype=torch.float64):
    task = et.classification(Deep(layers).to(dtype), l2=0.1)
    return task, [(torch.randn(size, 5, 8).to(dtype), torch.randint(0, 3, (size,))) for size in sizes]


@pytest.mark.parametrize("kind", ["hessian", "gauss-newton"])
@pytest.mark.parametrize("form", [Differentiation.DUAL, Differentiation.REVERSE])
@pytest.mark.parametrize("name", CASES)
def test_the_traced_product_is_the_product(cases, uncompiled, name, kind, form):
    case = cases[name]
    eager = Curvature(case.task, as_data(case.batches), None, kind, form=form)
    traced = dataclasses.replace(eager, compile=True)
    v, w = torch.randn(2, case.task.layout.numel, dtype=torch.float64)
    with case.task.session():
        traced.matvec(v)  # the call that traces
        assert relative(traced.matvec(w), eager.matvec(w)) < 1e-12
    assert uncompiled


@pytest.mark.parametrize("kind", ["hessian", "gauss-newton"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_equal_layers_are_compiled_once(uncompiled, kind, precision):
    counts = []
    for layers in (3, 6):
        task, batches = deep(layers, dtype=torch.float32)
        curvature = Curvature(task, as_data(batches), None, kind, precision, compile=True)
        v = torch.randn(task.layout.numel)
        with task.session():
            curvature.matvec(v)
            eager = dataclasses.replace(curvature, compile=False).matvec(v)
            assert relative(curvature.matvec(v), eager) < 1e-5  # rounding in the order of a sum
        (product,) = curvature._programs.values()
        counts.append((len(uncompiled), len(product.program.pieces)))
        uncompiled.clear()
    (few, pieces), (many, more) = counts
    assert few == many
    assert more >= pieces + 2 * 3  # three more layers, forward and back


def test_an_uneven_last_batch_runs_as_ever(uncompiled, monkeypatch):
    task, batches = deep(2)
    curvature = Curvature(task, as_data(batches), None, "gauss-newton", compile=True)
    v = torch.randn(task.layout.numel, dtype=torch.float64)
    with task.session():
        curvature.matvec(v)
        seen = []
        (product,) = curvature._programs.values()
        eager = product._product
        product._product = lambda *args: seen.append(len(args[3][1])) or eager(*args)
        found = curvature.matvec(v)
        assert seen == [2]
        assert relative(found, dataclasses.replace(curvature, compile=False).matvec(v)) < 1e-12


def test_the_most_common_batch_is_compiled_even_if_it_comes_late(uncompiled):
    task, batches = deep(2, sizes=(3, 5, 5, 2))
    curvature = Curvature(task, as_data(batches), None, compile=True)
    with task.session():
        curvature.matvec(torch.randn(task.layout.numel, dtype=torch.float64))
    (product,) = curvature._programs.values()
    assert product.made_for == signature(batches[1])
    assert product.program is not None


def test_programs_are_shared_between_draws(uncompiled):
    task, batches = deep(2, sizes=(4, 4, 4))
    et.Arnoldi(steps=5, keep=2, sample=4, spread=True, compile=True).fit(task, et.Data.from_batches(batches))
    count = len(uncompiled)
    et.Arnoldi(steps=2, keep=2, sample=4, spread=True, compile=True).fit(task, et.Data.from_batches(batches))
    assert len(uncompiled) == 2 * count  # once per fit, not once per step


def test_a_failing_compiler_warns_and_is_done_without(monkeypatch):
    def fail(module):
        raise OSError("no compiler found\nand more")

    monkeypatch.setattr(compiled, "inductor", fail)
    task, batches = deep(1)
    curvature = Curvature(task, as_data(batches), None, compile=True)
    v = torch.randn(task.layout.numel, dtype=torch.float64)
    with task.session():
        eager = dataclasses.replace(curvature, compile=False).matvec(v)
        with warned(EigentraceWarning, "OSError: no compiler found", "compile=False"):
            assert torch.equal(curvature.matvec(v), eager)
        assert torch.equal(curvature.matvec(v), eager)  # without another attempt


def test_wrong_results_warn_and_are_not_used(monkeypatch):
    monkeypatch.setattr(compiled, "inductor", lambda module: lambda *args: [1.1 * t for t in module(*args)])
    task, batches = deep(1)
    curvature = Curvature(task, as_data(batches), None, compile=True)
    v = torch.randn(task.layout.numel, dtype=torch.float64)
    with task.session():
        eager = dataclasses.replace(curvature, compile=False).matvec(v)
        with warned(EigentraceWarning, 0.1, "compile=False"):
            assert torch.equal(curvature.matvec(v), eager)
        assert torch.equal(curvature.matvec(v), eager)


def test_models_that_look_at_numbers_are_not_compiled(uncompiled):
    class Looking(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 2)

        def forward(self, x):
            return self.linear(x) if float(x.sum()) > 0 else 2 * self.linear(x)

    task = et.classification(Looking())
    batch = (torch.ones(4, 3), torch.tensor([0, 1, 0, 1]))
    curvature = Curvature(task, as_data([batch]), None, "gauss-newton", compile=True)
    with task.session(), warned(EigentraceWarning, "GuardOnDataDependentSymNode", "compile=False"):
        assert curvature.matvec(torch.ones(task.layout.numel)).isfinite().all()


@pytest.mark.parametrize("name", ["bert", "gpt2", "t5", "marian", "vit"])
def test_hugging_face_models_can_be_traced(uncompiled, name):
    from tests.helpers.hugging_face import MAKERS

    make, model, batch = MAKERS[name]()
    task = make(model)
    curvature = Curvature(task, as_data([batch]), None, "gauss-newton", compile=True)
    v, w = torch.randn(2, task.layout.numel)
    with task.session(), warnings.catch_warnings():
        warnings.simplefilter("error", EigentraceWarning)
        curvature.matvec(v)
        assert relative(curvature.matvec(w), dataclasses.replace(curvature, compile=False).matvec(w)) < 1e-5


def test_signatures():
    x, y = torch.randn(4, 3), torch.randint(0, 2, (4,))
    same = [(x, y), (x + 1, 1 - y)]
    assert signature(same[0]) == signature(same[1]) != ()
    Pair = namedtuple("Pair", ["x", "y"])
    others = [(x[:2], y[:2]), (x.double(), y), (x.T.contiguous().T, y), {"x": x, "y": y}, [x, y], Pair(x, y)]
    others += [(x, y, "a"), (x, y, "b"), (x, y, None), (x, y, 1)]
    assert len({signature(same[0]), *map(signature, others)}) == len(others) + 1
    for opaque in (object(), (x, object()), {"x": [x, {1: set()}]}):
        assert signature(opaque) == ()  # its content would be taken for constant


def test_opaque_batches_are_not_compiled(uncompiled):
    class Holder:
        def __init__(self, x):
            self.x = x

    model = nn.Linear(3, 2)
    task = et.Task(model, lambda m, batch: m(batch[0].x).square().sum(dim=1))
    product = CompiledProduct(product_of("hessian", Differentiation.DUAL, "fp32"), None, torch.float32)
    tangents = {name: torch.ones_like(p) for name, p in task.params.items()}
    with task.session():
        for _ in range(2):
            product(task, task.params, tangents, (Holder(torch.randn(4, 3)), torch.zeros(4)))
    assert product.program is None
    assert not uncompiled


def test_repeats_are_found():
    a, b = np.arange(30), np.arange(50, 90)
    kinds = np.concatenate([[99, 98], a, a, a, [97], b, b, [96]])
    assert _longest_repeat(kinds) == (2, 30, 3)
    assert sorted(_bounds(kinds, 0, len(kinds))) == [2, 32, 62, 92, 93, 133, 173]
    assert _longest_repeat(np.arange(100)) is None
    assert list(_bounds(np.array([], dtype=int), 0, 0)) == []


def test_the_work_ahead_decides():
    assert pays(0.1, products=10_000, num_tensors=300)
    assert not pays(0.1, products=100, num_tensors=300)
    assert not pays(0.001, products=10_000, num_tensors=300)
    task, batches = deep(1)
    with task.session():
        assert compiling_pays(Curvature(task, as_data(batches), None), 10**9, 1.0) is False  # a CPU


def test_arnoldi_takes_it_as_a_setting(uncompiled):
    task, batches = deep(2)
    plain, fast = (et.Arnoldi(steps=20, keep=4, compile=c).fit(task, batches) for c in ("auto", True))
    assert torch.allclose(plain.spectrum.eigenvalues, fast.spectrum.eigenvalues, rtol=1e-10)
    assert uncompiled
    with refused(InputError, "compile", "'auto'", "'yes'"):
        et.Arnoldi(compile="yes")


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["hessian", "gauss-newton"])
def test_compiled_products_are_the_same_to_rounding(kind, precision):
    task, batches = deep(2, dtype=torch.float32)
    eager = Curvature(task, as_data(batches), None, kind, precision)
    fast = dataclasses.replace(eager, compile=True)
    v = torch.randn(task.layout.numel)
    with task.session(), warnings.catch_warnings():
        warnings.simplefilter("error", EigentraceWarning)
        fast.matvec(v)
        assert relative(fast.matvec(v), eager.matvec(v)) < (1e-5 if precision == "fp32" else 0.05)
    (product,) = fast._programs.values()
    assert product.program is not None
