"""Block solves: against dense inverses, conjugate gradients one by one, and the limits of memory."""

import pytest
import torch

from eigentrace.errors import NumericalError
from eigentrace.krylov.solve import solve
from tests.helpers.expecting import refused

SIZE = 60


@pytest.fixture
def system():
    generator = torch.Generator().manual_seed(0)
    Q = torch.linalg.qr(torch.randn(SIZE, SIZE, dtype=torch.float64, generator=generator))[0]
    matrix = Q @ torch.diag(torch.logspace(-2, 2, SIZE, dtype=torch.float64)) @ Q.T
    rough = matrix.diagonal().clone()
    return matrix, rough, torch.randn(4, SIZE, dtype=torch.float64, generator=generator)


def conjugate_gradients(matrix, rough, g, steps):
    x, r = torch.zeros_like(g), g
    z = r / rough
    p = z
    for _ in range(steps):
        image = matrix @ p
        alpha = (r @ z) / (p @ image)
        x, new = x + alpha * p, r - alpha * image
        after = new / rough
        p, z, r = after + (new @ after) / (r @ z) * p, after, new
    return x


@pytest.mark.parametrize("steps", [1, 2, 5, 9])
def test_one_system_is_solved_as_by_conjugate_gradients(system, steps):
    matrix, rough, right = system
    found = solve(lambda rows: rows @ matrix, lambda rows: rows / rough, right[:1], steps)
    assert torch.allclose(found.vectors[0], conjugate_gradients(matrix, rough, right[0], steps), rtol=1e-8)
    assert (found.rounds, found.num_products) == (steps, steps)
    expected = (right[0] - matrix @ found.vectors[0]).norm() / right[0].norm()
    assert float(found.residuals[0]) == pytest.approx(float(expected), rel=1e-8)
    earlier = conjugate_gradients(matrix, rough, right[0], steps - 1) if steps > 1 else right[0] / rough
    assert torch.allclose(found.before[0], earlier, rtol=1e-8)


def test_systems_share_their_space(system):
    matrix, rough, right = system
    exact = torch.linalg.solve(matrix, right.T).T

    def error(vectors, rows):  # in the norm of the matrix, in which Galerkin solutions are optimal
        gap = vectors - exact[rows]
        return ((gap @ matrix) * gap).sum(1)

    together = solve(lambda rows: rows @ matrix, lambda rows: rows / rough, right, 4)
    for row in range(4):
        alone = solve(lambda rows: rows @ matrix, lambda rows: rows / rough, right[[row]], 4)
        assert error(together.vectors[[row]], [row]) < error(alone.vectors, [row])


@pytest.mark.parametrize("room", [2**62, 40])
def test_it_converges_to_the_dense_inverse(system, room):
    matrix, rough, right = system
    sizes = []

    def multiply(rows):
        sizes.append(len(rows))
        return rows @ matrix

    found = solve(multiply, lambda rows: rows / rough, right, 10_000, tolerance=1e-12, room=room)
    exact = torch.linalg.solve(matrix, right.T).T
    assert float((found.vectors - exact).norm() / exact.norm()) < 1e-9
    assert float(found.residuals.max()) <= 1e-12
    assert found.num_products == sum(sizes)
    assert room < 2**62 or found.num_products <= SIZE


def test_repeated_and_zero_sides_need_no_more_products(system):
    matrix, rough, right = system
    sides = torch.stack([right[0], right[0], 2 * right[0], torch.zeros(SIZE).double()])
    found = solve(lambda rows: rows @ matrix, lambda rows: rows / rough, sides, 5)
    assert found.num_products == 5
    assert torch.allclose(found.vectors[2], 2 * found.vectors[0], rtol=1e-9)
    assert not found.vectors[3].any()


def test_an_exact_preconditioner_needs_one_round(system):
    matrix, _, right = system
    found = solve(
        lambda rows: rows @ matrix, lambda rows: torch.linalg.solve(matrix, rows.T).T, right, 50, tolerance=1e-9
    )
    assert found.rounds == 1


def test_a_matrix_with_negative_curvature_is_refused(system):
    matrix, rough, right = system
    with refused(NumericalError, "positive definite", "damping"):
        solve(lambda rows: rows @ (matrix - 10 * torch.eye(SIZE).double()), lambda rows: rows / rough, right, 30)


def test_later_systems_go_on_with_the_space_of_earlier_ones(system):
    matrix, rough, right = system

    def solved(rows, rounds, **more):
        return solve(lambda r: r @ matrix, lambda r: r / rough, right[rows], rounds, **more)

    earlier = solved([0, 1, 2], 9)
    basis, images = earlier.known.basis, earlier.known.images
    assert len(basis) == earlier.num_products
    assert torch.allclose(basis @ basis.T, torch.eye(len(basis)).double(), atol=1e-9)
    assert torch.allclose(images, basis @ matrix)
    exact = torch.linalg.solve(matrix, right[3])
    anew, further = solved([3], 4), solved([3], 4, known=lambda: earlier.known)

    def error(found):  # in the norm of the matrix
        gap = found.vectors[0] - exact
        return float(gap @ matrix @ gap)

    assert anew.num_products == further.num_products == 4
    assert error(further) < 0.8 * error(anew)
    # One product less: the same from the space and three products.
    assert torch.allclose(further.before, solved([3], 3, known=lambda: earlier.known).vectors, rtol=1e-6)
    # Systems that are solved already take no product.
    again = solved([1], 9, known=lambda: solved([1], 60).known, tolerance=1e-9)
    assert again.num_products == 0
    assert torch.allclose(again.vectors[0], torch.linalg.solve(matrix, right[1]), rtol=1e-6)


@pytest.mark.parametrize("room", [4, 12, 20, 40])
def test_no_more_is_taken_from_an_earlier_space_than_there_is_room_for(system, room):
    matrix, rough, right = system
    known, held = solve(lambda r: r @ matrix, lambda r: r / rough, right, 12).known, []

    def multiply(rows):
        held.append(len(rows))
        return rows @ matrix

    found = solve(multiply, lambda r: r / rough, right[:2], 4, room=room, known=lambda: known)
    assert torch.isfinite(found.vectors).all()
    assert 2 * len(found.known.basis) <= max(room, 2 * sum(held))
