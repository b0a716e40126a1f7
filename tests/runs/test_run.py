"""A run holds what the fit says, answers as the fit answers, and tells when it is asked for what it cannot know."""

import json
import os

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

import eigentrace as et
from eigentrace.disk.lock import locked
from eigentrace.errors import BusyError, InputError, MismatchError, UnsupportedError
from eigentrace.runs.ranking import Ranking
from eigentrace.store.user_columns import ColumnsFile, Names
from tests.helpers.expecting import expect_mentions, refused
from tests.helpers.manifests import edit_manifest
from tests.helpers.runs import Points, data, fit, model, task
from tests.helpers.small import cross_entropy


@pytest.fixture(scope="module")
def fitted():
    return fit()


@pytest.fixture(scope="module")
def run(fitted, tmp_path_factory):
    return et.score(fitted, data(), tmp_path_factory.mktemp("runs") / "x", shard_rows=20)


METHODS = {
    "tail": fit,
    "truncated": lambda: fit(method=et.Arnoldi(steps=20, keep=6, tail=None)),
    "stored": lambda: fit().stored(data(), coordinates=12),
    "randproj": lambda: fit(method=et.RandProj(keep=5)),
    "tracin": lambda: fit(method=et.TracIn()),
    "checkpoints": lambda: fit(method=et.TracIn(checkpoints=[task(s).model.state_dict() for s in (1, 2)])),
    "ensemble": lambda: et.Ensemble([fit(seed=1), fit(seed=2)]),
}


@pytest.mark.parametrize("name", METHODS)
def test_columns_are_what_the_fit_says(name, tmp_path):
    method = METHODS[name]()
    run = et.score(method, data(), tmp_path / "x", shard_rows=20)
    expected = method.self_influence(data())
    assert np.allclose(run.column("self_influence"), expected, rtol=1e-5, atol=1e-7)
    assert np.allclose(
        run.column("gradient_norm") ** 2, et.TracIn().fit(task(0), data()).self_influence(data()), rtol=1e-4
    ) or (name in ("checkpoints", "ensemble"))
    assert np.array_equal(run.self_influence().rows, np.arange(60))
    assert run.num_features == (0 if name in ("tracin", "checkpoints") else method.features(data()).shape[1])


def test_losses_classes_and_the_table(run, fitted):
    everything = next(data(batch_size=60).batches()).values
    with torch.no_grad():
        logits = fitted.task.model(everything[0])
    losses = torch.nn.functional.cross_entropy(logits, everything[1], reduction="none")
    assert np.allclose(run.column("loss"), losses, rtol=1e-5)
    assert np.array_equal(run.column("label"), everything[1])
    assert np.array_equal(run.column("prediction"), logits.argmax(dim=1))
    assert np.allclose(run.column("confidence"), logits.softmax(dim=1).max(dim=1).values)
    table = pq.read_table(run.path / "table.parquet")
    assert table.column_names == [
        "row", "loss", "gradient_norm", "self_influence", "label", "prediction", "confidence",
    ]  # fmt: skip
    assert np.array_equal(table["self_influence"], run.column("self_influence"))
    assert np.array_equal(table["row"], np.arange(60))


def test_features_come_back_chunk_by_chunk(run, fitted):
    chunks = list(run.feature_chunks(rows_at_once=7))
    assert [first for first, _ in chunks[:4]] == [0, 7, 14, 21]
    expected = fitted.features(data())
    assert torch.allclose(torch.cat([chunk for _, chunk in chunks]), expected, rtol=1e-5, atol=1e-6)
    picked = np.array([59, 3, 3, 21])
    assert torch.equal(run.features_of(picked), torch.cat([chunk for _, chunk in chunks])[picked])


