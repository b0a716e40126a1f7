"""Training-data attribution: which training examples taught a PyTorch model what it does."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from eigentrace.version import __version__ as __version__

if TYPE_CHECKING:
    from eigentrace.augmented import FlipsAndShifts
    from eigentrace.basis import Basis
    from eigentrace.callbacks import LossHistory, LossTracker, loss_callback
    from eigentrace.cleaning import clean, find_label_issues
    from eigentrace.compute import Compute
    from eigentrace.data import Data
    from eigentrace.decisions import Decisions
    from eigentrace.ensemble import Ensemble, load
    from eigentrace.exporting import export
    from eigentrace.fitted import Fitted
    from eigentrace.health import check
    from eigentrace.methods import (
        Arnoldi,
        AugmentedLoss,
        ExactHessian,
        InverseArnoldi,
        Lissa,
        Loss,
        MeanLoss,
        RandProj,
        RandSelect,
        Support,
        TangentRidge,
        TracIn,
    )
    from eigentrace.ready import causal_lm, classification, seq2seq
    from eigentrace.reliability import Reliability, rank_agreement
    from eigentrace.run import Run, open_run
    from eigentrace.scoring import score
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
    # scores of single examples, without curvature
    "Loss",
    "MeanLoss",
    "AugmentedLoss",
    "FlipsAndShifts",
    "Support",
    "TangentRidge",
    # losses collected while training
    "LossTracker",
    "LossHistory",
    "loss_callback",
    # what a fit answers, how sure it is, how it is computed, several as one, and reading one back
    "Fitted",
    "Reliability",
    "rank_agreement",
    "Ensemble",
    "Compute",
    "load",
    # a corpus, scored on disk
    "score",
    "open_run",
    "Run",
    "check",
    # acting on it
    "clean",
    "find_label_issues",
    "Decisions",
    "export",
]

# Names are loaded when they are first used: `eigentrace --help` must not wait seconds for torch.
_HOMES = {
    "Compute": "compute",
    "FlipsAndShifts": "augmented",
    "Data": "data",
    "Fitted": "fitted",
    "Basis": "basis",
    **dict.fromkeys(("Ensemble", "load"), "ensemble"),
    "Task": "task",
    **dict.fromkeys(("Run", "open_run"), "run"),
    "score": "scoring",
    "check": "health",
    **dict.fromkeys(("clean", "find_label_issues"), "cleaning"),
    "Decisions": "decisions",
    "export": "exporting",
    **dict.fromkeys(("LossTracker", "LossHistory", "loss_callback"), "callbacks"),
    **dict.fromkeys(("Reliability", "rank_agreement"), "reliability"),
    **dict.fromkeys(("classification", "seq2seq", "causal_lm"), "ready"),
}


# Rooms that are asked for by their own name.
_ROOMS = ("evaluate",)


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return import_module(f"eigentrace.{name}")
    if name not in __all__:
        raise AttributeError(f"module 'eigentrace' has no attribute {name!r}")
    value = getattr(import_module(f"eigentrace.{_HOMES.get(name, 'methods')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_ROOMS})
