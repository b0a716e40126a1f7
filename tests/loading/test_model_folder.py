"""Hugging Face folders, saved and read back: scores are the model's own, whatever the padding and the batch size."""

import io
import json
import shutil
import sys

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import torch

import eigentrace as et
from eigentrace.errors import DataError, InputError, TaskError, UnsupportedError
from eigentrace.loading import from_folder
from eigentrace.loading.hugging_face import load_image_processor
from eigentrace.loading.image_dataset import Plain, preparation
from eigentrace.loading.text_dataset import padded_length
from tests.helpers import make_folders
from tests.helpers.expecting import refused
from tests.helpers.make_folders import CLASSES, IMAGE_SETTINGS
from tests.helpers.small import table

transformers = pytest.importorskip("transformers")
PIL_Image = pytest.importorskip("PIL.Image")

ROWS = 11
TASKS = {
    "bert": "text-classification",
    "gpt2": "causal-lm",
    "t5": "seq2seq",
    "marian": "seq2seq",
    "vit": "image-classification",
}
TEXTS = make_folders.sentences(ROWS)
TARGETS = make_folders.sentences(ROWS, seed=1)
LABELS = [CLASSES[row % 3] for row in range(ROWS)]


def png(pixels):
    stored = io.BytesIO()
    PIL_Image.fromarray(pixels).save(stored, format="png")
    return stored.getvalue()


IMAGES = [png(pixels) for pixels in make_folders.pixels(ROWS)]
DATASET = pa.table(
    {
        "id": [f"{row:03}" for row in range(ROWS)],
        "text": TEXTS,
        "target": TARGETS,
        "label": LABELS,
        "image": [{"bytes": image, "path": None} for image in IMAGES],
        "year": list(range(1990, 1990 + ROWS)),
    }
)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Every model, saved once, and one dataset that serves them all."""
    folder = tmp_path_factory.mktemp("folders")
    for name in TASKS:
        getattr(make_folders, name)(folder / name)
    pq.write_table(DATASET, folder / "data.parquet", row_group_size=4)
    return folder


def made(home, name="bert", dataset=None, **options):
    return from_folder(home / name, dataset or home / "data.parquet", TASKS[name], **options)


def first_batch(inputs):
    return inputs.data.first(ROWS).values


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def scores(inputs):
    return et.RandProj(keep=3).fit(inputs.task.double(), inputs.data).self_influence(inputs.data)


@pytest.mark.parametrize("name", TASKS)
def test_scores_depend_on_no_batch_size_and_no_padding(name, home):
    alone = scores(made(home, name, batch_size=1))
    assert alone.max() > 0
    for size in (3, 8):
        assert torch.allclose(scores(made(home, name, batch_size=size)), alone, rtol=1e-9, atol=1e-9)


def losses(inputs):
    return et.Loss().fit(inputs.task.double(), inputs.data).self_influence(inputs.data)


def own_losses(home, name):
    """What the model itself says of every example, alone, without padding, its mean over tokens undone."""
    loader = getattr(transformers, type(made(home, name).task.model).__name__)
    model = loader.from_pretrained(home / name).double().eval()
    tokenizer = None if name == "vit" else transformers.AutoTokenizer.from_pretrained(home / name)
    found = []
    for row in range(ROWS):
        if name == "vit":
            image = PIL_Image.open(io.BytesIO(IMAGES[row])).convert("RGB")
            one = load_image_processor(home / name)(image, return_tensors="pt")
            one["pixel_values"] = one["pixel_values"].double()
        else:
            one = tokenizer(TEXTS[row], return_tensors="pt")
        labels = {
            "bert": torch.tensor([row % 3]),
            "vit": torch.tensor([row % 3]),
            "gpt2": one.get("input_ids"),
        }.get(name)
        if labels is None:
            labels = tokenizer(text_target=TARGETS[row], return_tensors="pt")["input_ids"]
        predicted = labels.numel() - (name == "gpt2") if labels.ndim == 2 else 1
        found.append(float(model(**one, labels=labels).loss.detach()) * predicted if predicted else 0.0)
    return torch.tensor(found, dtype=torch.float64)


@pytest.mark.parametrize("name", TASKS)
def test_losses_are_the_models_own(name, home):
    inputs = made(home, name, batch_size=4)
    assert torch.allclose(losses(inputs), own_losses(home, name), rtol=1e-5, atol=1e-6)  # theirs are in float32


def test_ids_and_metadata(home):
    inputs = made(home, id="id")
    assert inputs.data.ids.to_pylist() == DATASET.column("id").to_pylist()
    assert inputs.columns.equals(DATASET.select(["id", "target", "year"]))
    assert inputs.source == home / "data.parquet"
    assert made(home, id="id", columns=["year"]).columns.column_names == ["id", "year"]
    assert made(home, "gpt2", columns=["label"]).columns.column_names == ["label"]


def test_settings_of_the_task(home):
    inputs = made(home, params="classifier.*", l2=0.5, device="cpu")
    assert inputs.task.coverage.names == ("classifier.weight", "classifier.bias")
    assert inputs.task.l2 == {"classifier.weight": 0.5, "classifier.bias": 0.5}


@pytest.mark.parametrize("suffix", ["csv", "tsv", "jsonl"])
def test_other_formats_give_the_same_scores(suffix, home, tmp_path):
    rows = DATASET.select(["text", "label"])
    path = tmp_path / f"data.{suffix}"
    if suffix == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows.to_pylist()))
    else:
        pa.csv.write_csv(rows, path, pa.csv.WriteOptions(delimiter="," if suffix == "csv" else "\t"))
    assert same(first_batch(made(home, dataset=path)), first_batch(made(home)))


def test_a_second_text(home):
    batch = first_batch(made(home, text_pair="target"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(home / "bert")
    expected = tokenizer(TEXTS, TARGETS, padding="longest", return_tensors="pt", truncation=True, max_length=40)
    length = expected["input_ids"].shape[1]
    for name in ("input_ids", "attention_mask", "token_type_ids"):
        assert torch.equal(batch[name][:, :length], expected[name])


def test_lengths_of_padding():
    lengths = sorted({padded_length(n) for n in range(1, 513)})
    assert lengths == [8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512]
    assert all(padded_length(n, limit=20) <= 20 for n in range(1, 21))


def test_long_texts_are_cut_and_never_padded_past_the_positions(home, tmp_path):
    pq.write_table(pa.table({"text": ["cat " * 100, "dog " * 19, "the"]}), tmp_path / "long.parquet")
    inputs = made(home, "gpt2", dataset=tmp_path / "long.parquet")
    assert inputs.data.first(3).values["input_ids"].shape == (3, 20)
    assert made(home, "gpt2", tmp_path / "long.parquet", max_length=5).data.first(3).values["input_ids"].shape == (3, 5)
    with refused(InputError, "max_length", 21, 20):
        made(home, "gpt2", tmp_path / "long.parquet", max_length=21)


def test_positions_that_are_counted_from_behind_the_padding_token(tmp_path):
    """RoBERTa's: the table has an entry for every token up to the padding token that no text comes to."""
    folder, long = make_folders.roberta(tmp_path / "roberta"), tmp_path / "long.parquet"
    pq.write_table(pa.table({"text": ["cat " * 100, "dog " * 17, "the"], "label": [0, 1, 2]}), long)
    inputs = from_folder(folder, long, "text-classification")
    batch = inputs.data.first(3).values
    assert batch["input_ids"].shape == (3, 18)
    assert inputs.task.losses(inputs.task.params, batch).isfinite().all()
    with refused(InputError, "max_length", 19, 18):
        from_folder(folder, long, "text-classification", max_length=19)


