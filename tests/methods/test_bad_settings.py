"""Settings, questions and checkpoints that make no sense must stop with a message that says what to do instead."""

import copy
import os

import numpy as np
import pytest
import torch
from torch import nn

import eigentrace as et
from eigentrace.errors import DataError, EigentraceWarning, InputError, MismatchError, NumericalError, UnsupportedError
from tests.helpers.small import CHEAP, cross_entropy, examples, fit, net, table

# --- the methods' settings --------------------------------------------------------------------------------------------

SETTINGS = {
    "keep above steps": (
        lambda: et.Arnoldi(steps=10, keep=11),
        "keep=11 eigenpairs cannot come from steps=10.*Raise steps",
    ),
    "inverse keep": (lambda: et.InverseArnoldi(steps=10, keep=11), "keep=11 eigenpairs cannot come from steps=10"),
    "keep 0": (lambda: et.Arnoldi(keep=0), "keep must be .* at least 1, got 0"),
    "half a step": (lambda: et.Arnoldi(steps=20.5), "steps must be a whole number of at least 1, got 20.5"),
    "half a row": (lambda: et.RandProj(keep=2.5), "keep must be a whole number of at least 1, got 2.5"),
    "half a sample": (lambda: et.Arnoldi(sample=2.5), "sample must be a whole number of at least 1, got 2.5"),
    "text seed": (lambda: et.Arnoldi(seed="a"), "seed must be a whole number of at least 0, got 'a'"),
    "text basis": (lambda: et.Arnoldi(basis="bf16"), "basis must be an eigentrace.Basis, got 'bf16'"),
    "text solver": (lambda: et.InverseArnoldi(solver="lissa"), "solver must be an eigentrace.Lissa, got 'lissa'"),
    "yes for a tail": (lambda: et.Arnoldi(tail=True), "tail must be 'auto', 'shaped', None or .* got True"),
    "list for a tail": (lambda: et.Arnoldi(tail=[1]), r"tail must be 'auto', 'shaped', None or .* got \[1\]"),
    "steps 0": (lambda: et.Arnoldi(steps=0), "steps must be .* at least 1, got 0"),
    "sample 0": (lambda: et.Arnoldi(sample=0), "sample must be .* at least 1, got 0"),
    "text steps": (lambda: et.Arnoldi(steps="200"), "steps must be .* got '200'"),
    "negative tail": (lambda: et.Arnoldi(tail=-0.1), "tail is δ, a positive number .* got -0.1"),
    "zero tail": (lambda: et.Arnoldi(tail=0), "tail is δ, a positive number .* got 0"),
    "unknown tail": (lambda: et.Arnoldi(tail="none"), "tail must be 'auto', 'shaped', None or .* got 'none'"),
    "basis dtype": (lambda: et.Basis(dtype="fp16"), "dtype must be 'fp32' or 'bf16', got 'fp16'"),
    "basis place": (lambda: et.Basis(place="disk"), "place must be 'device' or 'host', got 'disk'"),
    "basis size": (lambda: et.Basis(max_vectors=2), "max_vectors must be at least 3, got 2"),
    "basis restart": (lambda: et.Basis(max_vectors=5, restart_keep=5), "between 1 and max_vectors - 1, got 5"),
    "restart alone": (lambda: et.Basis(restart_keep=5), "restart_keep .* got 5 with max_vectors=None"),
    "too few carried": (
        lambda: et.Arnoldi(keep=20, basis=et.Basis(max_vectors=20)),
        "12 carried vectors cannot settle keep=20",
    ),
    "RandProj keep": (lambda: et.RandProj(keep=0), "keep must be .* at least 1, got 0"),
    "RandSelect keep": (lambda: et.RandSelect(keep=True), "keep must be .* got True"),
    "lissa damping": (lambda: et.Lissa(damping=1.0), "damping must be below 1, got 1.0"),
    "lissa negative": (lambda: et.Lissa(damping=-0.1), "damping must be a finite number of at least 0, got -0.1"),
    "lissa scale": (lambda: et.Lissa(scale=0.0), "scale must be positive or 'auto', got 0.0"),
    "lissa scale text": (lambda: et.Lissa(scale="big"), "scale must be positive or 'auto', got 'big'"),
    "lissa depth": (lambda: et.Lissa(depth=0), "depth must be .* at least 1, got 0"),
    "exact damping": (lambda: et.ExactHessian(damping=-1), "damping must be .* at least 0, got -1"),
}


