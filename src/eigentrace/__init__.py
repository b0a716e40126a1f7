"""Training-data attribution: which training examples taught a PyTorch model what it does."""

from eigentrace.data import Data
from eigentrace.fitted import Fitted
from eigentrace.krylov import Basis
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

__version__ = "0.1.0"

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
    # what a fit answers, and reading one back
    "Fitted",
    "load",
]
