"""Data that moved or changed around a run is refused, with the row that tells, or followed by its ids."""

import csv
import json
import shlex
import shutil
import sys

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

import eigentrace as et
from eigentrace import cli
from eigentrace.data.row_numbers import spread
from eigentrace.errors import MismatchError
from eigentrace.page.one_file import write_report
from eigentrace.page.subject import Subject
from eigentrace.store import Folder
from tests.helpers.expecting import expect_mentions, refused
from tests.helpers.runs import CLASSES, WIDTH, task
from tests.helpers.worked import build

ROWS = 300
SEEN = set(spread(ROWS, 64).tolist())  # by the fingerprint
UNSEEN = next(row for row in range(ROWS) if row not in SEEN)


class Held(Dataset):
    """Examples one by one, so that no label is at hand without reading them."""

    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.x)

    def __getitem__(self, row):
        return self.x[row], self.y[row]


def points(changed=None):
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
    y = x[:, :CLASSES].argmax(dim=1)
    if changed is not None:
        y[changed] = (y[changed] + 1) % CLASSES
    return x, y


@pytest.fixture(scope="module")
def fitted():
    return et.Arnoldi(steps=20, keep=6).fit(task(), TensorDataset(*points()))


@pytest.fixture(scope="module")
def run(fitted, tmp_path_factory):
    return et.score(fitted, Held(*points()), tmp_path_factory.mktemp("runs") / "x", shard_rows=70)


def test_a_changed_row_is_noticed_when_it_is_read(run):
    other = et.open_run(run.path, task(), Held(*points(UNSEEN)))
    with refused(MismatchError, f"Row {UNSEEN}", run.path):
        other.explain([UNSEEN], k=2, shortlist=2)
    first = run.explain([7], k=2, shortlist=6, rescore=True)
    listed = next(row for row in first.proponents.rows[0].tolist() if row not in SEEN)
    changed = et.open_run(run.path, task(), Held(*points(listed)))
    with refused(MismatchError, f"Row {listed}", run.path):
        changed.explain([7], k=2, shortlist=6)
    same = et.open_run(run.path, task(), Held(*points())).explain([7], k=2, shortlist=6)
    assert np.array_equal(same.proponents.rows, first.proponents.rows)


def test_every_label_at_hand_is_compared_when_data_is_opened(run):
    label = int(points()[1][UNSEEN])
    batches = [tuple(part) for part in zip(*(tensor.split(64) for tensor in points(UNSEEN)), strict=True)]
    for changed in (TensorDataset(*points(UNSEEN)), batches):
        with refused(MismatchError, run.path, f"row {UNSEEN}", label, (label + 1) % CLASSES):
            et.open_run(run.path, task(), changed)
    assert et.open_run(run.path, task(), TensorDataset(*points())).explain([UNSEEN], k=2).how == "exact"


def test_other_ids_are_refused_by_the_first_that_differs(fitted, tmp_path):
    names = [f"n{row}" for row in range(ROWS)]
    path = et.score(fitted, et.Data(TensorDataset(*points()), ids=names), tmp_path / "x").path
    swapped = [*names[:5], names[6], names[5], *names[7:]]
    with refused(MismatchError, path, "row 5", "'n5'", "'n6'"):
        et.open_run(path, task(), et.Data(TensorDataset(*points()), ids=swapped))
    assert et.open_run(path, task(), et.Data(TensorDataset(*points()), ids=np.array(names))).data is not None
    assert et.open_run(path, task(), TensorDataset(*points())).data is not None


@pytest.mark.parametrize("kind", [TensorDataset, Held])
def test_scoring_goes_on_only_over_the_same_examples(run, fitted, tmp_path, kind):
    path = shutil.copytree(run.path, tmp_path / "x")
    record = json.loads((path / "shards.json").read_text())
    record["shards"] = record["shards"][:2]
    (path / "shards.json").write_text(json.dumps(record))
    (path / "table.parquet").unlink()
    with refused(MismatchError, path, f"row {UNSEEN}"):
        et.score(fitted, kind(*points(UNSEEN)), path)
    assert len(json.loads((path / "shards.json").read_text())["shards"]) == 2
    assert et.score(fitted, kind(*points()), path).is_complete


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("place")
    build(folder)
    shutil.copy(folder / "train.csv", folder / "kept aside.csv")
    return folder


@pytest.fixture
def call(place, monkeypatch, capsys):
    """Call the entry point where the data is; return its exit code and what it complained of. The data is put back."""

    def called(line):
        monkeypatch.setattr(sys, "argv", ["eigentrace", *shlex.split(line)])
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        return exit_.value.code, capsys.readouterr().err

    monkeypatch.chdir(place)
    yield called
    shutil.copy(place / "kept aside.csv", place / "train.csv")


@pytest.fixture
def scored(place, call):
    """Two runs on the same file, one that knows its ids and one that does not."""
    for name, options in {"named": "--id id", "bare": ""}.items():
        if not (place / name).exists():
            asked = f"--model model --data train.csv --task text-classification {options}"
            assert call(f"fit {name} {asked} --params 'last layer' --steps 20 --keep 6")[0] == 0
            assert call(f"score {name}")[0] == 0
    return place


