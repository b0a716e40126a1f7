import json

import pytest

from eigentrace.demo.folder import REPORT, SUMMARY, claim, write
from eigentrace.errors import InputError, NumericalError

GOOD = {"methods": [], "accuracy": {}, "versions": {}}


def test_makes_the_folder_and_its_parents(tmp_path):
    claim(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()


def test_an_earlier_demo_is_replaced_and_the_rest_kept(tmp_path):
    write(tmp_path, GOOD, "first")
    (tmp_path / "notes.txt").write_text("mine")
    claim(tmp_path)
    write(tmp_path, GOOD | {"seed": 1}, "second")
    assert (tmp_path / REPORT).read_text() == "second"
    assert json.loads((tmp_path / SUMMARY).read_text())["seed"] == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", REPORT, SUMMARY]


@pytest.mark.parametrize(
    "files", [{"thesis.tex": "x"}, {REPORT: "x"}, {SUMMARY: "not json"}, {SUMMARY: "[]"}, {SUMMARY: '{"a": 1}'}]
)
def test_refuses_a_folder_with_other_files(tmp_path, files):
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match=r"has files in it that no demo wrote .*give a new or empty folder"):
        claim(tmp_path)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == files


def test_refuses_a_file(tmp_path):
    (tmp_path / "out").write_text("x")
    with pytest.raises(InputError, match="is a file and the demo writes a folder: give another path"):
        claim(tmp_path / "out")


def test_a_killed_run_leaves_nothing_that_stops_the_next(tmp_path):
    (tmp_path / f".{SUMMARY}.partial").write_text('{"meth')
    claim(tmp_path)
    write(tmp_path, GOOD, "page")
    assert sorted(path.name for path in tmp_path.iterdir()) == [REPORT, SUMMARY]


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_never_writes_what_json_cannot_say(tmp_path, number):
    with pytest.raises(NumericalError, match=r"holds a number that is not finite .*nothing was written"):
        write(tmp_path, GOOD | {"auc": number}, "page")
    assert not list(tmp_path.iterdir())
