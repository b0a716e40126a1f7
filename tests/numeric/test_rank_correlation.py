import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from eigentrace.errors import InputError
from eigentrace.evaluate import pearson, spearman
from eigentrace.numeric.rank_correlation import RowRanks, correlation
from tests.helpers.expecting import refused


@st.composite
def tables(draw):
    """Two tables of one shape, on a coarse grid so that ties are common, and how often each column counts."""
    rows, columns = draw(st.integers(1, 4)), draw(st.integers(2, 12))
    level = st.one_of(st.integers(-2, 2).map(float), st.floats(-1e6, 1e6, allow_subnormal=False))
    row = st.lists(level, min_size=columns, max_size=columns)
    a, b = (np.array(draw(st.lists(row, min_size=rows, max_size=rows))) for _ in range(2))
    counts = np.array(draw(st.lists(st.integers(0, 3), min_size=columns, max_size=columns)))
    counts[draw(st.integers(0, columns - 1))] += 1
    return a, b, counts


@given(tables())
def test_ranks_agree_with_scipy(drawn):
    a, _, counts = drawn
    np.testing.assert_array_equal(RowRanks(a).ranks(), stats.rankdata(a, axis=1))
    # A column that counts n times has the rank that n copies of it have.
    expected = stats.rankdata(np.repeat(a, counts, axis=1), axis=1)
    found = np.repeat(RowRanks(a).ranks(counts.astype(float)), counts, axis=1)
    np.testing.assert_array_equal(found, expected)


@given(tables())
def test_spearman_agrees_with_scipy(drawn):
    a, b, counts = drawn
    for x, y, found in zip(a, b, spearman(a, b), strict=True):
        expected = np.nan if np.ptp(x) == 0 or np.ptp(y) == 0 else stats.spearmanr(x, y).statistic
        np.testing.assert_allclose(found, expected, atol=1e-12)
    weights = counts.astype(float)
    found = correlation(RowRanks(a).ranks(weights), RowRanks(b).ranks(weights), weights)
    copies = spearman(np.repeat(a, counts, axis=1), np.repeat(b, counts, axis=1))
    np.testing.assert_allclose(found, copies, atol=1e-9)


def test_pearson_agrees_with_scipy():
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 5, 30))
    expected = [stats.pearsonr(x, y).statistic for x, y in zip(a, b, strict=True)]
    np.testing.assert_allclose(pearson(a, b), expected, rtol=1e-12)
    np.testing.assert_allclose(pearson(a * 1e-200, b * 1e200), expected, rtol=1e-12)


def test_what_does_not_vary_has_no_correlation():
    flat, rising = np.full((1, 4), 0.1), np.arange(4.0)[None]
    for measure in (pearson, spearman):
        assert np.isnan(measure(flat, rising)).all()
        assert np.isnan(measure(rising, flat)).all()
    assert np.isnan(spearman(np.ones((1, 1)), np.ones((1, 1)))).all()


def test_infinite_values_have_a_rank():
    assert spearman(np.array([[-np.inf, 0.0, np.inf]]), np.array([[1.0, 2.0, 3.0]]))[0] == 1.0


@pytest.mark.parametrize("measure", [pearson, spearman])
def test_refuses(measure):
    with refused(InputError, "(1, 2)", "(1, 3)"):
        measure(np.zeros((1, 2)), np.zeros((1, 3)))
    with refused(InputError, "(2,)"):
        measure(np.zeros(2), np.zeros(2))
    with refused(InputError, "NaN"):
        measure(np.array([[1.0, np.nan]]), np.zeros((1, 2)))
