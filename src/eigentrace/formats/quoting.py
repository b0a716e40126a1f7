"""How a CSV or TSV file is cut: its lines, what separates its fields, and whether its quotes are quoting and closed."""

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pyarrow.csv

from eigentrace.errors import DataError, InputError, UnsupportedError

UTF8_MARK = b"\xef\xbb\xbf"
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
_DELIMITERS = (b",", b";", b"\t", b"|")
_FIELD = rb'(?:"(?:[^"]++|"")*+"|[^"\t]*+)'
_CLOSED = re.compile(_FIELD + rb"(?:\t" + _FIELD + rb")*+")
_OPEN = re.compile(rb"(?:" + _FIELD + rb'\t)*+"(?:[^"]++|"")*+')
_QUOTED = re.compile(rb'"((?:[^"]++|"")*+)"?')
_TO_ITS_END = re.compile(rb'"(?:[^"]++|"")*+"')
_MEND = (
    "Put texts that begin with a quote in quotes and double the quotes inside them, as CSV writers do, or store them "
    "as TSV, where lone quotes are text."
)

IsOpen = Callable[[bytes, bool], bool]
"""Tells whether a quoted field is still open after a line, given whether one was open before."""


def parsing(path: Path, kind: str, delimiter: str | None = None) -> pyarrow.csv.ParseOptions:
    """Return how a file is cut into fields.

    Args:
        path: The file.
        kind: "csv" or "tsv".
        delimiter: What separates the fields of a CSV; see `separator`.
    """
    mark = separator(path, "\t" if kind == "tsv" else delimiter)
    quoted = kind == "csv" or has_quoting(path)
    return pyarrow.csv.ParseOptions(
        delimiter=mark.decode(), quote_char='"' if quoted else False, newlines_in_values=quoted
    )


def open_after(mark: bytes) -> IsOpen:
    """Return what tells of the lines of a quoted file whether a field is open after them.

    Args:
        mark: What separates fields.
    """
    mark = re.escape(mark)
    # A field is quoted if it begins with a quote; quotes further on in it are characters like any other.
    field = rb'(?:"(?:[^"]++|"")*+"[^' + mark + rb']*+|(?!")[^' + mark + rb"]*+)"
    closed = re.compile(field + rb"(?:" + mark + field + rb")*+")

    def is_open(line: bytes, inside: bool) -> bool:
        if b'"' not in line:
            return inside
        return closed.fullmatch(b'"' + line if inside else line.removeprefix(UTF8_MARK)) is None

    return is_open


def check_closed(path: Path, delimiter: str | None = None) -> None:
    """Stop at quotes in a CSV that swallow lines: never closed, or closed on a later line in the middle of a text.

    Readers take both without a word. Text after quotes that close on their own line costs no row, and is read.
    """
    mark = separator(path, delimiter)
    is_open, ends, inside, began = open_after(mark), (mark, b"\r", b"\n", b""), False, 0
    with path.open("rb") as file:
        for number, line in enumerate(lines_of(file), 1):
            if b'"' not in line:
                continue
            end = _TO_ITS_END.match(b'"' + line) if inside else None
            if end is not None and line[end.end() - 1 : end.end()] not in ends:
                raise DataError(
                    f"{path}: a quote in line {began} opens a field that the next lone quote, in line {number}, closes "
                    f"in the middle of a text, so the lines between would be part of one row. {_MEND}"
                )
            opens = is_open(line, inside)
            if opens and (end is not None or not inside):
                began = number
            inside = opens
    if inside:
        raise DataError(
            f"{path} ends within quotes that begin in line {began}, so all that follows would be one field. {_MEND}"
        )


def separator(path: Path, delimiter: str | None = None) -> bytes:
    """Return what separates fields: what is given, else the commonest of , ; | and tab in the file's first line."""
    with path.open("rb") as file:
        first = next(lines_of(file), b"")
    if first.startswith(_UTF16_MARKS):
        raise UnsupportedError(f"{path} is UTF-16, whose lines cannot be copied as bytes. Convert it to UTF-8 first.")
    if delimiter is not None and len(delimiter.encode()) != 1:
        raise InputError(f"delimiter must be one ASCII character, got {delimiter!r}.")
    bare = re.sub(rb'"[^"]*"', b"", first)
    return max(_DELIMITERS, key=bare.count) if delimiter is None else delimiter.encode()


def lines_of(file: Iterable[bytes]) -> Iterator[bytes]:
    """Yield lines with their ends, which are LF, CR LF or, as pyarrow and spreadsheets have it, CR alone."""
    for line in file:
        if b"\r" in line:
            yield from line.splitlines(keepends=True)
        else:
            yield line


def has_quoting(path: Path, *, header: bool = True) -> bool:
    """Tell whether the fields of a TSV file are quoted as in a CSV; if not, every line is a row and quotes are text.

    They are where the header has a name in quotes. Otherwise every field with a quote in it must be in quotes, with
    quotes inside it doubled, and one at least must need them: it holds a quote, or lines do not have the header's
    number of fields unless tabs and line breaks within quotes are text. Wherever lines are rows as they stand, they
    stay rows.

    Args:
        path: The file.
        header: Whether its first line names columns.

    Raises:
        DataError: If the header is in quotes, and a quote elsewhere is no part of quoting.
    """
    scan = _Scan(header)
    with path.open("rb") as file:
        for number, line in enumerate(lines_of(file), 1):
            if not scan.goes_on(number, line.removeprefix(UTF8_MARK if number == 1 else b"").rstrip(b"\r\n")):
                break
    if not scan.is_quoted and scan.declared:
        raise DataError(
            f"{path} has a header in quotes, so its fields are read as quoted, and a quote in the record that begins "
            f"in line {scan.began} neither opens nor closes a field. Double the quotes inside of quoted fields, or "
            "take the quotes off the header: then those in the file are text."
        )
    return scan.is_quoted and (scan.declared or scan.is_uneven or (scan.is_doubled and not scan.spans_lines))


class _Scan:
    """The lines of a file read in both ways at once: as they stand, and as quoted fields."""

    def __init__(self, header: bool) -> None:
        self.header, self.began = header, 0
        self.declared = self.is_uneven = self.is_doubled = self.spans_lines = False
        self._inside = self._failed = False
        self._tabs = 0  # of the record so far, outside of quotes
        self._first = 0  # tabs of the first line
        self._width: int | None = None  # tabs of the first record, outside of quotes

    @property
    def is_quoted(self) -> bool:
        """Whether all that was seen can be read as quoted fields."""
        return not self._failed and not self._inside

    def goes_on(self, number: int, line: bytes) -> bool:
        """Take a line in; False once the file cannot be read as quoted fields."""
        if not line:
            return True
        plain = line.count(b"\t")
        if not self.began:
            self.declared, self._first = self.header and b'"' in line, plain
        self.is_uneven |= plain != self._first
        if not self._inside:
            self.began, self._tabs = number, 0
        self.spans_lines |= self._inside
        if b'"' in line:
            self._take_quotes(b'"' + line if self._inside else line)
        elif not self._inside:
            self._tabs = plain
        if not self._inside and not self._failed:
            self._width = self._tabs if self._width is None else self._width
            self._failed = self._tabs != self._width and not self.declared
        return not self._failed

    def _take_quotes(self, line: bytes) -> None:
        self._inside = _CLOSED.fullmatch(line) is None
        self._failed = self._inside and _OPEN.fullmatch(line) is None
        self._tabs += _QUOTED.sub(b"", line).count(b"\t")
        self.is_doubled |= any(b'""' in inner for inner in _QUOTED.findall(line))
