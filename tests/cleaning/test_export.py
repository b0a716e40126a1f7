"""What is written is what was there less the dropped rows: byte for byte, schema and all, whole or not at all."""

import csv
import io
import json
import resource

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eigentrace.cleaning import export as exporting
from eigentrace.cleaning.export import export
from eigentrace.cleaning.thresholds import clean
from eigentrace.errors import DataError, InputError, MismatchError, StorageError, UnsupportedError
from tests.helpers.expecting import refused
from tests.helpers.small import table
from tests.helpers.tables import Columns

# Characters that change what a line means, and some that do not.
TEXT = st.text(alphabet=',;\t|"\n\r aä€', max_size=6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("export")


def written(folder, content, drop, name="a.csv", **options):
    """Export bytes by way of files, and give back the bytes of the result."""
    source, out = folder / name, folder / f"out-{name}"
    out.unlink(missing_ok=True)
    source.write_bytes(content)
    export(np.array(drop, dtype=bool), source, out, **options)
    return out.read_bytes()


def as_csv(rows, **options):
    text = io.StringIO(newline="")
    csv.writer(text, **options).writerows(rows)
    return text.getvalue().encode()


@settings(max_examples=150, deadline=None)
@given(
    rows=st.integers(2, 3).flatmap(lambda width: st.lists(st.lists(TEXT, min_size=width, max_size=width), min_size=1)),
    delimiter=st.sampled_from([",", ";", "|"]),
    ending=st.sampled_from(["\n", "\r\n"]),
    quoting=st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]),
    given=st.booleans(),
    data=st.data(),
)
def test_csv_is_copied_record_by_record(folder, rows, delimiter, ending, quoting, given, data):
    drop = data.draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows)))
    if ending == "\n" and quoting == csv.QUOTE_MINIMAL:  # old versions of Python leave a bare \r unquoted then
        rows = [[text.replace("\r", "") for text in row] for row in rows]
    options = {"delimiter": delimiter, "lineterminator": ending, "quoting": quoting}
    head = [f"column {i}" for i in range(len(rows[0]))]
    records = [as_csv([row], **options) for row in rows]
    expected = as_csv([head], **options) + b"".join(r for r, gone in zip(records, drop, strict=True) if not gone)
    found = written(folder, as_csv([head, *rows], **options), drop, delimiter=delimiter if given else None)
    assert found == expected
    kept = [row for row, gone in zip(rows, drop, strict=True) if not gone]
    assert list(csv.reader(io.StringIO(found.decode(), newline=""), delimiter=delimiter)) == [head, *kept]


def test_csv_rows_are_those_arrow_reads(folder):
    content = b'\xef\xbb\xbf"id, or\nname",text\r\n1,"two ""lines"",\n\nof text"\r\n\r\n2,5" pipe\n3,plain\r\n4,"last"'
    drop = [False, True, False, True]
    parsed = pa.csv.ParseOptions(newlines_in_values=True)
    before = pa.csv.read_csv(io.BytesIO(content), parse_options=parsed)
    assert before.num_rows == 4
    after = pa.csv.read_csv(io.BytesIO(written(folder, content, drop)), parse_options=parsed)
    assert after.equals(before.filter(pa.array(drop, pa.bool_()).to_numpy(False) ^ True))


@pytest.mark.parametrize(
    ("content", "drop", "expected", "options"),
    table(
        {
            "last line without end": (b"a\nx\ny", [True, False], b"a\ny", {}),
            "last line dropped": (b"a\nx\ny", [False, True], b"a\nx\n", {}),
            "all dropped": (b"a\nx\ny\n", [True, True], b"a\n", {}),
            "empty lines stay": (b"\na,b\n\n1,2\n\n3,4\n\n", [True, False], b"\na,b\n\n\n3,4\n\n", {}),
            "no header": (b"1,2\n3,4\n", [True, False], b"3,4\n", {"header": False}),
            "latin-1": ("a;b\nä;1\nö;2\n".encode("latin-1"), [True, False], "a;b\nö;2\n".encode("latin-1"), {}),
            "text after a quote": (b'a,b\n"x"y",1\nz,2\n', [True, False], b"a,b\nz,2\n", {}),
            "delimiter within quotes": (b'"a,b,c";"d"\n"1\n,";2\n3;4\n', [True, False], b'"a,b,c";"d"\n3;4\n', {}),
            "delimiter told": (b'a b\nx "\ny" z\n', [True, False], b'a b\ny" z\n', {"delimiter": ","}),
        }
    ),
)
def test_csv_at_its_edges(folder, content, drop, expected, options):
    assert written(folder, content, drop, **options) == expected


