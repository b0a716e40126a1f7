"""Saved fits: what is read back scores the same; what is damaged, foreign or in the way stops with a message."""

import copy
import json
import os

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import eigentrace as et
from eigentrace.disk import manifest as directories
from eigentrace.disk.manifest import write_directory
from eigentrace.disk.tensors import ALIGNED, read_tensors, write_tensors
from eigentrace.errors import InputError, MismatchError
from tests.helpers.expecting import expect_mentions, refused
from tests.helpers.manifests import edit_manifest
from tests.helpers.small import cross_entropy, examples, fit, net, table


def state(seed):
    return copy.deepcopy(net(seed).state_dict())


METHODS = {
    "arnoldi": et.Arnoldi(steps=20, keep=5),
    "truncated": et.Arnoldi(steps=20, keep=5, tail=None),
    "fixed tail": et.Arnoldi(steps=20, keep=5, tail=0.3),
    "positive": et.Arnoldi(steps=31, keep=8, tail=None, positive_only=True, curvature="hessian"),
    "spread": et.Arnoldi(steps=20, keep=5, sample=6, spread=True),
    "bf16 basis": et.Arnoldi(steps=20, keep=2, basis=et.Basis(dtype="bf16")),
    "inverse": et.InverseArnoldi(steps=4, keep=2, solver=et.Lissa(depth=3, damping=0.1)),
    "exact": et.ExactHessian(damping=0.1),
    "randproj": et.RandProj(keep=4),
    "randselect": et.RandSelect(keep=4),
    "tracin": et.TracIn(),
    "tracin over checkpoints": et.TracIn([state(1), state(2)], learning_rates=[0.5, 0.1]),
}


@pytest.fixture(scope="module")
def task():
    return et.classification(net())


@pytest.mark.parametrize("name", METHODS)
def test_what_is_loaded_answers_the_same(name, task, tmp_path):
    fitted = fit(task, method=METHODS[name], num_train=100)
    fitted.save(tmp_path / "new" / "folder" / "fit")
    loaded = et.load(tmp_path / "new" / "folder" / "fit", et.classification(net()))
    queries = tuple(t[:3] for t in examples())
    assert torch.equal(loaded.self_influence(examples()), fitted.self_influence(examples()))
    assert torch.equal(loaded.influence(examples(), queries), fitted.influence(examples(), queries))
    assert (loaded.num_train, loaded.has_curvature, loaded.method) == (100, fitted.has_curvature, fitted.method)
    if fitted.can.features:
        assert torch.equal(loaded.features(examples()), fitted.features(examples()))
    if fitted.can.distill:
        for ours, theirs in ((loaded, fitted), (loaded.distill(keep=2, tail=0.1), fitted.distill(keep=2, tail=0.1))):
            assert torch.equal(ours.self_influence(examples()), theirs.self_influence(examples()))
            assert torch.equal(ours.spectrum.eigenvalues, theirs.spectrum.eigenvalues)
            assert (ours.cut, ours.delta) == (theirs.cut, theirs.delta)
            assert ours.spectrum.ending is theirs.spectrum.ending
            assert ours.spectrum.converged == theirs.spectrum.converged
            assert ours.spectrum.num_products == theirs.spectrum.num_products


def test_a_cut_is_saved_with_all_directions(task, tmp_path):
    fitted = fit(task, method=METHODS["arnoldi"])
    fitted.distill(keep=2, tail=None).save(tmp_path / "fit")
    loaded = et.load(tmp_path / "fit", task)
    assert len(loaded.spectrum.eigenvalues) == 2
    assert torch.equal(
        loaded.distill(keep=5, tail="auto").self_influence(examples()), fitted.self_influence(examples())
    )


def test_manifest_says_what_was_saved(task, tmp_path):
    fit(task, method=METHODS["arnoldi"], num_train=77).save(tmp_path / "fit")
    manifest = json.loads((tmp_path / "fit" / "manifest.json").read_text())
    assert (manifest["kind"], manifest["format"], manifest["num_train"]) == ("fit", 1, 77)
    assert manifest["method"]["name"] == "Arnoldi"
    assert manifest["method"]["basis"]["dtype"] == "fp32"
    expect_mentions(manifest["coverage"], ["100%", 31, 4])


