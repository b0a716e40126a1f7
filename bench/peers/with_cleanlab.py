"""cleanlab's label quality scores, from predictions of five-fold cross-validation."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from cleanlab.rank import get_label_quality_scores
from torch import Tensor

from bench.peers.method import Fit
from bench.peers.networks import logits_of, seeded, train
from bench.peers.problem import Problem

FOLDS = 5


@dataclass(frozen=True)
class _Quality:
    probabilities: np.ndarray  # (N, classes)
    labels: np.ndarray  # (N,)
    settings: tuple[str, ...] = ("self_confidence", "normalized_margin")

    def self_scores(self, setting: str) -> Tensor:  # (N,)
        return -torch.from_numpy(get_label_quality_scores(self.labels, self.probabilities, method=setting))

    def cross_scores(self, setting: str) -> Tensor:
        raise NotImplementedError("label quality is not defined for pairs of examples")


def folds(problem: Problem, folder: Path) -> Fit:
    """Train five networks on four fifths of the data each, and predict the held-out fifth of each."""
    images, labels = problem.train
    order = torch.randperm(problem.num_train, generator=torch.Generator().manual_seed(0)).to(labels.device)
    logits = torch.zeros(problem.num_train, 10, device=labels.device)
    for fold, held_out in enumerate(order.chunk(FOLDS)):
        rest = torch.ones_like(labels, dtype=torch.bool)
        rest[held_out] = False
        model = seeded(problem.spec.build, fold).to(labels.device)
        train(model, images[rest], labels[rest], problem.spec.recipe, fold)
        logits[held_out] = logits_of(model, images[held_out])
    probabilities = logits.double().softmax(1).cpu().numpy()
    return _Quality(probabilities, labels.cpu().numpy())