def test_half_the_bytes(fitted, tmp_path):
    run = et.score(fitted, data(), tmp_path / "x", features="fp16")
    held = [run.folder.record.column(shard, "features") for shard in run.reader.shards]
    assert {array.dtype for array in held} == {np.dtype(np.float16)}
    expected = fitted.features(data())
    sizes = expected.abs().amax(dim=1, keepdim=True)
    assert ((run.features_of(np.arange(60)) - expected).abs() <= 2**-11 * sizes).all()
    assert np.allclose(run.column("self_influence"), fitted.self_influence(data()), rtol=1e-5)


def test_the_highest_come_first(run):
    found = run.self_influence()
    top = found.top(5)
    assert np.array_equal(top.rows, np.argsort(-found.values, kind="stable")[:5])
    assert np.array_equal(top.scores, found.values[top.rows])
    assert found.quantile(0.5) == pytest.approx(np.median(found.values))
    assert np.allclose(run.self_influence(unit="nats").values, found.values / 60)
    assert str(top).splitlines()[0].endswith(str(top.rows[0]))


def test_equal_scores_come_in_row_order(tmp_path):
    pq.write_table(pa.table({"id": list("abcde")}), tmp_path / "ids.parquet", row_group_size=2)
    ranking = Ranking(np.array([1.0, 3.0, np.nan, 3.0, 3.0]), Names(ColumnsFile(tmp_path / "ids.parquet"), "id"))
    assert ranking.top(2).rows.tolist() == [1, 3]
    assert ranking.top(9).ids.tolist() == ["b", "d", "e", "a", "c"]


def test_ids_and_columns_travel(fitted, tmp_path):
    names = [f"n{row}" for row in range(60)]
    source = np.array(["web", "book", "web"] * 20)
    run = et.score(fitted, data(ids=names), tmp_path / "x", shard_rows=13, columns={"source": source})
    assert run.ids.tolist() == names
    assert run.columns[-1] == "source"
    assert np.array_equal(run.column("source"), source)
    table = run.table()
    assert table["id"].to_pylist() == names
    assert table["source"].to_pylist() == source.tolist()
    assert run.self_influence().top(1).ids[0] == names[int(run.self_influence().top(1).rows[0])]
    again = et.open_run(tmp_path / "x")
    assert again.ids.tolist() == names
    with refused(MismatchError, tmp_path / "x", ["id", "source"]):
        et.score(fitted, data(ids=names), tmp_path / "x", columns={"source": np.roll(source, 1)})


def test_a_finished_run_is_opened_and_not_scored_again(run, fitted):
    before = {path: path.stat().st_mtime_ns for path in run.path.rglob("*") if path.name != "lock"}
    again = et.score(fitted, data(), run.path)
    assert {path: path.stat().st_mtime_ns for path in run.path.rglob("*") if path.name != "lock"} == before
    assert np.array_equal(again.column("loss"), run.column("loss"))


def test_shards_end_by_rows_bytes_or_work(fitted, tmp_path):
    def stops(run):
        return [shard.stop for shard in run.reader.shards]

    assert stops(et.score(fitted, data(), tmp_path / "a", shard_rows=20)) == [24, 48, 60]
    assert stops(et.score(fitted, data(), tmp_path / "b", shard_seconds=0)) == [8, 16, 24, 32, 40, 48, 56, 60]
    assert stops(et.score(fitted, data(), tmp_path / "c")) == [60]
    # A row takes 60 to 90 bytes: 6 features, a few columns and a digest.
    assert stops(et.score(fitted, data(), tmp_path / "d", shard_bytes=400)) == [8, 16, 24, 32, 40, 48, 56, 60]
    assert stops(et.score(fitted, data(), tmp_path / "e", shard_bytes=60 * 24)) == [24, 48, 60]


