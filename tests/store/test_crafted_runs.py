"""Runs that somebody made to harm their reader are refused soon, with a message, and in little memory.

Every reading happens in a process with limits: 1 GiB of memory above what the imports take, and 40 seconds.
"""

import base64
import json
import os
import shutil
import subprocess
import sys
import zlib

import numpy as np
import pytest

import eigentrace as et
from eigentrace.disk import tensors
from eigentrace.disk.blocks import BLOCK, block_sums
from eigentrace.disk.bounded import check_regular
from eigentrace.disk.manifest import MANIFEST
from eigentrace.errors import MismatchError
from eigentrace.numeric.hashing import hash_file
from eigentrace.store.check import check
from eigentrace.store.shards import MOST_ROWS
from tests.helpers.expecting import expect_mentions, refused
from tests.helpers.manifests import edit_manifest
from tests.helpers.runs import data, fit

# The first row of the last shard, and its file.
LAST, LAST_FILE = 48, "shards/000000000048.safetensors"
# Reads everything of each run that it is told, in a fork with limits. What is refused is printed; any other error ends
# the fork with a stack trace.
READER = """
import os, resource, signal, sys, traceback
from pathlib import Path
import eigentrace as et
from eigentrace.cli import request
from eigentrace.errors import InputError, MismatchError, StorageError
from eigentrace.page.replies import Answers
from eigentrace.page.subject import Subject
from eigentrace.store.check import check

def opened(path):
    run = et.open_run(path)
    run.self_influence().top(3)
    run.explain([1], 3)
    run.reader.table()
    run.reader.weights
    run.reader.eigenvalues
    run.folder.check_fit()

def read(path, does_check):
    signal.alarm(40)
    used = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmSize")) << 10
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), used + (1 << 30)))
    acts = [opened, lambda path: Answers(Subject(path)), request.read]
    for act in acts + [lambda path: print(check(path))] * does_check:
        try:
            act(path)
        except (InputError, MismatchError, StorageError) as error:
            print("refused:", error)

for line in sys.stdin:
    does_check, path = line.rstrip("\\n").split(" ", 1)
    child = os.fork()
    if not child:
        code = 1
        try:
            read(Path(path), int(does_check))
            code = 0
        except BaseException:
            traceback.print_exc(file=sys.stdout)
        sys.stdout.flush()
        os._exit(code)
    print("ended", os.waitpid(child, 0)[1], flush=True)
"""


