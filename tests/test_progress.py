import io

import pytest

from eigentrace.progress import track


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    """A clock that moves half a second at every look, so that a short loop lasts."""
    now = iter(range(10_000))
    monkeypatch.setattr("tqdm.std.time", lambda: next(now) / 2)


def watched(monkeypatch, stream, **options):
    monkeypatch.setattr("sys.stderr", stream)
    assert list(track([3, 4, 5], "Counting", **options)) == [3, 4, 5]
    return stream.getvalue()


@pytest.mark.usefixtures("clock")
def test_a_long_loop_shows_a_bar_on_a_terminal(monkeypatch):
    shown = watched(monkeypatch, Terminal(), total=12, size=lambda item: item)
    assert "Counting" in shown
    assert "7/12" in shown


@pytest.mark.usefixtures("clock")
def test_nothing_is_shown_where_nobody_watches(monkeypatch):
    assert watched(monkeypatch, io.StringIO(), total=12) == ""


def test_a_short_loop_shows_nothing_even_on_a_terminal(monkeypatch):
    assert "Counting" not in watched(monkeypatch, Terminal(), total=12)
