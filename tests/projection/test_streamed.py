"""Directions copied to where they are multiplied, or streamed piece by piece: the same numbers."""

import pytest
import torch
from torch import nn

import eigentrace as et
from eigentrace.projection import streamed as streams
from eigentrace.projection.directions import CoordinateDirections, DenseDirections, StackedDirections
from eigentrace.projection.engine import Compute
from eigentrace.projection.streamed import StreamedDirections, aligned, placed
from tests.helpers.checking import Net, check, gap, numbers, run, wavy, weight

CPU = torch.device("cpu")


def network(sometimes=False):
    """Tied and plain layers, one without a rule, and perhaps one that only some batches use."""

    def forward(self, x):
        h = self.b(self.a(x).tanh()) * self.p
        h = self.r(h) + (self.extra(x) if sometimes and x.shape[1] == 2 else 0)
        return self.head(h)

    layers = {"a": nn.Linear(3, 3), "b": nn.Linear(3, 3), "r": nn.PReLU(), "head": nn.Linear(3, 2)}
    model = Net(forward, **layers, p=weight(3), extra=nn.Linear(3, 3))
    model.b.weight = model.a.weight
    return model


def in_float32(layout):
    """Directions of another type than the gradients: they must be cast before they are multiplied."""
    return DenseDirections(torch.randn(6, layout.numel), layout)


@pytest.fixture
def _no_room(monkeypatch):
    monkeypatch.setattr(streams, "_SHARE", 0.0)


@pytest.mark.usefixtures("_no_room")
@pytest.mark.parametrize("norms", [True, False])
def test_streamed_directions_give_what_dense_ones_give(norms):
    task = et.Task(network(), wavy)
    assert isinstance(placed(in_float32(task.layout), CPU, Compute()), StreamedDirections)
    data = [(numbers(n, 4, 3),) for n in (4, 1, 3, 2)]
    check(network(), data, directions=in_float32, norms=norms, without={"r.weight"})


@pytest.mark.usefixtures("_no_room")
def test_the_order_of_pieces_may_change():
    data = [(numbers(3, t, 3),) for t in (4, 2, 4, 2, 2, 4)]
    check(network(sometimes=True), data, directions=in_float32, without=None)


@pytest.mark.usefixtures("_no_room")
def test_streamed_beside_others():
    def directions(layout):
        return StackedDirections(
            (in_float32(layout), CoordinateDirections(torch.arange(5), layout), in_float32(layout))
        )

    check(network(), [(numbers(n, 4, 3),) for n in (4, 2)], directions=directions, without=None)


@pytest.mark.usefixtures("_no_room")
def test_streamed_in_bfloat16():
    task = et.Task(network().float(), wavy)
    directions, data = in_float32(task.layout), [(torch.randn(n, 4, 3),) for n in (4, 2)]
    features, *_ = run(task, data, directions, True, Compute(engine="layerwise", precision="bf16"))
    expected, *_ = run(task, data, directions, True, Compute(engine="reverse"))
    assert (features - expected).norm() < 2e-2 * expected.norm()


@pytest.mark.usefixtures("_no_room")
def test_a_streamed_piece_is_sent_for_once_and_ahead(monkeypatch):
    task = et.Task(network(), wavy)
    directions = placed(in_float32(task.layout), CPU, Compute())
    asked = []
    send = StreamedDirections._send_for
    monkeypatch.setattr(StreamedDirections, "_send_for", lambda self, name: asked.append(name) or send(self, name))
    names = ["head.weight", "a.weight", "a.weight", "p"]
    for _ in range(2):
        for name in names:
            (part,) = directions.parts(name)
            assert torch.equal(part.matrix, directions.matrix[:, task.layout.span(name)].double())
    assert asked[:4] == ["head.weight", "a.weight", "a.weight", "p"]  # nothing is known of the order yet
    assert len(asked) <= 2 * len(names) + 1


def test_directions_that_need_no_copy_are_taken_as_they_are():
    layout = et.Task(network(), wavy).layout
    directions = DenseDirections(torch.randn(2, layout.numel, dtype=torch.float64), layout)
    units = CoordinateDirections(torch.arange(3), layout)
    assert placed(directions, CPU, Compute()) is directions
    assert placed(units, CPU, Compute()) is units
    both = placed(StackedDirections((directions, units)), CPU, Compute())
    assert both.stacked == (directions, units)


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float64), ("bf16", torch.bfloat16)])
def test_directions_are_cast_once(precision, dtype):
    layout = et.Task(network(), wavy).layout
    directions = in_float32(layout)
    copy = placed(directions, CPU, Compute(precision=precision))
    assert isinstance(copy, DenseDirections)
    assert copy.matrix.dtype == dtype
    assert torch.equal(copy.matrix, directions.matrix.to(dtype))
    assert copy.matrix.data_ptr() % 16 == 0
    assert all(vector.data_ptr() % 16 == 0 for vector in copy.matrix)


@pytest.mark.parametrize(("count", "numel"), [(1, 1), (3, 16), (3, 17), (0, 5), (2, 0)])
def test_aligned_directions(count, numel):
    directions = aligned(count, numel, torch.float32, CPU)
    assert directions.shape == (count, numel)
    assert directions.stride(0) % 16 == 0 or numel <= 1


def test_written_out_again():
    task = et.Task(network(), wavy)
    directions = in_float32(task.layout)
    streamed = StreamedDirections(directions.matrix, task.layout, CPU, torch.bfloat16)
    assert streamed.count == 6
    assert gap(streamed.dense(1, 3), directions.dense(1, 3)) == 0
