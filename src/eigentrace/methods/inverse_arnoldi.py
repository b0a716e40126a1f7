"""The paper's appendix: Arnoldi on the inverse curvature, each product an iterative solve."""

from dataclasses import dataclass, field
from typing import Any

from eigentrace.errors import InputError
from eigentrace.fits.projected_fit import DirectionsFit
from eigentrace.fits.weighted_directions import Block
from eigentrace.krylov.eigenpairs import top_eigenpairs
from eigentrace.krylov.iterate import arnoldi
from eigentrace.methods.arnoldi import start_vector
from eigentrace.methods.lissa import Lissa
from eigentrace.numeric.seeding import generator_of
from eigentrace.projection.directions import DenseDirections
from eigentrace.settings import check_counts, settings_of
from eigentrace.task.task import Task


@dataclass(frozen=True)
class InverseArnoldi:
    """The paper's appendix: Arnoldi on H⁻¹, each product an iterative solve. A reference, not a recommendation."""

    steps: int = 50
    """Products with H⁻¹."""
    keep: int = 10
    """K, the eigenpairs of H⁻¹ kept."""
    solver: Lissa = field(default_factory=lambda: Lissa(depth=50))
    """How each product is solved."""
    seed: int = 0
    """Fixes the start vector."""

    def __post_init__(self) -> None:
        check_counts(1, steps=self.steps, keep=self.keep)
        check_counts(0, seed=self.seed)
        if not isinstance(self.solver, Lissa):
            raise InputError(f"solver must be an eigentrace.Lissa, got {self.solver!r}.")
        if self.keep > self.steps:
            raise InputError(f"keep={self.keep} eigenpairs cannot come from steps={self.steps} products: raise steps.")

    def fit(self, task: Task, data: Any, *, num_train: int | None = None) -> DirectionsFit:
        """Diagonalise the inverse curvature; see `Method.fit` for the arguments."""
        solved = self.solver.fit(task, data, num_train=num_train)
        task = solved.task
        start = start_vector(task, generator_of(self.seed))
        with task.session():
            krylov = arnoldi(lambda v: solved.solve(v[None])[0], start, self.steps)
            eigenpairs = top_eigenpairs(krylov, self.keep)
        directions = DenseDirections(eigenpairs.directions, task.layout)
        # Eigenvalues of H⁻¹ multiply, where those of H divide.
        block = Block(directions, eigenpairs.spectrum.eigenvalues)
        return DirectionsFit(task, (block,), settings_of(self), solved.num_train, has_curvature=True)