def test_tsv_and_jsonl(folder):
    content = b'a\tb\n1,\t"x\ny"\n2\t\n'
    assert written(folder, content, [True, False], "a.tsv") == b"a\tb\n2\t\n"
    content = b'a\tb\n1,"\t"x\n"\ty"\n2\t\n'  # lone quotes are text: every line is a row
    assert written(folder, content, [True, False, True], "a.tsv") == b'a\tb\n"\ty"\n'
    lines = [json.dumps({"text": text}).encode() + b"\n" for text in ('a "quote', "two\nlines", "é")]
    lines[2] = b' {"text":   "\xc3\xa9"}\r\n'
    content = lines[0] + b"\n" + lines[1] + b"  \n" + lines[2]
    for name in ("a.jsonl", "a.ndjson", "a.json"):
        assert written(folder, content, [False, True, False], name) == lines[0] + b"\n  \n" + lines[2]


IMAGE = pa.struct({"bytes": pa.binary(), "path": pa.string()})


def rich(size, start=0):
    numbers = list(range(start, start + size))
    columns = {
        "n": pa.array(numbers, pa.uint32()),
        "kind": pa.array([None if n % 5 == 0 else f"k{n % 3}" for n in numbers], pa.string()).dictionary_encode(),
        "tokens": pa.array([list(range(n % 4)) for n in numbers], pa.list_(pa.int32())),
        "image": pa.array([{"bytes": bytes([n % 256]), "path": None} for n in numbers], IMAGE),
        "when": pa.array(numbers, pa.timestamp("ns", "UTC")),
    }
    return pa.table(columns).replace_schema_metadata({"huggingface": '{"info": {}}', "mine": "yes"})


@pytest.mark.parametrize("codec", ["zstd", "none", {"n": "gzip", "kind": "snappy"}])
def test_parquet_keeps_schema_metadata_and_compression(tmp_path, codec):
    whole = rich(100)
    pq.write_table(whole, tmp_path / "a.parquet", row_group_size=30, compression=codec)
    drop = np.random.default_rng(0).random(100) < 0.4
    drop[30:60] = True
    export(drop, tmp_path / "a.parquet", tmp_path / "b.parquet")
    before, after = pq.ParquetFile(tmp_path / "a.parquet"), pq.ParquetFile(tmp_path / "b.parquet")
    assert after.read().equals(before.read().filter(pa.array(~drop)))
    assert after.schema_arrow.equals(before.schema_arrow, check_metadata=True)
    assert after.schema_arrow.metadata[b"mine"] == b"yes"
    sizes = [(~drop[i : i + 30]).sum() for i in range(0, 100, 30)]
    assert [after.metadata.row_group(i).num_rows for i in range(after.num_row_groups)] == [n for n in sizes if n]
    for i in range(before.metadata.num_columns):
        columns = [file.metadata.row_group(0).column(i) for file in (before, after)]
        assert columns[0].compression == columns[1].compression


def test_parquet_of_one_large_group_is_written_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(exporting, "_ROWS_AT_ONCE", 16)
    monkeypatch.setattr(exporting, "_GROUP_BYTES", 2000)
    pq.write_table(rich(200), tmp_path / "a.parquet")
    drop = np.arange(200) % 3 == 0
    export(drop, tmp_path / "a.parquet", tmp_path / "b.parquet")
    assert pq.read_table(tmp_path / "b.parquet").equals(rich(200).filter(pa.array(~drop)))
    assert pq.ParquetFile(tmp_path / "b.parquet").num_row_groups > 1


def test_nothing_left_of_a_parquet_file(tmp_path):
    for size in (0, 3):
        pq.write_table(rich(size), tmp_path / f"{size}.parquet")
        export(np.ones(size, dtype=bool), tmp_path / f"{size}.parquet", tmp_path / f"none-{size}.parquet")
        before, after = (pq.read_table(tmp_path / f"{name}{size}.parquet") for name in ("", "none-"))
        assert after.num_rows == 0
        assert after.schema.equals(before.schema, check_metadata=True)


