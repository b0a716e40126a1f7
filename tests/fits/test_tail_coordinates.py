"""Coordinates of the tail: their moments, any cut's energies, counts and shares, files."""

import pytest
import torch

import eigentrace as et
from eigentrace.data import as_data
from eigentrace.errors import InputError, MismatchError
from eigentrace.fits.tail_coordinates import Coordinates, gather
from eigentrace.projection.directions import DenseDirections
from eigentrace.projection.engine import Compute
from tests.helpers.checking import one_at_a_time
from tests.helpers.expecting import refused


@pytest.fixture(scope="module")
def found(cases):
    """Coordinates of a small model, its gradients, and eight directions of its curvature."""
    case = cases["mlp"]
    fitted = et.Arnoldi(steps=100, keep=8, sample=None).fit(case.task, case.batches)
    directions = DenseDirections(fitted.eigenpairs.directions, case.task.layout)
    with case.task.session():
        coordinates = gather(case.task, as_data(case.batches), directions, torch.arange(8), 15, Compute())
    return coordinates, one_at_a_time(case.task, case.batches)[0], directions.matrix


def test_moments_are_those_of_written_gradients(found):
    coordinates, gradients, G = found
    S = coordinates.directions.dense(0, 15)
    assert torch.allclose(S @ S.T, torch.eye(15).double(), atol=1e-12)
    t, phi = gradients @ S.T, gradients @ G.T
    assert torch.allclose(coordinates.overlap, S @ G.T)
    assert torch.allclose(coordinates.energy, t.square().mean(dim=0))
    assert torch.allclose(coordinates.cross, t.T @ phi / len(t))
    assert torch.allclose(coordinates.moments, phi.T @ phi / len(t))
    assert coordinates.total == pytest.approx(float(gradients.square().sum(dim=1).mean()))


@pytest.mark.parametrize("kept", [[], [0], [0, 1, 2], [0, 2, 7], list(range(8))])
def test_the_residual_energy_of_any_cut_is_exact(found, kept):
    coordinates, gradients, G = found
    residual = gradients - gradients @ G[kept].T @ G[kept]
    s = residual @ coordinates.directions.dense(0, 15).T
    assert torch.allclose(coordinates.residual(torch.tensor(kept, dtype=torch.long)), s.square().mean(dim=0))
    outside = coordinates.outside(torch.tensor(kept, dtype=torch.long))
    assert outside == pytest.approx(float(residual.square().sum(dim=1).mean()))


def test_what_is_left_of_the_directions_never_exceeds_the_identity(found):
    # Gram of S(I − GᵀG) is I − CCᵀ: all weights of a shaped tail stay positive.
    coordinates, _, G = found
    directions = coordinates.directions.dense(0, 15) @ (torch.eye(G.shape[1]).double() - G.T @ G)
    gram = directions @ directions.T
    C = coordinates.overlap
    assert torch.allclose(gram, torch.eye(15).double() - C @ C.T, atol=1e-12)
    assert torch.linalg.eigvalsh(gram).max() <= 1 + 1e-12


def test_the_leading_ones_hold_the_most_and_stay_the_same(found):
    coordinates, kept = found[0], torch.arange(8)
    few = coordinates.first(6)
    energies = coordinates.residual(kept)
    assert torch.allclose(few.residual(kept).sort().values, energies.sort().values[-6:])
    assert torch.equal(few.first(3).directions.dense(0, 3), coordinates.first(3).directions.dense(0, 3))
    assert torch.allclose(
        few.directions.dense(0, 6), coordinates.directions.dense(0, 15)[coordinates.order[:6].sort().values]
    )
    assert coordinates.first(None) is coordinates
    assert coordinates.first(99).count == 15


def test_a_share_takes_as_few_as_reach_it(found):
    coordinates, kept = found[0], torch.arange(8)
    held = coordinates.residual(kept)[coordinates.order].cumsum(0) / coordinates.outside(kept)
    for count in (1, 4, 9):
        assert coordinates.needed(float(held[count - 1]), kept) == count
    assert coordinates.needed(1.0, kept) == 15  # out of reach: all there are
    assert coordinates.needed(4, kept) == 4
    assert coordinates.needed(40, kept) == 15


@pytest.mark.parametrize("wanted", [0, True, "many", 0.0, 1.5, float("nan")])
def test_wrong_numbers_are_refused(wanted):
    with refused(InputError, "coordinates", repr(wanted)):
        et.Arnoldi(coordinates=wanted)


def test_files_of_another_fit_are_refused(found, cases):
    tensors, layout = found[0].tensors(), cases["mlp"].task.layout
    again = Coordinates.of_tensors(tensors, 8, layout)
    assert torch.equal(again.directions.dense(0, 15), found[0].directions.dense(0, 15))
    with refused(MismatchError, "coordinates", (15, 8), 7):
        Coordinates.of_tensors(tensors, 7, layout)
    with refused(MismatchError, "coordinates", (15, 8), 8, "'0.bias'"):
        Coordinates.of_tensors(tensors, 8, cases["conv"].task.layout)
    with refused(MismatchError, "coordinates", 15, 14):
        Coordinates.of_tensors(tensors | {"energy": tensors["energy"][:-1]}, 8, layout)
