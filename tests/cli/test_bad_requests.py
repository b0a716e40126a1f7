"""A request.json of somebody else is refused with its path, whatever is in it and whatever it is."""

import json
import os
import threading

import pytest

from eigentrace.cli import request
from eigentrace.errors import MismatchError
from eigentrace.store.folder import REQUEST, Folder
from tests.helpers.expecting import expect_mentions, refused

GOOD = {"input": {"function": "os:getcwd", "args": {}, "resolved": {}}, "fit": {}, "score": {}}
WRONG = {
    "a list": [],
    "text": "input",
    "no sections": {},
    "no score": {"input": {}, "fit": {}},
    "input of text": GOOD | {"input": "x"},
    "fit of a list": GOOD | {"fit": []},
    "score of a number": GOOD | {"score": 3},
    "args of a list": GOOD | {"input": {"function": "a:b", "args": [1]}},
    "resolved of text": GOOD | {"input": {"function": "a:b", "resolved": "x"}},
    "a path that is a number": GOOD | {"input": {"function": "a:b", "resolved": {"function": 3}}},
    "a function that is a list": GOOD | {"input": {"function": ["a:b"]}},
    "an unknown input": GOOD | {"input": {"function": "a:b", "shell": "ls"}},
    "an unknown setting of scoring": GOOD | {"score": {"shell": "ls"}},
    "classes of text": GOOD | {"classes": "ab"},
    "classes of numbers": GOOD | {"classes": [1, 2]},
    "data of a list": GOOD | {"data": [1]},
    "rows of text": GOOD | {"data": {"rows": "7"}},
    "unsaved text": GOOD | {"unsaved": "x"},
}


def written(folder, text):
    (folder / REQUEST).write_text(text)
    return folder / REQUEST


@pytest.mark.parametrize("name", WRONG)
def test_wrong_types_are_refused(tmp_path, call, name):
    file = written(tmp_path, json.dumps(WRONG[name]))
    with refused(MismatchError, file):
        request.read(tmp_path)
    (tmp_path / "fit").mkdir()
    for command in ("score", "fit"):
        code, _, err = call(f"{command} '{tmp_path}'")
        assert code == 2
        expect_mentions(err, [file])


@pytest.mark.parametrize("text", ["[" * 60_000, '{"a":' * 200 + "1" + "}" * 200, "{", "\x00", " " * (1 << 24) + "{}"])
def test_what_is_no_small_json_is_refused(tmp_path, text):
    with refused(MismatchError, written(tmp_path, text)):
        request.read(tmp_path)
    assert Folder(tmp_path).request is None


@pytest.mark.parametrize("kind", ["pipe", "device", "directory"])
def test_what_is_no_file_is_refused_without_waiting(tmp_path, kind):
    file = tmp_path / REQUEST
    {"pipe": os.mkfifo, "device": lambda path: path.symlink_to("/dev/zero"), "directory": os.mkdir}[kind](file)
    met = []

    def ask():
        for act in (lambda: request.read(tmp_path), lambda: request.write(tmp_path, GOOD)):
            with pytest.raises(MismatchError) as caught:
                act()
            met.append(str(caught.value))

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(20)
    assert len(met) == 2
    for message in met:
        expect_mentions(message, [file])
    assert Folder(tmp_path).request is None


def test_a_good_request_is_read_and_written_once(tmp_path):
    request.write(tmp_path, GOOD)
    assert request.read(tmp_path) == GOOD == Folder(tmp_path).request
    before = (tmp_path / REQUEST).stat().st_ino
    request.write(tmp_path, GOOD)
    assert (tmp_path / REQUEST).stat().st_ino == before
