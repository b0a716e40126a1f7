"""A run names the function that makes its data; it is called only if the user created the run or said so."""

import contextlib
import json
import os
import shutil
import sys
import warnings
from pathlib import Path

import pytest
import torch
import transformers

import eigentrace as et
from eigentrace.errors import EigentraceWarning, InputError, MismatchError, UntrustedError
from eigentrace.loading import make_inputs, show_of
from eigentrace.loading.hugging_face import check_files, load_model, stored_class_names
from eigentrace.loading.trust import is_trusted, trust_run
from eigentrace.page.one_file import write_report
from eigentrace.page.subject import Subject
from tests.helpers.expecting import expect_mentions, refused
from tests.helpers.manifests import edit_manifest

INPUTS = """
import pathlib, torch, eigentrace as et
from torch.utils.data import TensorDataset

def made(size=12):
    pathlib.Path(__file__).with_name("called").touch()
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2).eval()
    return et.classification(model), et.Data(TensorDataset(torch.randn(size, 3), torch.arange(size) % 2), batch_size=4)
"""


@pytest.fixture
def made(tmp_path, monkeypatch, call):
    """A run that the command line created from a function, and the file that the function writes when it is called."""
    (tmp_path / "inputs.py").write_text(INPUTS)
    monkeypatch.chdir(tmp_path)
    for line in ("fit run --input inputs.py:made --steps 16 --keep 2", "score run"):
        code, _, err = call(line)
        assert code == 0, err
    called = tmp_path / "called"
    called.unlink()
    return tmp_path / "run", called


def foreign(run, to):
    """The run as somebody else would get it: moved to where nothing is recorded about it."""
    shutil.copytree(run, to)
    return to


HOW = {"input": {"function": "os:system", "args": {"command": "touch gotcha"}, "resolved": {}}}


def test_a_function_that_a_run_names_is_not_called(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for call in (lambda: make_inputs(HOW, tmp_path), lambda: make_inputs(HOW), lambda: show_of(HOW, tmp_path)):
        with refused(UntrustedError, "os:system", "command", "touch gotcha", "--trust"):
            call()
    assert not (tmp_path / "gotcha").exists()


def test_a_user_s_own_run_is_trusted_and_a_moved_one_is_not(made, tmp_path):
    run, called = made
    how = et.open_run(run).manifest["how"]
    assert len(make_inputs(how, run).data) == 12
    called.unlink()
    other = foreign(run, tmp_path / "elsewhere")
    with refused(UntrustedError, other, "inputs.py:made"):
        make_inputs(how, other)
    assert not called.exists()
    assert len(make_inputs(how, other, trust=True).data) == 12
    assert len(make_inputs(how, other).data) == 12  # it is remembered


def test_another_call_in_a_trusted_place_is_not_trusted(tmp_path):
    asked = {"function": "mine:made", "args": {"size": 4}, "resolved": {}}
    trust_run(asked, tmp_path)
    assert is_trusted(asked, tmp_path)
    assert not is_trusted(asked | {"args": {"size": 5}}, tmp_path)
    assert not is_trusted(asked | {"function": "other:made"}, tmp_path)
    assert not is_trusted(asked | {"resolved": {"function": "/somewhere/mine.py:made"}}, tmp_path)
    assert not is_trusted(asked, tmp_path / "other")


@pytest.mark.parametrize("command", ["score {}", "explain {} --row 1 --exact", "fit {}", "check {} --repair"])
def test_commands_call_it_only_when_told_to(made, tmp_path, call, command):
    run, called = made
    other = foreign(run, tmp_path / "elsewhere")
    if command.startswith("check"):
        next((other / "shards").iterdir()).unlink()
    if command.startswith("fit"):
        shutil.rmtree(other / "fit")
    code, _, err = call(command.format(other))
    assert code == 2
    expect_mentions(err, [f"{tmp_path / 'inputs.py'}:made", "--trust"])
    assert not called.exists()
    assert call(f"{command.format(other)} --trust")[0] == 0
    assert called.exists()


def test_what_needs_no_function_works_without_trust(made, tmp_path, call):
    run, called = made
    other = foreign(run, tmp_path / "elsewhere")
    for command in ("info {}", "check {}", "explain {} --row 1", "clean {} --drop 2"):
        code, _, err = call(command.format(other))
        assert code == 0, err
    with warnings.catch_warnings():
        warnings.simplefilter("default", EigentraceWarning)
        code, _, err = call(f"report {other}")
    assert code == 0
    expect_mentions(err, ["inputs.py:made", "--trust"])
    assert not called.exists()
    assert call(f"report {other} --out again.html --trust")[0] == 0
    assert called.exists()


def test_the_page_of_a_foreign_run_calls_nothing(made, tmp_path):
    run, called = made
    other = foreign(run, tmp_path / "elsewhere")
    subject = Subject(other, with_model=True)
    subject.warm_up()
    assert subject.show is None
    expect_mentions(subject.trouble, ["inputs.py:made"])
    with pytest.raises(UntrustedError):
        _ = subject.inputs
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EigentraceWarning)  # says that the examples are not shown
        write_report(other, tmp_path / "page.html")
    assert not called.exists()
    trusted = Subject(other, with_model=True, trust=True)
    trusted.warm_up()
    assert trusted.attached().data is not None
    assert called.exists()


