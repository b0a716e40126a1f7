"""A fit answers for the parameters it was made at, and says so when they are gone."""

import copy

import pytest
import torch

import eigentrace as et
from eigentrace.errors import MismatchError
from tests.helpers.expecting import refused
from tests.helpers.small import examples, fit, net

METHODS = [et.Arnoldi(steps=5, keep=2), et.RandProj(2), et.TracIn(), et.Lissa(depth=2), et.Loss()]
pytestmark = pytest.mark.filterwarnings("ignore::eigentrace.errors.ConvergenceWarning")


@pytest.mark.parametrize("method", METHODS, ids=lambda m: type(m).__name__)
def test_training_on_after_a_fit_is_refused(method):
    model = net()
    fitted = fit(et.classification(model), method=method)
    fitted.self_influence(examples())
    with torch.no_grad():
        model[0].weight += 0.1
    with refused(MismatchError, "1 of 4", "'0.weight'"):
        fitted.self_influence(examples())


def test_writes_through_data_are_refused():
    model = net()
    fitted = fit(et.classification(model))
    model[0].weight.data.mul_(1.001)
    with refused(MismatchError, "1 of 4", "'0.weight'"):
        fitted.self_influence(examples())


def test_a_changed_model_cannot_be_saved_as_the_fitted_one(tmp_path):
    model = net()
    fitted = fit(et.classification(model))
    model[0].weight.data.mul_(3)
    with refused(MismatchError, "1 of 4", "'0.weight'"):
        fitted.save(tmp_path / "fit")
    exact = fit(et.classification(model), method=et.ExactHessian(damping=1.0))
    model[0].weight.data.mul_(3)
    exact.save(tmp_path / "fit")  # it has its own numbers, and they are what is fingerprinted
    with refused(MismatchError, tmp_path / "fit", "`params`"):
        et.load(tmp_path / "fit", et.classification(model))


def test_replaced_parameters_are_refused(tmp_path):
    model = net()
    task = et.classification(model)
    fit(task).save(tmp_path / "fit")
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    with refused(MismatchError, "4 of 4", "'0.weight'"):
        fit(task)
    with refused(MismatchError, "4 of 4", "'0.weight'"):
        et.load(tmp_path / "fit", task).self_influence(examples())


def test_complex_buffers_are_sealed_without_a_warning():
    model = net()
    model.register_buffer("freqs", torch.tensor([1 + 2j, 3 - 1j]))
    fitted = fit(et.classification(model))
    model.freqs.mul_(1j)
    with refused(MismatchError, "1 of 5", "'freqs'"):
        fitted.self_influence(examples())


def test_putting_the_weights_back_is_enough():
    model = net()
    fitted = fit(et.classification(model))
    before, kept = fitted.self_influence(examples()), copy.deepcopy(model.state_dict())
    with torch.no_grad():
        model[2].bias.zero_()
    model.load_state_dict(kept)
    assert torch.equal(fitted.self_influence(examples()), before)


def test_a_task_made_before_training_fits_what_was_trained():
    model = net()
    task = et.classification(model)
    with torch.no_grad():
        model[0].weight.mul_(2)
    found, fresh = (fit(t).self_influence(examples()) for t in (task, et.classification(model)))
    assert torch.equal(found, fresh)


def test_the_exact_hessian_keeps_its_own_copy():
    model = net()
    fitted = fit(et.classification(model), method=et.ExactHessian(damping=1.0))
    before = fitted.self_influence(examples())
    with torch.no_grad():
        model[0].weight += 1
    assert torch.equal(fitted.self_influence(examples()), before)


def test_a_loaded_fit_is_sealed_too(tmp_path):
    model = net()
    fit(et.classification(model)).save(tmp_path / "fit")
    loaded = et.load(tmp_path / "fit", et.classification(model))
    with torch.no_grad():
        model[0].weight += 0.1
    with refused(MismatchError, "1 of 4", "'0.weight'"):
        loaded.self_influence(examples())
