"""Products whose sums run in at least float32, whatever the type of the factors."""

import torch
from torch import Tensor


def wide_type(dtype: torch.dtype) -> torch.dtype:
    """Return the type sums run in: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def wide(tensor: Tensor) -> Tensor:
    """Bring a tensor to the type sums run in."""
    return tensor.to(wide_type(tensor.dtype))


def times(a: Tensor, b: Tensor) -> Tensor:
    """Multiply matrices, or batches of them, with sums in at least float32 and no wider copies on a GPU."""
    if a.is_cuda and a.dtype == b.dtype == torch.bfloat16:
        return (torch.mm if a.ndim == 2 else torch.bmm)(a, b, out_dtype=torch.float32)
    return wide(a) @ wide(b)
