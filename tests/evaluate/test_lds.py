"""A score that is right has an LDS of 1, by construction of the ground truth; and the interval means what it says."""

import numpy as np
import pytest
import torch
from scipy import stats

from eigentrace.errors import InputError
from eigentrace.evaluate import Retrained, Subsets, arrays, lds
from tests.helpers.expecting import refused

N, Q, M, S = 30, 8, 40, 3


def problem(noise=0.0, seed=0, higher_is_worse=True):
    """Additive models: an output is a constant minus what the subset's examples contribute, and noise per seed."""
    rng = np.random.default_rng(seed)
    scores = rng.normal(size=(Q, N))
    masks = Subsets.random(N, M, 0.5, seed).masks
    sign = -1 if higher_is_worse else 1
    means = 5 + sign * masks.astype(float) @ scores.T  # (M, Q)
    outputs = means[:, None] + noise * rng.normal(size=(M, S, Q))
    return scores, Retrained(masks, outputs, higher_is_worse)


@pytest.mark.parametrize("higher_is_worse", [True, False])
def test_the_true_scores_have_one_and_their_opposite_minus_one(higher_is_worse):
    scores, truth = problem(higher_is_worse=higher_is_worse)
    found = lds(scores, truth, num_bootstrap=20)
    assert found.mean == pytest.approx(1.0)
    assert found.interval == pytest.approx((1.0, 1.0))
    assert lds(-scores, truth, num_bootstrap=20).mean == pytest.approx(-1.0)


def test_agrees_with_scipy():
    scores, truth = problem(noise=3.0)
    guess = scores + np.random.default_rng(1).normal(size=scores.shape)
    found = lds(guess, truth, num_bootstrap=20)
    expected = [
        stats.spearmanr([-guess[q, mask].sum() for mask in truth.masks], truth.outputs[:, :, q].mean(axis=1)).statistic
        for q in range(Q)
    ]
    np.testing.assert_allclose(found.per_query, expected, atol=1e-12)
    assert found.mean == pytest.approx(np.mean(expected))
    assert 0.1 < found.mean < 0.9


def test_only_ranks_matter():
    scores, truth = problem(noise=3.0)
    base = lds(scores, truth, num_bootstrap=5).per_query
    # A factor per query, and a constant: all subsets have one size.
    other = scores * np.linspace(0.1, 9, Q)[:, None] + 2.0
    np.testing.assert_allclose(lds(torch.from_numpy(other), truth, num_bootstrap=5).per_query, base, atol=1e-12)


@pytest.mark.parametrize("resample", ["queries", "subsets", "both"])
def test_interval_is_a_bootstrap(resample):
    """The same draws, with subsets copied in place of counted and scipy in place of our ranks."""
    scores, truth = problem(noise=3.0)
    found = lds(scores, truth, resample=resample, num_bootstrap=25, level=0.8, seed=3)
    rng, means = np.random.default_rng(3), []
    predicted = -scores @ truth.masks.T.astype(float)
    for _ in range(25):
        drawn = np.arange(M) if resample == "queries" else rng.integers(M, size=M)
        own = np.array([stats.spearmanr(predicted[q, drawn], truth.mean[drawn, q]).statistic for q in range(Q)])
        means.append(np.mean(own if resample == "subsets" else own[rng.integers(Q, size=Q)]))
    expected = np.quantile(means, [0.1, 0.9]) + found.mean - np.mean(means)
    assert found.interval == pytest.approx(tuple(expected), abs=1e-12)
    assert found.interval[0] < found.mean < found.interval[1]
    assert (found.resampled, found.level) == (resample, 0.8)
    assert str(found).startswith(f"LDS {found.mean:.3f} (")
    assert lds(scores, truth, resample=resample, num_bootstrap=25, level=0.8, seed=3).interval == found.interval


def test_interval_covers_what_other_draws_give():
    """Over fresh sets of queries and subsets, the 95% interval holds the mean of all about as often as it should."""

    def draw(seed):
        rng = np.random.default_rng([7, seed])
        truth, guess = rng.normal(size=(2, 12, N))
        masks = Subsets.random(N, 30, 0.5, seed).masks
        outputs = -(masks.astype(float) @ truth.T)[:, None] + rng.normal(size=(30, 1, 12)) * 2
        return lds(truth + guess, Retrained(masks, outputs), num_bootstrap=40, seed=seed)

    found = [draw(seed) for seed in range(40)]
    center = np.mean([one.mean for one in found])
    covered = np.mean([one.interval[0] <= center <= one.interval[1] for one in found])
    assert covered >= 0.85


def test_queries_that_say_nothing():
    scores, truth = problem()
    outputs = truth.outputs.copy()
    outputs[:, :, 0] = 1.5  # the same whatever it is trained on
    scores[1] = 0.0  # a prediction that says nothing
    found = lds(scores, Retrained(truth.masks, outputs), num_bootstrap=10)
    assert np.isnan(found.per_query[0])
    assert found.per_query[1] == 0.0
    assert found.mean == pytest.approx((Q - 2) / (Q - 1))
    with refused(InputError, f"{Q} queries", f"{M} subsets"):
        lds(scores, Retrained(truth.masks, np.ones_like(outputs)))


def test_sums_in_blocks(monkeypatch):
    scores, truth = problem(noise=3.0)
    expected = lds(scores, truth, num_bootstrap=2).per_query
    monkeypatch.setattr(arrays, "_BLOCK", 7)
    np.testing.assert_allclose(lds(scores, truth, num_bootstrap=2).per_query, expected, atol=1e-12)


def test_one_query():
    scores, truth = problem()
    found = lds(scores[:1], Retrained(truth.masks, truth.outputs[:, :, :1]), num_bootstrap=5)
    assert found.mean == pytest.approx(1.0)


SCORES, TRUTH = problem()
REFUSED = {
    "transposed": (SCORES.T, {}, ("scores", "(30, 8)", "(8, 30)", "transposed")),
    "other queries": (SCORES[:3], {}, ("scores", "(3, 30)", "(8, 30)")),
    "flat": (SCORES[0], {}, ("scores", "(30,)")),
    "empty": (np.zeros((0, 30)), {}, ("scores", "(0, 30)")),
    "nan": (np.where(SCORES > 2, np.nan, SCORES), {}, ("scores", "NaN", f"{(SCORES > 2).sum()} of {SCORES.size}")),
    "infinite": (np.where(SCORES > 2, np.inf, SCORES), {}, ("scores", f"{(SCORES > 2).sum()} of {SCORES.size}")),
    "resample": (SCORES, dict(resample="seeds"), ("resample", "'queries'", "'subsets'", "'both'", "'seeds'")),
    "level": (SCORES, dict(level=95), ("level", 95)),
    "bootstrap": (SCORES, dict(num_bootstrap=0), ("num_bootstrap", 0)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses(name):
    scores, options, mentions = REFUSED[name]
    with refused(InputError, *mentions) as caught:
        lds(scores, TRUTH, **options)
    assert ("transposed" in str(caught.value)) == (name == "transposed")


def test_refuses_too_few_subsets():
    with refused(InputError, "2 subsets", 3):
        lds(SCORES, Retrained(TRUTH.masks[:2], TRUTH.outputs[:2]))
