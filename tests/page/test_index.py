"""Histograms count everything once, ties keep the order of rows, and the page's numbers need no torch."""

import json
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest

from bench import serve as bench
from eigentrace.errors import InputError
from eigentrace.page.as_json import as_json
from eigentrace.page.index import Index, Wanted
from tests.helpers.expecting import expect_mentions, refused


class Held:
    """Columns in memory."""

    def __init__(self, **numbers):
        self.numbers = {name: np.asarray(values) for name, values in numbers.items()}
        self.num_rows, self.names, self.ids = len(next(iter(self.numbers.values()))), tuple(numbers), None

    def number(self, name):
        return self.numbers[name]

    def or_missing(self, name):
        return self.numbers.get(name)


def index(decided=None, **numbers):
    held = Held(**numbers)
    codes = np.zeros(held.num_rows, np.int8) if decided is None else decided
    return Index(held, lambda words: None, lambda: (codes, 1))


VALUES = {
    "even": np.linspace(-1, 1, 1000),
    "skewed": np.random.default_rng(0).standard_normal(1000) ** 8,
    "skewed with zeros": np.where(np.arange(1000) % 5, np.random.default_rng(1).random(1000) ** 20, 0.0),
    "constant": np.full(1000, 3.0),
    "zeros": np.zeros(1000),
    "whole": np.arange(1000),
    "gaps": np.where(np.arange(1000) % 3, np.arange(1000.0), np.nan),
    "infinite": np.where(np.arange(1000) % 3, np.arange(1000.0), np.inf),
    "single": np.array([2.5]),
}


@pytest.mark.parametrize("name", VALUES)
def test_histograms_count_every_number_once(name):
    values = VALUES[name]
    found = index(x=values).histogram("x")
    finite = values[np.isfinite(values)].astype(float)
    assert sum(found["counts"]) == len(finite)
    assert len(found["edges"]) == len(found["counts"]) + 1
    assert np.all(np.diff(found["edges"]) > 0)
    assert found["log"] == name.startswith("skewed")
    edges = np.array(found["edges"])
    expected = np.histogram(np.clip(finite, edges[0], edges[-1]), edges)[0]
    assert np.abs(expected - found["counts"]).max() <= 1  # an edge that is not exact


def test_nothing_finite_is_an_empty_histogram():
    assert index(x=np.full(5, np.nan)).histogram("x")["counts"] == []


def test_ties_keep_the_order_of_rows_and_gaps_come_last():
    values = np.array([1.0, np.nan, 2.0, 1.0, 2.0, np.nan])
    found = index(x=values)
    assert found.order("x", True).tolist() == [2, 4, 0, 3, 1, 5]
    assert found.order("x", False).tolist() == [0, 3, 2, 4, 1, 5]
    assert found.order("row", True).tolist() == [5, 4, 3, 2, 1, 0]
    unsigned = index(x=np.array([0, 3, 255], dtype=np.uint8))
    assert unsigned.order("x", True).tolist() == [2, 1, 0]


@pytest.mark.parametrize("descending", [True, False])
def test_numbers_of_four_bytes_are_ordered_as_any_others(descending):
    draw = np.random.default_rng(0)
    values = np.concatenate(
        [draw.standard_normal(5000), draw.integers(-3, 4, 5000), [np.inf, -np.inf, -0.0, 0.0, 1e-45]]
    )
    values = draw.permutation(values).astype(np.float32)
    values[::97] = np.nan
    expected = np.argsort(-values.astype(float) if descending else values.astype(float), kind="stable")
    assert np.array_equal(index(x=values).order("x", descending), expected)


def test_parts_of_a_ranking_cover_it_once():
    draw = np.random.default_rng(0).integers(0, 5, 1003).astype(float)
    draw[7] = np.nan
    found = index(self_influence=draw)
    low = found.matching(Wanted(high=0.5)).tolist()
    high = found.matching(Wanted(low=0.5)).tolist()
    assert sorted({*low, *high}) == [row for row in range(1003) if row != 7]
    assert len(low) + len(high) == 1002
    assert len(found.matching(Wanted(low=0.999))) == 2


def test_what_is_remembered_follows_the_decisions():
    codes, version = np.zeros(4, np.int8), [1]
    found = Index(Held(self_influence=np.arange(4.0)), lambda words: None, lambda: (codes, version[0]))
    assert found.matching(Wanted(decision=1)).tolist() == []
    codes[2], version[0] = 1, 2
    assert found.matching(Wanted(decision=1)).tolist() == [2]


def test_searching_where_there_is_nothing_to_search():
    with refused(InputError, "'a'", "text", "ids"):
        index(self_influence=np.arange(4.0)).matching(Wanted(search="a"))


def test_points_of_the_scatter_hold_the_highest():
    values = np.random.default_rng(0).random(100_000)
    found = index(self_influence=values)
    rows = found.scatter(4000, 200)
    assert 3990 <= len(rows) <= 4000
    assert set(np.argsort(-values)[:200]) <= set(rows.tolist())
    assert np.array_equal(rows, found.scatter(4000, 200))


def test_plain_values():
    given = {"a": np.float32(1.5), "b": [np.nan, np.inf, 2**60, True, None], "c": np.arange(2), 3: pa.scalar(4)}
    assert as_json(given) == {"a": 1.5, "b": [None, None, str(2**60), True, None], "c": [0, 1], "3": "4"}


NUMBERS = """
import sys, json
from eigentrace.page.replies import Answers
from eigentrace.page.app import make_app
from eigentrace.page.subject import Subject
found = Answers(Subject(sys.argv[1])).overview()
print(json.dumps([found["kind"], found["rows"], "torch" in sys.modules, "transformers" in sys.modules]))
"""


def test_the_overview_comes_before_torch_is_loaded(pairs):
    run = subprocess.run([sys.executable, "-c", NUMBERS, str(pairs)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == ["pair", 50, False, False]


@pytest.mark.parametrize("name", ["fastapi", "uvicorn"])
def test_a_missing_package_is_named_with_its_extra(scored, name):
    start = "from eigentrace.page.server import run_server; run_server(sys.argv[1])"
    code = f"import sys; sys.modules[{name!r}] = None; {start}"
    run = subprocess.run([sys.executable, "-c", code, str(scored)], capture_output=True, text=True, check=False)
    assert run.returncode == 1
    expect_mentions(run.stderr, ["InputError", name, 'pip install -e ".[serve]"'])


def test_the_benchmark_runs_at_its_smallest(tmp_path):
    assert bench.main(["--small", "--rows", "2000", "--out", str(tmp_path)]) == 0
    (machine,) = json.loads((tmp_path / "data" / "serve_small.json").read_text()).values()
    cells = machine["2000"]["cells"]
    assert {"first", "memory", "explain", "export", *bench.QUESTIONS} <= cells.keys()
    assert cells["decide"]["changed"] > 0
    page = (tmp_path / "serve_small.md").read_text()
    expect_mentions(page, ["2,000", "overview", "MiB"])
    assert str(tmp_path) not in page
