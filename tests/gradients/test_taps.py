"""Following parameters through a model: ties, reuse, in-place writes, and whatever planning could not foresee."""

import ctypes
import json
import math
import pickle
import re
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from eigentrace import Task
from eigentrace.errors import NumericalError
from eigentrace.projection.directions import none
from eigentrace.projection.engine import Compute
from tests.helpers.checking import Net, check, numbers, run, some_directions, wavy, weight
from tests.helpers.expecting import refused

AUTO = Compute(engine="auto")


def examples(*shape, sizes=(4, 1, 3)):
    return [(numbers(n, *shape),) for n in sizes]


def tokens(length):
    return [(torch.randint(0, 5, (n, length)),) for n in (4, 1, 3)]


def linears(*widths, **others):
    """Layers a, b, ... of the given widths, and other members."""
    shapes = pairwise(widths)
    return {name: nn.Linear(*shape) for name, shape in zip("abcdef", shapes, strict=False)} | others


def tied(a, b):
    b.weight = a.weight
    return {"a": a, "b": b}


def empty(*shape):
    """A linear layer without any numbers, which torch warns about when it is made."""
    layer = nn.Linear(1, 1)
    layer.weight = nn.Parameter(torch.zeros(shape))
    layer.bias = nn.Parameter(torch.randn(shape[0]))
    return layer


