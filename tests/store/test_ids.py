"""Ids and columns that cannot be stored, or not be written to CSV later, are refused with their row."""

from datetime import datetime

import numpy as np
import pyarrow as pa
import pytest

import eigentrace as et
from eigentrace.errors import InputError
from eigentrace.store.user_columns import as_columns
from tests.helpers.expecting import refused
from tests.helpers.runs import data, fit


@pytest.mark.parametrize(
    ("ids", "row", "value"),
    [
        ([1, 2, 2**63], 2, 2**63),
        ([2**70, 1, 2], 0, 2**70),
        ([1, "a", 2], 1, "a"),
        ([3, datetime(2020, 1, 1), 4], 1, "2020"),
        ([None, [1], [2]], 1, 1),
        ([(1, 2), (3, 4), (5, 6)], 0, 1),
        ([b"a", b"\xff", b"c"], 1, "xff"),
        ([{"a": 1}, {"a": 2}, {"a": 3}], 0, 1),
        ([1, object(), 2], 1, "object"),
    ],
    # Not the address of an object, which differs from process to process.
    ids=lambda value: type(value[1]).__name__ if isinstance(value, list) else str(value),
)
def test_ids_that_cannot_be_stored_are_refused(ids, row, value):
    with refused(InputError) as caught:
        as_columns(None, ids, 3)
    assert f"row {row} " in str(caught.value).lower()
    assert str(value) in str(caught.value)


@pytest.mark.parametrize("values", [[2**70, 1], [1, 2**63]], ids=str)
def test_numbers_of_columns_must_fit(values):
    with refused(InputError, "num", 2**70 if 2**70 in values else 2**63):
        as_columns({"num": values}, None, 2)


@pytest.mark.parametrize(
    "ids",
    [
        [f"n{row}" for row in range(60)],
        [f"n{row}é".encode() for row in range(60)],
        list(range(60)),
        np.arange(60, dtype=np.uint64) + 2**63,
        pa.array([f"n{row % 3}" for row in range(60)]).dictionary_encode(),
        [datetime(2020, 1, 1 + row % 28) for row in range(60)],
        [None, *range(59)],
        np.linspace(0, 1, 60),
    ],
    ids=["text", "bytes", "numbers", "unsigned", "dictionary", "dates", "null", "floats"],
)
@pytest.mark.filterwarnings("ignore::eigentrace.errors.EigentraceWarning")
def test_ids_that_are_scored_can_be_written(ids, tmp_path):
    run = et.score(fit(method=et.Loss()), data(ids=ids), tmp_path / "x")
    for name in ("d.csv", "d.parquet"):
        assert len(et.Decisions.read(et.clean(run, drop="10%").write(tmp_path / name))) == 60


def test_a_run_with_bad_ids_is_not_begun(tmp_path):
    with refused(InputError, "row 0"):
        et.score(fit(method=et.Loss()), data(ids=[[row] for row in range(60)]), tmp_path / "x")
    assert not (tmp_path / "x" / "manifest.json").exists()
