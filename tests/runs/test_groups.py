"""Sums by group against a loop over the rows."""

import statistics

import numpy as np
import pyarrow as pa
import pytest
import torch

from eigentrace.cleaning.thresholds import clean
from eigentrace.errors import EigentraceWarning, InputError
from eigentrace.runs.groups import groups
from tests.helpers.expecting import refused, warned
from tests.helpers.tables import Columns, noisy


def by_loop(run, column, influence=None):
    values, own, loss = run.column(column).tolist(), run.column("self_influence"), run.column("loss")
    top = clean(run, drop="5%").mask
    found = []
    for name in dict.fromkeys(values):
        rows = [row for row, value in enumerate(values) if value == name]
        scores = [float(own[row]) for row in rows]
        made = {
            "group": name,
            "count": len(rows),
            "sum_self_influence": sum(scores),
            "mean_self_influence": sum(scores) / len(rows),
            "median_self_influence": statistics.median(scores),
            "mean_loss": sum(float(loss[row]) for row in rows) / len(rows),
            "top_share": sum(bool(top[row]) for row in rows) / len(rows),
        }
        if influence is not None:
            made["sum_influence"] = float(influence[..., rows].sum())
        found.append(made)
    return sorted(found, key=lambda made: -made["sum_self_influence" if influence is None else "sum_influence"])


@pytest.mark.parametrize("column", ["source", "label"])
@pytest.mark.parametrize("size", [61, 200])
def test_against_a_loop(column, size):
    run = noisy(size)
    for made, expected in zip(groups(run, column).to_pylist(), by_loop(run, column), strict=True):
        assert made == pytest.approx(expected)


@pytest.mark.parametrize("shape", [(60,), (3, 60)])
@pytest.mark.parametrize("kind", [torch.float64, torch.bfloat16, None])
def test_influence_is_added_up(shape, kind):
    run = noisy(60)
    scores = torch.randn(shape, dtype=kind or torch.float64, requires_grad=kind is not None)
    numbers = scores.detach().double().numpy()
    made = groups(run, "source", scores if kind else numbers)
    for found, expected in zip(made.to_pylist(), by_loop(run, "source", numbers), strict=True):
        per_query = found.pop("influence", None)
        assert found == pytest.approx(expected)
        if len(shape) == 2:
            rows = np.flatnonzero(run.column("source") == found["group"])
            assert per_query == pytest.approx(numbers[:, rows].sum(axis=1))
    assert ("influence" in made.column_names) == (len(shape) == 2)


@pytest.mark.parametrize(
    "values",
    [
        np.array(["a", None, "b", None], dtype=object),
        np.array([1.0, np.nan, 2.0, np.nan]),
        pa.chunked_array([["a", None], ["b", None]]),
        pa.array(["a", None, "b", None]).dictionary_encode(),
    ],
)
def test_rows_without_a_value_are_a_group(values):
    run = Columns(self_influence=[1.0, 2.0, 3.5, 4.0], kind=np.zeros(4))
    run.put("kind", values)
    made = groups(run, "kind")
    assert made["group"].to_pylist()[0] is None
    assert made["count"].to_pylist() == [2, 1, 1]
    assert made["sum_self_influence"].to_pylist() == [6.0, 3.5, 1.0]
    assert "mean_loss" not in made.column_names


def test_rows_without_a_score_are_told_and_left_out():
    run = Columns(self_influence=[1.0, np.nan, np.nan], loss=[1.0, 2.0, 3.0], kind=["a", "a", "b"])
    with warned(EigentraceWarning, "self_influence", 2, 3):
        made = groups(run, "kind")
    assert made["sum_self_influence"].to_pylist() == [1.0, 0.0]
    assert made["mean_self_influence"][0].as_py() == made["median_self_influence"][0].as_py() == 1.0
    assert np.isnan(made["median_self_influence"][1].as_py())
    assert made["mean_loss"].to_pylist() == [1.5, 3.0]


def test_wrong_columns_are_refused():
    run = noisy(20)
    with refused(InputError, "'sauce'", "self_influence, loss, label, prediction, source"):
        groups(run, "sauce")
    with refused(InputError, "influence", "(20,)", "(queries, 20)", "(19,)"):
        groups(run, "source", np.zeros(19))
    run.put("source", np.array([1, "a", *range(18)], dtype=object))
    with refused(InputError, "'source'", "'a'"):
        groups(run, "source")
    run.put("source", np.arange(3))
    with refused(InputError, "'source'", 3, 20):
        groups(run, "source")
