"""What the examples of a request look like, without the model; and new examples, prepared like those of the data."""

import io
import json
import pickle
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import eigentrace as et
from eigentrace.errors import DataError, InputError
from eigentrace.formats.files import find_files
from eigentrace.formats.records import open_records
from eigentrace.loading import from_config, from_folder, make_inputs, show_of
from eigentrace.loading.image_dataset import read_pixels
from tests.helpers import make_folders
from tests.helpers.expecting import refused
from tests.helpers.make_folders import CLASSES
from tests.helpers.pages import HOSTILE, pair_run
from tests.helpers.small import table

transformers = pytest.importorskip("transformers")
PIL_Image = pytest.importorskip("PIL.Image")

ROWS = 7
TASKS = {"bert": "text-classification", "gpt2": "causal-lm", "t5": "seq2seq", "vit": "image-classification"}
TEXTS, TARGETS = make_folders.sentences(ROWS), make_folders.sentences(ROWS, seed=1)
PIXELS = make_folders.pixels(ROWS)


def file_of(image, kind="png", **options):
    image = PIL_Image.fromarray(image) if isinstance(image, np.ndarray) else image
    stored = io.BytesIO()
    image.save(stored, format=kind, **options)
    return stored.getvalue()


def decoded(png):
    return np.asarray(PIL_Image.open(io.BytesIO(png)))


DATASET = pa.table(
    {
        "text": TEXTS,
        "target": TARGETS,
        "label": [CLASSES[row % 3] for row in range(ROWS)],
        "image": [file_of(image) for image in PIXELS],
    }
)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("folders")
    for name in TASKS:
        getattr(make_folders, name)(folder / name)
    pq.write_table(DATASET, folder / "data.parquet", row_group_size=3)
    return folder


def asked(home, name, dataset=None, **options):
    chosen = {"model": home / name, "dataset": dataset or home / "data.parquet", "task": TASKS[name]}
    return from_config(None, {"input": chosen | {"device": "cpu"} | options})


@pytest.mark.parametrize("name", TASKS)
def test_a_request_is_shown_without_the_model(name, home, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    show = show_of(asked(home, name))
    assert len(show) == ROWS
    assert show.kind == {"bert": "text", "gpt2": "text", "t5": "pair", "vit": "image"}[name]
    assert show.classes == (CLASSES if name in ("bert", "vit") else None)
    (shown,) = show([5])
    if name == "vit":
        np.testing.assert_array_equal(decoded(shown.png), PIXELS[5])
        assert show.search("cat") is None
        return
    assert (shown.text, shown.target) == (TEXTS[5], TARGETS[5] if name == "t5" else None)
    hit = [TEXTS[4].upper() in (a.upper(), name == "t5" and b.upper()) for a, b in zip(TEXTS, TARGETS, strict=True)]
    assert show.search(TEXTS[4].upper())[np.flatnonzero(hit)].all()


def test_a_second_text_makes_a_pair(home):
    show = show_of(asked(home, "bert", text_pair="target"))
    assert (show.kind, show.classes) == ("pair", CLASSES)
    assert (show([2])[0].text, show([2])[0].target) == (TEXTS[2], TARGETS[2])


@pytest.mark.parametrize("name", ["bert", "vit"])
def test_inputs_carry_the_same(name, home):
    how = asked(home, name)
    inputs = make_inputs(how)
    assert show_of(how, inputs=inputs) is inputs.show
    assert inputs.show([1, 6]) == show_of(how)([1, 6])


def test_a_run_that_says_nothing_has_nothing_to_show():
    assert show_of(None) is None
    assert show_of({"notes": {"by": "hand"}}) is None


CONFIGS = {
    "no names": ({}, None),
    "names by number": ({"id2label": {"1": "b", "0": "a"}}, ("a", "b")),
    "gaps": ({"id2label": {"0": "a", "2": "c"}}, None),
    "no numbers": ({"id2label": {"a": "b"}}, None),
    "a list": ({"id2label": ["a", "b"]}, None),
}


@pytest.mark.parametrize(("config", "expected"), table(CONFIGS))
def test_class_names_as_the_folder_has_them(config, expected, home, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    how = asked(home, "bert", model=tmp_path)
    assert show_of(how).classes == expected


def test_photographs_come_upright_and_small(home, tmp_path):
    wide = np.zeros((700, 1400, 3), np.uint8)
    wide[:, :700] = 255
    exif = PIL_Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees: what is left in the file comes to the top
    stored = [file_of(wide, "jpeg", exif=exif), b"no image", None]
    pq.write_table(pa.table({"image": pa.array(stored, pa.binary()), "label": [0, 1, 2]}), tmp_path / "photos.parquet")
    show = show_of(asked(home, "vit", tmp_path / "photos.parquet"))
    found = decoded(show([0])[0].png)
    assert found.shape == (512, 256, 3)
    assert found[10].min() > 200
    assert found[-10].max() < 50
    with refused(DataError, 1, "photos.parquet"):
        show([1])
    with refused(DataError, 2, "photos.parquet", "'image'"):
        show([2])


def test_hostile_texts_come_as_they_are(tmp_path):
    run = et.open_run(pair_run(tmp_path))
    show = show_of(run.manifest["how"], run.path)
    assert len(show) == run.num_rows
    for row, words in enumerate(HOSTILE):
        (shown,) = show([row])
        assert (shown.target if row % 2 else shown.text) == words
        assert show.search(words)[row]


def test_rows_are_read_by_several_threads(home):
    show = show_of(asked(home, "t5"))
    rows = [row % ROWS for row in range(0, 5 * ROWS, 3)] * 8
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda row: show([row])[0].text, rows))
    assert found == [TEXTS[row] for row in rows]


