"""Gradients of drawn labels: their second moment is the Gauss-Newton matrix of each example."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import eigentrace as et
from eigentrace.curvature.drawn import DrawnGradients, uniform
from eigentrace.curvature.products import output_product
from eigentrace.errors import UnsupportedError
from tests.helpers.expecting import refused


def softmax_of_tokens(outputs, batch):
    losses = F.cross_entropy(outputs.transpose(1, 2), batch[1], reduction="none", label_smoothing=0.1)
    weights = torch.tensor([1.0, 0.0, 2.0]).to(outputs)
    return (losses * weights).sum(1) / 3


def softmax_of_pixels(outputs, batch):
    labels = batch[1].new_zeros(len(outputs), SHAPE[1])  # three classes at each of four positions
    return F.cross_entropy(outputs, labels, reduction="none").mean(1)


def several_labels(outputs, batch):
    return F.binary_cross_entropy_with_logits(outputs, (outputs > 0).to(outputs).detach(), reduction="none").sum((1, 2))


def squared_error(outputs, batch):
    return outputs.square().flatten(1).sum(1)


def coupled(outputs, batch):
    return outputs.flatten(1).logsumexp(1) + (outputs.flatten(1).sum(1) / 3).square()


LOSSES = [softmax_of_tokens, softmax_of_pixels, several_labels, squared_error, coupled]
SHAPE = 3, 4  # tokens and classes


@pytest.fixture
def outputs():
    return torch.randn(2, *SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def task_of(loss, found):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.outputs = nn.Parameter(found.clone())

        def forward(self, rows):
            return self.outputs[rows]

    return et.Task(Model().double(), outputs=lambda model, batch: model(batch[0]), output_loss=loss)


def hessians(task, outputs, batch):  # (B, M, M)
    size = outputs[0].numel()
    columns = [
        output_product(task, outputs, unit.expand_as(outputs), batch).flatten(1)
        for unit in torch.eye(size, dtype=outputs.dtype).view(size, *SHAPE)
    ]
    return torch.stack(columns, dim=2)


@pytest.mark.parametrize("loss", LOSSES)
def test_the_second_moment_of_what_is_drawn_is_the_hessian_in_the_outputs(outputs, loss):
    many = 20_000
    task, labels = task_of(loss, outputs), torch.randint(0, 4, (2, 3), generator=torch.Generator().manual_seed(2))
    rows = torch.arange(2).repeat(many)
    batch = (rows, labels[rows])
    drawn = DrawnGradients(task)
    with task.session(), torch.enable_grad():
        prepared = drawn.prepare(batch, np.arange(2 * many))
        here = outputs[rows].requires_grad_()
        at = et.Task(_Fixed(here), outputs=lambda model, batch: model(), output_loss=loss)
        found = DrawnGradients(at)({}, prepared)
        (r,) = torch.autograd.grad(found.sum(), here)
        wanted = hessians(task, outputs, (torch.arange(2), labels))
    r = r.flatten(1).view(many, 2, -1).double()
    moments = torch.einsum("nbi,nbj->bij", r, r) / many
    assert float((moments - wanted).norm() / wanted.norm()) < 0.05
    assert wanted.norm() > 0


class _Fixed(nn.Module):
    """A model whose outputs are a given tensor."""

    def __init__(self, value):
        super().__init__()
        self.unused, self.value = nn.Parameter(torch.zeros(1).double()), [value]

    def forward(self):
        return self.value[0]


def test_draws_depend_on_rows_and_seed_only(outputs):
    task, rows = task_of(softmax_of_tokens, outputs), torch.zeros(50, dtype=torch.long)
    batch = (rows, torch.zeros(50, 3, dtype=torch.long))
    with task.session():

        def labels(chosen, seed=0):
            part = tuple(tensor[: len(chosen)] for tensor in batch)
            return DrawnGradients(task, seed).prepare(part, np.asarray(chosen))[1]

        whole = labels(range(50))
        assert torch.equal(labels([41, 3, 7]), whole[[41, 3, 7]])
        assert not torch.equal(labels(range(50), 1), whole)
        assert not torch.equal(labels(range(50, 100)), whole)


def test_random_numbers_are_uniform_and_independent():
    found = uniform(np.arange(400), 500, 7)
    again = uniform(np.arange(400), 500, 8)
    assert found.min() >= 0
    assert found.max() < 1
    bins = torch.histc(found, 100, 0, 1)
    assert float((bins - 2000).square().sum() / 2000) < 160  # χ² of 99 degrees of freedom
    centred = found - 0.5
    pairs = (centred[1:] * centred[:-1], centred[:, 1:] * centred[:, :-1], centred * (again - 0.5))
    assert max(abs(float(p.mean())) for p in pairs) * 12 < 4 / 400
    assert float((centred.mean(0).square().sum() + centred.mean(1).square().sum()) * 12) < 2.5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rare_classes_are_drawn_in_any_precision(dtype):
    classes, many = 1000, 20_000  # each has 0.001: below the rounding of half precision just under 1
    task = et.classification(nn.Linear(1, classes, bias=False).to(dtype))
    nn.init.zeros_(task.model.weight)
    with task.session():
        batch = torch.ones(many, 1, dtype=dtype), torch.zeros(many).long()
        drawn = DrawnGradients(task).prepare(batch, np.arange(many))[1]
    counts = torch.bincount(drawn, minlength=classes)
    assert float((counts - 20).square().sum() / 20) < 1200  # χ² of 999 degrees of freedom


def test_outputs_without_examples_first_are_refused_with_a_way_out(outputs):
    task = task_of(softmax_of_tokens, outputs)
    for change in (lambda o: o.transpose(0, 1), lambda o: o.flatten(0, 1), torch.sum):
        other = et.Task(task.model, outputs=lambda m, b, c=change: c(m(b[0])), output_loss=lambda o, b: o)
        with task.session(), refused(UnsupportedError, "2 examples", "labels='data'"):
            DrawnGradients(other).prepare((torch.arange(2),), np.arange(2))


def test_outputs_that_are_no_tensor_are_refused_with_a_way_out(outputs):
    task = et.Task(
        task_of(squared_error, outputs).model,
        outputs=lambda m, b: [m(b[0])],
        output_loss=lambda o, b: squared_error(o[0], b),
    )
    with task.session(), refused(UnsupportedError, "list", "labels='data'"):
        DrawnGradients(task).prepare((torch.arange(2),), np.arange(2))