REFUSED = {
    "another model": (lambda: (fit(seed=1), data()), {}, ("fingerprint",)),
    "another fit": (lambda: (fit(method=et.Arnoldi(steps=20, keep=5)), data()), {}, ("keep", 6, 5)),
    "other data": (lambda: (fit(), et.Data([Points_(row) for row in range(60)], batch_size=8)), {}, ("fingerprint",)),
    "fewer data": (lambda: (fit(), data(50)), {}, ("rows", 60, 50)),
    "another batch size": (lambda: (fit(), data()), {"compute": et.Compute(batch=16)}, ("batch", 8, 16)),
    "another precision": (
        lambda: (fit(), data()), {"compute": et.Compute(precision="bf16")}, ("precision", '"fp32"', '"bf16"'),
    ),
    "other features": (lambda: (fit(), data()), {"features": "fp16"}, ("features", '"fp32"', '"fp16"')),
}  # fmt: skip


def Points_(row):
    return torch.full((5,), float(row)), row % 3


@pytest.mark.parametrize("name", REFUSED)
def test_a_run_of_something_else_is_left_alone(name, run):
    make, options, mentions = REFUSED[name]
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file() and path.name != "lock"}
    other, given = make()
    with refused(MismatchError, run.path, *mentions):
        et.score(other, given, run.path, **options)
    assert {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file() and path.name != "lock"} == before


def test_the_batch_size_of_the_run_wins(run, fitted):
    again = et.score(fitted, data(batch_size=11), run.path)
    assert again.manifest["compute"]["batch"] == 8


