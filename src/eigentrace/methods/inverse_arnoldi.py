"""The method of the paper's appendix: Arnoldi on the inverse curvature, each product an iterative solve."""

from dataclasses import dataclass, field
from typing import Any

from eigentrace.errors import InputError
from eigentrace.fits.projected_fit import DirectionsFit
from eigentrace.fits.weighted_directions import Block
from eigentrace.krylov.eigenpairs import top_eigenpairs
from eigentrace.krylov.iterate import arnoldi
from eigentrace.krylov.plan import IterationPlan, fitted_basis
from eigentrace.krylov.vectors import Basis
from eigentrace.methods.arnoldi import start_vector
from eigentrace.methods.lissa import Lissa
from eigentrace.methods.method import ready
from eigentrace.numeric.seeding import generator_of
from eigentrace.projection.directions import DenseDirections
from eigentrace.settings import check_counts, settings_of, settings_repr
from eigentrace.task.task import Task


@dataclass(frozen=True)
class InverseArnoldi:
    """Arnoldi on H⁻¹, from the paper's appendix: each product is an iterative solve. For comparison, not for use.

    Its scores correlate weakly with the effect of leaving an example out, whatever its solver: it keeps the directions
    of smallest curvature, along which gradients are small, and drops those of largest curvature, which hold most of
    the influence. The solver alone (`Lissa`) correlates strongly.
    """

    steps: int = 50
    """Number of products with H⁻¹ in the Krylov iteration."""
    keep: int = 10
    """K, the number of eigenpairs of H⁻¹ to keep, those of largest |λ|; at most `steps`."""
    solver: Lissa = field(default_factory=lambda: Lissa(depth=50))
    """Settings of the solver that computes each product; its `curvature` is the one inverted."""
    seed: int = 0
    """Seed of the start vector; the solver has its own."""

    __repr__ = settings_repr

    def __post_init__(self) -> None:
        check_counts(1, steps=self.steps, keep=self.keep)
        check_counts(0, seed=self.seed)
        if not isinstance(self.solver, Lissa):
            raise InputError(f"solver must be an eigentrace.Lissa, got {self.solver!r}.")
        if self.keep > self.steps:
            raise InputError(
                f"keep={self.keep} eigenpairs cannot be computed from steps={self.steps} products: keep must be at "
                "most steps. Raise steps, or lower keep."
            )

    def fit(self, task: Task, data: Any, *, num_train: int | None = None) -> DirectionsFit:
        """Compute the top eigenpairs of the inverse curvature; see `Method.fit` for the arguments."""
        task, data, _ = ready(task, data, num_train)
        layout = task.layout
        # Solves are not exact: the matrix is not symmetric, and the iteration cannot restart.
        plan = IterationPlan(
            layout.numel, layout.dtype, layout.device, self.steps, self.keep, Basis(), can_restart=False
        )
        basis = fitted_basis(plan)  # before the solver is prepared, which takes a while
        solved = self.solver.fit(task, data, num_train=num_train)
        task = solved.task
        start = start_vector(task, generator_of(self.seed))
        with task.session():
            krylov = arnoldi(lambda v: solved.solve(v[None])[0], start, self.steps, basis=basis)
            eigenpairs = top_eigenpairs(krylov, self.keep)
        directions = DenseDirections(eigenpairs.directions, task.layout)
        # Scores are multiplied by the eigenvalues of H⁻¹, where Arnoldi divides by those of H.
        block = Block(directions, eigenpairs.spectrum.eigenvalues)
        return DirectionsFit(task, (block,), settings_of(self), solved.num_train, has_curvature=True)
