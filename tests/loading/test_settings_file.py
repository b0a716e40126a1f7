"""Settings from a file and the command line, as one record that can be stored and repeated."""

import json
import sys
from pathlib import Path

import pytest

import eigentrace as et
from eigentrace.errors import InputError
from eigentrace.loading import from_config, make_inputs
from eigentrace.loading.settings_file import _KEYS
from eigentrace.methods.by_name import make_method, method_names, settable
from eigentrace.projection.engine import Compute
from tests.helpers import make_folders
from tests.helpers.expecting import refused
from tests.helpers.small import table

FILE = """
[input]
model = "models/bert"
dataset = "data/train.csv"
task = "text-classification"
text = "body"
columns = ["year"]

[fit]
steps = 40
keep = 10
tail = "none"
sample = "all"
params = "classifier.*"

[score]
shard_rows = 1000
precision = "bf16"
"""
FUNCTION = """
import torch
import eigentrace as et

def made(size):
    torch.manual_seed(0)
    return et.classification(torch.nn.Linear(3, 2)), [(torch.randn(size, 3), torch.randint(0, 2, (size,)))]
"""


@pytest.fixture(autouse=True)
def _own_import_path(monkeypatch):
    monkeypatch.setattr(sys, "path", sys.path.copy())


@pytest.fixture
def path(tmp_path):
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "run.toml").write_text(FILE)
    return tmp_path / "conf" / "run.toml"


def test_sections_come_as_what_takes_them(path):
    how = from_config(path)
    assert how["fit"] == {"steps": 40, "keep": 10, "tail": None, "sample": None}
    assert et.Arnoldi(**how["fit"]).tail is None
    assert how["score"] == {"shard_rows": 1000, "precision": "bf16"}
    assert how["input"]["params"] == "classifier.*"
    assert how["input"]["columns"] == ["year"]


