import json
import math
import warnings
from dataclasses import asdict

import pytest
import torch

from eigentrace.demo import run_demo
from eigentrace.demo.run import _Comparison
from eigentrace.errors import ConvergenceWarning, InputError

METHODS = ["Loss", "TracIn", "RandProj", "RandSelect", "Arnoldi (truncated)", "Arnoldi (tail)"]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """One cut-down demo for all tests of this module."""
    out, messages = tmp_path_factory.mktemp("demo") / "run", []
    summary = run_demo(out, seed=1, steps=8, sample=32, epochs=2, size=100, on_message=messages.append)
    return out, summary, messages


def test_summary_on_disk_is_the_one_returned(small):
    out, summary, _ = small
    stored = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    assert stored == json.loads(json.dumps(asdict(summary)))
    assert set(stored) >= {"methods", "accuracy", "seed", "steps", "parameters", "versions"}
    assert [row["method"] for row in stored["methods"]] == METHODS
    *others, truncated, tail = [row["keep"] for row in stored["methods"]]
    assert others == [None, None, 50, 50]
    assert 1 <= truncated == tail <= 8  # a step may bring nothing that counts as curvature
    assert set(stored["accuracy"]) == {"train_noisy", "test_noisy", "test_true"}
    assert stored["parameters"] == 824_458
    assert (stored["seed"], stored["steps"]) == (1, 8)
    assert stored["versions"]["torch"] == torch.__version__


def test_every_number_is_sound(small):
    _, summary, _ = small
    for row in summary.methods:
        assert 0 <= row.auc <= 100
        assert 0 < row.ap <= 100
        assert row.fit_seconds >= 0
        assert row.score_seconds > 0
        assert math.isfinite(row.fit_seconds + row.score_seconds)
    assert all(0 <= value <= 100 for value in asdict(summary.accuracy).values())


def test_both_arnoldi_rows_share_one_fit(small):
    truncated, tail = small[1].methods[-2:]
    assert truncated.fit_seconds == tail.fit_seconds > 0


def test_messages_name_every_method(small):
    messages = small[2]
    assert messages[0] == "100 digits, 20 of them given a wrong label."
    for name in METHODS:
        assert any(message.startswith(f"{name}: AUC") for message in messages)
    assert not any("\n" in message for message in messages)


def test_what_a_fit_warns_about_becomes_a_message():
    def fit():
        warnings.warn("not settled", ConvergenceWarning, stacklevel=1)
        warnings.warn("old call", DeprecationWarning, stacklevel=1)
        return "fitted"

    messages = []
    with pytest.warns(DeprecationWarning, match="old call") as others:
        fitted, seconds = _Comparison(None, None, messages.append).fit(fit)
    assert fitted == "fitted"
    assert seconds >= 0
    assert messages == ["Note: not settled"]
    assert len(others) == 1


def test_the_page_shows_the_run(small):
    page = (small[0] / "report.html").read_text(encoding="utf-8")
    assert "100 handwritten digits, after 20 of their labels" in page
    assert page.count("<img ") == 25
    assert all(f'<th scope="row">{name}</th>' in page for name in METHODS)


def test_refuses_a_folder_with_other_files_before_any_work(tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    messages = []
    with pytest.raises(InputError, match="files in it that no demo wrote"):
        run_demo(tmp_path, on_message=messages.append)
    assert not messages


@pytest.mark.slow
def test_the_full_demo_finds_the_wrong_labels(tmp_path):
    summary = run_demo(tmp_path / "run")
    rows = {row.method: row for row in summary.methods}
    assert list(rows) == METHODS
    assert rows["Arnoldi (tail)"].auc >= 98.5
    # The paper's network reaches 94.8 on true and 75.4 on noisy test labels.
    assert summary.accuracy.test_true > 94
    assert summary.accuracy.test_noisy == pytest.approx(76, abs=2)
