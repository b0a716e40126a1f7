"""Influence by solving with the curvature itself, preconditioned by a fit."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from eigentrace.curvature.operator import Curvature, resolve_kind, working_form
from eigentrace.data import Data
from eigentrace.errors import EigentraceWarning, InputError
from eigentrace.fits.solved_scores import solved_scores
from eigentrace.fits.weighted_directions import Norm
from eigentrace.krylov.solve import PLANNED_ROUNDS, Known, Rows, held, solve
from eigentrace.numeric.rank_correlation import spearman
from eigentrace.numeric.seeding import generator_of
from eigentrace.projection.engine import Compute
from eigentrace.settings import check_above_zero, check_counts, counted, settings_repr
from eigentrace.task.task import Task

# Without a record of the training, the damping is this share of the mean eigenvalue: a guess.
GUESSED_SHARE = 10.0
# Rank correlation of the scores with those of one round less below which a warning is issued.
_SETTLED = 0.98
# rounds="converged": the relative residual at the end, and the most rounds.
_TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-5}
_MOST_ROUNDS = 10_000
# Vectors of P numbers besides the basis of a solve, per query.
_BESIDES = 6


@dataclass(frozen=True)
class Refine:
    """How influence is refined by products with the curvature: (H + D)x = g is solved for each query's gradient g."""

    rounds: int | Literal["converged"] = 3
    """Products with the curvature per query; `Refined.agreement` says whether rankings have settled. "converged" goes
    on until the residual is small."""
    damping: float | Literal["auto"] = "auto"
    """D: a number, for a multiple of the identity; or "auto" for that of the training (`Task(training=...)`). Without a
    record of the training, "auto" is a guess, with a warning."""
    sample: int | None = 8192
    """Number of the training examples that the curvature is computed on, drawn once; None for all."""
    curvature: Literal["gauss-newton", "hessian"] = "gauss-newton"
    """The matrix H; the Hessian only where it is positive definite with its damping."""
    seed: int = 0
    """Seed of the sample."""

    __repr__ = settings_repr

    def __post_init__(self) -> None:
        if isinstance(self.rounds, str) and self.rounds != "converged":
            raise InputError(f"rounds must be a whole number of at least 1 or 'converged', got {self.rounds!r}.")
        if not isinstance(self.rounds, str):
            check_counts(1, rounds=self.rounds)
        if self.damping != "auto":
            check_above_zero(damping=self.damping)
        if self.sample is not None:
            check_counts(1, sample=self.sample)
        check_counts(0, seed=self.seed)
        if self.curvature not in ("gauss-newton", "hessian"):
            raise InputError(f"curvature must be 'gauss-newton' or 'hessian', got {self.curvature!r}.")

    @staticmethod
    def of(value: Any) -> "Refine":
        """Return the settings that `refine=` of `influence` stands for: itself, or a number of rounds."""
        return value if isinstance(value, Refine) else Refine(value)


@dataclass(frozen=True)
class Refined:
    """Refined scores, and how far they have settled."""

    scores: Tensor = field(repr=False)  # (Q, N)
    residuals: Tensor = field(repr=False)  # (Q,)
    """‖g − (H + D)x‖ / ‖g‖ of each query."""
    agreement: Tensor = field(repr=False)  # (Q,)
    """Rank correlation of the scores of each query with those of one round less."""
    num_products: int
    """Products with the curvature, for all queries together."""
    is_guess: bool
    """Whether the damping was guessed."""

    def __repr__(self) -> str:
        counts = counted(len(self.residuals), "query"), counted(self.num_products, "product")
        return (
            f"<Refined: {', '.join(counts)}, residual {float(self.residuals.max()):.2g}, "
            f"rank agreement with the round before {float(self.agreement.mean()):.3f}>"
        )