EVIL = "import pathlib\npathlib.Path(__file__).with_name('gotcha').touch()\ndef go(**_):\n    pass\n"
DIGITS = "eigentrace.demo.inputs:digits"


@pytest.fixture
def evil(made, tmp_path):
    """A foreign run of one's own scores with a file of code in it."""
    other = foreign(made[0], tmp_path / "elsewhere")
    (other / "evil.py").write_text(EVIL)
    return other


def disguises(run):
    """Inputs that name something harmless, or no function at all, and have code in the place of it."""
    code = f"{run / 'evil.py'}:go"
    folder = {"model": "m", "dataset": "d", "task": "causal-lm"}
    return (
        {"function": DIGITS, "args": {}, "resolved": {"function": code}},
        {"function": DIGITS, "args": {}, "resolved": {"function": code, "run": str(run)}},
        folder | {"resolved": {"function": code}},
        {"function": DIGITS, "resolved": {"args": code, "function": code}},
    )


@pytest.mark.parametrize("number", range(4))
def test_harmless_is_the_function_that_is_called_not_the_one_that_is_named(evil, number):
    how = {"input": disguises(evil)[number]}
    for call in (lambda: make_inputs(how, evil), lambda: make_inputs(how), lambda: show_of(how, evil)):
        with refused((UntrustedError, MismatchError), evil / "evil.py"):
            call()
    assert not (evil / "gotcha").exists()


def test_a_harmless_function_does_not_make_the_run_importable(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with refused(MismatchError, tmp_path / "network.safetensors"):
        make_inputs({"input": {"function": DIGITS, "args": {"folder": "{run}"}, "resolved": {}}}, tmp_path)
    assert str(tmp_path) not in sys.path


@pytest.mark.parametrize("number", range(4))
def test_no_command_runs_code_in_the_place_of_a_harmless_function(evil, call, tmp_path, number):
    asked = disguises(evil)[number]
    edit_manifest(evil, lambda manifest: manifest["how"].update(input=asked))
    held = json.loads((evil / "request.json").read_text())
    (evil / "request.json").write_text(json.dumps(held | {"input": asked}))
    for command in ("score {}", "explain {} --row 1 --exact", "check {} --repair"):
        if command.startswith("check"):
            next((evil / "shards").iterdir()).unlink()
        code, _, err = call(command.format(evil))
        assert code == 2
        expect_mentions(err, [evil / "evil.py"])
    subject = Subject(evil, with_model=True)
    subject.warm_up()
    assert subject.show is None
    expect_mentions(subject.trouble, [evil / "evil.py"])
    with pytest.raises((UntrustedError, MismatchError)):
        _ = subject.inputs
    assert not (evil / "gotcha").exists()


@pytest.mark.parametrize("number", range(4))
def test_a_report_runs_no_code_in_the_place_of_a_harmless_function(evil, tmp_path, number):
    edit_manifest(evil, lambda manifest: manifest["how"].update(input=disguises(evil)[number]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EigentraceWarning)  # says that the examples are not shown
        with contextlib.suppress(MismatchError):
            write_report(evil, tmp_path / "page.html")
    assert not (evil / "gotcha").exists()


def test_a_configuration_that_cannot_be_written_only_forgets(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "file"))
    asked = {"function": "json:loads", "args": {}}
    trust_run(asked, tmp_path)
    assert not is_trusted(asked, tmp_path)


def test_settings_in_a_file_that_the_user_passes_are_trusted(tmp_path, monkeypatch, call):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "inputs.py").write_text(INPUTS)
    (tmp_path / "run.toml").write_text('[input]\nfunction = "inputs.py:made"\n[fit]\nsteps = 16\nkeep = 2\n')
    assert call("fit run --config run.toml")[0] == 0
    assert call("score run")[0] == 0


def tiny_bert(folder):
    config = transformers.BertConfig(
        vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
    )
    model = transformers.BertForSequenceClassification(config)
    model.save_pretrained(folder)
    return model


class Pickled:
    def __reduce__(self):
        return (Path.touch, (Path("gotcha"),))


def test_pickled_weights_of_a_model_folder_are_not_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny_bert(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    torch.save({"weights": Pickled()}, tmp_path / "model" / "pytorch_model.bin")
    torch.save(Pickled(), tmp_path / "model" / "training_args.bin")
    with refused(InputError, tmp_path / "model", "pytorch_model.bin", "safe_serialization"):
        load_model(tmp_path / "model", "text-classification")
    assert not (tmp_path / "gotcha").exists()


def test_code_in_a_model_folder_is_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny_bert(tmp_path / "model")
    torch.save(Pickled(), tmp_path / "model" / "training_args.bin")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {
        "AutoConfig": "mine.Config", "AutoModelForSequenceClassification": "mine.Model"}}  # fmt: skip
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    (tmp_path / "model" / "mine.py").write_text("import pathlib\npathlib.Path('gotcha').touch()\n")
    with refused(InputError, tmp_path / "model"):
        load_model(tmp_path / "model", "text-classification")
    assert not (tmp_path / "gotcha").exists()


