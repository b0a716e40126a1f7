"""TRAK, with its projector for machines without its CUDA extension."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from trak import TRAKer

from bench.peers.method import Fit
from bench.peers.problem import Problem

RIDGES = (0.0, 1e-2, 1e-1, 1.0, 10.0)
"""Ridges, as shares of the mean diagonal of the kernel."""


@dataclass
class _Trak:
    traker: Any
    problem: Problem
    ridges: dict[str, float]
    finalized: str

    @property
    def settings(self) -> tuple[str, ...]:
        return tuple(self.ridges)

    def self_scores(self, setting: str) -> Tensor:  # (N,)
        return self._scores(setting, self.problem.train_set, "self").diagonal()

    def cross_scores(self, setting: str) -> Tensor:  # (Q, N)
        return self._scores(setting, self.problem.query_set, "cross")

    def _scores(self, setting: str, targets: Dataset, name: str) -> Tensor:
        if setting != self.finalized:
            self.traker.score_computer.lambda_reg = self.ridges[setting]
            _finalize(self.traker)
            self.finalized = setting
        name = f"{name}-{self.settings.index(setting)}"
        for number, state in enumerate(self.problem.states):
            self.traker.start_scoring_checkpoint(name, state, number, len(targets))  # type: ignore[arg-type]
            for batch in DataLoader(targets, batch_size=self.problem.spec.batch):
                self.traker.score(batch, num_samples=len(batch[1]))
        return torch.as_tensor(self.traker.finalize_scores(name)).T


def trak(problem: Problem, folder: Path) -> Fit:
    """TRAK over all networks, in single precision."""
    traker = TRAKer(
        problem.model(),
        "image_classification",
        problem.num_train,
        save_dir=str(folder),
        device=problem.device.type,
        proj_dim=problem.spec.proj_dim,
        use_half_precision=False,
        logging_level=logging.ERROR,
    )
    for number, state in enumerate(problem.states):
        traker.load_checkpoint(state, model_id=number)
        for batch in DataLoader(problem.train_set, batch_size=problem.spec.batch):
            traker.featurize(batch, num_samples=len(batch[1]))
    grads = traker.saver.current_store["grads"]
    scale = float((grads**2).sum(0).mean())
    traker.finalize_features()
    ridges = {f"ridge {share:g}": share * scale for share in RIDGES}
    return _Trak(traker, problem, ridges, next(iter(ridges)))


def _finalize(traker: Any) -> None:
    """Compute the features with another ridge from the stored projected gradients."""
    for info in traker.saver.model_ids.values():
        info["is_finalized"] = 0
    traker.finalize_features()
