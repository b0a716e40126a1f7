"""Ridge regression on the network's own gradients: what would the other examples call this one?"""

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
from eigentrace.settings import check_counts, check_not_negative, settings_of
from eigentrace.task.layout import normal
from eigentrace.task.task import Task

# Ridges that "auto" chooses from by leave-one-out error, as shares of the features' mean square length (which is 1).
RIDGES = (1e-1, 3e-2, 1e-2, 3e-3, 1e-3, 3e-4, 1e-4)
# Examples that it is chosen on.
_CHOSEN_ON = 8192


@dataclass(frozen=True)
class TangentRidge:
    """The given label against the one that all other examples predict, by regression on gradients of the logits.

    ψ(x) holds projected gradients of every logit, at unit length; ⟨ψ(x), ψ(z)⟩ is the tangent kernel of the network
    as it is. Ridge regression of the labels on ψ has its leave-one-out predictions in closed form. The score is the
    best other class's prediction less the given one's, example left out: high means suspicious. One final checkpoint
    is enough.
    """

    keep: int = 64
    """Gaussian directions that each logit's gradient is projected on."""
    outputs: int = 10
    """At most this many functions of the logits: the logits themselves, or random signs of them if there are more."""
    ridge: float | Literal["auto"] = "auto"
    """λ, a share of the features' mean square; "auto" takes the one of least leave-one-out error."""
    seed: int = 0
    """Fixes the directions and signs."""

    def __post_init__(self) -> None:
        check_counts(1, keep=self.keep, outputs=self.outputs)
        check_counts(0, seed=self.seed)
        if self.ridge != "auto":
            check_not_negative(ridge=self.ridge)
            if self.ridge == 0:
                raise InputError("ridge must be positive: without it the regression fits every label. Use 'auto'.")

    def fit(self, task: Task, data: Any, *, num_train: int | None = None) -> TangentFit:
        """Regress the labels of the training data on its features; see `Method.fit` for the arguments."""
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
        """Choose which functions of the logits are differentiated; a shift of all logits is not one."""
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
            raise InputError("The data is empty: at least one example is needed.")
        if self.ridge != "auto":
            return float(self.ridge), gram, moment
        psi, targets = (torch.cat(part) for part in zip(*kept, strict=True))
        return _least_error(gram, moment, psi, targets, len(data)), gram, moment


def _least_error(gram: Tensor, moment: Tensor, psi: Tensor, targets: Tensor, count: int) -> float:
    """Choose λ by the squared leave-one-out error of these examples; the larger of equals."""
    values, vectors = torch.linalg.eigh(gram)
    turned, turned_moment = psi @ vectors, vectors.T @ moment
    errors = []
    for ridge in RIDGES:
        inverse = 1 / (values.clamp_min(0) + ridge)
        own = (turned.square() * inverse).sum(dim=1) / count
        predicted = turned @ (inverse[:, None] * turned_moment)
        errors.append(float((left_out(predicted, targets, own) - targets).square().mean()))
    return RIDGES[min(range(len(RIDGES)), key=errors.__getitem__)]