def test_records_travel_to_other_processes(home):
    records = open_records(find_files(home / "data.parquet"))
    assert records.read([5], ["text"]).column(0).to_pylist() == [TEXTS[5]]
    again = pickle.loads(pickle.dumps(records))
    assert again.read([5, 0], ["text"]).column(0).to_pylist() == [TEXTS[5], TEXTS[0]]


# New examples


def given(row):
    """A row of the dataset as somebody might send it."""
    return {"text": TEXTS[row], "target": TARGETS[row], "label": row % 3, "image": file_of(PIXELS[row])}


@pytest.mark.parametrize("name", TASKS)
def test_new_examples_are_prepared_like_the_datas(name, home):
    inputs = from_folder(home / name, home / "data.parquet", TASKS[name], device="cpu")
    expected = inputs.data.first(3).values
    found = inputs.read([given(row) for row in range(3)]).first(3).values
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_a_new_example_can_be_asked_about(home):
    inputs = from_folder(home / "bert", home / "data.parquet", TASKS["bert"], device="cpu")
    fitted = et.RandProj(keep=4).fit(inputs.task, inputs.data)
    known, new = inputs.data.take([3]), inputs.read([given(3) | {"label": CLASSES[0]}])
    assert torch.equal(fitted.influence(new, inputs.data), fitted.influence(known, inputs.data))


def test_images_as_arrays(home):
    read = from_folder(home / "vit", home / "data.parquet", TASKS["vit"], device="cpu").read
    by_file, by_array = read([given(2)]).first(1).values, read([given(2) | {"image": PIXELS[2]}]).first(1).values
    assert torch.equal(by_file["pixel_values"], by_array["pixel_values"])


WRONG = {
    "nothing": ("bert", [], ()),
    "no label": ("bert", [{"text": "a"}], (0, "label", "text, label")),
    "no target": ("t5", [given(0), {"text": "a"}], (1, "target", "text, target")),
    "no text": ("bert", [{"text": 3, "label": 0}], ("text", "int")),
    "no such class": ("bert", [{"text": "a", "label": 3}], (3, 0, 2, "cat, dog")),
    "no such name": ("bert", [{"text": "a", "label": "fish"}], ("'fish'", "cat, dog")),
    "half a class": ("bert", [{"text": "a", "label": 0.5}], (0.5, "cat, dog")),
    "a path": ("vit", [{"image": "/etc/passwd", "label": 0}], ("str",)),
    "a path within": ("vit", [{"image": {"path": "/x"}, "label": 0}], ("dict",)),
    "no image": ("vit", [{"image": b"abc", "label": 0}], ("PNG", "JPEG", "WebP")),
}