@pytest.mark.parametrize(("make", "match"), table(SETTINGS))
def test_setting_is_refused(make, match):
    with pytest.raises(InputError, match=match):
        make()


def loss_task():
    return et.Task(net(), cross_entropy)


FITS = {
    "no outputs": (
        et.Arnoldi(steps=4, keep=2, curvature="gauss-newton"),
        {},
        InputError,
        "gauss-newton' needs a task that",
    ),
    "unknown curvature": (
        et.Arnoldi(steps=4, keep=2, curvature="fisher"),
        {},
        InputError,
        "'gauss-newton', got 'fisher'",
    ),
    "precision": (et.Arnoldi(steps=4, keep=2, precision="fp16"), {}, InputError, "precision must be .* got 'fp16'"),
    "restart spread": (
        et.Arnoldi(steps=9, keep=2, sample=4, spread=True, basis=et.Basis(max_vectors=5)),
        {},
        InputError,
        r"cannot be restarted when the matrix changes .*spread=False",
    ),
    "too large": (
        et.ExactHessian(max_params=30),
        {},
        InputError,
        r"exact Hessian of 31 parameters .* stops at 30\. Select fewer",
    ),
    "select too many": (et.RandSelect(keep=32), {}, InputError, "keep=32 is more than the 31 selected parameters"),
    "num_train 0": (CHEAP, {"num_train": 0}, InputError, "num_train .* at least 1, got 0"),
    "singular": (et.ExactHessian(), {}, NumericalError, "Hessian is singular: .*Give damping, or the l2"),
    "lissa diverges": (et.Lissa(scale=1e-3), {}, NumericalError, "LiSSA diverged at iteration .* Raise scale"),
    "rates": (et.TracIn(learning_rates=[0.1, 0.2]), {}, InputError, "Got 2 learning_rates for 1 checkpoints"),
    "negative rate": (et.TracIn(learning_rates=[-0.1]), {}, InputError, r"learning_rates\[0\] must be .* at least 0"),
}


@pytest.mark.parametrize(("method", "options", "error", "match"), table(FITS))
def test_fit_is_refused(method, options, error, match):
    with pytest.raises(error, match=match):
        fit(loss_task(), method=method, **options).self_influence(examples())


# --- what a fit is asked ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def indefinite():
    """A truncated fit with eigenvalues of both signs."""
    return fit(loss_task(), method=et.Arnoldi(steps=31, keep=31, tail=None))


@pytest.fixture(scope="module")
def gradients():
    return fit(method=et.TracIn())


@pytest.fixture(scope="module")
def lissa():
    return fit(method=et.Lissa(depth=2, damping=0.1))


ASKED = {
    "normalize": (
        lambda f: f.self_influence(examples(), normalize="l2"),
        InputError,
        "'gradient' or 'metric', got 'l2'",
    ),
    "unit": (
        lambda f: f.influence(examples(), examples(), unit="bits"),
        InputError,
        "unit must be None or 'nats', got 'bits'",
    ),
    "normalised nats": (
        lambda f: f.self_influence(examples(), normalize="gradient", unit="nats"),
        InputError,
        "normalised by 'gradient' are ratios without a unit",
    ),
    "metric of self": (
        lambda f: f.distill(tail=0.1).self_influence(examples(), normalize="metric"),
        InputError,
        "is 1 for every example",
    ),
    "negative metric": (
        lambda f: f.influence(examples(), examples(), normalize="metric"),
        NumericalError,
        r"negative eigenvalues .* fitted.distill\(positive_only=True\), a tail",
    ),
    "keep too large": (lambda f: f.distill(keep=32), InputError, r"holds \d+ directions, so keep=32 is too many"),
    "keep 0": (lambda f: f.distill(keep=0), InputError, "keep must be a whole number of at least 1, got 0"),
    "tail": (lambda f: f.distill(tail=-1.0), InputError, "tail is δ"),
    "data": (lambda f: f.self_influence(None), DataError, "Expected data, got NoneType"),
    "queries": (lambda f: f.influence(examples(), []), DataError, "list of batches is empty"),
}


