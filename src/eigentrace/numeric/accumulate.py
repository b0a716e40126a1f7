"""Products whose sums run in at least float32, and quotients that are 0 where there is nothing to divide by."""

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


def over(scores: Tensor, sizes: Tensor) -> Tensor:
    """Divide by norms or their squares, with 0 for an example whose gradient is zero."""
    return torch.where(sizes > 0, scores / sizes.clamp_min(torch.finfo(scores.dtype).tiny), 0.0)
