"""Compare an engine's results with ordinary gradients of single examples, for any model."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import eigentrace as et
from eigentrace.data import as_data
from eigentrace.data.batch import length_of, select
from eigentrace.projection import Job, Projection, project
from eigentrace.projection.directions import CoordinateDirections, DenseDirections, Directions, StackedDirections
from eigentrace.projection.engine import Compute

EXACT = 1e-10
LAYERWISE = Compute(engine="layerwise")


class Net(nn.Module):
    """A module defined by its members and a forward function."""

    def __init__(self, function: Callable, **members: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.function = function
        for name, member in members.items():
            setattr(self, name, member)
        self.double()

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.function(self, *inputs, **named)


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape))


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def wavy(model: nn.Module, batch: Any) -> Tensor:  # (B,)
    """A loss with a different slope for every output number, so that swapped numbers are detected."""
    output = model(*batch).flatten(1)
    slopes = torch.linspace(0.5, 1.5, output.shape[1], dtype=output.dtype)
    return (output * slopes + slopes).sin().sum(dim=1)


def some_directions(layout: Any, count: int = 4) -> Directions:
    """Dense directions, stacked with single coordinates."""
    dense = DenseDirections(torch.randn(count, layout.numel, dtype=layout.dtype), layout)
    return StackedDirections((dense, CoordinateDirections(torch.randint(0, layout.numel, (count,)), layout)))


def one_at_a_time(task: et.Task, batches: Iterable[Any]) -> tuple[Tensor, Tensor]:  # (N, P), (N,)
    """Differentiate each example's loss by an ordinary backward pass on the model itself."""
    own = dict(task.model.named_parameters())
    chosen = [own[name] for name in task.layout.names]
    wanted = [p.requires_grad for p in chosen]
    gradients, losses = [], []
    with task.session(), torch.enable_grad():
        for p in chosen:
            p.requires_grad_()
        for batch in batches:
            size = length_of(batch)
            for i in range(size):
                loss = task._loss(task.model, select(batch, slice(i, i + 1), size)).sum()
                losses.append(loss.detach())
                if not loss.requires_grad:
                    loss = loss + 0 * chosen[0].sum()
                found = torch.autograd.grad(loss, chosen, materialize_grads=True)
                gradients.append(torch.cat([g.reshape(g.numel()).to(task.layout.dtype) for g in found]))
    for p, flag in zip(chosen, wanted, strict=True):
        p.requires_grad_(flag)
    return torch.stack(gradients), torch.stack(losses)


def joined(found: Sequence[Projection]) -> tuple[Tensor, Tensor | None, Tensor]:
    squares = None if found[0].square_norms is None else torch.cat([f.squares() for f in found])
    return torch.cat([f.features for f in found]), squares, torch.cat([f.losses for f in found])


def run(task: et.Task, batches: Any, directions: Directions, norms: bool = True, compute: Compute = LAYERWISE):
    with task.session():
        found = [p for _, p in project(Job.of(task, "losses", directions, norms, compute), as_data(batches))]
    return joined(found)


def gap(found: Tensor, expected: Tensor) -> float:
    """Largest error of any example, relative to the example's norm (at least a thousandth of the largest norm)."""
    found, expected = found.reshape(len(found), -1).double(), expected.reshape(len(expected), -1).double()
    size = expected.norm(dim=1)
    return float(((found - expected).norm(dim=1) / size.clamp_min(1e-3 * size.max()).clamp_min(1e-30)).max())


def compare(
    task: et.Task,
    batches: Any,
    *,
    without: Iterable[str] | None = (),
    directions: Callable[[Any], Directions] = some_directions,
    norms: bool = True,
    compute: Compute = LAYERWISE,
    tol: float = EXACT,
) -> None:
    """Compare features, squared norms and losses, and (unless None) which parameters fell back to another engine."""
    made = directions(task.layout)
    gradients, losses = one_at_a_time(task, batches)
    features, squares, values = run(task, batches, made, norms, compute)
    assert gap(features, gradients @ made.dense(0, made.count).T) < tol
    assert gap(values, losses) < tol
    if norms:
        assert gap(squares, gradients.square().sum(dim=1)) < tol
    if without is not None:
        assert set(task.coverage.without_rule) == set(without), str(task.coverage)


def check(
    model: nn.Module, batches: Any, *, loss: Callable = wavy, params: Any = "trainable", **options: Any
) -> et.Task:
    """Create a task of a model and compare; see `compare` for the options."""
    task = et.Task(model, loss, params)
    compare(task, batches, **options)
    return task
