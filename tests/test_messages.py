"""The wording of messages, once per family of errors: what arrived, what was expected, what to do.

Everywhere else tests check an error's type and the names, values or rows that it mentions (`tests.helpers.expecting`),
so that a message can be improved without changing them.
"""

import pytest
import torch
from torch import nn

import eigentrace as et
from eigentrace import errors
from eigentrace.disk.lock import locked
from eigentrace.loading import make_inputs

X, Y = torch.randn(12, 3, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 3
EXAMPLES = torch.utils.data.TensorDataset(X, Y)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))


def fit(method=None, task=None):
    return (method or et.TracIn()).fit(task or et.classification(net()), et.Data(EXAMPLES))


def input_error(tmp_path):
    et.Compute(batch=0)


def task_error(tmp_path):
    et.classification(net(), params="encoder.*")


def data_error(tmp_path):
    et.Data([])


def determinism_error(tmp_path):
    noisy = et.Task(net(), lambda m, b: m(b[0])[:, 0].square() + torch.rand(len(b[0])))
    fit(task=noisy)


def numerical_error(tmp_path):
    wrong = X.clone()
    wrong[7] = torch.nan
    et.TracIn().fit(et.classification(net()), et.Data(torch.utils.data.TensorDataset(wrong, Y)))


def unsupported_error(tmp_path):
    _ = fit(et.RandProj(keep=2)).spectrum


def mismatch_error(tmp_path):
    et.load(tmp_path, et.classification(net()))


def storage_error(tmp_path):
    run = et.score(fit(et.RandProj(keep=2)), et.Data(EXAMPLES), tmp_path / "run")
    (run.path / "table.parquet").write_bytes(b"PAR1")
    et.open_run(run.path).table()


def busy_error(tmp_path):
    with locked(tmp_path), locked(tmp_path):
        pass


def untrusted_error(tmp_path):
    make_inputs({"input": {"function": "theirs:make", "args": {}}}, tmp_path)


def convergence_warning(tmp_path):
    fit(et.Arnoldi(steps=4, keep=3))


def precision_warning(tmp_path):
    halved = torch.utils.data.TensorDataset(X.bfloat16(), Y)
    et.TracIn().fit(et.classification(net().to(torch.bfloat16)), et.Data(halved))


# What raises it, and the parts of its message: what is wrong with what arrived, and what to do.
ERRORS = {
    errors.InputError: (input_error, "batch must be a whole number of at least 1, got 0."),
    errors.TaskError: (
        task_error,
        "params='encoder.*' matches none of the 4 parameters of Sequential",
        "Pass a pattern that matches these names",
    ),
    errors.DataError: (data_error, "The data is empty: list has 0 examples, at least 1 is needed."),
    errors.DeterminismError: (
        determinism_error,
        "Two evaluations of the loss of one batch in eval mode differ by",
        "Something draws random numbers: dropout",
    ),
    errors.NumericalError: (
        numerical_error,
        "The loss is not finite for 1 example of a batch (first: row 7).",
        "Check the inputs and labels of that row",
    ),
    errors.UnsupportedError: (unsupported_error, "RandProj has no spectrum", "Use Arnoldi"),
    errors.MismatchError: (mismatch_error, "contains no manifest.json, so it is not a saved fit.", "Check the path."),
    errors.StorageError: (
        storage_error,
        "table.parquet is damaged: it cannot be read",
        "`eigentrace check RUN --repair` sets it aside",
    ),
    errors.BusyError: (busy_error, "is being written by process", "Wait until that process has ended"),
    errors.UntrustedError: (untrusted_error, "would import and call theirs:make()", "If you trust it, pass --trust"),
}
WARNINGS = {
    errors.ConvergenceWarning: (convergence_warning, "has not converged after 4 products", "Raise `steps` or lower"),
    errors.PrecisionWarning: (precision_warning, "are stored in bfloat16", "Load the model in float32"),
}


def _check_sentences(text, words):
    assert not [part for part in words if part not in text]
    assert text.endswith((".", ")")), text
    assert "  " not in text


@pytest.mark.parametrize("family", ERRORS, ids=lambda family: family.__name__)
def test_an_error_says_what_arrived_and_what_to_do(family, tmp_path):
    raise_it, *words = ERRORS[family]
    with pytest.raises(family) as caught:
        raise_it(tmp_path)
    _check_sentences(str(caught.value), words)


@pytest.mark.parametrize("family", WARNINGS, ids=lambda family: family.__name__)
def test_a_warning_says_what_is_the_matter_and_what_to_do(family, tmp_path):
    issue_it, *words = WARNINGS[family]
    with pytest.warns(family) as caught:
        issue_it(tmp_path)
    _check_sentences(next(str(found.message) for found in caught if issubclass(found.category, family)), words)


def test_every_family_is_here():
    # MemoryLimitError takes a device that is full; tests marked gpu raise it.
    bases = {errors.EigentraceError, errors.EigentraceWarning, errors.MemoryLimitError}
    families = {kind for kind in vars(errors).values() if isinstance(kind, type) and kind.__module__ == errors.__name__}
    assert families - bases == {*ERRORS, *WARNINGS}
