"""The attribution methods: settings that know how to fit."""

from eigentrace.methods.arnoldi import Arnoldi, InverseArnoldi
from eigentrace.methods.exact import ExactHessian
from eigentrace.methods.gradient import Loss, RandProj, RandSelect, TracIn
from eigentrace.methods.lissa import Lissa

__all__ = ["Arnoldi", "ExactHessian", "InverseArnoldi", "Lissa", "Loss", "RandProj", "RandSelect", "TracIn"]
