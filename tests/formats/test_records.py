"""Files of examples: which they are, what is in them, and any rows of them."""

import json
import os
from glob import glob
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from eigentrace.cleaning.export import export
from eigentrace.errors import DataError, InputError, UnsupportedError
from eigentrace.formats import files
from eigentrace.formats.dataset_columns import class_labels, metadata_of, read_ids
from eigentrace.formats.files import find_files
from eigentrace.formats.records import open_records
from eigentrace.formats.single_column import single_column
from tests.helpers.expecting import refused
from tests.helpers.small import table

ROWS = 23
PLAIN = pa.table(
    {
        "id": [f"{row:03}" for row in range(ROWS)],
        "text": [f"line {row},\nand 'more' \"words\"" for row in range(ROWS)],
        "digits": [str(row) for row in range(ROWS)],
        "number": list(range(ROWS)),
    }
)


def csv(folder):
    pa.csv.write_csv(PLAIN, folder / "a.csv")
    return folder / "a.csv"


def tsv(folder):
    pa.csv.write_csv(PLAIN, folder / "a.tsv", pa.csv.WriteOptions(delimiter="\t"))
    return folder / "a.tsv"


def jsonl(folder):
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PLAIN.to_pylist()))
    return folder / "a.jsonl"


def parquet(folder):
    pq.write_table(PLAIN, folder / "a.parquet", row_group_size=5)
    return folder / "a.parquet"


