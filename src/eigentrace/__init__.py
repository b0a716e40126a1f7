"""Training-data attribution for PyTorch: find the training examples that influenced a prediction."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from eigentrace.version import __version__ as __version__

if TYPE_CHECKING:
    from eigentrace.cleaning.decisions import Decisions
    from eigentrace.cleaning.export import export
    from eigentrace.cleaning.thresholds import clean, find_label_issues
    from eigentrace.data import Data
    from eigentrace.fits.ensemble import Ensemble
    from eigentrace.fits.fitted import Fitted
    from eigentrace.fits.load import load
    from eigentrace.fits.refine import Refine
    from eigentrace.fits.reliability import Reliability, rank_agreement
    from eigentrace.krylov.vectors import Basis
    from eigentrace.methods.arnoldi import Arnoldi
    from eigentrace.methods.ekfac import EKFAC
    from eigentrace.methods.exact import ExactHessian
    from eigentrace.methods.inverse_arnoldi import InverseArnoldi
    from eigentrace.methods.lissa import Lissa
    from eigentrace.methods.loss_history import LossHistory, LossTracker, loss_callback
    from eigentrace.methods.losses import AugmentedLoss, FlipsAndShifts, Loss, MeanLoss
    from eigentrace.methods.similarity import RandProj, RandSelect, TracIn
    from eigentrace.methods.support import Support
    from eigentrace.methods.tangent import TangentRidge
    from eigentrace.progress import show_progress
    from eigentrace.projection.engine import Compute
    from eigentrace.runs.run import Run, open_run
    from eigentrace.runs.score import score
    from eigentrace.store.check import check
    from eigentrace.task.recording import TrainingRecord, training_callback
    from eigentrace.task.task import Task
    from eigentrace.task.tasks import causal_lm, classification, seq2seq
    from eigentrace.task.training_record import Training

__all__ = [
    # the trained model and its data
    "Task",
    "classification",
    "seq2seq",
    "causal_lm",
    "Training",
    "TrainingRecord",
    "training_callback",
    "Data",
    # attribution methods
    "Arnoldi",
    "Basis",
    "EKFAC",
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
    # losses recorded during training
    "LossTracker",
    "LossHistory",
    "loss_callback",
    # fits: scores, reliability, compute settings, ensembles, loading and progress
    "Fitted",
    "Reliability",
    "rank_agreement",
    "Ensemble",
    "Compute",
    "Refine",
    "load",
    "show_progress",
    # scores of a corpus, stored on disk
    "score",
    "open_run",
    "Run",
    "check",
    # cleaning the data
    "clean",
    "find_label_issues",
    "Decisions",
    "export",
]

# Names are imported on first use, so that `eigentrace --help` does not wait seconds for torch.
_HOMES = {
    "Data": "data",
    "Task": "task.task",
    **dict.fromkeys(("classification", "seq2seq", "causal_lm"), "task.tasks"),
    "Arnoldi": "methods.arnoldi",
    "Basis": "krylov.vectors",
    "EKFAC": "methods.ekfac",
    "InverseArnoldi": "methods.inverse_arnoldi",
    "ExactHessian": "methods.exact",
    "Lissa": "methods.lissa",
    **dict.fromkeys(("TracIn", "RandProj", "RandSelect"), "methods.similarity"),
    **dict.fromkeys(("Loss", "MeanLoss", "AugmentedLoss", "FlipsAndShifts"), "methods.losses"),
    "Support": "methods.support",
    "TangentRidge": "methods.tangent",
    **dict.fromkeys(("LossTracker", "LossHistory", "loss_callback"), "methods.loss_history"),
    "Training": "task.training_record",
    **dict.fromkeys(("TrainingRecord", "training_callback"), "task.recording"),
    "Fitted": "fits.fitted",
    "Refine": "fits.refine",
    **dict.fromkeys(("Reliability", "rank_agreement"), "fits.reliability"),
    "Ensemble": "fits.ensemble",
    "Compute": "projection.engine",
    "load": "fits.load",
    "show_progress": "progress",
    **dict.fromkeys(("Run", "open_run"), "runs.run"),
    "score": "runs.score",
    "check": "store.check",
    **dict.fromkeys(("clean", "find_label_issues"), "cleaning.thresholds"),
    "Decisions": "cleaning.decisions",
    "export": "cleaning.export",
}
# Subpackages available as attributes.
_PACKAGES = ("evaluate",)


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return import_module(f"eigentrace.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'eigentrace' has no attribute {name!r}")
    value = getattr(import_module(f"eigentrace.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *_PACKAGES, *(name for name in globals() if name.startswith("__"))})
