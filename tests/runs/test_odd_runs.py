"""Runs under odd data, odd places and odd moments: nothing is mixed up, counted twice, or lost without a word."""

import json
import os
import shutil
import stat

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import eigentrace as et
from eigentrace.disk.tensors import write_tensors
from eigentrace.errors import InputError, MismatchError, NumericalError, StorageError, UnsupportedError
from eigentrace.store.user_columns import ColumnsFile, Names
from tests.helpers.expecting import expect_mentions, refused
from tests.helpers.runs import Points, data, fit, model, task


@pytest.fixture(scope="module")
def fitted():
    return fit()


@pytest.fixture(scope="module")
def whole(fitted, tmp_path_factory):
    """A finished run, to be copied and never changed."""
    names = [f"n{row}" for row in range(60)]
    return et.score(fitted, data(ids=names), tmp_path_factory.mktemp("runs") / "x", shard_rows=20)


@pytest.fixture
def copy(whole, tmp_path):
    return shutil.copytree(whole.path, tmp_path / "a copy ü")


def unrecorded(path, kept):
    """Take all but the first shards off the record."""
    record = json.loads((path / "shards.json").read_text())
    record["shards"] = record["shards"][:kept]
    (path / "shards.json").write_text(json.dumps(record))


OTHERS = {
    "a fit on other examples": lambda: et.Arnoldi(steps=20, keep=6).fit(task(), data(40), num_train=60),
    "a fit with another number of examples": lambda: et.Arnoldi(steps=20, keep=6).fit(task(), data(), num_train=99),
}


@pytest.mark.parametrize("name", OTHERS)
def test_two_fits_of_the_same_settings_do_not_meet_in_one_run(name, copy):
    unrecorded(copy, 1)
    with refused(MismatchError, copy / "fit"):
        et.score(OTHERS[name](), data(), copy)
    assert et.open_run(copy).num_missing == 36
    assert et.score(et.load(copy / "fit", task()), data(), copy).is_complete


def test_other_checkpoints_and_members_do_not_either(fitted, tmp_path):
    first, second = (et.TracIn(checkpoints=[task(s).model.state_dict()]).fit(task(), data()) for s in (1, 2))
    et.score(first, data(), tmp_path / "tracin")
    with refused(MismatchError, tmp_path / "tracin" / "fit"):
        et.score(second, data(), tmp_path / "tracin")
    members = [fitted, et.Arnoldi(steps=20, keep=6).fit(task(), data(40), num_train=60)]
    et.score(et.Ensemble(members), data(), tmp_path / "ensemble")
    with refused(MismatchError, tmp_path / "ensemble" / "fit" / "member-0"):
        et.score(et.Ensemble(members[::-1]), data(), tmp_path / "ensemble")
    assert et.score(et.Ensemble(members), data(), tmp_path / "ensemble").is_complete


def test_an_interruption_in_any_step_of_writing_counts_no_row_twice(fitted, tmp_path, monkeypatch):
    expected = fitted.self_influence(data()).numpy()
    for moment in range(1, 14):
        fitted.save(tmp_path / str(moment) / "fit")
        left = [moment]

        def fsync(handle, left=left, real=os.fsync):
            real(handle)
            left[0] -= 1
            if not left[0]:
                raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", fsync)
            with pytest.raises(KeyboardInterrupt):
                et.score(fitted, data(), tmp_path / str(moment), shard_rows=20)
        run = et.score(fitted, data(), tmp_path / str(moment), shard_rows=20)
        assert np.allclose(run.column("self_influence"), expected, rtol=1e-5, atol=1e-7)
        assert et.check(run.path).is_good


def test_a_copied_shard_is_not_taken_for_a_lost_one(copy):
    shard = sorted((copy / "shards").iterdir())[1]
    shutil.copy(shard, shard.with_name("000000000024 (conflict).safetensors"))
    expect_mentions(str(et.check(copy)), ["000000000024 (conflict).safetensors"])
    et.check(copy, repair=True)
    assert len(et.open_run(copy).column("loss")) == 60
    assert et.check(copy).is_good


def test_a_lost_record_is_not_taken_for_an_empty_run(copy, fitted):
    (copy / "shards.json").unlink()
    before = {path: path.stat().st_mtime_ns for path in (copy / "shards").iterdir()}
    for opening in (lambda: et.open_run(copy), lambda: et.score(fitted, data(), copy)):
        with refused(MismatchError, copy / "shards.json", "eigentrace check RUN --repair"):
            opening()
    et.check(copy, repair=True)
    assert et.score(fitted, data(), copy).is_complete
    assert {path: path.stat().st_mtime_ns for path in (copy / "shards").iterdir()} == before


