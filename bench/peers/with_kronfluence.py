"""Kronfluence's EK-FAC."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from kronfluence.analyzer import Analyzer, prepare_model
from kronfluence.arguments import FactorArguments, ScoreArguments
from kronfluence.task import Task
from torch import Tensor, nn

from bench.peers.method import Fit
from bench.peers.problem import Problem

DAMPINGS = {"0.1·mean": None, "1e-8": 1e-8, "1e-5": 1e-5, "1e-3": 1e-3, "1e-1": 1e-1, "1": 1.0}
"""Dampings: the heuristic of its paper first, then its default and larger ones."""


class _Classification(Task):
    def compute_train_loss(self, batch: Any, model: nn.Module, sample: bool = False) -> Tensor:
        images, labels = batch
        logits = model(images)
        if sample:
            with torch.no_grad():
                labels = torch.multinomial(logits.softmax(1), 1).flatten()
        return F.cross_entropy(logits, labels, reduction="sum")

    def compute_measurement(self, batch: Any, model: nn.Module) -> Tensor:
        return self.compute_train_loss(batch, model)


@dataclass(frozen=True)
class _Kronfluence:
    analyzer: Analyzer
    problem: Problem

    @property
    def settings(self) -> tuple[str, ...]:
        return tuple(f"damping {name}" for name in DAMPINGS)

    def self_scores(self, setting: str) -> Tensor:  # (N,)
        self.analyzer.compute_self_scores(train_dataset=self.problem.train_set, **self._shared(setting))
        return self.analyzer.load_self_scores(setting)["all_modules"]

    def cross_scores(self, setting: str) -> Tensor:  # (Q, N)
        self.analyzer.compute_pairwise_scores(
            query_dataset=self.problem.query_set,
            train_dataset=self.problem.train_set,
            per_device_query_batch_size=self.problem.spec.batch,
            **self._shared(setting),
        )
        return self.analyzer.load_pairwise_scores(setting)["all_modules"]

    def _shared(self, setting: str) -> dict[str, Any]:
        return {
            "scores_name": setting,
            "factors_name": "factors",
            "per_device_train_batch_size": self.problem.spec.batch,
            "score_args": ScoreArguments(damping_factor=DAMPINGS[setting.removeprefix("damping ")]),
            "overwrite_output_dir": True,
        }


def ekfac(problem: Problem, folder: Path) -> Fit:
    """EK-FAC of linear and convolutional layers, on labels sampled from the model."""
    torch.manual_seed(0)
    task = _Classification()
    analyzer = Analyzer(
        "peers",
        prepare_model(problem.model(), task),
        task,
        cpu=problem.device.type == "cpu",
        disable_tqdm=True,
        output_dir=str(folder),
    )
    analyzer.fit_all_factors(
        "factors",
        problem.train_set,
        per_device_batch_size=problem.spec.batch,
        factor_args=FactorArguments(strategy="ekfac"),
        overwrite_output_dir=True,
    )
    return _Kronfluence(analyzer, problem)