@pytest.mark.parametrize(("ask", "error", "match"), table(ASKED))
def test_question_is_refused(indefinite, ask, error, match):
    with pytest.raises(error, match=match):
        ask(indefinite)


@pytest.mark.parametrize("change", [{"positive_only": True}, {"tail": "auto"}, {"tail": 0.5}])
def test_remedies_of_a_negative_metric_work(indefinite, change):
    cosines = indefinite.distill(**change).influence(examples(), examples(), normalize="metric")
    assert (indefinite.spectrum.eigenvalues < 0).any()
    assert cosines.abs().max() <= 1 + 1e-4


UNKNOWN = {
    "nats": (lambda f: f.self_influence(examples(), unit="nats"), "no curvature, so its scores .* have no unit"),
    "distill": (lambda f: f.distill(keep=1), "TracIn keeps no eigenpairs"),
    "spectrum": (lambda f: f.spectrum, "TracIn has no spectrum"),
    "features": (
        lambda f: f.features(examples()),
        "TracIn keeps no directions to project on",
    ),
}


@pytest.mark.parametrize(("ask", "match"), table(UNKNOWN))
def test_gradient_method_refuses(gradients, ask, match):
    with pytest.raises(UnsupportedError, match=match):
        ask(gradients)


def test_solving_method_refuses(lissa, tmp_path):
    with pytest.raises(UnsupportedError, match="Lissa keeps no directions to project on"):
        lissa.features(examples())
    with pytest.raises(UnsupportedError, match="Lissa caches nothing, so there is nothing to save"):
        lissa.save(tmp_path / "fit")
    with pytest.raises(UnsupportedError, match="Lissa has no spectrum"):
        _ = lissa.spectrum
    with pytest.raises(UnsupportedError, match="Lissa keeps no eigenpairs"):
        lissa.distill(keep=2)
    with pytest.raises(NumericalError, match="promises nothing about them"):
        lissa.influence(examples(), examples(), normalize="metric")


def test_loss_refuses(tmp_path):
    fitted = fit(method=et.Loss())
    asked = {
        "Loss keeps no directions to project on": lambda: fitted.features(examples()),
        "Loss caches nothing": lambda: fitted.save(tmp_path / "fit"),
        "normalize='gradient' has no meaning": lambda: fitted.self_influence(examples(), normalize="gradient"),
        "scores single examples, not pairs": lambda: fitted.influence(examples(), examples()),
        "have no unit": lambda: fitted.self_influence(examples(), unit="nats"),
    }
    for match, ask in asked.items():
        with pytest.raises(UnsupportedError, match=match):
            ask()


# --- checkpoints of TracIn --------------------------------------------------------------------------------------------


def state(seed=0):
    return copy.deepcopy(net(seed).state_dict())


STATES = {
    "missing key": (
        lambda: {k: v for k, v in state().items() if k != "0.bias"},
        r"lacks 1 of the model's 4 .*'0\.bias'",
    ),
    "another model": (lambda: nn.Conv1d(1, 1, 1).state_dict(), "lacks 4 of the model's 4 tensors.*another model"),
    "wrong shape": (
        lambda: state() | {"0.bias": torch.zeros(5)},
        r"'0\.bias' has shape \(5,\), the model's has \(4,\)",
    ),
    "no tensors": (lambda: {"epoch": 3}, "the state dict holds no state dict: expected tensors by name"),
}


