"""Ridge regression of labels on gradients of the logits: which label do the other examples predict?"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from eigentrace.data import Data
from eigentrace.errors import InputError
from eigentrace.fits.fitted import checked_compute
from eigentrace.methods.label_agreement import Features, TangentFit, check_classifier, left_out
from eigentrace.methods.method import ready
from eigentrace.numeric.seeding import generator_of
from eigentrace.projection.directions import DenseDirections
from eigentrace.settings import check_counts, check_not_negative, settings_of, settings_repr
from eigentrace.task.layout import normal
from eigentrace.task.task import Task

# Ridges that "auto" chooses from by leave-one-out error, as shares of the features' mean square norm (which is 1).
RIDGES = (1e-1, 3e-2, 1e-2, 3e-3, 1e-3, 3e-4, 1e-4)
# Number of examples whose leave-one-out error is compared.
_CHOSEN_ON = 8192


@dataclass(frozen=True)
class TangentRidge:
    """Each label compared with the one predicted from all other examples, by ridge regression on logit gradients.

    The features ψ(x) are the projected gradients of the logits, scaled to unit norm; ⟨ψ(x), ψ(z)⟩ approximates the
    tangent kernel of the trained network. The leave-one-out predictions of a ridge regression of the labels on ψ have
    a closed form. The score is the largest of them among the other classes minus that of the given class: a high score
    is suspicious. One final checkpoint is enough.
    """

    keep: int = 64
    """Number of Gaussian directions that each logit's gradient is projected on."""
    outputs: int = 10
    """Largest number of functions of the logits to differentiate: the logits themselves, or if there are more classes,
    this many sums of the logits with random signs. Each takes one pass over the data."""
    ridge: float | Literal["auto"] = "auto"
    """λ, the positive regulariser, as a share of the features' mean square norm; "auto" chooses the one with the
    smallest leave-one-out error."""
    seed: int = 0
    """Seed of the directions and signs."""

    __repr__ = settings_repr

    def __post_init__(self) -> None:
        check_counts(1, keep=self.keep, outputs=self.outputs)
        check_counts(0, seed=self.seed)
        if self.ridge != "auto":
            check_not_negative(ridge=self.ridge)
            if self.ridge == 0:
                raise InputError(
                    f"ridge must be positive, got {self.ridge!r}: without it the regression fits every label. Use "
                    "'auto'."
                )

    def fit(self, task: Task, data: Any, *, num_train: int | None = None) -> TangentFit:
        """Fit the regression of the training labels on the features; see `Method.fit` for the arguments."""
        task, data, size = ready(task, data, num_train)
        generator = generator_of(self.seed)
        with task.session():
            classes = check_classifier(task, data, "TangentRidge")
            directions = normal((self.keep, task.layout.numel), generator, task.layout)
            features = Features(task, DenseDirections(directions, task.layout), self._functions(classes, generator))
            ridge, gram, moment = self._moments(features, data, generator)
        eye = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
        inverse = torch.linalg.inv(gram + ridge * eye)
        method = settings_of(self) | {"ridge": ridge}
        return TangentFit(task, features, inverse / len(data), inverse @ moment, method, size)

    def _functions(self, classes: int, generator: torch.Generator) -> Tensor:  # (F, classes), each sums to 0
        """Choose the functions of the logits to differentiate; their weights sum to 0, so shifts do not matter."""
        if classes <= self.outputs:
            return torch.eye(classes, dtype=torch.float64, device="cpu") - 1 / classes
        signs = torch.randint(0, 2, (self.outputs, classes), generator=generator, device="cpu").double() * 2 - 1
        return signs - signs.mean(dim=1, keepdim=True)

    def _moments(self, features: Features, data: Data, generator: torch.Generator) -> tuple[float, Tensor, Tensor]:
        gram: Tensor | float = 0.0
        moment: Tensor | float = 0.0
        held = torch.zeros(len(data), dtype=torch.bool, device="cpu")
        held[torch.from_numpy(data.sample(_CHOSEN_ON, generator))] = True
        kept: list[tuple[Tensor, Tensor]] = []
        for batch, psi, targets in features.of(data, checked_compute(None)):
            gram = gram + psi.T @ psi / len(data)
            moment = moment + psi.T @ targets / len(data)
            chosen = held[torch.from_numpy(batch.rows)].to(psi.device)
            kept.append((psi[chosen], targets[chosen]))
        if not isinstance(gram, Tensor) or not isinstance(moment, Tensor):
            raise InputError("The data is empty: pass at least one example.")
        if self.ridge != "auto":
            return float(self.ridge), gram, moment
        psi, targets = (torch.cat(part) for part in zip(*kept, strict=True))
        return _least_error(gram, moment, psi, targets, len(data)), gram, moment


def _least_error(gram: Tensor, moment: Tensor, psi: Tensor, targets: Tensor, count: int) -> float:
    """Choose the λ with the smallest squared leave-one-out error on these examples; in a tie, the largest."""
    values, vectors = torch.linalg.eigh(gram)
    turned, turned_moment = psi @ vectors, vectors.T @ moment
    errors = []
    for ridge in RIDGES:
        inverse = 1 / (values.clamp_min(0) + ridge)
        own = (turned.square() * inverse).sum(dim=1) / count
        predicted = turned @ (inverse[:, None] * turned_moment)
        errors.append(float((left_out(predicted, targets, own) - targets).square().mean()))
    return RIDGES[min(range(len(RIDGES)), key=errors.__getitem__)]
