"""On a convex problem influence is a first-order expansion of retraining: hold the two against each other."""

from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import eigentrace as et
from eigentrace.demo.digits import load_digits

L2 = 1e-2
NUM_TRAIN, NUM_QUERIES, NUM_REMOVED = 6000, 50, 50
# A removal this small is the infinitesimal one that influence is the derivative of.
SMALL, NUM_SMALL = 0.01, 5


class Regression:
    """Softmax regression in closed form: nothing of the library, so that what retraining gives is independent of it."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], dim=1)  # the bias as one more pixel
        self.target = F.one_hot(y, 10).to(x.dtype)

    def gradient(self, theta: Tensor, weights: Tensor) -> Tensor:  # (10, D), (N,) -> (10, D)
        error = (self.x @ theta.T).softmax(dim=1) - self.target
        return (weights[:, None] * error).T @ self.x / NUM_TRAIN + L2 * theta

    def hessian(self, theta: Tensor) -> Tensor:  # (10 D, 10 D)
        p = (self.x @ theta.T).softmax(dim=1)
        width = self.x.shape[1]
        H = L2 * torch.eye(10 * width, dtype=p.dtype).view(10, width, 10, width)
        for c in range(10):
            for d in range(c + 1):
                block = (self.x * (p[:, c] * (float(c == d) - p[:, d]))[:, None]).T @ self.x / NUM_TRAIN
                H[c, :, d] += block
                if c != d:
                    H[d, :, c] += block.T
        return H.view(10 * width, -1)

    def train(self, theta: Tensor, weights: Tensor, factor: Tensor) -> Tensor:
        """Go to the minimum: steps with a factored Hessian from nearby, until the gradient is at rounding level."""
        for _ in range(100):
            gradient = self.gradient(theta, weights)
            if gradient.norm() < 1e-12:
                return theta
            theta = theta - torch.cholesky_solve(gradient.view(-1, 1), factor).view_as(theta)
        raise AssertionError("retraining did not converge")


def shrunk(images: Tensor) -> Tensor:  # (B, 1, 28, 28) -> (B, 196)
    """Digits of 14 × 14 pixels: a Hessian of 1,970 parameters is factored in a second."""
    return F.avg_pool2d(images.double(), 2).flatten(1)


class Problem(NamedTuple):
    task: et.Task
    data: TensorDataset
    queries: tuple[Tensor, Tensor]
    removed: np.ndarray
    changes: Tensor  # (Q, removed) of each query's loss when one example goes
    small: Tensor  # (Q, few) the same per unit of weight, when a hundredth of it goes


@pytest.fixture(scope="module")
def problem() -> Problem:
    """Logistic regression on the embedded digits, and what removing single examples really does to test losses."""
    digits = load_digits()
    x, y = shrunk(digits.train_images[:NUM_TRAIN]), digits.train_labels[:NUM_TRAIN]
    qx, qy = shrunk(digits.test_images[:NUM_QUERIES]), digits.test_labels[:NUM_QUERIES]
    regression, everyone = Regression(x, y), torch.ones(NUM_TRAIN, dtype=torch.float64)
    theta = torch.zeros(10, 1 + x.shape[1], dtype=torch.float64)
    for _ in range(4):  # Newton steps from afar, then steps with the last factor from nearby
        factor = torch.linalg.cholesky(regression.hessian(theta))
        theta = theta - torch.cholesky_solve(regression.gradient(theta, everyone).view(-1, 1), factor).view_as(theta)
    trained = regression.train(theta, everyone, factor)
    asked = Regression(qx, qy)

    def query_losses(theta: Tensor) -> Tensor:
        return F.cross_entropy(asked.x @ theta.T, qy, reduction="none")

    def retrained(row: int, share: float) -> Tensor:
        weights = everyone.clone()
        weights[row] -= share  # the rest keep their weight 1/N
        return query_losses(regression.train(trained, weights, factor)) - query_losses(trained)

    removed = np.random.default_rng(0).choice(NUM_TRAIN, NUM_REMOVED, replace=False)
    changes = torch.stack([retrained(row, 1.0) for row in removed], dim=1)
    small = torch.stack([retrained(row, SMALL) for row in removed[:NUM_SMALL]], dim=1) / SMALL
    model = nn.Linear(x.shape[1], 10).double()
    model.load_state_dict({"weight": trained[:, :-1], "bias": trained[:, -1]})
    task = et.classification(model, l2=L2)
    return Problem(task, TensorDataset(x, y), (qx, qy), removed, changes, small)


def pearson(a: Tensor, b: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1])


@pytest.mark.slow
def test_predicted_changes_in_nats_match_retraining(problem, capsys):
    part = torch.utils.data.Subset(problem.data, problem.removed.tolist())
    tailed = et.Arnoldi(steps=300, keep=100, sample=None).fit(problem.task, problem.data)
    fits = {
        "exact Hessian": et.ExactHessian().fit(problem.task, problem.data),
        "Arnoldi K=100 with tail": tailed,
        "Arnoldi K=100 truncated": tailed.distill(tail=None),
    }
    found = {name: fit.influence(part, problem.queries, unit="nats") for name, fit in fits.items()}
    with capsys.disabled():
        for name, predicted in found.items():
            slope = float((predicted * problem.changes).sum() / predicted.square().sum())
            print(f"\n{name}: Pearson {pearson(predicted, problem.changes):.4f}, real/predicted {slope:.3f}", end="")
    assert pearson(found["exact Hessian"], problem.changes) >= 0.99
    assert pearson(found["Arnoldi K=100 with tail"], problem.changes) >= 0.95
    # The unit is right, not only the ranking: the derivative itself, up to the curvature of one hundredth.
    derivative = found["exact Hessian"][:, :NUM_SMALL]
    assert (derivative - problem.small).norm() < 0.02 * problem.small.norm()
