"""Shares, thresholds and labels become decisions, each with a reason, and nothing goes unsaid."""

import math
import re
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import eigentrace as et
from eigentrace.cleaning.export import export
from eigentrace.cleaning.thresholds import clean, find_label_issues
from eigentrace.errors import EigentraceWarning, InputError
from tests.helpers.expecting import expect_mentions, refused, warned
from tests.helpers.places import DOCS
from tests.helpers.small import examples, fit, table
from tests.helpers.tables import Columns, noisy

PAGE = DOCS / "clean.md"


def worst_first(scores, lowest=False):
    return sorted(range(len(scores)), key=lambda row: (scores[row] if lowest else -scores[row], row))


@pytest.mark.parametrize("amount", ["15%", " 15 %", 0.15, "0.15", 9, "9", np.int64(9), np.float64(0.15)])
def test_drop_takes_the_highest(amount):
    run = noisy(60)
    found = clean(run, drop=amount)
    assert found.dropped.tolist() == worst_first(run.column("self_influence"))[:9]
    assert found.kept.tolist() == sorted(set(range(60)) - set(found.dropped.tolist()))
    assert found.mask.sum() == 9
    assert found.mask[found.dropped].all()


def test_keep_takes_the_lowest():
    run = noisy(60)
    found = clean(run, keep="10%")
    assert len(found.kept) == 6
    assert found.dropped.tolist() == worst_first(run.column("self_influence"))[:54]
    assert clean(run, keep=60).mask.sum() == clean(run, drop=0).mask.sum() == 0
    assert clean(run, keep="0%").mask.all()
    assert clean(run, drop=1).mask.sum() == 1
    assert clean(run, drop=1.0).mask.all()


@settings(max_examples=60, deadline=None)
@given(
    scores=st.lists(st.one_of(st.integers(0, 5).map(float), st.just(math.nan), st.just(math.inf)), min_size=1),
    percent=st.integers(0, 1000).map(lambda tenths: Fraction(tenths, 10)),
    classes=st.integers(1, 3),
)
@pytest.mark.filterwarnings("ignore:.*NaN.*")
def test_shares_within_classes(scores, percent, classes):
    labels = [row % classes for row in range(len(scores))]
    run = Columns(self_influence=scores, label=labels)
    dropped = clean(run, drop=f"{float(percent)}%", per_class=True)
    kept = clean(run, keep=f"{float(percent)}%", per_class=True)
    for label in set(labels):
        rows = [row for row in range(len(scores)) if labels[row] == label]
        ranked = [row for row in worst_first(scores) if row in rows and not math.isnan(scores[row])]
        ranked.sort(key=lambda row: (-scores[row], row))
        asked = math.floor(percent / 100 * len(rows) + Fraction(1, 2))
        for found, number in ((dropped, asked), (kept, len(rows) - asked)):
            goes = ranked[:number]
            assert np.flatnonzero(found.mask[rows]).tolist() == [rows.index(row) for row in sorted(goes)]
            mildest = min((scores[row] for row in goes), default=math.nan)
            np.testing.assert_equal(found.thresholds[rows], [mildest] * len(rows))


def test_shares_are_the_decimals_that_were_written():
    run = Columns(self_influence=np.arange(100.0))
    assert 0.145 * 100 < 14.5  # in binary
    assert [clean(run, drop=share).mask.sum() for share in (0.145, "14.5%", "14.4%", 1e-3, "0.5%")] == [
        15,
        15,
        14,
        0,
        1,
    ]


def test_thresholds_are_strict():
    run = Columns(self_influence=[3.0, 1.0, 2.0, 2.0, -1.0, math.inf])
    assert clean(run, above=2).dropped.tolist() == [5, 0]
    assert clean(run, below=2.0).dropped.tolist() == [4, 1]
    assert clean(run, below=2.0).ranks.tolist() == [5, 2, 3, 4, 1, 6]
    high, low = clean(run, above=2).reasons.to_pylist()[:2]
    expect_mentions(high, ["self_influence", 3, "above", 2])
    expect_mentions(low, ["self_influence", "not", 2])
    expect_mentions(str(clean(run, above=2)), [2, 6, "self_influence above 2"])