class Cell(nn.Module):
    """Takes its input by keyword."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, *, state, scale=1.0):
        return self.fc(input=state * scale).tanh()


def unrolled(self, x):
    state = x[:, 0]
    for t in range(x.shape[1]):
        state = self.cell(state=state + x[:, t], scale=0.5)
    return state


TIED = {
    "linear and linear": (
        lambda self, x: self.b(self.a(x).tanh()),
        lambda: tied(nn.Linear(3, 3), nn.Linear(3, 3)),
        lambda: examples(2, 3),
    ),
    "embedding and linear": (
        lambda self, x: self.b(self.a(x)),
        lambda: tied(nn.Embedding(5, 3), nn.Linear(3, 5)),
        lambda: tokens(4),
    ),
    "embedding and embedding": (
        lambda self, x: self.a(x) * self.b(x.flip(1)),
        lambda: tied(nn.Embedding(5, 3), nn.Embedding(5, 3, padding_idx=2)),
        lambda: tokens(4),
    ),
    "embedding transposed": (
        lambda self, x: self.a(x) @ self.a.weight.T,
        lambda: {"a": nn.Embedding(5, 3)},
        lambda: tokens(4),
    ),
    "embedding transposed and turned again": (
        lambda self, x: F.linear(self.a(x) @ self.a.weight.T, self.a.weight.t()),
        lambda: {"a": nn.Embedding(5, 3)},
        lambda: tokens(4),
    ),
    "scaled embedding": (
        lambda self, x: F.linear(self.a(x) * 2, 0.5 * self.a.weight),
        lambda: {"a": nn.Embedding(5, 3)},
        lambda: tokens(4),
    ),
    "convolution and matrix": (
        lambda self, x: self.a(x.transpose(1, 2)).transpose(1, 2) @ self.a.weight.squeeze(-1),
        lambda: {"a": nn.Conv1d(3, 2, 1)},
        lambda: examples(4, 3),
    ),
    "convolution and its transpose": (
        lambda self, x: F.conv_transpose1d(self.a(x).tanh(), self.a.weight),
        lambda: {"a": nn.Conv1d(3, 2, 2)},
        lambda: examples(3, 5),
    ),
    "grouped convolution twice": (
        lambda self, x: self.a(self.a(x).tanh()),
        lambda: {"a": nn.Conv1d(4, 4, 2, groups=2)},
        lambda: examples(4, 5),
    ),
    "convolution in one group and in two": (
        lambda self, x: self.a(x) + F.conv1d(x[:, :2], self.a.weight),
        lambda: {"a": nn.Conv1d(4, 4, 2, groups=2)},
        lambda: examples(4, 5),
    ),
    "scale of a norm and bias": (
        lambda self, x: F.linear(self.n(x), self.w, self.n.weight),
        lambda: {"n": nn.LayerNorm(3), "w": weight(3, 3)},
        lambda: examples(3),
    ),
    "recurrence by hand": (unrolled, lambda: {"cell": Cell()}, lambda: examples(4, 3)),
    "bias as a scale": (
        lambda self, x: self.a(self.a(x) * self.a.bias + self.a.bias),
        lambda: linears(3, 3),
        lambda: examples(2, 3),
    ),
}


@pytest.mark.parametrize("norms", [True, False])
@pytest.mark.parametrize("memory", [None, 1])
@pytest.mark.parametrize("name", TIED)
def test_ties_and_reuse_add_up(name, memory, norms):
    function, members, data = TIED[name]
    check(Net(function, **members()), data(), norms=norms, compute=Compute(engine="layerwise", memory=memory))


def along_second(self, x):
    h = (self.a(x.transpose(0, 1)) + self.p[: x.shape[1], None]).tanh() * self.scale
    return self.n(self.b(h)).transpose(0, 1)


def along_second_members():
    return linears(3, 4, 2, p=weight(6, 4), scale=weight(1, 1, 4), n=nn.LayerNorm(2))


def windowed(self, x):  # (B, 4, 3): two windows of two tokens in each example
    windows = x.reshape(-1, 2, 3)
    shares = (self.a(windows) @ windows.transpose(1, 2) + self.p).softmax(-1)
    return self.b(shares @ windows).reshape(len(x), -1)


def in_place(self, x):
    h = F.relu(self.c(x), inplace=True)
    h = self.n(h).relu_()
    h = h + self.d(h).tanh_()
    return self.a(h.flatten(1)).relu_()


def input_overwritten(self, x):
    h = self.a(x)
    y = h + self.p
    h.clamp_(min=0)  # an addition keeps nothing for its backward pass, so this is allowed
    return self.b(y + h)


def without_gradient(self, x):
    with torch.no_grad():
        shift = self.a(x).mean(dim=-1, keepdim=True) + self.p.sum()
    return self.b(self.a(x) - shift)


def written_into_zeros(self, x):
    zeros = x.new_zeros(len(x), 3)
    zeros[:, :2] = x[:, 1:]
    return self.a(zeros)


STRUCTURES = {
    "examples along the second dimension": (along_second, along_second_members, lambda: examples(4, 3)),
    "as many examples as tokens": (
        along_second,
        along_second_members,
        lambda: [(numbers(n, n, 3),) for n in (2, 3, 4, 1)],
    ),
    "tokens merged into the batch": (
        lambda self, x: self.b(self.a(x.reshape(-1, 3)).tanh() * self.p).reshape(len(x), -1),
        lambda: linears(3, 4, 2, p=weight(4)),
        lambda: examples(5, 3),
    ),
    "length changes": (
        lambda self, x: self.b(self.a(x.reshape(-1, 3)).reshape(*x.shape[:2], 4) + self.p[:, : x.shape[1]]).sum(1),
        lambda: linears(3, 4, 2, p=weight(1, 9, 4)),
        lambda: [(numbers(n, t, 3),) for n, t in [(3, 2), (4, 5), (1, 9), (4, 1)]],
    ),
    "windows": (
        windowed,
        lambda: {"a": nn.Linear(3, 3), "b": nn.Linear(3, 2), "p": weight(2, 2)},
        lambda: examples(4, 3),
    ),
    "written in place": (
        in_place,
        lambda: {
            "c": nn.Conv2d(1, 2, 3, padding=1),
            "n": nn.BatchNorm2d(2),
            "d": nn.Conv2d(2, 2, 1),
            "a": nn.Linear(18, 3),
        },
        lambda: examples(1, 3, 3),
    ),
    "input of an addition overwritten": (
        input_overwritten,
        lambda: linears(3, 4, 2, p=weight(4)),
        lambda: examples(3),
    ),
    "sections without gradient": (
        without_gradient,
        lambda: linears(3, 4, 2, p=weight(4)),
        lambda: examples(2, 3),
    ),
    "input that requires a gradient": (
        lambda self, x: self.b(self.a(x.detach().requires_grad_()).tanh()),
        lambda: linears(3, 4, 2),
        lambda: examples(3),
    ),
    "never used": (lambda self, x: self.a(x), lambda: linears(3, 4, 2), lambda: examples(3)),
    "used without its gradient": (
        lambda self, x: self.a(x) * self.p.detach(),
        lambda: linears(3, 4, p=weight(4)),
        lambda: examples(3),
    ),
    "no dimensions": (
        lambda self, x: (self.a(x) + self.p) * (-self.p).exp(),
        lambda: linears(3, 4, p=weight()),
        lambda: examples(3),
    ),
    "no elements": (
        lambda self, x: self.a(x) + self.p.sum(),
        lambda: linears(3, 4, p=weight(0, 3)),
        lambda: examples(3),
    ),
    "no inputs": (
        lambda self, x: self.a(x) + self.z(x[:, :0]),
        lambda: linears(3, 4, z=empty(4, 0)),
        lambda: examples(3),
    ),
    "no outputs": (
        lambda self, x: torch.cat([self.a(x), self.z(x)], dim=1),
        lambda: linears(3, 4, z=empty(0, 3)),
        lambda: examples(3),
    ),
    "no tokens": (
        lambda self, x: self.a(x[:, 0]) + self.b(x[:, :0]).sum(dim=1) + self.b(x).sum(dim=1),
        lambda: {"a": nn.Linear(3, 4), "b": nn.Linear(3, 4)},
        lambda: examples(2, 3),
    ),
    "a constant between": (
        lambda self, x: self.a(x) * (self.p * torch.arange(4.0, dtype=x.dtype)),
        lambda: linears(3, 4, p=weight(4)),
        lambda: examples(3),
    ),
    "integers between": (
        lambda self, x: self.a(x) * (self.p * (3 * x).sum(1, keepdim=True).long()),
        lambda: linears(3, 4, p=weight(4)),
        lambda: examples(3),
    ),
    "written into zeros": (written_into_zeros, lambda: linears(3, 4), lambda: examples(3)),
    "truncated to the longest": (
        lambda self, x: self.b(self.a(x)[:, : (x[..., 0].abs() < 9).sum(1).max()].tanh()),
        lambda: linears(3, 4, 2),
        lambda: examples(5, 3),
    ),
    "products along the second dimension": (
        lambda self, x: self.b(torch.einsum("tbh,sbh->tsb", *[self.a(x.transpose(0, 1))] * 2).sum(1).T[..., None]),
        lambda: linears(3, 4) | {"b": nn.Linear(1, 2)},
        lambda: examples(5, 3),
    ),
    "products of all heads": (
        lambda self, x: self.b(torch.einsum("...td,...sd->...ts", *[self.a(x)[:, None]] * 2).flatten(1)),
        lambda: {"a": nn.Linear(3, 4), "b": nn.Linear(25, 2)},
        lambda: examples(5, 3),
    ),
    "a table of numbers of the batch": (
        lambda self, x: self.b(self.a(x) + torch.arange(9.0, dtype=x.dtype)[(x[:, 0, 0] > 9).sum()]),
        lambda: linears(3, 4, 2),
        lambda: examples(5, 3),
    ),
    "five dimensions": (
        lambda self, x: self.b(self.n(self.a(x.permute(3, 1, 0, 2, 4))).permute(2, 1, 0, 3, 4)),
        lambda: linears(3, 4, 2, n=nn.LayerNorm((2, 4))),
        lambda: examples(2, 2, 3, 3, sizes=(3, 2)),
    ),
}


@pytest.mark.parametrize("norms", [True, False])
@pytest.mark.parametrize("name", STRUCTURES)
def test_structures(name, norms):
    function, members, data = STRUCTURES[name]
    check(Net(function, **members()), data(), norms=norms)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("norms", [True, False])
def test_checkpointed_blocks(norms, reentrant):
    def forward(self, x):
        h = checkpoint(lambda y: self.b(self.n(self.a(y)).tanh()), x, use_reentrant=reentrant)
        return self.d(checkpoint(lambda y: self.c(y).relu() + self.p, h, use_reentrant=reentrant))

    model = Net(forward, **linears(3, 4, 4, 4, 2, n=nn.LayerNorm(4), p=weight(4)))
    check(model, examples(3, sizes=(4, 2)), norms=norms)


def test_an_addition_in_place():
    def forward(self, x):
        h = self.a(x)
        h += self.p
        return self.b(h.relu_())

    right(forward, linears(3, 4, 2, p=weight(4)), examples(3), {""})


# Examples that are not where they seem to be, and models that do something new in a later batch. What matters is that
# the numbers are right; the layers concerned may go by another engine or not.


def right(function, members, data, concerned, compute=AUTO, directions=some_directions):
    """Check the numbers, and that no layer but those concerned ("" for bare parameters) went by another engine."""
    task = check(Net(function, **members), data, without=None, compute=compute, directions=directions)
    assert {name.rpartition(".")[0] for name in task.coverage.without_rule} <= set(concerned)


def tokens_first(self, x):
    h = self.a(x.transpose(0, 1).reshape(-1, 3)).tanh()
    return self.b(h.reshape(x.shape[1], len(x), 4).sum(dim=0))


@pytest.mark.parametrize("lengths", [(3, 3), (1, 3), (3, 1), (1, 1, 4)])
def test_tokens_before_examples_in_a_merged_dimension(lengths):
    right(tokens_first, linears(3, 4, 2), [(numbers(4, t, 3),) for t in lengths], {"a"})


def test_a_batch_turned_round_inside():
    right(lambda self, x: self.b(self.a(x.flip(0)).tanh().flip(0)), linears(3, 4, 2), examples(3, sizes=(5, 4)), {"a"})


SORTS = {
    "by index": lambda x, order: x[order],
    "by selection": lambda x, order: x.index_select(0, order),
    "by numbers read out": lambda x, order: x[order.tolist()],
    "by a new tensor": lambda x, order: x[torch.tensor(order.tolist())],
    "along the second dimension": lambda x, order: x.transpose(0, 1)[:, order].transpose(0, 1),
    "by selection along the second dimension": lambda x, order: (
        x.transpose(0, 1).index_select(1, order).transpose(0, 1)
    ),
    "by gathering": lambda x, order: x.gather(0, order[:, None, None].expand(-1, *x.shape[1:])),
    "one by one": lambda x, order: torch.stack([x[i] for i in order.tolist()]),
    "by a matrix": lambda x, order: torch.einsum("ij,jtd->itd", matrix(x, order), x),
    "by a matrix, implicitly": lambda x, order: torch.einsum("ji,j...", matrix(x, order).T, x).movedim(-1, 0),
    "by a product": lambda x, order: (matrix(x, order) @ x.flatten(1)).reshape(x.shape),
    "by a product of one batch": lambda x, order: torch.bmm(matrix(x, order)[None], x.flatten(1)[None]).reshape(
        x.shape
    ),
    "by rows of a matrix": lambda x, order: torch.stack([row @ x.flatten(1) for row in matrix(x, order)]).reshape(
        x.shape
    ),
    "by a matrix as weights": lambda x, order: F.linear(x.flatten(1).T, matrix(x, order)).T.reshape(x.shape),
    "by a matrix added to nothing": lambda x, order: torch.addmm(
        x.new_zeros(1), matrix(x, order), x.flatten(1)
    ).reshape(x.shape),
    "by tensordot": lambda x, order: torch.tensordot(matrix(x, order), x, 1),
    "by products and a sum": lambda x, order: (matrix(x, order)[:, :, None, None] * x[None]).sum(1),
    "by tensors of one number": lambda x, order: torch.stack([x[i] for i in order]),
    "by a list of tensors": lambda x, order: x[list(order),],
    "by slices from tensors": lambda x, order: torch.cat([x[i : i + 1] for i in order]),
    "by slices along the second dimension": lambda x, order: torch.cat(
        [x.transpose(0, 1)[:, i : i + 1] for i in order], dim=1
    ).transpose(0, 1),
    "by narrow": lambda x, order: torch.cat([x.narrow(0, i, length=1) for i in order]),
    "by select": lambda x, order: torch.stack([x.select(0, i) for i in order]),
    "by roll": lambda x, order: torch.cat([x.roll(-i, 0)[:1] for i in order]),
    "by tensor_split": lambda x, order: torch.cat([x.tensor_split(torch.stack([i, i + 1]))[1] for i in order]),
    "by writing": lambda x, order: placed(x, order.argsort()),
    "by gathering along the second dimension": lambda x, order: (
        x.transpose(0, 1).gather(1, order[None, :, None].expand(x.shape[1], -1, x.shape[2])).transpose(0, 1)
    ),
}


def matrix(x, order):
    return F.one_hot(order, len(order)).to(x.dtype)


def placed(x, places):
    out = torch.empty_like(x)
    for i, place in enumerate(places):
        out[place : place + 1] = x[i]
    return out


EVEN = (2, 2, 2, 2)
LATER = {
    "at once": [(1, 2, 3, 4), (4, 3, 2, 1)],
    "in the second batch": [EVEN, (1, 3, 2, 2)],
    "in the second batch, an odd number in all": [EVEN, (1, 4, 3, 1)],
    "in the third batch": [EVEN, EVEN, (1, 3, 2, 2)],
    "in the first batch only": [(1, 3, 2, 2), EVEN],
    "in the end of the first batch": [(2, 2, 1, 3)],
}


@pytest.mark.parametrize("directions", [some_directions, none])
@pytest.mark.parametrize("lengths", LATER)
@pytest.mark.parametrize("sort", SORTS)
def test_sorted_by_length_inside(request, sort, lengths, directions, monkeypatch):
    # As models do that pack sequences. Examples of equal length stay where they are, so planning may see nothing.
    monkeypatch.setattr("eigentrace.projection.layerwise._AUDIT_SHARE", 0.0)  # audits at random depend on times
    if (sort, lengths) == ("by products and a sum", "in the third batch"):
        reason = "no index or matrix product to follow, and the third batch is audited by chance: docs/limitations.md"
        request.applymarker(pytest.mark.xfail(reason=reason, strict=True))

    def forward(self, x, length):
        order = length.argsort(descending=True, stable=True)
        return self.b(SORTS[sort](self.a(SORTS[sort](x, order)).tanh(), order.argsort()))

    data = [(numbers(4, 2, 3), torch.tensor(n)) for n in LATER[lengths]]
    right(forward, linears(3, 4, 2), data, {"a", "b"}, directions=directions)


def by_single_reads(length):
    return sorted(range(len(length)), key=lambda i: -length[i].item())


def by_comparisons(length):
    order = list(range(len(length)))
    for _ in order:
        for i in range(len(order) - 1):
            if length[order[i]] < length[order[i + 1]]:
                order[i], order[i + 1] = order[i + 1], order[i]
    return order


def rolled(x, order):
    parts = list(x.unbind())
    return torch.stack([parts[i] for i in order])


def shifted(x, order):
    return x[order] if order == list(range(len(order))) else x.roll(1, 0).roll(-1, 0)[order]


def written(x, order):
    placed = torch.empty_like(x)
    for place, i in enumerate(order):
        placed[place] = x[i]
    return placed


def weighted(times):
    """Select each example by a sum of all, weighted by zeros and ones."""

    def move(x, order):
        return torch.stack([sum(times(x[j], float(i == j)) for j in range(len(x))) for i in order])

    return move


READ_ORDERS = {"single reads": by_single_reads, "comparisons": by_comparisons}
MOVES = {
    "indexing": lambda x, order: x[order],
    "a new tensor": lambda x, order: x[torch.tensor(order)],
    "index_select": lambda x, order: torch.index_select(x, 0, torch.tensor(order)),
    "stack": lambda x, order: torch.stack([x[i] for i in order]),
    "cat": lambda x, order: torch.cat([x[i : i + 1] for i in order]),
    "narrow": lambda x, order: torch.cat([x.narrow(0, i, 1) for i in order]),
    "unbind": rolled,
    "split": lambda x, order: torch.cat([x.split(1)[i] for i in order]),
    "roll": shifted,
    "writing": written,
    "gather": lambda x, order: x.gather(0, torch.tensor(order)[:, None, None].expand(-1, *x.shape[1:])),
    "embedding": lambda x, order: F.embedding(torch.tensor(order), x.flatten(1)).reshape(x.shape),
    "one_hot": lambda x, order: torch.einsum("ij,j...->i...", F.one_hot(torch.tensor(order)).to(x.dtype), x),
    "a matrix of floats": lambda x, order: torch.einsum(
        "ij,j...->i...",
        torch.tensor([[float(i == j) for j in range(len(order))] for i in order], dtype=x.dtype),
        x,
    ),
    "where": lambda x, order: torch.stack(
        [sum(torch.where(torch.tensor(i == j), x[j], torch.zeros_like(x[j])) for j in range(len(x))) for i in order]
    ),
    "floats as weights": weighted(lambda one, share: share * one),
    "integers as weights": weighted(lambda one, share: one * int(share)),
    "bools as weights": weighted(lambda one, share: bool(share) * one),
    "numbers of NumPy as weights": weighted(lambda one, share: one * np.float32(share)),
    "bools of NumPy as weights": weighted(lambda one, share: one * np.bool_(share)),
    "tensors as weights": weighted(lambda one, share: torch.tensor(share) * one),
    "filled tensors as weights": weighted(lambda one, share: torch.full((), share) * one),
    "other floats as weights": weighted(lambda one, share: 2 * share * one * 0.5),
    "tiny floats as weights": weighted(lambda one, share: 3 * math.exp(share * 80 - 80) * one / 3),
    "divisors": weighted(lambda one, share: one / (1.5 if share else math.inf) * 1.5),
    "factors of sums": weighted(lambda one, share: torch.add(torch.zeros_like(one), one, alpha=share)),
}


def inverse(order):
    return sorted(range(len(order)), key=order.__getitem__)


@pytest.mark.parametrize("lengths", LATER)
@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("read", READ_ORDERS)
def test_sorted_by_numbers_that_were_read(read, move, lengths):
    def forward(self, x, length):
        order = READ_ORDERS[read](length)
        return self.b(MOVES[move](self.a(MOVES[move](x, order)).tanh(), inverse(order)))

    data = [(numbers(4, 2, 3), torch.tensor(n)) for n in LATER[lengths]]
    right(forward, linears(3, 4, 2), data, {"a", "b"})


def largest_first(numbers):
    return sorted(range(len(numbers)), key=lambda i: -float(numbers[i]))


def shown(text):
    """The number in the text of a tensor of one number, or of several: "tensor(3)", "tensor([3, 1])"."""
    return json.loads(re.fullmatch(r"tensor\((.*)\)", text)[1])


def memory_of(length):
    address = length.contiguous().data_ptr()
    return list((ctypes.c_int64 * len(length)).from_address(address))


def handed_to(function):
    def read(length):
        found = []
        function(length.clone(), lambda value, *others: found.append(value) or value)
        return found

    return read


# Ways in which numbers leave a tensor, other than `item` and comparisons.
READS = {
    "f-strings": lambda length: [f"{n}" for n in length],
    "format": lambda length: [format(n, ".1f") for n in length],
    "str": lambda length: [shown(str(n)) for n in length],
    "repr": lambda length: [shown(repr(n)) for n in length],
    "percent s": lambda length: [shown("%s" % n) for n in length],  # noqa: UP031
    "percent d": lambda length: ["%d" % n for n in length],  # noqa: UP031
    "text of all": lambda length: shown(f"{length}"),
    "text of a list": lambda length: [shown(part + ")") for part in repr(list(length))[1:-2].split("), ")],
    "numpy": lambda length: length.numpy(),
    "asarray": np.asarray,
    "a function of NumPy": lambda length: np.multiply(length, 2),
    "__array__": lambda length: length.__array__(),
    "a view of memory": lambda length: memoryview(length.numpy()),
    "DLPack": np.from_dlpack,
    "an address": memory_of,
    "storage": lambda length: list(length.clone().storage()),
    "pickle": lambda length: pickle.loads(pickle.dumps(length)).tolist(),
    "apply_": handed_to(torch.Tensor.apply_),
    "map_": handed_to(lambda length, function: length.map_(length, function)),
}


@pytest.mark.filterwarnings("ignore:TypedStorage", "ignore:__array_wrap__")
@pytest.mark.parametrize("directions", [some_directions, none])
@pytest.mark.parametrize("lengths", LATER)
@pytest.mark.parametrize("read", READS)
def test_sorted_by_numbers_in_any_form(read, lengths, directions):
    def forward(self, x, length):
        order = largest_first(READS[read](length))
        return self.b(self.a(x[order]).tanh()[inverse(order)])

    data = [(numbers(4, 2, 3), torch.tensor(n)) for n in LATER[lengths]]
    right(forward, linears(3, 4, 2), data, {"a", "b"}, directions=directions)


def test_the_largest_examples_first():
    def forward(self, x, length):
        _, order = length.double().sub(torch.arange(len(x)) / 8).topk(len(x), 0)
        h = self.a(x.gather(0, order[:, None, None].expand_as(x))).tanh()
        return self.b(h.gather(0, order.argsort()[:, None, None].expand_as(h)))

    data = [(numbers(4, 2, 3), torch.tensor(n)) for n in LATER["in the third batch"]]
    right(forward, linears(3, 4, 2), data, {"a", "b"})


def test_a_third_way_of_treating_batches_stops_if_it_moves_examples():
    # Earlier batches were treated in two ways: audits of some examples cannot tell that none was moved.
    def forward(self, x, kind):
        order = list(range(len(x)))
        order = order[1:] + order[:1] if kind[0].item() == 2 else order
        h = self.a(x[order])
        h = h + h if kind[0].item() == 1 else h
        return self.b(h.tanh()[inverse(order)])

    data = [(numbers(4, 2, 3), torch.full((4,), kind)) for kind in (0, 1, 2)]
    with refused(NumericalError, "batch 3", "engine='reverse'"):
        check(Net(forward, **linears(3, 4, 2)), data, without=None)


class Picked(torch.autograd.Function):
    """Takes rows out as flash attention's padding helper does, unseen by anything that watches torch's functions."""

    @staticmethod
    def forward(ctx, x, index):
        ctx.save_for_backward(index)
        ctx.shape = x.shape
        return x[index]

    @staticmethod
    def backward(ctx, gradient):
        return gradient.new_zeros(ctx.shape).index_put(ctx.saved_tensors, gradient), None


UNPADDED = {
    "by mask": lambda x, length, valid: x[valid],
    "by masked_select": lambda x, length, valid: x.masked_select(valid[..., None]).reshape(-1, x.shape[-1]),
    "by places": lambda x, length, valid: x[valid.nonzero(as_tuple=True)],
    "by places in one dimension": lambda x, length, valid: x.flatten(0, 1)[valid.flatten().nonzero().squeeze(1)],
    "one by one": lambda x, length, valid: torch.cat([one[:n] for one, n in zip(x, length.tolist(), strict=True)]),
    "by an own function": lambda x, length, valid: Picked.apply(x.flatten(0, 1), valid.flatten().nonzero().squeeze(1)),
    "by numpy": lambda x, length, valid: x[torch.from_numpy(valid.numpy().copy())],
    "packed": lambda x, length, valid: (
        nn.utils.rnn.pack_padded_sequence(x, length.cpu(), batch_first=True, enforce_sorted=False).data
    ),
}


@pytest.mark.parametrize("directions", [some_directions, none])
@pytest.mark.parametrize("lengths", LATER)
@pytest.mark.parametrize("way", UNPADDED)
def test_padding_taken_out(way, lengths, directions):
    def forward(self, x, length):
        valid = torch.arange(x.shape[1]) < length[:, None]
        h = (self.a(UNPADDED[way](x, length, valid)).tanh() * self.p).sum(dim=-1)
        owners = UNPADDED[way](torch.arange(len(x))[:, None, None].expand(*x.shape[:2], 1), length, valid).squeeze(1)
        return self.b(x.new_zeros(len(x)).index_add(0, owners, h)[:, None])

    data = [(numbers(4, 4, 3), torch.tensor(n)) for n in LATER[lengths]]
    members = {"a": nn.Linear(3, 4), "p": weight(4), "b": nn.Linear(1, 2)}
    right(forward, members, data, {"a", "", "b"}, directions=directions)


@pytest.mark.parametrize(
    "signs",
    [
        pytest.param([-1.0, 1.0, 1.0], id="the same number for each example"),
        pytest.param([1.0, 1.0, 1.0], id="all to one expert"),
        pytest.param(None, id="any"),
    ],
)
def test_experts_chosen_token_by_token(signs):
    def forward(self, x):
        flat = x.reshape(-1, 3)
        out = x.new_zeros(len(flat), 4)
        for number, expert in enumerate((self.a, self.c)):
            chosen = ((flat[:, 0] > 0) == number).nonzero().squeeze(1)
            out = out.index_put((chosen,), expert(flat[chosen]))
        return self.d(out.tanh().reshape(*x.shape[:2], 4).sum(dim=1))

    first = numbers(4, 3, 3)
    if signs is not None:
        first[..., 0] = first[..., 0].abs() * torch.tensor(signs)
    members = {"a": nn.Linear(3, 4), "c": nn.Linear(3, 4), "d": nn.Linear(4, 2)}
    right(forward, members, [(first,), *examples(3, 3, sizes=(5, 6, 1))], {"a", "c", "d"})


def test_a_rule_that_applies_to_some_batches_only():
    def forward(self, x):
        if x.shape[1] == 3:
            return self.a(self.e(x))
        return self.a(self.e(x.reshape(-1), torch.arange(0, x.numel(), x.shape[1])))

    data = [(torch.randint(0, 5, (4, n)),) for n in (3, 2, 3)]
    right(forward, {"e": nn.EmbeddingBag(5, 4), "a": nn.Linear(4, 2)}, data, {"e"})


@pytest.mark.parametrize("compute", [AUTO, Compute(engine="layerwise")], ids=["auto", "layerwise"])
@pytest.mark.parametrize("hot", [(), (0,), (1, 3), (4,)], ids=str)
def test_a_layer_that_only_some_examples_need(hot, compute):
    def forward(self, x):
        needed = x[:, :1] > 10
        return self.a(x) + self.b(x).tanh() * needed if needed.any() else self.a(x)

    second = numbers(5, 3)
    second[list(hot), 0] = 20
    members = {"a": nn.Linear(3, 2), "b": nn.Linear(3, 2)}
    right(forward, members, [(numbers(5, 3),), (second,), (numbers(5, 3),)], {"b"}, compute)


@pytest.mark.parametrize("order", [(3, 4), (4, 3), (3, 4, 3, 4)], ids=str)
def test_another_layer_for_another_shape(order):
    def forward(self, x):
        return self.c(self.a(x) if x.shape[1] == 3 else self.b(self.b(x)))

    members = {"a": nn.Linear(3, 4), "b": nn.Linear(4, 4), "c": nn.Linear(4, 2)}
    check(Net(forward, **members), [(numbers(3, n),) for n in order])


def test_a_layer_with_a_rule_that_comes_after_layers_without():
    def forward(self, x):
        return self.r(x) + (self.a(x) if x.shape[1] == 4 else 0)

    right(forward, {"r": nn.PReLU(), "a": nn.Linear(4, 4)}, [(numbers(4, 3),), (numbers(3, 4),)], {"r"})


class Times(torch.autograd.Function):
    """Multiplies, unseen by anything that watches torch's functions."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, gradient):
        x, w = ctx.saved_tensors
        return gradient * w, (gradient * x).sum(dim=0)


@pytest.mark.parametrize("signs", [(1, 1, 1, 1), (-1, 1, 1, 1), (-1, -1, 1, 1)], ids=str)
def test_a_use_that_cannot_be_seen_and_does_not_matter_to_the_first_examples(signs):
    def forward(self, x):
        return self.a(x) + Times.apply(x, self.p) * (x[:, :1] > 0)

    x = numbers(4, 3)
    x[:, 0] = x[:, 0].abs() * torch.tensor(signs)
    right(forward, linears(3, 3, p=weight(3)), [(x,)], {""})


def test_an_error_of_the_model_is_not_swallowed():
    def forward(self, x):
        if len(x) == 3:
            raise ValueError("three is too many")
        return self.a(x)

    task = Task(Net(forward, **linears(3, 2)), wavy)
    with refused(ValueError, "three is too many"):
        run(task, examples(3, sizes=(4,)), some_directions(task.layout))
