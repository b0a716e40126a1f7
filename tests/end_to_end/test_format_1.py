"""Runs and fits that version 0.1.0 wrote before its modules were moved: they open, and answer with the same numbers.

`format_1/` holds a classifier of 51 parameters, its 40 examples, three fits of it (Arnoldi with coordinates of its
tail, TracIn over two checkpoints, an ensemble), a complete run with ids and features in half precision, a run that was
killed after its first shard, and, in `expected.safetensors`, what the version that wrote them answered.
"""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import TensorDataset

import eigentrace as et
from eigentrace.runs.explain import STORED

HELD = Path(__file__).parent / "format_1"
EXPECTED = load_file(HELD / "expected.safetensors")
# Computed again on another machine, or by another version of torch: float32, with sums in another order.
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


@pytest.fixture(scope="module")
def task():
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    model.load_state_dict(load_file(HELD / "model.safetensors"))
    return et.classification(model)


@pytest.fixture(scope="module")
def data():
    held = load_file(HELD / "examples.safetensors")
    ids = [f"example-{row}" for row in range(40)]
    return et.Data(TensorDataset(held["x"], held["y"]), batch_size=8, ids=ids)


@pytest.fixture
def copied(tmp_path):
    return Path(shutil.copytree(HELD, tmp_path / "held"))


def queries(data):
    return data.take(np.arange(3))


@pytest.mark.parametrize("name", ["fit", "tracin", "ensemble"])
def test_fits_answer_as_before(name, task, data):
    fitted = et.load(HELD / name, task)
    torch.testing.assert_close(fitted.self_influence(data), EXPECTED[f"{name}.self_influence"], **CLOSE)
    torch.testing.assert_close(fitted.influence(data, queries(data)), EXPECTED[f"{name}.influence"], **CLOSE)
    if name == "fit":
        torch.testing.assert_close(fitted.features(data), EXPECTED["fit.features"], **CLOSE)
        assert fitted.reliability.self_influence == pytest.approx(0.94577861)


def test_what_a_run_holds_is_read_to_the_bit():
    run = et.open_run(HELD / "run")
    assert run.columns == ("loss", "gradient_norm", "self_influence", "label", "prediction", "confidence", "source")
    assert (run.is_complete, run.num_rows, run.ids[7], run.column("source")[3]) == (True, 40, "example-7", "book")
    for name in run.columns[:6]:
        np.testing.assert_array_equal(run.column(name), EXPECTED[f"run.{name}"].numpy())
    assert torch.equal(run.features_of(np.arange(40)), EXPECTED["run.features"])


def test_questions_without_the_model_are_answered_as_before():
    found = et.open_run(HELD / "run").explain([0, 5], k=4)
    assert found.how == STORED
    for side in ("proponent", "opponent"):
        np.testing.assert_array_equal(getattr(found, f"{side}s").rows, EXPECTED[f"run.{side}s"].numpy())
        np.testing.assert_allclose(getattr(found, f"{side}s").scores, EXPECTED[f"run.{side}_scores"], rtol=1e-5)


def test_questions_with_the_model_are_answered_as_before(task, data):
    found = et.open_run(HELD / "run", task, data).explain(queries(data), k=4)
    np.testing.assert_array_equal(found.proponents.rows, EXPECTED["asked.proponents"].numpy())
    np.testing.assert_allclose(found.proponents.scores, EXPECTED["asked.proponent_scores"], **CLOSE)


def test_a_killed_run_goes_on(copied, task, data):
    path = copied / "unfinished"
    assert et.open_run(path).num_missing == 24
    first = (path / "shards" / "000000000000.safetensors").read_bytes()
    run = et.score(et.load(path / "fit", task).unstored(), data, path, shard_rows=16)
    assert run.is_complete
    assert et.check(path).is_good
    assert (path / "shards" / "000000000000.safetensors").read_bytes() == first
    for name in ("self_influence", "confidence"):
        np.testing.assert_allclose(run.column(name), EXPECTED[f"unfinished.{name}"].numpy(), **CLOSE)


def test_a_copy_is_whole(copied):
    assert et.check(copied / "run").is_good
