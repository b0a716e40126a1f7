"""Autocast as explicit casts, which torch.func can differentiate.

Autocast acts below the transforms of torch.func: they differentiate a function without casts, whose backward pass then
gets types that its forward pass never had. Here the inputs of every function are cast one level above, to the type that
autocast would use, and derivatives include these casts like any other operation.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from eigentrace.data.batch import map_tensors

# Functions that autocast runs in the smaller type or in float32: CUDA's lists, without non-differentiable ones.
_SMALLER = frozenset({
    "linear", "matmul", "mm", "bmm", "mv", "addmm", "addbmm", "baddbmm", "addmv", "addr", "__matmul__",
    "__rmatmul__", "einsum", "prelu", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d",
    "conv_transpose3d", "scaled_dot_product_attention", "multi_head_attention_forward",
})  # fmt: skip
_WIDER = frozenset({
    "acos", "asin", "cosh", "sinh", "tan", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal",
    "rsqrt", "pow", "__pow__", "__rpow__", "softplus", "cumprod", "cumsum", "prod", "sum", "norm", "dist", "cdist",
    "renorm", "logsumexp", "softmax", "log_softmax", "softmin", "gumbel_softmax", "layer_norm", "group_norm",
    "rms_norm", "normalize", "local_response_norm", "cosine_similarity", "cross_entropy", "nll_loss",
    "binary_cross_entropy", "binary_cross_entropy_with_logits", "mse_loss", "l1_loss", "smooth_l1_loss",
    "huber_loss", "kl_div", "poisson_nll_loss", "gaussian_nll_loss", "hinge_embedding_loss", "margin_ranking_loss",
    "soft_margin_loss", "multi_margin_loss", "multilabel_margin_loss", "cosine_embedding_loss",
    "triplet_margin_loss",
})  # fmt: skip


class SeenCasts(TorchFunctionMode):
    """Replaces autocast, where it is enabled, by explicit casts of the inputs of functions.

    Args:
        device: The device type whose autocast is replaced.
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not torch.is_autocast_enabled(self.device):
            return func(*args, **kwargs)
        if func.__name__ in _SMALLER:
            args, kwargs = self._cast(torch.get_autocast_dtype(self.device), args, kwargs)
        elif func.__name__ in _WIDER:
            args, kwargs = self._cast(torch.float32, args, kwargs)
        with torch.autocast(self.device, enabled=False):
            return func(*args, **kwargs)

    def _cast(self, dtype: torch.dtype, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        # As in autocast, float64 is unchanged.
        types = (torch.float32, torch.bfloat16, torch.float16)

        def cast(tensor: Tensor) -> Tensor:
            return tensor.to(dtype) if tensor.dtype in types and tensor.device.type == self.device else tensor

        return map_tensors(cast, args), map_tensors(cast, kwargs)
