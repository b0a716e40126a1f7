"""Parquet files that claim, or unpack to, far more than they hold are refused before memory is taken."""

import gc
import io
import os
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import eigentrace as et
from eigentrace.disk import parquet
from eigentrace.disk.parquet import BoundedParquet
from eigentrace.disk.parquet_pages import pages_of
from eigentrace.errors import InputError, MismatchError, StorageError
from eigentrace.formats.files import find_files
from eigentrace.formats.records import open_records
from eigentrace.formats.single_column import single_column
from eigentrace.numeric.hashing import hash_file
from eigentrace.store.check import check
from eigentrace.store.user_columns import checksums_of
from tests.helpers.expecting import refused
from tests.helpers.manifests import edit_manifest
from tests.helpers.runs import data, fit

ROWS = 60
LONG = "a" * 1_000_000


@pytest.fixture(autouse=True)
def least(monkeypatch):
    """Small files may take 16 MiB in place of 1 GiB."""
    monkeypatch.setattr(parquet, "_LEAST", 1 << 24)


def written(path, column, groups=1, **options):
    """Write a column of 60 rows, in several equal row groups."""
    part = pa.table({"source": column})
    with pq.ParquetWriter(path, part.schema, **options) as writer:
        for _ in range(groups):
            writer.write_table(part)
    return path


def one_text(path, store_schema=False):
    """One text, of which every row has the number."""
    column = pa.DictionaryArray.from_arrays(pa.array([0] * ROWS, pa.int32()), [LONG])
    return written(path, column, compression="zstd", dictionary_pagesize_limit=1 << 30, store_schema=store_schema)


def one_text_with_types(path):
    return one_text(path, store_schema=True)


def packed(path):
    return written(path, pa.array([LONG]), ROWS, compression="zstd", use_dictionary=False)


def counted(path):
    """Lists of equal numbers, which are stored as one number and a count."""
    numbers = pa.array(np.zeros(100_000, np.int64))
    return written(path, pa.ListArray.from_arrays(pa.array([0, len(numbers)], pa.int32()), numbers), ROWS)


def number(value, size=None):
    """A number as in Parquet's summary, in more bytes than it needs if wanted."""
    value, parts = value << 1, []
    while value or not parts or (size and len(parts) < size):
        parts.append(value & 127 | 128)
        value >>= 7
    return bytes([*parts[:-1], parts[-1] & 127])


def lying(path):
    """Compressed pages, of which the summary says that they hold a thousand bytes."""
    written(path, pa.array([LONG] * ROWS), compression="zstd", use_dictionary=False)
    honest = number(pq.read_metadata(path).row_group(0).column(0).total_uncompressed_size)
    content = path.read_bytes()
    assert content.count(honest) >= 1
    path.write_bytes(content.replace(honest, number(1000, len(honest))))
    assert pq.read_metadata(path).row_group(0).column(0).total_uncompressed_size == 1000
    return path


BOMBS = [one_text, one_text_with_types, packed, counted, lying]


@pytest.fixture(scope="module")
def bombs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bombs")
    return {make: make(folder / f"{make.__name__}.parquet") for make in BOMBS}


