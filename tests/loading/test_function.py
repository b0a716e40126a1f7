"""A task and its data from a function that the user names."""

import sys

import pyarrow as pa
import pytest
import torch

import eigentrace as et
from eigentrace.errors import InputError
from eigentrace.loading import Inputs, from_function
from tests.helpers.expecting import refused
from tests.helpers.small import examples, net, table

SOURCE = """
import torch
import eigentrace as et
from eigentrace.loading import Inputs

SIZE = 12

def made(size=SIZE, classes=3):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, classes)
    return et.classification(model), [(torch.randn(size, 3), torch.randint(0, classes, (size,)))]

def whole(size=4):
    task, batches = made(size)
    return Inputs(task, et.Data.from_batches(batches))

def swapped():
    return made()[::-1]

def nothing():
    pass

def needs(path):
    pass
"""


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    """Work in a folder with such a module, and forget what was imported there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", None)):
            del sys.modules[name]


@pytest.fixture
def written(tmp_path):
    package = tmp_path / "mine"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "things.py").write_text(SOURCE)
    (package / "broken.py").write_text("import no_such_dependency")
    return package


def test_a_module_of_the_current_directory(written):
    inputs = from_function("mine.things:made", {"size": 5})
    assert len(inputs.data) == 5
    assert inputs.task.coverage.selected == 12
    assert inputs.columns is None
    assert inputs.source is None


def test_a_file_and_its_neighbours(written, tmp_path, monkeypatch):
    (written / "neighbour.py").write_text("CLASSES = 4")
    (written / "json.py").write_text(
        f"{SOURCE}\nimport neighbour\n\ndef wide():\n    return made(2, neighbour.CLASSES)"
    )
    monkeypatch.chdir("/")
    inputs = from_function(f"{written / 'json.py'}:wide")
    assert inputs.task.coverage.selected == 16
    assert sys.modules["json"].__file__ != str(written / "json.py")


def test_inputs_pass_through(written):
    assert len(from_function("mine.things:whole", {"size": 7}).data) == 7


def test_what_comes_back_can_be_fitted(written):
    inputs = from_function("mine/things.py:made")
    scores = et.RandProj(keep=2).fit(inputs.task, inputs.data).self_influence(inputs.data)
    assert scores.shape == (12,)
    assert torch.isfinite(scores).all()


WRONG = {
    "no colon": ("mine.things", {}, ("'mine.things'", "package.module:function")),
    "nothing before the colon": (":made", {}, ("':made'", "package.module:function")),
    "no such package": ("ours.things:made", {}, ("'ours.things'", "'ours'")),
    "no such module": ("mine.other:made", {}, ("'mine.other'",)),
    "no such file": ("mine/other.py:made", {}, ("mine/other.py",)),
    "no such function": ("mine.things:making", {}, ("'making'", "made, needs, nothing")),
    "no function": ("mine.things:SIZE", {}, ("'SIZE'", "mine.things")),
    "unknown argument": ("mine.things:made", {"length": 3}, ("(size=12, classes=3)", "(length)")),
    "missing argument": ("mine.things:needs", {}, ("'path'",)),
    "nothing back": ("mine.things:nothing", {}, ("NoneType", "(task, data)")),
    "the wrong way round": ("mine.things:swapped", {}, ("(list, Task)", "(task, data)")),
}


@pytest.mark.parametrize(("name", "args", "mentions"), table(WRONG))
def test_what_is_wrong_is_said(name, args, mentions, written):
    with refused(InputError, *mentions):
        from_function(name, args)


def test_a_missing_dependency_of_the_module_is_not_hidden(written):
    with refused(ModuleNotFoundError, "no_such_dependency"):
        from_function("mine.broken:made")


def test_inputs_check_themselves():
    task, data = et.classification(net()), et.Data.from_batches([examples(4)])
    with refused(InputError, "columns", 3, 4):
        Inputs(task, data, pa.table({"group": [1, 2, 3]}))
    with refused(InputError, "Sequential", "Data"):
        Inputs(net(), data)
