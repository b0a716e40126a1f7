"""Settings, questions and checkpoints that make no sense must stop with a message that says what to do instead."""

import copy
import os

import numpy as np
import pytest
import torch
from torch import nn

import eigentrace as et
from eigentrace.errors import (
    DataError,
    EigentraceWarning,
    InputError,
    MemoryLimitError,
    MismatchError,
    NumericalError,
    UnsupportedError,
)
from eigentrace.krylov import plan
from tests.helpers.expecting import refused, warned
from tests.helpers.small import CHEAP, cross_entropy, examples, fit, net, table

# --- the methods' settings --------------------------------------------------------------------------------------------

TAILS = ("'auto'", "'shaped'", None)  # what a tail may be beside a number
SETTINGS = {
    "keep above steps": (lambda: et.Arnoldi(steps=10, keep=11), ("keep=11", "steps=10")),
    "inverse keep": (lambda: et.InverseArnoldi(steps=10, keep=11), ("keep=11", "steps=10")),
    "keep 0": (lambda: et.Arnoldi(keep=0), ("keep", 1, 0)),
    "half a step": (lambda: et.Arnoldi(steps=20.5), ("steps", 1, 20.5)),
    "half a row": (lambda: et.RandProj(keep=2.5), ("keep", 1, 2.5)),
    "half a sample": (lambda: et.Arnoldi(sample=2.5), ("sample", 1, 2.5)),
    "text seed": (lambda: et.Arnoldi(seed="a"), ("seed", 0, "'a'")),
    "text basis": (lambda: et.Arnoldi(basis="bf16"), ("basis", "eigentrace.Basis", "'bf16'")),
    "text solver": (lambda: et.InverseArnoldi(solver="lissa"), ("solver", "eigentrace.Lissa", "'lissa'")),
    "yes for a tail": (lambda: et.Arnoldi(tail=True), ("tail", *TAILS, True)),
    "list for a tail": (lambda: et.Arnoldi(tail=[1]), ("tail", *TAILS, [1])),
    "steps 0": (lambda: et.Arnoldi(steps=0), ("steps", 1, 0)),
    "sample 0": (lambda: et.Arnoldi(sample=0), ("sample", 1, 0)),
    "text steps": (lambda: et.Arnoldi(steps="200"), ("steps", "'200'")),
    "negative tail": (lambda: et.Arnoldi(tail=-0.1), ("tail", -0.1)),
    "zero tail": (lambda: et.Arnoldi(tail=0), ("tail", 0)),
    "unknown tail": (lambda: et.Arnoldi(tail="none"), ("tail", *TAILS, "'none'")),
    "basis dtype": (lambda: et.Basis(dtype="fp16"), ("dtype", "'fp32'", "'bf16'", "'fp16'")),
    "basis place": (lambda: et.Basis(place="disk"), ("place", "'device'", "'host'", "'disk'")),
    "basis size": (lambda: et.Basis(max_vectors=2), ("max_vectors", 3, 2)),
    "basis restart": (lambda: et.Basis(max_vectors=5, restart_keep=5), ("restart_keep", "max_vectors=5", 5)),
    "restart alone": (lambda: et.Basis(restart_keep=5), ("restart_keep", "max_vectors=None", 5)),
    "too few carried": (lambda: et.Arnoldi(keep=20, basis=et.Basis(max_vectors=20)), ("keep=20", "max_vectors", 12)),
    "RandProj keep": (lambda: et.RandProj(keep=0), ("keep", 1, 0)),
    "RandSelect keep": (lambda: et.RandSelect(keep=True), ("keep", True)),
    "lissa damping": (lambda: et.Lissa(damping=1.0), ("damping", 1.0)),
    "lissa negative": (lambda: et.Lissa(damping=-0.1), ("damping", 0, -0.1)),
    "lissa scale": (lambda: et.Lissa(scale=0.0), ("scale", "'auto'", 0.0)),
    "lissa scale text": (lambda: et.Lissa(scale="big"), ("scale", "'auto'", "'big'")),
    "lissa depth": (lambda: et.Lissa(depth=0), ("depth", 1, 0)),
    "exact damping": (lambda: et.ExactHessian(damping=-1), ("damping", 0, -1)),
}


@pytest.mark.parametrize(("make", "mentions"), table(SETTINGS))
def test_setting_is_refused(make, mentions):
    with refused(InputError, *mentions):
        make()


def loss_task():
    return et.Task(net(), cross_entropy)


