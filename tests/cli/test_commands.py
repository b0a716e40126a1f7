"""The commands, through the entry point of the installed script: what they answer, refuse, and leave on the disk."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import torch

from eigentrace.cleaning.decisions import Decisions
from eigentrace.cli import example_texts
from tests.helpers import make_folders
from tests.helpers.expecting import expect_mentions
from tests.helpers.worked import build, check_cleaned, commands, shape

# The model ends its own process in the pass that it is told.
FUNCTION = """
    import os
    import torch
    from torch import nn
    import eigentrace as et

    class Points(torch.utils.data.Dataset):
        def __init__(self, rows):
            self.rows = rows

        def __len__(self):
            return self.rows

        def __getitem__(self, row):
            x = torch.randn(5, generator=torch.Generator().manual_seed(row))
            return x, (int(x[:3].argmax()) + (row % 7 == 0)) % 3

    class Net(nn.Sequential):
        left = int(os.environ.get("ENDS_AT", 0))

        def forward(self, x):
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), int(os.environ["ENDS_BY"]))
            return super().forward(x)

    def make(rows=40):
        torch.manual_seed(0)
        net = Net(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
        return et.classification(net), et.Data(Points(rows), batch_size=8)

    def number():
        return 3
"""


@pytest.fixture
def answer(call):
    """Call with --json; return the exit code, and what the standard output alone says."""

    def answered(line):
        code, out, _ = call(f"{line} --json")
        return code, json.loads(out)

    return answered


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(textwrap.dedent(FUNCTION))
    return tmp_path


@pytest.fixture
def scored(place, call):
    assert call("fit runs/x --input mine.py:make --steps 20 --keep 6")[0] == 0
    assert call("score runs/x --shard-rows 16")[0] == 0
    return place / "runs" / "x"


def files(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != "lock"}


@pytest.mark.filterwarnings("ignore:The damping of the refined scores is a guess")
@pytest.mark.filterwarnings("ignore:The last round still changed")
def test_explanations_are_refined_on_demand(scored, answer, call):
    code, found = answer("explain runs/x --row 3 -k 4 --refine 12")
    assert (code, found["how"], found["refine"]) == (0, "exact", 12)
    plain = answer("explain runs/x --row 3 -k 4 --exact")[1]
    assert [one["score"] for one in plain["answers"]] != [one["score"] for one in found["answers"]]
    assert "refined" in call("explain runs/x --row 3 --refine 12")[1]
    code, _, err = call("explain runs/x --row 3 --training runs/x")
    assert code == 2
    expect_mentions(err, ["--refine"])
    code, _, err = call("explain runs/x --row 3 --refine 2 --training nowhere")
    assert code == 2
    expect_mentions(err, ["nowhere", "optimizer.pt"])


def test_an_estimate_writes_nothing_and_fits_nothing(place, answer, call):
    code, found = answer("fit runs/x --input mine.py:make --steps 20 --keep 6 --estimate")
    assert (code, (place / "runs").exists()) == (0, False)
    assert found["num_products"] > 20
    assert found["seconds"] >= 20 * found["product_seconds"] > 0
    assert found["saved_bytes"] == 6 * 39 * 4
    code, _, err = call("fit runs/x --input mine.py:make --method TracIn --estimate")
    assert code == 2
    expect_mentions(err, ["TracIn", "Arnoldi"])


def test_a_classifier_from_folder_to_cleaned_csv(place, call, answer):
    wrong = build(place)
    for command, shown in commands():
        code, out, err = call(command.removeprefix("eigentrace "))
        assert code == 0, err
        assert shape(out) == [line for line in shape(shown) if not line.startswith("# examples;")]
    check_cleaned(place, wrong)
    assert answer("info runs/animals")[1]["classes"] == ["cat", "dog", "bird"]
    (place / "new.csv").write_text("text,label\nthe red cat ran,cat\nthe big dog sat,bird\n")
    by_row, by_id = (call(f"explain runs/animals {name} -k 2")[1] for name in ("--row 7", "--id s007"))
    assert by_row == by_id
    check_texts(place, call, answer)
    code, found = answer("explain runs/animals --queries new.csv -k 2")
    assert code == 0
    assert found["how"] == "kept directions only"
    assert [(a["query"], a["side"], a["rank"]) for a in found["answers"]][:3] == [
        (0, "proponent", 1), (0, "proponent", 2), (1, "proponent", 1),
    ]  # fmt: skip
    (place / "short.csv").write_text("text\nthe red cat ran\n")
    expect_mentions(call("explain runs/animals --queries short.csv")[2], ["short.csv", "'label'"])
    refusal = call("clean runs/animals --drop 5% --decisions d.parquet --out kept.parquet")[2]
    expect_mentions(refusal, ["kept.parquet", "csv"])
    assert not (place / "d.parquet").exists()
    if not torch.cuda.is_available():
        expect_mentions(call("score runs/animals --device cuda")[2], ["cuda", "--device cpu"])


def check_texts(place, call, answer):
    """Texts stand beside rows unless they are not wanted, or are not those that were scored."""
    texts = pa.csv.read_csv(place / "train.csv").column("text").to_pylist()
    found = answer("explain runs/animals --row 7 -k 2")[1]["answers"]
    assert [one["text"] for one in found] == [texts[one["row"]] for one in found]
    top = answer("info runs/animals")[1]["self_influence"]
    assert top["top_texts"] == [texts[row] for row in top["top_rows"]]
    assert texts[7] not in call("explain runs/animals --row 7 --no-texts")[1]
    expect_mentions(call("explain runs/animals --id s007 --id nobody")[2], ["'nobody'"])
    kept = (place / "train.csv").read_text()
    (place / "train.csv").write_text(kept.replace(texts[0], "another text"))
    for command in ("info runs/animals", "explain runs/animals --row 7"):
        code, out, _ = call(command)
        assert code == 0
        assert texts[top["top_rows"][0]] not in out
        expect_mentions(out, ["train.csv", "changed"])
    (place / "train.csv").write_text(kept)


def test_texts_of_what_is_large_or_no_file_are_not_read_unasked(tmp_path, monkeypatch):
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in ("a.csv", "b.csv", "c.csv"):
        (folder / name).write_bytes(bytes(10))
    os.mkfifo(tmp_path / "pipe.csv")
    assert example_texts._is_small(folder)
    assert example_texts._is_small(folder / "a.csv")
    assert example_texts._is_small(folder / "*.csv")
    assert example_texts._is_small(folder / "nothing.csv")  # told when it is opened
    assert not example_texts._is_small(tmp_path / "*.csv")
    assert not example_texts._is_small(tmp_path / "pipe.csv")
    monkeypatch.setattr(example_texts, "_MOST_BYTES", 29)
    assert not example_texts._is_small(folder)
    assert not example_texts._is_small(folder / "*.csv")
    monkeypatch.setattr(example_texts, "_MOST_BYTES", 30)
    monkeypatch.setattr(example_texts, "_MOST_FILES", 2)
    assert not example_texts._is_small(folder)
    assert not example_texts._is_small(tmp_path / "**" / "*.csv")


@pytest.mark.filterwarnings("default:The examples cannot be shown")
def test_a_dataset_that_was_moved_with_its_run_is_cleaned(place, call, monkeypatch):
    (place / "old").mkdir()
    build(place / "old")
    monkeypatch.chdir(place / "old")
    for command in ("fit run --model model --data train.csv --task text-classification", "score run"):
        assert call(command)[0] == 0
    monkeypatch.chdir((place / "old").rename(place / "new"))
    expect_mentions(call("clean run --drop 3 --out kept.csv")[1], [157, "kept.csv"])
    lines = (place / "new" / "train.csv").read_bytes().splitlines(keepends=True)
    assert set((place / "new" / "kept.csv").read_bytes().splitlines(keepends=True)) < set(lines)
    monkeypatch.chdir(place)
    for command, ends in {"clean new/run --drop 3 --out kept.csv": 2, "report new/run": 0}.items():
        code, _, err = call(command)
        assert code == ends, command
        expect_mentions(err, [place / "old" / "train.csv"])


def test_every_answer_is_json_alone(scored, answer, call):
    code, fitted = answer("fit runs/x")
    assert (code, fitted["run"], fitted["num_train"], fitted["method"]["keep"]) == (0, "runs/x", 40, 6)
    code, told = answer("info runs/x")
    assert code == 0
    assert told == answer("score runs/x")[1]
    assert (told["rows"], told["missing"], told["shards"]) == (40, 0, 3)
    assert (told["features"], told["classes"]) == ({"count": 6, "type": "fp32", "hold": "kept directions"}, None)
    assert len(told["self_influence"]["top_rows"]) == 10
    code, found = answer("explain runs/x --row 7 --row 3 -k 2")
    assert (code, found["rows"], found["unit"], len(found["answers"])) == (0, [7, 3], "nats", 8)
    code, cleaned = answer("clean runs/x --drop 3 --by loss")
    assert (code, cleaned["dropped"], cleaned["kept"], cleaned["by"], cleaned["out"]) == (0, 3, 37, "loss", None)
    losses = pq.read_table(scored / "table.parquet")["loss"].to_pylist()
    assert cleaned["dropped_rows"] == sorted(range(40), key=lambda row: -losses[row])[:3]
    assert answer("check runs/x") == (0, {"run": "runs/x", "good": True, "rows": 40, "missing": 0, "faults": []})


def test_progress_goes_to_standard_error(place, call, monkeypatch):
    monkeypatch.setattr("eigentrace.progress._LINE_AFTER", 0)
    code, out, err = call("fit runs/x --input mine.py:make --steps 20 --keep 6 --json")
    assert (code, json.loads(out)["num_products"]) == (0, 20)
    assert "Krylov iteration: 20 of 20 (100%)" in err


def test_fit_reports_its_sample_and_its_training_examples(place, call, answer):
    fit = "fit runs/x --input mine.py:make --steps 8 --keep 3"
    assert answer(f"{fit} --sample 12")[1]["num_sampled"] == 12
    assert answer("fit runs/x")[1]["num_train"] == 40
    expect_mentions(call("fit runs/x")[1], ["12 of 40"])
    for name, options in {"all": "--sample all", "default": ""}.items():
        fitted = answer(f"fit runs/{name} --input mine.py:make --steps 8 --keep 3 {options}")[1]
        assert (fitted["num_sampled"], fitted["num_train"]) == (40, 40)
    assert "num_sampled" not in answer("fit runs/loss --input mine.py:make --method Loss")[1]


@pytest.mark.filterwarnings("default::eigentrace.errors.EigentraceWarning")
def test_repeated_ids_and_empty_texts_are_counted_at_fit(place, call, answer):
    make_folders.bert(place / "model")
    rows = [("a", "cat", "the red cat ran"), ("b", "dog", " "), ("a", "dog", "the dog sat"), ("c", "cat", "")]
    lines = ["id,label,text", *(f'{name},{label},"{text}"' for name, label, text in rows * 3)]
    (place / "train.csv").write_text("\n".join(lines) + "\n")
    fit = "--model model --data train.csv --task text-classification --method RandProj --keep 2"
    code, out, err = call(f"fit runs/x {fit} --id id --json")
    assert code == 0
    assert json.loads(out)["num_train"] == 12
    expect_mentions(err, ["9 of 12 examples", "row 2 has the id 'a' of row 0", "row 4 has the id 'a' of row 0"])
    expect_mentions(err, ["6 of 12 rows", "train.csv", "'text'", "row 1, 3, 5"])
    assert "warning" not in call("score runs/x")[2]
    (place / "train.csv").write_text("id,label,text\n" + "".join(f"{n},cat,a cat\n" for n in range(12)))
    assert "warning" not in call(f"fit runs/y {fit} --id id")[2]


def test_numbers_that_json_lacks_become_null(capsys):
    from eigentrace.cli.commands import _answer

    _answer({"a": [float("nan"), 1.5], "b": {"c": float("inf")}}, "", as_json=True)
    assert json.loads(capsys.readouterr().out) == {"a": [None, 1.5], "b": {"c": None}}


def test_explaining_by_row_and_exactly(scored, call):
    code, out, _ = call("explain runs/x --row 7 -k 2 --out answers.csv")
    assert code == 0
    expect_mentions(out, ["--exact"])
    told = shape(out)
    begin = told.index("Proponents of row # (label #, prediction #)")
    assert told[begin + 1] == "row score label prediction"
    assert out.endswith(" answers.csv\n")
    held = pa.csv.read_csv("answers.csv")
    assert held.column_names == ["query", "side", "rank", "row", "score", "label", "prediction"]
    assert "(exact)" in call("explain runs/x --row 7 -k 2 --exact")[1]
    expect_mentions(call("explain runs/x --row 7 -k 2 --exact --shortlist 8")[1], ["exact", "shortlist", 8])
    told = json.loads(call("explain runs/x --row 7 -k 2 --exact --shortlist 8 --json")[1])
    assert (told["how"], told["shortlist"]) == ("rescored", 8)
    expect_mentions(call("explain runs/x --row 7 -k 2 --normalize metric")[1], ["cosines"])
    assert call("explain runs/x --row 7 -k 50 --same-label")[0] == 0
    for words, mentions in {
        "": ("--row", "--queries"),
        "--row 1 --queries new.csv": ("--row", "--queries"),
        "--row 40": (40, 0, 39),
        "--row 1 --normalize loudly": ("--normalize", "gradient", "metric", "'loudly'"),
        "--row 1 --exclude others": ("--exclude", "self", "duplicates", "none", "'others'"),
        "--row 1 --out answers.csv": ("answers.csv",),
        "--row 1 --out answers.txt": ("answers.txt", ".csv", ".parquet"),
        "--queries new.csv": ("open_run(path, task, data).explain(queries)",),
    }.items():
        code, out, err = call(f"explain runs/x {words}")
        assert (code, out) == (2, "")
        expect_mentions(err, mentions)


def test_cleaning_a_function_s_data(scored, call):
    code, out, _ = call("clean runs/x --drop 10% --per-class --decisions d.parquet")
    assert code == 0
    expect_mentions(out.splitlines()[1], ["d.parquet"])
    assert pq.read_table("d.parquet").num_rows == 40
    assert call("clean runs/x --drop 10% --per-class --decisions d.csv")[0] == 0
    assert Decisions.read("d.csv").dropped.tolist() == Decisions.read("d.parquet").dropped.tolist()
    assert pa.csv.read_csv("d.csv").column_names == pq.read_table("d.parquet").column_names
    before = files(place := scored.parent.parent)
    expect_mentions(call("clean runs/x --above 5")[1], ["--out", "--decisions"])
    assert files(place) == before
    for words, mentions in {
        "": ("drop", "keep", "above", "below"),
        "--drop 5% --keep 3": ("['drop', 'keep']",),
        "--drop many": ("drop", "'many'"),
        "--drop 5% --by text": ("'text'",),
        "--drop 5% --out kept.csv": ("--out", "runs/x", "mine.py:make", "--decisions", "eigentrace.export"),
        "--drop 5% --decisions d.parquet": ("d.parquet",),
        "--drop 5% --decisions d.xlsx": ("'d.xlsx'", ".parquet", ".csv"),
    }.items():
        code, out, err = call(f"clean runs/x {words}")
        assert (code, out) == (2, "")
        expect_mentions(err, mentions)


def test_damage_is_found_and_mended(scored, call, answer):
    whole = files(scored / "shards")
    damaged = scored / "shards" / "000000000016.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    code, out, _ = call("check runs/x")
    assert code == 1
    expect_mentions(out, [16, 31])
    assert out.endswith(" eigentrace check runs/x --repair\n")
    code, told = answer("check runs/x")
    assert (code, told["good"], told["missing"], len(told["faults"])) == (1, False, 16, 1)
    code, told = answer("check runs/x --repair")
    assert (code, told["good"], told["missing"], len(told["repaired"])) == (0, True, 0, 1)
    assert files(scored / "shards").keys() == whole.keys()
    (scored / "shards.json").write_text("{")
    code, out, _ = call("check runs/x")
    assert code == 1
    expect_mentions(out, ["shards.json"])
    assert call("check runs/x --repair")[0] == 0


def test_what_is_refused_leaves_nothing_behind(place, call):
    (place / "thesis").mkdir()
    (place / "thesis" / "thesis.tex").write_text("x")
    for words, mentions in {
        "fit runs/x": ("runs/x", "eigentrace fit runs/x"),
        "fit runs/x --model model": ("--data", "--task"),
        "fit runs/x --model nowhere --data train.csv --task text-classification": ("train.csv",),
        "fit runs/x --input mine.py:none": ("'none'",),
        "fit runs/x --input mine.py:number": ("(task, data)", "int"),
        "fit runs/x --input mine.py:make --steps 0": ("steps", 0),
        "fit runs/x --input mine.py:make --tail long": ("tail", "'long'"),
        "fit runs/x --input mine.py:make --device cpu": ("mine.py:make", "device"),
        "fit runs/x --config nowhere.toml": ("nowhere.toml",),
        "fit mine.py --input mine.py:make": ("mine.py",),
        "fit thesis --input mine.py:make": ("thesis", "thesis.tex"),
        "score runs/x": ("runs/x", "eigentrace fit runs/x"),
        "score thesis": ("thesis", "request.json"),
        "info runs/x": ("runs/x",),
        "info thesis": ("thesis", "manifest.json"),
        "check runs/x": ("runs/x",),
        "explain runs/x --row 1": ("runs/x",),
        "clean thesis --drop 5%": ("thesis", "manifest.json"),
    }.items():
        code, out, err = call(words)
        assert (code, out) == (2, ""), words
        assert err.startswith("eigentrace: "), words
        expect_mentions(err, mentions)
        assert err.count("\n") == 1, words
    assert not (place / "runs").exists()
    assert [path.name for path in (place / "thesis").iterdir()] == ["thesis.tex"]


def test_the_order_of_commands(place, call):
    assert call("fit runs/x --input mine.py:make --steps 20 --keep 6")[0] == 0
    asking = (
        "explain runs/x --row 1",
        "clean runs/x --drop 5%",
        "check runs/x",
        "report runs/x",
        "serve runs/x --port 0",
    )
    for command in asking:
        code, _, err = call(command)
        assert (code, err.endswith(" eigentrace score runs/x\n")) == (2, True)
    assert call("info runs/x")[1].endswith(" eigentrace score runs/x\n")
    (place / "runs" / "x" / "fit").rename(place / "elsewhere")
    expect_mentions(call("score runs/x")[2], ["eigentrace fit runs/x"])
    assert call("info runs/x")[1].endswith(" eigentrace fit runs/x\n")


def test_a_second_call_with_other_settings_changes_nothing(scored, call):
    before = files(scored)
    for command, mentions in {
        "fit runs/x --input mine.py:make --steps 21 --keep 6": ("steps", 20, 21),
        "fit runs/x --input mine.py:make --steps 20": ("keep", 6),
        "score runs/x --features fp16": ("type", '"fp32"', '"fp16"'),
        "score runs/x --batch 7": ("batch", 8, 7),
        "score runs/x --device cpu": ("mine.py:make", "--device"),
    }.items():
        code, _, err = call(command)
        assert code == 2, command
        expect_mentions(err, mentions)
    assert call("fit runs/x --input ./mine.py:make --steps 20 --keep 6")[0] == 0
    assert call("score runs/x")[0] == 0
    held = {path: content for path, content in files(scored).items() if path.name != "request.json"}
    assert held == {path: content for path, content in before.items() if path.name != "request.json"}


def test_settings_from_a_file_and_options_on_top(place, call, answer):
    (place / "x.toml").write_text(
        '[input]\nfunction = "mine.py:make"\n[input.args]\nrows = 24\n'
        "[fit]\nsteps = 20\nkeep = 6\n[score]\nshard_rows = 8\n"
    )
    code, fitted = answer("fit runs/x --config x.toml --keep 4 --sample all")
    assert (code, fitted["num_train"], fitted["method"]["keep"], fitted["method"]["sample"]) == (0, 24, 4, None)
    assert answer("score runs/x")[1]["shards"] == 3
    (place / "bad.toml").write_text('[input]\nfunction = "mine.py:make"\n[fit]\nstep = 20\n')
    expect_mentions(call("fit runs/y --config bad.toml")[2], ["bad.toml", "'step'", "steps"])


METHODS = {
    "tracin": ("--method tracin", "TracIn", True),
    "random projections": ("--method rand-proj --keep 4", "RandProj", True),
    "ekfac": ("--method ekfac --set damping=0.1", "EKFAC", True),
    "lissa": ("--method Lissa --set depth=3 --set scale=50", "Lissa", False),
    "rates": ("--method TracIn --set learning_rates=0.5", "TracIn", True),
    "loss": ("--method loss", "Loss", False),
    "support": ("--method support", "Support", False),
}


@pytest.mark.parametrize(("options", "name", "saved"), METHODS.values(), ids=METHODS)
def test_other_methods(options, name, saved, place, call, answer):
    code, fitted = answer(f"fit runs/x --input mine.py:make {options}")
    assert (code, fitted["method"]["name"], fitted["fit"] is not None) == (0, name, saved)
    assert call("info runs/x")[1].endswith(" eigentrace score runs/x\n")
    assert call("score runs/x --shard-rows 16")[0] == 0
    info = answer("info runs/x")[1]
    assert (info["method"], info["missing"]) == (name, 0)
    told = re.findall(r"eigentrace .+", call("info runs/x")[1])
    for command in told[:-1]:  # the last one writes a file
        assert call(command.removeprefix("eigentrace "))[0] == 0
    assert (len(told) == 1) == (name in ("Loss", "Support"))
    shard = sorted((place / "runs" / "x" / "shards").iterdir())[1]
    shard.write_bytes(shard.read_bytes()[:-1])
    assert call("check runs/x --repair")[0] == 0
    assert answer("info runs/x")[1] == info
    before = files(place / "runs" / "x")
    assert call(f"fit runs/x --input mine.py:make {options}")[0] == 0
    expect_mentions(call("fit runs/x --input mine.py:make --method tangent-ridge")[2], ["method", name, "TangentRidge"])
    assert files(place / "runs" / "x") == before


def test_methods_and_their_settings_are_told_apart(place, call):
    for words, mentions in {
        "--method tracing": ("'tracing'", "TracIn"),
        "--method tracin --steps 3": ("'steps'", "[fit]"),
        "--method meanloss": ("MeanLoss", "checkpoints"),
        "--set basis=1": ("'basis'", "[fit]"),
        "--method lissa --set depth": ("--set", "name=value"),
        "--keep 5 --set keep=10": ("--set", "keep"),
    }.items():
        code, _, err = call(f"fit runs/x --input mine.py:make {words}")
        assert code == 2, words
        expect_mentions(err, mentions)
    assert not (place / "runs").exists()
    rates = "fit runs/z --input mine.py:make --method tracin --set learning_rates="
    expect_mentions(call(f"{rates}fast")[2], ["learning_rates", "fast"])
    expect_mentions(call(f"{rates}0.5 --set learning_rates=0.1")[2], ["learning_rates", 2, 1])
    assert call("fit runs/x --input mine.py:make --method tracin")[0] == 0
    expect_mentions(call("fit runs/x --input mine.py:make")[2], ["method", "TracIn", "Arnoldi"])
    assert call("fit runs/y --input mine.py:make --steps 8 --keep 3")[0] == 0
    assert call("fit runs/y --input mine.py:make --method arnoldi --steps 8 --keep 3")[0] == 0


@pytest.mark.filterwarnings("default")
def test_warnings_are_one_clean_line(place, call):
    code, _, err = call("fit runs/x --input mine.py:make --steps 6 --keep 5")
    assert code == 0
    (line,) = [line for line in err.splitlines() if "warning" in line]
    assert line.startswith("eigentrace: warning: ")
    expect_mentions(line, [5, "eigenvalues"])
    assert ".py" not in err


# A shell that runs the tests in the background lets them, and what they start, ignore SIGINT.
SCRIPT = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "from eigentrace.cli import main; sys.argv[0] = 'eigentrace'; main()"
)


def process(place, line, at, by):
    """Run a command in a process of its own, which a signal ends in a certain pass through the model."""
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, *shlex.split(line)], cwd=place, capture_output=True, text=True, check=False,
        env=os.environ | {"ENDS_AT": str(at), "ENDS_BY": str(int(by))},
    )  # fmt: skip


def test_interrupted_and_killed_it_goes_on(place, call):
    fit = "fit runs/x --input mine.py:make --steps 20 --keep 6"
    done = process(place, fit, 60, signal.SIGINT)
    assert done.returncode == 130
    assert done.stdout == ""
    assert done.stderr.endswith(f" eigentrace {fit}\n")
    code, out, _ = call("info runs/x")
    assert out.endswith(" eigentrace fit runs/x\n")
    saved = json.loads(call("info runs/x --json")[1])["products"]
    assert saved["total"] == 20
    assert 0 < saved["saved"] < 20
    expect_mentions(out, [f"{saved['saved']} of 20"])
    (place / "runs/x/krylov/state.safetensors").rename(place / "state")
    expect_mentions(call("info runs/x")[1], ["0 of 20"])
    (place / "state").rename(place / "runs/x/krylov/state.safetensors")
    assert call(fit)[0] == 0
    assert not (place / "runs" / "x" / "krylov").exists()
    score = "score runs/x --shard-rows 8"
    done = process(place, score, 13, signal.SIGINT)
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr.endswith(f" eigentrace {score}\n")
    assert process(place, score, 12, signal.SIGKILL).returncode == -signal.SIGKILL
    code, out, _ = call("info runs/x")
    assert code == 0
    expect_mentions(out, [json.loads(call("info runs/x --json")[1])["missing"]])
    assert out.endswith(" eigentrace score runs/x\n")
    assert call("explain runs/x --row 1")[0] == 2
    assert call("check runs/x")[0] == 1
    assert call(score)[0] == 0
    assert call("fit runs/whole --input mine.py:make --steps 20 --keep 6")[0] == 0
    assert call("score runs/whole --shard-rows 8")[0] == 0
    tables = [pq.read_table(place / "runs" / name / "table.parquet") for name in ("x", "whole")]
    assert tables[0].equals(tables[1])


def test_ctrl_c_before_anything_was_done(place, call, monkeypatch):
    from eigentrace.cli import commands as room

    def interrupted(*arguments, **named):
        raise KeyboardInterrupt

    for name in ("fit", "score", "check"):
        monkeypatch.setattr(room, name, interrupted)
        code, out, err = call(f"{name} runs/x")
        assert (code, out) == (130, "")
        assert err.startswith("\n")
        assert err.endswith(f" eigentrace {name} runs/x\n")


def test_every_command_has_help_that_leaves_torch_alone():
    code = (
        "import sys\n"
        "from eigentrace.cli import main\n"
        "for command in ('fit', 'score', 'explain', 'clean', 'check', 'info'):\n"
        "    sys.argv = ['eigentrace', command, '--help']\n"
        "    try:\n"
        "        main()\n"
        "    except SystemExit as exit_:\n"
        "        print(f'{command} ends with {exit_.code}')\n"
        "print('loaded:', [name for name in ('torch', 'numpy', 'pyarrow') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for command in ("fit", "score", "explain", "clean", "check", "info"):
        assert f"eigentrace {command} [OPTIONS]" in done.stdout
        assert f"{command} ends with 0" in done.stdout
    assert done.stdout.count("--json") == 6
    assert done.stdout.rstrip().endswith("loaded: []")
