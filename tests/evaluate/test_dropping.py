"""Retraining curves drop what they say they drop, beside a random control."""

import xml.etree.ElementTree as ET

import numpy as np
import pytest

from eigentrace.errors import InputError
from eigentrace.evaluate import Loop, retraining_curves
from tests.helpers.expecting import refused

N = 20
SCORES = np.random.default_rng(0).permutation(N).astype(float)


def left(rows, seed):
    """Stands in for training: two queries, the highest score left and how many rows are left; one output per seed."""
    return [SCORES[rows].max() + seed % 2, float(len(rows))]


def high_left(rows, seed):
    return [SCORES[rows].max()]


def test_drops_the_top_or_the_bottom():
    found = retraining_curves(high_left, {"score": SCORES}, shares=(0.1, 0.5), seeds=3)
    np.testing.assert_allclose(found.shares, [0.0, 0.1, 0.5])
    assert list(found.values) == ["score", "random"]
    assert found.values["score"].shape == (3, 3)
    np.testing.assert_array_equal(found.mean("score"), [19, 17, 9])
    np.testing.assert_array_equal(found.spread("score"), [0, 0, 0])
    bottom = retraining_curves(high_left, {"score": SCORES}, shares=(0.1, 0.5), drop="bottom", seeds=3)
    np.testing.assert_array_equal(bottom.mean("score"), [19, 19, 19])


def test_the_control_draws_another_order_for_every_seed_and_begins_with_all():
    found = retraining_curves(high_left, {"score": SCORES}, shares=(0.5, 0.9), seeds=8)
    np.testing.assert_array_equal(found.values["random"][0], 19)
    assert len(set(found.values["random"][2])) > 1
    assert found.mean("random")[2] > found.mean("score")[2]
    assert found.spread("random")[2] > 0
    again = retraining_curves(high_left, {"score": SCORES}, shares=(0.5, 0.9), seeds=8)
    np.testing.assert_array_equal(again.values["random"], found.values["random"])


def test_outputs_are_averaged_over_queries_and_kept_by_seed():
    found = retraining_curves(left, {"score": SCORES}, shares=(0.5,), seeds=4)
    per_seed = found.values["score"] - np.array([[(19 + 20) / 2], [(9 + 10) / 2]])
    assert set(np.unique(per_seed)) <= {0.0, 0.5}
    assert (per_seed[0] == per_seed[1]).all()  # models of one seed are alike
    np.testing.assert_allclose(found.spread("score"), found.values["score"].std(axis=1, ddof=1))


def test_equal_scores_go_in_the_order_of_the_data():
    def rows_left(rows, seed):
        return [float(rows.sum())]

    found = retraining_curves(rows_left, {"flat": np.zeros(4)}, shares=(0.5,), seeds=1)
    np.testing.assert_array_equal(found.mean("flat"), [0 + 1 + 2 + 3, 2 + 3])
    assert found.spread("flat").tolist() == [0, 0]  # with a single seed


def test_the_whole_data_is_trained_on_once_per_seed(tmp_path):
    calls = []

    def train(rows, seed):
        calls.append(len(rows))
        return [1.0]

    trainer = Loop(train, recipe="one")
    retraining_curves(trainer, {"a": SCORES, "b": -SCORES}, shares=(0.1, 0.2), seeds=2, cache=tmp_path)
    assert len(calls) == 2 * (1 + 3 * 2)
    retraining_curves(trainer, {"b": SCORES}, shares=(0.1, 0.2), drop="bottom", seeds=2, cache=tmp_path)
    assert len(calls) == 2 * (1 + 3 * 2)  # the bottom of one score is the top of the other, and the control is there


def test_picture():
    found = retraining_curves(left, {"mine & <yours>": SCORES}, shares=(0.1, 0.5), seeds=3)
    root = ET.fromstring(found.svg("mean loss"))
    texts = [node.text for node in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"mine & <yours>", "random", "mean loss"} <= set(texts)
    assert any("top" in (text or "") for text in texts)
    assert len(list(root.iter("{http://www.w3.org/2000/svg}polyline"))) == 2


@pytest.mark.parametrize(
    ("scores", "options", "mentions"),
    [
        ({"a": SCORES}, dict(drop="middle"), ("drop", "'top'", "'bottom'", "'middle'")),
        ({"random": SCORES}, {}, ("'random'",)),
        ({}, {}, ("[]",)),
        ({"a": SCORES, "b": SCORES[:5]}, {}, ("[5, 20]",)),
        ({"a": SCORES[None]}, {}, ("scores['a']", "(1, 20)")),
        ({"a": np.full(N, np.nan)}, {}, ("20 of 20", "scores['a']", "NaN")),
        ({"a": SCORES}, dict(shares=()), ("shares", "[]")),
        ({"a": SCORES}, dict(shares=(1.0,)), ("shares", "[1.0]")),
        ({"a": SCORES}, dict(shares=(0.01,)), ("shares=[0.01]", 0)),
        ({"a": SCORES}, dict(shares=(0.99,)), ("shares=[0.99]", 20)),
        ({"a": SCORES}, dict(seeds=0), ("seeds", 0)),
    ],
)
def test_refuses(scores, options, mentions):
    with refused(InputError, *mentions):
        retraining_curves(high_left, scores, **options)


def test_unknown_curves():
    found = retraining_curves(high_left, {"score": SCORES}, shares=(0.5,), seeds=1)
    with refused(InputError, "'loss'", "score, random"):
        found.mean("loss")
