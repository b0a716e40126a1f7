"""Directions of every kind mean what they say when written out, alone, side by side, and for some of the parameters."""

import pytest
import torch
from torch import nn

import eigentrace as et
from eigentrace.errors import InputError
from eigentrace.gradients.layer_gradients import Direct
from eigentrace.projection.directions import (
    CoordinateDirections,
    DenseDirections,
    NarrowedDirections,
    RotatedDirections,
    Rotation,
    StackedDirections,
    apply,
    none,
)
from eigentrace.projection.engine import Compute, Job
from tests.helpers.checking import Net, check, gap, numbers, one_at_a_time, run, wavy, weight
from tests.helpers.expecting import refused

LEFT_OUT = "c.bias"


def forward(self, tokens, image):
    h = self.e(tokens)
    h = self.t(self.a(h).tanh()) + self.p
    seen = self.d(self.c(image).relu()).flatten(1)
    return torch.cat([(h @ self.e.weight.T).sum(dim=1), seen * self.s], dim=1)


def network():
    """A lookup tied to a product, plain, tied and grouped layers, and parameters of few dimensions."""
    layers = {"e": nn.Embedding(5, 4), "a": nn.Linear(4, 4), "t": nn.Linear(4, 4)}
    convolutions = {"c": nn.Conv2d(2, 4, 3, padding=1), "d": nn.Conv2d(4, 4, 2, groups=2)}
    model = Net(forward, **layers, **convolutions, p=weight(1, 3, 4), s=weight())
    model.t.weight = model.a.weight
    return model


def batches():
    return [(torch.randint(0, 5, (n, 3)), numbers(n, 2, 3, 3)) for n in (4, 1, 3)]


def turned(layout, sides="both", names=None):
    """Rotated coordinates of every parameter, or of some."""
    rotations = {}
    for name, shape in zip(layout.names, layout.shapes, strict=True):
        if names is not None and name not in names:
            continue
        length = shape[0] if shape else 1
        width = shape.numel() // length
        left = torch.randn(length, 3, dtype=layout.dtype) if sides in ("both", "left") else None
        right = torch.randn(width, 2, dtype=layout.dtype) if sides in ("both", "right") else None
        highest = (length if left is None else 3), (width if right is None else 2)
        rotations[name] = Rotation(left, right, torch.stack([torch.randint(0, n, (6,)) for n in highest]))
    return RotatedDirections(rotations, layout)


def unit(layout):
    return CoordinateDirections(torch.randint(0, layout.numel, (30,)), layout)  # in any order, some of them twice


def dense(layout, dtype=torch.float64):
    return DenseDirections(torch.randn(5, layout.numel, dtype=dtype), layout)


KINDS = {
    "dense": dense,
    "dense in bfloat16": lambda layout: dense(layout, torch.bfloat16),
    "dense in float32": lambda layout: dense(layout, torch.float32),
    "dense, transposed": lambda layout: DenseDirections(torch.randn(layout.numel, 5, dtype=torch.float64).T, layout),
    "unit": unit,
    "rotated": turned,
    "rotated on the left": lambda layout: turned(layout, "left"),
    "rotated on the right": lambda layout: turned(layout, "right"),
    "not rotated at all": lambda layout: turned(layout, "neither"),
    "rotated, some parameters": lambda layout: turned(layout, names={"e.weight", "d.weight", "p"}),
    "stacked": lambda layout: StackedDirections(
        (unit(layout), dense(layout), turned(layout), none(layout), dense(layout))
    ),
    "stacked twice": lambda layout: StackedDirections(
        (StackedDirections((unit(layout), turned(layout))), dense(layout))
    ),
    "none": none,
    "no dense ones": lambda layout: DenseDirections(torch.empty(0, layout.numel, dtype=layout.dtype), layout),
}


@pytest.fixture(params=KINDS)
def kind(request):
    return KINDS[request.param]


@pytest.mark.parametrize("memory", [None, 1])
@pytest.mark.parametrize("engine", ["layerwise", "reverse"])
def test_every_kind_projects_as_when_written_out(kind, engine, memory):
    # Directions in a smaller type are rounded once, when they are given: what is computed with them is exact.
    check(network(), batches(), directions=kind, compute=Compute(engine=engine, memory=memory), without=None)