FITS = {
    "no outputs": (
        et.Arnoldi(steps=4, keep=2, curvature="gauss-newton"),
        {},
        InputError,
        ("curvature='gauss-newton'", "outputs", "output_loss"),
    ),
    "unknown curvature": (
        et.Arnoldi(steps=4, keep=2, curvature="fisher"),
        {},
        InputError,
        ("curvature", "'auto'", "'hessian'", "'gauss-newton'", "'fisher'"),
    ),
    "precision": (et.Arnoldi(steps=4, keep=2, precision="fp16"), {}, InputError, ("precision", "'fp16'")),
    "restart spread": (
        et.Arnoldi(steps=9, keep=2, sample=4, spread=True, basis=et.Basis(max_vectors=5)),
        {},
        InputError,
        ("Basis(max_vectors=None)", "spread=False"),
    ),
    "too large": (
        et.ExactHessian(max_params=30),
        {},
        InputError,
        ("max_params", 31, 30),
    ),
    "select too many": (et.RandSelect(keep=32), {}, InputError, ("keep=32", 31)),
    "num_train 0": (CHEAP, {"num_train": 0}, InputError, ("num_train", 1, 0)),
    "singular": (et.ExactHessian(), {}, NumericalError, ("Hessian", "damping", "l2")),
    "lissa diverges": (et.Lissa(scale=1e-3), {}, NumericalError, ("scale=0.001", 1, 100)),
    "rates": (et.TracIn(learning_rates=[0.1, 0.2]), {}, InputError, ("learning_rates", 2, 1)),
    "negative rate": (et.TracIn(learning_rates=[-0.1]), {}, InputError, ("learning_rates[0]", 0, -0.1)),
}


@pytest.mark.parametrize(("method", "options", "error", "mentions"), table(FITS))
def test_fit_is_refused(method, options, error, mentions):
    with refused(error, *mentions):
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
        ("normalize", "'gradient'", "'metric'", "'l2'"),
    ),
    "unit": (
        lambda f: f.influence(examples(), examples(), unit="bits"),
        InputError,
        ("unit", "'nats'", "'bits'"),
    ),
    "normalised nats": (
        lambda f: f.self_influence(examples(), normalize="gradient", unit="nats"),
        InputError,
        ("'gradient'", "unit=None"),
    ),
    "metric of self": (
        lambda f: f.distill(tail=0.1).self_influence(examples(), normalize="metric"),
        InputError,
        ("normalize='metric'",),
    ),
    "negative metric": (
        lambda f: f.influence(examples(), examples(), normalize="metric"),
        NumericalError,
        ("normalize='metric'", "fitted.distill(positive_only=True)"),
    ),
    "keep too large": (lambda f: f.distill(keep=32), InputError, ("directions", "keep=32")),
    "keep 0": (lambda f: f.distill(keep=0), InputError, ("keep", 1, 0)),
    "tail": (lambda f: f.distill(tail=-1.0), InputError, ("tail", -1.0)),
    "data": (lambda f: f.self_influence(None), DataError, ("NoneType",)),
    "queries": (lambda f: f.influence(examples(), []), DataError, ("[]",)),
}


@pytest.mark.parametrize(("ask", "error", "mentions"), table(ASKED))
def test_question_is_refused(indefinite, ask, error, mentions):
    with refused(error, *mentions):
        ask(indefinite)


@pytest.mark.parametrize("change", [{"positive_only": True}, {"tail": "auto"}, {"tail": 0.5}])
def test_remedies_of_a_negative_metric_work(indefinite, change):
    cosines = indefinite.distill(**change).influence(examples(), examples(), normalize="metric")
    assert (indefinite.spectrum.eigenvalues < 0).any()
    assert cosines.abs().max() <= 1 + 1e-4


UNKNOWN = {
    "nats": (lambda f: f.self_influence(examples(), unit="nats"), "unit='nats'"),
    "distill": (lambda f: f.distill(keep=1), "eigenpairs"),
    "spectrum": (lambda f: f.spectrum, "spectrum"),
    "features": (lambda f: f.features(examples()), "directions"),
}


@pytest.mark.parametrize(("ask", "lacking"), table(UNKNOWN))
def test_gradient_method_refuses(gradients, ask, lacking):
    with refused(UnsupportedError, "TracIn", lacking):
        ask(gradients)


def test_solving_method_refuses(lissa, tmp_path):
    with refused(UnsupportedError, "Lissa", "directions"):
        lissa.features(examples())
    with refused(UnsupportedError, "Lissa", "save"):
        lissa.save(tmp_path / "fit")
    with refused(UnsupportedError, "Lissa", "spectrum"):
        _ = lissa.spectrum
    with refused(UnsupportedError, "Lissa", "eigenpairs"):
        lissa.distill(keep=2)
    with refused(NumericalError, "normalize='metric'"):
        lissa.influence(examples(), examples(), normalize="metric")