def test_models_of_every_kind_of_tensor_round_trip(tmp_path):
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(1.5))
            self.narrow = nn.Parameter(torch.ones(2, dtype=torch.bfloat16), requires_grad=False)
            self.register_buffer("flags", torch.tensor([True, False]))
            self.register_buffer("empty", torch.zeros(0, 3))
            self.register_buffer("strided", torch.arange(6.0).view(2, 3).T)
            self.linear = nn.Linear(3, 3).double()
            self.tied = nn.ModuleDict({"again": self.linear})

        def forward(self, x):
            return self.scale * self.linear(x.double())

    torch.manual_seed(0)
    task = et.classification(Mixed())
    fitted = fit(task, method=et.TracIn())
    fitted.save(tmp_path / "fit")
    assert torch.equal(et.load(tmp_path / "fit", task).self_influence(examples()), fitted.self_influence(examples()))


# --- foreign tasks ----------------------------------------------------------------------------------------------------


def moved(change):
    model = net()
    with torch.no_grad():
        change(model)
    return et.classification(model)


OTHERS = {
    "weights": (lambda: moved(lambda m: m[0].weight[0, 0].add_(1e-3)), (31, 4)),
    "selection": (lambda: et.classification(net(), params="2.*"), (15, 2)),
    "architecture": (lambda: et.classification(nn.Linear(3, 3)), (12, 2)),
    "names": (lambda: et.classification(nn.Sequential(nn.Sequential(*net()))), (31, 4)),
    "type": (lambda: et.classification(net().double()), (31, 4)),
    "buffers": (lambda: moved(lambda m: m.register_buffer("extra", torch.ones(1))), (31, 4)),
}


@pytest.mark.parametrize(("make", "given"), table(OTHERS))
def test_other_task_is_refused(make, given, task, tmp_path):
    fit(task).save(tmp_path / "fit")
    with refused(MismatchError, tmp_path / "fit", 31, 4, *given):
        et.load(tmp_path / "fit", make())


def test_how_the_loss_is_written_is_not_part_of_the_fingerprint(task, tmp_path):
    fit(task).save(tmp_path / "fit")
    et.load(tmp_path / "fit", et.Task(net().train(), cross_entropy))
    assert task.fingerprint() == et.Task(net(), cross_entropy, l2=0.1).fingerprint()


def twice(model, batch):
    return 2 * cross_entropy(model, batch)


ANOTHER = ("row 3", 2.522, 5.044)  # the one of the tried examples whose loss is furthest from what it was
QUESTIONS = {
    "self": (lambda fitted, data, path: fitted.self_influence(data),),
    "cross": (lambda fitted, data, path: fitted.influence(data, tuple(t[9:] for t in data)),),
    "score": (lambda fitted, data, path: et.score(fitted, data, path / "run"),),
    "features": (lambda fitted, data, path: fitted.features(data),),
    "coordinates": (lambda fitted, data, path: fitted.stored(data),),
    "ranked": (lambda fitted, data, path: fitted.stored(data).influence_topk(data, tuple(t[9:] for t in data), k=2),),
}


@pytest.mark.parametrize("ask", table(QUESTIONS))
def test_another_loss_is_refused_when_the_fit_is_asked(ask, task, tmp_path):
    fit(task, method=METHODS["arnoldi"]).save(tmp_path / "fit")
    with refused(MismatchError, *ANOTHER):
        ask(et.load(tmp_path / "fit", et.Task(net(), twice)), examples(), tmp_path)
    ask(et.load(tmp_path / "fit", et.Task(net(), cross_entropy)), examples(), tmp_path)


@pytest.mark.parametrize("name", ["exact", "inverse", "randproj", "tracin", "tracin over checkpoints"])
def test_another_loss_is_refused_whatever_was_fitted(name, task, tmp_path):
    fit(task, method=METHODS[name]).save(tmp_path / "fit")
    with refused(MismatchError, *ANOTHER):
        et.load(tmp_path / "fit", et.Task(net(), twice)).self_influence(examples())


def test_another_loss_is_refused_by_an_ensemble(task, tmp_path):
    et.Ensemble.fit(et.RandProj(keep=2), task, examples(), checkpoints=[state(1), state(2)]).save(tmp_path / "fit")
    with refused(MismatchError, "row 0", 5.217, 10.43):
        et.load(tmp_path / "fit", et.Task(net(), twice)).self_influence(examples())