@pytest.mark.parametrize(("name", "examples", "mentions"), table(WRONG))
def test_what_cannot_be_asked_about_is_said(name, examples, mentions, home):
    read = from_folder(home / name, home / "data.parquet", TASKS[name], device="cpu").read
    with refused(InputError, *mentions):
        read(examples)


@pytest.mark.parametrize("kind", ["png", "webp"])
def test_files_from_outside(kind):
    options = {"lossless": True} if kind == "webp" else {}
    np.testing.assert_array_equal(read_pixels(file_of(PIXELS[0], kind, **options)), PIXELS[0])
    assert read_pixels(file_of(PIXELS[0], kind), "L").shape == PIXELS[0].shape[:2]


def bomb(side):
    return file_of(PIL_Image.new("1", (side, side)), "png", optimize=True)


OUTSIDE = {
    "another format": (file_of(PIXELS[0], "gif"), ("PNG", "JPEG", "WebP")),
    "half a file": (file_of(PIXELS[0])[:100], ("PNG", "JPEG", "WebP")),
    "large": (bomb(4097), ("2²⁴",)),
    "larger than Pillow warns about": (bomb(9_600), ("2²⁴",)),
    "larger than Pillow opens": (bomb(13_500), ("2²⁴",)),
}


@pytest.mark.parametrize(("data", "mentions"), table(OUTSIDE))
def test_what_is_not_decoded(data, mentions):
    with refused(InputError, *mentions):
        read_pixels(data)


# Functions

SOURCE = """
from pathlib import Path

import torch
import eigentrace as et
from eigentrace.loading import Inputs
from eigentrace.rendering import Texts

def made(folder, size=4, shape=(3, 8, 8)):
    assert (Path(folder) / "data.txt").exists(), folder
    images = torch.rand(size, *shape)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(images[0].numel(), 2))
    return et.classification(model), [(images, torch.zeros(size, dtype=torch.long))]

def named(folder):
    task, batches = made(folder)
    return Inputs(task, et.Data.from_batches(batches), show=Texts(["a", "b", "c", "d"]))

def short(folder):
    task, batches = made(folder)
    return Inputs(task, et.Data.from_batches(batches), show=Texts(["a"]))
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run's directory with data of its own, and a function in another one."""
    monkeypatch.setattr(sys, "path", sys.path.copy())
    (tmp_path / "mine.py").write_text(SOURCE)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "data.txt").write_text("x")
    return tmp_path / "run"


def by_function(run, name="made", folder="{run}", **args):
    function = f"{run.parent / 'mine.py'}:{name}"
    return from_config(None, {"input": {"function": function, "args": {"folder": folder, **args}}})


def test_a_function_says_what_its_examples_look_like(run):
    assert show_of(by_function(run, "named"), run, trust=True)([2])[0].text == "c"


def test_tensors_that_look_like_images_are_shown(run):
    assert show_of(by_function(run), run, trust=True).kind == "image"
    assert show_of(by_function(run, shape=[9]), run, trust=True) is None


def test_what_is_shown_has_the_rows_of_the_data(run):
    with refused(InputError, 1, 4):
        make_inputs(by_function(run, "short"), run, trust=True)


@pytest.mark.parametrize("folder", ["{run}", "{run}/", "{run}/../run"])
def test_arguments_that_begin_with_the_run(folder, run):
    assert len(make_inputs(by_function(run, folder=folder), run, trust=True).data) == 4


def test_a_run_that_was_moved(run):
    how = by_function(run)
    how["input"]["resolved"]["run"] = str(run)
    assert len(make_inputs(how, trust=True).data) == 4
    moved = run.rename(run.parent / "moved")
    assert len(make_inputs(how, moved, trust=True).data) == 4
    with refused(InputError, "'{run}'"):
        make_inputs(by_function(moved), trust=True)


def test_other_arguments_are_left_alone(run, monkeypatch):
    monkeypatch.chdir(run.parent)
    (run.parent / "{runs}").mkdir()
    (run.parent / "{runs}" / "data.txt").write_text("x")
    assert len(make_inputs(by_function(run, folder="{runs}"), run, trust=True).data) == 4
