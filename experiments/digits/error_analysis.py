"""Check both lemmas of the paper's error analysis on a network with an exact Hessian.

python -m experiments.digits.error_analysis            # embedded digits, minutes on a CPU
python -m experiments.digits.error_analysis --small    # a toy of it
"""

import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from eigentrace.demo.cnn import accuracy
from eigentrace.demo.digits import load_digits
from experiments.digits.parts import lemmas, noise
from experiments.digits.parts.error_page import ABOUT, BATCHES, CLAIMS, GAUSSIAN, VERDICT, figures, tables
from experiments.digits.parts.large_network import stream
from experiments.digits.parts.lemmas import (
    Eigen,
    first_order_variance,
    isotropic_noise,
    isotropic_variance,
    missed,
    quadratic,
    solved,
    truncated,
    truncation_bounds,
)
from experiments.digits.parts.noise import NoisyDigits, noisy
from experiments.digits.parts.small_network import Recipe, gradient_norm, network, objective, stem, trained
from experiments.shared.frame import Experiment, Part, Session, main
from experiments.shared.kept import keep as keep_file
from harness.files import made_once
from harness.measure import Cell

SEED = 0
_STEP = 0.01
"""ε of the first lemma."""
_EDGES = (0, 10, 30, 100, 300, 1000)
"""Ranks that end a band of eigenvalues; the last band ends with the last eigenvalue."""


@dataclass(frozen=True)
class Size:
    """Sizes of the experiment."""

    digits: int = 1000
    recipe: Recipe = field(default_factory=Recipe)
    block: int = 50
    """Digits of the smallest mini-batch; larger ones are several of these blocks, whose Hessians are stored."""
    keeps: tuple[int, ...] = (1, 3, 10, 30, 100, 300, 1000, 2000)
    """k of the first lemma."""
    examples: int = 64
    """Training digits whose removal is the linear term of Q."""
    shifted: int = 4
    """The number of these for which the training objective itself is evaluated."""
    queries: int = 8
    """Test digits whose gradients are the vectors u."""
    batches: tuple[int, ...] = (1, 16, 256, 65_536)
    """Blocks per mini-batch, drawn with replacement."""
    dampings: tuple[float, ...] = (0.0, 0.1, 3.0)
    """Numbers added to all eigenvalues."""
    draws: int = 20


SMALL = Size(
    digits=120,
    recipe=Recipe(2, epochs=20, batch_size=60, num_checkpoints=1, iterations=60),
    block=20,
    keeps=(1, 10, 100),
    examples=6,
    shifted=1,
    queries=2,
    batches=(1, 10_000),
    dampings=(0.0, 0.5),
    draws=6,
)


@dataclass(frozen=True)
class Subject:
    """The trained network with the Hessians of disjoint blocks of its digits, all in float64."""

    digits: NoisyDigits
    model: nn.Sequential
    iterations: int
    size: Size
    blocks: Tensor  # (blocks, P, P), with the penalty

    @cached_property
    def hessian(self) -> Tensor:  # (P, P)
        """The exact Hessian of all digits."""
        return self.blocks.mean(dim=0)

    @cached_property
    def whole(self) -> Eigen:
        """All eigenpairs; the last is the shift of all output biases, which changes nothing and has eigenvalue 0."""
        return Eigen.of(self.hessian)

    @property
    def eigen(self) -> Eigen:
        """All eigenpairs but the last one, where gradients have no component."""
        return Eigen(self.whole.values[:-1], self.whole.vectors[:, :-1])

    def solution(self, g: Tensor) -> Tensor:  # (P, n) -> (P, n)
        """Return H⁻¹g."""
        return self.eigen.vectors @ ((self.eigen.vectors.T @ g) / self.eigen.values[:, None])

    def gradients(self, images: Tensor, labels: Tensor) -> Tensor:  # (n, ...) -> (P, n)
        """Return the gradients of the losses of single digits, one per column."""
        parameters = list(self.model.parameters())
        columns = []
        for image, label in zip(images.double(), labels, strict=True):
            loss = cross_entropy(self.model(image[None]), label[None])
            columns.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)]))
        return torch.stack(columns, dim=1)


