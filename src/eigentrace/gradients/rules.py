"""One rule per operation: what each parameter's per-example gradient is made of, given the output's gradient.

A rule takes a call and the arguments of the function, under their names, and returns for each of its parameters how the
output's gradient becomes a form. It returns None where it does not apply; the parameter then goes by another engine.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from eigentrace.gradients.layer_gradients import Direct, LayerGradients
from eigentrace.gradients.outer_products import Dense, OneHot, Outer, Windows

Maker = Callable[[Tensor], LayerGradients]
Uses = list[tuple[Tensor, Maker]] | None


@dataclass(frozen=True)
class Call:
    """A call whose output holds the examples of a batch along one of its dimensions, perhaps merged with others."""

    output: Tensor
    batch_dim: int
    size: int  # B

    def tokens(self, tensor: Tensor) -> Tensor:  # (B, T, width)
        """Bring the examples to the front, and all else but the last dimension into the middle."""
        # Computed, since reshape(-1) is undefined for tensors without elements.
        tokens = math.prod(tensor.shape[:-1]) // self.size
        return tensor.movedim(self.batch_dim, 0).reshape(self.size, tokens, tensor.shape[-1])

    def factor(self, tensor: Tensor) -> Dense:
        """Read a tensor as one side of a sum of outer products over tokens."""
        return Dense(self.tokens(tensor)[:, None])

    def channels(self, tensor: Tensor) -> Tensor:  # (B·m, C, *) -> (B, C)
        """Sum each example over everything but the channels."""
        places = math.prod(tensor.shape[2:])
        merged = tensor.reshape(self.size, len(tensor) // self.size, tensor.shape[1], places)
        return merged.sum(dim=(1, 3))

    def spreads(self, shape: torch.Size) -> bool:
        """Tell whether something of this shape is shared by all examples rather than having one slice for each."""
        place = self.batch_dim - self.output.ndim + len(shape)
        return place < 0 or shape[place] == 1

    def broadcast(self, tensor: Tensor, shape: torch.Size) -> Tensor:  # (B, p)
        """Sum each example to the shape of what was broadcast to it."""
        shape = torch.Size([1] * (tensor.ndim - len(shape)) + list(shape))
        front = tensor.movedim(self.batch_dim, 0)
        rest = front.shape[1:]
        front = front.reshape(self.size, len(front) // self.size, *rest)
        kept = [n for d, n in enumerate(shape) if d != self.batch_dim]
        summed = [1, *(2 + d for d, (n, m) in enumerate(zip(kept, rest, strict=True)) if n == 1 and m != 1)]
        return front.sum(dim=summed).reshape(self.size, math.prod(shape))


def linear(call: Call, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Uses:
    """Y = X Wᵀ + bias over any leading dimensions."""
    if weight.ndim != 2:
        return None
    bias_too = _summed(call, bias, lambda b: b)
    return [(weight, lambda b: Outer(call.factor(b), call.factor(input), call.size)), *bias_too]


def matmul(call: Call, input: Tensor, other: Tensor) -> Uses:
    """Y = X W, the parameter on the right."""
    if other.ndim != 2 or input.ndim < 2:
        return None
    return [(other, lambda b: Outer(call.factor(input), call.factor(b), call.size))]


def addmm(call: Call, input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1) -> Uses:
    """Y = bias + X W: what Hugging Face's Conv1D computes."""
    if beta != 1 or alpha != 1:
        return None
    bias = _summed(call, input, lambda b: b)
    return [(mat2, lambda b: Outer(call.factor(mat1), call.factor(b), call.size)), *bias]