def test_a_text_without_tokens_teaches_a_language_model_nothing(home, tmp_path):
    pq.write_table(pa.table({"text": ["the cat sat", "", "a dog"]}), tmp_path / "empty.parquet")
    found = scores(made(home, "gpt2", tmp_path / "empty.parquet", batch_size=2))
    assert torch.isfinite(found).all()
    assert found[1] == 0
    assert found[0] > 0


def test_padding_tokens_of_a_tokenizer_without_one(home):
    batch = first_batch(made(home, "gpt2"))
    padding = batch["attention_mask"] == 0
    assert padding.any()
    assert (batch["input_ids"][padding] == 0).all()  # the end of text
    assert torch.equal(batch["labels"] == -100, padding)


def test_a_classifier_over_a_decoder(home, tmp_path):
    config = transformers.GPT2Config.from_pretrained(home / "gpt2", num_labels=3)
    transformers.GPT2ForSequenceClassification(config).save_pretrained(tmp_path)
    options = {"label": "year", "tokenizer": home / "gpt2"}
    pq.write_table(DATASET.set_column(5, "year", pa.array([row % 3 for row in range(ROWS)])), tmp_path / "d.parquet")
    found = [
        losses(from_folder(tmp_path, tmp_path / "d.parquet", "text-classification", batch_size=size, **options))
        for size in (1, 5)
    ]
    assert torch.allclose(*found, rtol=1e-9)
    assert found[0].std() > 0