def test_every_kind_projects_forward(kind):
    task = et.Task(network(), wavy)
    directions, data = kind(task.layout), batches()
    gradients, _ = one_at_a_time(task, data)
    features, _, _ = run(task, data, directions, False, Compute(engine="forward"))
    assert features.shape == (8, directions.count)
    assert (
        gap(features, gradients @ directions.dense(0, directions.count).T if directions.count else gradients[:, :0])
        < 1e-10
    )


def test_every_kind_in_bfloat16(kind):
    task = et.Task(network().float(), wavy)
    directions, data = kind(task.layout), [(tokens, image.float()) for tokens, image in batches()]
    low = Compute(engine="layerwise", precision="bf16")
    features, squares, _ = run(task, data, directions, True, low)
    expected = run(task, data, directions, True, Compute(engine="reverse", precision="bf16"))
    assert (features - expected[0]).norm() <= 2e-2 * expected[0].norm()
    assert (squares - expected[1]).norm() <= 2e-2 * expected[1].norm()


def test_some_of_the_directions_are_written_out(kind):
    directions = kind(et.Task(network(), wavy).layout)
    if not directions.count:
        pytest.skip("there is nothing to write out")
    whole = directions.dense(0, directions.count)
    for start, stop in [(0, 1), (1, directions.count), (directions.count - 1, directions.count), (2, 4)]:
        assert torch.equal(directions.dense(start, stop), whole[start:stop])


def test_directions_seen_by_some_parameters(kind):
    task = et.Task(network(), wavy)
    directions, names = kind(task.layout), ["a.weight", "d.weight", "s"]
    small = task.narrowed(names)
    narrow = NarrowedDirections(directions, task.layout, small.layout)
    assert narrow.count == directions.count
    gradients = {name: numbers(3, *small.params[name].shape) for name in names}
    found = apply(narrow, gradients)
    if directions.count:
        expected = small.layout.flatten(gradients, batch_dims=1) @ narrow.dense(0, directions.count).T
        assert gap(found, expected) < 1e-10
    assert found.shape == (3, directions.count)


def test_features_land_behind_an_offset(kind):
    task = et.Task(network(), wavy)
    directions, gradient = kind(task.layout), numbers(3, 16)
    out, shifted = (torch.zeros(3, directions.count + n, dtype=torch.float64) for n in (0, 2))
    for part in directions.parts("a.weight"):
        part.add(Direct(gradient), out, 1000)
    for part in directions.parts("a.weight", 2):
        part.add(Direct(gradient), shifted, 1000)
    assert torch.equal(shifted[:, 2:], out)
    assert not shifted[:, :2].any()


def test_unknown_parameters_are_refused():
    layout = et.Task(network(), wavy).layout
    rotation = Rotation(None, None, torch.zeros(2, 1, dtype=torch.long))
    with refused(InputError, "['nobody']"):
        RotatedDirections({"nobody": rotation}, layout)


def test_without_directions_there_are_norms_alone():
    task = et.Task(network(), wavy)
    data = batches()
    features, squares, losses = run(task, data, none(task.layout))
    gradients, expected = one_at_a_time(task, data)
    assert features.shape == (8, 0)
    assert gap(squares, gradients.square().sum(dim=1)) < 1e-10
    assert gap(losses, expected) < 1e-10
    assert Job.of(task, "losses").directions.count == 0


def test_rotated_coordinates_are_far_cheaper_than_dense_directions():
    # A thousand coordinates of a layer take two vectors each: nothing of size K × P may be made.
    model = Net(lambda self, x: self.a(x).tanh(), a=nn.Linear(200, 200, bias=False))
    task = et.Task(model, wavy)
    basis = torch.linalg.qr(numbers(200, 32))[0]
    grid = torch.cartesian_prod(torch.arange(32), torch.arange(32))[:1000].T
    directions = RotatedDirections({"a.weight": Rotation(basis, basis, grid)}, task.layout)
    largest = 0

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                largest = max(largest, out.numel())
            return out

    data = [(numbers(4, 3, 200),)]
    with Largest():
        features, _, _ = run(task, data, directions, norms=False)
    gradients, _ = one_at_a_time(task, data)
    expected = (basis.T @ gradients.unflatten(1, (200, 200)) @ basis)[:, grid[0], grid[1]]
    assert gap(features, expected) < 1e-10
    assert largest <= 200 * 200  # a weight; the dense directions would be a thousand times that
