"""Training many small networks as one: stacked parameters that take each step of gradient descent together."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from eigentrace.settings import check_counts, check_not_negative

State = Mapping[str, Tensor]
OutputLoss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class SGD:
    """Settings of stochastic gradient descent, with the update rule of `torch.optim.SGD`."""

    epochs: int
    """Number of passes over the data, each in a new random order."""
    batch_size: int = 64
    """Examples per step; the last batch of an epoch may be smaller."""
    lr: float = 0.01
    """Learning rate."""
    momentum: float = 0.0
    """Momentum factor."""
    weight_decay: float = 0.0
    """λ of the ℓ2 penalty (λ/2)·‖θ‖²."""

    def __post_init__(self) -> None:
        check_counts(1, epochs=self.epochs, batch_size=self.batch_size)
        check_not_negative(lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay)


class Stack(Protocol):
    """M networks of the same architecture."""

    def step(self, x: Tensor, y: Tensor) -> None:  # (M, B, ...), (M, B, ...)
        """Take one step, each network on its own batch."""
        ...

    def outputs(self, x: Tensor) -> Tensor:  # (Q, ...) -> (M, Q, ...)
        """Evaluate every network on the same inputs."""
        ...


class MappedStack:
    """Networks of any architecture, trained by `vmap` over `functional_call`."""

    def __init__(self, model: nn.Module, states: Sequence[State], sgd: SGD, loss: OutputLoss, device: object) -> None:
        self._model, self._sgd = model, sgd
        trained = {name for name, p in model.named_parameters() if p.requires_grad}
        self._params = {name: torch.stack([s[name] for s in states]).to(device) for name in trained}  # type: ignore[call-overload]
        fixed = dict(model.named_buffers()) | {n: p for n, p in model.named_parameters() if n not in trained}
        shared = {name: tensor.detach().to(device) for name, tensor in fixed.items()}  # type: ignore[call-overload]
        self._velocity = {name: torch.zeros_like(p) for name, p in self._params.items()}

        def run(params: State, x: Tensor) -> Tensor:
            return functional_call(model, {**shared, **params}, (x,))

        def batch_loss(params: State, x: Tensor, y: Tensor) -> Tensor:
            return loss(run(params, x), y).mean()

        self._gradients = vmap(grad(batch_loss))
        self._run = vmap(run, in_dims=(0, None))

    @torch.no_grad()
    def step(self, x: Tensor, y: Tensor) -> None:  # (M, B, ...), (M, B, ...)
        """Take one step, each network on its own batch."""
        for name, gradient in self._gradients(self._params, x, y).items():
            velocity = self._velocity[name].mul_(self._sgd.momentum).add_(gradient)
            _descend(self._params[name], velocity, self._sgd)

    @torch.no_grad()
    def outputs(self, x: Tensor) -> Tensor:  # (Q, ...) -> (M, Q, ...)
        """Evaluate every network on the same inputs."""
        return self._run(self._params, x)


class Layer(NamedTuple):
    """Names of the parameters of one linear layer, and the activation after it."""

    weight: str
    bias: str | None
    activation: str


class FusedStack:
    """Fully connected networks trained with cross-entropy, by batched matrix products.

    Gradients are not stored: each product is added to the velocity in place.
    """

    def __init__(self, layers: Sequence[Layer], states: Sequence[State], sgd: SGD, device: object) -> None:
        self._layers, self._sgd = layers, sgd
        # (M, in, out): on a CPU, the forward product takes twice as long with the layout of nn.Linear.
        self._weights = [_stacked(states, layer.weight, device).transpose(1, 2).contiguous() for layer in layers]
        self._biases = [_stacked(states, layer.bias, device).unsqueeze(1) if layer.bias else None for layer in layers]
        self._velocities = [torch.zeros_like(weight) for weight in self._weights]
        self._bias_velocities = [None if bias is None else torch.zeros_like(bias) for bias in self._biases]

    @torch.no_grad()
    def step(self, x: Tensor, y: Tensor) -> None:  # (M, B, ...), (M, B)
        """Take one step, each network on its own batch."""
        inputs, outputs = self._forward(x.flatten(2))
        delta = outputs.softmax(dim=-1)  # (M, B, classes)
        delta.scatter_add_(2, y.unsqueeze(2), delta.new_full((), -1.0).expand(*y.shape, 1))
        delta /= y.shape[1]
        for i in reversed(range(len(self._layers))):
            after = inputs[i + 1] if i + 1 < len(inputs) else outputs
            delta = _back(self._layers[i].activation, delta, after)
            # The backward pass needs the weights of the forward pass, so this comes before the update.
            below = torch.bmm(delta, self._weights[i].transpose(1, 2)) if i else delta
            self._velocities[i].baddbmm_(inputs[i].transpose(1, 2), delta, beta=self._sgd.momentum)
            _descend(self._weights[i], self._velocities[i], self._sgd)
            bias, velocity = self._biases[i], self._bias_velocities[i]
            if bias is not None and velocity is not None:
                velocity.mul_(self._sgd.momentum).add_(delta.sum(dim=1, keepdim=True))
                _descend(bias, velocity, self._sgd)
            delta = below

    @torch.no_grad()
    def outputs(self, x: Tensor) -> Tensor:  # (Q, ...) -> (M, Q, classes)
        """Evaluate every network on the same inputs."""
        return self._forward(x.flatten(1).expand(len(self._weights[0]), -1, -1))[1]

    def _forward(self, x: Tensor) -> tuple[list[Tensor], Tensor]:  # (M, B, in)
        inputs = []
        for layer, weight, bias in zip(self._layers, self._weights, self._biases, strict=True):
            inputs.append(x)
            x = torch.bmm(x, weight) if bias is None else torch.baddbmm(bias, x, weight)
            x = _forward(layer.activation, x)
        return inputs, x


def plain_layers(model: nn.Module) -> list[Layer] | None:
    """Return the layers of a fully connected network; None for any other network."""
    parts = list(model.named_children()) if type(model) is nn.Sequential else [("", model)]
    while parts and type(parts[0][1]) is nn.Flatten and (parts[0][1].start_dim, parts[0][1].end_dim) == (1, -1):
        parts = parts[1:]
    layers: list[Layer] = []
    for name, part in parts:
        prefix = f"{name}." if name else ""
        if type(part) is nn.Linear:
            own = dict(part.named_parameters())
            if not own.keys() <= {"weight", "bias"} or not all(p.requires_grad for p in own.values()):
                return None
            layers.append(Layer(f"{prefix}weight", f"{prefix}bias" if "bias" in own else None, ""))
        elif type(part) in _ACTIVATIONS and layers and not layers[-1].activation:
            layers[-1] = layers[-1]._replace(activation=_ACTIVATIONS[type(part)])
        elif type(part) is not nn.Identity:
            return None
    # The parameters of a layer that is used twice are listed once, so the counts differ.
    num_named = sum(1 + (layer.bias is not None) for layer in layers)
    return layers if layers and num_named == len(list(model.parameters())) else None


_ACTIVATIONS: dict[type[nn.Module], str] = {nn.ReLU: "relu", nn.Tanh: "tanh", nn.Sigmoid: "sigmoid"}


def _forward(activation: str, x: Tensor) -> Tensor:
    """Apply an activation in place."""
    if activation == "relu":
        return x.relu_()
    if activation == "tanh":
        return x.tanh_()
    return x.sigmoid_() if activation else x


def _back(activation: str, delta: Tensor, after: Tensor) -> Tensor:
    """Multiply by the derivative of an activation, computed from its output."""
    if activation == "relu":
        return delta.mul_(after > 0)
    if activation == "tanh":
        return delta.mul_(1 - after * after)
    return delta.mul_(after * (1 - after)) if activation else delta


def _descend(params: Tensor, velocity: Tensor, sgd: SGD) -> None:
    if sgd.weight_decay:
        velocity.add_(params, alpha=sgd.weight_decay)
    params.add_(velocity, alpha=-sgd.lr)


def _stacked(states: Sequence[State], name: str, device: object) -> Tensor:
    return torch.stack([state[name] for state in states]).to(device)  # type: ignore[call-overload]
