"""Fits that score by stored features alone, and tails with a shape, against matrices written down in float64."""

import copy
import dataclasses
import re

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import eigentrace as et
from eigentrace.errors import InputError, PrecisionWarning, UnsupportedError
from eigentrace.numeric.seeding import generator_of
from tests.helpers.expecting import refused, warned
from tests.helpers.manifests import edit_manifest
from tests.helpers.models import CASES, dense_gradients
from tests.helpers.places import DOCS

WHOLE = {"steps": 30, "sample": None}
K, R = 8, 12


def relative(a, b):
    return float((a - b).norm() / b.norm())


@pytest.fixture(scope="module")
def fits(cases):
    made = {}

    def fit(name):
        if name not in made:
            case = cases[name]
            made[name] = et.Arnoldi(keep=K, coordinates=R, **WHOLE).fit(case.task, case.batches)
        return made[name]

    return fit


def parts(fitted, keep=K):
    """G, S⊥ and λ of a fit, written out."""
    G = fitted.eigenpairs.directions[:keep]
    S = fitted.coordinates.directions.dense(0, fitted.coordinates.count)
    return G, S - S @ G.T @ G, fitted.eigenpairs.spectrum.eigenvalues[:keep].clamp_min(0)


def metric(fitted, tail, stored, gradients, keep=K, delta=None):
    """The matrix M of the score g(z)ᵀ M g(x), term by term."""
    G, rest, values = parts(fitted, keep)
    delta = float(values[-1]) if delta is None else delta
    energies = (gradients @ rest.T).square().mean(dim=0) if tail == "shaped" else torch.zeros(len(rest)).double()
    M = G.T @ torch.diag(1 / (values + delta)) @ G + rest.T @ torch.diag(1 / (energies + delta)) @ rest
    if not stored:
        M = M + (torch.eye(G.shape[1]).double() - G.T @ G - rest.T @ rest) / delta
    return M


@pytest.mark.parametrize("model", CASES)
@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("tail", ["auto", "shaped"])
def test_scores_match_the_dense_oracle(cases, fits, model, tail, stored):
    case, fitted = cases[model], fits(model).distill(tail=tail)
    fitted = fitted.stored() if stored else fitted
    train, asked = dense_gradients(case.task, case.batches), dense_gradients(case.task, case.queries)
    M = metric(fitted, tail, stored, train)
    assert torch.linalg.eigvalsh(M).min() > (-1e-9 if stored else 0)  # positive whatever the overlap of G and S
    assert fitted.positive_metric
    assert relative(fitted.influence(case.batches, case.queries), asked @ M @ train.T) < 1e-8
    assert relative(fitted.self_influence(case.batches), ((train @ M) * train).sum(dim=1)) < 1e-8
    if model != "conv":  # which fits one query to 1e-16: rounding is all the direction its gradient has
        unit = nn.functional.normalize(train), nn.functional.normalize(asked)
        found = fitted.influence(case.batches, case.queries, normalize="gradient")
        assert relative(found, unit[1] @ M @ unit[0].T) < 1e-8
    if stored:  # every part of a coordinate that lies in the kept directions is subtracted
        phi, of_queries = fitted.features(case.batches), fitted.features(case.queries, queries=True)
        lengths = of_queries.norm(dim=1)[:, None] * phi.norm(dim=1)
        found = fitted.influence(case.batches, case.queries, normalize="features")
        assert relative(found * lengths, asked @ M @ train.T) < 1e-8
    cosine = fitted.influence(case.batches, case.batches, normalize="metric")
    assert torch.allclose(cosine.diagonal(), torch.ones(len(train)).double())
    assert cosine.abs().max() < 1 + 1e-9


