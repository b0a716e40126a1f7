"""Decisions are on the disk when they are answered, survive what is torn or damaged, and have one writer."""

import json
import os
import shutil

import numpy as np
import pytest

from eigentrace.errors import BusyError, InputError, MismatchError, StorageError
from eigentrace.page import journal as room
from eigentrace.page.journal import Journal
from tests.helpers.expecting import expect_mentions, refused
from tests.helpers.serving import started

ROWS = 5000


def opened(folder, rows=ROWS):
    return Journal(folder, rows, "f")


def codes(journal):
    return journal.state()[0].copy()


def test_reading_again_gives_the_same(tmp_path):
    first, draw = opened(tmp_path), np.random.default_rng(0)
    for number in range(60):
        size = 3000 if number % 10 == 0 else 5
        rows = draw.choice(ROWS, size, replace=False)
        decision = ["drop", "keep", "relabel", "clear"][number % 4]
        first.decide(rows, decision, number % 7 if decision == "relabel" else None)
        if number % 9 == 8:
            first.undo()
    again = opened(tmp_path)
    assert np.array_equal(codes(first), codes(again))
    assert [first.new_label(row) for row in range(ROWS)] == [again.new_label(row) for row in range(ROWS)]
    assert first.log() == again.log()
    assert first.counts() == again.counts()
    assert sum(first.counts().values()) == (codes(first) > 0).sum() > 0
    first.close()


def test_undoing_gives_what_was_before(tmp_path):
    journal = opened(tmp_path)
    before = []
    for rows, decision in (([1, 2], "drop"), ([2, 3], "relabel"), ([1], "clear"), (range(4000), "keep")):
        before.append((codes(journal), journal.new_label(2)))
        journal.decide(np.array(rows), decision, 4 if decision == "relabel" else None)
    for state, label in reversed(before):
        assert journal.undo() > 0
        assert np.array_equal(codes(journal), state)
        assert journal.new_label(2) == label
    assert journal.undo() == 0
    journal.close()


def test_what_changed_is_counted(tmp_path):
    journal = opened(tmp_path)
    assert journal.decide(np.array([1, 2, 2]), "drop") == 2
    assert journal.decide(np.array([2, 3]), "drop") == 1
    assert journal.decide(np.array([3]), "relabel", 1) == 1
    assert journal.decide(np.array([3]), "relabel", 2) == 1
    assert journal.decide(np.array([], dtype=int), "drop") == 0
    journal.close()


@pytest.mark.parametrize("torn", [b'{"time": "2026', b"\x00" * 40, b'{"undo": true}', b"\xff"])
def test_a_last_line_that_was_torn_off_is_ignored_and_removed(tmp_path, torn):
    journal = opened(tmp_path)
    journal.decide(np.array([7]), "drop")
    journal.close()
    whole = journal.path.read_bytes()
    journal.path.write_bytes(whole + torn)
    again = opened(tmp_path)
    assert again.counts()["drop"] == 1
    assert journal.path.read_bytes() == whole + torn  # reading changes nothing
    again.decide(np.array([8]), "keep")
    again.close()
    assert journal.path.read_bytes().startswith(whole)
    assert len(journal.path.read_bytes().splitlines()) == 3
    assert opened(tmp_path).counts() == {"drop": 1, "keep": 1, "relabel": 0}


def test_every_cut_of_the_file_reads_as_some_of_the_acts(tmp_path):
    journal = opened(tmp_path, 50)
    for row in range(4):
        journal.decide(np.array([row]), "drop")
    journal.close()
    whole = journal.path.read_bytes()
    ends = [at + 1 for at, byte in enumerate(whole) if byte == 10]
    for size in range(len(whole) + 1):
        journal.path.write_bytes(whole[:size])
        assert opened(tmp_path, 50).counts()["drop"] == max(0, sum(end <= size for end in ends) - 1)


def test_damage_in_the_middle_is_told(tmp_path):
    journal = opened(tmp_path)
    for row in (1, 2):
        journal.decide(np.array([row]), "drop")
    journal.close()
    lines = journal.path.read_bytes().splitlines(keepends=True)
    for bad in (b"{broken\n", b'{"undo": true}\n', b'{"rows": [99999], "decision": "drop", "time": "", "count": 1}\n'):
        journal.path.write_bytes(lines[0] + bad + lines[2])
        with refused(MismatchError, "Line 2", journal.path):
            opened(tmp_path)


