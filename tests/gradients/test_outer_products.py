"""Gradients in factors: written out, contracted, normed and picked from, always the same numbers."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eigentrace.gradients.layer_gradients import Direct, OnDemand
from eigentrace.gradients.outer_products import Dense, OneHot, Outer, Windows, rotated, square_norms, token_products
from eigentrace.numeric.accumulate import times, wide, wide_type

any_shape = settings(max_examples=25, derandomize=True, database=None)
B, T, L, R, VOCABULARY = 3, 4, 2, 5, 6
BUDGETS = [1, 100, 10_000, 2**40]


def dense(width, tokens=T, groups=1, examples=B, dtype=torch.float64):
    return Dense(torch.randn(examples, groups, tokens, width, dtype=dtype))


def one_hot(width=VOCABULARY, tokens=T, examples=B):
    return OneHot(torch.randint(0, width, (examples, tokens)), width)


def windows(groups=1, dims=2):
    kernel, stride, dilation = (2, 1, 2)[:dims], (1, 2, 1)[:dims], (2, 1, 1)[:dims]
    value = torch.randn(B, 2 * groups, *(5, 4, 3)[:dims], dtype=torch.float64)
    return Windows(value, B, groups, kernel, stride, dilation)


def through(factor, groups=1):
    return Outer(dense(3, factor.tokens, groups), factor, B, groups)


OUTERS = {
    "wide right": lambda: Outer(dense(L), dense(R), B),
    "wide left": lambda: Outer(dense(R), dense(L), B),
    "one token": lambda: Outer(dense(L, 1), dense(R, 1), B),
    "many tokens": lambda: Outer(dense(L, 40), dense(R, 40), B),
    "lookup": lambda: Outer(one_hot(), dense(R), B),
    "lookup on the right": lambda: Outer(dense(R), one_hot(), B),
    "groups": lambda: Outer(dense(L, groups=3), dense(R, groups=3), B, 3),
    "convolution": lambda: through(windows()),
    "convolution in one dimension": lambda: through(windows(dims=1)),
    "convolution in three": lambda: through(windows(dims=3)),
    "grouped convolution": lambda: through(windows(groups=2), groups=2),
    "one by one": lambda: Outer(dense(1), dense(1), B),
    "one example": lambda: Outer(dense(L, examples=1), dense(R, examples=1), 1),
    "no tokens": lambda: Outer(dense(L, 0), dense(R, 0), B),
    "no numbers": lambda: Outer(dense(0), dense(R), B),
    "two types": lambda: Outer(dense(L, dtype=torch.float32), dense(R), B),
}


@pytest.fixture(params=OUTERS)
def outer(request):
    return OUTERS[request.param]()


def by_hand(form):  # (B, g·L·R)
    """Sum the outer products of all tokens one at a time."""
    left, right = (f.take(0, form.examples).double() for f in (form.left, form.right))
    return torch.einsum("bgtl,bgtr->bglr", left, right).reshape(form.examples, form.numel)


def close(found, expected, tol=1e-12):
    assert found.shape == expected.shape
    assert (found - expected).norm() <= tol * expected.norm().clamp_min(1)


def tol(form):
    """Products within a factor run in its own type."""
    return 1e-6 if form.left.take(0, 1).dtype == torch.float32 else 1e-12


@pytest.mark.parametrize("budget", BUDGETS)
def test_everything_agrees_with_writing_out(outer, budget):
    whole, directions = by_hand(outer), torch.randn(4, outer.numel, dtype=torch.float64)
    index = torch.randint(0, max(outer.numel, 1), (7 if outer.numel else 0,))
    close(outer.write(0, outer.examples), whole)
    close(outer.dot(directions, budget), whole @ directions.T)
    close(outer.pick(index), whole[:, index])
    close(outer.square_norms(budget), whole.square().sum(dim=1))


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("name", [name for name in OUTERS if not name.startswith("no ")])
def test_materialising_contracting_and_inner_products_agree(name, budget):
    outer = OUTERS[name]()
    whole, directions = by_hand(outer), torch.randn(4, outer.numel, dtype=torch.float64)
    close(outer._materialise(directions, budget), whole @ directions.T)
    if outer.groups == 1:
        close(outer._contract(directions, budget), whole @ directions.T)
    close(outer.inner(outer, budget), whole.square().sum(dim=1), tol(outer))


def test_directions_are_left_alone(outer):
    directions = torch.randn(4, outer.numel, dtype=torch.float64)
    before = directions.clone()
    for how in ("dot", "_materialise", "_contract", "_look_up"):
        fits = how == "dot" or (outer.numel and outer.left.tokens and (outer.groups == 1 or how == "_materialise"))
        if fits and (how != "_look_up" or isinstance(outer.left, OneHot)):
            getattr(outer, how)(directions, 2**20)
            getattr(outer, how)(directions, 1)
    assert torch.equal(directions, before)


def test_directions_in_any_layout():
    outer = OUTERS["wide left"]()
    directions = torch.randn(outer.numel, 4, dtype=torch.float64).T
    wider = torch.randn(4, outer.numel + 7, dtype=torch.float64)[:, 3:-4]
    for matrix in (directions, wider):
        for how in (outer.dot, outer._contract, outer._materialise):
            close(how(matrix, 100), by_hand(outer) @ matrix.T)


def test_some_examples_are_written_out(outer):
    whole = by_hand(outer)
    close(outer.write(outer.examples - 1, outer.examples), whole[-1:])


@pytest.mark.parametrize("name", [name for name in OUTERS if "group" not in name])
def test_transposed(name):
    outer = OUTERS[name]()
    turned = outer.transposed()
    expected = by_hand(outer).unflatten(1, (outer.left.width, outer.right.width)).transpose(1, 2).flatten(1)
    close(turned.write(0, turned.examples), expected)
    directions = torch.randn(2, outer.numel, dtype=torch.float64)
    close(turned.dot(directions, 1000), expected @ directions.T)
    close(turned.square_norms(1000), expected.square().sum(dim=1))


@pytest.mark.parametrize("sides", [("left",), ("right",), ("left", "right"), ()], ids=str)
@pytest.mark.parametrize("name", [name for name in OUTERS if "group" not in name and not name.startswith("no ")])
def test_rotated_coordinates(name, sides):
    outer = OUTERS[name]()
    left = torch.randn(outer.left.width, 3, dtype=torch.float64) if "left" in sides else None
    right = torch.randn(outer.right.width, 4, dtype=torch.float64) if "right" in sides else None
    height, width = (outer.left.width if left is None else 3), (outer.right.width if right is None else 4)
    pairs = torch.stack([torch.randint(0, height, (9,)), torch.randint(0, width, (9,))])
    gradients = by_hand(outer).unflatten(1, (outer.left.width, outer.right.width))
    turned = gradients if left is None else left.T @ gradients
    turned = turned if right is None else turned @ right
    close(outer.rotate(left, right, pairs), turned[:, pairs[0], pairs[1]], tol(outer))


SAME_MATRIX = {
    "dense": lambda: Outer(dense(VOCABULARY), dense(R), B),
    "dense, other tokens": lambda: Outer(dense(VOCABULARY, 7), dense(R, 7), B),
    "lookup": lambda: Outer(one_hot(), dense(R), B),
    "lookup, other tokens": lambda: Outer(one_hot(tokens=2), dense(R, 2), B),
    "turned": lambda: Outer(dense(R), dense(VOCABULARY), B).transposed(),
    "turned lookup": lambda: Outer(dense(R), one_hot(), B).transposed(),
}


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("second", SAME_MATRIX)
@pytest.mark.parametrize("first", SAME_MATRIX)
def test_products_between_uses_of_one_matrix(first, second, budget):
    a, b = SAME_MATRIX[first](), SAME_MATRIX[second]()
    expected = (by_hand(a) * by_hand(b)).sum(dim=1)
    close(a.inner(b, budget), expected)
    close(b.inner(a, budget), expected)
    direct = Direct(torch.randn(B, a.numel, dtype=torch.float64))
    total = by_hand(a) + by_hand(b)
    close(square_norms([a, b], budget), total.square().sum(dim=1))
    close(square_norms([a, direct, b], budget), (total + direct.value).square().sum(dim=1))
    close(square_norms([a, a, b], budget), (total + by_hand(a)).square().sum(dim=1))


@any_shape
@given(
    st.integers(1, 4), st.integers(1, 9), st.integers(1, 7), st.integers(1, 7), st.integers(1, 6), st.integers(1, 3000)
)
def test_chunks_of_any_size(examples, tokens, left, right, count, budget):
    torch.manual_seed(0)
    outer = Outer(dense(left, tokens, examples=examples), dense(right, tokens, examples=examples), examples)
    directions = torch.randn(count, left * right, dtype=torch.float64)
    whole = by_hand(outer)
    for how in (outer.dot, outer._contract, outer._materialise):
        close(how(directions, budget), whole @ directions.T)
    close(outer.square_norms(budget), whole.square().sum(dim=1))


@pytest.mark.parametrize("name", ["wide left", "many tokens", "lookup", "groups", "convolution"])
def test_directions_in_bfloat16(name):
    exact = OUTERS[name]()
    directions = torch.randn(4, exact.numel).bfloat16()
    features = exact.dot(directions, 10_000)
    expected = by_hand(exact) @ directions.double().T
    assert features.dtype == torch.float32
    assert (features - expected).norm() < 2e-2 * expected.norm()


def test_written_forms_are_never_written_out_at_once():
    value, asked = torch.randn(10, 6, dtype=torch.float64), []

    def write(start, stop):
        asked.append(stop - start)
        return value[start:stop]

    form = OnDemand(write, 10, bytes_each=48)
    directions = torch.randn(4, 6, dtype=torch.float64)
    close(form.dot(directions, budget=300), value @ directions.T)
    close(form.square_norms(budget=300), value.square().sum(dim=1))
    assert max(asked) == 300 // (2 * 48)
    close(form.pick(torch.tensor([1, 1, 5])), value[:, [1, 1, 5]])
    close(form.dot(directions, budget=1), value @ directions.T)


def test_products_of_tokens_know_lookups():
    lookup, other, numbers = one_hot(), one_hot(tokens=2), dense(VOCABULARY)
    for a in (lookup, other, numbers):
        for b in (lookup, other, numbers):
            expected = a.take(1, 3).double() @ b.take(1, 3).double().transpose(2, 3)
            close(token_products(a, b, 1, 3).double(), expected)


def test_a_lookup_is_rotated_without_writing_it_out():
    lookup, basis = one_hot(width=10**9, tokens=2), torch.randn(4, 3)
    small = OneHot(lookup.index % 4, 4)
    assert torch.equal(rotated(small, basis).take(0, B)[:, 0], basis[small.index])
    assert rotated(lookup, None) is lookup


def test_windows_are_what_unfolding_gives():
    factor = windows(dims=2)
    unfolded = torch.nn.functional.unfold(factor.value, factor.kernel, factor.dilation, 0, factor.stride)
    close(factor.take(0, B)[:, 0], unfolded.transpose(1, 2))
    assert (factor.tokens, factor.width) == unfolded.shape[:0:-1]


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_sums_run_in_float32_at_least(dtype, expected):
    a, b = torch.randn(3, 4).to(dtype), torch.randn(4, 5).to(dtype)
    assert wide_type(dtype) == wide(a).dtype == times(a, b).dtype == times(a[None], b[None]).dtype == expected
    assert torch.allclose(times(a[None], b[None])[0], wide(a) @ wide(b), rtol=1e-5)
