"""Running out of memory: the portion is halved, nothing that was done is done again, and the size is remembered."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import eigentrace as et
from eigentrace.data import as_data
from eigentrace.errors import MemoryLimitError
from eigentrace.projection import Job, Projection, project
from eigentrace.projection import choose as choosing
from eigentrace.projection.choose import Portions, largest_batch
from eigentrace.projection.engine import Compute
from tests.helpers.checking import gap, some_directions, wavy
from tests.helpers.expecting import refused


class Machine:
    """An engine with room for so many examples; it writes down what it was asked for."""

    __name__ = "machine"

    def __init__(self, room, norms=True):
        self.room, self.norms, self.asked, self.seen = room, norms, [], []

    def __call__(self, job, batch, size):
        assert len(batch[0]) == size
        self.asked.append(size)
        if size > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        self.seen += batch[0].tolist()
        features = torch.stack([batch[0], batch[0] ** 2], dim=1)
        return Projection(features, batch[0].abs() if self.norms else None, batch[0] + 1)


@pytest.fixture
def job():
    task = et.Task(nn.Linear(3, 2), wavy)
    return Job.of(task, "losses", some_directions(task.layout), True)


def batch(size):
    return torch.arange(float(size)), torch.ones(7, 7)  # the second is shared by all examples


@pytest.mark.parametrize("norms", [True, False])
@pytest.mark.parametrize(("size", "room"), [(16, 16), (16, 4), (13, 5), (3, 1), (1, 1), (100, 7)])
def test_results_are_those_of_the_whole_batch(job, size, room, norms):
    machine = Machine(room, norms)
    found = Portions()(machine, job, batch(size), size)
    x = torch.arange(float(size))
    assert torch.equal(found.features, torch.stack([x, x**2], dim=1))
    assert torch.equal(found.losses, x + 1)
    assert torch.equal(found.squares(), x) if norms else found.square_norms is None
    assert machine.seen == x.tolist()  # each example once


def test_the_limit_is_remembered(job):
    machine, portions = Machine(room=5), Portions()
    portions(machine, job, batch(16), 16)
    assert machine.asked == [16, 8, 4, 4, 4, 4]
    machine.asked.clear()
    portions(machine, job, batch(10), 10)
    assert machine.asked == [4, 4, 2]


def test_more_short_examples_fit_than_long_ones(job):
    class Wide(Machine):
        """Has room for so many tokens."""

        def __call__(self, job, batch, size):
            self.asked.append(size)
            if batch[1].numel() > self.room:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return Projection(batch[0][:, None], None, batch[0])

    def long(size, width):
        return torch.arange(float(size)), torch.zeros(size, width, 2)

    machine, portions = Wide(room=100), Portions(limit=16)
    for width, expected in ((10, [16, 8, 4, 4, 4, 4]), (5, [8, 8]), (2, [16]), (1, [16]), (20, [2] * 8), (90, [1])):
        machine.asked.clear()
        machine.room = 200 if width == 90 else 100
        size = 1 if width == 90 else 16
        found = portions(machine, job, long(size, width), size)
        assert machine.asked == expected
        assert torch.equal(found.losses, torch.arange(float(size)))


def test_memory_that_runs_short_later_costs_one_portion(job):
    machine, portions = Machine(room=8), Portions(limit=8)
    calls = iter([8, 8, 2, 2, 2, 2, 2, 2, 2, 2, 2])

    def shrinking(job, values, size):
        machine.room = next(calls)
        return machine(job, values, size)

    found = portions(shrinking, job, batch(24), 24)
    assert machine.asked == [8, 8, 8, 4, 2, 2, 2, 2]
    assert torch.equal(found.losses, torch.arange(24.0) + 1)


def test_a_limit_given_by_the_caller_is_kept(job):
    machine, portions = Machine(room=100), Portions(limit=6)
    portions(machine, job, batch(16), 16)
    assert machine.asked == [6, 6, 4]
    assert portions.limit == 6


def test_one_example_that_does_not_fit_is_said_with_remedies(job):
    machine = Machine(room=0)
    remedies = ("fitted.distill", "Compute(precision='bf16')", "Basis(place='host')")
    with refused(MemoryLimitError, "cpu", "8 directions", *remedies):
        Portions()(machine, job, batch(4), 4)
    assert machine.asked == [4, 2, 1]


def test_other_errors_pass_through(job):
    def broken(job, values, size):
        raise ValueError("not about memory")

    with refused(ValueError, "not about memory"):
        Portions()(broken, job, batch(4), 4)


def limited(room):
    """A loss that runs out of memory above so many examples, and otherwise is one like any other."""
    sizes = []

    def loss(model, values):
        sizes.append(len(values[0]))
        if sizes[-1] > room:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return wavy(model, values)

    return loss, sizes


@pytest.mark.parametrize("engine", ["layerwise", "reverse"])
@pytest.mark.parametrize("room", [6, 8, 19])
def test_projection_with_little_room(monkeypatch, room, engine):
    # The check of the losses looks at the whole batch, which is why it is left out here.
    monkeypatch.setattr(choosing.SplitCheck, "__call__", lambda *_: None)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    loss, _ = limited(room)
    tight, wide = et.Task(model, loss), et.Task(model, wavy)
    directions, data = some_directions(wide.layout), [(torch.randn(n, 3),) for n in (20, 20, 5)]
    results = []
    for task in (tight, wide):
        with task.session():
            job = Job.of(task, "losses", directions, True, Compute(engine=engine))
            found = [p for _, p in project(job, as_data(data))]
        results.append([torch.cat([getattr(p, n) for p in found]) for n in ("features", "square_norms", "losses")])
    assert all(gap(a, b) < 1e-5 for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("room", [1, 2, 3])
def test_planning_does_not_need_more_room_than_projecting(monkeypatch, room):
    # Planning looks at three examples, and at each twice; where only one fits, that is all it may look at.
    monkeypatch.setattr(choosing.SplitCheck, "__call__", lambda *_: None)
    loss, _ = limited(room)
    task = et.Task(nn.Linear(3, 2), loss)
    with task.session():
        ((_, found),) = project(Job.of(task, "losses", norms=True), as_data([(torch.randn(5, 3),)]))
    assert found.features.shape == (5, 0)


def test_too_large_a_model_is_said_in_words_from_the_start(monkeypatch):
    loss, _ = limited(0)
    task = et.Task(nn.Linear(3, 2), loss)
    with task.session(), refused(MemoryLimitError, "cpu", "0 directions"):
        list(project(Job.of(task, "losses", norms=True), as_data([(torch.randn(5, 3),)])))


def test_there_is_nothing_to_measure_on_a_cpu(job):
    data = SimpleNamespace(can_rebatch=True, __len__=lambda: 100)
    assert largest_batch(Machine(4), job, data) is None
