"""One contract, every method: adding a method means adding a line to METHODS."""

import copy
import dataclasses

import pytest
import torch
from torch import Tensor

import eigentrace as et
from eigentrace.chance import generator_of
from eigentrace.errors import NumericalError, UnsupportedError
from models import CASES, Case, dense_gradients, dense_hessian

# Float64 all the way; the oracles and the library differ by rounding, amplified by 1/λ.
EXACT = 1e-8


def eigen(H: Tensor) -> tuple[Tensor, Tensor]:
    values, vectors = torch.linalg.eigh(H)
    order = values.abs().argsort(descending=True)
    return values[order], vectors[:, order].T


def inverse(case: Case) -> Tensor:
    return torch.linalg.inv(dense_hessian(case, "hessian"))


def truncated(case: Case) -> Tensor:
    values, rows = eigen(dense_hessian(case, "hessian"))
    return rows[:12].T @ torch.diag(1 / values[:12]) @ rows[:12]


def tailed(case: Case) -> Tensor:
    values, rows = eigen(dense_hessian(case, "gauss-newton"))
    delta = values[11]
    eye = torch.eye(len(values), dtype=values.dtype)
    return rows[:12].T @ torch.diag(1 / (values[:12] + delta)) @ rows[:12] + (eye - rows[:12].T @ rows[:12]) / delta


def gaussian(case: Case) -> Tensor:
    generator = generator_of(3)
    G = torch.randn(9, case.task.layout.numel, generator=generator, dtype=torch.float64)
    return G.T @ G / 9


def picked(case: Case) -> Tensor:
    index = torch.randperm(case.task.layout.numel, generator=generator_of(3))[:9]
    G = torch.eye(case.task.layout.numel, dtype=torch.float64)[index]
    return G.T @ G


def identity(case: Case) -> Tensor:
    return torch.eye(case.task.layout.numel, dtype=torch.float64)


def neumann(case: Case, depth: int = 10) -> Tensor:
    """LiSSA with the whole data in every batch is a polynomial in H."""
    H, scale, damping = dense_hessian(case, "gauss-newton"), 50.0, 0.01
    eye = torch.eye(len(H), dtype=H.dtype)
    h = eye
    for _ in range(depth):
        h = eye + (1 - damping) * h - H @ h / scale
    return h / scale


LISSA = et.Lissa(depth=10, damping=0.01, scale=50.0, batch_size=1000)
WHOLE = {"steps": 500, "sample": None}
# name: (method, the matrix M of its score g(z)ᵀ M g(x))
METHODS = {
    "arnoldi truncated": (et.Arnoldi(keep=12, tail=None, curvature="hessian", **WHOLE), truncated),
    "arnoldi tail": (et.Arnoldi(keep=12, **WHOLE), tailed),
    "exact": (et.ExactHessian(), inverse),
    "randproj": (et.RandProj(9, seed=3), gaussian),
    "randselect": (et.RandSelect(9, seed=3), picked),
    "tracin": (et.TracIn(), identity),
    "lissa": (LISSA, neumann),
    "inverse arnoldi": (
        et.InverseArnoldi(steps=500, keep=500, solver=dataclasses.replace(LISSA, depth=3)),
        lambda case: neumann(case, depth=3),
    ),
}
CURVED = {"arnoldi truncated", "arnoldi tail", "exact", "lissa", "inverse arnoldi"}


@pytest.fixture(params=METHODS)
def name(request) -> str:
    return request.param


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("model", CASES)
def test_scores_match_the_dense_oracle(cases, name, model):
    case = cases[model]
    method, metric = METHODS[name]
    M = metric(case)
    train, asked = dense_gradients(case.task, case.batches), dense_gradients(case.task, case.queries)
    fitted = method.fit(case.task, case.batches)
    assert relative(fitted.influence(train=case.batches, queries=case.queries), asked @ M @ train.T) < EXACT
    assert relative(fitted.self_influence(case.batches), ((train @ M) * train).sum(dim=1)) < EXACT


def test_inverse_arnoldi_keeps_the_largest_of_the_inverse(cases):
    case, (method, metric) = cases["mlp"], METHODS["inverse arnoldi"]
    few = dataclasses.replace(method, keep=5).fit(case.task, case.batches)
    assert torch.allclose(few.blocks[0].weights, eigen(metric(case))[0][:5], rtol=EXACT)


def test_self_influence_is_the_diagonal(cases, name):
    case = cases["mlp"]
    fitted = METHODS[name][0].fit(case.task, case.batches)
    pairs = fitted.influence(case.batches, case.batches)
    assert relative(pairs.diagonal(), fitted.self_influence(case.batches)) < EXACT


def test_batching_changes_nothing(cases, name):
    case = cases["mlp"]
    x, y = (torch.cat([b[i] for b in case.batches]) for i in (0, 1))
    dataset = torch.utils.data.TensorDataset(x, y)
    fits = [METHODS[name][0].fit(case.task, et.Data(dataset, batch_size=size)) for size in (1, 5, 17)]
    scores = [f.influence(et.Data(dataset, batch_size=s), case.queries) for f, s in zip(fits, (17, 1, 5), strict=True)]
    for other in scores[1:]:
        assert relative(other, scores[0]) < EXACT


def test_fitting_again_gives_the_same_bits(cases, name):
    case = cases["conv"]
    first, second = (METHODS[name][0].fit(case.task, case.batches).self_influence(case.batches) for _ in range(2))
    assert torch.equal(first, second)


