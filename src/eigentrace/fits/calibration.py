"""Calibration of scores in nats: mean self-influence under the measured curvature, over that of the fit."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from eigentrace.data import Data
from eigentrace.errors import MismatchError
from eigentrace.fits.weighted_directions import Weights
from eigentrace.numeric.seeding import generator_of
from eigentrace.progress import track
from eigentrace.projection import Job, project
from eigentrace.projection.directions import DenseDirections
from eigentrace.settings import counted
from eigentrace.task.derivatives import backward, leaves_of
from eigentrace.task.task import Task

Matvec = Callable[[Tensor], Tensor]

# Number of examples whose gradients are measured, and of products with the curvature: one for every 20 of the fit. Five
# already give the mean self-influence of a convex model to a few percent.
_EXAMPLES = 1024
_STEPS_PER_PRODUCT, _MOST_PRODUCTS = 20, 10


@dataclass(frozen=True)
class Calibration:
    """How scores in nats compare with the curvature that was measured outside the directions of a fit.

    A tail assumes one eigenvalue δ for all directions that are not kept. Their curvature is usually below δ, so that
    scores in nats are too small, by about `ratio` on average. It refers to training to convergence: training that stops
    early changes losses by less.
    """

    ratio: float
    """Mean self-influence under the measured curvature, a lower bound of it, divided by that of the fit."""
    examples: int
    """Number of examples whose gradients were measured."""
    products: int
    """Number of products with the curvature."""

    def __str__(self) -> str:
        return (
            f"By the measured curvature, self-influence is on average about {self.ratio:.3g} times that of this fit, "
            f"or more ({counted(self.examples, 'example')}, {counted(self.products, 'product')})."
        )


@dataclass(frozen=True)
class GradientMoments:
    """Gradients of a sample, along the eigenvectors of a fit and outside: enough to calibrate every cut of it."""

    energies: Tensor  # (K,) float64, the mean of φ² along every eigenvector of the fit
    outside: float
    """The mean squared norm of gradients outside the eigenvectors."""
    inverse: float
    """A lower bound of the mean of ⟨r, H⁻¹r⟩, with r a gradient outside the eigenvectors; NaN if H is not positive."""
    examples: int
    products: int

    def calibration(self, eigenvalues: Tensor, weights: Weights, coordinates: Tensor | None) -> Calibration | None:
        """Calibrate a cut; None if the curvature is not positive.

        Args:
            eigenvalues: All eigenvalues of the fit (K,).
            weights: The weights of the cut.
            coordinates: The mean squares of the coordinates that the cut uses.
        """
        if not bool((eigenvalues > 0).all()) or not math.isfinite(self.inverse):
            return None
        measured = float((self.energies / eigenvalues).sum()) + self.inverse
        total = float(self.energies.sum()) + self.outside
        fitted = float(self.energies[weights.index] @ weights.direction) + weights.identity * total
        if coordinates is not None and len(weights.coordinate):
            fitted += float(coordinates @ weights.coordinate)
        return Calibration(measured / fitted, self.examples, self.products) if fitted > 0 else None

    def tensors(self) -> dict[str, Tensor]:
        """Return all fields as named tensors, for a file."""
        numbers = [self.outside, self.inverse, self.examples, self.products]
        return {"energies": self.energies, "numbers": torch.tensor(numbers, dtype=torch.float64, device="cpu")}

    @staticmethod
    def of_tensors(tensors: Mapping[str, Tensor], num_directions: int) -> "GradientMoments":
        """Restore moments from the tensors of a file, after checking that they belong to the fit."""
        energies, numbers = tensors["energies"], tensors["numbers"]
        if energies.shape != (num_directions,) or numbers.shape != (4,):
            raise MismatchError(
                f"The saved gradient moments have shapes {tuple(energies.shape)} and {tuple(numbers.shape)}, expected "
                f"({num_directions},) and (4,). The file was edited or belongs to another fit: save the fit again."
            )
        outside, inverse, examples, products = numbers.tolist()
        return GradientMoments(energies, outside, inverse, int(examples), int(products))


def num_products(steps: int) -> int:
    """Return the number of products of a calibration after so many of the fit."""
    return max(1, min(_MOST_PRODUCTS, steps // _STEPS_PER_PRODUCT))


def gradient_moments(
    task: Task, data: Data, matvec: Matvec, directions: DenseDirections, steps: int, seed: int
) -> GradientMoments:
    """Measure gradients of the curvature sample, by one pass over some examples and a few products.

    With random signs, the sum v of all gradients has E[⟨v, Av⟩] = Σ ⟨g(x), Ag(x)⟩ for every matrix A. So one vector
    tells how curved the space is along gradients outside the directions; Gauss quadrature by a few Lanczos steps gives
    a lower bound of ⟨v, H⁻¹v⟩ there (Golub and Meurant, 1994).

    Args:
        task: The task, at the parameters of the fit.
        data: The curvature sample.
        matvec: Multiplies the curvature with a vector (P,).
        directions: All eigenvectors of the fit.
        steps: Number of products of the fit.
        seed: Seed of the examples and signs.
    """
    generator = generator_of(seed)
    data = data.take(data.sample(min(_EXAMPLES, len(data)), generator))
    energies, squares = torch.zeros(directions.count, dtype=torch.float64, device="cpu"), 0.0
    for _, found in project(Job.of(task, "losses", directions, norms=True), data, "Calibrating"):
        energies += found.features.double().square().sum(dim=0).cpu()
        squares += float(found.squares().double().sum())
    energies, squares = energies / len(data), squares / len(data)
    count = num_products(steps)
    probe = _outside(_signed_sum(task, data, generator), directions)
    outside = max(0.0, squares - float(energies.sum()))
    # What is left of gradients inside the span is rounding.
    is_empty = directions.count == task.layout.numel or outside <= torch.finfo(probe.dtype).eps * squares
    if is_empty:
        return GradientMoments(energies, 0.0, 0.0, len(data), 0)
    harmonic = _inverse(lambda v: _outside(matvec(v), directions), probe, count)
    return GradientMoments(energies, outside, outside * harmonic, len(data), count)


def _signed_sum(task: Task, data: Data, generator: torch.Generator) -> Tensor:  # (P,)
    """Return the sum of the gradients of all examples, each with a random sign."""
    total = torch.zeros_like(task.vector)
    for batch in data.batches():
        values, leaves = task.place(batch.values), leaves_of(task.params)
        signs = 2 * torch.randint(0, 2, (len(batch),), generator=generator, device="cpu") - 1
        with torch.enable_grad():
            losses = task.losses(leaves, values)
            found = backward((losses * signs.to(losses)).sum(), leaves)
        total += task.layout.flatten(found)
    return total


def _outside(v: Tensor, directions: DenseDirections) -> Tensor:  # (P,) -> (P,)
    """Return the part of a vector that is orthogonal to the directions."""
    v = v.clone()
    for number in range(directions.count):  # one by one: several may not fit in memory in the type of the model
        direction = directions.dense(number, number + 1)[0]
        v -= (direction @ v) * direction
    return v


def _inverse(matvec: Matvec, v: Tensor, steps: int) -> float:
    """Return a lower bound of ⟨v, A⁻¹v⟩/⟨v, v⟩, by Gauss quadrature; NaN if A is not positive.

    Lanczos iteration keeps three vectors: in so few steps, no orthogonality is lost that would matter here.
    """
    T = torch.zeros(steps, steps, dtype=torch.float64, device="cpu")
    q, previous, beta, size = v / v.norm(), torch.zeros_like(v), 0.0, steps
    for step in track(range(steps), "Calibrating", steps):
        w = matvec(q) - beta * previous
        alpha = float(q @ w)
        w = w - alpha * q
        T[step, step] = alpha
        beta = float(w.norm())
        if step + 1 == steps or beta <= 1e-6 * float(T.abs().max()):
            size = step + 1
            break
        T[step, step + 1] = T[step + 1, step] = beta
        previous, q = q, w / beta
    values, vectors = torch.linalg.eigh(T[:size, :size])
    return float((vectors[0].square() / values).sum()) if bool((values > 0).all()) else math.nan