def test_any_numbers_can_be_the_score():
    run, mine = noisy(30), np.linspace(0, 1, 30)
    run = Columns(**{name: run.column(name) for name in run.columns}, mine=mine)
    assert clean(run, drop=3, by="mine").dropped.tolist() == [29, 28, 27]
    assert clean(run, drop=3, by=-mine).dropped.tolist() == [0, 1, 2]
    assert clean(run, drop=3, by=torch.tensor(mine, dtype=torch.bfloat16, requires_grad=True)).dropped[0] in (28, 29)
    expect_mentions(clean(run, drop=3, by=mine.tolist()).reasons[29].as_py(), ["score 1", "highest 3"])
    assert clean(run, drop=1, by="loss").dropped.tolist() == [int(run.column("loss").argmax())]


def test_missing_scores_are_told_and_kept():
    run = Columns(self_influence=np.array([1.0, None, 5.0, None, 3.0], dtype=object))
    with warned(EigentraceWarning, "2 of 5", "self_influence"):
        found = clean(run, drop="80%")
    assert found.dropped.tolist() == [2, 4, 0]
    assert found.ranks.tolist() == [3, 0, 1, 0, 2]
    expect_mentions(found.reasons[1].as_py(), ["self_influence", "NaN"])
    expect_mentions(str(found), [3, 5, 2, "NaN"])
    with pytest.warns(EigentraceWarning):
        assert clean(run, keep=3).dropped.tolist() == [2, 4]


def test_ties_go_by_row_order_and_are_told():
    found = clean(Columns(self_influence=[1.0, 2.0, 2.0, 2.0]), drop=2)
    assert found.dropped.tolist() == [1, 2]
    expect_mentions(found.reasons[3].as_py(), ["self_influence"])
    expect_mentions(found.reasons[0].as_py(), ["self_influence", "not", 2])
    assert found.reasons[3] != found.reasons[0]
    expect_mentions(str(found), ["2 of 4", "self_influence", "2 rows", 1])


def test_reasons_name_label_and_prediction():
    run = Columns(self_influence=[9.0, 1.0, 1.0, 8.0], label=[0, 0, 1, 1], prediction=[2, 0, 0, -1])
    found = clean(run, drop="50%", per_class=True)
    expected = [
        ("self_influence", 9, "50%", "label 0", "predicts 2"),
        ("self_influence", "not", "50%"),
        ("self_influence", "not", "50%", "predicts 0", 1),
        ("self_influence", 8, "50%", "label 1"),
    ]
    for reason, mentions in zip(found.reasons.to_pylist(), expected, strict=True):
        expect_mentions(reason, mentions)
        assert ("predicts" in reason) == any("predicts" in str(mention) for mention in mentions)
    assert found.suggested.tolist() == [2, -1, 0, -1]
    assert clean(Columns(loss=[1.0]), drop=0, by="loss").suggested.tolist() == [-1]
    unlabelled = Columns(loss=[1.0, 2.0], label=[math.nan, 1.0], prediction=[3, 3])
    assert clean(unlabelled, drop=0, by="loss").suggested.tolist() == [-1, 3]


