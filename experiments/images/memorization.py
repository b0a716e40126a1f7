"""Measure memorisation by retraining on random subsets, and how well scores of one network predict it.

python -m experiments.images.memorization --parts digits                       # embedded digits, minutes on a CPU
python -m experiments.images.memorization --parts cifar_cut --data FOLDER      # a cut of CIFAR-10N, on a CPU
python -m experiments.images.memorization --parts cifar --data FOLDER          # all of it, on a GPU
python -m experiments.images.memorization --small                              # a toy of it
"""

import argparse
import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import eigentrace as et
from eigentrace import evaluate as ev
from eigentrace.demo.cnn import accuracy
from experiments.digits.parts.scores import once, timed
from experiments.images.parts.cifar import needed
from experiments.images.parts.memorised_page import ABOUT, MEASURES, VERDICT, figures, tables
from experiments.images.parts.memorised_problems import CIFAR, CIFAR_CUT, DIGITS, SMALL, Problem, Size, cifar, digits
from experiments.shared.frame import Experiment, Session, main
from experiments.shared.kept import name_of
from harness.measure import Cell, with_seconds

State = dict[str, Tensor]
Truth = dict[str, ev.Memorization]
_BATCH = 250
_BOOTSTRAPS = 1000
_LEVEL = 0.95


@dataclass(frozen=True)
class Trained:
    """A network trained on all examples."""

    model: nn.Module
    checkpoints: list[State]
    """Weights at evenly spread epochs, the last at the end of training."""


Method = Callable[[Trained], Any]
"""Makes a method, some of which use the checkpoints of the network."""


def measure_problem(name: str, make: Callable[[Session, Size], Problem], full: Size, session: Session) -> None:
    """Measure the memorisation of all examples, then compare every score with it."""
    size = replace(SMALL, is_cut=full.is_cut) if session.small else full
    problem = make(session, size)
    part = session.part(name, problem.title, {"size": repr(size)})
    examples = problem.inputs, problem.labels
    trainer = ev.ManyModels(problem.model, examples, examples, size.sgd)
    folder = session.settings.cache / name_of(f"memorization-{name}", size, *examples)

    def retrain() -> ev.Retrained:
        subsets = ev.Subsets.random(len(problem.labels), size.networks, size.fraction)
        return ev.retrain(trainer, subsets, seeds=1, cache=folder)

    found = once(lambda: with_seconds(retrain, session.device))
    truth = once(lambda: memorised(found()[0]))
    networks = once(lambda: [train(trainer, problem, size, seed) for seed in range(size.trainings)])
    part.cell("networks", lambda: _about(problem, networks(), *found()))
    for measure in MEASURES:
        values = partial(lambda measure: [truth()[measure].values], measure)
        part.cell(f"memorisation, {measure}", lambda values=values: _retrieved(values(), problem))  # type: ignore[misc]
    for score, make_method in methods(size).items():
        own = partial(lambda method: [self_influence(method(n), n, problem, size) for n in networks()], make_method)
        part.cell(score, lambda own=own: _compared(own(), truth(), problem))  # type: ignore[misc]


def memorised(retrained: ev.Retrained) -> Truth:
    """Return memorisation in loss and in probability, which is exp(-loss), from the same networks."""
    by_probability = ev.Retrained(retrained.masks, np.exp(-retrained.outputs), higher_is_worse=False)
    return {"probability": ev.memorization(by_probability), "loss": ev.memorization(retrained)}


def reliability(retrained: ev.Retrained) -> dict[str, float]:
    """Return the rank correlation of memorisation measured on half of the subsets with that on the other half.

    From the correlation r of halves, 2r/(1 + r) estimates that of the whole with as many new subsets (Spearman and
    Brown); no score can be expected to correlate by more than its root.
    """
    halves = [
        memorised(ev.Retrained(retrained.masks[start::2], retrained.outputs[start::2], retrained.higher_is_worse))
        for start in (0, 1)
    ]
    found = {}
    for measure in MEASURES:
        values = np.stack([half[measure].values for half in halves])
        values = values[:, ~np.isnan(values).any(axis=0)]
        r = float(ev.spearman(values[:1], values[1:])[0])
        found[f"reliability_{measure}"] = 2 * r / (1 + r)
    return found


def train(trainer: ev.ManyModels, problem: Problem, size: Size, seed: int) -> Trained:
    """Train one network on all examples, exactly as the trainer does, and keep checkpoints."""
    state, generator = trainer.start(seed)
    model = copy.deepcopy(problem.model).to(problem.inputs.device)
    model.load_state_dict(state)
    sgd = size.sgd
    optimizer = torch.optim.SGD(model.parameters(), sgd.lr, sgd.momentum, weight_decay=sgd.weight_decay)
    kept = {round(sgd.epochs * k / size.checkpoints) for k in range(1, size.checkpoints + 1)}
    checkpoints = []
    for epoch in range(1, sgd.epochs + 1):
        order = torch.randperm(len(problem.labels), generator=generator).to(problem.inputs.device)
        for rows in order.split(sgd.batch_size):
            optimizer.zero_grad()
            cross_entropy(model(problem.inputs[rows]), problem.labels[rows]).backward()
            optimizer.step()
        if epoch in kept:
            checkpoints.append({name: value.detach().clone() for name, value in model.state_dict().items()})
    return Trained(model.eval(), checkpoints)