def test_the_loss_is_tried_on_examples_of_the_fit_only(task, tmp_path):
    x, y = examples(20)
    et.RandProj(keep=2).fit(task, (x[:12], y[:12])).save(tmp_path / "fit")
    calls = []

    def counted(model, batch):
        calls.append(len(batch[0]))
        return twice(model, batch)

    loaded = et.load(tmp_path / "fit", et.Task(net(), counted))
    loaded.self_influence((x[12:], y[12:]))  # not among those that were tried: nothing to compare
    before = len(calls)
    with refused(MismatchError, "row 1", 0.2738, 0.5475):
        loaded.self_influence((torch.cat([x[15:16], x[:1]]), torch.cat([y[15:16], y[:1]])))
    assert calls[before:] == [2]


def test_the_loss_is_tried_once(task, tmp_path):
    fit(task).save(tmp_path / "fit")
    own = fit(task)
    loaded = et.load(tmp_path / "fit", task)
    assert own.task.loss_fingerprint.is_checked
    assert not loaded.task.loss_fingerprint.is_checked
    loaded.self_influence(examples())
    assert loaded.task.loss_fingerprint.is_checked


def test_fits_without_a_record_of_losses_are_read(task, tmp_path):
    fit(task).save(tmp_path / "fit")
    manifest(tmp_path / "fit", trial=None)
    loaded = et.load(tmp_path / "fit", task)
    assert torch.equal(loaded.self_influence(examples()), fit(task).self_influence(examples()))
    loaded.save(tmp_path / "again")


# --- damage -----------------------------------------------------------------------------------------------------------


def cut(file):
    file.write_bytes(file.read_bytes()[:-10])


def manifest(folder, **changes):
    edit_manifest(folder, lambda entries: entries.update(changes))


DAMAGE = {
    "no manifest": (lambda at: (at / "manifest.json").unlink(), ("manifest.json",)),
    "cut manifest": (lambda at: cut(at / "manifest.json"), ("manifest.json",)),
    "binary manifest": (lambda at: (at / "manifest.json").write_bytes(b"\xff\xfe\x00"), ("manifest.json",)),
    "list manifest": (
        lambda at: (at / "manifest.json").write_text("[1]"),
        ("manifest.json", "list", ("fit", 1)),
    ),
    "other kind": (lambda at: manifest(at, kind="run"), ("manifest.json", ("run", 1), ("fit", 1))),
    "newer format": (lambda at: manifest(at, format=2), ("manifest.json", ("fit", 2), ("fit", 1))),
    "cut tensors": (lambda at: cut(at / "eigenpairs.safetensors"), ("eigenpairs.safetensors",)),
    "empty tensors": (lambda at: (at / "eigenpairs.safetensors").write_bytes(b""), ("eigenpairs.safetensors",)),
    "no tensors": (lambda at: (at / "eigenpairs.safetensors").unlink(), ("eigenpairs.safetensors",)),
}


@pytest.mark.parametrize(("damage", "mentions"), table(DAMAGE))
def test_damaged_fit_is_refused(damage, mentions, task, tmp_path):
    fit(task, method=METHODS["arnoldi"]).save(tmp_path / "fit")
    damage(tmp_path / "fit")
    with refused(MismatchError, tmp_path / "fit", *mentions):
        et.load(tmp_path / "fit", task)


def test_missing_block_is_refused(task, tmp_path):
    fit(task, method=METHODS["tracin over checkpoints"]).save(tmp_path / "fit")
    (tmp_path / "fit" / "block-1.safetensors").unlink()
    with refused(MismatchError, tmp_path / "fit" / "block-1.safetensors"):
        et.load(tmp_path / "fit", task)


def test_path_that_is_no_fit_is_refused(task, tmp_path):
    with refused(MismatchError, tmp_path / "nothing", "manifest.json"):
        et.load(tmp_path / "nothing", task)
    (tmp_path / "file").write_text("")
    with refused(MismatchError, tmp_path / "file"):
        et.load(tmp_path / "file", task)


