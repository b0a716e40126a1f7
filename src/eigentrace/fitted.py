"""What every method's fit can be asked, and the meaning of the answers: sign, unit, normalisation."""

from abc import ABC, abstractmethod
from typing import Any, Literal

import torch
from torch import Tensor

from eigentrace.compute import Compute
from eigentrace.data import Data, as_data
from eigentrace.distill import Spectrum
from eigentrace.errors import InputError, NumericalError, UnsupportedError
from eigentrace.reliability import Reliability
from eigentrace.task import Task

Normalize = Literal["gradient", "metric"] | None
Unit = Literal["nats"] | None


class Fitted(ABC):
    """A fitted method. It is immutable; asking never changes it, the task or the model.

    Scores have the paper's sign. Positive: x is a **proponent** of z, removing it raises the loss at z. Negative: an
    **opponent**.
    """

    task: Task
    num_train: int
    has_curvature: bool
    """Only scores with curvature estimate a change of loss, and so have a unit."""

    def self_influence(
        self, data: Any, *, normalize: Normalize = None, unit: Unit = None, compute: Compute | None = None
    ) -> Tensor:  # (N,)
        """Score each example against itself: high for outliers, wrong labels and memorised examples.

        Args:
            data: The examples, in any of the forms `fit` takes.
            normalize: None, or "gradient" to scale each gradient to unit length first.
            unit: None, or "nats" to divide by the number of training examples.
            compute: Engine, precision, memory and batch size of the pass.
        """
        data, compute = as_data(data), checked_compute(compute)
        self._check(normalize, unit)
        if normalize == "metric":
            raise InputError("Self-influence normalised in the metric is 1 for every example: use 'gradient' or None.")
        scores = self._self(data, queries=False, unit_gradients=normalize == "gradient", compute=compute)
        return scores / self._divisor(unit)

    def influence(
        self,
        train: Any,
        queries: Any,
        *,
        normalize: Normalize = None,
        unit: Unit = None,
        compute: Compute | None = None,
    ) -> Tensor:  # (Q, N)
        """Score every training example against every query, exactly.

        Args:
            train: The training examples.
            queries: The examples asked about; measured by the task's `measurement` if it has one.
            normalize: None, "gradient" (every gradient to unit length) or "metric" (cosine in the H⁻¹ metric).
            unit: None, or "nats": the predicted change of the query's loss when the example is removed.
            compute: Engine, precision, memory and batch size of the passes.
        """
        train, queries, compute = as_data(train), as_data(queries), checked_compute(compute)
        self._check(normalize, unit)
        scores = self._cross(train, queries, unit_gradients=normalize == "gradient", compute=compute)
        if normalize == "metric":
            of_train = self._self(train, queries=False, unit_gradients=False, compute=compute)
            of_queries = self._self(queries, queries=True, unit_gradients=False, compute=compute)
            scores = _cosine(scores, of_queries, of_train)
        return scores / self._divisor(unit)

    @property
    def reliability(self) -> Reliability | None:
        """Rank agreement of two fits on halves of the curvature sample, if it was asked for; see `Arnoldi`.

        It was measured with the settings of the fit, and stands for other cuts of it too.
        """
        found = getattr(self, "method", {}).get("agreement")
        return None if found is None else Reliability(**found)

    @abstractmethod
    def features(self, data: Any, *, queries: bool = False, compute: Compute | None = None) -> Tensor:  # (N, K)
        """Project each example's gradient on the rows: φ(x) = G·∇L(x)."""

    @abstractmethod
    def save(self, path: Any) -> None:
        """Write the fit to a new directory, to be read back by `eigentrace.load`."""

    @property
    @abstractmethod
    def spectrum(self) -> Spectrum:
        """Eigenvalues, residual bounds and how the iteration ended."""

    @abstractmethod
    def distill(self, keep: int | None = None, tail: Any = "same", positive_only: bool | None = None) -> "Fitted":
        """Return another cut of the same fit; nothing is computed again."""

    @property
    @abstractmethod
    def positive_metric(self) -> bool:
        """Tell whether every self-influence is positive by construction."""

    @abstractmethod
    def _self(self, data: Data, *, queries: bool, unit_gradients: bool, compute: Compute) -> Tensor: ...

    @abstractmethod
    def _cross(self, train: Data, queries: Data, *, unit_gradients: bool, compute: Compute) -> Tensor: ...

    def _check(self, normalize: Normalize, unit: Unit) -> None:
        if normalize not in (None, "gradient", "metric"):
            raise InputError(f"normalize must be None, 'gradient' or 'metric', got {normalize!r}.")
        if unit not in (None, "nats"):
            raise InputError(f"unit must be None or 'nats', got {unit!r}.")
        if unit == "nats" and not self.has_curvature:
            raise UnsupportedError(
                "This method has no curvature, so its scores are not changes of loss and have no unit. Use unit=None, "
                "or a method with curvature such as Arnoldi."
            )
        if unit == "nats" and normalize is not None:
            raise InputError(f"Scores normalised by {normalize!r} are ratios without a unit: use unit=None.")
        if normalize == "metric" and not self.positive_metric:
            raise NumericalError(
                "normalize='metric' needs a positive metric, and this fit has negative eigenvalues or promises nothing "
                "about them. For Arnoldi use fitted.distill(positive_only=True), a tail or curvature='gauss-newton'; "
                "for any method normalize='gradient'."
            )

    def _divisor(self, unit: Unit) -> int:
        return self.num_train if unit == "nats" else 1


def checked_compute(compute: Compute | None) -> Compute:
    """Return the settings of a pass, the default ones if none are given."""
    if compute is not None and not isinstance(compute, Compute):
        raise InputError(f"compute must be an eigentrace.Compute, got {compute!r}.")
    return compute or Compute()


def over(scores: Tensor, sizes: Tensor) -> Tensor:
    """Divide by norms or their squares, with 0 for an example whose gradient is zero."""
    return torch.where(sizes > 0, scores / sizes.clamp_min(torch.finfo(scores.dtype).tiny), 0.0)


def _cosine(scores: Tensor, of_queries: Tensor, of_train: Tensor) -> Tensor:
    scale = (of_queries.clamp_min(0).sqrt()[:, None] * of_train.clamp_min(0).sqrt()[None]).clamp_min(
        torch.finfo(scores.dtype).tiny
    )
    return torch.where(scores == 0, 0.0, scores / scale)