@pytest.mark.parametrize(
    "name", ["weights.safetensors", "fit/eigenpairs.safetensors", "columns.parquet", "table.parquet"]
)
def test_a_flipped_byte_is_seen_in_every_file(name, copy):
    content = bytearray((copy / name).read_bytes())
    content[len(content) // 3] ^= 4
    (copy / name).write_bytes(content)
    assert [fault.path for fault in et.check(copy).faults] == [copy / name]


def test_a_missing_table_is_told_and_written_again(copy, fitted, whole):
    (copy / "table.parquet").unlink()
    expect_mentions(str(et.check(copy)), ["table.parquet"])
    with refused(StorageError, copy / "table.parquet"):
        et.open_run(copy).table()
    assert et.score(fitted, data(), copy).table().equals(whole.table())


def test_a_row_that_is_no_number_costs_nothing_that_was_scored(fitted, tmp_path):
    class Broken(Points):
        bad = True

        def __getitem__(self, row):
            x, y = super().__getitem__(row)
            return (x * torch.nan if row == 130 and self.bad else x), y

    points = Broken(200)
    given = et.Data(points, batch_size=8)
    with refused(NumericalError, "row 130"):
        et.score(fitted, given, tmp_path / "x")
    assert et.open_run(tmp_path / "x").num_missing == 200 - 128
    points.bad = False
    found = et.score(fitted, given, tmp_path / "x").column("self_influence")
    assert np.allclose(found, fitted.self_influence(given), rtol=1e-5, atol=1e-7)


class Scaled(nn.Module):
    """A model in double precision whose gradients are as large as asked for."""

    def __init__(self, size):
        super().__init__()
        self.inner, self.size = model().double(), size

    def forward(self, x):
        return self.inner(x.double()) * self.size


def test_features_that_cannot_be_held_are_told(tmp_path):
    fitted = et.RandProj(keep=3).fit(et.classification(Scaled(1e45)), data())
    for features in ("fp32", "fp16"):
        with refused(NumericalError, "features", "row 1", "float32"):
            et.score(fitted, data(), tmp_path / features, features=features)


@pytest.mark.parametrize("size", [1e-9, 1e-4, 1.0, 1e6])
def test_half_precision_loses_nothing_small_or_large(size, tmp_path):
    def loss(net, batch):  # every third example is far smaller than the others, and one in ten has no gradient
        rows = batch[0][:, 0]
        weights = torch.where(rows > 1, 1e-6, 1.0) * (rows > -1.2)
        return torch.nn.functional.cross_entropy(net(batch[0]), batch[1], reduction="none") * weights * size

    fitted = et.RandProj(keep=7).fit(et.Task(model().double(), loss=loss), doubles())
    expected = fitted.features(doubles())
    run = et.score(fitted, doubles(), tmp_path / "x", features="fp16", shard_rows=20)
    found = run.features_of(np.arange(60))
    assert torch.equal(found, torch.cat([chunk for _, chunk in run.feature_chunks(rows_at_once=7)]))
    assert torch.equal(found == 0, expected == 0)
    assert ((found - expected).abs() <= 2**-11 * expected.abs() + 2**-38 * expected.abs().amax(dim=1)[:, None]).all()
    single = et.score(fitted, doubles(), tmp_path / "y")
    few, many = (et.open_run(opened.path).explain(np.arange(60), k=5, normalize="gradient") for opened in (run, single))
    assert np.allclose(few.proponents.scores, many.proponents.scores, rtol=2e-3, atol=2e-3)


class Doubles(Points):
    """The same in double precision."""

    def __getitem__(self, row):
        x, y = super().__getitem__(row)
        return x.double(), y


def doubles():
    return et.Data(Doubles(), batch_size=8)


class Odd(Points):
    """One example holds what has no digest."""

    def __getitem__(self, row):
        return (*super().__getitem__(row), object() if row == 30 else row)


def pairs(examples):
    return torch.stack([x for x, _, _ in examples]), torch.tensor([y for _, y, _ in examples])


@pytest.mark.parametrize("shard_rows", [8, 250])
def test_one_example_without_a_digest(shard_rows, fitted, tmp_path):
    given = et.Data(Odd(), collate=pairs, batch_size=8)
    run = et.score(fitted, given, tmp_path / "x", shard_rows=shard_rows)
    assert run.reader.digests() is None
    assert np.array_equal(run.column("label"), [Points()[row][1] for row in range(60)])
    with refused(UnsupportedError, "exclude='duplicates'", "exclude='self'"):
        run.explain(3, exclude="duplicates")


COLUMNS = {
    "gaps": np.where(np.arange(60) % 7 == 0, np.nan, 1.5),
    "gaps and nothing": [None, float("nan")] * 30,
    "seconds": np.arange(60).astype("datetime64[s]"),
    "categories": pa.array(["a", "b"] * 30).dictionary_encode(),
    "chunks": pa.chunked_array([["a"] * 20, ["b"] * 40]),
    "lists": [[1, 2]] * 60,
    "dotted.name": np.arange(60),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_a_run_goes_on_with_the_columns_it_was_begun_with(name, fitted, tmp_path):
    run = et.score(fitted, data(), tmp_path / "x", columns={name: COLUMNS[name]})
    again = et.score(fitted, data(), tmp_path / "x", columns={name: COLUMNS[name]})
    assert len(again.column(name)) == again.table().num_rows == 60
    changed = [None] * 59 + [run.column(name)[0]]
    with refused(MismatchError, run.path, [name]):
        et.score(fitted, data(), tmp_path / "x", columns={name: changed})


BAD = {
    "two of a name": ({"columns": pa.table([[1] * 60, [2] * 60], names=["a", "a"])}, ("'a'",)),
    "no mapping": ({"columns": np.arange(60)}, ("columns", "ndarray")),
    "no JSON": ({"how": {"where": object()}}, ("how", "object")),
    "an engine without norms": ({"compute": et.Compute(engine="forward")}, ("engine='forward'",)),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_scored_is_told_before_a_run_begins(name, fitted, tmp_path):
    options, mentions = BAD[name]
    with refused(InputError, *mentions):
        et.score(fitted, data(), tmp_path / "x", **options)
    assert et.score(fitted, data(), tmp_path / "x").is_complete


def test_a_directory_of_other_things_is_not_even_locked(fitted, tmp_path):
    for name in ("thesis.txt", ".download.partial"):
        (tmp_path / name).write_text("years of work")
    with refused(InputError, tmp_path, "thesis.txt", ".download.partial"):
        et.score(fitted, data(), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".download.partial", "thesis.txt"]


def test_what_a_killed_beginning_left_is_cleared_away(fitted, tmp_path):
    (tmp_path / ".fit.0123abcd.partial").mkdir(parents=True)
    (tmp_path / ".manifest.json.0123abcd.partial").write_text("{")
    run = et.score(fitted, data(), tmp_path)
    assert not [path for path in run.path.rglob(".*")]


def test_a_run_moves_and_is_linked_to(copy, fitted, tmp_path, monkeypatch):
    moved = shutil.move(copy, tmp_path / "moved")
    (tmp_path / "link").symlink_to(moved)
    for path in (moved, tmp_path / "link"):
        assert et.check(path).is_good
        assert et.score(fitted, data(), path).is_complete
    monkeypatch.chdir(tmp_path)
    runs = et.open_run("moved"), et.score(fitted, data(), "new")
    monkeypatch.chdir("/")
    assert all(len(run.column("loss")) == 60 for run in runs)


def test_readers_write_nothing_and_may_be_others(copy, whole):
    files = [path for path in copy.rglob("*") if path.is_file()]
    allowed = 0o666 & ~os.umask(os.umask(0o022))
    assert {stat.S_IMODE(path.stat().st_mode) for path in whole.folder.record.folder.iterdir()} == {allowed}
    before = {path: path.stat().st_mtime_ns for path in (copy, *copy.rglob("*"))}
    for path in (*files, copy / "shards", copy):
        path.chmod(stat.S_IMODE(path.stat().st_mode) & ~0o222)
    run = et.open_run(copy)
    assert run.explain(3, k=2).proponents.ids[0, 0] == f"n{run.explain(3, k=2).proponents.rows[0, 0]}"
    assert (run.table().num_rows, et.check(copy).is_good) == (60, True)
    assert {path: path.stat().st_mtime_ns for path in (copy, *copy.rglob("*"))} == before
    for path in (copy, copy / "shards"):
        path.chmod(0o755)


def test_a_run_can_be_read_while_it_is_written(fitted, tmp_path):
    seen = []

    class Looking(Points):
        def __getitem__(self, row):
            if (tmp_path / "x" / "manifest.json").exists():
                seen.append(et.open_run(tmp_path / "x").num_missing)
                assert et.check(tmp_path / "x").faults == ()
            return super().__getitem__(row)

    et.score(fitted, et.Data(Looking(), batch_size=20), tmp_path / "x", shard_rows=20, compute=et.Compute(batch=20))
    assert sorted(set(seen), reverse=True) == [60, 40, 20]


def test_names_are_read_by_row(tmp_path):
    values = [f"n{row}" for row in range(1000)]
    pq.write_table(pa.table({"id": values, "number": np.arange(1000)}), tmp_path / "x.parquet", row_group_size=64)
    rows = np.array([[999, 0, 64], [63, 63, 512]])
    names, numbers = (Names(ColumnsFile(tmp_path / "x.parquet"), column) for column in ("id", "number"))
    assert names.of(rows).tolist() == [[values[row] for row in line] for line in rows]
    assert np.array_equal(numbers.of(rows), rows)
    assert numbers.of(np.array([3, -1])).tolist() == [3, None]
    assert names.of(np.array([-1])).tolist() == [None]
    assert len(names.of(np.array([], dtype=int))) == 0


TENSORS = {
    "b": torch.tensor([True, False, True]),
    "h": torch.arange(6, dtype=torch.bfloat16).view(2, 3),
    "d": torch.tensor(1.5, dtype=torch.float64),
    "t": torch.arange(6.0).view(2, 3).T,
    "none": torch.empty(0, 4),
    "i": torch.arange(3),
}


def test_tensors_are_written_as_the_library_reads_them(tmp_path):
    write_tensors(TENSORS, tmp_path / "x.safetensors", {"ü": "é"})
    found = load_file(tmp_path / "x.safetensors")
    assert found.keys() == TENSORS.keys()
    assert all(found[name].dtype == t.dtype and torch.equal(found[name], t) for name, t in TENSORS.items())
