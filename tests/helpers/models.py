"""Small models with the features that are known to break influence libraries, and dense float64 oracles for them."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import eigentrace as et


class ConvNet(nn.Module):
    """Convolutions, BatchNorm in eval, pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3, padding=1, stride=2)
        self.norm = nn.BatchNorm2d(2)
        self.head = nn.Linear(2 * 3 * 3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.softplus(self.norm(self.conv(x))).flatten(1))


class TinyTransformer(nn.Module):
    """A language model with masked attention, LayerNorm, dropout and tied embeddings."""

    def __init__(self, vocabulary: int = 7, width: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.drop = nn.Dropout(0.5)
        self.out = nn.Linear(width, vocabulary, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        h = self.embed(tokens)
        q, k, v = self.qkv(self.norm(h)).chunk(3, dim=-1)
        h = h + self.drop(F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, :].bool()))
        return self.out(self.norm(h))


class EncoderLayer(nn.Module):
    """`nn.TransformerEncoderLayer`, whose fused path in eval has no second derivative."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, dim_feedforward=6, dropout=0.1, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x).mean(dim=1))


class Recurrent(nn.Module):
    """An LSTM, whose fused kernels have neither forward mode nor a double backward."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 4, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


@dataclass(frozen=True)
class Case:
    """A task, its data as batches of uneven size, and queries."""

    task: et.Task
    batches: list[Any]
    queries: list[Any]
    make_task: Callable[..., et.Task] = et.classification  # the same task of another model

    @property
    def num_examples(self) -> int:
        return sum(len(batch[1]) for batch in self.batches)


def _trained(model: nn.Module, task: et.Task, batches: list[Any], steps: int = 60, lr: float = 0.05) -> None:
    """Take a few full-batch steps, since curvature at initialisation differs from that of a trained model."""
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(params, lr=lr)
    model.eval()
    for _ in range(steps):
        optimizer.zero_grad()
        total = sum(task._loss(model, batch).sum() for batch in batches)
        total.backward()
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    model.train()


def _classifier(
    model: nn.Module, inputs: Callable[[int], Tensor], l2: Any = 0.1, dtype: torch.dtype = torch.float64
) -> Case:
    model = model.to(dtype)
    batches = [(inputs(size).to(dtype), torch.randint(0, 3, (size,))) for size in (7, 7, 3)]
    queries = [(inputs(2).to(dtype), torch.randint(0, 3, (2,))) for _ in range(2)]
    make_task = functools.partial(et.classification, l2=l2)
    task = make_task(model)
    _trained(model, task, batches)
    return Case(task, batches, queries, make_task)


def mlp(dtype: torch.dtype = torch.float64) -> Case:
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Dropout(0.5), nn.LayerNorm(5), nn.Linear(5, 3))
    return _classifier(model, lambda n: torch.randn(n, 4), l2={"*.weight": 0.1, "*.bias": 0.05}, dtype=dtype)


def conv() -> Case:
    return _classifier(ConvNet(), lambda n: torch.randn(n, 1, 6, 6))


def encoder() -> Case:
    return _classifier(EncoderLayer(), lambda n: torch.randn(n, 3, 4))


def recurrent() -> Case:
    return _classifier(Recurrent(), lambda n: torch.randn(n, 3, 3))


def transformer() -> Case:
    """A masked language model with tied embeddings, whose loss is the sum over valid tokens."""
    model = TinyTransformer().double()

    def batch(size: int) -> tuple[Tensor, Tensor, Tensor]:
        lengths = torch.randint(2, 6, (size,))
        mask = (torch.arange(5)[None] < lengths[:, None]).long()
        return torch.randint(0, 7, (size, 5)), torch.randint(0, 7, (size, 5)), mask

    def output_loss(logits: Tensor, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        _, targets, mask = batch
        return (F.cross_entropy(logits.transpose(1, 2), targets, reduction="none") * mask).sum(dim=1)

    make_task = functools.partial(et.Task, outputs=lambda m, b: m(b[0], b[2]), output_loss=output_loss, l2=0.1)
    task = make_task(model)
    batches = [batch(size) for size in (5, 5, 2)]
    _trained(model, task, batches)
    return Case(task, batches, [batch(3)], make_task)


CASES: dict[str, Callable[[], Case]] = {
    "mlp": mlp,
    "conv": conv,
    "transformer": transformer,
    "encoder": encoder,
    "recurrent": recurrent,
}


def make(name: str) -> Case:
    """Build a case from a fixed seed, without changing the global random state."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return CASES[name]()


def dense_hessian(case: Case, kind: str = "hessian") -> Tensor:  # (P, P)
    """Compute the curvature by plain double backward (and Jacobians); only the loss comes from the library."""
    task, total = case.task, 0.0
    with task.session(), torch.enable_grad():
        for batch in case.batches:
            flat = task.vector.clone().requires_grad_()
            if kind == "hessian":
                total = total + torch.autograd.functional.hessian(lambda v, b=batch: losses_at(task, v, b).sum(), flat)
            else:
                total = total + _dense_gauss_newton(task, flat, batch)
    sizes = zip(task.layout.names, task.layout.sizes, strict=True)
    penalty = torch.cat([torch.full((size,), task.l2[name], dtype=torch.float64) for name, size in sizes])
    return total / case.num_examples + penalty.diag()


def _dense_gauss_newton(task: et.Task, flat: Tensor, batch: Any) -> Tensor:
    def outputs(v: Tensor) -> Tensor:
        return _call(task, v, lambda m: task._outputs(m, batch))

    center = outputs(flat).detach()
    J = torch.autograd.functional.jacobian(outputs, flat).reshape(center.numel(), -1)
    S = torch.autograd.functional.hessian(
        lambda o: task.output_losses(o.reshape(center.shape), batch).sum(), center.flatten()
    )
    return J.T @ S @ J


def losses_at(task: et.Task, flat: Tensor, batch: Any) -> Tensor:
    return _call(task, flat, lambda m: task._loss(m, batch))


def _call(task: et.Task, flat: Tensor, function: Callable[[nn.Module], Tensor]) -> Tensor:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = task.model

        def forward(self) -> Tensor:
            return function(self.model)

    values, offset = {}, 0
    for name, shape, size in zip(task.layout.names, task.layout.shapes, task.layout.sizes, strict=True):
        values[f"model.{name}"] = flat[offset : offset + size].view(shape)
        offset += size
    return functional_call(Wrapped(), values, ())


def dense_gradients(task: et.Task, batches: list[Any], measure: Callable | None = None) -> Tensor:  # (N, P)
    """Differentiate each example's loss separately, by an ordinary backward pass."""
    rows = []
    with task.session(), torch.enable_grad():
        for batch in batches:
            for i in range(len(batch[1])):
                one = tuple(t[i : i + 1] for t in batch)
                flat = task.vector.clone().requires_grad_()
                function = measure or task._loss
                value = _call(task, flat, lambda m, one=one, function=function: function(m, one))
                rows.append(torch.autograd.grad(value.sum(), flat)[0])
    return torch.stack(rows)
