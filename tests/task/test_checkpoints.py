"""Checkpoints as Hugging Face, Lightning and plain loops leave them; damaged ones are named."""

import json
import os
from collections import OrderedDict

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import eigentrace as et
from eigentrace.errors import EigentraceWarning, InputError, MismatchError
from eigentrace.task.checkpoints import Checkpoint, find_checkpoints
from tests.helpers.expecting import refused, warned
from tests.helpers.small import examples, fit, net, table


def state(seed=0):
    return {name: tensor.clone() for name, tensor in net(seed).state_dict().items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def hugging_face(folder, seed=0):
    folder.mkdir(parents=True, exist_ok=True)
    save_file(state(seed), folder / "model.safetensors")
    torch.save({"step": seed}, folder / "optimizer.pt")
    return folder


def sharded(folder):
    folder.mkdir()
    parts = {"a.safetensors": ["0.weight", "0.bias"], "b.safetensors": ["2.weight", "2.bias"]}
    for file, names in parts.items():
        save_file({name: state()[name] for name in names}, folder / file)
    index = {"weight_map": {name: file for file, names in parts.items() for name in names}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def saved(path, content):
    torch.save(content, path)
    return path


def safe(path):
    save_file(state(), path)
    return path


SOURCES = {
    "state dict": (lambda at: state(),),
    "ordered": (lambda at: OrderedDict(state()),),
    "nested in memory": (lambda at: {"state_dict": state(), "epoch": 3},),
    "plain": (lambda at: saved(at / "model.pt", state()),),
    "as text": (lambda at: str(saved(at / "model.pth", state())),),
    "lightning": (lambda at: saved(at / "epoch=1-step=2.ckpt", {"state_dict": state(), "epoch": 1}),),
    "loop": (lambda at: saved(at / "a.pt", {"model_state_dict": state(), "optimizer": {"lr": 0.1}}),),
    "loop, deeper": (lambda at: saved(at / "a.pt", {"model": {"state_dict": state()}}),),
    "safetensors": (lambda at: safe(at / "a.safetensors"),),
    "hugging face": (lambda at: hugging_face(at / "hf"),),
    "old hugging face": (lambda at: saved(at / "pytorch_model.bin", state()).parent,),
    "shards": (lambda at: sharded(at / "hf"),),
}


@pytest.mark.parametrize("make", table(SOURCES))
def test_every_source_gives_the_state(make, tmp_path):
    (found,) = find_checkpoints(make(tmp_path))
    assert same(found.load(), state())


def test_training_folder_of_hugging_face_in_the_order_of_steps(tmp_path):
    for step in (500, 1000, 90):
        hugging_face(tmp_path / f"checkpoint-{step}", seed=step)
    hugging_face(tmp_path, seed=1000)  # the final model, beside the checkpoints
    (tmp_path / "runs").mkdir()
    found = find_checkpoints(tmp_path)
    assert [c.source.name for c in found] == ["checkpoint-90", "checkpoint-500", "checkpoint-1000"]
    assert same(found[1].load(), state(500))


def test_model_folder_with_parts_in_subfolders_is_one_checkpoint(tmp_path):
    hugging_face(tmp_path)
    hugging_face(tmp_path / "2_Dense")
    assert [c.source for c in find_checkpoints(tmp_path)] == [tmp_path]


@pytest.mark.parametrize(
    "names",
    [
        ["epoch=0-step=90.ckpt", "epoch=1-step=180.ckpt", "epoch=10-step=1000.ckpt"],
        ["epoch_2.pt", "epoch_10.pt"],
        ["step_9.safetensors", "step_10.safetensors"],
        ["m1.pth", "m2.pth", "m11.pth"],
    ],
)
def test_training_folder_of_files_in_the_order_of_numbers(tmp_path, names):
    for name in sorted(names):
        (safe if name.endswith("safetensors") else lambda p: saved(p, state()))(tmp_path / name)
    (tmp_path / "metrics.csv").write_text("")
    assert [c.source.name for c in find_checkpoints(tmp_path)] == names


def test_lightnings_copy_of_the_last_is_passed_over(tmp_path):
    for name in ("last.ckpt", "epoch=0-step=1.ckpt", "epoch=1-step=2.ckpt"):
        saved(tmp_path / name, {"state_dict": state()})
    assert [c.source.name for c in find_checkpoints(tmp_path)] == ["epoch=0-step=1.ckpt", "epoch=1-step=2.ckpt"]


def test_single_checkpoint_warns_at_the_callers_line(tmp_path):
    saved(tmp_path / "last.ckpt", {"state_dict": state()})
    with warned(EigentraceWarning, tmp_path) as caught:
        et.TracIn(tmp_path).fit(et.classification(net()), examples())
    assert caught[0].filename == __file__


def test_several_sources_keep_their_order(tmp_path):
    found = find_checkpoints([state(3), saved(tmp_path / "a.pt", state(1)), hugging_face(tmp_path / "hf", 2)])
    assert [same(c.load(), state(seed)) for c, seed in zip(found, (3, 1, 2), strict=True)] == [True] * 3
    assert [str(c) for c in found[1:]] == [str(tmp_path / "a.pt"), str(tmp_path / "hf")]


def cut(path):
    path.write_bytes(path.read_bytes()[:200])
    return path


def written(path, content):
    path.write_bytes(content)
    return path


def without_shard(folder):
    (folder / "b.safetensors").unlink()
    return folder


def with_index(folder, text):
    folder.mkdir()
    (folder / "model.safetensors.index.json").write_text(text)
    return folder


def instead(path, kind):
    """Put what is no file into the place of a file."""
    {"pipe": os.mkfifo, "device": lambda place: place.symlink_to("/dev/zero")}[kind](path)
    return path


DAMAGED = {
    "cut pickle": (lambda at: cut(saved(at / "a.pt", state())), ("a.pt",)),
    "empty": (lambda at: written(at / "a.pt", b""), ("a.pt", "EOFError")),
    "text": (lambda at: written(at / "a.pt", b"hello world"), ("a.pt",)),
    "cut safetensors": (lambda at: cut(safe(at / "a.safetensors")), ("a.safetensors",)),
    "empty safetensors": (lambda at: written(at / "a.safetensors", b""), ("a.safetensors",)),
    "no tensors": (lambda at: saved(at / "a.pt", {"epoch": 3}), ("a.pt", "'state_dict'")),
    "a tensor": (lambda at: saved(at / "a.pt", torch.zeros(3)), ("a.pt", "'state_dict'")),
    "missing shard": (lambda at: without_shard(sharded(at / "hf")), ("b.safetensors",)),
    "damaged index": (lambda at: with_index(at / "hf", "{"), ("index.json",)),
    "deep index": (lambda at: with_index(at / "hf", "[" * 100_000), ("index.json",)),
    "empty index": (lambda at: with_index(at / "hf", "{}"), ("index.json",)),
}


@pytest.mark.parametrize(("make", "mentions"), table(DAMAGED))
def test_damaged_checkpoint(make, mentions, tmp_path):
    with refused(MismatchError, *mentions):
        find_checkpoints(make(tmp_path))[0].load()


@pytest.mark.parametrize("kind", ["pipe", "device"])
@pytest.mark.parametrize("name", ["a.pt", "a.safetensors"])
def test_what_is_no_file_is_refused_without_waiting(name, kind, tmp_path):
    with refused(MismatchError, tmp_path / name):
        Checkpoint(instead(tmp_path / name, kind)).load()


def test_a_whole_pickled_model_is_refused(tmp_path):
    with refused(InputError, tmp_path / "model.pt", "Sequential"):
        Checkpoint(saved(tmp_path / "model.pt", net())).load()


@pytest.mark.parametrize(
    "prefix", ["_orig_mod.", "module.", "model.", "module._orig_mod.", "model.module.", "net.", "lightning.backbone."]
)
def test_names_under_a_wrapper(prefix):
    wrapped = {prefix + name: tensor for name, tensor in state(5).items()} | {"criterion.weight": torch.ones(3)}
    assert same(et.classification(net()).canonical(wrapped), state(5))


def test_own_names_that_look_wrapped_are_kept():
    model = nn.ModuleDict({"model": nn.Linear(2, 2), "head": nn.Linear(2, 2)})
    assert same(et.Task(model, print).canonical(model.state_dict()), model.state_dict())


def test_tied_tensor_under_either_name():
    model = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    model["b"].weight = model["a"].weight
    for name in ("a.weight", "b.weight"):
        found = et.Task(model, print).canonical({name: torch.ones(2, 2)})
        assert same(found, {"a.weight": torch.ones(2, 2)})


def test_scores_at_checkpoints_are_scores_of_models_that_loaded_them(tmp_path):
    files = [saved(tmp_path / f"{seed}.pt", state(seed)) for seed in (1, 2)]
    queries = tuple(t[:3] for t in examples())
    at_each = [fit(et.classification(net(seed)), method=et.TracIn()) for seed in (1, 2)]
    expected = sum(fitted.influence(examples(), queries) for fitted in at_each)
    found = fit(method=et.TracIn(files)).influence(examples(), queries)
    torch.testing.assert_close(found, expected / 2)


def test_adapters_alone_are_refused(tmp_path):
    folder = tmp_path / "checkpoint-10"
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(b"")
    with refused(InputError, tmp_path, "PEFT"):
        find_checkpoints(tmp_path)