def refined(
    task: Task,
    preconditioner: Callable[[Tensor], Rows],
    mean: float,
    whole: Data,
    train: Data,
    queries: Data,
    settings: Refine,
    norm: Norm,
    compute: Compute,
) -> Refined:
    """Solve for the gradients of all queries, in blocks that fit in memory, and score the training examples.

    Args:
        task: The task of the fit.
        preconditioner: Returns the multiplication by the inverse of the fit's curvature plus a diagonal (P,).
        mean: The mean eigenvalue of the fit's curvature.
        whole: The training examples, from which the curvature sample is drawn.
        train: The examples to score.
        queries: The queries.
        settings: How to refine.
        norm: Whether gradients are scaled to unit length.
        compute: Engine, precision, memory and batch size of the passes.
    """
    damping, is_guess = _damping(task, settings, mean)
    converges = settings.rounds == "converged"
    tolerance = _TOLERANCE[task.layout.dtype] if converges else 0.0
    with task.session():
        curvature = _curvature(task, whole, settings)
        vector = task.layout.numel * task.layout.dtype.itemsize
        solver = _Solver(
            lambda v: curvature.matmat(v) + damping * v,
            preconditioner(damping),
            _MOST_ROUNDS if converges else int(settings.rounds),
            tolerance,
            max(4, compute.budget(task.layout.device) // vector),
        )
        most = solver.at_once * vector
        scores, before = solved_scores(task, solver, train, queries, norm=norm, compute=compute, each=2, most=most)
    found = Refined(
        scores,
        torch.cat(solver.residuals).cpu(),
        torch.from_numpy(spearman(scores.double().numpy(), before.double().numpy())),
        solver.num_products,
        is_guess,
    )
    _warn_unless_settled(found, settings, tolerance)
    return found


@dataclass
class _Solver:
    """Solves for one block of gradients after another, and collects what is reported about them."""

    multiply: Rows
    precondition: Rows
    rounds: int
    tolerance: float
    room: int
    """Number of vectors (P,) that fit in memory."""
    residuals: list[Tensor] = field(default_factory=list)
    num_products: int = 0
    known: Known | None = None
    """The space of the block before, which the next one goes on with."""

    @property
    def at_once(self) -> int:
        """Number of gradients in a block."""
        return max(1, self.room // (2 * min(self.rounds, PLANNED_ROUNDS) + _BESIDES))

    def _taken(self) -> Known | None:
        known, self.known = self.known, None
        return known

    def __call__(self, right: Tensor) -> Tensor:  # (q, P) -> (2q, P)
        """Return the solutions, and those of one round less."""
        found = solve(
            self.multiply,
            self.precondition,
            right,
            self.rounds,
            tolerance=self.tolerance,
            room=self.room,
            known=self._taken,
        )
        if self.rounds <= PLANNED_ROUNDS:  # more would soon fill the room with this space and those of others
            most = held(self.room, self.rounds, len(right))
            self.known = Known(found.known.basis[:most].clone(), found.known.images[:most].clone())
        self.residuals.append(found.residuals)
        self.num_products += found.num_products
        return torch.cat([found.vectors, found.before])


def _curvature(task: Task, whole: Data, settings: Refine) -> Curvature:
    rows = None if settings.sample is None else whole.sample(settings.sample, generator_of(settings.seed))
    curvature = Curvature(task, whole, rows, resolve_kind(settings.curvature, task))
    return replace(curvature, form=working_form(curvature, curvature.first_batch()))


def _damping(task: Task, settings: Refine, mean: float) -> tuple[Tensor, bool]:  # (P,)
    """Return the damping of each parameter, and whether it is a guess."""
    layout = task.layout
    if settings.damping == "auto" and (recorded := recorded_damping(task)) is not None:
        return recorded, False
    is_guess = settings.damping == "auto"
    value = _guessed(mean, "the refined scores", "set Refine(damping=...)") if is_guess else float(settings.damping)
    return torch.full((layout.numel,), value, dtype=layout.dtype, device=layout.device), is_guess


def scalar_damping(task: Task, mean: float, what: str, otherwise: str) -> float:
    """Return the damping of the training, its mean over parameters, or a guess, with a warning.

    Args:
        task: The task.
        mean: The mean eigenvalue of the curvature.
        what: What is damped, for the warning.
        otherwise: What to do besides recording the training, for the warning.
    """
    found = recorded_damping(task)
    return _guessed(mean, what, otherwise) if found is None else float(found.double().mean())


def recorded_damping(task: Task) -> Tensor | None:  # (P,)
    """Return the damping of the training for each parameter; None without a record of it."""
    if task.training is None:
        return None
    return task.training.damping(task.layout, has_penalty=any(task.l2.values()))


def _guessed(mean: float, what: str, otherwise: str) -> float:
    value = GUESSED_SHARE * mean
    warnings.warn(
        f"The damping of {what} is a guess, {value:.2g}: {GUESSED_SHARE:g} × the mean eigenvalue of the fit. That of "
        f"the training is better: pass training=eigentrace.Training(...) to the task, or {otherwise}.",
        EigentraceWarning,
        stacklevel=5,
    )
    return value


def _warn_unless_settled(found: Refined, settings: Refine, tolerance: float) -> None:
    largest = float(found.residuals.max())
    if settings.rounds == "converged" and not largest <= 10 * tolerance:
        warnings.warn(
            f"The solve did not converge: the largest residual is {largest:.2g} of the gradient's length, and "
            f"{tolerance:.0e} was expected. Use a larger damping, or a model in float64 (model.double()); "
            "a number of rounds instead of 'converged' is faster.",
            EigentraceWarning,
            stacklevel=4,
        )
    mean = float(found.agreement.nanmean())
    if settings.rounds != "converged" and mean < _SETTLED:
        warnings.warn(
            f"The last round still changed the rankings: they agree with those before at {mean:.3f} (Spearman, mean of "
            f"{counted(len(found.agreement), 'query')}; {_SETTLED} or more is settled). Use more rounds than "
            f"{settings.rounds}, or a larger damping.",
            EigentraceWarning,
            stacklevel=4,
        )
