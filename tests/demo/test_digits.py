import importlib.util

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eigentrace.demo.digits import load_digits, relabel
from eigentrace.errors import InputError
from tests.helpers.expecting import refused
from tests.helpers.places import ROOT

TOOL = ROOT / "tools" / "make_digits.py"


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def test_the_embedded_digits():
    digits = load_digits()
    assert digits.train_images.shape == (6000, 1, 28, 28)
    assert digits.test_images.shape == (1000, 1, 28, 28)
    assert digits.train_images.dtype == torch.float32
    assert digits.train_labels.dtype == digits.test_labels.dtype == torch.int64
    assert (digits.train_images.min(), digits.train_images.max()) == (0, 1)
    assert digits.train_labels.bincount().tolist() == [576, 655, 570, 600, 572, 579, 582, 640, 603, 623]
    assert digits.test_labels.bincount().tolist() == [87, 117, 102, 100, 105, 87, 87, 102, 104, 109]
    # MNIST's mean grey value is .1307; a tenth of it drawn at random stays within a few standard errors (.0005).
    assert digits.train_images.mean().item() == pytest.approx(0.1307, abs=0.0015)


@given(st.integers(0, 300), st.floats(0, 1), st.integers(2, 12), st.integers(0, 1000))
def test_relabel_changes_the_asked_number_and_reports_it(size, fraction, num_classes, seed):
    labels = torch.randint(num_classes, (size,), generator=generator(seed))
    before = labels.clone()
    result = relabel(labels, fraction, num_classes, generator(seed + 1))
    assert torch.equal(labels, before)
    assert int(result.is_wrong.sum()) == round(fraction * size)
    assert torch.equal(result.is_wrong, result.labels != labels)
    assert size == 0 or 0 <= int(result.labels.min()) <= int(result.labels.max()) < num_classes


def test_relabel_chooses_uniformly_among_the_other_classes():
    changed = relabel(torch.full((9000,), 4), 1.0, 10, generator())
    counts = changed.labels.bincount(minlength=10)
    assert counts[4] == 0
    others = counts[counts > 0]
    assert len(others) == 9
    # 1000 expected in each of 9 classes, standard deviation 30.
    assert int((others - 1000).abs().max()) < 150


def test_relabel_depends_on_the_generator_alone():
    labels = torch.arange(100) % 10
    state = torch.get_rng_state()
    first, second = (relabel(labels, 0.3, 10, generator(5)).labels for _ in range(2))
    assert torch.equal(first, second)
    assert not torch.equal(first, relabel(labels, 0.3, 10, generator(6)).labels)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize(
    ("labels", "fraction", "num_classes", "mentions"),
    [
        ([0, 1], 1.5, 2, ("fraction", 1.5)),
        ([0, 0], 0.5, 1, ("num_classes", 2, 1)),
        ([0, 7], 0.5, 3, ("labels", 0, 2, 7)),
        ([-1, 0], 0.5, 3, ("labels", -1, 0, 2)),
        ([[0, 1]], 0.5, 3, ("labels", "(1, 2)")),
    ],
)
def test_relabel_refuses(labels, fraction, num_classes, mentions):
    with refused(InputError, *mentions):
        relabel(torch.tensor(labels), fraction, num_classes, generator())


def test_the_maker_writes_the_same_bytes_twice(tmp_path):
    spec = importlib.util.spec_from_file_location("make_digits", TOOL)
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    arrays = {"x": np.arange(12, dtype=np.uint8).reshape(3, 4), "y": np.array([7], np.uint8)}
    first, second = tmp_path / "first.npz", tmp_path / "second.npz"
    tool.write(arrays, first)
    tool.write(arrays, second)
    assert first.read_bytes() == second.read_bytes()
    with np.load(first) as loaded:
        np.testing.assert_array_equal(loaded["x"], arrays["x"])
        np.testing.assert_array_equal(loaded["y"], arrays["y"])


def test_the_maker_draws_from_each_half(tmp_path):
    spec = importlib.util.spec_from_file_location("make_digits", TOOL)
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    train, test = np.arange(60000) % 251, np.arange(10000) % 241
    source = tmp_path / "mnist.npz"
    np.savez(source, x_train=train, y_train=train, x_test=test, y_test=test)
    arrays = tool.subsample(source)
    assert {name: len(a) for name, a in arrays.items()} == {
        "x_train": 6000,
        "y_train": 6000,
        "x_test": 1000,
        "y_test": 1000,
    }
    np.testing.assert_array_equal(arrays["x_train"], arrays["y_train"])
    np.testing.assert_array_equal(arrays["x_test"], arrays["y_test"])
