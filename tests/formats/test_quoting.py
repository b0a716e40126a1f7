"""Quotes in TSV files: characters of the texts, unless the file is clearly written with quoting. No line is lost.

In CSV files they are quoting, and refused where that would lose lines.
"""

import csv
import io

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from eigentrace.cleaning.export import export
from eigentrace.errors import DataError
from eigentrace.formats.files import find_files
from eigentrace.formats.quoting import check_closed, has_quoting
from eigentrace.formats.records import open_records
from eigentrace.formats.single_column import single_column
from tests.helpers.expecting import refused
from tests.helpers.small import table

# Lines 51, 59 and 90 of a crawled corpus of German and English, with what stands between them.
CRAWLED = [
    ("Nach der Aushärtung schützt iron cement die Kokille.", "iron cement protects the ingot."),
    (
        '"Das am leichtesten zu erlernende professionelle Layoutwerkzeug.',
        '"The potential gains should be considerable.',
    ),
    ("Und dann kam der Regen.", 'WordBanker\'s "Visual Clue" method of testing means you learn.'),
    ("Muss ich für dieses Bild eine Volltonfarbe verwenden?", 'Another question is, "Do I need to use a spot color?'),
    ('"In den meisten Bildformaten sind Volltonfarben problematisch."', '"Using spot colors is often complicated."'),
    ("Das war der letzte Satz.", 'The last sentence ends with a quote."'),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("quoting")


def written(folder, content, name="a.tsv"):
    (folder / name).write_bytes(content.encode())
    return folder / name


def texts_of(path):
    records = open_records(find_files(path), as_text=["de", "en"])
    read = records.whole(["de", "en"])
    return list(zip(*(read.column(name).to_pylist() for name in ("de", "en")), strict=True))


def plain(pairs, ending="\n"):
    return "".join("\t".join(pair) + ending for pair in [("de", "en"), *pairs])


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_every_line_of_a_corpus_is_a_row_and_its_quotes_are_text(folder, ending):
    path = written(folder, plain(CRAWLED, ending))
    assert not has_quoting(path)
    assert texts_of(path) == CRAWLED


def test_a_quote_that_opens_and_one_that_closes_do_not_swallow_what_lies_between(folder):
    pairs = [("a", '"He said so'), ("b", "plain"), ("c", 'and left."'), ("d", "plain")]
    assert texts_of(written(folder, plain(pairs))) == pairs


def test_what_is_cleaned_is_read_back_the_same(folder, tmp_path):
    content = plain(CRAWLED)
    drop = np.array([True, False, False, True, False, False])
    out = export(drop, written(folder, content), tmp_path / "kept.tsv")
    lines = content.encode().splitlines(keepends=True)
    assert out.read_bytes() == lines[0] + b"".join(line for line, gone in zip(lines[1:], drop, strict=True) if not gone)
    assert texts_of(out) == [pair for pair, gone in zip(CRAWLED, drop, strict=True) if not gone]


TEXT = st.text(alphabet='" aä,;', max_size=6)
LINES = st.lists(st.tuples(TEXT, TEXT).filter(any), min_size=1, max_size=8)


@settings(max_examples=300, deadline=None)
@given(pairs=LINES, ending=st.sampled_from(["\n", "\r\n"]))
def test_lines_are_never_lost_whatever_quotes_they_hold(folder, pairs, ending):
    path = written(folder, plain(pairs, ending))
    found = texts_of(path)
    assert len(found) == len(pairs)
    if not has_quoting(path):
        assert found == pairs
    kept = folder / "kept.tsv"
    kept.unlink(missing_ok=True)
    export(np.zeros(len(pairs), dtype=bool), path, kept)
    assert kept.read_bytes() == path.read_bytes()


@settings(max_examples=300, deadline=None)
@given(
    pairs=st.lists(st.tuples(*[st.text(alphabet='"\t\n aä', max_size=6)] * 2), min_size=1, max_size=8),
    quoting=st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]),
    ending=st.sampled_from(["\n", "\r\n"]),
)
def test_what_a_writer_of_csv_quoted_is_read_as_it_was(folder, pairs, quoting, ending):
    assume(all(any(pair) for pair in pairs))
    text = io.StringIO(newline="")
    csv.writer(text, delimiter="\t", lineterminator=ending, quoting=quoting).writerows([("de", "en"), *pairs])
    lines = [line for line in text.getvalue().split("\n") if line.strip("\r")]
    # A file whose lines all happen to have the header's number of fields is read line by line.
    even = all(line.count("\t") == 1 for line in lines)
    assume(quoting == csv.QUOTE_ALL or not even or len(lines) == len(pairs) + 1)
    path = written(folder, text.getvalue())
    assert texts_of(path) == pairs
    out = folder / "kept.tsv"
    out.unlink(missing_ok=True)
    export(np.arange(len(pairs)) > 0, path, out)
    assert texts_of(out) == pairs[:1] or not has_quoting(out)


