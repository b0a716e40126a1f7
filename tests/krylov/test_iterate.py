"""The iterations by their defining identity, then against dense eigenvalues, then at their edges."""

import pytest
import torch

from eigentrace.errors import InputError, NumericalError
from eigentrace.krylov.iterate import Ending, arnoldi, lanczos, ritz
from eigentrace.krylov.vectors import Basis
from tests.helpers.expecting import refused

ITERATIONS = [arnoldi, lanczos]


def symmetric(values, dtype=torch.float64, seed=0):
    """Build a symmetric matrix with given eigenvalues."""
    generator = torch.Generator().manual_seed(seed)
    Q = torch.linalg.qr(torch.randn(len(values), len(values), generator=generator, dtype=torch.float64))[0]
    return (Q * torch.as_tensor(values, dtype=torch.float64) @ Q.T).to(dtype)


def start_of(A):
    return torch.randn(len(A), dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(A.dtype)


def decaying(n=120):
    return [(-1) ** (i % 3 == 0) * 0.85**i for i in range(n)]


# Ten units in the last place, times the square root of the number of terms summed, with room.
TOL = {torch.float32: 1e-5, torch.float64: 1e-10}


def check_identities(A, krylov, tol):
    """The basis is orthonormal, and A·Wᵀ = Wᵀ·T + β·w·eᵀ with w orthogonal to it."""
    m = krylov.size
    W = krylov.vectors.store[:m].to(A.dtype)
    T = krylov.projected.to(A.dtype)
    eye = torch.eye(m, dtype=A.dtype)
    assert (W @ W.T - eye).abs().max() < tol
    residual = A @ W.T - W.T @ T
    assert residual[:, :-1].norm() < tol * A.norm()
    assert abs(float(residual[:, -1].norm()) - krylov.beta) < tol * float(A.norm())
    assert (W @ residual[:, -1]).norm() < tol * A.norm()


@pytest.mark.parametrize("iteration", ITERATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_defining_identities(iteration, dtype):
    A = symmetric(decaying(), dtype)
    krylov = iteration(A.matmul, start_of(A), 40)
    check_identities(A, krylov, TOL[dtype])
    assert krylov.ending is Ending.ALL_STEPS
    assert krylov.num_products == 40


def test_arnoldi_identity_holds_for_a_matrix_that_is_not_symmetric():
    A = torch.randn(50, 50, dtype=torch.float64)
    check_identities(A, arnoldi(A.matmul, start_of(A), 20), 1e-10)


@pytest.mark.parametrize(
    "basis", [Basis(max_vectors=30), Basis(max_vectors=24, restart_keep=12), Basis(max_vectors=200)]
)
def test_restarted_lanczos_keeps_the_identities_and_the_spectrum(basis):
    A = symmetric(decaying(), torch.float64)
    plain = lanczos(A.matmul, start_of(A), 80)
    restarted = lanczos(A.matmul, start_of(A), 80, basis=basis)
    check_identities(A, restarted, 1e-10)
    assert restarted.ending is Ending.ALL_STEPS
    assert restarted.size <= (basis.max_vectors or 80)
    assert (ritz(restarted)[0][:10] - ritz(plain)[0][:10]).abs().max() < 1e-9


def test_restart_finds_the_vectors_too():
    A = symmetric(decaying(), torch.float32)
    plain, restarted = (lanczos(A.matmul, start_of(A), 100, basis=b) for b in (Basis(), Basis(max_vectors=40)))
    ours, theirs = (k.vectors.combine(ritz(k)[1][:, :8].T) for k in (plain, restarted))
    assert ((ours * theirs).sum(dim=1).abs() - 1).abs().max() < 1e-5


@pytest.mark.parametrize("iteration", ITERATIONS)
def test_top_eigenvalues_match_dense(iteration):
    A = symmetric(decaying())
    values = torch.linalg.eigvalsh(A)
    exact = values[values.abs().argsort(descending=True)][:10]
    assert (ritz(iteration(A.matmul, start_of(A), 60))[0][:10] - exact).abs().max() < 1e-10


@pytest.mark.parametrize(
    "basis", [Basis(), Basis(max_vectors=30), Basis(dtype="bf16"), Basis(dtype="bf16", max_vectors=40)]
)
def test_residual_bounds_hold(basis):
    A = symmetric(decaying(400), torch.float32)
    krylov = lanczos(A.matmul, start_of(A), 60, basis=basis)
    theta, S, bounds = ritz(krylov)
    Y = krylov.vectors.combine(S[:, :15].T)
    true = (A @ Y.T - Y.T * theta[:15].float()).norm(dim=0)
    # Rounding of the product itself is outside the bound.
    assert (true <= bounds[:15].float() + 1e-5 * theta[0].abs().float()).all()


def test_bf16_basis_is_close_and_half_the_size():
    A = symmetric(decaying(2000), torch.float32)
    full, half = (lanczos(A.matmul, start_of(A), 60, basis=Basis(dtype=d)) for d in ("fp32", "bf16"))
    assert half.vectors.store.nbytes * 2 == full.vectors.store.nbytes
    assert (ritz(full)[0][:10] - ritz(half)[0][:10]).abs().max() < 2e-3
    assert half.vectors.dots(3, half.vectors.get(0)).dtype == torch.float32


def test_host_basis_gives_the_same_numbers():
    A = symmetric(decaying(), torch.float32)
    here, host = (lanczos(A.matmul, start_of(A), 30, basis=Basis(place=p)) for p in ("device", "host"))
    assert torch.equal(here.projected, host.projected)


@pytest.mark.parametrize("iteration", ITERATIONS)
def test_every_copy_of_a_repeated_eigenvalue_is_found(iteration):
    A = symmetric([5.0] * 4 + [3.0] * 3 + [-2.0] * 2 + [1.0] * 11)
    theta = ritz(iteration(A.matmul, start_of(A), 20))[0]
    assert torch.allclose(theta[:9], torch.tensor([5.0] * 4 + [3.0] * 3 + [-2.0] * 2).double(), atol=1e-10)
    assert len(theta) == 20


@pytest.mark.parametrize("iteration", ITERATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_low_rank_ends_early_as_invariant(iteration, dtype):
    A = symmetric([4.0, 2.0, 1.0] + [0.0] * 57, dtype)
    krylov = iteration(A.matmul, start_of(A), 50)
    assert krylov.ending is Ending.INVARIANT
    assert krylov.num_products < 10
    theta = ritz(krylov)[0]
    assert torch.allclose(theta[:3], torch.tensor([4.0, 2.0, 1.0]).double(), atol=1e-5)
    assert theta[3:].abs().max() < 1e-5


@pytest.mark.parametrize("scale", [1e-12, 1e12])
def test_breakdown_is_relative_to_the_matrix(scale):
    # An absolute tolerance empties the basis of a well-fitted model, whose curvature is tiny everywhere.
    A = symmetric([v * scale for v in decaying()], torch.float32)
    krylov = lanczos(A.matmul, start_of(A), 40)
    assert krylov.size == 40
    assert abs(float(ritz(krylov)[0][0].abs()) / scale - 1) < 1e-4


@pytest.mark.parametrize("iteration", ITERATIONS)
def test_more_steps_than_dimensions_completes_the_space(iteration):
    A = symmetric([3.0, 2.0, -1.0, 0.5])
    krylov = iteration(A.matmul, start_of(A), 30)
    assert krylov.ending is Ending.WHOLE_SPACE
    assert krylov.size == 4
    assert torch.allclose(ritz(krylov)[0], torch.tensor([3.0, 2.0, -1.0, 0.5]).double(), atol=1e-12)


def test_zero_matrix_and_identity():
    zero = lanczos(lambda v: 0 * v, torch.randn(9), 5)
    assert zero.ending is Ending.INVARIANT
    assert ritz(zero)[0].abs().max() == 0
    same = ritz(lanczos(lambda v: v, torch.randn(9), 9))[0]
    assert torch.allclose(same, torch.ones(9).double(), atol=1e-5)


def test_one_step_and_one_dimension():
    assert lanczos(lambda v: 3 * v, torch.ones(1), 1).size == 1
    A = symmetric(decaying())
    krylov = lanczos(A.matmul, start_of(A), 1)
    check_identities(A, krylov, 1e-10)


def test_a_matrix_that_changes_between_steps_is_symmetrised():
    A = symmetric(decaying())
    count = iter(range(100))
    noisy = arnoldi(lambda v: A @ v * (1 + 0.01 * (-1) ** next(count)), start_of(A), 30)
    theta, _, residuals = ritz(noisy)
    assert residuals is None
    assert not torch.allclose(noisy.projected, noisy.projected.T, atol=1e-6)
    assert abs(float(theta[0].abs()) - 1) < 0.02


def test_same_seed_same_numbers():
    A = symmetric(decaying(), torch.float32)
    a, b = (lanczos(A.matmul, start_of(A), 30) for _ in range(2))
    assert torch.equal(a.projected, b.projected)
    assert torch.equal(a.vectors.store, b.vectors.store)


def test_bad_input_is_refused():
    with refused(InputError, "steps", 1, 0):
        lanczos(lambda v: v, torch.ones(3), 0)
    with refused(InputError, "start"):
        lanczos(lambda v: v, torch.zeros(3), 2)
    with refused(NumericalError, "step 1"):
        lanczos(lambda v: v * torch.nan, torch.ones(3), 2)
    with refused(InputError, "Basis(max_vectors=None)", "spread=False"):
        arnoldi(lambda v: v, torch.ones(3), 2, basis=Basis(max_vectors=3))
