"""Scores in nats compared with those of the exact Hessian, on a convex problem."""

import json

import pytest
import torch
from torch import Tensor, nn

import eigentrace as et
from tests.helpers.convex import L2, C, D, softmax_regression
from tests.helpers.small import examples, net


@pytest.fixture(scope="module")
def problem() -> tuple[et.Task, tuple[Tensor, Tensor]]:
    return softmax_regression()


@pytest.fixture(scope="module")
def exact(problem) -> Tensor:
    return et.ExactHessian().fit(*problem).self_influence(problem[1])


def fitted(problem, keep, **settings):
    return et.Arnoldi(steps=200, keep=keep, sample=None, **settings).fit(*problem)


def test_with_every_direction_kept_scores_are_those_of_the_exact_hessian(problem, exact):
    task, data = problem
    fit = fitted(problem, 63)
    largest = float(fit.spectrum.eigenvalues[0])
    assert fit.delta == pytest.approx(1e-4 * largest)
    assert fit.blocks[0].identity == 0  # nothing is outside of the directions
    assert torch.allclose(fit.self_influence(data), exact, rtol=1e-2)
    whole = et.ExactHessian().fit(task, data)
    assert torch.allclose(fit.influence(data, data), whole.influence(data, data), rtol=1e-2, atol=1e-2)
    assert fit.calibration.ratio == pytest.approx(1.0, rel=1e-2)
    # A smaller cut has a tail again.
    assert fit.distill(keep=20).delta == pytest.approx(float(fit.spectrum.eigenvalues[19]))


@pytest.mark.parametrize("keep", [5, 20, 40])
def test_the_ratio_is_that_of_the_exact_hessian(problem, exact, keep):
    data = problem[1]
    fit = fitted(problem, keep)
    real = float(exact.mean() / fit.self_influence(data).mean())
    assert real > 1.2
    # Estimated from one random combination of gradients.
    assert fit.calibration.ratio == pytest.approx(real, rel=0.2)


@pytest.mark.parametrize("cut", [{"keep": 20}, {"keep": 5}, {"tail": 0.01}, {"tail": None}, {"keep": 10, "tail": None}])
def test_every_cut_of_a_fit_has_a_ratio_of_its_own(problem, exact, cut):
    data = problem[1]
    fit = fitted(problem, 40).distill(**cut)
    real = float(exact.mean() / fit.self_influence(data).mean())
    assert fit.calibration.ratio == pytest.approx(real, rel=0.02)


@pytest.mark.parametrize("tail", ["auto", "shaped"])
def test_stored_cuts_count_what_their_coordinates_hold(problem, exact, tail):
    data = problem[1]
    fit = fitted(problem, 10).with_coordinates(data, 30).distill(tail=tail)
    for cut in (fit, fit.stored()):
        real = float(exact.mean() / cut.self_influence(data).mean())
        assert cut.calibration.ratio == pytest.approx(real, rel=0.15)


def test_a_model_in_float32_is_calibrated_alike(problem):
    task, (x, y) = problem
    single = nn.Linear(D, C)
    single.load_state_dict({name: value.float() for name, value in task.model.state_dict().items()})
    found = et.Arnoldi(keep=20, sample=None).fit(et.classification(single, l2=L2), (x.float(), y))
    assert found.calibration.ratio == pytest.approx(fitted(problem, 20).calibration.ratio, rel=1e-3)


def test_a_batch_size_and_a_resumed_fit_change_nothing(problem, tmp_path):
    task, data = problem
    method = et.Arnoldi(steps=60, keep=20, sample=None)
    rows = torch.utils.data.TensorDataset(*data)
    ratios = [
        method.fit(task, torch.utils.data.DataLoader(rows, batch_size=size), resume=tmp_path / "krylov").calibration
        for size in (300, 300, 7)
    ]
    assert [found.ratio for found in ratios] == pytest.approx([ratios[0].ratio] * 3, rel=1e-6)
    assert {(found.examples, found.products) for found in ratios} == {(300, 3)}


def test_moments_are_saved_and_fits_without_them_are_not_calibrated(problem, tmp_path):
    task, _ = problem
    fit = fitted(problem, 20)
    fit.save(tmp_path / "fit")
    assert et.load(tmp_path / "fit", task).calibration == fit.calibration
    (tmp_path / "fit" / "moments.safetensors").unlink()  # as earlier versions saved fits
    earlier = et.load(tmp_path / "fit", task)
    assert earlier.calibration is None
    assert earlier.delta == fit.delta
    fit.check_saved(tmp_path / "fit")  # the same fit: a run that has it can be resumed


def test_curvature_that_is_not_positive_is_not_calibrated():
    # Random weights and labels: far from any minimum.
    fit = et.Arnoldi(steps=31, keep=31, curvature="hessian").fit(et.classification(net()), examples(60))
    assert float(fit.spectrum.eigenvalues.min()) < 0
    assert fit.calibration is None
    assert et.RandProj(keep=2).fit(et.classification(net()), examples()).calibration is None


def test_a_run_keeps_the_ratio(problem, tmp_path):
    _, data = problem
    fit = fitted(problem, 20)
    et.score(fit, data, tmp_path / "run")
    assert et.open_run(tmp_path / "run").reader.calibration == fit.calibration.ratio
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert manifest["calibration"] == fit.calibration.ratio
