"""Real trouble: killed processes, full disks, damaged files, two writers. Nothing is lost, and all is told."""

import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from safetensors.torch import load_file

import eigentrace as et
from eigentrace.errors import BusyError, StorageError
from tests.helpers.expecting import expect_mentions, refused
from tests.helpers.killing import BATCH, MOMENTS, ROWS, SHARD, STEPS
from tests.helpers.places import ROOT
from tests.helpers.runs import Points, data, fit, model


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    """What became of a run that was killed twenty times, beside one that was left in peace."""
    base = tmp_path_factory.mktemp("killed")
    command = [sys.executable, "-m", "tests.helpers.killing", str(base)]
    single = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=single, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return base, json.loads(done.stdout)


def test_every_kill_happened_where_it_was_meant_to(story):
    _, told = story
    assert told["killed"] == {phase: [signal.SIGKILL] * len(moments) for phase, moments in MOMENTS.items()}
    assert sum(len(moments) for moments in MOMENTS.values()) == 20
    assert told["last"] == 0


def test_the_numbers_are_those_of_the_run_left_in_peace(story):
    base, _ = story
    whole, killed = (et.open_run(base / name) for name in ("whole", "killed"))
    assert (whole.num_rows, killed.num_rows, killed.is_complete) == (ROWS, ROWS, True)
    for name in ("loss", "gradient_norm", "self_influence", "label", "prediction", "confidence"):
        assert whole.column(name).tobytes() == killed.column(name).tobytes()
    features = [b"".join(chunk.numpy().tobytes() for _, chunk in run.feature_chunks()) for run in (whole, killed)]
    assert features[0] == features[1]
    pairs = [load_file(run.path / "fit" / "eigenpairs.safetensors") for run in (whole, killed)]
    assert all(pairs[0][name].numpy().tobytes() == pairs[1][name].numpy().tobytes() for name in pairs[0])
    assert whole.table().equals(killed.table())


def test_no_more_is_done_again_than_one_product_or_shard_per_kill(story):
    _, told = story
    counts, kills = told["counts"], {phase: len(moments) for phase, moments in MOMENTS.items()}
    product = (counts["whole"]["fit"] - counts["short"]["fit"]) / (STEPS - 4)
    start = counts["short"]["fit"] - 4 * product
    # Passes look at some examples again for a share of their time, so that counts differ a little from run to run.
    assert 0.95 * ROWS <= product <= 4 * ROWS
    # A start that finds the fit finished still looks at the task.
    starts = kills["fit"] + kills["score"] + 1
    assert counts["killed"]["fit"] <= 1.05 * (counts["whole"]["fit"] + kills["fit"] * product + starts * start)
    # The small run is one start and one shard.
    most = counts["whole"]["score"] + kills["score"] * counts["small"]["score"]
    assert counts["killed"]["score"] <= 1.05 * most
    assert counts["whole"]["score"] < 1.05 * (4 * ROWS + counts["small"]["score"])


def test_nothing_is_left_lying_about(story):
    base, _ = story
    shards = sorted(path.name for path in (base / "killed" / "shards").iterdir())
    assert shards == [f"{start:012d}.safetensors" for start in range(0, ROWS, SHARD)]
    assert not [path for path in (base / "killed").rglob(".*")]
    assert et.check(base / "killed").is_good
    assert SHARD % BATCH == 0


def scored(folder, **options):
    return et.score(fit(), data(), folder, shard_rows=16, **options)


@pytest.fixture
def run(tmp_path):
    return scored(tmp_path / "x")


def flip(path, at=-100):
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