def test_damage_in_the_last_line_is_told_and_not_removed(tmp_path):
    journal = opened(tmp_path)
    for row in (1, 2):
        journal.decide(np.array([row]), "drop")
    journal.close()
    whole = journal.path.read_bytes()
    start = whole.rindex(b"\n", 0, -1) + 1
    for at in range(start, len(whole) - 1):
        bad = whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]
        journal.path.write_bytes(bad)
        with refused(MismatchError, "Line 3", journal.path):
            opened(tmp_path)
        assert journal.path.read_bytes() == bad
    for more in (b"}{\n", b"\xff\n"):
        journal.path.write_bytes(whole + more)
        with refused(MismatchError, "Line 4", journal.path):
            opened(tmp_path)


def test_decisions_of_another_run_are_refused(tmp_path):
    journal = opened(tmp_path)
    journal.decide(np.array([1]), "drop")
    journal.close()
    with refused(MismatchError, journal.path, ROWS, '"f"'):
        Journal(tmp_path, ROWS, "other")


def test_wrong_rows_and_words_are_refused(tmp_path):
    journal = opened(tmp_path)
    with refused(InputError, 0, 4999, 5000):
        journal.decide(np.array([5000]), "drop")
    with refused(InputError, 0, 4999, -1):
        journal.decide(np.array([-1]), "drop")
    with refused(InputError, "decision", "drop", "keep", "relabel", "clear", "'burn'"):
        journal.decide(np.array([1]), "burn")
    assert not journal.path.exists()


def test_only_one_decides_and_others_see_it(tmp_path):
    first, second = opened(tmp_path), opened(tmp_path)
    first.decide(np.array([1]), "drop")
    assert second.counts()["drop"] == 1
    with refused(BusyError, tmp_path, os.getpid()):
        second.decide(np.array([2]), "drop")
    first.decide(np.array([3]), "drop")
    assert second.counts()["drop"] == 2
    first.close()
    second.decide(np.array([4]), "drop")
    assert first.counts()["drop"] == 3
    second.close()


def test_a_line_that_cannot_be_written_is_taken_back(tmp_path, monkeypatch):
    journal = opened(tmp_path)
    journal.decide(np.array([1]), "drop")
    whole = journal.path.read_bytes()

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(room.os, "fsync", full)
    with refused(StorageError, journal.path):
        journal.decide(np.array([2]), "drop")
    monkeypatch.undo()
    assert journal.path.read_bytes() == whole
    assert journal.counts()["drop"] == 1
    journal.decide(np.array([2]), "drop")
    assert opened(tmp_path).counts()["drop"] == 2
    journal.close()


def test_a_killed_server_loses_nothing_that_it_answered(scored, tmp_path):
    run = shutil.copytree(scored, tmp_path / "run")
    decided = 0
    for attempt in range(2):
        with started(run) as server:
            assert server.counts()["drop"] == decided
            for row in range(3):
                status, answer = server.decide([10 * attempt + row])
                assert (status, answer["changed"]) == (200, 1)
                decided += 1
            server.process.kill()
            server.process.wait()
        with (run / "decisions.jsonl").open("ab") as file:
            file.write(b'{"time": "2026-01-01T00:00:00", "deci')  # what a kill in the middle of a line leaves
    lines = [json.loads(line) for line in (run / "decisions.jsonl").read_bytes().splitlines()[:-1]]
    assert [line["rows"] for line in lines[1:]] == [[0], [1], [2], [10], [11], [12]]


def test_a_second_server_reads_and_says_who_decides(points):
    with started(points) as first, started(points) as second:
        assert first.decide([1])[0] == 200
        status, answer = second.decide([2])
        assert status == 409
        expect_mentions(answer["error"], [first.process.pid])
        assert second.counts()["drop"] == 1
        first.process.kill()
        first.process.wait()
        assert second.decide([2])[0] == 200
        assert second.counts()["drop"] == 2
