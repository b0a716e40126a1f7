"""A wrong loss function must be refused with an error that mentions what it returned or what to look for."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import eigentrace as et
from eigentrace.errors import DeterminismError, NumericalError, TaskError
from tests.helpers.expecting import expect_mentions, refused
from tests.helpers.small import cross_entropy, examples, fit, net, table


def detached(model, batch):
    with torch.no_grad():
        return cross_entropy(model, batch)


def sqrt_at_zero(model, batch):
    # √((w·0)²) is 0, and its derivative is 0/0.
    return (model(batch[0]).sum(1) * 0).square().sqrt() + cross_entropy(model, batch)


def in_place(model, batch):
    h = model(batch[0]).exp()
    total = h.square().sum(1)
    h.add_(1)  # the square needs the h of before
    return total


NOT_ALONE = "Data(examples)"  # asked for by an error about the loss of one example in a batch of its own

LOSSES = {
    "scalar": (lambda m, b: F.cross_entropy(m(b[0]), b[1]), TaskError, ("()", "(B,)", "reduction='none'")),
    "column": (lambda m, b: cross_entropy(m, b)[:, None], TaskError, ("(8, 1)", "(B,)")),
    "too few": (lambda m, b: cross_entropy(m, b)[:3], TaskError, ("3 numbers", "8 examples")),
    "per class": (lambda m, b: m(b[0]).flatten(), TaskError, ("24 numbers", "8 examples")),
    "a number": (lambda m, b: 1.0, TaskError, ("loss", "tensor", "float")),
    "a list": (lambda m, b: list(cross_entropy(m, b)), TaskError, ("loss", "tensor", "list")),
    "integers": (lambda m, b: m(b[0]).argmax(1), TaskError, ("loss", "torch.int64")),
    "dropout": (
        lambda m, b: cross_entropy(m, (F.dropout(b[0], training=True), b[1])),
        DeterminismError,
        ("loss", "training=True"),
    ),
    "noise": (lambda m, b: cross_entropy(m, b) + torch.rand(len(b[1])), DeterminismError, ("loss", "training=True")),
    "detached": (lambda m, b: cross_entropy(m, b).detach(), TaskError, (".detach()",)),
    "no_grad": (detached, TaskError, ("torch.no_grad()",)),
    "infinite gradient": (sqrt_at_zero, NumericalError, ("'0.weight'",)),
    "in place": (in_place, TaskError, ("[8, 3]", "inplace=False")),
    "batch mean": (lambda m, b: cross_entropy(m, b) / len(b[1]), TaskError, (11, NOT_ALONE)),
    "batch statistics": (lambda m, b: cross_entropy(m, (b[0] - b[0].mean(0), b[1])), TaskError, ("row", NOT_ALONE)),
    "other examples": (
        lambda m, b: cross_entropy(m, (b[0] + b[0].roll(1, 0), b[1])),
        TaskError,
        ("row", NOT_ALONE),
    ),
}


@pytest.mark.parametrize(("loss", "error", "mentions"), table(LOSSES))
def test_loss_is_refused(loss, error, mentions):
    with refused(error, *mentions):
        fit(et.Task(net(), loss))


class Pair:
    """A batch that nobody but its loss can look into."""

    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.y)


def joined(graphs):
    """Put graphs into one, with the number of its graph for each node, as graph libraries do."""
    owner = torch.arange(len(graphs)).repeat_interleave(torch.tensor([len(x) for x, _ in graphs]))
    return torch.cat([x for x, _ in graphs]), owner, torch.tensor([y for _, y in graphs])


def of_graphs(model, batch):
    nodes, owner, y = batch
    sums = torch.zeros(len(y), 3, dtype=nodes.dtype).index_add(0, owner, model(nodes))
    return F.cross_entropy(sums, y, reduction="none")


WHOLE = {  # how one example goes into a batch, the loss of a batch, and what the error mentions
    "graphs": (joined, of_graphs, ("(30, 3)", 12)),
    "list of tensors": (
        lambda some: ([x for x, _ in some], torch.tensor([y for _, y in some])),
        lambda m, b: F.cross_entropy(torch.stack([m(x).sum(0) for x in b[0]]), b[1], reduction="none"),
        ("(2, 3)", 11, 12),
    ),
    "object": (
        lambda some: Pair(torch.stack([x[0] for x, _ in some]), torch.tensor([y for _, y in some])),
        lambda m, b: F.cross_entropy(m(b.x), b.y, reduction="none"),
        ("12 numbers", "Pair"),
    ),
    "time first": (
        lambda some: (torch.stack([x[:2] for x, _ in some], dim=1), torch.tensor([y for _, y in some])),
        lambda m, b: (m(b[0]).sum((0, 2)) - b[1]).square(),
        ("12 numbers", "(2, 12, 3)"),
    ),
}


@pytest.mark.parametrize(("collate", "loss", "mentions"), table(WHOLE))
def test_batches_that_cannot_be_split_are_refused_and_single_examples_are_right(collate, loss, mentions):
    x, y = examples(24)
    graphs = [(x[i : i + 2 + i % 2], int(y[i])) for i in range(12)]
    model = net()
    with refused(TaskError, *mentions, "batch_size=1"):
        fit(et.Task(model, loss), et.Data(graphs, collate))
    single = et.Data(graphs, collate, batch_size=1)
    found = et.TracIn().fit(et.Task(model, loss), single)
    scores, pairs = found.self_influence(single), found.influence(single, single)
    assert torch.allclose(pairs.diagonal(), scores, rtol=1e-4)
    for graph, score in zip(graphs, scores, strict=True):
        own = torch.autograd.grad(loss(model, collate([graph])).sum(), list(model.parameters()))
        assert float(sum(g.square().sum() for g in own)) == pytest.approx(float(score), rel=1e-4)


def test_a_list_of_single_examples_is_named_among_the_causes():
    x, _ = examples()
    with refused(TaskError, NOT_ALONE, "1x1", "3x3"):
        fit(et.Task(nn.Linear(3, 3), lambda m, b: (m(b[0]) - b[1]).square()), [(row, row) for row in x])


def test_independence_is_judged_on_an_example_with_loss():
    # The first example is fitted so well that dividing its loss by anything changes nothing.
    def loss(model, batch):
        losses = model(batch[0]).square().sum(1) * (batch[1] > 0)
        return losses / len(losses)

    x, _ = examples()
    with refused(TaskError, 11, NOT_ALONE):
        fit(et.Task(net(), loss), (x, torch.tensor([0, 1] * 6)))


def test_other_number_of_losses_in_a_later_batch():
    def loss(model, batch):
        losses = cross_entropy(model, batch)
        return losses if len(losses) == 8 else losses[:1]

    task = et.Task(net(), loss)
    batches = [tuple(t[i : i + 8] for t in examples(24)) for i in (0, 8)] + [examples(5)]
    with refused(TaskError, "1 numbers", "2 examples"):
        fit(task, batches, et.Arnoldi(steps=3, keep=1, sample=None))


def test_an_error_in_the_loss_mentions_the_batch():
    x, y = examples()
    data = {"x": x.double(), "more": [y, "text"]}
    with pytest.raises(RuntimeError) as caught:
        fit(et.Task(net(), lambda m, b: cross_entropy(m, (b["x"], b["more"][0]))), data)
    (note,) = caught.value.__notes__
    expect_mentions(note, ["{'x': float64 (8, 3), 'more': list(int64 (8,), str)}"])


@pytest.mark.parametrize("enabled", [False, True])
def test_a_loss_that_differentiates_must_enable_gradients(enabled):
    def loss(model, batch):
        x = batch[0].clone().requires_grad_()
        with torch.set_grad_enabled(enabled or torch.is_grad_enabled()):
            (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        return slope.square().sum(dim=1)

    model, data = net(), examples()
    if not enabled:
        with pytest.raises(RuntimeError) as caught:
            fit(et.Task(model, loss), data)
        expect_mentions(caught.value.__notes__[0], ["torch.enable_grad()"])
        return
    scores = et.TracIn().fit(et.Task(model, loss), data).self_influence(data)
    for i, score in enumerate(scores):
        own = torch.autograd.grad(loss(model, (data[0][i : i + 1],)).sum(), list(model.parameters()), allow_unused=True)
        assert float(sum(g.square().sum() for g in own if g is not None)) == pytest.approx(float(score), rel=1e-4)