def test_loss_refuses(tmp_path):
    fitted = fit(method=et.Loss())
    asked = {
        "directions": lambda: fitted.features(examples()),
        "save": lambda: fitted.save(tmp_path / "fit"),
        "normalize='gradient'": lambda: fitted.self_influence(examples(), normalize="gradient"),
        "pairs": lambda: fitted.influence(examples(), examples()),
        "unit='nats'": lambda: fitted.self_influence(examples(), unit="nats"),
    }
    for lacking, ask in asked.items():
        with refused(UnsupportedError, "Loss", lacking):
            ask()


# --- checkpoints of TracIn --------------------------------------------------------------------------------------------


def state(seed=0):
    return copy.deepcopy(net(seed).state_dict())


STATES = {
    "missing key": (lambda: {k: v for k, v in state().items() if k != "0.bias"}, ("'0.bias'", 1, 4, 3)),
    "another model": (lambda: nn.Conv1d(1, 1, 1).state_dict(), ("'0.bias'", 4, 2)),
    "wrong shape": (lambda: state() | {"0.bias": torch.zeros(5)}, ("'0.bias'", "(5,)", "(4,)")),
    "no tensors": (lambda: {"epoch": 3}, ("'epoch'",)),
}


@pytest.mark.parametrize(("make", "mentions"), table(STATES))
def test_checkpoint_of_another_model(make, mentions):
    with refused(MismatchError, *mentions):
        fit(method=et.TracIn([state(), make()]))


def test_checkpoint_of_a_larger_model_warns():
    with warned(EigentraceWarning, 1, "'4.weight'"):
        fit(method=et.TracIn(state() | {"4.weight": torch.zeros(3)}))


def test_uncopied_state_dicts_are_refused():
    model = net()
    with refused(InputError, 0, 2, "copy.deepcopy(model.state_dict())"):
        fit(method=et.TracIn([model.state_dict(), state(), model.state_dict()]))


def test_checkpoint_of_another_kind_is_refused():
    with refused(InputError, "int"):
        fit(method=et.TracIn([3]))
    with refused(InputError, "checkpoints"):
        fit(method=et.TracIn([]))


def test_checkpoint_path_is_missing(tmp_path):
    with refused(InputError, tmp_path / "no.pt"):
        fit(method=et.TracIn(tmp_path / "no.pt"))
    (tmp_path / "notes.txt").write_text("")
    with refused(InputError, tmp_path, "model.safetensors"):
        fit(method=et.TracIn(tmp_path))


def test_single_checkpoint_of_a_training_folder_warns(tmp_path):
    torch.save(state(), tmp_path / "epoch=1-step=9.ckpt")
    with warned(EigentraceWarning, tmp_path, "save_total_limit", "save_top_k"):
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
    with refused(InputError, file, "posix.mkdir"):
        fit(method=et.TracIn(file))
    assert not proof.exists()
    torch.load(file, weights_only=False)  # the payload is real
    assert proof.exists()


@pytest.mark.parametrize("value", ["5", 1.5, True, 0])
@pytest.mark.parametrize("method", [CHEAP, et.Loss(), et.ExactHessian(damping=1.0)])
def test_num_train_must_be_a_count(method, value):
    with refused(InputError, "num_train", 1, repr(value)):
        fit(method=method, num_train=value)


def test_numpy_numbers_are_numbers():
    assert fit(method=et.RandProj(keep=np.int64(2), seed=np.int32(1))).features(examples()).shape == (12, 2)
    state = net(1).state_dict()
    fitted = fit(method=et.TracIn([state, net(2).state_dict()], learning_rates=np.array([0.1, 0.2], dtype=np.float32)))
    assert [block.identity for block in fitted.blocks] == pytest.approx([0.1, 0.2])


@pytest.mark.parametrize(
    ("rates", "mentions"), [([], ("learning_rates", 0, 1)), ([float("inf")], ("learning_rates[0]", "inf"))]
)
def test_learning_rates_are_checked(rates, mentions):
    with refused(InputError, *mentions):
        fit(method=et.TracIn([net(1).state_dict()], learning_rates=rates))


def test_the_loss_baseline_checks_what_it_returns():
    x, y = examples()
    fitted = fit(method=et.Loss())
    bad = x.clone()
    bad[7] = torch.nan
    with refused(NumericalError, "row 7"):
        fitted.self_influence((bad, y))


def test_directions_that_do_not_fit_in_memory_are_refused_with_numbers():
    with refused(MemoryLimitError, "free", "params=", f"{10**12}"):
        fit(method=et.RandProj(keep=10**12))


def test_a_basis_of_the_inverse_is_refused_before_its_solver_is_fitted(monkeypatch):
    monkeypatch.setattr(plan, "free_memory", lambda device: 100)
    monkeypatch.setattr(et.Lissa, "fit", lambda *args, **options: pytest.fail("the solver was fitted"))
    with refused(MemoryLimitError, "free"):
        fit(method=et.InverseArnoldi())