PATTERNS = (
    "*.csv", "*", "**", "**/*.csv", "a/**/*.csv", "a/**", "**/b/*.csv", "**/**/x.csv", "a/*/x.csv", "[ab]/*.csv",
    "?.csv", ".*", ".h/*.csv", "*/.h/*", "a/b/x.csv", "no/*.csv", "**/no", "**/../*.csv", "*x*/**", "link/*.csv",
    "**/link/x.csv",
)  # fmt: skip


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("is_absolute", [True, False])
def test_patterns_match_as_in_glob(tmp_path, monkeypatch, pattern, is_absolute):
    for name in ("x.csv", "y.csv", "z.txt", "a/x.csv", "a/b/x.csv", "a/b/c/x.csv", "b/x.csv", ".h/x.csv", "a/.h/x.csv"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    (tmp_path / "lost").symlink_to(tmp_path / "nothing")
    monkeypatch.chdir(tmp_path)
    pattern = str(tmp_path / pattern) if is_absolute else pattern
    path = Path(pattern)
    parts = path.parts[1:] if is_absolute else path.parts
    here = {os.path.normpath(name) for name in glob(pattern, recursive=True) if Path(name).is_file()}
    found = {os.path.normpath(name) for name in files._matching(path.anchor, parts, 2000) if Path(name).is_file()}
    assert found == here


def endless(folder):
    (folder / "a" / "b").mkdir(parents=True)
    for name in ("again", "once more"):
        (folder / "a" / "b" / name).symlink_to(folder)
    return folder / "**" / "*.csv"


def wide(folder):
    for number in range(60):
        (folder / f"{number}.png").touch()
    return folder


@pytest.mark.parametrize("make", [endless, wide, lambda folder: wide(folder) / "*.csv"])
def test_a_search_among_too_many_files_ends(tmp_path, make):
    dataset = make(tmp_path)
    with refused(InputError, dataset, 50):
        find_files(dataset, most=50)


def test_a_data_file_of_holes_is_refused(tmp_path):
    with (tmp_path / "d.csv").open("wb") as file:
        file.write(b"text,label\n")
        file.truncate(1 << 40)
    with refused(InputError, tmp_path / "d.csv", f"{1 << 40:,}"):
        find_files(tmp_path / "d.csv")


def shards(folder):
    for part, (start, stop) in enumerate([(0, 9), (9, 10), (10, 23)]):
        pq.write_table(
            PLAIN.slice(start, stop - start), folder / f"train-0000{part}-of-00003.parquet", row_group_size=4
        )
    return folder


def pattern(folder):
    return shards(folder) / "*.parquet"


def saved(folder):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset(PLAIN).save_to_disk(folder / "saved", num_shards=3)
    return folder / "saved"


@pytest.fixture(params=[csv, tsv, jsonl, parquet, shards, pattern, saved], ids=lambda f: f.__name__)
def records(request, tmp_path):
    return open_records(find_files(request.param(tmp_path)), as_text=["id", "text", "digits"])


def test_every_format_gives_the_same_rows(records):
    assert len(records) == ROWS
    assert records.whole(PLAIN.schema.names).to_pylist() == PLAIN.to_pylist()


@pytest.mark.parametrize("rows", [[0], [22], [3, 4, 5, 6], [22, 0, 9, 9, 10], list(range(ROWS))], ids=str)
def test_any_rows_in_any_order(records, rows):
    found = records.read(rows, ["text", "number"])
    assert found.to_pylist() == PLAIN.select(["text", "number"]).take(rows).to_pylist()


def test_columns_piece_by_piece(records):
    chunks = list(records.chunks("number"))
    assert [first for first, _ in chunks] == np.cumsum([0, *(len(chunk) for _, chunk in chunks[:-1])]).tolist()
    assert [number for _, chunk in chunks for number in chunk.to_pylist()] == list(range(ROWS))


def test_ids_are_arrays(records):
    names, numbers = read_ids(records, "id"), read_ids(records, "number")
    assert isinstance(names, pa.Array)
    assert names.to_pylist()[:2] == ["000", "001"]
    assert isinstance(numbers, np.ndarray)
    assert numbers.tolist() == list(range(ROWS))
    assert read_ids(records, None) is None


def test_parquet_is_read_a_few_row_groups_at_a_time(tmp_path):
    records = open_records(find_files(parquet(tmp_path)))
    for row in range(ROWS):
        records.read([row], ["text"])
    assert len(records._pieces._groups) == 3


def test_texts_that_look_like_dates_or_numbers_stay_text(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "2020-01-01", "n": 1}\n{"text": "2020-01-02", "n": 2}\n')
    (tmp_path / "a.csv").write_text("text,n\n007,1\nNA,2\n,3\n")
    lines = open_records(find_files(tmp_path / "a.jsonl"), as_text=["text", "other"])
    assert lines.whole(["text", "n"]).to_pydict() == {"text": ["2020-01-01", "2020-01-02"], "n": [1, 2]}
    cells = open_records(find_files(tmp_path / "a.csv"), as_text=["text", "other"])
    assert cells.whole(["text", "n"]).to_pydict() == {"text": ["007", "NA", ""], "n": [1, 2, 3]}


@pytest.mark.parametrize("suffix", ["csv", "tsv", "jsonl"])
def test_a_text_may_be_longer_than_what_is_parsed_at_once(suffix, tmp_path):
    texts = ["one", 'a "word", ' * 400_000, "three"]  # 4 MB
    path = tmp_path / f"long.{suffix}"
    if suffix == "jsonl":
        path.write_text("".join(json.dumps({"id": str(row), "text": text}) + "\n" for row, text in enumerate(texts)))
    else:
        options = pa.csv.WriteOptions(delimiter="," if suffix == "csv" else "\t")
        pa.csv.write_csv(pa.table({"id": ["0", "1", "2"], "text": texts}), path, options)
    files = find_files(path)
    assert open_records(files, ["id", "text"]).whole(["text"]).column(0).to_pylist() == texts
    assert single_column(files, "text").to_pylist() == texts


@pytest.mark.parametrize("mark", list(",;|\t"))
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_a_csv_is_cut_where_it_is_exported(mark, end, tmp_path):
    rows = [("id", "text", "label"), ("1", '"one, or; two | three"', "a"), ("2", f'"a{end}line"', "b"), ("3", "c", "c")]
    (tmp_path / "a.csv").write_text(end.join(mark.join(row) for row in rows) + end, newline="")
    files = find_files(tmp_path / "a.csv")
    found = open_records(files, ["id", "text"]).whole(["id", "text"]).to_pydict()
    assert found == {"id": ["1", "2", "3"], "text": ["one, or; two | three", f"a{end}line", "c"]}
    assert single_column(files, "id").to_pylist() == found["id"]
    kept = export([False, True, False], tmp_path / "a.csv", tmp_path / "kept.csv")
    assert kept.read_bytes().decode() == end.join(mark.join(row) for row in (*rows[:2], rows[3])) + end


def test_lines_that_end_in_a_carriage_return_alone_are_rows(tmp_path):
    (tmp_path / "a.tsv").write_bytes(b"text\none\rtwo\nthree\n")
    assert open_records(find_files(tmp_path / "a.tsv"), ["text"]).whole(["text"])["text"].to_pylist() == [
        "one", "two", "three",
    ]  # fmt: skip
    kept = export([False, True, False], tmp_path / "a.tsv", tmp_path / "kept.tsv")
    assert kept.read_bytes() == b"text\none\rthree\n"


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_views_of_texts_are_texts(kind, tmp_path):
    views = pa.table({"text": pa.array(["one", "two", "three"], pa.string_view()), "label": [0, 1, 0]})
    if kind == "parquet":
        pq.write_table(views, tmp_path / "a.parquet", row_group_size=2)
        source = tmp_path / "a.parquet"
    else:
        source = tmp_path / "saved"
        source.mkdir()
        (source / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data.arrow"}]}))
        with pa.ipc.new_stream(source / "data.arrow", views.schema) as stream:
            stream.write_table(views)
    assert open_records(find_files(source)).read([2, 0], ["text"])["text"].to_pylist() == ["three", "one"]
    kept = export([False, True, False], source, tmp_path / f"kept{source.suffix}")
    found = pq.read_table(kept) if kind == "parquet" else pa.ipc.open_stream(kept / "data.arrow").read_all()
    assert found.equals(pa.table({"text": pa.array(["one", "three"], pa.string_view()), "label": [0, 0]}))


def test_a_split_of_several(tmp_path):
    for split, rows in (("train", 5), ("test", 3)):
        pq.write_table(PLAIN.slice(0, rows), tmp_path / f"{split}-00000-of-00001.parquet")
    assert len(open_records(find_files(tmp_path, "test"))) == 3
    with refused(InputError, tmp_path, "test, train", "split"):
        find_files(tmp_path)
    with refused(InputError, "'dev'", "test, train"):
        find_files(tmp_path, "dev")


def test_a_split_of_a_saved_dictionary(tmp_path):
    datasets = pytest.importorskip("datasets")
    both = datasets.DatasetDict({"train": datasets.Dataset(PLAIN), "dev": datasets.Dataset(PLAIN.slice(0, 4))})
    both.save_to_disk(tmp_path / "both")
    files = find_files(tmp_path / "both", "dev")
    assert files.source == tmp_path / "both" / "dev"
    assert len(open_records(files)) == 4
    with refused(InputError, tmp_path / "both", "train, dev", "split"):
        find_files(tmp_path / "both")
    with refused(InputError, "'test'", "train, dev"):
        find_files(tmp_path / "both", "test")


def written(name, text):
    def write(folder):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
        return folder / name

    return write


def other_schema(folder):
    shards(folder)
    pq.write_table(PLAIN.select(["id"]), folder / "train-00009-of-00003.parquet")
    return folder


def utf16(folder):
    (folder / "a.csv").write_text("text,label\na,b\n", encoding="utf-16")
    return folder / "a.csv"


WRONG = {
    "missing": (lambda at: at / "none.csv", InputError, ("/none.csv",)),
    "no match": (lambda at: at / "*.csv", InputError, ("/*.csv",)),
    "other format": (written("a.xlsx", ""), InputError, ("'.xlsx'", "CSV")),
    "empty folder": (lambda at: at, InputError, ("Parquet", "Dataset.save_to_disk")),
    "empty file": (written("a.csv", ""), DataError, ("a.csv", "csv")),
    "only a header": (written("a.csv", "text,label\n"), DataError, ("a.csv", "rows")),
    "uneven": (written("a.csv", "text,label\na,b\na,b,c\n"), DataError, ("a.csv", "Expected 2 columns, got 3")),
    "not lines": (written("a.json", '[{"a": 1}]'), DataError, ("a.json", "jsonl")),
    "not Parquet": (written("a.parquet", "no"), DataError, ("a.parquet", "parquet")),
    "one name twice": (written("a.csv", "text,text\na,b\n"), DataError, ("a.csv", "text")),
    "other columns": (other_schema, DataError, ("train-00009-of-00003.parquet", "train-00000-of-00003.parquet")),
    "UTF-16": (utf16, UnsupportedError, ("a.csv", "UTF-16", "UTF-8")),
    "a lone return": (
        written("a.csv", "text,label\na\rb,c\n"),
        DataError,
        ("a.csv", "Expected 2 columns, got 1", r"\r"),
    ),
    "an array": (written("a.json", '[{"a": 1}]'), DataError, ("a.json", "array", "jq")),
    "two types": (
        written("a.jsonl", '{"a": 1}\n{"a": "b"}\n'),
        DataError,
        ("a.jsonl", "number", "string", "row 1"),
    ),
    "packed": (written("a.csv.gz", ""), InputError, ("a.csv.gz",)),
    "no name twice": (written("a.csv", "text,,\na,b,c\n"), DataError, ("a.csv", "''")),
    "damaged folder": (lambda at: written("saved/state.json", "{")(at).parent, InputError, ("state.json",)),
    "without its files": (
        lambda at: written("saved/state.json", "{}")(at).parent,
        InputError,
        ("/saved", "_data_files"),
    ),
}


@pytest.mark.parametrize(("make", "kind", "mentions"), table(WRONG))
def test_what_cannot_be_read_is_said(make, kind, mentions, tmp_path):
    with refused(kind, *mentions):
        open_records(find_files(make(tmp_path)))


def test_another_encoding_is_named(tmp_path):
    (tmp_path / "a.csv").write_text("text,label\ncafé,b\n", encoding="latin-1")
    with refused(DataError, "a.csv", "UTF-8", "iconv"):
        open_records(find_files(tmp_path / "a.csv"), as_text=["text"])


def test_a_column_that_is_not_there(records):
    with refused(InputError, "'body'", "id, text, digits, number"):
        records.check_columns(text="body")


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_a_row_without_a_value_is_named(kind, tmp_path):
    values = pa.table({"text": ["a", "b", "c", None, "e", None]})
    if kind == "parquet":
        pq.write_table(values, tmp_path / "a.parquet", row_group_size=2)
    else:
        (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in values.to_pylist()))
    records = open_records(find_files(tmp_path / f"a.{kind}"))
    with refused(DataError, 3, f"a.{kind}", "'text'"):
        records.refuse_nulls("text")


NAMES = {"cat": 0, "dog": 1, "bird": 2}


def labelled(tmp_path, values, **options):
    pq.write_table(pa.table({"label": values}), tmp_path / "a.parquet", row_group_size=2)
    records = open_records(find_files(tmp_path / "a.parquet"))
    return class_labels(records, "label", **({"label2id": NAMES, "num_labels": 3} | options))


LABELS = {
    "names": (["dog", "cat", "bird", "dog"],),
    "digits": (["1", "0", "2", "1"],),
    "numbers": ([1, 0, 2, 1],),
    "small numbers": (pa.array([1, 0, 2, 1], pa.int8()),),
    "a dictionary": (pa.array(["dog", "cat", "bird", "dog"]).dictionary_encode(),),
}


@pytest.mark.parametrize("values", table(LABELS))
def test_classes_by_name_and_number(values, tmp_path):
    assert labelled(tmp_path, values).tolist() == [1, 0, 2, 1]


def test_truth_values_are_classes(tmp_path):
    assert labelled(tmp_path, [True, False]).tolist() == [1, 0]


def test_names_of_digits_are_names(tmp_path):
    stars = {"1": 0, "2": 1, "3": 2}
    assert labelled(tmp_path, ["3", "1"], label2id=stars).tolist() == [2, 0]
    with refused(InputError, 0, "'1'"):
        labelled(tmp_path, [2, 1], label2id=stars)


def test_names_beside_the_numbers_are_followed(tmp_path):
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"label": datasets.ClassLabel(names=["bird", "cat", "dog"])})
    datasets.Dataset.from_dict({"label": [0, 1, 2, 0]}, features=features).save_to_disk(tmp_path / "saved")
    records = open_records(find_files(tmp_path / "saved"))
    assert class_labels(records, "label", NAMES, 3).tolist() == [2, 0, 1, 2]
    assert class_labels(records, "label", {"LABEL_0": 0, "LABEL_1": 1, "LABEL_2": 2}, 3).tolist() == [0, 1, 2, 0]


