"""Memorisation is the difference between models with and without an example, with a standard error that holds."""

import numpy as np
import pytest
import torch
from torch import nn

from eigentrace.errors import InputError
from eigentrace.evaluate import SGD, ManyModels, Retrained, Subsets, memorization, retrain
from tests.helpers.expecting import expect_mentions, refused

MASKS = np.array([[1, 1, 0], [1, 0, 1], [0, 1, 1], [0, 0, 1]], dtype=bool)
# Four subsets, one seed each: example 0 is in the first two, 1 in the first and third, 2 in all but the first.
LOSSES = np.array([[0.1, 1.0, 2.0], [0.3, 5.0, 2.0], [1.2, 3.0, 5.0], [0.8, 7.0, 2.0]])[:, None]


def test_a_table_with_known_answers():
    found = memorization(Retrained(MASKS, LOSSES))
    np.testing.assert_allclose(found.with_example, [0.2, 2.0, 3.0])
    np.testing.assert_allclose(found.without, [1.0, 6.0, 2.0])
    np.testing.assert_allclose(found.values, [0.8, 4.0, -1.0])
    assert (found.num_with.tolist(), found.num_without.tolist()) == ([2, 2, 3], [2, 2, 1])
    # Variances of 0.02 and 0.08, then 2 and 2, each over two subsets; the third has one subset on one side.
    np.testing.assert_allclose(found.error, [np.sqrt(0.02 / 2 + 0.08 / 2), np.sqrt(2.0), np.nan])
    assert found.num_undefined == 0


def test_the_sign_follows_what_is_measured():
    """Probabilities increase as models get better: the model with the example has more."""
    losses, probabilities = Retrained(MASKS, LOSSES), Retrained(MASKS, np.exp(-LOSSES), higher_is_worse=False)
    found = memorization(probabilities)
    assert np.sign(found.values).tolist() == np.sign(memorization(losses).values).tolist() == [1, 1, -1]
    np.testing.assert_allclose(found.values, found.with_example - found.without)


def test_seeds_are_averaged_before_subsets_are_compared():
    """Copies of a model add no information, so they leave the standard error as it is."""
    found = memorization(Retrained(MASKS, np.repeat(LOSSES, 3, axis=1)))
    single = memorization(Retrained(MASKS, LOSSES))
    np.testing.assert_allclose(found.error, single.error)
    shifts = np.array([-0.5, 0.5])[None, :, None]
    np.testing.assert_allclose(memorization(Retrained(MASKS, LOSSES + shifts)).values, single.values)


def test_rows_say_which_examples_the_queries_are():
    some = Retrained(MASKS, LOSSES[:, :, [2, 0]])
    found, every = memorization(some, rows=[2, 0]), memorization(Retrained(MASKS, LOSSES))
    np.testing.assert_allclose(found.values, every.values[[2, 0]])
    assert found.num_with.tolist() == [3, 2]


def test_the_standard_error_is_the_spread_of_repeated_draws():
    """Draw subsets and noise 600 times: the values vary as much as their errors say, around the truth."""
    rng, gain, noise = np.random.default_rng(0), np.array([0.0, 0.5, 2.0, 1.0]), np.array([0.1, 0.3, 1.0, 2.0])
    values, errors = [], []
    for draw in range(600):
        masks = Subsets.random(4, 40, 0.5, seed=draw).masks
        outputs = masks * gain + noise * (1 + masks) * rng.standard_normal(masks.shape)  # noisier with the example
        found = memorization(Retrained(masks, outputs[:, None], higher_is_worse=False))
        values.append(found.values)
        errors.append(found.error)
    spread, reported = np.std(values, axis=0), np.sqrt(np.mean(np.square(errors), axis=0))
    # The outputs of the other examples of a subset are independent here. 600 draws fix a spread to 3%.
    np.testing.assert_allclose(reported, spread, rtol=0.1)
    assert (np.abs(np.mean(values, axis=0) - gain) < 4 * spread / np.sqrt(600)).all()


def test_an_example_in_every_subset_or_in_none_is_undefined_and_counted():
    masks = np.array([[1, 0, 1], [1, 0, 0], [1, 0, 1], [1, 0, 0]], dtype=bool)
    found = memorization(Retrained(masks, LOSSES))
    assert np.isnan(found.values).tolist() == np.isnan(found.error).tolist() == [True, True, False]
    assert found.num_undefined == 2
    np.testing.assert_allclose([found.with_example[0], found.without[1]], [0.6, 4.0])
    assert np.isnan(found.without[0])
    expect_mentions(str(found), ["3 examples", "2 in every subset or in none"])
    expect_mentions(str(memorization(Retrained(masks[:, :2], LOSSES[:, :, :2]))), ["2 examples", "none"])


REFUSED = {
    "too few queries": (Retrained(MASKS, LOSSES[:, :, :2]), None, ("2 queries", "3 training examples", "rows=")),
    "rows of another length": (Retrained(MASKS, LOSSES[:, :, :2]), [0], ("rows", "2 queries", "(1,)")),
    "a mask": (Retrained(MASKS, LOSSES), MASKS[0], ("rows", "bool", "np.flatnonzero")),
    "a row that is not there": (Retrained(MASKS, LOSSES), [0, 1, 3], ("rows", 3, 2)),
    "a negative row": (Retrained(MASKS, LOSSES), [0, 1, -1], ("rows", -1, 2)),
    "a row twice": (Retrained(MASKS, LOSSES), [0, 1, 1], ("Row 1", "2 times")),
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_shapes_are_refused(case):
    retrained, rows, mentions = REFUSED[case]
    with refused(InputError, *mentions):
        memorization(retrained, rows=rows)


def test_retrained_networks_memorise_a_wrong_label():
    """An image that has another label than its copies is learnt only by training on it."""
    x = torch.eye(4).repeat_interleave(6, dim=0)
    y = torch.arange(4).repeat_interleave(6)
    y[0] = 3
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 4))
    subsets = Subsets.random(24, 40, 0.7)
    by = {
        measure: memorization(
            retrain(
                ManyModels(model, (x, y), (x, y), SGD(epochs=60, batch_size=6, lr=0.3), measure=measure),
                subsets,
                seeds=1,
            )
        )
        for measure in ("loss", "probability")
    }
    for found in by.values():
        assert found.values.argmax() == 0
        assert found.values[0] > 4 * found.error[0]
    assert 0 < by["probability"].values[0] < 1
