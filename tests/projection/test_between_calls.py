"""Nothing that one call of a fit learnt about the model outlives it: the next call sees the model as it is then."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import eigentrace as et
from eigentrace.errors import MismatchError, UnsupportedError
from eigentrace.projection import layerwise
from eigentrace.projection.engine import Compute
from tests.helpers.expecting import refused

LAYERWISE, REVERSE = Compute(engine="layerwise"), Compute(engine="reverse")
METHODS = {"features": et.RandProj(keep=3), "norms": et.TracIn()}


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1), nn.Tanh(), nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(64, 3)
    ).eval()


def images(size=20, side=6, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 1, side, side, generator=generator), torch.arange(size) % 3


def flip_large(module, args, output):
    """Turn the examples over, in batches that are larger than those that planning looks at."""
    return output.flip(0) if len(output) > 6 else output


def add_hidden(module, args, output):
    """Use the weight once more, in a way that no rule follows."""
    return output + 0.3 * F.prelu(output, module.weight.mean().reshape(1))


def leave_alone(model):
    pass


def flip(model):
    model[0].register_forward_hook(lambda module, args, output: output.flip(0))
    model[2].register_forward_hook(lambda module, args, output: output.flip(0))


def flip_later(model):
    model[0].register_forward_hook(flip_large)
    model[2].register_forward_hook(flip_large)


def hide(model):
    model[2].register_forward_hook(add_hidden)


def replace_layer(model):
    model[3] = nn.Sequential(nn.Softplus(), nn.LayerNorm((4, 4, 4), elementwise_affine=False))


def other_forward(model):
    model[2].forward = lambda x: F.conv2d(torch.sin(x), model[2].weight, 2 * model[2].bias)


def freeze(model):
    model[0].requires_grad_(False)


def train_mode(model):
    model.train()


CHANGES = [leave_alone, flip, flip_later, hide, replace_layer, other_forward, freeze, train_mode]


def asked(fitted, data, compute=None):
    """Return what a fit projects, or norms where it keeps no directions."""
    if fitted.method["name"] == "TracIn":
        return fitted.self_influence(data, compute=compute)
    return fitted.features(data, compute=compute)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("what", METHODS)
def test_a_changed_model_is_seen_as_it_is_now(change, what):
    model = network()
    fitted = METHODS[what].fit(et.classification(model), images())
    before = asked(fitted, images())
    change(model)
    found = asked(fitted, images())
    torch.testing.assert_close(found, asked(fitted, images(), REVERSE), rtol=1e-4, atol=1e-6)
    fresh = METHODS[what].fit(et.classification(model, params="all"), images())
    torch.testing.assert_close(found, asked(fresh, images()), rtol=1e-4, atol=1e-6)
    same = change in (leave_alone, flip, flip_later, freeze, train_mode)
    assert torch.allclose(found, before, rtol=1e-4, atol=1e-6) == same


@pytest.mark.parametrize("what", METHODS)
@pytest.mark.parametrize("data", [images(7, seed=2), images(1, seed=3), images(40, seed=4)], ids=["7", "1", "40"])
def test_other_batches_of_one_fit(what, data):
    fitted = METHODS[what].fit(et.classification(network()), images())
    for batch_size in (20, 5, 3, 1):
        found = asked(fitted, et.Data(TensorDataset(*data), batch_size=batch_size))
        torch.testing.assert_close(found, asked(fitted, data, REVERSE), rtol=1e-4, atol=1e-6)


def test_images_of_another_size():
    model = network()
    model[4], model[5] = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()), nn.Linear(4, 3)
    fitted = METHODS["features"].fit(et.classification(model), images())
    for side in (6, 9, 6):
        data = images(side=side)
        torch.testing.assert_close(fitted.features(data), fitted.features(data, compute=REVERSE), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "mention"),
    [(lambda m: m.double(), "'0.weight'"), (lambda m: m[2].weight.data.mul_(1.01), "'2.weight'")],
    ids=["type", "step"],
)
def test_other_numbers_are_refused_after_an_answer(change, mention):
    model = network()
    fitted = METHODS["features"].fit(et.classification(model), images())
    fitted.features(images())
    change(model)
    with refused(MismatchError, mention):
        fitted.features(images())


@pytest.mark.parametrize("what", METHODS)
def test_examples_moved_in_large_batches_only_are_refused(what):
    model = network()
    fitted = METHODS[what].fit(et.classification(model), images())
    asked(fitted, images(), LAYERWISE)
    flip_later(model)
    with refused(UnsupportedError, "layerwise", "example 0", "batch 1", 20):
        asked(fitted, images(), LAYERWISE)


@pytest.mark.parametrize("what", METHODS)
def test_one_tapped_pass_a_batch_where_gradients_agree(what, monkeypatch):
    fitted = METHODS[what].fit(et.classification(network()), images())
    sizes, tapped = [], layerwise.tapped
    monkeypatch.setattr(
        layerwise, "tapped", lambda plan, job, b, size: sizes.append(size) or tapped(plan, job, b, size)
    )
    asked(fitted, et.Data(TensorDataset(*images()), batch_size=8))
    assert sizes == [8, 8, 4]


def test_parameters_without_a_rule_do_not_count_as_moved(monkeypatch):
    model = network()
    hide(model)
    fitted = METHODS["norms"].fit(et.classification(model), images())
    sizes, tapped = [], layerwise.tapped
    monkeypatch.setattr(
        layerwise, "tapped", lambda plan, job, b, size: sizes.append(size) or tapped(plan, job, b, size)
    )
    found = asked(fitted, et.Data(TensorDataset(*images()), batch_size=10))
    assert sizes[-2:] == [10, 10]
    assert "2.weight" in fitted.task.coverage.without_rule
    torch.testing.assert_close(found, asked(fitted, images(), REVERSE), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("settings", [Compute(memory=64), Compute(precision="bf16")], ids=["memory", "bf16"])
def test_tapped_passes_decide_where_a_gradient_cannot(settings, monkeypatch):
    fitted = METHODS["norms"].fit(et.classification(network()), images())
    sizes, tapped = [], layerwise.tapped
    monkeypatch.setattr(
        layerwise, "tapped", lambda plan, job, b, size: sizes.append(size) or tapped(plan, job, b, size)
    )
    found = fitted.self_influence(images(), compute=settings)
    assert sizes[:4] == [20, 1, 1, 1]
    torch.testing.assert_close(found, asked(fitted, images(), REVERSE), rtol=0.1, atol=1e-3)