@pytest.mark.parametrize(
    ("options", "mentions"),
    table(
        {
            "nothing": ({}, ("drop", "keep", "above", "below")),
            "two": ({"drop": 1, "above": 2.0}, ("['drop', 'above']",)),
            "share over 1": ({"drop": 1.5}, ("drop", 1.5)),
            "percent over 100": ({"keep": "101%"}, ("keep", "'101%'")),
            "negative": ({"drop": -1}, ("drop", -1)),
            "bool": ({"drop": True}, ("drop", True)),
            "words": ({"drop": "a few"}, ("drop", "'a few'")),
            "nan": ({"drop": math.nan}, ("drop", "nan")),
            "list": ({"drop": [1]}, ("drop", "[1]")),
            "too many": ({"drop": 61}, ("drop", 61, 60)),
            "threshold": ({"above": "high"}, ("above", "'high'")),
            "nan threshold": ({"below": math.nan}, ("below", "nan")),
            "threshold per class": ({"above": 1.0, "per_class": True}, ("above=1.0", "per_class")),
            "count per class": ({"drop": 3, "per_class": True}, ("drop", 3, "per_class")),
            "no column": ({"drop": 1, "by": "los"}, ("'los'", "self_influence, loss")),
            "text": ({"drop": 1, "by": "source"}, ("source", "<U5")),
            "objects": ({"drop": 1, "by": np.array(["1"] * 60, dtype=object)}, ("by", "dtype object", "'1'", 0)),
            "length": ({"drop": 1, "by": [1.0, 2.0]}, (60, "(2,)")),
        }
    ),
)
def test_wrong_wishes_are_refused(options, mentions):
    with refused(InputError, *mentions):
        clean(noisy(60), **options)


def test_classes_need_labels():
    with refused(InputError, "per_class", "label", "self_influence"):
        clean(Columns(self_influence=[1.0]), drop="5%", per_class=True)


def test_label_issues():
    run = noisy(60)
    scores, wrong = run.column("self_influence"), run.column("label") != run.column("prediction")
    assert 0 < wrong.sum() < 30
    assert (find_label_issues(run) == wrong).all()
    ranked = [row for row in worst_first(scores) if wrong[row]]
    assert find_label_issues(run, return_indices=True).tolist() == ranked
    assert find_label_issues(run, share="20%", return_indices=True).tolist() == worst_first(scores)[:12]
    assert find_label_issues(run, share=12, by="loss").sum() == 12
    with refused(InputError, "share", "prediction"):
        find_label_issues(Columns(self_influence=[1.0], label=[1]))
    run = Columns(self_influence=[1.0, math.nan, 2.0], label=[0, 0, 0], prediction=[1, 1, 1])
    with warned(EigentraceWarning, "1 of 3"):
        assert find_label_issues(run, return_indices=True).tolist() == [2, 0, 1]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    x, y = examples(40)
    data = et.Data(list(zip(x, y, strict=True)), ids=[f"example-{i}" for i in range(40)])
    return et.score(
        fit(data=data), data, tmp_path_factory.mktemp("clean") / "run", columns={"source": ["web", "mail"] * 20}
    )


def test_a_run_on_disk(run, tmp_path):
    found = clean(et.open_run(run.path), drop="25%", out=tmp_path / "decisions.parquet")
    assert found.dropped.tolist() == run.self_influence().top(10).rows.tolist()
    assert type(found).read(tmp_path / "decisions.parquet").table().equals(found.table())
    assert found.table()["id"].to_pylist() == [f"example-{i}" for i in range(40)]
    wrong = run.column("label") != run.column("prediction")
    assert (find_label_issues(run) == wrong).all()
    assert (found.suggested >= 0).tolist() == wrong.tolist()
    assert sum(run.groups("source")["count"].to_pylist()) == 40


def test_page_runs(run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    lines = ["id,text,label,source", *(f'example-{i},"text {i},\nin two lines",{i % 3},web' for i in range(40))]
    Path("train.csv").write_text("\n".join(lines) + "\n")
    names = {"run": run, "influence": torch.randn(2, 40)}
    for name, function in (("clean", clean), ("export", export), ("find_label_issues", find_label_issues)):
        if name not in et.__all__:
            monkeypatch.setattr(et, name, function, raising=False)
    for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(code, names)
    assert f"# {capsys.readouterr().out}" in PAGE.read_text()
    assert Path("train.kept.csv").read_text().count("in two lines") == 38
    assert Path("relabelled.parquet").exists()
