"""Processes that need the same file: one makes it, the others wait and read it, and it is never half written."""

import subprocess
import sys

import torch

from experiments.shared.kept import keep
from harness.files import alone, made_once
from tests.helpers.expecting import refused
from tests.helpers.places import ROOT


def together(code: str, *argv: object, count: int = 4) -> list[int]:
    """Run the same code in several processes at the same time; return how they ended."""
    command = [sys.executable, "-c", code, *map(str, argv)]
    running = [subprocess.Popen(command, cwd=ROOT) for _ in range(count)]
    return [process.wait(timeout=300) for process in running]


def test_one_of_several_processes_makes_a_file_and_leaves_nothing_else(tmp_path):
    code = (
        "import sys, time; from pathlib import Path; from harness.files import made_once\n"
        "from eigentrace.disk.atomic import replacing\n"
        "path = Path(sys.argv[1])\n"
        "def make():\n"
        "    with (path.parents[1] / 'makers').open('a') as file: file.write('made\\n')\n"
        "    time.sleep(0.3)\n"
        "    with replacing(path) as unfinished: unfinished.write_text('whole')\n"
        "made_once(path, make)\n"
        "assert path.read_text() == 'whole'"
    )
    path = tmp_path / "new" / "file.txt"
    assert together(code, path) == [0, 0, 0, 0]
    assert (tmp_path / "makers").read_text() == "made\n"
    assert [found.name for found in path.parent.iterdir()] == ["file.txt"]


def test_processes_take_turns_however_often_the_lock_comes_and_goes(tmp_path):
    code = (
        "import sys; from pathlib import Path; from harness.files import alone\n"
        "path = Path(sys.argv[1])\n"
        "for _ in range(200):\n"
        "    with alone(path):\n"
        "        path.write_text(str(int(path.read_text()) + 1))"
    )
    path = tmp_path / "count"
    path.write_text("0")
    assert together(code, path) == [0, 0, 0, 0]
    assert path.read_text() == "800"


def test_whoever_fails_lets_the_next_one_try(tmp_path):
    path = tmp_path / "file"
    with refused(RuntimeError, "no luck"), alone(path):
        raise RuntimeError("no luck")
    made_once(path, path.touch)
    assert [found.name for found in tmp_path.iterdir()] == ["file"]


def test_files_that_differ_in_their_ending_are_not_written_under_one_name(tmp_path, monkeypatch):
    names: list[str] = []
    save = torch.save
    monkeypatch.setattr(torch, "save", lambda what, path: (names.append(path.name), save(what, path)))
    for ending in (".pt", ".unfinished"):
        keep((tmp_path / "network").with_suffix(ending), {"x": torch.ones(1)})
    assert len(set(names)) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["network.pt", "network.unfinished"]