def subject(session: Session) -> Subject:
    """Train the network and compute the Hessians, or load them from the cache."""
    size = SMALL if session.small else Size()
    digits = noisy(load_digits(), SEED, session.device, size.digits)
    training = trained(digits.images, digits.labels, size.recipe, SEED, session.settings.cache)
    model = network(training, size.recipe, session.device)
    path = session.settings.cache / f"{stem(size.recipe, size.digits, SEED)}-blocks-{size.block}.pt"

    def make() -> None:
        parts = zip(digits.images.double().split(size.block), digits.labels.split(size.block), strict=True)
        keep_file(path, torch.stack([lemmas.hessian(model, *part, size.recipe.l2) for part in parts]).cpu())

    made_once(path, make)
    blocks = torch.load(path, weights_only=True).to(session.device)
    return Subject(digits, model, training.iterations, size, blocks)


def measure_network(session: Session) -> None:
    """Measure the accuracy of the network, its distance from a minimum, and its eigenvalues."""
    known, part = subject(session), _part(session, "network", "The network")

    def work() -> Cell:
        digits, l2 = known.digits, known.size.recipe.l2
        images, test, values = digits.images.double(), digits.test_images.double(), known.eigen.values
        return {
            "digits": known.size.digits,
            "parameters": len(known.hessian),
            "accuracy_train_given": accuracy(known.model, images, digits.labels),
            "accuracy_test_true": accuracy(known.model, test, digits.test_true_labels),
            "gradient_norm": gradient_norm(known.model, images, digits.labels, l2),
            "iterations": known.iterations,
            "largest": float(values.max()),
            "smallest": float(values.min()),
            "smallest_magnitude": float(values.abs().min()),
            "negative": int((values < 0).sum()),
            "beyond": float(known.whole.values[-1].abs()),
        }

    part.cell("network", work)


def measure_quadratic(session: Session) -> None:
    """Measure what truncation changes in Q, and what an error along one eigenvector does."""
    known, part = subject(session), _part(session, "quadratic", "The truncated quadratic")
    size = known.size
    rows = torch.randperm(size.digits, generator=stream(SEED, "removed digits"))[: size.examples]
    g = known.gradients(known.digits.images[rows], known.digits.labels[rows]) / size.digits
    theta = known.solution(g)
    for keep in size.keeps:
        part.cell(f"k={keep}", lambda keep=keep: _truncation(known, keep, g, theta))  # type: ignore[misc]
        part.cell(f"error, k={keep}", lambda keep=keep: _shift(known, keep, rows, g, theta))  # type: ignore[misc]


def _truncation(known: Subject, keep: int, g: Tensor, theta: Tensor) -> Cell:
    """Compare Q − Qₖ at θ*, with Q computed from the matrix, to both bounds."""
    eigen = known.eigen
    error = quadratic(known.hessian, g, theta) - truncated(eigen, keep, g, theta)
    bound, tight = truncation_bounds(eigen, keep, theta)
    share = missed(eigen, keep, g) / missed(eigen, 0, g)
    return {
        "eigenvalue": float(eigen.values[keep].abs()),
        "error": float(error.mean()),
        "magnitude": float(error.abs().mean()),
        "bound": float(bound.mean()),
        "tight": float(tight.mean()),
        "largest_share_of_bound": float((error.abs() / bound).max()),
        "largest_share_of_tight": float((error.abs() / tight).max()),
        "negative": int((error < 0).sum()),
        "negative_beyond": int((eigen.values[keep:] < 0).sum()),
        "missed": float(share.median()),
    }


