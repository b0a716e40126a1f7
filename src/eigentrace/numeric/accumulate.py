"""Matrix products accumulated in at least float32, and division that returns 0 for a divisor of 0."""

import torch
from torch import Tensor


def wide_type(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which to accumulate sums: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def wide(tensor: Tensor) -> Tensor:
    """Convert a tensor to the dtype of its sums: at least float32."""
    return tensor.to(wide_type(tensor.dtype))


def times(a: Tensor, b: Tensor) -> Tensor:
    """Multiply matrices or batches of matrices, accumulating in at least float32.

    On a GPU, bfloat16 operands are not copied to float32.
    """
    if a.is_cuda and a.dtype == b.dtype == torch.bfloat16:
        return (torch.mm if a.ndim == 2 else torch.bmm)(a, b, out_dtype=torch.float32)
    return wide(a) @ wide(b)


def over(scores: Tensor, sizes: Tensor) -> Tensor:
    """Divide scores by norms or squared norms; return 0 where the divisor is 0."""
    return torch.where(sizes > 0, scores / sizes.clamp_min(torch.finfo(scores.dtype).tiny), 0.0)
