"""Autocast as casts: the same types as by autocast itself, and derivatives that follow them."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import grad, jvp, vmap

import eigentrace as et
from eigentrace.curvature.products import Differentiation
from eigentrace.task.autocast import SeenCasts
from tests.helpers.models import CASES, make
from tests.helpers.products import in_float, product, relative

X = torch.randn(2, 3, 4)
FUNCTIONS = {
    "linear": lambda x: F.linear(x, torch.ones(5, 4)),
    "matmul": lambda x: x @ x.transpose(1, 2),
    "bmm": lambda x: torch.bmm(x, x.transpose(1, 2)),
    "conv": lambda x: F.conv1d(x, torch.ones(2, 3, 1)),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "softmax": lambda x: F.linear(x, torch.ones(5, 4)).softmax(dim=-1),
    "layer norm": lambda x: F.layer_norm(F.linear(x, torch.ones(5, 4)), (5,), torch.ones(5)),
    "loss": lambda x: F.cross_entropy(F.linear(x, torch.ones(5, 4)).flatten(0, 1), torch.zeros(6, dtype=torch.long)),
    "sum of two types": lambda x: x + F.linear(x, torch.ones(4, 4)),
    "by name": lambda x: F.linear(input=x, weight=torch.ones(5, 4), bias=torch.ones(5)),
    "list": lambda x: torch.einsum("bij,bkj->bik", [x, x]),
    "nothing to cast": lambda x: x.argmax(dim=-1),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_types_are_those_of_autocast(name):
    with torch.autocast("cpu", torch.bfloat16):
        expected = FUNCTIONS[name](X)
        with SeenCasts("cpu"):
            found = FUNCTIONS[name](X)
            assert torch.is_autocast_enabled("cpu")
    # On a CPU softmax and norms leave bfloat16 as it is; on a GPU they widen it, as is done here.
    assert found.dtype == (torch.float32 if name in ("softmax", "layer norm") else expected.dtype)
    torch.testing.assert_close(found.float(), expected.float(), rtol=2e-2, atol=2e-2)


def test_without_autocast_nothing_is_cast():
    with SeenCasts("cpu"):
        assert F.linear(X, torch.ones(5, 4)).dtype == torch.float32
        with torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", enabled=False):
            assert F.linear(X, torch.ones(5, 4)).dtype == torch.float32


def test_double_stays_double():
    with SeenCasts("cpu"), torch.autocast("cpu", torch.bfloat16):
        assert F.linear(X.double(), torch.ones(5, 4).double()).dtype == torch.float64
        assert X.double().softmax(dim=0).dtype == torch.float64


def test_transforms_see_the_casts():
    seen = []

    class Spy(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x):
            seen.append(("forward", x.dtype))
            return x.clone()

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def backward(ctx, gradient):
            seen.append(("backward", gradient.dtype))
            return gradient

    def loss(weight, x):
        with torch.autocast("cpu", torch.bfloat16):
            return Spy.apply(F.linear(x, weight)).softmax(dim=-1)[0]

    with SeenCasts("cpu"):
        found = vmap(grad(loss), in_dims=(None, 0))(torch.randn(5, 4), X[:, 0])
    assert found.dtype == torch.float32
    assert seen == [("forward", torch.bfloat16), ("backward", torch.bfloat16)]


def test_tangents_follow_the_casts():
    def function(x):
        with torch.autocast("cpu", torch.bfloat16):
            return F.linear(x, torch.ones(5, 4))

    with SeenCasts("cpu"):
        value, tangent = jvp(function, (X,), (torch.ones_like(X),))
    assert value.dtype == tangent.dtype == torch.bfloat16
    assert (tangent == 4).all()


CUDA = torch.cuda.is_available()


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="needs CUDA")])]
)
@pytest.mark.parametrize("kind", ["hessian", "gauss-newton"])
@pytest.mark.parametrize("name", [name for name in CASES if name != "recurrent"])
def test_forward_over_reverse_in_bfloat16(name, kind, device):
    task, batch = in_float(make(name))
    task = et.Task(task.model.to(device), outputs=task._outputs, output_loss=task._output_loss)
    batch, v = task.place(batch), torch.randn(task.layout.numel, device=device)
    full, half = (product(task, batch, v, kind, Differentiation.FORWARD, p) for p in ("fp32", "bf16"))
    assert 0 < relative(half, full) < 0.1


def test_attention_of_pytorch_itself():
    model = nn.MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(3, 5, 8)
    with SeenCasts("cpu"), torch.autocast("cpu", torch.bfloat16):
        found, _ = model(x, x, x)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), model(x, x, x)[0], rtol=5e-2, atol=5e-2)
