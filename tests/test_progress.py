import io
import os
import re
import subprocess
import sys
import types

import pytest

import eigentrace as et
from eigentrace.errors import InputError
from eigentrace.progress import VARIABLE, track
from tests.helpers.expecting import refused


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def as_at_the_start(monkeypatch):
    monkeypatch.setattr("eigentrace.progress._chosen", [])
    monkeypatch.delenv(VARIABLE, raising=False)


@pytest.fixture
def clock(monkeypatch):
    """Clocks that move half a second at every look, so that a short loop lasts."""
    for name in ("tqdm.std.time", "eigentrace.progress.monotonic"):
        now = iter(range(10_000_000))
        monkeypatch.setattr(name, lambda now=now: next(now) / 2)


def watched(monkeypatch, stream, items=(3, 4, 5), **options):
    monkeypatch.setattr("sys.stderr", stream)
    assert list(track(items, "Counting", **options)) == list(items)
    return stream.getvalue()


@pytest.mark.usefixtures("clock")
def test_a_long_loop_shows_a_bar_on_a_terminal(monkeypatch):
    shown = watched(monkeypatch, Terminal(), total=12, size=lambda item: item)
    assert "Counting" in shown
    assert "7/12" in shown


@pytest.mark.usefixtures("clock")
def test_a_log_gets_plain_lines_of_a_long_loop(monkeypatch):
    shown = watched(monkeypatch, io.StringIO(), range(2000), total=2000)
    assert "\r" not in shown
    first, second, *_, last = shown.splitlines()
    # Half a second to an item: the first line after 10 seconds, the next 30 seconds later.
    assert re.fullmatch(r"Counting: 20 of 2,000 \(1%\), 00:10 elapsed, about 16:30 left", first)
    assert re.fullmatch(r"Counting: 80 of 2,000 \(4%\), 00:40 elapsed, about 16:00 left", second)
    assert re.fullmatch(r"Counting: 2,000 of 2,000 \(100%\), 16:40 elapsed, done", last)


@pytest.mark.usefixtures("clock")
def test_a_log_of_a_night_fits_on_a_screen_or_two(monkeypatch):
    shown = watched(monkeypatch, io.StringIO(), range(2 * 3600 * 10))
    assert 30 < len(shown.splitlines()) < 100
    assert shown.splitlines()[-1].startswith("Counting: 72,000, 10:00:00 elapsed")


@pytest.mark.usefixtures("clock")
def test_a_loop_that_is_left_writes_no_last_line(monkeypatch):
    monkeypatch.setattr("sys.stderr", io.StringIO())
    for item in track(range(1000), "Counting", 1000):
        if item == 30:
            break
    assert len(sys.stderr.getvalue().splitlines()) == 1


@pytest.mark.parametrize("stream", [Terminal, io.StringIO])
@pytest.mark.parametrize("form", ["auto", "lines", "none"])
def test_a_quick_loop_shows_nothing(form, stream, monkeypatch):
    et.show_progress(form)
    assert "Counting" not in watched(monkeypatch, stream(), total=12)


SHOWN = {"none": "", "lines": "30 of 30 (100%)", "bar": "30/30"}


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("stream", [Terminal, io.StringIO])
@pytest.mark.parametrize("form", SHOWN)
@pytest.mark.parametrize("way", ["function", "variable"])
def test_a_form_can_be_forced(way, form, stream, monkeypatch):
    if way == "function":
        monkeypatch.setenv(VARIABLE, "none")
        et.show_progress(form)
    else:
        monkeypatch.setenv(VARIABLE, form)
    shown = watched(monkeypatch, stream(), range(30), total=30)
    assert SHOWN[form] in shown
    assert bool(shown) == (form != "none")
    assert ("\r" in shown) == (form == "bar")


def test_a_form_that_does_not_exist_is_refused(monkeypatch):
    with refused(InputError, "form", "'bars'", "'auto'", "'bar'", "'lines'", "'none'"):
        et.show_progress("bars")
    monkeypatch.setenv(VARIABLE, "off")
    with refused(InputError, VARIABLE, "'off'", "'none'"):
        list(track([1], "Counting"))


def test_a_program_without_a_console_shows_nothing(monkeypatch):
    monkeypatch.setattr("sys.stderr", None)
    assert list(track([1, 2], "Counting")) == [1, 2]


@pytest.mark.usefixtures("clock")
def test_a_notebook_without_widgets_gets_a_bar_of_text(monkeypatch):
    shell = types.SimpleNamespace(config={"IPKernelApp": {}})
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    assert "2/3" in watched(monkeypatch, io.StringIO(), total=3)


def test_lines_go_to_standard_error_of_a_process():
    code = "import time, eigentrace.progress as p\np._LINE_AFTER = 0\nprint(sum(p.track(range(3), 'Adding', 3)))"
    environment = os.environ | {VARIABLE: "lines"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout == "3\n"
    assert [line.split(",")[0] for line in done.stderr.splitlines()][-1] == "Adding: 3 of 3 (100%)"
