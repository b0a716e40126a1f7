"""What a fit will take, told before it begins, against what it takes."""

import pytest
import torch

import eigentrace as et
from eigentrace.fits.calibration import num_products
from eigentrace.krylov.estimate import estimate_of
from eigentrace.krylov.iterate import lanczos
from eigentrace.krylov.plan import IterationPlan
from eigentrace.krylov.vectors import Vectors
from eigentrace.methods import arnoldi
from tests.helpers.expecting import expect_mentions

CPU = torch.device("cpu")


def plan(steps, basis=None, size=50):
    return IterationPlan(size, torch.float64, CPU, steps, 3, basis or et.Basis(dtype="fp32", place="device"))


@pytest.mark.parametrize(
    ("steps", "basis"),
    [
        (12, {}),
        (80, {}),
        (40, {"max_vectors": 10}),
        (31, {"max_vectors": 10, "restart_keep": 3}),
        (8, {"max_vectors": 9}),
    ],
)
def test_the_orthogonalisation_is_counted_as_it_happens(steps, basis, monkeypatch):
    counted, dots = [], Vectors.dots
    matrix = torch.diag(torch.linspace(1, 50, 50, dtype=torch.float64) ** 3)
    basis = et.Basis(dtype="fp32", place="device", **basis)
    monkeypatch.setattr(Vectors, "dots", lambda self, count, w: counted.append(count) or dots(self, count, w))
    lanczos(matrix.mv, torch.ones(50, dtype=torch.float64), steps, basis=basis)
    measured = sum(counted)
    monkeypatch.undo()
    monkeypatch.setattr("eigentrace.krylov.estimate._seconds_per_vector", lambda like, basis: 1.0)
    expected = estimate_of(plan(steps, basis), matrix[0], 0.0).seconds
    # Each step twice; a third pass follows if the second removes half of the norm.
    assert expected == pytest.approx(measured, rel=0.1)


def test_an_estimate_is_that_of_the_fit(case_data, monkeypatch):
    task, data = case_data
    method = et.Arnoldi(steps=20, keep=4)
    monkeypatch.setattr(arnoldi, "product_seconds", lambda curvature: 30.0)
    found = method.estimate(task, data)
    assert found.num_products >= 20 + num_products(20)
    assert found.seconds >= 30.0 * found.num_products
    assert et.Arnoldi(steps=20, keep=4, reliability=True).estimate(task, data).seconds > 1.9 * found.seconds
    assert found.basis == et.Basis(dtype="fp32", place="device")
    expect_mentions(str(found), ["30.0 s", "min", "disk"])


def test_long_fits_say_what_they_take_and_short_ones_nothing(case_data, monkeypatch, capfd, tmp_path):
    task, data = case_data
    method = et.Arnoldi(steps=20, keep=4)
    method.fit(task, data)
    assert capfd.readouterr().err == ""
    monkeypatch.setattr(arnoldi, "product_seconds", lambda curvature: 30.0)
    method.fit(task, data, resume=tmp_path / "state")
    expect_mentions(capfd.readouterr().err, ["30.0 s", "products"])
    et.show_progress("none")
    method.fit(task, data)
    assert capfd.readouterr().err == ""


@pytest.fixture
def case_data(monkeypatch):
    monkeypatch.setattr("eigentrace.progress._chosen", [])
    monkeypatch.delenv("EIGENTRACE_PROGRESS", raising=False)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    return et.classification(model), [(torch.randn(40, 5), torch.randint(0, 3, (40,)))]
