"""What the loss gave for a few examples when a fit was made, by which a task is known again where the fit is loaded."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

# How far rounding may move losses, of the largest of those compared.
_SAME_LOSS = 0.1


@dataclass
class Trial:
    """Losses of the first examples of a fit, and what tells these examples from others."""

    losses: Tensor  # (n,) float64
    digests: np.ndarray  # (n,) uint64
    is_checked: bool = True
    """Whether the task at hand is known to give these losses; that of a loaded fit is not at first."""

    @staticmethod
    def read(record: dict[str, Any] | None) -> "Trial | None":
        """Read what `record` wrote; fits of earlier versions have none."""
        if record is None:
            return None
        losses = torch.tensor(record["losses"], dtype=torch.float64, device="cpu")
        return Trial(losses, np.array(record["digests"], dtype=np.uint64), is_checked=False)

    def record(self) -> dict[str, Any]:
        """Say the same in JSON."""
        return {"losses": self.losses.tolist(), "digests": self.digests.tolist()}

    def held(self, digests: np.ndarray) -> Tensor:  # (B,) -> (B,)
        """Return the loss that each of these examples had, NaN for one that was not among those tried."""
        known = dict(zip(self.digests.tolist(), self.losses.tolist(), strict=True))
        found = [known.get(digest, torch.nan) for digest in digests.tolist()]
        return torch.tensor(found, dtype=torch.float64, device="cpu")


def another_loss(held: Tensor, here: Tensor) -> int | None:  # (B,), (B,)
    """Return where losses differ most from those held, if by more than rounding; NaN is one that is not known."""
    gaps = (here - held).abs().nan_to_num()
    if not len(gaps) or float(gaps.max()) <= _SAME_LOSS * max(float(held.nan_to_num().abs().max()), 1e-3):
        return None
    return int(gaps.argmax())
