"""From a Krylov basis to directions and weights."""

import dataclasses

import pytest
import torch

import eigentrace as et
from eigentrace.errors import ConvergenceWarning, InputError, NumericalError, PrecisionWarning
from eigentrace.fits.cut import Cut
from eigentrace.fits.weighted_directions import weigh
from eigentrace.krylov.eigenpairs import Spectrum, orthonormal, top_eigenpairs, warn_unless_converged
from eigentrace.krylov.iterate import Ending, lanczos
from eigentrace.krylov.vectors import Basis
from tests.helpers.expecting import refused, warned


def matrix(values, dtype=torch.float64):
    Q = torch.linalg.qr(torch.randn(len(values), len(values), dtype=torch.float64))[0]
    return (Q * torch.tensor(values, dtype=torch.float64) @ Q.T).to(dtype)


def distilled(values, keep):
    A = matrix(values)
    return A, top_eigenpairs(lanczos(A.matmul, torch.randn(len(A), dtype=A.dtype), len(A)), keep)


def test_the_largest_magnitudes_are_kept_whatever_their_sign():
    # Keeping the smallest instead passes every test at full rank (a peer had that).
    A, found = distilled([0.1, -5.0, 3.0, 0.2, -0.3, 4.0, 0.05, 1.0], keep=3)
    assert torch.allclose(found.spectrum.eigenvalues, torch.tensor([-5.0, 4.0, 3.0]).double())
    assert torch.allclose(A @ found.directions.T, found.directions.T * found.spectrum.eigenvalues, atol=1e-12)


def test_directions_areorthonormal_and_signs_deterministic():
    _, found = distilled([8.0, 5.0, 3.0, 2.0, 1.0, 0.5, 0.2], keep=5)
    G = found.directions
    assert torch.allclose(G @ G.T, torch.eye(5).double(), atol=1e-12)
    assert (G.gather(1, G.abs().argmax(dim=1, keepdim=True)) > 0).all()


def test_directions_from_a_bf16_basis_areorthonormal_again():
    values = [0.9**i for i in range(60)]
    A = matrix(values, torch.float32)
    krylov = lanczos(A.matmul, torch.randn(60), 40, basis=Basis(dtype="bf16"))
    G = top_eigenpairs(krylov, 10).directions
    assert G.dtype == torch.bfloat16
    # Rounding each direction once more: its length by up to 2⁻⁹, its angles by much less.
    assert (G.double() @ G.double().T - torch.eye(10)).abs().max() < 2**-8


def test_the_correction_makes_directionsorthonormal():
    W, C = torch.randn(6, 30, dtype=torch.float64), torch.randn(4, 6, dtype=torch.float64)
    directions = orthonormal(C, W @ W.T) @ W
    assert torch.allclose(directions @ directions.T, torch.eye(4).double(), atol=1e-12)
    Q = torch.linalg.qr(torch.randn(30, 6, dtype=torch.float64))[0].T
    eye = torch.eye(6).double()
    assert torch.equal(orthonormal(eye, Q @ Q.T), eye)  # nothing to correct


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_directions_follow_the_basis_and_take_its_place(dtype):
    A = matrix([0.8**i for i in range(80)], torch.float32)
    krylov = lanczos(A.matmul, torch.randn(80), 30, basis=Basis(dtype=dtype))
    stored = krylov.vectors.store.dtype
    found = top_eigenpairs(krylov, 5)
    assert found.directions.dtype == stored
    assert found.directions.untyped_storage().nbytes() == found.directions.nbytes
    assert krylov.vectors.store is found.directions  # the basis is gone


def test_zero_eigenvalues_are_not_kept():
    _, found = distilled([3.0, 2.0, 1.0] + [0.0] * 20, keep=10)
    assert len(found.spectrum.eigenvalues) == 3
    assert found.spectrum.ending is Ending.INVARIANT


def test_a_matrix_of_zeros_is_refused():
    with refused(NumericalError, "curvature", "TracIn"):
        top_eigenpairs(lanczos(lambda v: 0 * v, torch.randn(5), 3), 2)


VALUES = torch.tensor([8.0, -4.0, 2.0, 0.5], dtype=torch.float64)


def test_truncated_weights_are_inverse_eigenvalues():
    weights = weigh(VALUES, Cut(3, None, False))
    assert torch.equal(weights.direction, 1 / VALUES[:3])
    assert (weights.identity, weights.delta) == (0.0, None)


def test_positive_only_drops_after_taking_the_top():
    weights = weigh(VALUES, Cut(3, None, True))
    assert weights.index.tolist() == [0, 2]
    assert torch.equal(weights.direction, 1 / VALUES[[0, 2]])
    with refused(NumericalError, "positive_only=True", 2):
        weigh(torch.tensor([-3.0, -1.0]), Cut(2, None, True))