@pytest.mark.parametrize("tail", ["auto", "shaped"])
def test_features_are_the_kept_ones_and_the_residual_ones(cases, fits, tail):
    case, fitted = cases["transformer"], fits("transformer").distill(tail=tail).stored()
    train, asked = dense_gradients(case.task, case.batches), dense_gradients(case.task, case.queries)
    G, rest, _ = parts(fitted)
    phi, of_queries = fitted.features(case.batches), fitted.features(case.queries, queries=True)
    assert phi.shape == (case.num_examples, K + R)
    assert fitted.bytes_per_example == 8 * (K + R)
    assert relative(phi, train @ torch.cat([G, rest]).T) < 1e-8
    scores = fitted.from_features(phi, of_queries)
    assert relative(scores, fitted.influence(case.batches, case.queries)) < 1e-8
    assert relative(fitted.self_from_features(phi), fitted.self_influence(case.batches)) < 1e-8
    # with norms beside them, features give the self-influence of the whole tail
    norms = train.square().sum(dim=1)
    assert relative(fitted.self_from_features(phi, norms), fitted.unstored().self_influence(case.batches)) < 1e-8
    assert relative(norms, et.TracIn().fit(case.task, case.batches).self_influence(case.batches)) < 1e-8
    assert relative(of_queries, asked @ torch.cat([G, rest]).T) < 1e-8


def test_with_every_coordinate_nothing_is_lost(cases):
    case = cases["mlp"]
    fitted = et.Arnoldi(keep=6, **WHOLE).fit(case.task, case.batches)
    stored = fitted.stored(case.batches, case.task.layout.numel)
    assert stored.captured == pytest.approx(1.0)
    assert stored.delta == fitted.delta
    a, b = (f.influence(case.batches, case.queries) for f in (stored, fitted))
    assert relative(a, b) < 1e-8
    assert relative(stored.self_influence(case.batches), fitted.self_influence(case.batches)) < 1e-8


def test_more_coordinates_hold_more(cases, fits):
    case, fitted = cases["mlp"], fits("mlp")
    exact = fitted.influence(case.batches, case.queries)
    stored = [fitted.stored(coordinates=r) for r in (1, 4, R)]
    captured, errors = zip(*((s.captured, relative(s.influence(case.batches, case.queries), exact)) for s in stored))  # noqa: B905
    assert sorted(captured) == list(captured)
    assert sorted(errors, reverse=True) == list(errors)
    half = fitted.stored(coordinates=0.5)
    assert half.captured >= 0.5 > fitted.stored(coordinates=len(half.blocks[0].weights) - K - 1).captured


@pytest.mark.parametrize("tail", ["auto", "shaped"])
def test_dropped_directions_join_the_stored_tail(cases, fits, tail):
    case, stored = cases["conv"], fits("conv").distill(tail=tail).stored()
    small = stored.distill(keep=3)
    train, asked = dense_gradients(case.task, case.batches), dense_gradients(case.task, case.queries)
    M = metric(stored, tail, True, train, keep=3)
    assert small.features(case.batches).shape[1] == 3 + R
    assert relative(small.influence(case.batches, case.queries), asked @ M @ train.T) < 1e-8
    # features stored for the larger cut serve the smaller one
    again = small.recut_features(stored.features(case.batches), stored)
    assert relative(again, small.features(case.batches)) < 1e-8
    assert torch.equal(small.distill(keep=K).features(case.batches), stored.features(case.batches))
    with refused(InputError, "directions", 3, 8):
        stored.recut_features(again, small)
    with refused(InputError, "coordinates", 12, 4):
        stored.stored(coordinates=4).recut_features(stored.features(case.batches), stored)
    bare = stored.distill(keep=2, tail=None)
    assert torch.equal(bare.recut_features(again, small), again[:, :2])


def test_a_shaped_tail_takes_its_own_delta(cases, fits):
    case, fitted = cases["mlp"], fits("mlp")
    train, asked = dense_gradients(case.task, case.batches), dense_gradients(case.task, case.queries)
    shaped = fitted.distill(tail="shaped", delta=0.02)
    assert shaped.delta == 0.02
    assert shaped.distill(keep=5).delta == 0.02  # what is not given stays
    assert shaped.distill(tail="auto").delta == fitted.delta
    M = metric(fitted, "shaped", False, train, delta=0.02)
    assert relative(shaped.influence(case.batches, case.queries), asked @ M @ train.T) < 1e-8
    # a large δ drowns the energies: what is left is the flat tail
    flat, wide = fitted.distill(tail=1e6), fitted.distill(tail="shaped", delta=1e6)
    assert relative(wide.self_influence(case.batches), flat.self_influence(case.batches)) < 1e-5
    with refused(InputError, "delta", "tail='shaped'", "'auto'"):
        fitted.distill(delta=0.1)
    with refused(InputError, "delta", 0.0):
        fitted.distill(tail="shaped", delta=0.0)


