"""Captum's ArnoldiInfluenceFunction, TracInCP and TracInCPFast."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from captum.influence import TracInCP, TracInCPFast
from captum.influence._core.arnoldi_influence_function import ArnoldiInfluenceFunction  # has no public import path
from torch import Tensor, nn

from bench.peers.method import Fit
from bench.peers.problem import Problem

# Below the curvature of a memorised network: Captum's default of 0.1 ends the iteration there at once.
_ARNOLDI_TOL, _INVERSE_TOL = 1e-7, 1e-7


@dataclass(frozen=True)
class _Captum:
    influence: Any
    problem: Problem
    settings: tuple[str, ...]

    def self_scores(self, setting: str) -> Tensor:  # (N,)
        return self.influence.self_influence()

    def cross_scores(self, setting: str) -> Tensor:  # (Q, N)
        return self.influence.influence(self.problem.queries)


def arnoldi(problem: Problem, folder: Path) -> Fit:
    """Arnoldi on the Hessian's top eigenpairs, with gradients in batches."""
    torch.manual_seed(0)
    influence = ArnoldiInfluenceFunction(
        hessian_dataset=problem.curvature_set,
        projection_dim=problem.keep,
        arnoldi_dim=problem.spec.steps,
        arnoldi_tol=_ARNOLDI_TOL,
        hessian_inverse_tol=_INVERSE_TOL,
        hessian_reg=0.0,
        projection_on_cpu=False,
        **_shared(problem, sample_wise_grads_per_batch=True),
        checkpoint=_saved(problem, folder)[-1],
        layers=_layers(problem.model()),
    )
    return _Captum(influence, problem, (f"K={problem.keep}",))


def tracin(problem: Problem, folder: Path) -> Fit:
    """Gradient similarity over the checkpoints, with gradients in batches."""
    influence = TracInCP(
        **_shared(problem, sample_wise_grads_per_batch=True),
        checkpoints=_saved(problem, folder),
        layers=_layers(problem.model()),
    )
    return _Captum(influence, problem, (f"C={len(problem.checkpoints)}",))


def tracin_fast(problem: Problem, folder: Path) -> Fit:
    """Gradient similarity over the checkpoints, for the last layer only."""
    shared = _shared(problem)
    linear = [module for module in shared["model"].modules() if isinstance(module, nn.Linear)]
    influence = TracInCPFast(final_fc_layer=linear[-1], checkpoints=_saved(problem, folder), **shared)
    return _Captum(influence, problem, (f"C={len(problem.checkpoints)}",))


def _shared(problem: Problem, **options: bool) -> dict[str, Any]:
    return {
        "model": problem.model(),
        "train_dataset": problem.train_set,
        "checkpoints_load_func": _load,
        "loss_fn": nn.CrossEntropyLoss(reduction="sum"),
        "batch_size": problem.spec.batch,
        **options,
    }


def _saved(problem: Problem, folder: Path) -> list[str]:
    """Write the checkpoints to files, as Captum requires; the last is the network that is scored."""
    paths = []
    for number, state in enumerate([*problem.checkpoints[:-1], problem.states[0]]):
        path = folder / f"checkpoint-{number}.pt"
        torch.save(state, path)
        paths.append(str(path))
    return paths


def _load(model: nn.Module, path: str) -> float:
    model.load_state_dict(torch.load(path, map_location=next(model.parameters()).device, weights_only=True))
    model.eval()
    return 1.0


def _layers(model: nn.Module) -> list[str] | None:
    """Return the layers for which Captum's batched gradients are correct, if there are others; else None."""
    own = [(name, module) for name, module in model.named_modules() if list(module.parameters(recurse=False))]
    supported = [name for name, module in own if isinstance(module, nn.Linear | nn.Conv2d)]
    return None if len(supported) == len(own) else supported