def test_half_precision_is_loaded_in_full(home, tmp_path):
    model = transformers.BertForSequenceClassification.from_pretrained(home / "bert")
    shutil.copytree(home / "bert", tmp_path, dirs_exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    inputs = from_folder(tmp_path, home / "data.parquet", "text-classification")
    assert inputs.task.layout.dtypes == (torch.float32,) * len(inputs.task.params)


def test_worker_processes_read_the_same(home):
    alone, helped = (made(home, workers=workers, batch_size=4).data.batches() for workers in (0, 1))
    for one, other in zip(alone, helped, strict=True):
        assert same(one.values, other.values)


def bare(home, at):
    """A model without a head for classes."""
    transformers.BertModel(transformers.BertConfig.from_pretrained(home / "bert")).save_pretrained(at)
    return at


def multi_label(home, at):
    return make_folders.bert(at, problem_type="multi_label_classification")


def without_tokenizer(home, at):
    config = transformers.BertConfig.from_pretrained(home / "bert")
    transformers.BertForSequenceClassification(config).save_pretrained(at)
    return at


WRONG = {
    "no folder": (lambda home, at: at / "none", {}, InputError, ("/none",)),
    "no config": (lambda home, at: at, {}, InputError, ("config.json",)),
    "no head": (bare, {}, TaskError, (2, "'classifier.bias'")),
    "several classes": (multi_label, {}, UnsupportedError, ("multi_label_classification",)),
    "no tokenizer": (without_tokenizer, {}, InputError, ("tokenizer",)),
    "unknown task": (None, {"task": "translation"}, InputError, ("task", "'translation'", "text-classification")),
    "other model": (None, {"task": "seq2seq"}, InputError, ("bert", "seq2seq")),
    "no column": (None, {"text": "body"}, InputError, ("'body'", "id, text")),
    "no text": (None, {"text": "year"}, InputError, ("'year'", "int64", "text")),
    "no label": (None, {"label": "target"}, DataError, (0, "data.parquet", "'on'")),
    "no id": (None, {"id": "key"}, InputError, ("'key'", "id")),
    "no batch": (None, {"batch_size": 0}, InputError, ("batch_size", 0)),
    "no device": (None, {"device": "gpu"}, InputError, ("device", "'gpu'")),
    "no length": (None, {"max_length": 0}, InputError, ("max_length", 0)),
}


@pytest.mark.parametrize(("model", "options", "kind", "mentions"), table(WRONG))
def test_what_is_wrong_is_said(model, options, kind, mentions, home, tmp_path):
    folder = home / "bert" if model is None else model(home, tmp_path)
    with refused(kind, *mentions):
        from_folder(folder, home / "data.parquet", **({"task": "text-classification"} | options))


@pytest.mark.parametrize("package", ["transformers", "PIL"])
def test_a_missing_extra_is_named(package, home, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    for name in [name for name in sys.modules if name.startswith("PIL.")]:
        monkeypatch.setitem(sys.modules, name, None)
    extra = "hf" if package == "transformers" else "images"
    with refused(InputError, f'pip install -e ".[{extra}]"'):
        made(home, "vit")


def image_paths(folder):
    for row, image in enumerate(IMAGES):
        (folder / f"{row}.png").write_bytes(image)
    return [f"{row}.png" for row in range(ROWS)]


@pytest.mark.parametrize("kind", ["paths", "bytes", "struct of paths"])
def test_images_as_paths_and_bytes(kind, home, tmp_path):
    stored = IMAGES if kind == "bytes" else image_paths(tmp_path)
    if kind == "struct of paths":
        stored = [{"bytes": None, "path": path} for path in stored]
    pq.write_table(pa.table({"image": stored, "label": LABELS}), tmp_path / "images.parquet")
    assert same(first_batch(made(home, "vit", tmp_path / "images.parquet")), first_batch(made(home, "vit")))


PREPARED = {
    "as they are": ({},),
    "shortest edge": ({"size": {"shortest_edge": 9}, "do_center_crop": True, "crop_size": {"height": 8, "width": 8}},),
    "middle of small ones": ({"do_resize": False, "do_center_crop": True, "crop_size": {"height": 11, "width": 12}},),
    "bicubic": ({"resample": 3, "size": {"height": 13, "width": 10}},),
    "numbers of their own": ({"do_rescale": False, "do_normalize": False},),
}


@pytest.mark.parametrize("settings", table(PREPARED))
def test_images_are_prepared_as_by_the_folders_own_processor(settings, tmp_path):
    asked = IMAGE_SETTINGS | {"image_processor_type": "CLIPImageProcessor", "do_convert_rgb": True}
    asked |= {"do_center_crop": False} | settings
    (tmp_path / "config.json").write_text('{"model_type": "clip"}')
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(asked))
    prepare, processor = preparation(tmp_path), load_image_processor(tmp_path)
    assert isinstance(prepare, Plain)
    for image in map(PIL_Image.fromarray, make_folders.pixels(4)):
        expected = np.asarray(processor(image, return_tensors="np")["pixel_values"][0])
        assert np.allclose(prepare(image), expected, atol=1e-6)


def test_other_processors_are_left_to_their_own_code(home, tmp_path):
    settings = IMAGE_SETTINGS | {"image_processor_type": "ConvNextImageProcessor", "crop_pct": 0.5}
    settings["size"] = {"shortest_edge": 8}
    shutil.copytree(home / "vit", tmp_path, dirs_exist_ok=True)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    image = PIL_Image.fromarray(make_folders.pixels(1)[0])
    prepare = preparation(tmp_path)
    assert not isinstance(prepare, Plain)
    assert prepare(image).shape == (3, 8, 8)
    assert np.array_equal(prepare(image), load_image_processor(tmp_path)(image, return_tensors="np")["pixel_values"][0])


def test_a_step_left_unsaid_is_the_processors_own_choice(tmp_path):
    settings = IMAGE_SETTINGS | {"image_processor_type": "CLIPImageProcessor", "crop_size": {"height": 5, "width": 5}}
    (tmp_path / "config.json").write_text('{"model_type": "clip"}')
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    assert preparation(tmp_path)(PIL_Image.fromarray(make_folders.pixels(1)[0])).shape == (3, 5, 5)


def damaged(folder):
    return [*IMAGES[:2], b"no image", *IMAGES[3:]]


def missing(folder):
    paths = image_paths(folder)
    (folder / paths[2]).unlink()
    return paths


WRONG_IMAGES = {
    "damaged": (damaged, DataError, (2, "images.parquet")),
    "missing": (missing, DataError, ("row 2", "images.parquet", "2.png")),
    "none": (lambda at: [*IMAGES[:2], None, *IMAGES[3:]], DataError, (2, "images.parquet", "'image'")),
    "numbers": (lambda at: list(range(ROWS)), InputError, ("'image'", "int64")),
}


@pytest.mark.parametrize(("stored", "kind", "mentions"), table(WRONG_IMAGES))
def test_images_that_cannot_be_read_are_named(stored, kind, mentions, home, tmp_path):
    pq.write_table(pa.table({"image": stored(tmp_path), "label": LABELS}), tmp_path / "images.parquet")
    with refused(kind, *mentions):
        first_batch(made(home, "vit", tmp_path / "images.parquet"))


def test_a_folder_without_settings_of_images(home, tmp_path):
    shutil.copytree(home / "vit", tmp_path / "vit")
    (tmp_path / "vit" / "preprocessor_config.json").unlink()
    with refused(InputError, tmp_path / "vit", "preprocessor_config.json"):
        made(tmp_path, "vit", home / "data.parquet")


def test_torchvision_is_never_imported():
    assert "torchvision" not in sys.modules


@pytest.mark.parametrize(("name", "task", "fitting"), [
    ("bert", "seq2seq", "text-classification"),
    ("vit", "causal-lm", "image-classification"),
    ("marian", "text-classification", "seq2seq"),
])  # fmt: skip
def test_a_model_of_another_task_is_refused_in_a_few_lines(name, task, fitting, home):
    with refused(InputError, home / name, task, f"'{name}'", f"task='{fitting}'") as caught:
        from_folder(home / name, home / "data.parquet", task)
    assert len(str(caught.value)) < 300 + len(str(home))


def test_an_adapter_is_refused_with_the_name_of_its_base_model(home, tmp_path):
    peft = pytest.importorskip("peft")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(home / "bert")
    lora = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["query"], task_type="SEQ_CLS"))
    lora.save_pretrained(tmp_path / "adapter")
    with refused(InputError, tmp_path / "adapter", repr(str(home / "bert")), "merge_and_unload()"):
        from_folder(tmp_path / "adapter", home / "data.parquet", "text-classification")
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    with refused(InputError, tmp_path / "adapter", "adapter_config.json"):
        from_folder(tmp_path / "adapter", home / "data.parquet", "text-classification")
    lora.merge_and_unload().save_pretrained(tmp_path / "merged")
    transformers.AutoTokenizer.from_pretrained(home / "bert").save_pretrained(tmp_path / "merged")
    assert len(from_folder(tmp_path / "merged", home / "data.parquet", "text-classification").data) == ROWS
    (tmp_path / "adapter" / "adapter_config.json").rename(tmp_path / "merged" / "adapter_config.json")
    with refused(InputError, tmp_path / "merged", "adapter_config.json"):
        from_folder(tmp_path / "merged", home / "data.parquet", "text-classification")