def test_the_tail_is_the_smallest_kept_eigenvalue_with_a_floor():
    weights = weigh(VALUES, Cut(4, "auto", False))
    assert weights.delta == 0.5
    assert weights.identity == 2.0
    # on a kept direction the two terms add up to 1/(λ+δ), negative λ counted as 0
    assert torch.allclose(weights.direction + weights.identity, 1 / (VALUES.clamp_min(0) + 0.5))
    assert weigh(VALUES, Cut(2, "auto", False)).delta == 4.0
    assert weigh(torch.tensor([10.0, 1e-9]), Cut(2, "auto", False)).delta == pytest.approx(1e-3)
    assert weigh(VALUES, Cut(4, 0.25, False)).delta == 0.25


def test_a_stored_or_shaped_tail_weighs_its_coordinates():
    energies = torch.tensor([3.0, 0.0], dtype=torch.float64)
    kept = 1 / (VALUES.clamp_min(0) + 0.5)
    for tail, inverse in (("auto", [2.0, 2.0]), ("shaped", [1 / 3.5, 2.0])):
        stored = weigh(VALUES, Cut(4, tail, False, stored=True), energies)
        assert (stored.identity, stored.delta) == (0.0, 0.5)
        assert torch.allclose(stored.direction, kept)
        assert torch.allclose(stored.coordinate, torch.tensor(inverse).double())
    # with the identity beside them, what lies along a coordinate adds up to the same
    shaped = weigh(VALUES, Cut(4, "shaped", False), energies)
    assert torch.allclose(shaped.coordinate + shaped.identity, 1 / (energies + 0.5))
    assert torch.allclose(shaped.direction + shaped.identity, kept)
    assert not len(weigh(VALUES, Cut(4, "auto", False), energies).coordinate)  # a flat, whole tail needs none
    assert weigh(VALUES, Cut(4, "shaped", False, delta=0.1), energies).delta == 0.1


def test_delta_where_curvature_is_negative_or_at_rounding_level():
    # The last kept eigenvalue marks where the spectrum was cut, whatever its sign.
    assert weigh(torch.tensor([8.0, -2.0]), Cut(2, "auto", False)).delta == 2.0
    assert weigh(torch.tensor([8.0, -2.0]), Cut(2, "auto", True)).delta == 2.0
    # Nothing but negative curvature: all directions count as flat, and the score is the gradients' product over δ.
    flat = weigh(torch.tensor([-3.0, -1.0]), Cut(2, "auto", False))
    assert flat.direction.abs().max() == 0
    assert flat.identity == 1.0
    # The floor follows |λ₁|, a negative one too.
    assert weigh(torch.tensor([-10.0, 1e-12]), Cut(2, "auto", False)).delta == pytest.approx(1e-3)
    for tail in ("auto", "shaped"):
        assert weigh(torch.tensor([10.0, 1e-12]), Cut(2, tail, False)).delta == pytest.approx(1e-3)


@pytest.mark.parametrize("tail", [0.0, -1.0, float("inf"), float("nan")])
def test_delta_must_be_positive(tail):
    with refused(InputError, "tail", tail):
        Cut(3, tail, False)


def test_a_small_delta_in_float32_warns():
    x, y = torch.randn(40, 4), torch.randint(0, 2, (40,))
    fitted = et.Arnoldi(steps=20, keep=3).fit(et.classification(torch.nn.Linear(4, 2)), [(x, y)])
    with warned(PrecisionWarning, "tail=1e-07", 0.0001):
        fitted.distill(tail=1e-7)
    double = et.Arnoldi(steps=20, keep=3).fit(et.classification(torch.nn.Linear(4, 2).double()), [(x.double(), y)])
    assert double.distill(tail=1e-7).delta == pytest.approx(1e-7)


def test_convergence_is_judged_by_the_last_pair():
    def spectrum(residual):
        residuals = torch.tensor([1e-9, residual]) if residual is not None else None
        return Spectrum(torch.tensor([5.0, 1.0]), residuals, Ending.ALL_STEPS, 20)

    assert spectrum(0.09).converged is True
    assert spectrum(None).converged is None
    warn_unless_converged(spectrum(None))
    warn_unless_converged(spectrum(0.09))
    complete = dataclasses.replace(spectrum(0.2), ending=Ending.INVARIANT)
    warn_unless_converged(complete)  # more steps could not help
    with warned(ConvergenceWarning, "20 products", 0.2, "`steps`", "`keep`"):
        warn_unless_converged(spectrum(0.2))
