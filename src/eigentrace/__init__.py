"""Training-data attribution: which training examples taught a PyTorch model what it does."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from eigentrace.version import __version__ as __version__

if TYPE_CHECKING:
    from eigentrace.basis import Basis
    from eigentrace.compute import Compute
    from eigentrace.data import Data
    from eigentrace.fitted import Fitted
    from eigentrace.methods import (
        Arnoldi,
        ExactHessian,
        InverseArnoldi,
        Lissa,
        Loss,
        RandProj,
        RandSelect,
        TracIn,
    )
    from eigentrace.projected import load
    from eigentrace.ready import causal_lm, classification, seq2seq
    from eigentrace.task import Task

__all__ = [
    # what was trained, and on what
    "Task",
    "classification",
    "seq2seq",
    "causal_lm",
    "Data",
    # the method, and its rivals
    "Arnoldi",
    "Basis",
    "InverseArnoldi",
    "ExactHessian",
    "Lissa",
    "TracIn",
    "RandProj",
    "RandSelect",
    "Loss",
    # what a fit answers, how it is computed, and reading one back
    "Fitted",
    "Compute",
    "load",
]

# Names are loaded when they are first used: `eigentrace --help` must not wait seconds for torch.
_HOMES = {
    "Compute": "compute",
    "Data": "data",
    "Fitted": "fitted",
    "Basis": "basis",
    "load": "projected",
    "Task": "task",
    **dict.fromkeys(("classification", "seq2seq", "causal_lm"), "ready"),
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'eigentrace' has no attribute {name!r}")
    value = getattr(import_module(f"eigentrace.{_HOMES.get(name, 'methods')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