def rewrite(folder, change):
    """Change the rows of the dataset, a list of dicts, in place."""
    with (folder / "kept aside.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    changed = change(rows)
    with (folder / "train.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["id", "text", "label"])
        writer.writeheader()
        writer.writerows(rows if changed is None else changed)


def relabelled(row):
    def change(rows):
        rows[row]["label"] = "cat" if rows[row]["label"] != "cat" else "dog"

    return change


def retold(rows):
    rows[3]["text"] += " over the house"


def by_text(rows):
    return sorted(rows, key=lambda row: row["text"])


def test_rows_that_moved_are_cleaned_by_their_ids(scored, call, tmp_path):
    rewrite(scored, by_text)
    assert call(f"clean named --drop 6% --out {tmp_path}/kept.csv --decisions {tmp_path}/d.parquet")[0] == 0
    decided = pq.read_table(tmp_path / "d.parquet").to_pydict()
    with (tmp_path / "kept.csv").open(newline="") as file:
        kept = [row["id"] for row in csv.DictReader(file)]
    by_id = dict(zip(decided["id"], decided["decision"], strict=True))
    with (scored / "train.csv").open(newline="") as file:
        assert kept == [row["id"] for row in csv.DictReader(file) if by_id[row["id"]] == "keep"]
    assert len(kept) == 150


@pytest.mark.parametrize(
    ("run", "change", "mentions"),
    [
        ("bare", by_text, ("row", "label")),
        ("bare", relabelled(6), ("row 6", "label")),
        ("bare", retold, ("content",)),
        ("bare", lambda rows: rows[:-1], (159, 160)),
        ("named", lambda rows: [{**row, "id": f"t{row['id']}"} for row in rows], ("row 0", "'s000'", "'ts000'")),
        ("named", lambda rows: [*rows[:-1], rows[0]], ("row 159", "'s159'", "'s000'")),
        ("named", retold, ("content",)),
        ("named", lambda rows: (retold(rows), rows[::-1])[1], ("content",)),
    ],
)
def test_another_dataset_is_not_cleaned(scored, call, tmp_path, run, change, mentions):
    rewrite(scored, change)
    code, err = call(f"clean {run} --drop 6% --out {tmp_path}/kept.csv --decisions {tmp_path}/d.parquet")
    assert code == 2
    expect_mentions(err, ["train.csv", run, *mentions])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("run", "mentions"), [("named", ("row 0", "'s000'")), ("bare", ("row", "label"))])
def test_rows_that_moved_are_not_shown(scored, call, tmp_path, run, mentions):
    rewrite(scored, by_text)
    code, err = call(f"report {run} --out {tmp_path}/page.html")
    assert code == 2, err
    expect_mentions(err, ["train.csv", *mentions])
    assert list(tmp_path.iterdir()) == []
    subject = Subject(scored / run)
    assert subject.show is None
    assert subject.changed is not None
    expect_mentions(subject.trouble, ["train.csv", *mentions])
    shutil.copy(scored / "kept aside.csv", scored / "train.csv")
    assert Subject(scored / run).show([6])[0].text in (scored / "train.csv").read_text()


def test_texts_alone_are_compared_by_some_of_them(scored, call, tmp_path):
    how = json.loads((scored / "bare" / "request.json").read_text())
    assert {"rows", "fingerprint", "content", "unordered", "sample"} <= how["data"].keys()
    last = spread(160, 64).tolist()[-1]
    rewrite(scored, lambda rows: [*rows[:last], rows[last] | {"text": "the cat"}, *rows[last + 1 :]])
    with refused(MismatchError, scored / "bare", scored / "train.csv"):
        write_report(scored / "bare", tmp_path / "page.html")


def test_what_was_fitted_on_is_what_is_scored(scored, call):
    for step, change in enumerate((lambda rows: rows[80:], relabelled(6), retold, by_text)):
        shutil.copytree(scored / "named", scored / f"begun-{step}")
        for name in ("manifest.json", "shards.json", "table.parquet", "columns.parquet", "weights.safetensors"):
            (scored / f"begun-{step}" / name).unlink()
        shutil.rmtree(scored / f"begun-{step}" / "shards")
        rewrite(scored, change)
        code, err = call(f"score begun-{step}")
        assert code == 2, err
        expect_mentions(err, [f"begun-{step}", *((80, 160), (), (), ("order",))[step]])
        assert not Folder(scored / f"begun-{step}").exists
    shutil.copy(scored / "kept aside.csv", scored / "train.csv")
    assert call("score begun-0")[0] == 0
    manifest = Folder(scored / "begun-0").manifest
    assert (manifest["num_train"], manifest["data"]["rows"]) == (160, 160)


def test_a_repaired_label_is_noticed_by_every_command_that_reads_it(scored, call):
    rewrite(scored, relabelled(6))
    for command in ("explain named --row 100 --exact", "score named"):
        code, err = call(command)
        assert code == 2, err
        expect_mentions(err, ["row 6", "label"])
    assert call("explain named --row 100")[0] == 0


FUNCTION = """
import torch, eigentrace as et
from torch import nn
from torch.utils.data import TensorDataset

def make():
    torch.manual_seed(0)
    x, net = torch.randn(200, 5), nn.Linear(5, 3)
    y = x[:, :3].argmax(dim=1)
    {change}
    return et.classification(net), TensorDataset(x, y)
"""


def test_a_function_s_data_is_bound_when_its_fit_has_begun(place, call):
    (place / "mine.py").write_text(FUNCTION.format(change="x[0] = float('nan')"))
    assert call("fit function --input mine.py:make --steps 10 --keep 4")[0] == 2
    (place / "mine.py").write_text(FUNCTION.format(change=""))
    assert call("fit function")[0] == 0
    (place / "mine.py").write_text(FUNCTION.format(change="y[1] = (y[1] + 1) % 3"))
    assert 1 not in spread(200, 64)
    code, err = call("score function")
    assert code == 2, err
    expect_mentions(err, ["function"])
    (place / "mine.py").write_text(FUNCTION.format(change=""))
    assert call("score function")[0] == 0
    (place / "mine.py").write_text(FUNCTION.format(change="y[1] = (y[1] + 1) % 3"))
    subject = Subject(place / "function")
    assert subject.show is None
    expect_mentions(subject.trouble, ["row 1", "label"])
