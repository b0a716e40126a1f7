"""The attribution methods: settings that know how to fit."""

from eigentrace.methods.arnoldi import Arnoldi, InverseArnoldi
from eigentrace.methods.exact import ExactHessian
from eigentrace.methods.gradient import Loss, RandProj, RandSelect, TracIn
from eigentrace.methods.lissa import Lissa
from eigentrace.methods.losses import AugmentedLoss, MeanLoss
from eigentrace.methods.support import Support
from eigentrace.methods.tangent import TangentRidge

__all__ = [
    "Arnoldi",
    "AugmentedLoss",
    "ExactHessian",
    "InverseArnoldi",
    "Lissa",
    "Loss",
    "MeanLoss",
    "RandProj",
    "RandSelect",
    "Support",
    "TangentRidge",
    "TracIn",
]
