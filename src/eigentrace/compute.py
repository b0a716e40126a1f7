"""How gradients are projected: which engine, in which precision, within how much memory."""

import os
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Literal

import torch

from eigentrace.errors import InputError
from eigentrace.settings import check_counts

# What an engine may take beyond the model's own pass: small enough for a laptop, and on a GPU a share of what is free,
# since the model's activations need the rest.
_CPU_MEMORY = 512 * 2**20
_GPU_SHARE = 0.2


@dataclass(frozen=True, kw_only=True)
class Compute:
    """How examples go through the model. It decides speed, memory and rounding, never what is computed."""

    engine: Literal["auto", "layerwise", "forward", "reverse"] = "auto"
    """"auto" takes layerwise reverse mode where the model has rules for it, and another engine for the rest."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """"bf16" runs the model under autocast and multiplies rows in bfloat16: faster on a GPU, about two digits."""
    memory: int | float | None = None
    """Bytes (an integer) or share of the free memory (a fraction) beyond the model's own pass; None for a default."""
    batch: int | Literal["auto", "data"] = "auto"
    """Examples per pass: "data" as the data gives them, "auto" as many as fit a GPU. More than fit are split."""
    compile: bool = False
    """Compile the pass with `torch.compile` for each new shape of batch: minutes at first, faster from then on."""

    def __post_init__(self) -> None:
        if self.engine not in ("auto", "layerwise", "forward", "reverse"):
            raise InputError(f"engine must be 'auto', 'layerwise', 'forward' or 'reverse', got {self.engine!r}.")
        if self.precision not in ("fp32", "bf16"):
            raise InputError(f"precision must be 'fp32' or 'bf16', got {self.precision!r}.")
        if self.batch not in ("auto", "data"):
            check_counts(1, batch=self.batch)
        if not isinstance(self.compile, bool):
            raise InputError(f"compile must be True or False, got {self.compile!r}.")
        if self.memory is not None:
            _check_memory(self.memory)

    def budget(self, device: torch.device) -> int:
        """Bytes an engine may spend beyond the model's own pass."""
        if isinstance(self.memory, Integral):
            return int(self.memory)
        if self.memory is not None:
            return int(float(self.memory) * self.free(device))
        return int(_GPU_SHARE * self.free(device)) if device.type == "cuda" else _CPU_MEMORY

    @staticmethod
    def free(device: torch.device) -> int:
        """Bytes that could still be allocated on a device, what torch's allocator holds in reserve included."""
        if device.type == "cuda":
            reserve = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
            return torch.cuda.mem_get_info(device)[0] + reserve
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _check_memory(memory: object) -> None:
    whole = isinstance(memory, Integral) and not isinstance(memory, bool) and int(memory) > 0
    share = isinstance(memory, Real) and not isinstance(memory, Integral) and 0 < float(memory) < 1
    if not (whole or share):
        raise InputError(
            f"memory must be a number of bytes, or a fraction of the free memory between 0 and 1, got {memory!r}."
        )
