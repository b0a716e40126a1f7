"""One rule per operation: how the per-example gradient of each parameter follows from the gradient of the output.

A rule takes a call and the arguments of the function. For each parameter among them it returns a function that turns
the gradient of the output into per-example gradients. A rule that does not apply returns None; another engine then
differentiates the parameter.
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
    """A function call whose output has the examples of a batch along one dimension, perhaps merged with others."""

    output: Tensor
    batch_dim: int
    size: int  # B

    def tokens(self, tensor: Tensor) -> Tensor:  # (B, T, width)
        """Move the examples to the front and flatten all dimensions between them and the last."""
        # reshape(-1) is undefined for tensors without elements.
        tokens = math.prod(tensor.shape[:-1]) // self.size
        return tensor.movedim(self.batch_dim, 0).reshape(self.size, tokens, tensor.shape[-1])

    def factor(self, tensor: Tensor) -> Dense:
        """Return a tensor as one factor of a sum of outer products over tokens."""
        return Dense(self.tokens(tensor)[:, None])

    def channels(self, tensor: Tensor) -> Tensor:  # (B·m, C, *) -> (B, C)
        """Sum the gradient of each example over all dimensions but the channels."""
        positions = math.prod(tensor.shape[2:])
        merged = tensor.reshape(self.size, len(tensor) // self.size, tensor.shape[1], positions)
        return merged.sum(dim=(1, 3))

    def is_shared(self, shape: torch.Size) -> bool:
        """Return whether a tensor of this shape is broadcast over the examples, rather than having a slice for each."""
        dim = self.batch_dim - self.output.ndim + len(shape)
        return dim < 0 or shape[dim] == 1

    def sum_to(self, tensor: Tensor, shape: torch.Size) -> Tensor:  # (B, p)
        """Sum the gradient of each example to the shape of the tensor that was broadcast."""
        shape = torch.Size([1] * (tensor.ndim - len(shape)) + list(shape))
        front = tensor.movedim(self.batch_dim, 0)
        rest = front.shape[1:]
        front = front.reshape(self.size, len(front) // self.size, *rest)
        kept = [n for d, n in enumerate(shape) if d != self.batch_dim]
        summed = [1, *(2 + d for d, (n, m) in enumerate(zip(kept, rest, strict=True)) if n == 1 and m != 1)]
        return front.sum(dim=summed).reshape(self.size, math.prod(shape))


def linear(call: Call, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Uses:
    """Differentiate Y = X Wᵀ + bias with any leading dimensions."""
    if weight.ndim != 2:
        return None
    bias_too = _broadcast(call, bias, lambda b: b)
    return [(weight, lambda b: Outer(call.factor(b), call.factor(input), call.size)), *bias_too]


def matmul(call: Call, input: Tensor, other: Tensor) -> Uses:
    """Differentiate Y = X W with the parameter W on the right."""
    if other.ndim != 2 or input.ndim < 2:
        return None
    return [(other, lambda b: Outer(call.factor(input), call.factor(b), call.size))]


def addmm(call: Call, input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1) -> Uses:
    """Differentiate Y = bias + X W, as computed by Hugging Face's Conv1D."""
    if beta != 1 or alpha != 1:
        return None
    bias = _broadcast(call, input, lambda b: b)
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
    """Differentiate a convolution in one, two or three dimensions."""
    dims = weight.ndim - 2
    if call.batch_dim != 0 or input.ndim != weight.ndim:
        return None
    kernel, strides, dilations = tuple(weight.shape[2:]), _tuple(stride, dims), _tuple(dilation, dims)
    if padding == "valid":
        padding = 0
    margins = (
        [(d * (k - 1) // 2, d * (k - 1) - d * (k - 1) // 2) for k, d in zip(kernel, dilations, strict=True)]
        if padding == "same"
        else [(p, p) for p in _tuple(padding, dims)]
    )

    def of_weight(b: Tensor) -> LayerGradients:
        x = F.pad(input, [p for pair in reversed(margins) for p in pair])
        windows = Windows(x, call.size, groups, kernel, strides, dilations)
        return Outer(Dense(_positions(b, call.size, groups)), windows, call.size, groups)

    return _with_channel_bias(call, weight, of_weight, bias)


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
    """Differentiate a transposed convolution, whose windows cover the output, one per input position."""
    dims = weight.ndim - 2
    if call.batch_dim != 0 or input.ndim != weight.ndim:
        return None
    kernel, strides, dilations = tuple(weight.shape[2:]), _tuple(stride, dims), _tuple(dilation, dims)

    def of_weight(b: Tensor) -> LayerGradients:
        y = F.pad(b, [p for p in reversed(_tuple(padding, dims)) for _ in range(2)])
        # Output padding adds positions that no window covers. Cut them off, as they may have room for another window.
        needed = [(n - 1) * s + d * (k - 1) + 1 for n, s, d, k in zip(input.shape[2:], strides, dilations, kernel)]  # noqa: B905
        for axis, length in enumerate(needed):
            y = y.narrow(2 + axis, 0, length)
        windows = Windows(y, call.size, groups, kernel, strides, dilations)
        return Outer(Dense(_positions(input, call.size, groups)), windows, call.size, groups)

    return _with_channel_bias(call, weight, of_weight, bias)


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
    """Differentiate an embedding lookup; the padding token has no gradient."""
    if max_norm is not None or scale_grad_by_freq:
        return None

    def of_weight(b: Tensor) -> LayerGradients:
        index, gradients = call.tokens(input.unsqueeze(-1)).squeeze(-1), call.tokens(b)
        return _lookup(call, index, gradients, weight, padding_idx)

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
    """Differentiate sums or means of the embeddings of bags of equal length."""
    if offsets is not None or max_norm is not None or scale_grad_by_freq or mode == "max" or call.batch_dim != 0:
        return None

    def of_weight(b: Tensor) -> LayerGradients:
        shares = torch.ones_like(input, dtype=b.dtype) if per_sample_weights is None else per_sample_weights
        if padding_idx is not None:
            shares = shares * (input != padding_idx % len(weight))
        if mode == "mean":
            shares = shares / shares.sum(dim=1, keepdim=True).clamp_min(1)
        bags = (shares[..., None] * b[:, None]).reshape(call.size, -1, b.shape[-1])
        return _lookup(call, input.reshape(call.size, -1), bags, weight, padding_idx)

    return [(weight, of_weight)]


def layer_norm(
    call: Call,
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Uses:
    """Differentiate the scale and shift of layer normalisation."""
    normalised = lambda: F.layer_norm(input, normalized_shape, eps=eps)  # noqa: E731
    return _scale_and_shift(call, normalised, weight, bias)


def rms_norm(
    call: Call, input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Uses:
    """Differentiate the scale of RMS normalisation."""
    return _scale_and_shift(call, lambda: F.rms_norm(input, normalized_shape, eps=eps), weight, None)


def group_norm(
    call: Call,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Uses:
    """Differentiate the scale and shift of group normalisation."""
    return _scale_and_shift_channels(call, lambda: F.group_norm(input, num_groups, eps=eps), weight, bias)


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
    """Differentiate the scale and shift of batch normalisation in evaluation mode; training mode mixes the examples."""
    if training:
        return None
    normalised = lambda: F.batch_norm(input, running_mean, running_var, eps=eps)  # noqa: E731
    return _scale_and_shift_channels(call, normalised, weight, bias)


def add(call: Call, input: Any, other: Any, *, alpha: float = 1) -> Uses:
    """Differentiate a sum with a parameter that is broadcast over the examples."""
    return _broadcast(call, input, lambda b: b) + _broadcast(call, other, lambda b: alpha * b)


def subtract(call: Call, input: Any, other: Any, *, alpha: float = 1) -> Uses:
    """Differentiate a difference with a broadcast parameter on either side."""
    return _broadcast(call, input, lambda b: b) + _broadcast(call, other, lambda b: -alpha * b)


def multiply(call: Call, input: Any, other: Any) -> Uses:
    """Differentiate an elementwise product with a broadcast parameter."""
    return _broadcast(call, input, lambda b: b * other) + _broadcast(call, other, lambda b: b * input)


def divide(call: Call, input: Any, other: Any, *, rounding_mode: str | None = None) -> Uses:
    """Differentiate a quotient with a broadcast parameter on either side."""
    if rounding_mode is not None:
        return None
    return _broadcast(call, input, lambda b: b / other) + _broadcast(call, other, lambda b: -b * input / other**2)


def where(call: Call, condition: Any, input: Any, other: Any) -> Uses:
    """Differentiate `torch.where(condition, input, other)`, or `input.where(condition, other)`."""
    if condition.dtype != torch.bool:
        condition, input = input, condition
    return _broadcast(call, input, lambda b: b * condition) + _broadcast(call, other, lambda b: b * ~condition)


def expand(call: Call, input: Tensor, *sizes: Any, **named: Any) -> Uses:
    """Differentiate an expansion of a parameter over the examples."""
    return _broadcast(call, input, lambda b: b)


def repeat(call: Call, input: Tensor, *sizes: Any) -> Uses:
    """Differentiate a repetition of a parameter over the examples, with no other dimension repeated."""
    shape = (*(1,) * (call.output.ndim - input.ndim), *input.shape)
    rest = [n == m for d, (n, m) in enumerate(zip(shape, call.output.shape, strict=True)) if d != call.batch_dim]
    return _broadcast(call, input, lambda b: b) if all(rest) else None


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


def _broadcast(call: Call, value: Any, local: Callable[[Tensor], Tensor]) -> list:
    """Return the use of a tensor that was broadcast over the examples; none for other arguments.

    `local` maps the gradient of the output to the gradient of the broadcast tensor, which is summed to its shape.
    """
    if not isinstance(value, Tensor) or not call.is_shared(value.shape):
        return []
    return [(value, lambda b: Direct(call.sum_to(local(b), value.shape)))]


def _scale_and_shift(call: Call, normalised: Callable[[], Tensor], weight: Tensor | None, bias: Tensor | None) -> Uses:
    def flat(b: Tensor, shape: torch.Size) -> Tensor:  # (B, p)
        repeats = b.numel() // (call.size * math.prod(shape))
        return b.movedim(call.batch_dim, 0).reshape(call.size, repeats, math.prod(shape)).sum(dim=1)

    uses: list = []
    if weight is not None:
        uses.append((weight, lambda b: Direct(flat(b * normalised(), weight.shape))))
    if bias is not None:
        uses.append((bias, lambda b: Direct(flat(b, bias.shape))))
    return uses


def _with_channel_bias(call: Call, weight: Tensor, of_weight: Maker, bias: Tensor | None) -> Uses:
    own: list = [] if bias is None else [(bias, lambda b: Direct(call.channels(b)))]
    return [(weight, of_weight), *own]


def _scale_and_shift_channels(
    call: Call, normalised: Callable[[], Tensor], weight: Tensor | None, bias: Tensor | None
) -> Uses:
    if call.batch_dim != 0:
        return None
    uses: list = []
    if weight is not None:
        uses.append((weight, lambda b: Direct(call.channels(b * normalised()))))
    if bias is not None:
        uses.append((bias, lambda b: Direct(call.channels(b))))
    return uses


def _lookup(call: Call, index: Tensor, gradients: Tensor, weight: Tensor, padding_idx: int | None) -> LayerGradients:
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
