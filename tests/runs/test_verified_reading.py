"""Damage to a run is noticed by whatever reads it, not only by `check`."""

import json

import pytest

import eigentrace as et
from eigentrace.disk.manifest import MANIFEST
from eigentrace.errors import EigentraceError, MismatchError, StorageError
from tests.helpers.expecting import refused
from tests.helpers.runs import data, fit


@pytest.fixture(scope="module")
def fitted():
    return fit()


def scored(fitted, path):
    return et.score(fitted, data(), path, shard_rows=20, columns={"source": ["a", "b"] * 30})


@pytest.fixture
def run(fitted, tmp_path):
    return scored(fitted, tmp_path / "x")


def flip_of(path, name):
    """Flip one bit of a tensor in a shard."""
    content = bytearray(path.read_bytes())
    long = int.from_bytes(content[:8], "little")
    start, _ = json.loads(content[8 : 8 + long])[name]["data_offsets"]
    content[8 + long + start] ^= 1
    path.write_bytes(content)


READERS = {
    "column": ("self_influence", lambda run: run.column("self_influence")),
    "groups": ("self_influence", lambda run: run.groups("source")),
    "explain": ("features", lambda run: run.explain([3], k=4)),
    "clean": ("self_influence", lambda run: et.clean(run, drop="10%")),
}


@pytest.mark.parametrize("name", READERS)
def test_a_flipped_bit_in_a_shard_is_refused_by_whatever_reads_it(name, run):
    tensor, read = READERS[name]
    path = run.folder.record.file(run.reader.shards[1])
    flip_of(path, tensor)
    with refused(StorageError, path):
        read(et.open_run(run.path))


def test_a_damaged_shard_is_not_written_into_a_new_table(run, fitted):
    path = run.folder.record.file(run.reader.shards[1])
    flip_of(path, "self_influence")
    (run.path / "table.parquet").unlink()
    with refused(StorageError, path):
        scored(fitted, run.path)
    assert not (run.path / "table.parquet").exists()


def test_a_listed_file_that_is_gone_is_an_error(run):
    path = run.folder.record.file(run.reader.shards[1])
    path.unlink()
    with refused(StorageError, path):
        et.open_run(run.path).column("loss")
    assert [fault.path for fault in et.check(run.path).faults] == [path]


def test_columns_that_are_gone_are_an_error(run):
    path = next(path for path in run.path.glob("*.parquet") if path.name != "table.parquet")
    path.unlink()
    with refused(EigentraceError, path):
        et.open_run(run.path).column("source")


def test_a_changed_manifest_is_noticed(run):
    path = run.path / MANIFEST
    text = path.read_text()
    assert text.count('"num_train": 60')
    path.write_text(text.replace('"num_train": 60', '"num_train": 61'))
    with refused(MismatchError, path, "checksum"):
        et.open_run(run.path)
    with refused(MismatchError, path, "checksum"):
        et.check(run.path)


def test_runs_without_checksum_of_their_manifest_open(run):
    path, before = run.path / MANIFEST, run.column("loss").tobytes()
    entries = json.loads(path.read_text())
    del entries["sha256"]
    path.write_text(json.dumps(entries))
    assert et.open_run(run.path).column("loss").tobytes() == before