def _shift(known: Subject, keep: int, rows: Tensor, g: Tensor, theta: Tensor) -> Cell:
    """Move by ε along the eigenvector after the first k, and compare Q, and the training objective, to λε²/2.

    The objective without the digit has a slope of its own at Θ₀ + θ*, which the mean of both signs of ε leaves out.
    """
    step = _STEP * known.eigen.vectors[:, keep]
    value = float(known.eigen.values[keep])
    predicted = value * _STEP**2 / 2
    change = quadratic(known.hessian, g, theta + step[:, None]) - quadratic(known.hessian, g, theta)
    real = [
        (_objective(known, row, here + step) + _objective(known, row, here - step)) / 2 - _objective(known, row, here)
        for row, here in zip(rows[: known.size.shifted].tolist(), theta.T, strict=False)
    ]
    return {
        "eigenvalue": value,
        "predicted": predicted,
        "difference": float((change / predicted - 1).abs().max()),
        "objective": sum(real) / len(real),
        "length": float(theta.norm(dim=0).median()),
    }


@torch.no_grad()
def _objective(known: Subject, row: int, theta: Tensor) -> float:
    """Return the training objective without one digit, with the parameters moved by θ."""
    moved = network_at(known, theta)
    images, labels = known.digits.images.double(), known.digits.labels
    left_out = cross_entropy(moved(images[row, None]), labels[row, None])
    return float(objective(moved, images, labels, known.size.recipe.l2) - left_out / len(labels))


def network_at(known: Subject, theta: Tensor) -> nn.Sequential:
    """Return a copy of the network with its parameters moved by θ."""
    moved = copy.deepcopy(known.model)
    start = nn.utils.parameters_to_vector(moved.parameters())
    nn.utils.vector_to_parameters(start + theta, moved.parameters())
    return moved


def measure_noise(session: Session) -> None:
    """Measure the variance of H⁻¹u along eigenvectors, if H comes from mini-batches or has Gaussian noise."""
    known, part = subject(session), _part(session, "noise", "Noise in the Hessian")
    size, vectors = known.size, known.eigen.vectors
    test, labels = known.digits.test_images, known.digits.test_true_labels
    U = known.gradients(test[: size.queries], labels[: size.queries])
    square = torch.stack([(block - known.hessian).square().sum() for block in known.blocks]).mean()
    deviation = float((square / (len(U) * (len(U) + 1))).sqrt())
    for damping in size.dampings:
        values = known.eigen.values + damping
        inner = vectors.T @ U
        y = inner / values[:, None]
        inner, y = inner / y.norm(dim=0), y / y.norm(dim=0)  # so that every query counts the same
        seen = torch.stack([vectors.T @ ((block - known.hessian) @ (vectors @ y)) for block in known.blocks])
        flat = isotropic_variance(y, deviation)
        if not damping:
            part.cell("alignment", lambda: _alignment(values, seen.var(dim=0, correction=0), flat))  # noqa: B023
        for count in size.batches:
            series = Series(known, damping, count, vectors @ inner)
            series.measure(part, BATCHES, _batch_noise(known, count), first_order_variance(values, seen) / count)
            expected = flat / values.square()[:, None] / count
            series.measure(part, GAUSSIAN, _gaussian_noise(known, count, deviation), expected)


def _alignment(values: Tensor, real: Tensor, flat: Tensor) -> Cell:
    """Fit the exponents of |λₖ| in Var⟨eₖ, δH y⟩: 0 for noise that does not vary with the eigenvalue."""
    cell: Cell = {}
    for name, variances in {"batches": real.mean(dim=1), "gaussian": flat.mean(dim=1)}.items():
        there = variances > 1e-12 * variances.max()  # the penalty alone curves some directions, the same in every batch
        x, y = values[there].abs().log(), variances[there].log()
        low, high = variances[there].quantile(torch.tensor([0.05, 0.95]).to(variances))
        cell |= {f"slope_{name}": float((x - x.mean()) @ y / (x - x.mean()).square().sum())}
        cell |= {f"range_{name}": float(high / low), f"directions_{name}": int(there.sum())}
    return cell


Noise = Callable[[torch.Generator], Tensor]