KERNELS = (
    {"attn_implementation": "org/kernel"},
    {"_attn_implementation": "org/kernel@v1:run"},
    {"_attn_implementation_internal": "kernels-community/flash-attn2"},
    {"attn_implementation": {"": "eager", "text_config": "org/kernel"}},
    {"attn_implementation": {"text_config": {"": "org/kernel"}}},
    {"text_config": {"attn_implementation": "org/kernel"}},
    {"parts": [{"decoder": {"_attn_implementation": "paged|org/kernel"}}]},
    {"attn_implementation": "flash_attention_2"},
    {"attn_implementation": ["org/kernel"]},
    {"attribute_map": {"mine": "_attn_implementation"}, "mine": "org/kernel"},
)


def with_config(folder, more):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | more))


@pytest.mark.parametrize("more", KERNELS, ids=str)
def test_a_kernel_that_a_model_folder_names_is_not_fetched(tmp_path, monkeypatch, more):
    tiny_bert(tmp_path / "model")
    with_config(tmp_path / "model", more)
    loader = transformers.AutoModelForSequenceClassification
    monkeypatch.setattr(loader, "from_pretrained", lambda *_, **__: pytest.fail("transformers was asked"))
    key = next(key for key in ("attribute_map", "_attn_implementation_internal", "_attn_implementation",
                               "attn_implementation") if f"'{key}'" in str(more))  # fmt: skip
    with refused(InputError, tmp_path / "model" / "config.json", key, "sdpa"):
        load_model(tmp_path / "model", "text-classification")


QUANTIZED = (
    {"quantization_config": {"quant_method": "mxfp4"}},
    {"quantization_config": {"quant_method": "gptq", "bits": 4}},
    {"quantization_config": {}},
    {"text_config": {"quantization_config": {"load_in_4bit": True}}},
    {"compression_config": {"quant_method": "compressed-tensors"}},
)


@pytest.mark.parametrize("more", QUANTIZED, ids=str)
def test_a_package_that_a_model_folder_names_for_its_weights_is_not_imported(tmp_path, monkeypatch, more):
    tiny_bert(tmp_path / "model")
    with_config(tmp_path / "model", more)
    loader = transformers.AutoModelForSequenceClassification
    monkeypatch.setattr(loader, "from_pretrained", lambda *_, **__: pytest.fail("transformers was asked"))
    key = next(key for key in ("quantization_config", "compression_config") if key in str(more))
    with refused(InputError, tmp_path / "model" / "config.json", key):
        load_model(tmp_path / "model", "text-classification")


def test_no_quantization_is_no_package(tmp_path):
    tiny_bert(tmp_path / "model")
    plain = load_model(tmp_path / "model", "text-classification").state_dict()
    with_config(tmp_path / "model", {"quantization_config": None})
    found = load_model(tmp_path / "model", "text-classification").state_dict()
    assert found.keys() == plain.keys()
    assert all(torch.equal(found[name], plain[name]) for name in plain)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "generation_config.json", "parts/tokenizer.json"])
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_model_folder_with_a_pipe_or_a_device_is_refused_without_waiting(tmp_path, name, kind):
    tiny_bert(tmp_path / "model")
    file = tmp_path / "model" / name
    file.parent.mkdir(exist_ok=True)
    file.unlink(missing_ok=True)
    {"pipe": os.mkfifo, "device": lambda path: path.symlink_to("/dev/zero")}[kind](file)
    for act in (lambda: load_model(tmp_path / "model", "text-classification"), lambda: check_files(tmp_path / "model")):
        with refused(MismatchError, file):
            act()
    assert stored_class_names(tmp_path / "model") is None


@pytest.mark.parametrize("shard", ["../secret.safetensors", "/dev/zero", "a/b.safetensors"])
def test_an_index_names_files_of_its_folder_only(tmp_path, shard):
    tiny_bert(tmp_path / "model")
    index = tmp_path / "model" / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": {"a": shard}}))
    with refused(InputError, index, shard):
        load_model(tmp_path / "model", "text-classification")


@pytest.mark.parametrize("value", ["eager", "sdpa", None, {"": "sdpa"}])
def test_attention_of_transformers_can_be_chosen(tmp_path, value):
    tiny_bert(tmp_path / "model")
    with_config(tmp_path / "model", {"attn_implementation": value, "_attn_implementation_autoset": True})
    model = load_model(tmp_path / "model", "text-classification")
    assert type(model).__name__ == "BertForSequenceClassification"


@pytest.mark.parametrize("text", ["[" * 100_000, "{", "\xff"])
def test_a_config_that_cannot_be_read_is_named(tmp_path, text):
    tiny_bert(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(text, encoding="latin-1")
    with refused(InputError, tmp_path / "model" / "config.json"):
        load_model(tmp_path / "model", "text-classification")
