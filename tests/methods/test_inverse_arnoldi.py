"""Why Arnoldi on the inverse predicts so little of influence: the directions that it finds, not its solver."""

import pytest
import torch

import eigentrace as et
from tests.helpers.convex import L2, softmax_regression

KEEP = 10


@pytest.fixture(scope="module")
def problem():
    return softmax_regression()


@pytest.fixture(scope="module")
def dense(problem):
    """The gradients of all examples, and the eigenpairs of the Hessian by ascending eigenvalue."""
    task, data = problem
    hessian = torch.func.hessian(lambda theta: penalised(theta, *data))(task.vector)
    return per_example(task, data), torch.linalg.eigh(hessian)


def penalised(theta, x, y):
    return losses(theta, x, y).mean() + L2 / 2 * theta.square().sum()


def losses(theta, x, y):
    weight, bias = theta.split([60, 3])
    return torch.nn.functional.cross_entropy(x @ weight.view(3, 20).T + bias, y, reduction="none")


def per_example(task, data):
    one = torch.func.grad(lambda theta, x, y: losses(theta, x[None], y[None])[0] + L2 / 2 * theta.square().sum())
    return torch.func.vmap(one, (None, 0, 0))(task.vector, *data)


def correlation(a, b):
    return float(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1])


def by_directions(gradients, values, vectors):
    features = gradients @ vectors
    return (features / values) @ features.T


def test_the_directions_of_smallest_curvature_hold_little_of_the_influence(problem, dense):
    task, data = problem
    gradients, (values, vectors) = dense
    exact = et.ExactHessian().fit(task, data).influence(data, data)
    assert correlation(by_directions(gradients, values, vectors), exact) > 0.999
    # Without those along which nothing but the penalty is curved: no gradient has a component there.
    seen = (gradients @ vectors).abs().amax(dim=0) > 1e-9
    values, vectors = values[seen], vectors[:, seen]
    assert len(values) == 42
    largest = by_directions(gradients, values[-KEEP:], vectors[:, -KEEP:])
    smallest = by_directions(gradients, values[:KEEP], vectors[:, :KEEP])
    assert correlation(largest, exact) > 0.7
    assert correlation(smallest, exact) < 0.5


def test_the_solver_is_not_the_reason(problem):
    task, data = problem
    exact = et.ExactHessian().fit(task, data).influence(data, data)
    solver = et.Lissa(depth=50)
    assert correlation(solver.fit(task, data).influence(data, data), exact) > 0.9
    found = et.InverseArnoldi(steps=20, keep=KEEP, solver=solver).fit(task, data).influence(data, data)
    assert correlation(found, exact) < 0.5
