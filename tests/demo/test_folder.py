import json

import pytest

from eigentrace.demo.folder import REPORT, RUN, SUMMARY, claim, new_run, place, write
from eigentrace.demo.inputs import keep_request, request_of
from eigentrace.errors import InputError, NumericalError
from tests.helpers.expecting import expect_mentions, refused

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
    with refused(InputError, tmp_path, SUMMARY):
        claim(tmp_path)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == files


def test_refuses_a_file(tmp_path):
    (tmp_path / "out").write_text("x")
    with refused(InputError, tmp_path / "out"):
        claim(tmp_path / "out")


def test_a_killed_run_leaves_nothing_that_stops_the_next(tmp_path):
    (tmp_path / f".{SUMMARY}.partial").write_text('{"meth')
    claim(tmp_path)
    write(tmp_path, GOOD, "page")
    assert sorted(path.name for path in tmp_path.iterdir()) == [REPORT, SUMMARY]


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_never_writes_what_json_cannot_say(tmp_path, number):
    with refused(NumericalError, tmp_path, number):
        write(tmp_path, GOOD | {"auc": number}, "page")
    assert not list(tmp_path.iterdir())


def finished(out, word):
    """Go through the writing of a demo, and return what it said."""
    messages = []
    claim(out)
    with new_run(out) as folder:
        keep_request(folder, request_of(out / RUN, {"steps": 3}))
        (folder / "fit").mkdir()
        (folder / "manifest.json").write_text(word)
        write(out, GOOD, word)
        place(out, messages.append)
    return messages


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_second_demo_replaces_the_run_of_the_first(tmp_path):
    assert finished(tmp_path, "first") == []
    assert finished(tmp_path, "second") == []
    assert (tmp_path / RUN / "manifest.json").read_text() == "second"
    assert names(tmp_path) == [REPORT, RUN, SUMMARY]


@pytest.mark.parametrize("work", ["decisions.jsonl", "notes"])
def test_a_run_that_somebody_worked_on_is_kept(tmp_path, work):
    finished(tmp_path, "first")
    (tmp_path / RUN / work).write_text("mine")
    (message,) = finished(tmp_path, "second")
    expect_mentions(message, [tmp_path / "run-1"])
    assert (tmp_path / "run-1" / work).read_text() == "mine"
    assert (tmp_path / "run-1" / "manifest.json").read_text() == "first"
    (tmp_path / RUN / work).write_text("mine again")
    finished(tmp_path, "third")
    assert (tmp_path / "run-2" / work).read_text() == "mine again"
    assert (tmp_path / RUN / "manifest.json").read_text() == "third"
    assert names(tmp_path) == [REPORT, RUN, "run-1", "run-2", SUMMARY]


@pytest.mark.parametrize("request_file", [None, "not json", "[]", '{"input": {"function": "mine:made"}}'])
def test_a_run_of_somebody_else_is_refused(tmp_path, request_file):
    write(tmp_path, GOOD, "page")
    (tmp_path / RUN).mkdir()
    if request_file is not None:
        (tmp_path / RUN / "request.json").write_text(request_file)
    with refused(InputError, tmp_path / RUN):
        claim(tmp_path)
    assert (tmp_path / RUN).is_dir()


def test_a_failure_keeps_the_earlier_run(tmp_path):
    def fail():
        with new_run(tmp_path) as folder:
            keep_request(folder, request_of(tmp_path / RUN, {}))
            raise KeyboardInterrupt

    finished(tmp_path, "first")
    with pytest.raises(KeyboardInterrupt):
        fail()
    assert (tmp_path / RUN / "manifest.json").read_text() == "first"
    assert names(tmp_path) == [REPORT, RUN, SUMMARY]


def test_what_a_killed_demo_left_is_swept_away(tmp_path):
    (tmp_path / ".run.partial" / "shards").mkdir(parents=True)
    (tmp_path / ".run.old.partial").mkdir()
    finished(tmp_path, "first")
    assert names(tmp_path) == [REPORT, RUN, SUMMARY]