def test_folders_and_patterns(tmp_path):
    (tmp_path / "data").mkdir()
    for number, size in enumerate((10, 1, 20)):
        name = f"train-{number:05d}-of-00003"
        pq.write_table(rich(size, 100 * number), tmp_path / "data" / f"{name}.parquet")
        (tmp_path / "data" / f"{name}.csv").write_text("a\n" + "".join(f"{number} {i}\n" for i in range(size)))
    pq.write_table(rich(7), tmp_path / "data" / "test-00000-of-00001.parquet")
    drop = np.arange(31) % 2 == 0
    whole = pa.concat_tables([rich(10), rich(1, 100), rich(20, 200)])
    for source, split in ((tmp_path / "data", "train"), (tmp_path / "data" / "train*.parquet", None)):
        out = export(drop, source, tmp_path / f"kept-{split}", split=split)
        files = sorted(out.iterdir())
        assert [file.name for file in files] == [f"train-0000{i}-of-00003.parquet" for i in range(3)]
        assert pa.concat_tables(map(pq.read_table, files)).equals(whole.filter(pa.array(~drop)))
    out = export(drop, tmp_path / "data" / "*.csv", tmp_path / "kept-csv")
    lines = [file.read_text().splitlines() for file in sorted(out.iterdir())]
    assert lines[0] == ["a", "0 1", "0 3", "0 5", "0 7", "0 9"]
    assert lines[1] == ["a"] + ["1 0"] * (not drop[10])
    assert lines[2] == ["a", *(f"2 {i}" for i in range(20) if not drop[11 + i])]


