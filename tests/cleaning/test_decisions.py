"""Decisions as a table: whole or not there, never over another, read back as they are or as somebody changed them."""

import dataclasses
import resource

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from eigentrace.cleaning import decisions as module
from eigentrace.cleaning.decisions import Decisions, for_csv
from eigentrace.cleaning.thresholds import clean
from eigentrace.errors import EigentraceWarning, InputError, MismatchError, StorageError
from tests.helpers.expecting import expect_mentions, refused
from tests.helpers.tables import Columns, noisy


def same(one, other):
    for name in ("mask", "scores", "ranks", "thresholds", "labels", "predictions", "suggested", "dropped", "kept"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)
    assert one.rule == other.rule
    assert one.reasons.to_pylist() == other.reasons.to_pylist()
    assert str(one) == str(other)
    assert one.table().equals(other.table())


@pytest.mark.parametrize("wish", [{"drop": "12%"}, {"keep": 20, "by": "loss"}, {"drop": 0.2, "per_class": True}])
def test_written_and_read(tmp_path, wish):
    found = clean(noisy(), out=tmp_path / "new" / "decisions.parquet", **wish)
    same(found, Decisions.read(tmp_path / "new" / "decisions.parquet"))
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["decisions.parquet"]


@pytest.mark.parametrize("wish", [{"drop": "12%"}, {"keep": 20, "by": "loss"}, {"drop": 0.2, "per_class": True}])
@pytest.mark.parametrize("ids", [None, [f"{row:03}" for row in range(60)], [str(row) for row in range(60)], range(60)])
def test_a_csv_is_one_and_is_read_back(tmp_path, wish, ids):
    run = noisy()
    run.ids = None if ids is None else np.array(ids)
    found = clean(run, out=tmp_path / "d.csv", **wish)
    found = found.relabel(np.flatnonzero(found.suggested >= 0)[:2]) if wish.get("drop") == "12%" else found
    (tmp_path / "d.csv").unlink()
    lines = found.write(tmp_path / "d.csv").read_text().splitlines()
    assert lines[0].split(",")[:3] == ['"row"', '"id"', '"decision"']
    assert len(lines) == 1 + len(found)
    read = Decisions.read(tmp_path / "d.csv")
    assert read.rule is None
    same(dataclasses.replace(found, rule=None, told=found.reasons), read)
    table = read.table()
    shown = for_csv(table)
    shown = shown.append_column("new_label", pa.nulls(len(read), pa.int64()))  # as the page writes them
    pa.csv.write_csv(shown, tmp_path / "page.csv")
    assert Decisions.read(tmp_path / "page.csv").table().equals(table)


@pytest.mark.filterwarnings("ignore:.*NaN.*")
def test_a_csv_with_gaps_is_read_as_it_was(tmp_path):
    found = clean(Columns(loss=[np.nan, 1.0, 2.0]), drop="50%", by="loss", out=tmp_path / "d.csv")
    read = Decisions.read(tmp_path / "d.csv")
    assert read.labels is None
    assert read.ids is None
    np.testing.assert_array_equal(read.scores, found.scores)
    assert read.ranks.tolist() == found.ranks.tolist()
    assert read.dropped.tolist() == [2, 1]
    assert read.reasons.to_pylist() == found.reasons.to_pylist()
    (tmp_path / "bad.csv").write_text("row;decision\n0;drop\n")
    with refused(MismatchError, "bad.csv", "row"):
        Decisions.read(tmp_path / "bad.csv")


