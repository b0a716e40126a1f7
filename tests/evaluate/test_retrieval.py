import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, roc_auc_score

from eigentrace.errors import InputError
from eigentrace.evaluate import Retrieval, detection, retrieval
from tests.helpers.expecting import refused


@st.composite
def rankings(draw):
    """Scores on a coarse grid, so that ties are common, with at least one example of each kind."""
    size = draw(st.integers(2, 40))
    level = st.one_of(st.integers(-3, 3).map(float), st.floats(-1e6, 1e6))
    scores = draw(st.lists(level, min_size=size, max_size=size))
    truth = draw(st.lists(st.booleans(), min_size=size - 2, max_size=size - 2))
    return np.array(scores), np.array(draw(st.permutations([*truth, True, False])))


@given(rankings())
def test_agrees_with_sklearn(ranking):
    scores, is_noisy = ranking
    result = retrieval(scores, is_noisy)
    assert result.auc == pytest.approx(roc_auc_score(is_noisy, scores), abs=1e-12)
    assert result.ap == pytest.approx(average_precision_score(is_noisy, scores), abs=1e-12)


def test_closed_forms():
    assert retrieval([4, 3, 2, 1], [True, True, False, False]) == Retrieval(1.0, 1.0, precision=1.0)
    assert retrieval([1, 2, 3, 4], [True, True, False, False]).auc == 0.0
    # All scores equal: one threshold, at which a quarter of what is retrieved is noisy.
    assert retrieval([7, 7, 7, 7], [False, True, False, False]) == Retrieval(0.5, 0.25, precision=0.25)


def test_infinite_scores_have_a_rank():
    assert retrieval([np.inf, 1.0, -np.inf], [True, False, False]).auc == 1.0


@pytest.mark.parametrize(
    "convert", [list, np.asarray, torch.tensor, lambda values: torch.tensor(values).float().requires_grad_()]
)
def test_takes_tensors_arrays_and_lists(convert):
    assert retrieval(convert([0.5, 1.0, 0.25]), [False, True, False]).auc == 1.0
    assert retrieval([0.5, 1.0, 0.25], torch.tensor([False, True, False])).auc == 1.0


def test_takes_bfloat16():
    assert retrieval(torch.tensor([2.0, 1.0], dtype=torch.bfloat16), [1, 0]).ap == 1.0


@pytest.mark.parametrize(
    ("scores", "is_noisy", "mentions"),
    [
        ([1.0, 2.0], [True], ("scores", "(2,)", "is_noisy", "(1,)")),
        ([[1.0, 2.0]], [[True, False]], ("scores", "(1, 2)", "is_noisy")),
        ([1.0, 2.0], [0, 2], ("is_noisy", 2)),
        ([1.0, float("nan")], [True, False], ("1 of 2", "scores", "NaN")),
        ([1.0, 2.0], [False, False], ("0 of 2", "noisy")),
        ([1.0, 2.0], [True, True], ("2 of 2", "noisy")),
        ([], [], ("0 of 0", "noisy")),
    ],
)
def test_refuses(scores, is_noisy, mentions):
    with refused(InputError, *mentions):
        retrieval(scores, is_noisy)


@given(rankings())
def test_precision_and_detection_are_means_over_the_orders_of_equal_scores(ranking):
    scores, is_noisy = ranking
    num_noisy, rng = is_noisy.sum(), np.random.default_rng(0)
    found = detection(scores, is_noisy)
    # AUC and the area say the same: a noisy example passes the good ones below it and half of the noisy ones.
    rate = is_noisy.mean()
    assert found.area == pytest.approx(rate / 2 + (1 - rate) * retrieval(scores, is_noisy).auc, abs=1e-12)
    assert (found.looked[0], found.found[0], found.looked[-1], found.found[-1]) == (0, 0, 1, 1)
    assert (np.diff(found.looked) > 0).all()
    assert (np.diff(found.found) >= 0).all()
    curves = []
    for _ in range(300):
        order = np.lexsort([rng.random(len(scores)), -scores])
        curves.append(np.append(0, np.cumsum(is_noisy[order])) / num_noisy)
    mean, error = np.mean(curves, axis=0), np.std(curves, axis=0) / np.sqrt(300)
    shares = np.arange(len(scores) + 1) / len(scores)
    expected = np.interp(shares, found.looked, found.found)
    assert (abs(mean - expected) <= 6 * error + 0.02).all()
    assert retrieval(scores, is_noisy).precision == pytest.approx(expected[num_noisy], abs=1e-12)


def test_detection_in_closed_form():
    found = detection([4, 3, 2, 1], [True, False, True, False])
    np.testing.assert_allclose(found.looked, [0, 0.25, 0.5, 0.75, 1])
    np.testing.assert_allclose(found.found, [0, 0.5, 0.5, 1, 1])
    assert found.area == 0.625
    assert found.at(0.125) == 0.25
    assert detection([1, 1, 1], [True, False, False]).area == 0.5
    assert retrieval([4, 3, 2, 1], [True, False, True, False]).precision == 0.5
    assert retrieval([2, 1, 1, 0], [False, True, True, False]).precision == 0.5
    for looked in (-0.1, 1.5, float("nan")):
        with refused(InputError, "looked", looked):
            found.at(looked)
    with refused(InputError, "1 of 2", "NaN"):
        detection([1.0, float("nan")], [True, False])
