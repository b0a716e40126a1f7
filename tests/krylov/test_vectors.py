"""Vectors in every type and place against float64, and what their storage costs."""

import pytest
import torch

from eigentrace.krylov.vectors import Basis, Vectors, in_pieces, thirds

SIZE = 5003  # no multiple of anything that rows or chunks are aligned to


def held(count, *, split, size=SIZE, dtype="bf16", working=torch.float32):
    """Fill a basis, multiplied as on a GPU if `split`."""
    vectors = Vectors(count, torch.zeros(size, dtype=working), Basis(dtype=dtype))
    vectors._split = split
    for i in range(count):
        vectors.put(i, torch.randn(size, dtype=working) / size**0.5)
    return vectors


# Sums of float32 products: some units in the last place (6e-8), far below what bfloat16 (4e-3) would leave.
CLOSE = 1e-6


def check_products(vectors, count):
    stored = vectors.store[:count].double()
    w = torch.randn(vectors.store.shape[1])
    exact = stored @ w.double()
    assert ((vectors.dots(count, w) - exact).abs() <= CLOSE * stored.norm(dim=1) * w.norm()).all()
    for coefficients in (torch.randn(count), torch.randn(3, count)):
        found, exact = vectors.combine(coefficients), coefficients.double() @ stored
        assert found.dtype == torch.float32
        assert found.shape == exact.shape
        assert (found - exact).abs().max() <= CLOSE * exact.abs().max()
    assert (vectors.gram(count) - stored @ stored.T).abs().max() <= CLOSE


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("chunk", [1 << 24, 300])
def test_products_keep_the_digits_of_float32(monkeypatch, split, chunk):
    for name in ("_CHUNK_NUMBERS", "_PACKED_NUMBERS"):
        monkeypatch.setattr(f"eigentrace.krylov.vectors.{name}", chunk)
    monkeypatch.setattr("eigentrace.krylov.vectors._PIECE", 128)
    vectors = held(9, split=split)
    check_products(vectors, 9)
    check_products(vectors, 4)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("chunk", [1 << 24, 300])
def test_mixing_in_place_is_combining(monkeypatch, split, chunk):
    for name in ("_CHUNK_NUMBERS", "_PACKED_NUMBERS"):
        monkeypatch.setattr(f"eigentrace.krylov.vectors.{name}", chunk)
    vectors = held(9, split=split)
    coefficients = torch.randn(4, 7)
    exact, untouched = vectors.combine(coefficients), vectors.store[4:].clone()
    lost = vectors.mix(coefficients)
    assert torch.equal(vectors.store[:4], exact.bfloat16())
    assert torch.equal(vectors.store[4:], untouched)
    assert torch.allclose(lost, (exact.bfloat16().float() - exact).norm(dim=1).double(), rtol=1e-5)


@pytest.mark.parametrize("numbers", [torch.randn(100), torch.randn(3, 5) * 1e-30, torch.randn(7, 64) * 1e30])
def test_three_parts_hold_every_digit(numbers):
    parts = thirds(numbers)
    assert parts.dtype == torch.bfloat16
    assert torch.equal(parts.double().sum(dim=0), numbers.double())


def test_parts_of_a_long_vector_are_aligned():
    assert thirds(torch.randn(1001)).stride(0) % 8 == 0


def test_pieces_and_their_rest_add_up(monkeypatch):
    monkeypatch.setattr("eigentrace.krylov.vectors._PIECE", 64)
    for width in (10, 64, 640, 1000):
        a, b = torch.randn(3, width).bfloat16(), torch.randn(2, width).bfloat16()
        assert torch.allclose(in_pieces(a, b), a.double() @ b.double().T, atol=1e-4)


def test_rounding_is_told_and_full_precision_has_none():
    vector = torch.randn(SIZE)
    assert Vectors(2, vector, Basis()).put(0, vector) == 0.0
    lost = Vectors(2, vector, Basis(dtype="bf16")).put(0, vector)
    assert lost == pytest.approx(float((vector.bfloat16().float() - vector).norm()))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_released_vectors_leave_the_rest_behind(dtype):
    vectors = held(9, split=False, dtype=dtype)
    kept = vectors.store[:2].clone()
    released = vectors.release(2)
    assert torch.equal(released, kept)
    assert released.untyped_storage().nbytes() == released.nbytes  # nothing of the other seven
    assert vectors.store is released
    assert vectors.release(2) is not None  # all of them: no copy


def test_float64_basis_and_models():
    vectors = held(5, split=False, dtype="fp32", working=torch.float64)
    assert vectors.store.dtype == torch.float64
    w = torch.randn(SIZE, dtype=torch.float64)
    assert torch.allclose(vectors.dots(5, w), vectors.store @ w, rtol=1e-12)
    narrow = held(5, split=False, dtype="bf16", working=torch.float64)
    assert narrow.dots(5, w).dtype == torch.float64
    assert torch.allclose(narrow.dots(5, w), narrow.store.double() @ w, rtol=1e-12)


@pytest.mark.parametrize("count", [1, 5, 6])
def test_rows_that_are_too_many_numbers_are_multiplied_in_blocks(monkeypatch, count):
    rows = torch.randn(6, 1000, dtype=torch.float64)
    vectors = Vectors(6, rows[0], Basis())
    for index, row in enumerate(rows):
        vectors.put(index, row)
    w, one, many = torch.randn(1000).double(), torch.randn(count).double(), torch.randn(3, count).double()
    sizes = []
    monkeypatch.setattr("eigentrace.krylov.vectors._MOST_NUMBERS", 2500)
    blocks = vectors._blocks
    monkeypatch.setattr(vectors, "_blocks", lambda count: [sizes.append(b.stop - b.start) or b for b in blocks(count)])
    torch.testing.assert_close(vectors.dots(count, w), rows[:count] @ w)
    torch.testing.assert_close(vectors.combine(one), one @ rows[:count])
    torch.testing.assert_close(vectors.combine(many), many @ rows[:count])
    assert max(sizes) <= 2
    assert sum(sizes) == 3 * count
