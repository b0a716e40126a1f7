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


def objective(model: nn.Module, x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
    penalty = sum(p.square().sum() for p in model.parameters())
    return (weights * F.cross_entropy(model(x), y, reduction="none")).sum() / NUM_TRAIN + L2 / 2 * penalty


def train(model: nn.Module, x: Tensor, y: Tensor, weights: Tensor) -> None:
    """Run to convergence: float64 and a gradient at rounding level, so that the difference of two runs is exact."""
    optimizer = torch.optim.LBFGS(
        model.parameters(), max_iter=500, tolerance_grad=1e-9, tolerance_change=0, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = objective(model, x, y, weights)
        loss.backward()
        return loss

    optimizer.step(closure)


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
    x, y = digits.train_images[:NUM_TRAIN].flatten(1).double(), digits.train_labels[:NUM_TRAIN]
    qx, qy = digits.test_images[:NUM_QUERIES].flatten(1).double(), digits.test_labels[:NUM_QUERIES]
    model = nn.Linear(784, 10).double()
    nn.init.zeros_(model.weight), nn.init.zeros_(model.bias)
    everyone = torch.ones(NUM_TRAIN, dtype=torch.float64)
    train(model, x, y, everyone)
    trained = {name: value.clone() for name, value in model.state_dict().items()}

    def query_losses() -> Tensor:
        with torch.no_grad():
            return F.cross_entropy(model(qx), qy, reduction="none")

    before = query_losses()

    def retrained(row: int, share: float) -> Tensor:
        model.load_state_dict(trained)
        weights = everyone.clone()
        weights[row] -= share  # the rest keep their weight 1/N
        train(model, x, y, weights)
        return query_losses() - before

    removed = np.random.default_rng(0).choice(NUM_TRAIN, NUM_REMOVED, replace=False)
    changes = torch.stack([retrained(row, 1.0) for row in removed], dim=1)
    small = torch.stack([retrained(row, SMALL) for row in removed[:NUM_SMALL]], dim=1) / SMALL
    model.load_state_dict(trained)
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