@pytest.mark.parametrize("name", ["d.xlsx", "d.jsonl", "d"])
def test_other_endings_are_refused_before_anything_is_decided(tmp_path, name):
    found = clean(noisy(), drop=3)
    with refused(InputError, f"'{name}'", ".parquet", ".csv"):
        found.write(tmp_path / name)
    with refused(InputError, f"'{name}'", ".parquet", ".csv"):
        clean(noisy(), drop=3, out=tmp_path / name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("ignore:.*NaN.*")
def test_without_labels_ids_or_scores(tmp_path):
    found = clean(Columns(loss=[np.nan, 1.0, 2.0]), drop="50%", by="loss")
    written = found.write(tmp_path / "d.parquet")
    read = Decisions.read(written)
    assert read.labels is None
    assert read.ids is None
    assert read.table().equals(found.table()) is False  # NaN is not equal to itself
    assert read.table().drop_columns("score").equals(found.table().drop_columns("score"))
    assert read.dropped.tolist() == [2, 1]


def test_columns_of_the_table():
    run = Columns(ids=np.array([7, 8, 9]), self_influence=[1.0, 3.0, 2.0], label=[0, 1, -1], prediction=[0, 0, 0])
    assert clean(run, drop=1).table().to_pylist() == [
        {"row": 0, "id": 7, "decision": "keep", "score": 1.0, "rank": 3, "threshold": 3.0}
        | {"label": 0, "prediction": 0, "suggested_label": None}
        | {"reason": "self_influence is not among the highest 1 row"},
        {"row": 1, "id": 8, "decision": "drop", "score": 3.0, "rank": 1, "threshold": 3.0}
        | {"label": 1, "prediction": 0, "suggested_label": 0}
        | {"reason": "self_influence 3 is among the highest 1 row; the model predicts 0 instead of 1"},
        {"row": 2, "id": 9, "decision": "keep", "score": 2.0, "rank": 2, "threshold": 3.0}
        | {"label": None, "prediction": 0, "suggested_label": None}
        | {"reason": "self_influence is not among the highest 1 row"},
    ]


def test_pieces_make_the_whole(tmp_path, monkeypatch):
    whole = clean(noisy(), drop="12%")
    expected = whole.table()
    monkeypatch.setattr(module, "_ROWS_AT_ONCE", 7)
    assert whole.table().equals(expected)
    assert pq.read_table(whole.write(tmp_path / "d.parquet")).equals(expected)
    assert whole.reasons.to_pylist() == expected["reason"].to_pylist()


def test_nothing_is_overwritten(tmp_path):
    found = clean(noisy(), drop=3)
    (tmp_path / "d.parquet").write_text("mine")
    with refused(InputError, tmp_path / "d.parquet"):
        found.write(tmp_path / "d.parquet")
    assert (tmp_path / "d.parquet").read_text() == "mine"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_full_disk_leaves_nothing(tmp_path):
    found = clean(noisy(6000), drop=3)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with refused(StorageError, tmp_path / "d.parquet"):
            found.write(tmp_path / "d.parquet")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


def test_changed_by_hand(tmp_path):
    found = clean(noisy(), drop=5)
    table = found.table()
    words = table["decision"].cast(pa.string()).to_pylist()
    spared, added = int(found.dropped[1]), int(found.kept[0])
    words[spared], words[added] = "keep", "drop"
    changed = table.set_column(2, "decision", pa.array(words))
    # Tools without missing whole numbers turn such columns into floats, and lose what a schema says beside them.
    for name in ("rank", "label", "suggested_label"):
        at = changed.column_names.index(name)
        changed = changed.set_column(at, name, pc.fill_null(changed[name].cast(pa.float64()), np.nan))
    pq.write_table(changed.replace_schema_metadata(None), tmp_path / "d.parquet")
    read = Decisions.read(tmp_path / "d.parquet")
    assert set(read.dropped.tolist()) == set(found.dropped.tolist()) - {spared} | {added}
    assert read.labels.tolist() == found.labels.tolist()
    assert read.ranks.tolist() == found.ranks.tolist()
    assert read.rule is None
    assert str(read) == "Drops 5 of 60 rows."
    assert read.table()["reason"].to_pylist() == table["reason"].to_pylist()


def test_relabelling_is_asked_for(tmp_path):
    found = clean(noisy(), drop="50%")
    assert len(found.to_relabel) == 0
    rows = [int(row) for row in found.dropped if found.suggested[row] >= 0][:2]
    other = found.relabel(rows[::-1])
    assert other.to_relabel.tolist() == sorted(rows)
    assert not other.mask[rows].any()
    assert found.mask[rows].all()
    read = Decisions.read(other.write(tmp_path / "d.parquet"))
    assert read.to_relabel.tolist() == sorted(rows)
    same(other, read)
    assert read.table()["decision"].to_pylist().count("relabel") == 2
    expect_mentions(str(read), [2, "relabelled"])
    expect_mentions(
        read.reasons[rows[0]].as_py(), ["relabelled", *(int(of[rows[0]]) for of in (other.labels, other.suggested))]
    )
    worst = clean(Columns(loss=[1.0, 1.0], label=[0, 0], prediction=[1, 1]), drop=1, by="loss").relabel([0])
    assert worst.num_tied == 1
    assert worst.relabel([1]).num_tied == 0
    without = int(np.flatnonzero(found.suggested < 0)[0])
    for wrong in (without, 60, -1):
        with refused(InputError, f"Row {wrong}"):
            found.relabel([wrong])


@pytest.mark.parametrize("form", ["parquet", "csv"])
def test_the_class_that_somebody_chose_is_the_new_label(tmp_path, form):
    run = Columns(loss=[4.0, 3.0, 2.0, 1.0], label=[0, 1, 2, 2], prediction=[1, 1, 0, 2])
    found = clean(run, drop=1, by="loss")
    assert found.new_labels.tolist() == [-1, -1, -1, -1]
    chosen = dataclasses.replace(found, to_relabel=np.array([1, 2]), given=np.array([-1, 0, -1, -1]))
    assert chosen.new_labels.tolist() == [-1, 0, 0, -1]  # what was chosen, and what is suggested
    read = Decisions.read(chosen.write(tmp_path / f"d.{form}"))
    assert read.new_labels.tolist() == [-1, 0, 0, -1]
    again = Decisions.read(read.write(tmp_path / f"again.{form}"))
    assert again.table().equals(read.table())
    assert again.relabel([0]).new_labels.tolist() == [1, 0, 0, -1]


def test_a_class_is_given_by_its_number(tmp_path):
    found = clean(Columns(loss=[4.0, 3.0], label=[0, 1], prediction=[1, 1]), drop=0, by="loss").relabel([0])
    table = for_csv(found.table())
    pa.csv.write_csv(table.append_column("new_label", pa.array(["2", None])), tmp_path / "d.csv")
    assert Decisions.read(tmp_path / "d.csv").new_labels.tolist() == [2, -1]
    pa.csv.write_csv(table.append_column("new_label", pa.array(["cat", None])), tmp_path / "words.csv")
    with refused(MismatchError, "new_label", "words.csv"):
        Decisions.read(tmp_path / "words.csv")


def test_files_that_hold_no_decisions(tmp_path):
    table = clean(noisy(), drop=5).table()
    with refused(MismatchError, tmp_path / "none.parquet"):
        Decisions.read(tmp_path / "none.parquet")
    (tmp_path / "text.parquet").write_text("hello")
    with refused(MismatchError, tmp_path / "text.parquet"):
        Decisions.read(tmp_path / "text.parquet")
    cases = {
        "decision": table.drop_columns("decision"),
        "0, 1, 2": table.slice(1),
        "'maybe'": table.set_column(2, "decision", pa.array(["maybe"] * 60)),
        "None": table.set_column(2, "decision", pa.nulls(60, pa.string())),
    }
    for number, (mention, wrong) in enumerate(cases.items()):
        pq.write_table(wrong, tmp_path / f"{number}.parquet")
        with refused(MismatchError, f"{number}.parquet", mention):
            Decisions.read(tmp_path / f"{number}.parquet")


def test_rows_dropped_by_hand_without_a_score_come_last(tmp_path):
    with pytest.warns(EigentraceWarning):
        table = clean(Columns(loss=[np.nan, 1.0, 2.0]), drop=1, by="loss").table()
    pq.write_table(table.set_column(2, "decision", pa.array(["drop", "keep", "drop"])), tmp_path / "d.parquet")
    assert Decisions.read(tmp_path / "d.parquet").dropped.tolist() == [2, 0]


def test_one_row_is_singular():
    scores = [1.0, 3.0, 3.0, float("nan")]
    with pytest.warns(EigentraceWarning):
        found = clean(Columns(self_influence=scores, label=[0] * 4, prediction=[1] * 4), drop=1)
    words = str(found.relabel([0]))
    for said in ("highest 1 row;", "1 row tied with a dropped row is kept", "1 row is kept", "1 row is marked"):
        assert said in words