def test_arnoldi_fits_a_shaped_tail_at_once(cases, fits):
    case = cases["mlp"]
    shaped = et.Arnoldi(keep=K, tail="shaped", coordinates=R, **WHOLE).fit(case.task, case.batches)
    later = fits("mlp").distill(tail="shaped")
    assert torch.equal(shaped.self_influence(case.batches), later.self_influence(case.batches))
    everything = et.Arnoldi(keep=K, tail="shaped", **WHOLE).fit(case.task, case.batches)
    assert everything.coordinates.count == case.task.layout.numel  # fewer than the default takes
    share = et.Arnoldi(keep=K, coordinates=0.7, **WHOLE).fit(case.task, case.batches).stored()
    assert 0.7 <= share.captured < 0.95


@pytest.mark.parametrize("tail", ["auto", "shaped", 0.3])
def test_saved_fits_answer_the_same(cases, fits, tail, tmp_path):
    case, fitted = cases["transformer"], fits("transformer").distill(tail=tail).stored(coordinates=9)
    fitted.save(tmp_path / "fit")
    loaded = et.load(tmp_path / "fit", case.task)
    assert (loaded.cut, loaded.delta, loaded.captured) == (fitted.cut, fitted.delta, fitted.captured)
    for change in (
        lambda f: f,
        lambda f: f.distill(keep=4),
        lambda f: f.unstored(),
        lambda f: f.distill(tail="shaped"),
    ):
        a, b = (change(f).influence(case.batches, case.queries) for f in (loaded, fitted))
        assert torch.equal(a, b)
    assert torch.equal(loaded.features(case.batches), fitted.features(case.batches))


def test_fits_saved_before_there_were_coordinates_are_read(cases, tmp_path):
    case = cases["mlp"]
    fitted = et.Arnoldi(keep=4, **WHOLE).fit(case.task, case.batches)
    fitted.save(tmp_path / "fit")

    def change(manifest):
        manifest["cut"] = {key: manifest["cut"][key] for key in ("keep", "tail", "positive_only")}
        manifest["method"].pop("coordinates")

    edit_manifest(tmp_path / "fit", change)
    loaded = et.load(tmp_path / "fit", case.task)
    assert torch.equal(loaded.self_influence(case.batches), fitted.self_influence(case.batches))
    assert loaded.coordinates is None