def methods(size: Size) -> dict[str, Method]:
    """Return functions that make the method of a score for a network, by name of the score."""
    found: dict[str, Method] = {}
    for keep in size.keeps:
        truncated = et.Arnoldi(size.steps, keep, curvature="hessian", tail=None, sample=None, seed=0, compile=False)
        with_tail = et.Arnoldi(size.steps, keep, sample=None, seed=0, compile=False)
        found |= {f"Arnoldi, truncated, K={keep}": _always(truncated), f"Arnoldi, tail, K={keep}": _always(with_tail)}
    found |= {"TracIn, one checkpoint": _always(et.TracIn()), "loss": _always(et.Loss())}
    found[f"TracIn, {size.checkpoints} checkpoints"] = lambda network: et.TracIn(network.checkpoints)
    found[f"mean loss, {size.checkpoints} checkpoints"] = lambda network: et.MeanLoss(network.checkpoints)
    return found


def _always(method: Any) -> Method:
    return lambda network: method


def self_influence(method: Any, network: Trained, problem: Problem, size: Size) -> np.ndarray:  # (N,)
    """Fit a method to a network on all examples, and score these."""
    task = et.classification(network.model, l2=size.sgd.weight_decay)
    data = et.Data(torch.utils.data.TensorDataset(problem.inputs, problem.labels), batch_size=_BATCH)
    fitted = timed(lambda: method.fit(task, data), problem.inputs.device).value
    values: np.ndarray = fitted.self_influence(data).double().cpu().numpy()
    return values


def _about(problem: Problem, networks: list[Trained], retrained: ev.Retrained, seconds: float) -> Cell:
    truth = memorised(retrained)
    means = {
        key: float(np.mean([accuracy(n.model, inputs, labels) for n in networks]))
        for key, inputs, labels in (
            ("accuracy_given", problem.inputs, problem.labels),
            ("accuracy_test", problem.test_inputs, problem.test_labels),
        )
    }
    wrong = problem.is_wrong.numpy()
    cell: Cell = {
        "examples": len(wrong),
        "wrong": float(wrong.mean()),
        "parameters": sum(p.numel() for p in problem.model.parameters()),
        "subsets": len(retrained.masks),
        "undefined": truth["loss"].num_undefined,
        "seconds": seconds,
        **means,
        **reliability(retrained),
    }
    for measure, found in truth.items():
        cell |= {
            f"mean_{measure}": float(np.nanmean(found.values)),
            f"error_{measure}": float(np.nanmedian(found.error)),
        }
        cell |= {f"mean_wrong_{measure}": float(np.nanmean(found.values[wrong]))}
        cell |= {f"mean_right_{measure}": float(np.nanmean(found.values[~wrong]))}
    return cell


def _retrieved(values: list[np.ndarray], problem: Problem) -> Cell:
    """Measure how well values find the wrong labels, on average over networks."""
    found = []
    for each in values:
        there = ~np.isnan(each)
        found.append(ev.retrieval(each[there], problem.is_wrong.numpy()[there]))
    return {"auc": 100 * float(np.mean([f.auc for f in found])), "ap": 100 * float(np.mean([f.ap for f in found]))}


def _compared(values: list[np.ndarray], truth: Truth, problem: Problem) -> Cell:
    """Correlate the scores of every network with memorisation, and average over the networks."""
    cell: Cell = {}
    for measure, found in truth.items():
        there = ~np.isnan(found.values)
        mean, low, high = predicted(np.stack(values)[:, there], found.values[there])
        cell |= {measure: mean, f"{measure}_low": low, f"{measure}_high": high}
    return cell | _retrieved(values, problem)


def predicted(scores: np.ndarray, truth: np.ndarray) -> tuple[float, float, float]:  # (networks, N), (N,)
    """Return the mean rank correlation over networks, and its bootstrap interval over examples."""

    def mean(rows: np.ndarray) -> float:
        return float(ev.spearman(scores[:, rows], np.tile(truth[rows], (len(scores), 1))).mean())

    rng, size = np.random.default_rng(0), len(truth)
    draws = [mean(rng.integers(size, size=size)) for _ in range(_BOOTSTRAPS)]
    low, high = np.nanquantile(draws, [(1 - _LEVEL) / 2, (1 + _LEVEL) / 2])
    return mean(np.arange(size)), float(low), float(high)


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this experiment."""
    parser.add_argument("--cache", type=Path, default=Path("runs/experiments"), help="folder of the networks' outputs")


EXPERIMENT = Experiment(
    name="memorization",
    title="Memorisation, and how well scores predict it",
    about=ABOUT,
    parts={
        "digits": partial(measure_problem, "digits", digits, DIGITS),
        "cifar": partial(measure_problem, "cifar", cifar, CIFAR),
        "cifar_cut": partial(measure_problem, "cifar_cut", cifar, CIFAR_CUT),
    },
    tables=tables,
    figures=figures,
    options=options,
    verdict=VERDICT,
    needed=needed(lambda settings, part: True, {"digits": []}),
    area="images",
)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT, sys.argv[1:]))