# --- writing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda p: p.mkdir(), lambda p: p.write_text("mine")], ids=["folder", "file"])
def test_nothing_is_overwritten(make, task, tmp_path):
    path = tmp_path / "fit"
    make(path)
    with refused(InputError, path):
        fit(task).save(path)
    assert list(tmp_path.iterdir()) == [path]
    assert path.is_dir() or path.read_text() == "mine"


@pytest.mark.parametrize("call", ["fsync", "rename", "write_tensors", "dumps"])
def test_a_failure_leaves_nothing_behind(call, task, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise OSError("No space left on device")

    target = {"fsync": os, "rename": directories.Path, "write_tensors": directories, "dumps": directories.json}[call]
    fitted = fit(task)
    monkeypatch.setattr(target, call, fail)
    with refused(OSError, "No space left on device"):
        fitted.save(tmp_path / "fit")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    fitted.save(tmp_path / "fit")
    et.load(tmp_path / "fit", task)


def test_everything_is_on_disk_before_the_name_appears(task, tmp_path, monkeypatch):
    path, synced, real = tmp_path / "fit", [], os.fsync

    def fsync(handle):
        synced.append((os.readlink(f"/proc/self/fd/{handle}"), path.exists()))
        real(handle)

    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("open files have names on Linux only")
    monkeypatch.setattr(os, "fsync", fsync)
    fit(task).save(path)
    before = {os.path.basename(name) for name, there in synced if not there}
    assert {"manifest.json", "block-0.safetensors"} <= before
    assert any(name.startswith(".fit.") and name.endswith(".partial") for name in before)
    assert synced[-1] == (str(tmp_path), True)
    assert [p.name for p in tmp_path.iterdir()] == ["fit"]


def test_numbers_that_json_cannot_hold_are_refused(tmp_path):
    with refused(ValueError, "nan"):
        write_directory(tmp_path / "fit", {"delta": float("nan")}, {})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("key", ["double", "method", "ending", "fingerprint"])
def test_a_manifest_with_a_part_missing_is_refused(key, task, tmp_path):
    et.Arnoldi(steps=10, keep=2).fit(task, examples()).save(tmp_path / "fit")
    edit_manifest(tmp_path / "fit", lambda manifest: manifest.pop(key))
    with refused(MismatchError, tmp_path / "fit", repr(key)):
        et.load(tmp_path / "fit", task)


def test_a_cut_with_a_part_missing_is_refused(task, tmp_path):
    et.Arnoldi(steps=10, keep=2).fit(task, examples()).save(tmp_path / "fit")
    edit_manifest(tmp_path / "fit", lambda manifest: manifest["cut"].pop("tail"))
    with refused(MismatchError, tmp_path / "fit", "'tail'"):
        et.load(tmp_path / "fit", task)


def test_rows_of_another_shape_are_refused(task, tmp_path):
    et.Arnoldi(steps=10, keep=2).fit(task, examples()).save(tmp_path / "fit")
    file = tmp_path / "fit" / "eigenpairs.safetensors"
    tensors = read_tensors(file)
    write_tensors(tensors | {"directions": tensors["directions"][:, :-1].contiguous()}, file, checksums=True)
    with refused(MismatchError, "directions", (2, 30), (2, 31)):
        et.load(tmp_path / "fit", task)


def test_load_takes_a_task(task, tmp_path):
    with refused(InputError, "load", "Task", "Sequential"):
        et.load(tmp_path / "fit", task.model)


@pytest.mark.parametrize("rows", [50, 51])
def test_tensors_are_read_to_where_sums_are_taken_in_one_order(tmp_path, rows):
    tensors = {
        "a": torch.randn(3),
        "large": torch.randn(rows, 7),
        "c": torch.arange(5, dtype=torch.int16),
        "d": torch.ones(1, dtype=torch.float64),
    }
    write_tensors(tensors, tmp_path / "x.safetensors")
    # The largest can be used as it lies in the file, unless the others would then not lie at multiples of their width.
    there = load_file(tmp_path / "x.safetensors")
    assert (there["large"].data_ptr() % ALIGNED == 0) == (tensors["large"].nbytes % 8 == 0)
    assert any(tensor.data_ptr() % ALIGNED for tensor in there.values())
    found = read_tensors(tmp_path / "x.safetensors")
    assert all(found[name].data_ptr() % ALIGNED == 0 and torch.equal(found[name], tensors[name]) for name in tensors)