@pytest.fixture(scope="module")
def read():
    """Read all of a run under limits, and return what is printed; it has to mention what is passed."""
    with subprocess.Popen(
        [sys.executable, "-c", READER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as on:

        def said(run, *mentions, does_check=True):
            on.stdin.write(f"{int(does_check)} {run}\n")
            on.stdin.flush()
            lines = []
            while not lines or not lines[-1].startswith("ended "):
                line = on.stdout.readline()
                assert line, "the reader ended"
                lines.append(line)
            text = "".join(lines[:-1])
            assert lines[-1] == "ended 0\n", f"{lines[-1]}{text}"
            expect_mentions(text, mentions)
            return text

        yield said
        on.stdin.close()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A finished run, to be copied and never changed."""
    folder = tmp_path_factory.mktemp("runs") / "x"
    how = {"input": {"function": "os:getcwd", "args": {}, "resolved": {}}, "fit": {}, "score": {}}
    run = et.score(fit(), data(ids=[f"n{row}" for row in range(60)]), folder, shard_rows=20, how=how)
    (run.path / "request.json").write_text(json.dumps(how))
    return run.path


@pytest.fixture
def run(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "run")


def edit_record(run, change):
    record = json.loads((run / "shards.json").read_text())
    change(record["shards"])
    (run / "shards.json").write_text(json.dumps(record))


def test_a_good_run_is_read(read, run):
    assert "refused" not in read(run)


@pytest.mark.parametrize("name", ["/dev/zero", "..", "../../etc/passwd", "fit/../../x", "", "a\0b"])
@pytest.mark.parametrize("key", ["files", "blocks"])
def test_files_outside_of_the_run_are_refused(read, run, key, name):
    edit_manifest(run, lambda manifest: manifest.setdefault(key, {}).update({name: "0" * 64}))
    assert read(run, "refused", run / MANIFEST, "files").count("refused") == 3


def test_a_pipe_in_the_place_of_any_file_is_not_waited_for(read, run):
    names = sorted(path.relative_to(run) for path in run.rglob("*") if path.is_file() and path.name != "lock")
    assert len(names) >= 9
    for name in names:
        (run / name).rename(run / "kept")
        os.mkfifo(run / name)
        read(run, run / name)
        (run / name).unlink()
        (run / "kept").rename(run / name)


@pytest.mark.parametrize("name", [MANIFEST, "shards.json", "weights.safetensors", "table.parquet", "request.json"])
def test_a_device_in_the_place_of_a_file_is_not_read(read, run, name):
    (run / name).unlink()
    (run / name).symlink_to("/dev/zero")
    read(run, run / name)


@pytest.mark.parametrize("name", [MANIFEST, "shards.json", "request.json"])
@pytest.mark.parametrize("depth", [100, 1_000_000])
def test_nested_json_is_refused(read, run, name, depth):
    (run / name).write_text("[" * depth + "]" * depth)
    read(run, "refused", run / name)


@pytest.mark.parametrize("number", [10**30, 10**400, -1, 1e30, True, "20", None])
@pytest.mark.parametrize("key", ["start", "stop", "bytes"])
def test_numbers_of_shards_that_cannot_be(read, run, key, number):
    edit_record(run, lambda shards: shards[-1].update({key: number}))
    read(run, "refused", run / "shards.json")


@pytest.mark.parametrize("number", [10**30, -1, True, "60", None, MOST_ROWS + 1])
def test_numbers_of_rows_that_cannot_be(read, run, number):
    edit_manifest(run, lambda manifest: manifest["data"].update(rows=number))
    read(run, "refused", run / MANIFEST, "data.rows")


@pytest.mark.parametrize("rows", [1 << 35, MOST_ROWS])
def test_a_claim_of_many_rows_is_compared_with_the_files_before_memory_is_reserved(read, run, rows):
    edit_manifest(run, lambda manifest: manifest["data"].update(rows=rows))
    edit_record(run, lambda shards: shards[-1].update(stop=rows))
    text = read(run, "refused", run / LAST_FILE, f"{rows - LAST:,}")
    assert "intact" not in text


def claim_without_columns(manifest, rows):
    manifest["data"]["rows"] = rows
    manifest["columns"] = []
    del manifest["files"]["columns.parquet"]


@pytest.mark.parametrize("is_listed", [True, False])
def test_a_claim_of_many_rows_without_columns(read, run, is_listed):
    """No column is read, so that only the decisions would have a place for every row."""
    rows = 1 << 35
    edit_manifest(run, lambda manifest: claim_without_columns(manifest, rows))
    edit_record(run, lambda shards: shards[-1].update(stop=rows) if is_listed else shards.clear())
    assert read(run).count("refused") >= 2


def test_features_of_no_width_do_not_stand_for_rows(read, run):
    rows = 1 << 35
    place = {"dtype": "F32", "shape": [rows, 0], "data_offsets": [0, 0]}
    about = {"start": "0", "stop": str(rows)}
    header = json.dumps({"__metadata__": about, "features": place}).encode()
    file = run / "shards" / "000000000000.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    entry = {"start": 0, "stop": rows, "bytes": file.stat().st_size, "sha256": hash_file(file)}
    edit_manifest(run, lambda manifest: claim_without_columns(manifest, rows))
    edit_record(run, lambda shards: shards.__setitem__(slice(None), [entry]))
    read(run, "refused", file)


@pytest.mark.parametrize("has_checksums", [True, False])
@pytest.mark.parametrize("is_recorded", [True, False])
def test_a_sparse_shard_of_a_terabyte_is_refused(read, run, has_checksums, is_recorded):
    file, size = run / LAST_FILE, 1 << 40
    if not has_checksums:
        place = {"dtype": "F32", "shape": [60 - LAST], "data_offsets": [0, 4 * (60 - LAST)]}
        about = {"start": str(LAST), "stop": "60"}
        header = json.dumps({"__metadata__": about, "self_influence": place}).encode()
        file.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(file, size)
    if is_recorded:
        edit_record(run, lambda shards: shards[-1].update(bytes=size))
    read(run, "refused", file)


@pytest.mark.parametrize("name", ["weights.safetensors", "columns.parquet", "table.parquet", "request.json", MANIFEST])
def test_a_sparse_file_of_a_terabyte_is_not_read_into_memory(read, run, name):
    (run / name).unlink()
    (run / name).touch()
    os.truncate(run / name, 1 << 40)
    read(run, "refused", run / name)


def test_a_sparse_record_is_set_aside_and_not_copied(run):
    os.truncate(run / "shards.json", 1 << 40)
    assert not check(run, repair=True).num_missing
    assert (run / "damaged" / "shards.json.0").stat().st_blocks < 1000
    assert check(run).is_good


def sparse_shard(run, rows, names):
    """Replace all shards by one whose header, checksums and record agree, and which is a hole otherwise."""
    places, end = {"__metadata__": {"start": "0", "stop": str(rows)}}, 0
    for name in names:
        kind = "I64" if name == "digest" else "F32"
        start, end = end, end + rows * (8 if kind == "I64" else 4)
        places[name] = {"dtype": kind, "shape": [rows], "data_offsets": [start, end]}
    head = tensors._with_checksums(places, end)
    head = len(head).to_bytes(8, "little") + head
    shutil.rmtree(run / "shards")
    (run / "shards").mkdir()
    file = run / "shards" / "000000000000.safetensors"
    with file.open("wb") as out:
        out.write(head)
        # The checksum of a block of zeros is zero.
        out.seek(len(head) + end)
        out.write(block_sums(np.frombuffer(head, np.uint8)).tobytes())
        out.truncate(len(head) + end + 8 * -(-(len(head) + end) // BLOCK))
    entry = {"start": 0, "stop": rows, "bytes": file.stat().st_size, "sha256": "0" * 64}
    edit_record(run, lambda shards: shards.__setitem__(slice(None), [entry]))
    return file


def test_a_consistent_shard_of_holes_is_refused(read, run):
    """Nothing about it is wrong but that it takes 48 GB of memory and hardly a byte of the disk."""
    rows = 1 << 32

    def claim(manifest):
        claim_without_columns(manifest, rows)
        manifest["columns"] = ["loss", "self_influence"]

    edit_manifest(run, claim)
    file = sparse_shard(run, rows, ["loss", "self_influence", "digest"])
    assert read(run, "refused", file).count("refused") >= 2


def test_a_small_file_of_holes_and_a_large_one_that_is_held_are_read(tmp_path):
    (tmp_path / "small").touch()
    os.truncate(tmp_path / "small", 1 << 20)
    (tmp_path / "held").write_bytes(bytes(1 << 27))
    for name in ("small", "held"):
        check_regular(tmp_path / name)
    os.truncate(tmp_path / "held", 1 << 40)
    with refused(MismatchError, tmp_path / "held", f"{1 << 40:,}", f"{1 << 27:,}"):
        check_regular(tmp_path / "held")


def test_a_mask_of_decisions_that_unpacks_to_much_is_refused(read, run):
    packing = zlib.compressobj(1)
    bomb = b"".join(packing.compress(bytes(1 << 24)) for _ in range(128)) + packing.flush()  # 2 GiB in 9 MB
    header = {"kind": "decisions", "format": 1, "rows": 60, "data": et.open_run(run).manifest["data"]["fingerprint"]}
    small = zlib.compress(bytes(1 << 24), 9)
    for mask in (bomb, small):
        rows = base64.b64encode(mask).decode()
        line = {"time": "", "decision": "drop", "rows": rows, "count": 1}
        (run / "decisions.jsonl").write_text(f"{json.dumps(header)}\n{json.dumps(line)}\n")
        read(run, "refused", run / "decisions.jsonl", "Line 2")


HOW = {
    "input of a list": {"input": [1]},
    "args of text": {"input": {"function": "a:b", "args": "x"}},
    "resolved of a list": {"input": {"function": "a:b", "resolved": ["x"]}},
    "function of a number": {"input": {"function": 3}},
    "classes of text": {"input": {}, "classes": "ab"},
    "classes of a number": {"input": {}, "classes": 0},
    "classes of numbers": {"input": {}, "classes": [1]},
}


@pytest.mark.parametrize("name", HOW)
def test_wrong_types_in_the_request_of_the_manifest(read, run, name):
    edit_manifest(run, lambda manifest: manifest.update(how=HOW[name]))
    read(run, "refused", run / MANIFEST, "request")