def test_the_measurement_is_what_queries_are_asked_about(cases, name):
    def logit(model, batch):
        return model(batch[0])[:, 1]

    case = cases["mlp"]
    task = et.classification(case.task.model, l2={"*.weight": 0.1, "*.bias": 0.05}, measurement=logit)
    fitted = METHODS[name][0].fit(task, case.batches)
    M = METHODS[name][1](case)
    train, asked = dense_gradients(task, case.batches), dense_gradients(task, case.queries, logit)
    assert relative(fitted.influence(case.batches, case.queries), asked @ M @ train.T) < EXACT
    assert relative(fitted.self_influence(case.batches), ((train @ M) * train).sum(dim=1)) < EXACT
    if name not in ("tracin", "lissa"):
        loss, measured = (fitted.features(case.queries, queries=q) for q in (False, True))
        assert relative(measured, loss) > 0.1


def test_gradient_normalisation_is_unit_gradients(cases, name):
    case = cases["mlp"]
    fitted = METHODS[name][0].fit(case.task, case.batches)
    M = METHODS[name][1](case)
    train, asked = (torch.nn.functional.normalize(dense_gradients(case.task, b)) for b in (case.batches, case.queries))
    found = fitted.influence(case.batches, case.queries, normalize="gradient")
    assert relative(found, asked @ M @ train.T) < EXACT
    assert relative(fitted.self_influence(case.batches, normalize="gradient"), ((train @ M) * train).sum(dim=1)) < EXACT


def test_metric_normalisation_is_a_cosine_or_is_refused(cases, name):
    case = cases["mlp"]
    fitted = METHODS[name][0].fit(case.task, case.batches)
    if not fitted.positive_metric:
        with pytest.raises(NumericalError, match="needs a positive metric"):
            fitted.influence(case.batches, case.queries, normalize="metric")
        return
    M = METHODS[name][1](case)
    train, asked = dense_gradients(case.task, case.batches), dense_gradients(case.task, case.queries)
    scale = ((asked @ M) * asked).sum(dim=1).sqrt()[:, None] * ((train @ M) * train).sum(dim=1).sqrt()
    found = fitted.influence(case.batches, case.queries, normalize="metric")
    assert relative(found, asked @ M @ train.T / scale) < EXACT
    assert found.abs().max() <= 1 + EXACT


def test_nats_divide_by_the_training_set(cases, name):
    case = cases["mlp"]
    fitted = METHODS[name][0].fit(case.task, case.batches, num_train=5000)
    if name not in CURVED:
        with pytest.raises(UnsupportedError, match="have no unit"):
            fitted.influence(case.batches, case.queries, unit="nats")
        return
    plain, nats = (fitted.influence(case.batches, case.queries, unit=u) for u in (None, "nats"))
    assert torch.allclose(plain / 5000, nats)
    default = METHODS[name][0].fit(case.task, case.batches).self_influence(case.batches[:1], unit="nats")
    # N is the size of what was fitted on, not of what is scored.
    assert torch.allclose(default * case.num_examples, fitted.self_influence(case.batches[:1]))


def test_features_give_the_score(cases, name):
    case = cases["mlp"]
    fitted = METHODS[name][0].fit(case.task, case.batches)
    if name in ("tracin", "lissa"):
        with pytest.raises(UnsupportedError, match="no features"):
            fitted.features(case.batches)
        return
    if name == "arnoldi tail":
        fitted = fitted.distill(tail=None)
    phi, asked = fitted.features(case.batches), fitted.features(case.queries)
    assert phi.shape == (case.num_examples, len(fitted.blocks[0].weights))
    scores = (asked * fitted.blocks[0].weights) @ phi.T
    assert relative(fitted.influence(case.batches, case.queries), scores) < EXACT


def test_a_saved_fit_answers_the_same(cases, name, tmp_path):
    case = cases["transformer"]
    fitted = METHODS[name][0].fit(case.task, case.batches)
    if name == "lissa":
        with pytest.raises(UnsupportedError, match="nothing to save"):
            fitted.save(tmp_path / "fit")
        return
    fitted.save(tmp_path / "fit")
    loaded = et.load(tmp_path / "fit", case.task)
    assert torch.equal(loaded.influence(case.batches, case.queries), fitted.influence(case.batches, case.queries))
    assert loaded.num_train == fitted.num_train
    assert loaded.method == fitted.method


def test_the_model_is_left_as_found(cases, name):
    case = cases["conv"]
    model = case.task.model
    model.train()
    model.norm.eval()
    model.head.weight.grad = torch.ones_like(model.head.weight)
    model.conv.bias.requires_grad_(False)
    calls = []
    hook = model.register_forward_hook(lambda *args: calls.append(1))
    before = copy.deepcopy(model.state_dict())
    modes = [module.training for module in model.modules()]
    state = torch.get_rng_state()
    try:
        fitted = METHODS[name][0].fit(case.task, case.batches)
        fitted.influence(case.batches, case.queries)
        assert [module.training for module in model.modules()] == modes
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
        assert torch.equal(model.head.weight.grad, torch.ones_like(model.head.weight))
        assert model.conv.weight.grad is None
        assert not model.conv.bias.requires_grad
        assert torch.equal(torch.get_rng_state(), state)
        assert len(model._forward_hooks) == 1
    finally:
        hook.remove()
        model.head.weight.grad = None
        model.conv.bias.requires_grad_(True)


def test_constructors_only_store_settings(name):
    method = METHODS[name][0]
    assert dataclasses.is_dataclass(method)
    with pytest.raises(dataclasses.FrozenInstanceError):
        method.seed = 5
