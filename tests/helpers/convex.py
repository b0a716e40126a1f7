"""A convex problem at its minimum, on which influence functions are right up to second order."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import eigentrace as et

N, D, C, L2 = 300, 20, 3, 1e-2


def softmax_regression() -> tuple[et.Task, tuple[Tensor, Tensor]]:
    """Softmax regression with 63 parameters at the minimum of its penalised loss, in float64."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, D, generator=generator, dtype=torch.float64) * torch.logspace(0, -1, D, dtype=torch.float64)
    noise = torch.randn(N, C, generator=generator, dtype=torch.float64)
    y = (2 * x @ torch.randn(D, C, generator=generator, dtype=torch.float64) + noise).argmax(dim=1)
    inputs = torch.cat([x, torch.ones(N, 1, dtype=x.dtype)], dim=1)

    def loss(theta: Tensor) -> Tensor:
        return F.cross_entropy(inputs @ theta.view(C, -1).T, y) + L2 / 2 * theta.square().sum()

    theta = torch.zeros(C * (D + 1), dtype=torch.float64)
    for _ in range(20):
        theta = theta - torch.linalg.solve(torch.func.hessian(loss)(theta), torch.func.grad(loss)(theta))
    assert torch.func.grad(loss)(theta).norm() < 1e-12
    model = nn.Linear(D, C).double()
    weights = theta.view(C, -1)
    model.load_state_dict({"weight": weights[:, :-1], "bias": weights[:, -1]})
    return et.classification(model, l2=L2), (x, y)