@pytest.fixture(scope="module")
def single():
    """A float32 classifier with negative curvature, more data than its sample, and batches that do not divide it."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 3))
        x = torch.randn(300, 6)
        y = (x[:, :3] + 0.3 * torch.randn(300, 3)).argmax(dim=1)
    return et.classification(model), TensorDataset(x, y)


@pytest.mark.parametrize("positive_only", [False, True])
def test_negative_curvature_and_float32(single, positive_only):
    task, data = single
    method = et.Arnoldi(steps=150, keep=40, sample=200, curvature="hessian", positive_only=positive_only)
    fitted = method.fit(task, data).with_coordinates(data, 60)
    if not positive_only:
        assert (fitted.spectrum.eigenvalues < 0).any()
    for tail in ("auto", "shaped"):
        exact, stored = fitted.distill(tail=tail), fitted.distill(tail=tail).stored()
        assert stored.positive_metric
        assert (stored.self_influence(data) > 0).all()
        assert (exact.self_influence(data) > 0).all()
        a, b = exact.self_influence(data), stored.self_influence(data)
        assert (b <= a * (1 + 1e-3)).all()  # what is not stored only adds
        pairs = exact.influence(data, data)
        assert torch.allclose(pairs.diagonal(), a, rtol=2e-3)


def test_the_sample_is_the_fits_own(single):
    task, data = single
    fitted = et.Arnoldi(steps=60, keep=5, sample=100, seed=4).fit(task, data)
    own, every = fitted.with_coordinates(data, 10), fitted.with_coordinates(data, 10, sample=300)
    rows = et.Data(data).sample(100, generator_of(4))
    subset = TensorDataset(*(t[torch.from_numpy(rows)] for t in data.tensors))
    again = fitted.with_coordinates(subset, 10)
    assert own.coordinates.total == pytest.approx(again.coordinates.total)
    assert own.coordinates.total != pytest.approx(every.coordinates.total, rel=1e-6)
    assert torch.equal(own.self_influence(data), fitted.self_influence(data))
    with refused(InputError, "sample", 1, 0):
        fitted.with_coordinates(data, 10, sample=0)


def test_a_small_delta_worries_only_fits_that_subtract(single):
    task, data = single
    stored = et.Arnoldi(steps=60, keep=5, coordinates=20).fit(task, data).stored()
    assert (stored.distill(tail=1e-9).self_influence(data) > 0).all()
    with warned(PrecisionWarning, "tail=1e-09", 0.0001):
        stored.distill(tail=1e-9).unstored()


def test_what_cannot_be_stored_says_why(cases, fits):
    case, fitted = cases["mlp"], fits("mlp")
    bare = et.Arnoldi(keep=3, **WHOLE).fit(case.task, case.batches)
    for ask in (bare.stored, lambda: bare.distill(tail="shaped")):
        with refused(InputError, "fitted.with_coordinates(data)", "Arnoldi(coordinates=...)"):
            ask()
    with refused(InputError, "tail=None"):
        fitted.distill(tail=None).stored()
    with refused(InputError, "coordinates", 12, 13):
        fitted.stored(coordinates=13)
    projected = et.RandProj(4).fit(case.task, case.batches)
    for ask in (projected.stored, lambda: projected.with_coordinates(case.batches)):
        with refused(UnsupportedError, "RandProj", "eigenpairs"):
            ask()
    assert fitted.stored().distill(tail=None).cut == fitted.distill(tail=None).cut
    assert fitted.captured is None


def test_features_of_another_shape_are_refused(cases, fits):
    case, stored = cases["mlp"], fits("mlp").stored()
    phi = stored.features(case.batches)
    for wrong, got in ((phi[:, :-1], (17, 19)), (phi[0], "(20,)"), (phi.numpy(), "ndarray")):
        with refused(InputError, 20, got):
            stored.from_features(wrong, phi)
    with refused(UnsupportedError, "fitted.stored(data)", "tail=None"):
        stored.unstored().from_features(phi[:, :K], phi[:, :K])
    with refused(InputError, "square_norms", 17, "None"):
        stored.unstored().self_from_features(phi[:, :K])
    with refused(InputError, "square_norms", 17, "(3,)"):
        stored.self_from_features(phi, torch.ones(3))
    projected = et.RandProj(4).fit(case.task, case.batches)
    psi = projected.features(case.batches)
    assert relative(projected.from_features(psi, psi), projected.influence(case.batches, case.batches)) < 1e-8
    assert stored.from_features(phi[:0], phi[:1]).shape == (1, 0)
    assert stored.from_features(phi, phi[:1]).shape == (1, len(phi))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("tail", ["auto", "shaped"])
def test_a_gpu_gives_the_same(cases, fits, tail, tmp_path):
    for name in ("mlp", "conv", "transformer"):
        case, here = cases[name], fits(name).distill(tail=tail)
        task = case.make_task(copy.deepcopy(case.task.model).cuda())
        there = et.Arnoldi(keep=K, tail=tail, coordinates=R, **WHOLE).fit(task, case.batches)
        there.save(tmp_path / name)
        for fit in (there, et.load(tmp_path / name, task)):
            for ours, theirs in ((here, fit), (here.stored(), fit.stored())):
                a, b = (f.influence(case.batches, case.queries) for f in (ours, theirs))
                assert relative(b, a) < 1e-6
            assert (
                relative(fit.stored().self_influence(case.batches), here.stored().self_influence(case.batches)) < 1e-6
            )
            ranked = fit.influence_topk(case.batches, case.queries, 2, shortlist=8)
            assert ranked.proponents.shape == (sum(len(q[1]) for q in case.queries), 2)


def test_the_pages_code_runs(single):
    task, data = single
    names = {"et": et, "task": task, "train": data, "queries": tuple(t[:2] for t in data.tensors)}
    page = (DOCS / "tail.md").read_text()
    for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(code, names)
    assert names["scores"].shape == (2, 300)
    assert names["ranked"].proponents.shape == (2, 20)


def test_nothing_about_the_fit_changes(cases, fits):
    fitted = fits("mlp")
    before = fitted.self_influence(cases["mlp"].batches)
    fitted.stored().distill(keep=2, tail="shaped")
    assert torch.equal(fitted.self_influence(cases["mlp"].batches), before)
    with pytest.raises(dataclasses.FrozenInstanceError):
        fitted.coordinates = None