def test_paths_as_given_and_in_full(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    how = from_config(path, {"input": {"dataset": Path("other.csv")}})
    assert how["input"]["model"] == "models/bert"
    assert how["input"]["dataset"] == "other.csv"
    assert how["input"]["resolved"] == {
        "model": str(tmp_path / "conf" / "models" / "bert"),
        "dataset": str(tmp_path / "other.csv"),
    }


def test_the_command_line_is_on_top(path):
    flags = {"input": {"text": "title", "label": None}, "fit": {"steps": 7, "keep": None, "l2": 0.1}}
    how = from_config(path, flags)
    assert how["fit"]["steps"] == 7
    assert how["fit"]["keep"] == 10
    assert how["input"]["text"] == "title"
    assert "label" not in how["input"]
    assert how["input"]["l2"] == 0.1


def test_the_record_survives_json(path):
    how = from_config(path)
    assert json.loads(json.dumps(how)) == how


def test_without_a_file():
    how = from_config(None, {"input": {"function": "mine:made", "args": {"size": 3}}})
    assert how == {
        "input": {"function": "mine:made", "args": {"size": 3}, "resolved": {}},
        "fit": {},
        "score": {},
    }


@pytest.mark.parametrize("moved", [False, True], ids=["from another directory", "after the folder moved"])
def test_inputs_can_be_made_again(moved, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(FUNCTION)
    monkeypatch.chdir(tmp_path)
    how = from_config(None, {"input": {"function": "mine.py:made", "args": {"size": 6}}})
    stored = json.loads(json.dumps(how))
    assert len(make_inputs(stored, trust=True).data) == 6
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    if moved:
        (tmp_path / "mine.py").rename(elsewhere / "mine.py")
    monkeypatch.chdir(elsewhere)
    assert len(make_inputs(stored, trust=True).data) == 6


def test_every_setting_of_the_fit_is_one_of_the_method():
    parts = {f"basis.{name}" for name in et.Basis.__dataclass_fields__}
    assert set(settable()) == set(et.Arnoldi.__dataclass_fields__) - {"basis"} | parts
    assert {name for name in method_names() if not settable(name)} == {"Loss", "Support"}
    assert set(_KEYS["score"]) - {"shard_rows", "shard_bytes", "shard_seconds", "features"} == set(
        Compute.__dataclass_fields__
    )


def test_settings_of_a_setting_have_a_section_of_their_own(tmp_path):
    file = tmp_path / "settings.toml"
    file.write_text("[input]\nfunction = 'a:b'\n[fit]\nkeep = 5\n[fit.basis]\nmax_vectors = 30\nrestart_keep = 9\n")
    given = {"fit": {"basis.dtype": "bf16", "basis.restart_keep": 8}}
    made = make_method(from_config(file, given)["fit"])
    assert made == et.Arnoldi(keep=5, basis=et.Basis(dtype="bf16", max_vectors=30, restart_keep=8))
    made = make_method({"method": "InverseArnoldi", "solver.repeats": 2})
    assert made == et.InverseArnoldi(solver=et.Lissa(depth=50, repeats=2))


def test_a_penalty_may_have_one_number_for_each_pattern_of_names(tmp_path):
    folder, rows = tmp_path / "model", tmp_path / "rows.csv"
    make_folders.bert(folder)
    rows.write_text("text,label\n" + "".join(f"a word {n},{n % 2}\n" for n in range(6)))
    file = tmp_path / "settings.toml"
    file.write_text(
        f"[input]\nmodel = '{folder}'\ndataset = '{rows}'\ntask = 'text-classification'\n"
        "[fit.l2]\n'*.weight' = 0.5\n'*.bias' = 0.0\n'*' = 0.25\n"
    )
    how = from_config(file)
    assert how["input"]["l2"] == {"*.weight": 0.5, "*.bias": 0.0, "*": 0.25}
    task = make_inputs(json.loads(json.dumps(how))).task
    assert {name.rpartition(".")[2]: value for name, value in task.l2.items()} == {"weight": 0.5, "bias": 0.0}


WRONG = {
    "part of a setting": ("[fit.basis]\ndtyp = 'bf16'", ("'basis.dtyp'", "[fit]", "basis.dtype")),
    "misspelt": ("[fit]\nstep = 3", ("'step'", "[fit]", "steps")),
    "elsewhere": ("[fit]\nshard_rows = 3", ("'shard_rows'", "[fit]", "[score]")),
    "a section": ("[fits]\nsteps = 3", ("[fits]", "fit")),
    "no section": ("fit = 3", ("fit = 3", "[fit]")),
    "no input": ("[fit]\nsteps = 3", ("[input]", "model, dataset, task")),
    "half an input": ("[input]\nmodel = 'a'\ntask = 'seq2seq'", ("[input]", "dataset.")),
    "two inputs": ("[input]\nfunction = 'a:b'\nmodel = 'c'", ("a:b", "model")),
    "parameters of a function": (
        "[input]\nfunction = 'a:b'\n[fit]\nparams = 'all'",
        ("a:b", "params", "[input.args]"),
    ),
    "arguments of nothing": (f"{FILE.replace('[fit]', '[input.args]')}", ("input.args", "function")),
    "a date": ("[input]\nfunction = 'a:b'\nargs = {day = 2020-01-01}", ("input.args.day", "datetime.date(2020, 1, 1)")),
    "a list of dates": ("[input]\nfunction = 'a:b'\nargs = {days = [1, 2020-01-01]}", ("input.args.days[1]",)),
    "no TOML": ("[input", ("run.toml", "TOML")),
    "no end of lists": (f"[input.args]\na = {'[' * 100_000}", ("run.toml",)),
    "a zero byte": ('[input]\nmodel = "a\\u0000b"', ("run.toml", "input.model")),
    "too much": (f"#{' ' * (1 << 24)}", ("run.toml", f"{1 << 24:,}")),
}


@pytest.mark.parametrize(("text", "mentions"), table(WRONG))
def test_what_is_wrong_is_said(text, mentions, tmp_path):
    (tmp_path / "run.toml").write_text(text)
    with refused(InputError, *mentions):
        from_config(tmp_path / "run.toml")


def test_a_file_that_is_not_there(tmp_path):
    with refused(InputError, tmp_path / "none.toml"):
        from_config(tmp_path / "none.toml")
    with refused(InputError, tmp_path):
        from_config(tmp_path)


def test_an_unknown_flag(path):
    with refused(InputError, "'sede'", "[fit]", "seed"):
        from_config(path, {"fit": {"sede": 1}})
