"""Damaged model folders are told with the file that is damaged."""

import shutil

import pytest

from eigentrace.errors import EigentraceError, InputError
from eigentrace.loading import from_folder
from tests.helpers import make_folders
from tests.helpers.expecting import refused
from tests.helpers.make_folders import CLASSES
from tests.helpers.mutating import mutate, outcomes

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folders.bert(tmp_path_factory.mktemp("bert") / "model")


@pytest.fixture
def bad(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "model")
    return tmp_path / "model"


def opened(path):
    """Load a model and its data, and return losses of the model."""
    data = path.parent / "d.csv"
    data.write_text("text,label\n" + "".join(f"the {word} sat,{word}\n" for word in CLASSES))
    inputs = from_folder(path, data, "text-classification", device="cpu")
    for batch in inputs.data.batches():
        inputs.task.losses(inputs.task.params, batch.values)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe\x00" * 9], ids=str)
def test_a_damaged_file_is_named(name, content, bad):
    (bad / name).write_bytes(content)
    with refused(InputError, bad, name):
        opened(bad)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('"hidden_size": 8', '"hidden_size": "eight"'),
        ('"hidden_act": "gelu"', '"hidden_act": []'),
        ('"cat": 0', '"cat": [0]'),
        ('"cat": 0', '"cat": "x"'),
        ('"cat": 0', '"cat": 10000000000'),
    ],
)
def test_settings_of_a_wrong_type_are_told_with_the_folder(before, after, bad):
    text = (bad / "config.json").read_text()
    assert before in text
    (bad / "config.json").write_text(text.replace(before, after))
    with refused(EigentraceError, bad):
        opened(bad)


@pytest.mark.slow
def test_no_damage_gives_a_traceback_or_a_crash(folder, tmp_path):
    names = sorted(path.name for path in folder.iterdir())

    def attempt(rng):
        shutil.rmtree(tmp_path / "model", ignore_errors=True)
        shutil.copytree(folder, tmp_path / "model")
        mutate(tmp_path / "model" / rng.choice(names), rng)
        opened(tmp_path / "model")

    assert outcomes(100, attempt) == {}
