import numpy as np
import pytest

from eigentrace.errors import InputError
from eigentrace.evaluate import Subsets
from eigentrace.evaluate.subsets import model_seed
from tests.helpers.expecting import refused


def test_random_subsets_have_their_size_and_depend_on_the_seed():
    subsets = Subsets.random(21, 50, 0.5, seed=3)
    assert len(subsets) == 50
    assert subsets.num_train == 21
    assert (subsets.masks.sum(axis=1) == 10).all()
    assert len(np.unique(subsets.masks, axis=0)) == 50
    np.testing.assert_array_equal(subsets.masks, Subsets.random(21, 50, 0.5, seed=3).masks)
    assert not np.array_equal(subsets.masks, Subsets.random(21, 50, 0.5, seed=4).masks)
    # Every example is in about half of them: five standard deviations of a binomial.
    assert (abs(Subsets.random(20, 400).masks.mean(axis=0) - 0.5) < 5 * 0.5 / 20).all()


def test_more_subsets_keep_the_first_ones():
    np.testing.assert_array_equal(Subsets.random(20, 9).masks[:4], Subsets.random(20, 4).masks)


def test_without_groups():
    subsets = Subsets.without(5, [3, [0, 1], np.array([4])])
    expected = [[1, 1, 1, 0, 1], [0, 0, 1, 1, 1], [1, 1, 1, 1, 0]]
    np.testing.assert_array_equal(subsets.masks, np.array(expected, dtype=bool))


def test_jobs_pair_subsets_with_seeds_in_order():
    jobs = Subsets.without(3, [0, 1]).jobs([[5, 6], [7, 8]])
    assert [(job.rows.tolist(), job.seed) for job in jobs] == [([1, 2], 5), ([1, 2], 6), ([0, 2], 7), ([0, 2], 8)]


def test_seeds_differ_and_fit_any_generator():
    seeds = [model_seed(base, j, i) for base in range(3) for j in range(5) for i in (None, *range(20))]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**31 for seed in seeds)


@pytest.mark.parametrize(
    ("make", "mentions"),
    [
        (lambda: Subsets.random(0), ("num_train", 1, 0)),
        (lambda: Subsets.random(10, 0), ("count", 1, 0)),
        (lambda: Subsets.random(10, fraction=1.0), ("fraction=1.0", 10)),
        (lambda: Subsets.random(10, fraction=0.01), ("fraction=0.01", 10)),
        (lambda: Subsets.random(10, fraction=float("nan")), ("fraction=nan", 10)),
        (lambda: Subsets.random(10, seed=-1), ("seed", 0, -1)),
        (lambda: Subsets.without(5, []), ("groups",)),
        (lambda: Subsets.without(5, [5]), ("5 to 5", 0, 4)),
        (lambda: Subsets.without(5, [[-1, 2]]), ("-1 to 2", 0, 4)),
        (lambda: Subsets.without(5, [[1, 1]]), ("2 rows", 1)),
        (lambda: Subsets.without(5, [[]]), ("group", "float64", "(0,)")),
        (lambda: Subsets.without(5, [[True, False]]), ("group", "bool", "(2,)", "np.flatnonzero")),
        (lambda: Subsets.without(2, [[0, 1]]), ("Subset 0",)),
        (lambda: Subsets(np.ones((2, 3))), ("masks", "float64", "(2, 3)")),
        (lambda: Subsets(np.ones(3, dtype=bool)), ("masks", "bool", "(3,)")),
    ],
)
def test_refuses(make, mentions):
    with refused(InputError, *mentions):
        make()
