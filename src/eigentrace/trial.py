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
    """Losses of the first examples of a fit, what tells these examples from others, and the form of their batch."""

    form: str
    """What batches are made of, in words."""
    losses: Tensor  # (n,) float64
    digests: np.ndarray | None  # (n,) uint64
    """None where examples cannot be told from others."""
    is_checked: bool = True
    """Whether the task at hand is known to give these losses; that of a loaded fit is not at first."""

    @staticmethod
    def read(record: dict[str, Any] | None) -> "Trial | None":
        """Read what `record` wrote; fits of earlier versions have none."""
        if record is None:
            return None
        losses = torch.tensor(record["losses"], dtype=torch.float64, device="cpu")
        digests = None if record["digests"] is None else np.array(record["digests"], dtype=np.uint64)
        return Trial(str(record["form"]), losses, digests, is_checked=False)

    def record(self) -> dict[str, Any]:
        """Say the same in JSON."""
        digests = None if self.digests is None else self.digests.tolist()
        return {"form": self.form, "losses": self.losses.tolist(), "digests": digests}

    def elsewhere(self) -> "Trial":
        """Return what is the same at other parameters: the form."""
        return Trial(self.form, self.losses[:0], None)

    def held(self, digests: np.ndarray) -> Tensor:  # (B,) -> (B,)
        """Return the loss that each of these examples had, NaN for one that was not among those tried."""
        own = [] if self.digests is None else self.digests.tolist()
        known = dict(zip(own, self.losses[: len(own)].tolist(), strict=True))
        found = [known.get(digest, torch.nan) for digest in digests.tolist()]
        return torch.tensor(found, dtype=torch.float64, device="cpu")


def another_loss(held: Tensor, here: Tensor) -> int | None:  # (B,), (B,)
    """Return where losses differ most from those held, if by more than rounding; NaN is one that is not known."""
    gaps = (here - held).abs().nan_to_num()
    if not len(gaps) or float(gaps.max()) <= _SAME_LOSS * max(float(held.nan_to_num().abs().max()), 1e-3):
        return None
    return int(gaps.argmax())
