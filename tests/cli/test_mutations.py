"""Every command on damaged files ends with an answer or with one line that says what is wrong, never a stack trace."""

import contextlib
import io
import json
import shlex
import shutil
import sys

import pyarrow as pa
import pyarrow.csv
import pytest
import torch

import eigentrace as et
from eigentrace import cli
from eigentrace.cleaning.decisions import Decisions
from eigentrace.cli import request
from eigentrace.loading import from_config
from eigentrace.methods.by_name import make_method
from tests.helpers.mutating import mutate, outcomes
from tests.helpers.runs import Points, data, task

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
SIZE = 40
METHOD = et.Arnoldi(steps=10, keep=4)
COMMANDS = (
    "info {run} --texts",
    "info {run} --json",
    "check {run}",
    "explain {run} --row 3 -k 3 --normalize gradient",
    "explain {run} --id n5 -k 3 --json",
    "clean {run} --drop 10% --decisions {new}/d.csv",
    "clean {run} --drop 3 --out {new}/kept.csv",
    "report {run} --out {new}/page.html",
)


def called(line):
    """Call a command as the installed script does; return its exit code, its output, and what is wrong with them."""
    out, err, before = io.StringIO(), io.StringIO(), sys.argv
    sys.argv = ["eigentrace", *shlex.split(line)]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            cli.main()
        return None, "", f"{line}: it did not exit"
    except SystemExit as end:
        code = end.code
    except BaseException as error:
        return 1, "", f"{line}: {type(error).__name__}: {error}"[:200]
    finally:
        sys.argv = before
    ends = (0, 1, 2) if line.startswith("check") else (0, 2)
    if code not in ends or (code == 2 and not err.getvalue().startswith("eigentrace: ")):
        return code, out.getvalue(), f"{line}: {code}: {err.getvalue()}"[:200]
    return code, out.getvalue(), None


def make_run(folder):
    """A run of texts as the command line writes it, with its dataset and the names of its model's classes."""
    how = {"input": {"task": "text-classification", "id": "id", "resolved": {}}, "fit": {}, "score": {}}
    how["classes"] = ["cat", "dog", "emu"]
    labels = [how["classes"][Points(SIZE)[row][1]] for row in range(SIZE)]
    table = {"id": [f"n{row}" for row in range(SIZE)], "text": [f"text, {row}" for row in range(SIZE)], "label": labels}
    pa.csv.write_csv(pa.table(table), folder / "train.csv")
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps({"id2label": dict(enumerate(how["classes"]))}))
    for name, file in {"dataset": "train.csv", "model": "model"}.items():
        how["input"] |= {name: file}
        how["input"]["resolved"][name] = str(folder / file)
    columns = {"source": ["a", "b"] * (SIZE // 2)}
    examples = data(SIZE, ids=table["id"])
    run = et.score(METHOD.fit(task(), data(SIZE)), examples, folder / "run", shard_rows=16, columns=columns, how=how)
    (run.path / "request.json").write_text(json.dumps(how))


def files_of(folder):
    return sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file() and path.stat().st_size)


def test_commands_on_damaged_runs(tmp_path):
    torch.set_num_threads(1)
    here, good = tmp_path / "here", tmp_path / "good"
    here.mkdir()
    make_run(here)
    shutil.copytree(here, good)
    names = [name for name in files_of(good) if name.name != "lock"]

    def attempt(rng, does_damage=True):
        shutil.rmtree(here)
        shutil.copytree(good, here)
        (here / "new").mkdir()
        name = rng.choice(names)
        how = mutate(here / name, rng) if does_damage else ""
        wrong = []
        for command in COMMANDS:
            code, out, found = called(command.format(run=here / "run", new=here / "new"))
            if found is None and code == 0 and "--json" in command:
                json.loads(out, parse_constant=wrong.append)
            wrong += [] if found is None and (does_damage or code == 0) else [found or f"{command}: {code}"]
        return f"{name}, {how}: {wrong}" if wrong else None

    assert outcomes(1, lambda rng: attempt(rng, does_damage=False)) == {}
    assert outcomes(150, attempt) == {}


SETTINGS = """
[input]
model = "model"
dataset = "train.csv"
task = "text-classification"
max_length = 128
columns = ["a", "b"]

[fit]
method = "Arnoldi"
steps = 30
keep = 10
sample = "all"
params = ["*.weight"]
l2 = 1e-3

[fit.basis]
dtype = "bf16"

[score]
shard_rows = 100
features = "fp16"
compile = false
"""
VALUES = (
    '""', '"x"', "-1", "0", "9" * 40, "1e400", "nan", "inf", "true", "[]", "[[[[1]]]]", "{}", "{a = 1}", "1979-05-27",
    "07:32:00", '"/dev/zero"', '"\\u0000"', "[" * 3000 + "]" * 3000, "x = 1", "[input]", '"none"', '["\\u0000"]',
)  # fmt: skip


def test_damaged_settings(tmp_path):
    (tmp_path / "good.toml").write_text(SETTINGS)
    lines = SETTINGS.splitlines()
    keys = [number for number, line in enumerate(lines) if " = " in line]

    def attempt(rng):
        file = tmp_path / "settings.toml"
        file.write_text(SETTINGS)
        if rng.random() < 0.5:
            mutate(file, rng)
        else:
            changed, number = list(lines), rng.choice(keys)
            changed[number] = f"{changed[number].split(' = ')[0]} = {rng.choice(VALUES)}"
            file.write_text("\n".join(changed))
        make_method(from_config(file)["fit"])

    make_method(from_config(tmp_path / "good.toml")["fit"])
    assert outcomes(600, attempt) == {}


def make_decisions(folder):
    make_run(folder)
    run = et.open_run(folder / "run")
    found = et.clean(run, drop="10%")
    found.relabel([int(row) for row in (found.suggested >= 0).nonzero()[0][:3]])
    found.write(folder / "d.parquet")
    found.write(folder / "d.csv")
    (folder / "report.csv").write_text("row,id,decision,new_label\n3,n3,drop,\n5,n5,relabel,2\n")
    return ["d.parquet", "d.csv", "report.csv"]


def test_damaged_decisions(tmp_path):
    names = make_decisions(tmp_path)
    good = {name: (tmp_path / name).read_bytes() for name in names}
    assert request.unscored(tmp_path / "run") is None

    def attempt(rng, does_damage=True):
        name = rng.choice(names)
        file = tmp_path / f"bad.{name.split('.')[1]}"
        file.write_bytes(good[name])
        how = mutate(file, rng) if does_damage else ""
        code, _, wrong = called(f"clean {tmp_path / 'run'} --from {file}")
        if wrong is None and (does_damage or code == 0):
            if name != "report.csv":
                str(Decisions.read(file))
            return None
        return f"{name}, {how}: {wrong or code}"

    assert outcomes(9, lambda rng: attempt(rng, does_damage=False)) == {}
    assert outcomes(450, attempt) == {}
