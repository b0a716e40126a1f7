"""One batch's product: what each form asks of a model, and what it costs."""

import dataclasses

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import eigentrace as et
from eigentrace.curvature.operator import Curvature, working_form
from eigentrace.curvature.products import Differentiation
from eigentrace.data import as_data
from eigentrace.task.derivatives import gradient
from tests.helpers.models import CASES, make
from tests.helpers.products import in_float, product, relative


@pytest.mark.parametrize("kind", ["hessian", "gauss-newton"])
@pytest.mark.parametrize("name", CASES)
def test_dual_numbers_work_under_autocast(name, kind):
    # Attention and batch norm among them. Autocast's casts come before autograd here, so that derivatives see one
    # type; under torch.func they come after, and softmax's backward on a GPU refuses what it is given.
    task, batch = in_float(make(name))
    v = torch.randn(task.layout.numel)
    full, half = (product(task, batch, v, kind, precision=p) for p in ("fp32", "bf16"))
    assert 0 < relative(half, full) < 0.1  # bfloat16 carries eight bits


@pytest.mark.parametrize("kind", ["hessian", "gauss-newton"])
@pytest.mark.parametrize("name", ["bert", "gpt2", "t5", "marian", "vit"])
def test_dual_numbers_work_under_autocast_for_hugging_face_models(name, kind):
    from tests.helpers.hugging_face import MAKERS

    task_of, model, batch = MAKERS[name]()
    task = task_of(model)
    v = torch.randn(task.layout.numel)
    full, half = (product(task, batch, v, kind, precision=p) for p in ("fp32", "bf16"))
    assert 0 < relative(half, full) < 0.1


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(6), nn.LayerNorm(6), nn.GroupNorm(2, 6), nn.RMSNorm(6), nn.Identity()])
def test_norms_keep_the_type_they_get(norm):
    model = nn.Sequential(nn.Linear(4, 6), norm, nn.Linear(6, 3))
    seen = []
    model[2].register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
    task = et.classification(model)
    v = torch.randn(task.layout.numel)
    batch = (torch.randn(8, 4), torch.randint(0, 3, (8,)))
    full, half = (product(task, batch, v, precision=p) for p in ("fp32", "bf16"))
    assert relative(half, full) < 0.1
    assert seen == [torch.float32, torch.bfloat16]
    assert len(model[1]._forward_hooks) == len(model[1]._forward_pre_hooks) == 0


@pytest.mark.parametrize("kind", ["hessian", "gauss-newton"])
def test_one_forward_pass_is_enough(kind):
    class Counted(nn.Linear):
        calls = 0

        def forward(self, x):
            type(self).calls += 1
            return super().forward(x)

    task = et.classification(nn.Sequential(Counted(4, 6), nn.Tanh(), nn.Linear(6, 3)))
    product(task, (torch.randn(8, 4), torch.randint(0, 3, (8,))), torch.ones(task.layout.numel), kind)
    assert Counted.calls == 1


@pytest.mark.parametrize("kind", ["hessian", "gauss-newton"])
def test_parameters_that_are_pieces_of_one_buffer(kind):
    # A dual number's tangent gets storage as large as its parameter's: here, that of all of them.
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    batch = (torch.randn(8, 4).double(), torch.randint(0, 3, (8,)))
    task = et.classification(model)
    v = torch.randn(task.layout.numel, dtype=torch.float64)
    expected = product(task, batch, v, kind)
    buffer, offset = torch.empty(task.layout.numel, dtype=torch.float64), 0
    for p in model.parameters():
        piece = buffer[offset : offset + p.numel()].view(p.shape)
        piece.copy_(p.detach())
        p.data, offset = piece, offset + p.numel()
    assert torch.equal(product(et.classification(model), batch, v, kind), expected)


@pytest.mark.parametrize("kind", ["hessian", "gauss-newton"])
def test_checkpointed_blocks_are_right_in_the_form_that_works(kind):
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.block, self.head = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), nn.Linear(4, 3)
            self.on = True

        def forward(self, x):
            return self.head(checkpoint(self.block, x, use_reentrant=False) if self.on else self.block(x))

    model = Checkpointed().double()
    task, batch = et.classification(model), (torch.randn(8, 4).double(), torch.randint(0, 3, (8,)))
    v = torch.randn(task.layout.numel, dtype=torch.float64)
    with task.session():
        form = working_form(Curvature(task, as_data([batch]), None, kind), batch)
    found = product(task, batch, v, kind, form)
    model.on = False
    assert relative(found, product(task, batch, v, kind)) < 1e-12


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("norm", [parametrizations.weight_norm, nn.utils.weight_norm])
@pytest.mark.parametrize("dim", [0, 1, None])
def test_the_hessian_of_weight_norm_is_the_difference_of_gradients(norm, dim):
    # torch's fused function takes the norms for constants when it is differentiated twice.
    torch.manual_seed(0)
    model = nn.Sequential(norm(nn.Linear(4, 5), dim=dim), nn.Tanh(), nn.Linear(5, 3)).double()
    task = et.classification(model)
    batch, v = (torch.randn(8, 4).double(), torch.arange(8) % 3), torch.randn(task.layout.numel).double()
    step, own = 1e-5, task.losses(task.params, batch)
    with task.session():
        assert torch.allclose(task.losses(task.params, batch), own, rtol=1e-12)
        ahead, behind = (
            task.layout.flatten(gradient(task, task.layout.unflatten(task.vector + sign * step * v), batch))
            for sign in (1, -1)
        )
    expected = (ahead - behind) / (2 * step)
    for form in Differentiation:
        assert relative(product(task, batch, v, "hessian", form), expected) < 1e-8


def test_outputs_that_do_not_depend_on_the_parameters():
    task = et.Task(
        nn.Linear(3, 2), outputs=lambda m, b: torch.zeros(len(b), 2), output_loss=lambda o, b: o.square().sum(dim=1)
    )
    for form in (Differentiation.DUAL, Differentiation.FORWARD):
        assert not product(task, torch.randn(5, 3), torch.ones(task.layout.numel), form=form).any()


def test_a_product_leaves_no_tangents_behind():
    task = et.classification(nn.Linear(3, 2))
    batch = (torch.randn(5, 3), torch.randint(0, 2, (5,)))
    with task.session():
        curvature = Curvature(task, as_data([batch]), None, "gauss-newton")
        first = curvature.matvec(torch.ones(task.layout.numel))
        assert not first.requires_grad
        assert torch.equal(first, dataclasses.replace(curvature).matvec(torch.ones(task.layout.numel)))
    assert all(p.grad is None for p in task.model.parameters())