def test_a_directory_with_other_things_is_left_alone(fitted, tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with refused(InputError, tmp_path, "thesis.txt"):
        et.score(fitted, data(), tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_another_fit_in_the_directory_is_told(fitted, tmp_path):
    fit(seed=1).save(tmp_path / "x" / "fit")
    with refused(MismatchError, tmp_path / "x" / "fit"):
        et.score(fitted, data(), tmp_path / "x")


def test_one_writer_at_a_time(fitted, run):
    with locked(run.path), refused(BusyError, run.path, os.getpid()):
        et.score(fitted, data(), run.path)


def test_reading_what_is_not_there(run, tmp_path):
    with refused(MismatchError, tmp_path, "manifest.json"):
        et.open_run(tmp_path)
    with refused(InputError, "'colour'", "loss, gradient_norm"):
        run.column("colour")
    with refused(InputError, "Row 60", 59):
        run.features_of(np.array([60]))


class Counted(nn.Module):
    """Counts the examples that go through a model."""

    def __init__(self):
        super().__init__()
        self.net, self.seen = model(), 0

    def forward(self, x):
        self.seen += len(x)
        return self.net(x)


@pytest.mark.parametrize("engine", ["layerwise", "reverse"])
def test_classes_come_from_the_pass_that_is_made_anyway(engine, tmp_path):
    counted = Counted()
    fitted = et.Arnoldi(steps=20, keep=6).fit(et.classification(counted), data(600))
    compute = et.Compute(engine=engine, batch=50)
    counted.seen = 0
    run = et.score(fitted, data(600), tmp_path / "x", compute=compute)
    # Planning and auditing look at some examples again; under vmap the model sees one example for each batch.
    assert counted.seen < 700
    points = [Points(600)[row] for row in range(600)]
    logits = counted.net(torch.stack([x for x, _ in points])).detach()
    assert np.array_equal(run.column("prediction"), logits.argmax(dim=1))
    assert np.allclose(run.column("confidence"), logits.softmax(dim=1).amax(dim=1), rtol=1e-5)


@pytest.mark.parametrize("method", [et.Loss(), et.TracIn(), et.RandProj(keep=3)], ids=lambda m: type(m).__name__)
def test_scoring_needs_one_pass_whatever_the_method(method, tmp_path):
    counted = Counted()
    fitted = method.fit(et.classification(counted), data(600))
    counted.seen = 0
    run = et.score(fitted, data(600), tmp_path / "x", compute=et.Compute(batch=50))
    assert counted.seen < 700
    assert np.allclose(run.column("self_influence"), fitted.self_influence(data(600)), rtol=1e-5)


def test_a_loss_that_works_in_place_leaves_the_classes_alone(tmp_path):
    def scaled(logits, batch):
        return nn.functional.cross_entropy(logits.mul_(3.0), batch[1], reduction="none")

    task = et.Task(model(), outputs=lambda m, b: m(b[0]), output_loss=scaled, labels=lambda b: b[1])
    run = et.score(et.TracIn().fit(task, data()), data(), tmp_path / "x")
    logits = task.model(torch.stack([Points()[row][0] for row in range(60)])).detach()
    assert np.allclose(run.column("confidence"), logits.softmax(dim=1).amax(dim=1), rtol=1e-5)


def moved(by):
    """A fit that keeps nothing, of settings that look the same whatever the function does."""
    return fit(method=et.AugmentedLoss(lambda batch, rows, seed: (batch[0] + by, batch[1]), draws=1))


def test_fits_that_are_not_saved_are_told_apart_by_their_scores(fitted, tmp_path):
    run = et.score(moved(0.1), data(), tmp_path / "x", shard_rows=20)
    run.folder.record.write(run.folder.record.read()[:1])
    with refused(MismatchError, run.path, "row 5"):
        et.score(moved(0.9), data(), tmp_path / "x", shard_rows=20)
    assert et.open_run(run.path).num_missing == 40
    assert et.score(moved(0.1), data(), tmp_path / "x", shard_rows=20).is_complete
    fitted.save(tmp_path / "saved" / "fit")
    with refused(MismatchError, tmp_path / "saved" / "fit", "Support"):
        et.score(fit(method=et.Support()), data(), tmp_path / "saved")


def test_little_is_lost_of_a_fit_without_directions(tmp_path):
    def stopping(batch, rows, seed):
        if rows.max() >= 40:
            raise KeyboardInterrupt
        return batch

    stopped = fit(method=et.AugmentedLoss(stopping, draws=1))
    with pytest.raises(KeyboardInterrupt):
        et.score(stopped, data(), tmp_path / "x", shard_rows=16)
    assert et.open_run(tmp_path / "x").num_missing <= 60 - 32


def test_answers_by_features_need_features(tmp_path):
    run = et.score(fit(method=et.TracIn()), data(), tmp_path / "x")
    with refused(UnsupportedError, "TracIn", "eigentrace.open_run(path, task, data)"):
        run.explain(3, rescore=False)
    lone = et.score(fit(method=et.Support()), data(), tmp_path / "y")
    with refused(UnsupportedError, "Support", "pairs"):
        et.open_run(lone.path).explain(3)


@pytest.mark.parametrize("method", [et.TracIn(), et.Lissa(depth=3, scale=50.0)], ids=lambda m: type(m).__name__)
def test_queries_are_measured_and_need_no_label(method, tmp_path):
    def logit(model, batch):
        return model(batch[0])[:, 1]

    def loss(logits, batch):
        return nn.functional.cross_entropy(logits, batch[1], reduction="none")

    asked = et.Task(model(), outputs=lambda m, b: m(b[0]), output_loss=loss, measurement=logit)
    fitted = method.fit(asked, data())
    queries = [(torch.stack([Points()[row][0] for row in (3, 9)]),)]
    found = et.score(fitted, data(), tmp_path / "x").explain(queries, k=4)
    expected = fitted.influence(data(), queries).topk(4, dim=1).indices
    assert np.array_equal(found.proponents.rows, expected)


@pytest.mark.parametrize("method", [et.Loss(), et.TracIn()], ids=lambda method: type(method).__name__)
def test_a_run_without_features(method, tmp_path):
    fitted = fit(method=method)
    run = et.score(fitted, data(), tmp_path / "x", shard_rows=20)
    assert run.num_features == 0
    assert np.allclose(run.column("self_influence"), fitted.self_influence(data()), rtol=1e-6)
    with refused(UnsupportedError, type(method).__name__, "features"):
        next(run.feature_chunks())
    with refused(UnsupportedError, type(method).__name__, "'nats'"):
        run.self_influence(unit="nats")


def begun(fitted, path, change):
    """A run of which one shard is scored, by a version that wrote other columns."""
    run = et.score(fitted, data(), path, shard_rows=20)
    record = run.folder.record
    record.write(record.read()[:1])
    run.folder.table_file.unlink()
    edit_manifest(run.path, lambda manifest: change(manifest["columns"]))
    return run


def test_a_run_goes_on_with_its_own_columns(fitted, run, tmp_path):
    begun(fitted, tmp_path / "x", lambda columns: columns.remove("confidence"))
    went_on = et.score(fitted, data(), tmp_path / "x", shard_rows=20)
    assert went_on.columns == tuple(name for name in run.columns if name != "confidence")
    assert "confidence" not in went_on.table().column_names
    for name in went_on.columns:
        assert np.array_equal(went_on.column(name), run.column(name))


def test_columns_that_cannot_be_written_are_told_before_scoring(fitted, tmp_path):
    path = begun(fitted, tmp_path / "x", lambda columns: columns.append("influence_of_the_moon")).path
    before = {file: file.stat().st_mtime_ns for file in path.rglob("*") if file.name != "lock"}
    with refused(MismatchError, path, "influence_of_the_moon"):
        et.score(fitted, data(), path, shard_rows=20)
    assert before == {file: file.stat().st_mtime_ns for file in path.rglob("*") if file.name != "lock"}


def test_some_rows_of_a_column(run):
    picked = np.array([[59, 3], [3, 21]])
    for name in run.columns:
        assert np.array_equal(run.column(name, picked), run.column(name)[picked])
        assert np.array_equal(run.column(name, range(18, 43)), run.column(name)[18:43])
    with refused(InputError, "Row 60", 59):
        run.column("loss", np.array([60]))


def test_an_unfinished_run_says_so(run, tmp_path, fitted):
    part = et.score(fitted, data(), tmp_path / "x", shard_rows=20)
    record = json.loads((part.path / "shards.json").read_text())
    record["shards"] = record["shards"][:2]
    (part.path / "shards.json").write_text(json.dumps(record))
    opened = et.open_run(part.path)
    assert (opened.is_complete, opened.num_missing) == (False, 12)
    expect_mentions(repr(opened), [12])
    with refused(InputError, part.path, 12, 60):
        opened.self_influence()
    assert et.score(fitted, data(), part.path).is_complete


def test_attaching_checks_model_and_data(run):
    with refused(MismatchError, run.path / "fit"):
        et.open_run(run.path, task(3))
    with refused(MismatchError, run.path):
        et.open_run(run.path, task(), et.Data([Points_(row) for row in range(60)]))
    with refused(MismatchError, 60, 59):
        et.open_run(run.path, task(), data(59))


def test_attaching_compares_the_loss(run):
    own = task()

    def twice(model, batch):
        return 2 * cross_entropy(model, batch)

    with refused(MismatchError, run.path, "row 4", 2.543, 5.087):
        et.open_run(run.path, et.Task(own.model, twice), data())
    assert et.open_run(run.path, et.Task(own.model, cross_entropy), data()).explain([0], k=2).how == "exact"


def test_rows_are_found_by_id(fitted, tmp_path):
    given = data(ids=[f"n{row % 59}" for row in range(60)])
    run = et.score(fitted, given, tmp_path / "x")
    assert run.rows_of(["n7", "n3"]).tolist() == [7, 3]
    for name, rows in (("n0", "0, 59"), ("n99", "no row")):
        with refused(InputError, f"'{name}'", rows):
            run.rows_of([name])


def test_rows_without_ids_have_no_name(run):
    with refused(InputError, run.path, "ids"):
        run.rows_of(["n7"])
