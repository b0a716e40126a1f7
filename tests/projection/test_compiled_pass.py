"""A traced pass gives what the plain one gives, and steps aside where it would not."""

import pytest
import torch
from torch import nn

import eigentrace as et
from eigentrace.data import as_data
from eigentrace.errors import EigentraceWarning
from eigentrace.projection import Job, project
from eigentrace.projection import compiled_pass as compiling
from tests.helpers.checking import Net, numbers, some_directions, weight
from tests.helpers.expecting import warned
from tests.helpers.models import CASES


def features(task, batches, directions, **settings):
    with task.session():
        job = Job.of(task, "losses", directions, True, et.Compute(engine="layerwise", **settings))
        found = [p for _, p in project(job, as_data(batches))]
    return torch.cat([f.features for f in found]), torch.cat([f.squares() for f in found])


def assert_same(task, batches, tol=1e-10):
    directions = some_directions(task.layout)
    for found, expected in zip(
        features(task, batches, directions, compile=True), features(task, batches, directions), strict=True
    ):
        assert (found - expected).norm() <= tol * expected.norm()


@pytest.fixture
def traced(monkeypatch):
    """Run graphs as they were traced, and remember for which shapes: the compiler's own work takes minutes."""
    graphs = []
    monkeypatch.setattr(torch, "compile", lambda graph, **_: graphs.append(graph) or graph)
    return graphs


@pytest.mark.parametrize("name", CASES)
def test_the_traced_pass_is_the_plain_one(cases, traced, name):
    case = cases[name]
    assert_same(case.task, [*case.batches, *case.batches])
    assert len(traced) == 2  # two shapes of batch, each seen more than once


def test_products_with_directions_stay_single_calls(cases, traced):
    case = cases["transformer"]
    assert_same(case.task, [case.batches[0]] * 3)
    (graph,) = traced
    called = {str(node.target) for node in graph.graph.nodes if node.op == "call_function"}
    assert {"eigentrace.outer_dot.default", "eigentrace.outer_square_norms.default"} <= called


def test_a_graph_is_no_constant(cases, traced):
    # What was traced with one batch must answer for the numbers of another.
    case = cases["conv"]
    x, y = case.batches[0]
    assert_same(case.task, [(x, y), (x, y), (x.flip(0) + 1, y.flip(0)), (-x, y)])
    assert len(traced) == 1


def test_only_so_many_shapes_are_compiled(traced):
    task = et.classification(nn.Linear(3, 2).double())
    batches = [(numbers(n, 3), torch.zeros(n, dtype=torch.long)) for n in range(2, 9)]
    assert_same(task, batches + batches)
    assert len(traced) == compiling._MOST_SHAPES


@pytest.mark.parametrize("positive", [lambda x: x.sum() > 0, lambda x: torch.equal(x, x.abs())])
def test_a_model_that_reads_its_batch_is_not_compiled(traced, positive):
    def forward(self, x):
        return self.a(x) * self.p if positive(x) else self.a(-x)

    def loss(model, batch):
        return model(*batch).sin().sum(dim=1)

    task = et.Task(Net(forward, a=nn.Linear(3, 4), p=weight(4)), loss)
    with warned(EigentraceWarning, "4 examples"):
        assert_same(task, [(numbers(4, 3).abs(),), (numbers(4, 3).abs(),), (-numbers(4, 3).abs(),)])
    assert not traced


@pytest.mark.slow
def test_the_compiler_keeps_the_numbers(cases):
    case = cases["conv"]
    assert_same(case.task, [case.batches[0]] * 3, tol=1e-8)