@pytest.mark.parametrize(("make", "match"), table(STATES))
def test_checkpoint_of_another_model(make, match):
    with pytest.raises(MismatchError, match=match):
        fit(method=et.TracIn([state(), make()]))


def test_checkpoint_of_a_larger_model_warns():
    with pytest.warns(EigentraceWarning, match=r"has 1 tensors that the model has not \(first: '4.weight'\)"):
        fit(method=et.TracIn(state() | {"4.weight": torch.zeros(3)}))


def test_uncopied_state_dicts_are_refused():
    model = net()
    with pytest.raises(InputError, match=r"State dicts 0 and 2 are the same tensors.*copy\.deepcopy"):
        fit(method=et.TracIn([model.state_dict(), state(), model.state_dict()]))


def test_checkpoint_of_another_kind_is_refused():
    with pytest.raises(InputError, match="a path or a state dict, got int"):
        fit(method=et.TracIn([3]))
    with pytest.raises(InputError, match="No checkpoints given"):
        fit(method=et.TracIn([]))


def test_checkpoint_path_is_missing(tmp_path):
    with pytest.raises(InputError, match=r"no\.pt does not exist"):
        fit(method=et.TracIn(tmp_path / "no.pt"))
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(InputError, match=r"holds no checkpoints: looked for model\.safetensors"):
        fit(method=et.TracIn(tmp_path))


def test_single_checkpoint_of_a_training_folder_warns(tmp_path):
    torch.save(state(), tmp_path / "epoch=1-step=9.ckpt")
    with pytest.warns(EigentraceWarning, match="single checkpoint.*delete earlier ones by default"):
        fit(method=et.TracIn(tmp_path))


class Payload:
    """Unpickling this creates a file: the proof that code ran."""

    def __init__(self, proof):
        self.proof = proof

    def __reduce__(self):
        return os.mkdir, (str(self.proof),)


def test_pickle_with_code_is_not_executed(tmp_path):
    file, proof = tmp_path / "model.pt", tmp_path / "code-ran"
    torch.save(state() | {"payload": Payload(proof)}, file)
    with pytest.raises(InputError, match=r"holds more than tensors, and reading it would run code .*mkdir"):
        fit(method=et.TracIn(file))
    assert not proof.exists()
    torch.load(file, weights_only=False)  # the payload is real
    assert proof.exists()


@pytest.mark.parametrize("value", ["5", 1.5, True, 0])
@pytest.mark.parametrize("method", [CHEAP, et.Loss(), et.ExactHessian(damping=1.0)])
def test_num_train_must_be_a_count(method, value):
    with pytest.raises(InputError, match="num_train must be a whole number of at least 1, got"):
        fit(method=method, num_train=value)


def test_numpy_numbers_are_numbers():
    assert fit(method=et.RandProj(keep=np.int64(2), seed=np.int32(1))).features(examples()).shape == (12, 2)
    state = net(1).state_dict()
    fitted = fit(method=et.TracIn([state, net(2).state_dict()], learning_rates=np.array([0.1, 0.2], dtype=np.float32)))
    assert [block.identity for block in fitted.blocks] == pytest.approx([0.1, 0.2])


@pytest.mark.parametrize(("rates", "match"), [([], "Got 0 learning_rates for 1"), ([float("inf")], "finite number")])
def test_learning_rates_are_checked(rates, match):
    with pytest.raises(InputError, match=match):
        fit(method=et.TracIn([net(1).state_dict()], learning_rates=rates))


def test_the_loss_baseline_checks_what_it_returns():
    x, y = examples()
    fitted = fit(method=et.Loss())
    bad = x.clone()
    bad[7] = torch.nan
    with pytest.raises(NumericalError, match="row 7"):
        fitted.self_influence((bad, y))
