"""Expect an error or a warning by its type and by the names, values, rows or paths that its message mentions."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def refused(kind, *mentions) -> Iterator[pytest.ExceptionInfo]:
    """Expect an exception of this type whose message or notes mention every one of `mentions`.

    A mention is what the message is about (a setting's name, the value that arrived, a row, a path), not how the
    message puts it, so that wording can be improved without changing a test. A number or word is found as a whole:
    6 is not mentioned by "row 60".
    """
    with pytest.raises(kind) as caught:
        yield caught
    expect_mentions("\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())]), mentions)


@contextmanager
def warned(kind, *mentions) -> Iterator[pytest.WarningsRecorder]:
    """Expect a warning of this type of which one message mentions every one of `mentions`."""
    with pytest.warns(kind) as caught:
        yield caught
    texts = [str(warning.message) for warning in caught if issubclass(warning.category, kind)]
    assert any(not missing(text, mentions) for text in texts), f"none of {texts} mentions all of {mentions}"


def expect_mentions(text, mentions):
    """Assert that a text mentions every one of `mentions`."""
    assert not missing(text, mentions), f"{missing(text, mentions)} not mentioned in: {text}"


def missing(text, mentions):
    """The mentions that a text lacks."""
    return [mention for mention in mentions if not re.search(_whole(str(mention)), text)]


def _whole(mention):
    begin = r"(?<!\w)" if re.match(r"\w", mention) else ""
    end = r"(?!\w)" if re.search(r"\w$", mention) else ""
    return f"{begin}{re.escape(mention)}{end}"