def _batch_noise(known: Subject, count: int) -> Noise:
    """Return draws of the Hessian's error on a mini-batch of `count` random blocks."""
    total = len(known.blocks)

    def draw(generator: torch.Generator) -> Tensor:
        picked = torch.randint(total, (count,), generator=generator)
        weights = torch.bincount(picked, minlength=total).to(known.blocks) / count
        return torch.tensordot(weights, known.blocks, dims=1) - known.hessian

    return draw


def _gaussian_noise(known: Subject, count: int, deviation: float) -> Noise:
    """Return draws of isotropic noise with the mean square of the error on such a mini-batch."""
    return lambda generator: isotropic_noise(len(known.hessian), deviation / count**0.5, generator).to(known.hessian)


@dataclass(frozen=True)
class Series:
    """Draws of a noisy Hessian, and the vectors to solve for."""

    known: Subject
    damping: float
    count: int
    """Blocks per mini-batch."""
    U: Tensor  # (P, n)

    def measure(self, part: Part, kind: str, noise: Noise, expected: Tensor) -> None:
        """Record the variances along eigenvectors, measured and of first order, in bands of eigenvalues."""
        about: Cell = {"kind": kind, "damping": self.damping, "b": self.count * self.known.size.block}
        name = f"{kind}, damping {self.damping:g}, b={about['b']}"
        values = self.known.eigen.values + self.damping
        bands = _bands(values)
        if part.has(name) and all(part.has(f"{name}, {band}") for band in bands):
            return
        found, cell = self.solve(noise, stream(SEED, name))
        part.add(name, about | cell)
        measured = found.var(dim=0)
        for band, places in bands.items():
            compared = _compared(values[places], measured[places], expected[places])
            part.add(f"{name}, {band}", about | {"band": band} | compared)

    def solve(self, noise: Noise, generator: torch.Generator) -> tuple[Tensor, Cell]:  # -> (draws, P - 1, n)
        """Return the coordinates of (H + δH)⁻¹U for every draw, and how far they are from those of H⁻¹U."""
        known, vectors = self.known, self.known.eigen.vectors
        null = known.whole.vectors[:, -1]
        base = known.hessian + torch.outer(null, null)  # invertible; gradients have no component in this direction
        base = base + self.damping * torch.eye(len(base)).to(base)
        exact = vectors.T @ self.U / (known.eigen.values + self.damping)[:, None]
        found, definite, relative = [], [], []
        for _ in range(known.size.draws):
            y, is_definite = solved(base + noise(generator), self.U)
            found.append(vectors.T @ y)
            definite.append(float(is_definite))
            relative.append((found[-1] - exact).norm(dim=0) / exact.norm(dim=0))
        draws = len(found)
        change = float(torch.stack(relative).median())
        return torch.stack(found), {"definite": sum(definite) / draws, "change": change, "draws": draws}


def _compared(values: Tensor, measured: Tensor, expected: Tensor) -> Cell:
    """Take medians over the directions of a band and over queries."""
    found, predicted = float(measured.median()), float(expected.median())
    value = float(values.abs().median())
    return {"eigenvalue": value, "measured": found, "predicted": predicted, "ratio": found / predicted}


def _bands(values: Tensor) -> dict[str, slice]:
    """Return ranks of eigenvalues in bands of roughly equal ratios."""
    edges = [edge for edge in _EDGES if edge < len(values)] + [len(values)]
    return {f"ranks {first + 1}–{last}": slice(first, last) for first, last in pairwise(edges)}


def _part(session: Session, name: str, title: str) -> Part:
    return session.part(name, title, {"size": repr(SMALL if session.small else Size())})


EXPERIMENT = Experiment(
    name="error_analysis",
    title="The error analysis, on a network with an exact Hessian",
    about=ABOUT,
    parts={"network": measure_network, "quadratic": measure_quadratic, "noise": measure_noise},
    tables=tables,
    figures=figures,
    options=noise.options,
    verdict=VERDICT,
    claims=CLAIMS,
    summary=lambda records: ["The paper proves its lemmas and has no numbers: the tables are on the own page."],
    area="digits",
)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT, sys.argv[1:]))
