"""Measure how well scores predict retraining: with tails, stored features and ensembles, in several training regimes.

python -m bench.fidelity                          # everything: minutes on a GPU, hours on a CPU
python -m bench.fidelity --regimes mlp,logistic   # results merge
python -m bench.fidelity --parts ekfac            # only some of the methods
python -m bench.fidelity --small                  # 200 examples, to see that all runs
"""

import argparse
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

import eigentrace as et
from bench.fidelity_page import (
    DELTAS,
    EKFAC_CELL,
    FACTORS,
    KS,
    REGIMES,
    ROUNDS,
    SHARES,
    SIZES,
    STORED_TAILS,
    TAILS,
    damped_cell,
    grid_cell,
    pairs_cell,
    refined_cell,
    render,
    stored_cell,
    tail_cell,
)
from bench.peers import truth
from bench.peers.problem import Problem, Spec, make_problem
from bench.peers.problems import PROBLEMS, SMALL
from eigentrace.errors import EigentraceWarning
from eigentrace.evaluate import Retrained, lds
from eigentrace.fits.eigen_fit import EigenFit
from eigentrace.fits.ekfac_fit import EKFACFit
from harness.command import carried_out, choices, result_options, say, start
from harness.measure import Cell, attempt
from harness.record import Recorder

PARTS = ("gradient", "ekfac", "pairs", "refine", "refine-damping", "refine-arnoldi", "arnoldi", "ensembles")

_BOOTSTRAP = 200
# K of the cells on stored features and ensembles, and the number of results of a shortlist.
_K, _TOP, _SHORTLIST, _ASKED = 100, 20, 200, 50
_GRID_FROM = 50
"""The smallest K to which the goal for δ applies."""


def specs(small: bool) -> dict[str, Spec]:
    """Return the problem of each regime: two of the comparison with peers, and three other trainings of the network."""
    source = SMALL if small else PROBLEMS
    found = {"logistic": source["mnist-lr"], "mlp": source["mnist-mlp"]}
    for name, (lr, epochs) in REGIMES.items():
        recipe = replace(found["mlp"].recipe, lr=lr, epochs=min(epochs, 2) if small else epochs)
        found[name] = replace(found["mlp"], name=f"mnist-{name}", recipe=recipe, models=1)
    return found


def main(argv: Sequence[str]) -> int:
    """Run the command line; return the number of failures."""
    settings = _parser().parse_args(argv)

    def measure(path: Path) -> int:
        run, failures = start("bench.fidelity", settings, argv), 0
        cache = settings.cache / "small" if settings.small else settings.cache
        for name in settings.regimes:
            spec = specs(settings.small)[name]
            problem = make_problem(spec, None, cache, run.device)
            if truth.read_truth(truth.place(cache, spec.name), problem) is None:
                truth.make_truth(problem, cache, small=settings.small)
            facts = {"title": name, "parameters": problem.num_parameters, "settings": spec.settings}
            recorder = Recorder(run, path, name, facts)
            regime = Regime(problem, truth.read_truth(truth.place(cache, spec.name), problem), recorder)
            failures += regime.measure(settings.parts)
        return failures

    return carried_out("fidelity", settings, measure, render)


