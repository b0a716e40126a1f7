"""Decisions that people made on the page, or changed in a file, are what `clean --from` goes by."""

import json
import shlex

import pytest

from eigentrace import cli
from eigentrace.cleaning.decisions import Decisions
from eigentrace.page.replies import Answers
from eigentrace.page.subject import Subject
from tests.helpers.expecting import expect_mentions
from tests.helpers.worked import ROWS, build


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A run with ids, its dataset, and decisions as the page exports them."""
    folder = tmp_path_factory.mktemp("applying")
    build(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        asked = "--model model --data train.csv --task text-classification --id id"
        for line in (f"fit run {asked}", "score run"):
            assert ended(patch, line) == 0
    answers = Answers(Subject(folder / "run"))
    answers.decide({"rows": [3, 5, 8], "decision": "drop"})
    answers.decide({"rows": [8], "decision": "keep"})
    answers.decide({"rows": [9], "decision": "relabel", "new_label": 2})
    for form in ("csv", "parquet"):
        answers.export(form, folder)
    answers.journal.close()
    return folder


def ended(patch, line):
    patch.setattr("sys.argv", ["eigentrace", *shlex.split(line)])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    return exit_.value.code


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_the_page_s_decisions_clean_the_dataset(place, form, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(place)
    assert ended(monkeypatch, f"clean run --from decisions.{form} --out {tmp_path}/kept.csv") == 0
    told = capsys.readouterr().out
    expect_mentions(told, ["2 of 160", 1, "relabelled", tmp_path / "kept.csv"])
    header, *lines = (place / "train.csv").read_bytes().splitlines(keepends=True)
    kept = [line for row, line in enumerate(lines) if row not in (3, 5)]
    assert (tmp_path / "kept.csv").read_bytes() == b"".join([header, *kept])
    assert ended(monkeypatch, f"clean run --from decisions.{form} --decisions {tmp_path}/again.csv --json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (sorted(found["dropped_rows"]), found["to_relabel"], found["by"]) == ([3, 5], [9], None)
    assert (tmp_path / "again.csv").read_text().splitlines() == (place / "decisions.csv").read_text().splitlines()


def test_the_decisions_of_a_report_clean_the_dataset(place, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(place)
    report = tmp_path / "decisions.csv"
    report.write_text("row,id,decision,new_label\n7,s007,keep,\n5,s005,drop,\n9,s009,relabel,2\n3,s003,drop,\n")
    line = f"clean run --from {report} --out {tmp_path}/kept.csv --decisions {tmp_path}/all.parquet"
    assert ended(monkeypatch, line) == 0, capsys.readouterr().err
    expect_mentions(capsys.readouterr().out, ["2 of 160", 1, "relabelled"])
    header, *lines = (place / "train.csv").read_bytes().splitlines(keepends=True)
    kept = [line for row, line in enumerate(lines) if row not in (3, 5)]
    assert (tmp_path / "kept.csv").read_bytes() == b"".join([header, *kept])
    found = Decisions.read(tmp_path / "all.parquet")
    assert found.new_labels[[3, 7, 9]].tolist() == [-1, -1, 2]
    assert [found.reasons[row].as_py() for row in (0, 3)] == ["not decided on", "marked drop: in a report"]
    for wrong, mentions in {
        "5,s006,drop,": (5, "'s005'", "'s006'"),
        "160,s160,drop,": ("'drop'", 160, 0, 159),
        "5,s005,maybe,": ("'maybe'", 5, "keep, drop, relabel"),
        "5,s005,relabel,cat": ("cat",),
    }.items():
        report.write_text(f"row,id,decision,new_label\n{wrong}\n")
        assert ended(monkeypatch, f"clean run --from {report}") == 2, wrong
        expect_mentions(capsys.readouterr().err, [report, *mentions])


def test_decisions_on_something_else_are_refused(place, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(place)
    lines = (place / "decisions.csv").read_text().splitlines(keepends=True)
    (tmp_path / "fewer.csv").write_text("".join(lines[:-1]))
    (tmp_path / "others.csv").write_text("".join(lines).replace('"s004"', '"s999"'))
    fields = lines[5].split(",")
    fields[6] = str((int(fields[6]) + 1) % 3)
    (tmp_path / "labels.csv").write_text("".join([*lines[:5], ",".join(fields), *lines[6:]]))
    for words, mentions in {
        f"--from {tmp_path}/fewer.csv": ("fewer.csv", ROWS - 1, ROWS),
        f"--from {tmp_path}/others.csv": ("others.csv", 4, "'s004'", "'s999'"),
        f"--from {tmp_path}/labels.csv": ("labels.csv", 4, fields[6], "label"),
        "--from train.csv": ("train.csv", "row"),
        "--from decisions.csv --drop 5%": ("--from", "--drop"),
        "--from decisions.csv --by loss": ("--from", "--by"),
    }.items():
        assert ended(monkeypatch, f"clean run {words} --out {tmp_path}/kept.csv") == 2, words
        expect_mentions(capsys.readouterr().err, mentions)
    assert not (tmp_path / "kept.csv").exists()
