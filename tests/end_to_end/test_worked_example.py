"""The commands of docs/text_classifier.md do what the page says, from a folder and a CSV to a cleaned CSV."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.worked import build, check_cleaned, commands, shape


def test_the_page_has_five_commands():
    assert [command.split()[1] for command, _ in commands()] == ["fit", "score", "info", "explain", "clean"]
    assert all(shown.strip() for _, shown in commands())


def test_shapes_tell_outputs_apart():
    assert shape("row  score\n  8  1.2e-05  cat") == shape("row score\n121 -3,400.5 dog")
    assert shape("row  score") != shape("row  id  score")
    assert shape("1 shard") != shape("2 shards")


@pytest.mark.slow
def test_the_page_s_commands_run(tmp_path):
    wrong = build(tmp_path)
    place = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for command, shown in commands():
        done = subprocess.run(
            shlex.split(command), cwd=tmp_path, env=os.environ | {"PATH": place}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout
        assert shape(done.stdout) == shape(shown), command
    check_cleaned(tmp_path, wrong)