class Regime:
    """One training regime, with all that is measured about it."""

    def __init__(self, problem: Problem, retrained: Retrained, recorder: Recorder) -> None:
        self.problem, self.retrained, self.recorder = problem, retrained, recorder
        # On a GPU, one batch with all of this small dataset is fastest.
        size = problem.num_train if problem.device.type == "cuda" else problem.spec.batch
        self.train = et.Data(problem.train_set, batch_size=size)
        self.queries = et.Data(problem.query_set, batch_size=size)
        most = problem.spec.steps // 2
        self.ks = [k for k in KS if k <= most] or [max(1, most)]
        self.k = min(_K, self.ks[-1])
        self.failures = 0

    def measure(self, parts: Sequence[str]) -> int:
        """Measure the cells of some parts; return the number of failures."""
        if "gradient" in parts:
            self._cell("gradient", lambda: self._fidelity(self._gradients(0)))
        if "ekfac" in parts:
            self._ekfac()
        if "pairs" in parts:
            self._pairs()
        if any(part.startswith("refine") for part in parts):
            self._refined(parts)
        if "arnoldi" in parts:
            self._arnoldi()
        if "ensembles" in parts and self.problem.spec.models > 1:
            self._ensembles()
        return self.failures

    def _ekfac(self) -> None:
        fitted = et.EKFAC(sample=None).fit(et.classification(self.problem.at(0).model()), self.train)
        self._cell(EKFAC_CELL, lambda: self._of_ekfac(fitted, _BOOTSTRAP))
        for share in SHARES:
            damped = fitted.damped(share * fitted.metric.mean)
            self._cell(damped_cell(share), partial(self._of_ekfac, damped, 1))

    def _of_ekfac(self, fitted: EKFACFit, bootstrap: int) -> Cell:
        found = self._fidelity(fitted.influence(self.train, self.queries), bootstrap)
        return found | {"delta": fitted.damping, "share": fitted.damping / fitted.metric.mean}

    def _pairs(self) -> None:
        """Correct EK-FAC by eigenpairs, with its own damping and with that of the training; solve with them."""
        training = self._training()
        task = et.classification(self.problem.at(0).model(), training=training)
        method = et.Arnoldi(self.problem.spec.steps, self.ks[-1], tail="ekfac", sample=None, compile=False)
        fitted = cast(EKFACFit, method.fit(task, self.train))
        for damping, fit in (("training", fitted), ("ekfac", fitted.damped(0.5 * fitted.metric.mean))):
            for keep in self.ks:
                self._cell(pairs_cell(damping, keep), partial(self._of_ekfac, fit.distill(keep), _BOOTSTRAP))
        for rounds in ROUNDS:
            cell = partial(self._of_refined, fitted.distill(self.k), et.Refine(rounds, sample=None))
            self._cell(f"{refined_cell(rounds)}/pairs", cell)

    def _refined(self, parts: Sequence[str]) -> None:
        """Solve with the damping of the training, and with multiples of it."""
        training = self._training()
        task = et.classification(self.problem.at(0).model(), training=training)
        fitted = et.EKFAC(sample=None).fit(task, self.train)
        for rounds in ROUNDS if "refine" in parts else ():
            self._cell(refined_cell(rounds), partial(self._of_refined, fitted, et.Refine(rounds, sample=None)))
        own = float(training.damping(task.layout)[0])
        for share in FACTORS if "refine-damping" in parts else ():
            settings = et.Refine(ROUNDS[-1], damping=share * own, sample=None)
            self._cell(refined_cell(ROUNDS[-1], share), partial(self._of_refined, fitted, settings, 1))
        if "refine-arnoldi" in parts:
            arnoldi = et.Arnoldi(self.problem.spec.steps, self.k, sample=None, compile=False).fit(task, self.train)
            for rounds in ROUNDS:
                cell = partial(self._of_refined, arnoldi, et.Refine(rounds, sample=None))
                self._cell(f"{refined_cell(rounds)}/arnoldi", cell)

    def _training(self) -> et.Training:
        recipe = self.problem.spec.recipe
        steps = recipe.epochs * -(-self.problem.num_train // recipe.batch)
        return et.Training(recipe.lr * steps, recipe.momentum, weight_decay=recipe.weight_decay)

    def _of_refined(self, fitted: et.Fitted, settings: et.Refine, bootstrap: int = _BOOTSTRAP) -> Cell:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", EigentraceWarning)  # of few rounds, which are measured here
            began = time.perf_counter()
            found = fitted.refined(self.train, self.queries, settings)
            seconds = time.perf_counter() - began
        more = {"products": found.num_products, "agreement": float(found.agreement.mean()), "seconds": seconds}
        return self._fidelity(found.scores, bootstrap) | more

    def _arnoldi(self) -> None:
        fitted = self._fit(0)
        for keep, tail in product(self.ks, TAILS):
            self._cell(tail_cell(tail, keep), partial(self._of, fitted.distill(keep, tail)))
        for keep, delta in product(self.ks, DELTAS):
            if keep >= _GRID_FROM:
                self._cell(grid_cell(keep, delta), partial(self._of, fitted.distill(keep, delta), bootstrap=1))
        held = 0 if fitted.coordinates is None else fitted.coordinates.count
        for size, tail in product((size for size in SIZES if size <= held), STORED_TAILS):
            self._cell(stored_cell(tail, self.k, size), partial(self._of_stored, fitted.distill(self.k, tail), size))

    def _fit(self, index: int) -> EigenFit:
        spec = self.problem.spec
        task = et.classification(self.problem.at(index).model())
        wanted = min(max(SIZES), self.problem.num_parameters)
        method = et.Arnoldi(steps=spec.steps, keep=self.ks[-1], sample=None, coordinates=wanted, compile=False)
        return cast(EigenFit, method.fit(task, self.train))

    def _gradients(self, index: int) -> Tensor:  # (Q, N)
        task = et.classification(self.problem.at(index).model())
        return et.TracIn().fit(task, self.train).influence(self.train, self.queries)

    def _of(self, fitted: EigenFit, bootstrap: int = _BOOTSTRAP) -> Cell:
        found = self._fidelity(fitted.influence(self.train, self.queries), bootstrap)
        return found | {"delta": fitted.delta}

    def _of_stored(self, fitted: EigenFit, size: int) -> Cell:
        """Measure scores from stored features, and whether their shortlists contain the strongest examples."""
        stored = fitted.stored(coordinates=size)
        features = stored.features(self.train)
        found = self._fidelity(stored.from_features(features, stored.features(self.queries, queries=True)))
        asked = self.queries.take(list(range(min(_ASKED, len(self.queries)))))
        top, few = min(_TOP, len(self.train)), min(_SHORTLIST, len(self.train))
        ranked = stored.influence_topk(self.train, asked, top, features=features, shortlist=few)
        exact = fitted.influence(self.train, asked).topk(top, dim=1).indices
        overlap = (ranked.proponents[:, :, None] == exact[:, None, :]).any(dim=2).float().mean()
        more = {"bytes": stored.bytes_per_example, "captured": stored.captured, "overlap": 100 * float(overlap)}
        return found | more

    def _ensembles(self) -> None:
        """Average scores over all networks, which were trained from different seeds."""
        indices = range(self.problem.spec.models)
        fits = [self._fit(index) for index in indices]
        self._cell("gradient/ensemble", lambda: self._fidelity(torch.stack([*map(self._gradients, indices)]).mean(0)))
        for tail, keep in product(TAILS, self.ks[-2:]):
            members = [fitted.distill(keep, tail) for fitted in fits]
            self._cell(f"{tail_cell(tail, keep)}/ensemble", partial(self._of_ensemble, members))

    def _of_ensemble(self, members: Sequence[EigenFit]) -> Cell:
        scores = et.Ensemble(members).influence(self.train, self.queries)
        return self._fidelity(scores) | {"models": len(members)}

    def _fidelity(self, scores: Tensor, bootstrap: int = _BOOTSTRAP) -> Cell:  # (Q, N)
        found = lds(scores, self.retrained, num_bootstrap=bootstrap)
        low, high = found.interval
        interval = {} if bootstrap == 1 else {"lds_low": 100 * low, "lds_high": 100 * high}
        return {"lds": 100 * found.mean} | interval

    def _cell(self, name: str, work: Callable[[], Cell]) -> None:
        cell = self.recorder.add(name, attempt(work))
        self.failures += "failed" in cell
        text = cell["failed"] if "failed" in cell else f"LDS {cell['lds']:.1f}"
        text += f", overlap {cell['overlap']:.1f}" if "overlap" in cell else ""
        say(f"{self.recorder.model:18} {name:28} {text}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.fidelity", description="Scores against retraining.")
    every = list(specs(small=False))
    parser.add_argument("--regimes", type=choices(*every), default=every, help=",".join(every))
    parser.add_argument("--parts", type=choices(*PARTS), default=PARTS, help=",".join(PARTS))
    parser.add_argument("--small", action="store_true", help="200 examples and a few steps, to see that all runs")
    parser.add_argument("--device", type=torch.device, help="cuda where there is one, else cpu")
    parser.add_argument("--cache", type=Path, default=Path("runs/peers"), help="keeps trained networks")
    result_options(parser)
    parser.set_defaults(seconds=0.0, profile=False)
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