DAMAGE = {
    "a flipped byte": (flip, lambda size: ["checksum"]),
    "a cut": (lambda path: path.write_bytes(path.read_bytes()[:-50]), lambda size: [f"{size - 50:,}", f"{size:,}"]),
    "nothing left": (lambda path: path.unlink(), lambda size: []),
    "noise": (lambda path: path.write_bytes(os.urandom(path.stat().st_size)), lambda size: ["checksum"]),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_shards_are_named_and_only_they_are_scored_again(name, run):
    damage, mentions_of = DAMAGE[name]
    shards = [run.folder.record.file(shard) for shard in run.reader.shards]
    before = {path: {name: tensor.clone() for name, tensor in load_file(path).items()} for path in shards}
    times, size = {path: path.stat().st_mtime_ns for path in shards}, shards[1].stat().st_size
    damage(shards[1])
    found = et.check(run.path)
    assert [fault.path for fault in found.faults] == [shards[1]]
    expect_mentions(str(found), [shards[1], 16, 31, *mentions_of(size)])
    assert found.num_missing == 16
    mended = et.check(run.path, repair=True)
    assert mended.num_missing == 16
    assert name == "nothing left" or len(list((run.path / "damaged").iterdir())) == 1
    scored(run.path)
    for path, tensors in before.items():
        again = load_file(path)
        assert all(again[name].numpy().tobytes() == tensor.numpy().tobytes() for name, tensor in tensors.items())
    assert [path for path in shards if path.stat().st_mtime_ns != times[path]] == [shards[1]]
    assert et.check(run.path).is_good


def test_a_lost_record_is_made_again_from_the_shards(run):
    before = (run.path / "shards.json").read_bytes()
    for damage in (lambda path: path.write_text("{"), lambda path: path.unlink()):
        damage(run.path / "shards.json")
        assert not et.check(run.path).is_good
        et.check(run.path, repair=True)
        assert (run.path / "shards.json").read_bytes() == before
        assert et.check(run.path).is_good


def test_a_shard_that_lies_about_itself_is_not_taken_back(run):
    flip(run.folder.record.file(run.reader.shards[2]))
    (run.path / "shards.json").unlink()
    found = et.check(run.path, repair=True)
    assert found.num_missing == 16
    scored(run.path)
    assert et.check(run.path).is_good


def test_reading_a_damaged_shard_says_what_to_do(run):
    path = run.folder.record.file(run.reader.shards[0])
    path.write_bytes(path.read_bytes()[:40])
    with refused(StorageError, path, "eigentrace check RUN"):
        et.open_run(run.path).column("loss")


def test_a_damaged_table_and_fit_are_told(run):
    (run.path / "table.parquet").write_bytes(b"PAR1 and nothing else")
    (run.path / "fit" / "eigenpairs.safetensors").write_bytes(b"gone")
    found = et.check(run.path)
    assert sorted(fault.path.name for fault in found.faults) == ["eigenpairs.safetensors", "table.parquet"]
    et.check(run.path, repair=True)
    assert not (run.path / "table.parquet").exists()
    assert (run.path / "fit" / "eigenpairs.safetensors").exists()


FULL = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
import eigentrace as et
from tests.helpers.runs import data, fit
try:
    et.score(fit(size=200), data(200), sys.argv[1], shard_rows=104)
except et.errors.StorageError as error:
    print("told:", error)
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return et.score(fit(size=200), data(200), tmp_path_factory.mktemp("whole") / "x", shard_rows=104)


@pytest.mark.parametrize("part", ["fit/eigenpairs.safetensors", "shards/000000000000.safetensors", "table.parquet"])
def test_a_full_disk_loses_nothing(part, whole, tmp_path):
    """The system lets no file grow to the size that one of the run's has."""
    sizes = {path.relative_to(whole.path).as_posix(): path.stat().st_size for path in whole.path.rglob("*.*")}
    command = [sys.executable, "-c", FULL, str(tmp_path / "x"), str(sizes[part] - 1)]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    expect_mentions(told, ["told", tmp_path / "x"])
    assert not [path for path in (tmp_path / "x").rglob(".*")]
    again = et.score(fit(size=200), data(200), tmp_path / "x", shard_rows=104)
    assert again.column("self_influence").tobytes() == whole.column("self_influence").tobytes()
    assert et.check(tmp_path / "x").is_good


def has_tmpfs(folder):
    command = ["mount", "-t", "tmpfs", "-o", "size=192k", "tmpfs", str(folder)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


NO_ROOM = """
import resource, signal, sys
from pathlib import Path
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
import numpy as np
from eigentrace.errors import StorageError
from eigentrace.page.journal import Journal
try:
    Journal(Path(sys.argv[1]), 3, "x").decide(np.array([1]), "drop")
except StorageError as error:
    print("told:", error)
"""


def test_a_full_disk_has_no_room_for_the_name_of_who_writes(tmp_path):
    command = [sys.executable, "-c", NO_ROOM, str(tmp_path)]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert told.stdout.startswith("told:"), told.stderr[-2000:]
    expect_mentions(told.stdout, [tmp_path])
    assert (tmp_path / "deciding" / "lock").exists()


def test_a_disk_that_really_is_full(tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    if os.geteuid() or not has_tmpfs(small):
        pytest.skip("mounting a small file system needs root")
    try:
        filler = small / "filler"
        filler.write_bytes(b"x" * 150_000)
        with refused(StorageError, small / "x"):
            scored(small / "x")
        assert not (small / "x" / "table.parquet").exists()
        filler.unlink()
        run = scored(small / "x")
        assert run.is_complete
        assert et.check(run.path).is_good
    finally:
        subprocess.run(["umount", str(small)], check=False)


WRITER = """
import sys, time
from pathlib import Path
from eigentrace.disk.lock import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_process_is_refused_and_a_dead_one_holds_nothing(run):
    other = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(run.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    try:
        assert other.stdout.readline() == "held\n"
        with refused(BusyError, run.path, other.pid):
            scored(run.path)
        assert et.open_run(run.path).is_complete
    finally:
        other.kill()
        other.communicate()
    assert np.array_equal(scored(run.path).column("loss"), run.column("loss"))


class Impatient(Points):
    """Ends, as with Ctrl-C, after so many reads."""

    left = None

    def __getitem__(self, row):
        if self.left is not None:
            self.left -= 1
            if not self.left:
                raise KeyboardInterrupt
        return super().__getitem__(row)


def test_an_interrupted_run_keeps_what_is_whole(tmp_path):
    points = Impatient(200)
    given = et.Data(points, batch_size=8)
    fitted = et.Arnoldi(steps=20, keep=6).fit(et.classification(model()), given)
    points.left = 130  # the fingerprint takes 64
    with pytest.raises(KeyboardInterrupt):
        et.score(fitted, given, tmp_path / "x")
    points.left = None
    assert 0 < et.open_run(tmp_path / "x").num_missing < 200
    whole = et.score(fitted, given, tmp_path / "y")
    again = et.score(fitted, given, tmp_path / "x")
    assert again.column("self_influence").tobytes() == whole.column("self_influence").tobytes()