def convolution(
    call: Call,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Uses:
    """Convolve in one, two or three dimensions."""
    dims = weight.ndim - 2
    if call.batch_dim != 0 or input.ndim != weight.ndim:
        return None
    kernel, steps, spread = tuple(weight.shape[2:]), _tuple(stride, dims), _tuple(dilation, dims)
    if padding == "valid":
        padding = 0
    around = (
        [(d * (k - 1) // 2, d * (k - 1) - d * (k - 1) // 2) for k, d in zip(kernel, spread, strict=True)]
        if padding == "same"
        else [(p, p) for p in _tuple(padding, dims)]
    )

    def of_weight(b: Tensor) -> LayerGradients:
        x = F.pad(input, [p for pair in reversed(around) for p in pair])
        # What lies beyond the last window is never seen.
        windows = Windows(x, call.size, groups, kernel, steps, spread)
        return Outer(Dense(_positions(b, call.size, groups)), windows, call.size, groups)

    return _with_bias_of_channels(call, weight, of_weight, bias)


def transposed_convolution(
    call: Call,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Uses:
    """Convolve the other way round: here the output is seen through windows, one per input position."""
    dims = weight.ndim - 2
    if call.batch_dim != 0 or input.ndim != weight.ndim:
        return None
    kernel, steps, spread = tuple(weight.shape[2:]), _tuple(stride, dims), _tuple(dilation, dims)

    def of_weight(b: Tensor) -> LayerGradients:
        y = F.pad(b, [p for p in reversed(_tuple(padding, dims)) for _ in range(2)])
        # Output padding adds places that no window need cover: cut what would make one window too many.
        needed = [(n - 1) * s + d * (k - 1) + 1 for n, s, d, k in zip(input.shape[2:], steps, spread, kernel)]  # noqa: B905
        for axis, length in enumerate(needed):
            y = y.narrow(2 + axis, 0, length)
        windows = Windows(y, call.size, groups, kernel, steps, spread)
        return Outer(Dense(_positions(input, call.size, groups)), windows, call.size, groups)

    return _with_bias_of_channels(call, weight, of_weight, bias)


def embedding(
    call: Call,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Uses:
    """Look tokens up; the padding token takes no gradient."""
    if max_norm is not None or scale_grad_by_freq:
        return None

    def of_weight(b: Tensor) -> LayerGradients:
        index, gradients = call.tokens(input.unsqueeze(-1)).squeeze(-1), call.tokens(b)
        return _looked_up(call, index, gradients, weight, padding_idx)

    return [(weight, of_weight)]


def embedding_bag(
    call: Call,
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Uses:
    """Sum or average the entries of bags of equal length."""
    if offsets is not None or max_norm is not None or scale_grad_by_freq or mode == "max" or call.batch_dim != 0:
        return None

    def of_weight(b: Tensor) -> LayerGradients:
        shares = torch.ones_like(input, dtype=b.dtype) if per_sample_weights is None else per_sample_weights
        if padding_idx is not None:
            shares = shares * (input != padding_idx % len(weight))
        if mode == "mean":
            shares = shares / shares.sum(dim=1, keepdim=True).clamp_min(1)
        bags = (shares[..., None] * b[:, None]).reshape(call.size, -1, b.shape[-1])
        return _looked_up(call, input.reshape(call.size, -1), bags, weight, padding_idx)

    return [(weight, of_weight)]


def layer_norm(
    call: Call,
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Uses:
    """Normalise over the last dimensions, then scale and shift."""
    normal = lambda: F.layer_norm(input, normalized_shape, eps=eps)  # noqa: E731
    return _scale_and_shift(call, normal, weight, bias)


def rms_norm(
    call: Call, input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Uses:
    """Divide by the root mean square, then scale."""
    return _scale_and_shift(call, lambda: F.rms_norm(input, normalized_shape, eps=eps), weight, None)


def group_norm(
    call: Call,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Uses:
    """Normalise groups of channels, then scale and shift each channel."""
    return _channelwise(call, lambda: F.group_norm(input, num_groups, eps=eps), weight, bias)


def batch_norm(
    call: Call,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Uses:
    """Normalise by stored statistics, then scale and shift each channel; in training mode examples would mix."""
    if training:
        return None
    normal = lambda: F.batch_norm(input, running_mean, running_var, eps=eps)  # noqa: E731
    return _channelwise(call, normal, weight, bias)


def add(call: Call, input: Any, other: Any, *, alpha: float = 1) -> Uses:
    """Add a parameter that is broadcast over the examples."""
    return _summed(call, input, lambda b: b) + _summed(call, other, lambda b: alpha * b)


def subtract(call: Call, input: Any, other: Any, *, alpha: float = 1) -> Uses:
    """Subtract a parameter, or from one."""
    return _summed(call, input, lambda b: b) + _summed(call, other, lambda b: -alpha * b)


def multiply(call: Call, input: Any, other: Any) -> Uses:
    """Multiply with a parameter that is broadcast over the examples."""
    return _summed(call, input, lambda b: b * other) + _summed(call, other, lambda b: b * input)


def divide(call: Call, input: Any, other: Any, *, rounding_mode: str | None = None) -> Uses:
    """Divide by a parameter, or one by something."""
    if rounding_mode is not None:
        return None
    return _summed(call, input, lambda b: b / other) + _summed(call, other, lambda b: -b * input / other**2)


def where(call: Call, condition: Any, input: Any, other: Any) -> Uses:
    """Choose between a parameter and something else, place by place; as a method the tensor stands first."""
    if condition.dtype != torch.bool:
        condition, input = input, condition
    return _summed(call, input, lambda b: b * condition) + _summed(call, other, lambda b: b * ~condition)


def expand(call: Call, input: Tensor, *sizes: Any, **named: Any) -> Uses:
    """Hand a copy of the parameter to every example."""
    return _summed(call, input, lambda b: b)


def repeat(call: Call, input: Tensor, *sizes: Any) -> Uses:
    """Hand a copy of the parameter to every example, where nothing else is repeated."""
    shape = (*(1,) * (call.output.ndim - input.ndim), *input.shape)
    rest = [n == m for d, (n, m) in enumerate(zip(shape, call.output.shape, strict=True)) if d != call.batch_dim]
    return _summed(call, input, lambda b: b) if all(rest) else None


RULES: Mapping[str, Callable[..., Uses]] = {
    "linear": linear,
    "matmul": matmul,
    "mm": matmul,
    "__matmul__": matmul,
    "addmm": addmm,
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), convolution),
    **dict.fromkeys(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), transposed_convolution),
    "embedding": embedding,
    "embedding_bag": embedding_bag,
    "layer_norm": layer_norm,
    "rms_norm": rms_norm,
    "group_norm": group_norm,
    "batch_norm": batch_norm,
    **dict.fromkeys(("add", "add_", "__iadd__", "__radd__"), add),
    **dict.fromkeys(("sub", "sub_"), subtract),
    "mul": multiply,
    "__rmul__": multiply,
    "div": divide,
    "true_divide": divide,
    "where": where,
    "expand": expand,
    "expand_as": expand,
    "broadcast_to": expand,
    "repeat": repeat,
}


def _summed(call: Call, value: Any, of: Callable[[Tensor], Tensor]) -> list:
    """Use a value that was broadcast: each example's gradient, summed to its shape."""
    if not isinstance(value, Tensor) or not call.spreads(value.shape):
        return []
    return [(value, lambda b: Direct(call.broadcast(of(b), value.shape)))]


def _scale_and_shift(call: Call, normal: Callable[[], Tensor], weight: Tensor | None, bias: Tensor | None) -> Uses:
    def flat(b: Tensor, shape: torch.Size) -> Tensor:  # (B, p)
        repeats = b.numel() // (call.size * math.prod(shape))
        return b.movedim(call.batch_dim, 0).reshape(call.size, repeats, math.prod(shape)).sum(dim=1)

    uses: list = []
    if weight is not None:
        uses.append((weight, lambda b: Direct(flat(b * normal(), weight.shape))))
    if bias is not None:
        uses.append((bias, lambda b: Direct(flat(b, bias.shape))))
    return uses


def _with_bias_of_channels(call: Call, weight: Tensor, of_weight: Maker, bias: Tensor | None) -> Uses:
    own: list = [] if bias is None else [(bias, lambda b: Direct(call.channels(b)))]
    return [(weight, of_weight), *own]


def _channelwise(call: Call, normal: Callable[[], Tensor], weight: Tensor | None, bias: Tensor | None) -> Uses:
    if call.batch_dim != 0:
        return None
    uses: list = []
    if weight is not None:
        uses.append((weight, lambda b: Direct(call.channels(b * normal()))))
    if bias is not None:
        uses.append((bias, lambda b: Direct(call.channels(b))))
    return uses


def _looked_up(call: Call, index: Tensor, gradients: Tensor, weight: Tensor, padding_idx: int | None) -> LayerGradients:
    if padding_idx is not None:
        gradients = gradients * (index != padding_idx % len(weight)).unsqueeze(-1)
    return Outer(OneHot(index.long(), len(weight)), Dense(gradients[:, None]), call.size)


def _positions(tensor: Tensor, size: int, groups: int) -> Tensor:  # (B·m, g·c, *s) -> (B, g, m·s, c)
    split = tensor.reshape(size, len(tensor) // size, groups, tensor.shape[1] // groups, -1)
    return split.permute(0, 2, 1, 4, 3).reshape(size, groups, -1, tensor.shape[1] // groups)


def _tuple(value: Any, dims: int) -> tuple[int, ...]:
    if isinstance(value, int):
        return (value,) * dims
    return tuple(value) * (dims if len(value) == 1 else 1)