WRONG_LABELS = {
    "unknown name": (["cat", "dog", "cow"], (2, "'cow'", "cat, dog, bird")),
    "too large": ([0, 1, 2, 7], (3, 7, "'label'")),
    "negative": ([0, -1], (1, "-1")),
    "digits too large": (["0", "7"], (1, "'7'")),
    "fractions": ([0.5, 1.0], ("'label'", "double")),
    "none": (["cat", "dog", None], (2, "'label'")),
}


@pytest.mark.parametrize(("values", "mentions"), table(WRONG_LABELS))
def test_wrong_labels_are_named(values, mentions, tmp_path):
    with refused((DataError, InputError), *mentions):
        labelled(tmp_path, values)


def test_metadata_is_what_is_small(tmp_path):
    table = pa.table(
        {
            "text": ["x"] * 3,
            "source": ["web", "book", None],
            "body": ["long " * 100] * 3,
            "year": [1, 2, 3],
            "vector": [[1.0]] * 3,
            "raw": [b"1"] * 3,
            "name": ["long " * 100] * 3,
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    records = open_records(find_files(tmp_path / "a.parquet"))
    assert metadata_of(records, ["text"], "name", None).column_names == ["source", "year", "name"]
    assert metadata_of(records, ["text"], None, ["body"]).equals(table.select(["body"]))
    assert metadata_of(records, ["text"], None, []) is None
    with refused(InputError, "'yaer'"):
        metadata_of(records, ["text"], None, ["yaer"])


def test_ids_of_another_kind(tmp_path):
    pq.write_table(pa.table({"id": [0.5, 1.5]}), tmp_path / "a.parquet")
    with refused(InputError, "'id'", "double"):
        read_ids(open_records(find_files(tmp_path / "a.parquet")), "id")