@pytest.fixture
def run(tmp_path):
    return et.score(fit(ROWS), data(ROWS), tmp_path / "run", columns={"source": ["a", "b"] * (ROWS // 2)}).path


@pytest.mark.parametrize("make", BOMBS)
def test_columns_that_unpack_to_much_are_refused(run, bombs, make):
    file = run / "columns.parquet"
    file.write_bytes(bombs[make].read_bytes())
    assert file.stat().st_size < 50_000

    def claim(manifest):
        manifest["files"][file.name] = hash_file(file)
        manifest["blocks"][file.name] = checksums_of(file)

    edit_manifest(run, claim)
    before = pa.total_allocated_bytes()
    for read in (lambda: et.open_run(run).column("source"), et.open_run(run).reader.user_table):
        with refused(StorageError, file):
            read()
    assert pa.total_allocated_bytes() - before < 1 << 24


@pytest.mark.parametrize("make", BOMBS)
def test_a_table_that_unpacks_to_much_is_refused(run, bombs, make):
    file = run / "table.parquet"
    file.write_bytes(bombs[make].read_bytes())
    with refused(StorageError, file):
        et.open_run(run).table()
    (fault,) = check(run).faults
    assert fault.path == file


@pytest.mark.parametrize("make", [one_text, one_text_with_types, packed, lying])
def test_data_that_unpacks_to_much_is_refused(bombs, make):
    files = find_files(bombs[make])
    with refused(InputError, bombs[make]):
        open_records(files).read([0], ["source"])
    with refused(InputError, bombs[make]):
        single_column(files, "source")


def test_groups_that_unpack_to_much_together_are_refused(tmp_path):
    column = pa.DictionaryArray.from_arrays(pa.array([0] * ROWS, pa.int32()), [LONG[:200_000]])
    options = {"compression": "zstd", "dictionary_pagesize_limit": 1 << 30, "store_schema": False}
    records = open_records(find_files(written(tmp_path / "a.parquet", column, 3, **options)))
    assert len(records.read([0], ["source"])) == 1
    with refused(InputError, tmp_path / "a.parquet"):
        records.whole(["source"])


def test_decisions_that_unpack_to_much_are_refused(run, bombs):
    with refused(MismatchError, bombs[one_text]):
        et.Decisions.read(bombs[one_text])


def test_files_are_closed_when_nobody_refers_to_them(run):
    def held():
        links = (place for place in Path("/proc/self/fd").iterdir() if place.is_symlink())
        return sorted(name for name in map(os.readlink, links) if name.startswith(str(run)))

    gc.disable()
    try:
        opened = et.open_run(run)
        opened.table()
        opened.column("source")
        opened.groups("source")
        del opened
        assert held() == []
    finally:
        gc.enable()


def test_rows_of_groups_that_are_not_those_of_the_file_are_refused(tmp_path):
    file = written(tmp_path / "a.parquet", pa.array([1, 2, 3]), 2)

    class Lying:
        def __init__(self, metadata):
            self.metadata, self.num_rows = metadata, 7

        def __getattr__(self, name):
            return getattr(self.metadata, name)

    class File:
        def __init__(self, coded):
            self.file = pq.ParquetFile(file)
            self.metadata, self.schema_arrow = Lying(self.file.metadata), self.file.schema_arrow

    with refused(ValueError, 6, 7):
        BoundedParquet(File, lambda: file.open("rb"), file.stat().st_size, ValueError)


TEXTS = ["x", None, "yy", "x", "", None] * 50
KINDS = [pa.string(), pa.large_string(), pa.binary(), pa.large_binary(), pa.string_view(), pa.binary_view()]
COLUMNS = {str(kind): pa.array(TEXTS).cast(kind) for kind in KINDS} | {
    "numbered texts": pa.array(TEXTS).dictionary_encode(),
    "numbered numbers": pa.array([3, None, 4] * 100).dictionary_encode(),
    "lists": pa.array([[text] for text in TEXTS]),
}


@pytest.mark.parametrize("name", COLUMNS)
@pytest.mark.parametrize("is_coded", [True, False])
def test_good_values_are_the_same(tmp_path, monkeypatch, name, is_coded):
    table = pa.table({"n": np.arange(300), "t": COLUMNS[name]}).replace_schema_metadata({"a": "b"})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=70)
    if is_coded:
        monkeypatch.setattr(
            BoundedParquet, "_may_swell", lambda held, name, _: parquet._is_text(held.schema.field(name).type)
        )
    file = tmp_path / "a.parquet"
    held = BoundedParquet(
        lambda coded: pq.ParquetFile(file, read_dictionary=coded), lambda: file.open("rb"), 1 << 16, ValueError
    )
    expected = pq.read_table(tmp_path / "a.parquet")
    assert held.read().equals(expected, check_metadata=True)
    some = pa.concat_tables([expected.slice(70, 70), expected.slice(210, 70)]).select(["t"])
    assert held.read([1, 3], ["t"]).equals(some)
    held.close()


OPTIONS = [
    {},
    {"data_page_version": "2.0", "compression": "zstd"},
    {"use_dictionary": False, "compression": "gzip"},
    {"write_page_checksum": True, "data_page_size": 200, "write_statistics": True},
    {"write_page_index": True, "write_statistics": False, "compression": "none"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_pages_are_those_that_the_summary_adds_up(tmp_path, options):
    texts = [None if row % 7 == 0 else f"{row} " * (row % 50) for row in range(3000)]
    lists = [[row] * (row % 4) for row in range(3000)]
    table = pa.table({"text": texts, "list": lists, "number": np.arange(3000) / 3, "truth": [True, False, None] * 1000})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=1000, **options)
    metadata = pq.read_metadata(tmp_path / "a.parquet")
    with (tmp_path / "a.parquet").open("rb") as file:
        for group in range(3):
            for at in range(4):
                about = metadata.row_group(group).column(at)
                begin = about.dictionary_page_offset if about.has_dictionary_page else about.data_page_offset
                pages = pages_of(file, begin, begin + about.total_compressed_size)
                assert pages.values == about.num_values
                # The summary counts headers too.
                assert 0 <= about.total_uncompressed_size - pages.bytes < 20_000
    assert open_records(find_files(tmp_path / "a.parquet")).whole(["text"]).column(0).to_pylist() == texts


@given(st.binary(max_size=300))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_no_header_is_refused(content):
    with suppress(ValueError):
        pages_of(io.BytesIO(content), 0, 1000)
