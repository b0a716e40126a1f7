"""Damaged data files are named, and cannot crash the process."""

import json
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from eigentrace.errors import EigentraceError, InputError
from eigentrace.formats.content_hash import content_of
from eigentrace.formats.dataset_columns import class_labels, metadata_of, read_ids
from eigentrace.formats.files import find_files
from eigentrace.formats.records import open_records
from eigentrace.formats.single_column import single_column
from tests.helpers.expecting import refused
from tests.helpers.mutating import mutate, outcomes

ROWS = 40
TABLE = pa.table(
    {
        "id": [f"n{row}" for row in range(ROWS)],
        "text": [f"the text of row {row} é" for row in range(ROWS)],
        "label": [row % 3 for row in range(ROWS)],
    }
)
COLUMNS = ["id", "text", "label"]


def read(path):
    """Read a dataset in all ways that scoring does."""
    files = find_files(path)
    records = open_records(files, as_text=["id", "text"])
    records.check_columns(text="text", id="id", label="label")
    records.refuse_nulls("text")
    class_labels(records, "label", {"a": 0, "b": 1, "c": 2}, 3)
    metadata_of(records, ["text", "label"], "id", None)
    read_ids(records, "id")
    content_of(records, COLUMNS)
    single_column(files, "id")
    return records.read(np.arange(len(records))[::-1], COLUMNS).to_pylist()


def saved(folder):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset(TABLE).save_to_disk(folder / "saved")
    return folder / "saved"


def parquet(folder, **options):
    pq.write_table(TABLE, folder / "a.parquet", row_group_size=7, **options)
    return folder / "a.parquet"


def overwrite(path, before, after):
    content = path.read_bytes()
    assert content.count(before)
    path.write_bytes(content.replace(before, after, 1))


@pytest.mark.parametrize("keep", [0.01, 0.5, 0.99])
def test_a_cut_parquet_file_is_named(keep, tmp_path):
    path = parquet(tmp_path)
    path.write_bytes(path.read_bytes()[: int(keep * path.stat().st_size)])
    with refused(EigentraceError, path):
        read(path)


def test_damaged_pages_of_a_parquet_file_are_named(tmp_path):
    path = parquet(tmp_path, compression="snappy")
    content = bytearray(path.read_bytes())
    content[4:200] = b"\xff" * 196
    path.write_bytes(content)
    with refused(InputError, path):
        read(path)


def test_changed_pages_with_checksums_are_noticed(tmp_path):
    path = parquet(tmp_path, compression="none", use_dictionary=False, write_page_checksum=True)
    overwrite(path, b"the text of row 3 ", b"the text of row 4 ")
    with refused(InputError, path):
        read(path)


@pytest.mark.parametrize("suffix", ["csv", "tsv", "jsonl"])
def test_text_must_be_utf8(suffix, tmp_path):
    path = tmp_path / f"a.{suffix}"
    row = '{"text": "café", "id": "x", "label": 1}\n'
    lines = {"csv": "text,id,label\ncafé,x,1\n", "tsv": "text\tid\tlabel\ncafé\tx\t1\n", "jsonl": row}
    path.write_bytes(lines[suffix].encode("latin-1"))
    with refused(EigentraceError, path, "UTF"):
        read(path)


@pytest.mark.parametrize("column", ["text", "id"])
def test_text_of_parquet_and_arrow_must_be_utf8(column, tmp_path):
    word = TABLE[column][5].as_py().encode()
    for path in (parquet(tmp_path, compression="none", use_dictionary=False), saved(tmp_path)):
        data = path if path.is_file() else next(path.glob("*.arrow"))
        overwrite(data, word, b"\xff" * len(word))
        with refused(InputError, data, column, "UTF8"):
            read(path)


def test_damaged_offsets_of_a_saved_dataset_are_refused_before_they_crash(tmp_path):
    data = next(saved(tmp_path).glob("*.arrow"))
    overwrite(data, np.arange(2, 12, 2, np.int32).tobytes(), np.full(5, 2**30, np.int32).tobytes())
    with refused(InputError, data, "id"):
        read(data.parent)


@pytest.mark.parametrize("change", [lambda b: b[:-8], lambda b: b[:200], lambda b: b + b"\0" * 16, lambda b: b""])
def test_a_saved_dataset_with_another_end_is_refused(change, tmp_path):
    data = next(saved(tmp_path).glob("*.arrow"))
    data.write_bytes(change(data.read_bytes()))
    with refused(InputError, data):
        read(data.parent)


@pytest.mark.parametrize(
    "state",
    [[], 3, {"_data_files": 3}, {"_data_files": [3]}, {"_data_files": [{}]}, {"_data_files": [{"filename": "../a"}]}],
    ids=str,
)
def test_a_state_of_another_form_is_refused(state, tmp_path):
    path = saved(tmp_path)
    (path / "state.json").write_text(json.dumps(state))
    with refused(InputError, path / "state.json"):
        read(path)


@pytest.mark.parametrize("splits", [3, [3], "train", {"train": 1}], ids=str)
def test_splits_of_another_form_are_refused(splits, tmp_path):
    (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": splits}))
    with refused(InputError, tmp_path / "dataset_dict.json"):
        find_files(tmp_path, "train")


@pytest.mark.parametrize("stored", [b"{", b"\xff", b'{"info": {"features": 3}}', b'{"info": 3}'])
def test_damaged_features_are_refused(stored, tmp_path):
    pq.write_table(TABLE.replace_schema_metadata({b"huggingface": stored}), tmp_path / "a.parquet")
    with refused(InputError, tmp_path / "a.parquet"):
        read(tmp_path / "a.parquet")


def csv(folder):
    rows = [f'{row["id"]},"{row["text"]}",{row["label"]}\n' for row in TABLE.to_pylist()]
    (folder / "a.csv").write_text("id,text,label\n" + "".join(rows))
    return folder / "a.csv"


def tsv(folder):
    rows = ["\t".join(map(str, row.values())) + "\n" for row in TABLE.to_pylist()]
    (folder / "a.tsv").write_text("id\ttext\tlabel\n" + "".join(rows))
    return folder / "a.tsv"


def jsonl(folder):
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in TABLE.to_pylist()))
    return folder / "a.jsonl"


@pytest.mark.slow
@pytest.mark.parametrize("make", [csv, tsv, jsonl, parquet, saved], ids=lambda make: make.__name__)
def test_no_damage_gives_a_traceback_or_a_crash(make, tmp_path):
    (tmp_path / "good").mkdir()
    good = make(tmp_path / "good")

    def attempt(rng):
        shutil.rmtree(tmp_path / "bad", ignore_errors=True)
        shutil.copytree(tmp_path / "good", tmp_path / "bad")
        files = sorted(path for path in (tmp_path / "bad").rglob("*") if path.is_file())
        mutate(rng.choice(files), rng)
        read(tmp_path / "bad" / good.name)

    assert outcomes(300, attempt) == {}