@pytest.mark.parametrize(
    ("content", "header", "expected"),
    table(
        {
            "no quotes": ("a\tb\n1\t2\n", True, False),
            "whole texts in quotes": ('a\tb\n1\t"x y"\n', True, False),
            "a header in quotes": ('"a"\tb\n1\t"x y"\n', True, True),
            "the same line as data": ('"a"\tb\n1\t"x y"\n', False, False),
            "doubled": ('a\tb\n1\t"x ""y"""\n', True, True),
            "doubled, and one that is not": ('a\tb\n1\t"x ""y"""\n2\t5" pipe\n', True, False),
            "empty quotes": ('a\tb\n1\t""\n', True, False),
            "a tab in quotes": ('a\tb\n1\t"x\ty"\n', True, True),
            "a line break in quotes": ('a\tb\n1\t"x\n\ny"\n', True, True),
            "in the first record": ('1\t"x\ny"\n2\tz\n', False, True),
            "one column": ('a\n"x\ny"\n', True, False),
            "never closed": ('a\tb\n1\t"x\n2\ty\n', True, False),
            "a mark and empty lines": ('\ufeff\n"a"\tb\n\n1\t"x"\n', True, True),
        }
    ),
)
def test_the_rule(folder, content, header, expected):
    assert has_quoting(written(folder, content), header=header) is expected


def test_a_quoted_header_above_lone_quotes_is_refused(folder, tmp_path):
    for text, line in (('5" pipe', 3), ('"never closed', 3)):
        path = written(folder, f'"de"\t"en"\n"a"\t"b"\n"c"\t{text}\n"d"\t"e"\n')
        with refused(DataError, "a.tsv", line):
            open_records(find_files(path))
        with refused(DataError, "a.tsv", line):
            export([True, False, False], path, tmp_path / "kept.tsv")
    assert not (tmp_path / "kept.tsv").exists()


def test_a_wrong_number_of_columns_names_the_likely_cause(folder):
    path = written(folder, 'de,en\na,b\n"He said so,c\nd,e "and left"\n', "a.csv")
    with refused(DataError, "a.csv", "got 1", "TSV"):
        open_records(find_files(path))
    path = written(folder, "de\ten\na\tb\nc\td\te\n")
    with refused(DataError, "a.tsv", "Expected 2 columns, got 3"):
        open_records(find_files(path))


SWALLOWED = {
    "never closed": ('de,en\na,"b\nc,d\n', ("a.csv", 2)),
    "in the last line": ('de,en\na,b\nc,"d\n', ("a.csv", 3)),
    "after one that closes": ('de,en\n"a\nb","c\nd,e\n', ("a.csv", 3)),
    "after a mark": ('\ufeff"de",en\na,"b\nc,d\n', ("a.csv", 2)),
    "in one column": ('de\n"a\nb\n', ("a.csv", 2)),
    "too long to be read": (
        'de,en\na,"b\n' + "c,d\n" * 600_000,
        ("a.csv", 2),
    ),
    "closed by the next that opens": (
        'de,en\na,"b\nc,d\ne,"f\ng,h\n',
        ("a.csv", 2, 4),
    ),
    "closed by one inside of a text": ('de,en\na,"b\nc,d 5" e\n', ("a.csv", 2, 3)),
}


@pytest.mark.parametrize(("content", "mentions"), table(SWALLOWED))
def test_quotes_that_swallow_rows_of_a_csv_are_refused(tmp_path, content, mentions):
    path = written(tmp_path, content, "a.csv")
    with refused(DataError, *mentions):
        open_records(find_files(path))


def test_quotes_that_swallow_rows_are_refused_where_ids_are_read(tmp_path):
    path = written(tmp_path, 'id;text\n1;"b\n2;c\n3;"d\n', "a.csv")
    with refused(DataError, "a.csv", 2, 4):
        single_column(find_files(path), "id", ";")


READ = {
    "within a text": ('de,en\na,5" disk\nb,c\n', [("a", '5" disk'), ("b", "c")]),
    "after quotes on one line": ('de,en\na,"b" c\nd,e\n', [("a", "b c"), ("d", "e")]),
    "over lines": ('de,en\na,"b\n""c"",\n"\nd,"e"\n', [("a", 'b\n"c",\n'), ("d", "e")]),
    "one after the other": ('de,en\r\n"a\r\n","b\r\n"\r\nc,d', [("a\r\n", "b\r\n"), ("c", "d")]),
}


@pytest.mark.parametrize(("content", "expected"), table(READ))
def test_other_quotes_of_a_csv_are_read_as_others_read_them(tmp_path, content, expected):
    assert texts_of(written(tmp_path, content, "a.csv")) == expected
    assert [tuple(row) for row in csv.reader(io.StringIO(content, newline=""))][1:] == expected


@settings(max_examples=300, deadline=None)
@given(
    pairs=st.lists(st.tuples(*[st.text(alphabet='",\r\n aä', max_size=6)] * 2), min_size=1, max_size=8),
    quoting=st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]),
)
def test_what_a_writer_of_csv_wrote_is_never_refused(folder, pairs, quoting):
    text = io.StringIO(newline="")
    csv.writer(text, quoting=quoting).writerows([("de", "en"), *pairs])
    check_closed(written(folder, text.getvalue(), "a.csv"))


def test_numbers_and_dates_keep_their_types(folder):
    path = written(folder, 'n\twhen\ttext\n1\t2020-01-01\t5" pipe\n2\t2020-01-02\tNA\n')
    schema = open_records(find_files(path), as_text=["text"]).schema
    assert schema.types == [pa.int64(), pa.date32(), pa.string()]
