"""Lines, delimiters and quoting of CSV and TSV files: detection, and checks for unclosed quotes."""

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
    "Quote texts that begin with a quote and double the quotes inside them, as CSV writers do, or store them as TSV, "
    "where lone quotes are text."
)

IsOpen = Callable[[bytes, bool], bool]
"""Returns for (line, whether a quoted field is open before it) whether a quoted field is open after it."""


def parsing(path: Path, kind: str, delimiter: str | None = None) -> pyarrow.csv.ParseOptions:
    """Return pyarrow's parse options for a file: its delimiter and whether it uses quoting.

    Args:
        path: The file.
        kind: "csv" or "tsv".
        delimiter: The delimiter of a CSV file; see `separator`.
    """
    mark = separator(path, "\t" if kind == "tsv" else delimiter)
    quoted = kind == "csv" or has_quoting(path)
    return pyarrow.csv.ParseOptions(
        delimiter=mark.decode(), quote_char='"' if quoted else False, newlines_in_values=quoted
    )


def open_after(mark: bytes) -> IsOpen:
    """Return a function that determines whether a quoted field is open after a line of a file with quoting.

    Args:
        mark: The delimiter of fields.
    """
    mark = re.escape(mark)
    # A field is quoted if it begins with a quote; other quotes in a field are ordinary characters.
    field = rb'(?:"(?:[^"]++|"")*+"[^' + mark + rb']*+|(?!")[^' + mark + rb"]*+)"
    closed = re.compile(field + rb"(?:" + mark + field + rb")*+")

    def is_open(line: bytes, inside: bool) -> bool:
        if b'"' not in line:
            return inside
        return closed.fullmatch(b'"' + line if inside else line.removeprefix(UTF8_MARK)) is None

    return is_open


def check_closed(path: Path, delimiter: str | None = None) -> None:
    """Raise DataError if quotes in a CSV join lines by mistake: never closed, or closed in the middle of a later text.

    CSV readers accept both silently. Text after quotes that close on the same line is accepted: no row is lost.
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
                    f"{path}: a quote in line {began} opens a field, and the next lone quote, in line {number}, closes "
                    f"it in the middle of a text, so the lines between would be read as one row. {_MEND}"
                )
            opens = is_open(line, inside)
            if opens and (end is not None or not inside):
                began = number
            inside = opens
    if inside:
        raise DataError(
            f"{path}: a quote in line {began} is never closed, so the rest of the file would be one field. {_MEND}"
        )


def separator(path: Path, delimiter: str | None = None) -> bytes:
    """Return the field delimiter: `delimiter` if given, else the most frequent of , ; | and tab in the first line."""
    with path.open("rb") as file:
        first = next(lines_of(file), b"")
    if first.startswith(_UTF16_MARKS):
        raise UnsupportedError(f"{path} is UTF-16, whose lines cannot be copied as bytes. Convert it to UTF-8 first.")
    if delimiter is not None and len(delimiter.encode()) != 1:
        raise InputError(f"delimiter must be one ASCII character, got {delimiter!r}.")
    bare = re.sub(rb'"[^"]*"', b"", first)
    return max(_DELIMITERS, key=bare.count) if delimiter is None else delimiter.encode()


def lines_of(file: Iterable[bytes]) -> Iterator[bytes]:
    """Yield lines with their line ends: LF, CR LF, or CR alone, as in pyarrow and spreadsheets."""
    for line in file:
        if b"\r" in line:
            yield from line.splitlines(keepends=True)
        else:
            yield line


def has_quoting(path: Path, *, header: bool = True) -> bool:
    """Return whether a TSV file uses quoting as in CSV; if not, every line is a row and quotes are text.

    It does if a name in the header is quoted. Otherwise two conditions must be met. Every field that contains a quote
    is quoted, with quotes inside it doubled. And at least one field needs its quotes: it contains a quote, or lines
    have the header's number of fields only if tabs and line breaks within quotes are text. If every line can be read
    as a row, the file does not use quoting.

    Args:
        path: The file.
        header: Whether the first line contains column names.

    Raises:
        DataError: If the header is quoted, but another quote in the file is not valid quoting.
    """
    scan = _Scan(header)
    with path.open("rb") as file:
        for number, line in enumerate(lines_of(file), 1):
            if not scan.goes_on(number, line.removeprefix(UTF8_MARK if number == 1 else b"").rstrip(b"\r\n")):
                break
    if not scan.is_quoted and scan.declared:
        raise DataError(
            f"{path} has a quoted header, so its fields are read with quoting, but a quote in the record that begins "
            f"in line {scan.began} neither opens nor closes a field. Double the quotes inside quoted fields, or "
            "remove the quotes from the header: then all quotes in the file are text."
        )
    return scan.is_quoted and (scan.declared or scan.is_uneven or (scan.is_doubled and not scan.spans_lines))


class _Scan:
    """The state of a scan that reads a TSV file both without and with quoting, to determine which one applies."""

    def __init__(self, header: bool) -> None:
        self.header, self.began = header, 0
        self.declared = self.is_uneven = self.is_doubled = self.spans_lines = False
        self._inside = self._failed = False
        self._tabs = 0  # of the record so far, outside of quotes
        self._first = 0  # tabs of the first line
        self._width: int | None = None  # tabs of the first record, outside of quotes

    @property
    def is_quoted(self) -> bool:
        """Whether all lines so far can be read with quoting."""
        return not self._failed and not self._inside

    def goes_on(self, number: int, line: bytes) -> bool:
        """Process a line; return False once the file cannot be read with quoting."""
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