def test_saved_datasets(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    rows = {"text": [f"text {i}" for i in range(50)], "label": [i % 3 for i in range(50)], "tokens": [[1, 2]] * 50}
    whole = datasets.Dataset.from_dict(rows).cast_column("label", datasets.ClassLabel(names=["a", "b", "c"]))
    whole.save_to_disk(tmp_path / "one", num_shards=3)
    datasets.DatasetDict({"train": whole, "test": whole.select(range(5))}).save_to_disk(tmp_path / "two")
    drop = np.arange(50) % 4 == 0
    for source, split in ((tmp_path / "one", None), (tmp_path / "two", "train"), (tmp_path / "two" / "train", None)):
        out = export(drop, source, tmp_path / f"kept-{source.name}-{split}", split=split)
        read = datasets.load_from_disk(out)
        assert read.to_dict() == whole.select(np.flatnonzero(~drop)).to_dict()
        assert read.features == whole.features
        before = datasets.load_from_disk(source if split is None else source / split)
        assert read._fingerprint != before._fingerprint
    nothing = datasets.load_from_disk(export(np.ones(50, dtype=bool), tmp_path / "one", tmp_path / "nothing"))
    assert len(nothing) == 0
    assert nothing.features == whole.features


def test_decisions_are_taken_as_they_are(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"x": 0}\n{"x": 1}\n{"x": 2}\n')
    export(clean(Columns(loss=[1.0, 3.0, 2.0]), drop=1, by="loss"), str(tmp_path / "a.jsonl"), tmp_path / "b.jsonl")
    assert (tmp_path / "b.jsonl").read_text() == '{"x": 0}\n{"x": 2}\n'
    export([True, True, False], tmp_path / "a.jsonl", tmp_path / "new" / "c.jsonl")
    assert (tmp_path / "new" / "c.jsonl").read_text() == '{"x": 2}\n'


IDS = ["e", "b", "a", "d", "c"]
CLASSES = [0, 1, 1, 0, 2]
NAMES = ["no", "yes", "yes", "no", "maybe"]


def decided(ids=IDS, labels=CLASSES):
    """Decisions to drop the examples b and d."""
    return clean(Columns(ids=ids, loss=[1.0, 5.0, 2.0, 4.0, 3.0], label=labels), drop=2, by="loss")


def saved(folder, name, columns, delimiter=","):
    """Write a dataset in the format that a name says."""
    path, data = folder / name, pa.table(columns)
    if name.endswith("parquet"):
        pq.write_table(data, path, row_group_size=2)
    elif name.endswith("jsonl"):
        path.write_text("".join(json.dumps(row) + "\n" for row in data.to_pylist()))
    elif name.endswith("sv"):
        pa.csv.write_csv(data, path, pa.csv.WriteOptions(delimiter="\t" if name.endswith("tsv") else delimiter))
    else:
        pytest.importorskip("datasets").Dataset.from_dict(data.to_pydict()).save_to_disk(path)
    return path


def kept_of(path, column="id"):
    if path.suffix == ".parquet":
        return pq.read_table(path)[column].to_pylist()
    if path.suffix == ".jsonl":
        return [json.loads(line)[column] for line in path.read_text().splitlines()]
    if path.is_dir():
        return pytest.importorskip("datasets").load_from_disk(path)[column][:]
    with path.open(newline="") as file:
        return [row[column] for row in csv.DictReader(file, delimiter={".tsv": "\t"}.get(path.suffix, ","))]


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.jsonl", "a.parquet", "a"])
def test_rows_that_moved_are_found_by_their_ids(tmp_path, name):
    moved = {"text": [f"x {i}" for i in "abcde"], "id": list("abcde")}
    out = export(decided(), saved(tmp_path, name, moved), tmp_path / f"out{name[1:]}")
    assert kept_of(out) == ["a", "c", "e"]
    numbers = decided(ids=np.array([50, 20, 10, 40, 30]))
    source = saved(tmp_path, f"b{name[1:]}", {"key": [10, 20, 30, 40, 50]})
    assert list(map(int, kept_of(export(numbers, source, tmp_path / f"c{name[1:]}", id="key"), "key"))) == [10, 30, 50]


def test_a_damaged_description_of_a_saved_dataset_is_named(tmp_path):
    source = saved(tmp_path, "a", {"id": list("abcde")})
    (source / "dataset_info.json").write_text("[" * 100_000)
    with refused(DataError, source / "dataset_info.json"):
        export(decided(), source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_ids_are_read_beside_lone_quotes_of_a_tsv(tmp_path):
    (tmp_path / "a.tsv").write_text('id\ttext\na\t"x\nb\ty\nc\t"z\nd\tw\ne\tv\n')
    kept = export(decided(), tmp_path / "a.tsv", tmp_path / "out.tsv").read_text()
    assert kept == 'id\ttext\na\t"x\nc\t"z\ne\tv\n'


REFUSED = {
    "other ids": ({"id": list("ebadx")}, {}, (4, "'c'", "'x'", "decisions.mask")),
    "ids that come twice": ({"id": list("ebadd")}, {}, (4, "'c'", "'d'")),
    "no ids": ({"text": list("vwxyz")}, {}, ("'id'", "id=")),
    "a column that is not there": ({"id": IDS}, {"id": "key"}, ("'key'",)),
}


@pytest.mark.parametrize(("columns", "options", "mentions"), table(REFUSED))
def test_a_dataset_with_other_ids_is_refused(tmp_path, columns, options, mentions):
    source = saved(tmp_path, "a.csv", columns)
    with refused((MismatchError, InputError), "a.csv", *mentions):
        export(decided(), source, tmp_path / "out.csv", **options)
    assert not (tmp_path / "out.csv").exists()
    name = next(iter(columns))
    kept = kept_of(export(decided().mask, source, tmp_path / "out.csv"), name)
    assert kept == [columns[name][row] for row in (0, 2, 4)]


def test_without_ids_rows_of_one_label_have_one_class(tmp_path):
    nameless = decided(ids=None)
    columns = {"label": NAMES, "text": list("vwxyz")}
    same = saved(tmp_path, "a.csv", columns, delimiter=";")
    assert len(export(nameless, same, tmp_path / "kept.csv").read_text().splitlines()) == 4
    moved = saved(tmp_path, "b.csv", {name: values[::-1] for name, values in columns.items()})
    with refused(MismatchError, "b.csv", "rows 2 and 3", "'yes'", "classes 1 and 0"):
        export(nameless, moved, tmp_path / "other.csv")
    renamed = saved(tmp_path, "c.jsonl", {"verdict": NAMES[::-1]})
    export(nameless, renamed, tmp_path / "unknown.jsonl")  # nothing to compare with
    with refused(MismatchError, "c.jsonl", "rows 2 and 3", "'yes'", "classes 1 and 0"):
        export(nameless, renamed, tmp_path / "other.jsonl", label="verdict")
    with refused(InputError, "label", "'none'"):
        export(nameless, renamed, tmp_path / "other.jsonl", label="none")
    with refused(InputError, "ids", "'verdict'"):
        export(nameless, renamed, tmp_path / "other.jsonl", id="verdict")
    with refused(InputError, "id", "label", "Decisions"):
        export(nameless.mask, renamed, tmp_path / "other.jsonl", id="verdict")


def test_a_row_to_be_relabelled_may_have_its_new_label(tmp_path):
    columns = Columns(loss=[1.0, 5.0, 2.0, 4.0], label=[0, 1, 0, 1], prediction=[0, 1, 1, 1])
    repaired = saved(tmp_path, "a.csv", {"label": ["no", "yes", "yes", "yes"]})
    with refused(MismatchError, "a.csv", "rows 1 and 2", "'yes'"):
        export(clean(columns, drop=1, by="loss"), repaired, tmp_path / "out.csv")
    export(clean(columns, drop=1, by="loss").relabel([2]), repaired, tmp_path / "out.csv")
    assert kept_of(tmp_path / "out.csv", "label") == ["no", "yes", "yes"]


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl", "a.parquet", "a"])
def test_another_number_of_rows_is_refused(tmp_path, name):
    source = tmp_path / name
    if name == "a":
        datasets = pytest.importorskip("datasets")
        datasets.Dataset.from_dict({"x": [1, 2, 3]}).save_to_disk(source)
    elif name == "a.parquet":
        pq.write_table(rich(3), source)
    else:
        source.write_text("1\n2\n3\n" if name == "a.jsonl" else "x\n1\n2\n3\n")
    for size, mentions in ((2, (2,)), (5, (2, 5))):
        with refused(MismatchError, source, *mentions):
            export(np.zeros(size, dtype=bool), source, tmp_path / f"out{source.suffix}")
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_nothing_is_overwritten(tmp_path):
    (tmp_path / "a.csv").write_text("x\n1\n")
    with refused(InputError, tmp_path / "a.csv"):
        export([True], tmp_path / "a.csv", tmp_path / "a.csv")
    assert (tmp_path / "a.csv").read_text() == "x\n1\n"


def test_what_comes_in_between_is_not_overwritten(tmp_path, monkeypatch):
    (tmp_path / "a.csv").write_text("x\n1\n")
    sync = exporting._Flags.check_used_up

    def late(flags):
        (tmp_path / "b.csv").write_text("somebody else's")
        sync(flags)

    monkeypatch.setattr(exporting._Flags, "check_used_up", late)
    with refused(InputError, tmp_path / "b.csv"):
        export([True], tmp_path / "a.csv", tmp_path / "b.csv")
    assert (tmp_path / "b.csv").read_text() == "somebody else's"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.csv", "b.csv"]


@pytest.mark.parametrize("name", ["a.csv", "a.parquet"])
def test_a_full_disk_leaves_nothing(tmp_path, name):
    if name == "a.csv":
        (tmp_path / name).write_text("x\n" + "1234567\n" * 20_000)
    else:
        pq.write_table(pa.table({"x": np.random.default_rng(0).random(20_000)}), tmp_path / name)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        with refused(StorageError, tmp_path / f"out-{name}"):
            export(np.zeros(20_000, dtype=bool), tmp_path / name, tmp_path / f"out-{name}")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize(
    ("name", "content", "out", "options", "error", "mentions"),
    table(
        {
            "unclosed quote": ("a.csv", b'x\n1\n"2\n3\n', "b.csv", {}, DataError, ("a.csv", "row 1")),
            "UTF-16": ("a.csv", "x\n1\n".encode("utf-16"), "b.csv", {}, UnsupportedError, ("a.csv", "UTF-16", "UTF-8")),
            "delimiter": ("a.csv", b"x\n", "b.csv", {"delimiter": ", "}, InputError, ("delimiter", "', '")),
            "other format": (
                "a.csv",
                b"x\n1\n2\n",
                "b.parquet",
                {},
                InputError,
                ("csv", "b.parquet"),
            ),
            "no parquet": ("a.parquet", b"x", "b.parquet", {}, DataError, ("a.parquet", "Parquet")),
            "unknown format": ("a.xml", b"x", "b.xml", {}, InputError, ("a.xml", "'.xml'")),
            "split": ("a.csv", b"x\n1\n2\n", "b.csv", {"split": "train"}, InputError, ("split='train'",)),
        }
    ),
)
def test_what_cannot_be_written_is_told(tmp_path, name, content, out, options, error, mentions):
    (tmp_path / name).write_bytes(content)
    with refused(error, *mentions):
        export([False, False], tmp_path / name, tmp_path / out, **options)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_damaged_row_group_is_told(tmp_path):
    pq.write_table(pa.table({"x": np.random.default_rng(0).random(5000)}), tmp_path / "a.parquet", use_dictionary=False)
    content = bytearray((tmp_path / "a.parquet").read_bytes())
    content[4:40] = bytes(36)
    (tmp_path / "a.parquet").write_bytes(content)
    with refused(DataError, tmp_path / "a.parquet"):
        export(np.zeros(5000, dtype=bool), tmp_path / "a.parquet", tmp_path / "b.parquet")
    assert [path.name for path in tmp_path.iterdir()] == ["a.parquet"]


@pytest.mark.parametrize("mask", [[0, 2], np.zeros((2, 2), dtype=bool), [0.5]])
def test_rows_are_no_mask(tmp_path, mask):
    with refused(InputError, np.asarray(mask).dtype, np.asarray(mask).shape):
        export(mask, tmp_path / "a.csv", tmp_path / "b.csv")
