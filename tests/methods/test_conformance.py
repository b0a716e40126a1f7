"""One contract, every method: a new method adds a line to METHODS; the tests follow from what it says it can do."""

import copy
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import eigentrace as et
from eigentrace.errors import NumericalError, UnsupportedError
from eigentrace.fits.fitted import Capabilities
from eigentrace.numeric.seeding import generator_of
from tests.helpers.expecting import refused
from tests.helpers.models import CASES, Case, dense_gradients, dense_hessian

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


def ekfac(case: Case) -> Tensor:
    """The metric itself is compared with dense gradients in test_ekfac.py."""
    fitted = et.EKFAC(damping=0.1).fit(case.task, case.batches)
    return fitted.metric.inverse(torch.eye(case.task.layout.numel, dtype=torch.float64), 0.1)


IN_METRIC = et.Arnoldi(steps=500, keep=9, tail="ekfac", sample=None)


def corrected(case: Case) -> Tensor:
    """The pairs themselves are compared with dense eigenproblems in test_relative_pairs.py."""
    fitted = IN_METRIC.fit(case.task, case.batches)
    eye = torch.eye(case.task.layout.numel, dtype=torch.float64)
    U, values = fitted.pairs.directions, fitted.spectrum.eigenvalues
    return fitted.metric.inverse(eye, fitted.damping) + U.T @ torch.diag(1 / values - 1) @ U


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


def losses(case: Case, state: dict[str, Tensor] | None = None, batches: Any = None) -> Tensor:  # (N,)
    """The loss of every example by the model itself, at other weights or with other inputs if they are given."""
    model = copy.deepcopy(case.task.model).eval()
    if state is not None:
        model.load_state_dict(state)
    task = case.make_task(model)
    with torch.no_grad():
        return torch.cat([task.losses(task.params, batch) for batch in batches or case.batches])


def states(case: Case) -> list[dict[str, Tensor]]:
    """Two checkpoints: the model as it is, and with other weights."""
    now = copy.deepcopy(case.task.model.state_dict())
    return [now, {name: 1.3 * v if v.is_floating_point() else v for name, v in now.items()}]


def mean_losses(case: Case, fitted: et.Fitted) -> Tensor:
    return torch.stack([losses(case, state) for state in states(case)]).mean(dim=0)


def shaken(batch: Any, rows: np.ndarray, seed: int) -> Any:
    """Change the inputs by row and draw."""
    x, *rest = batch
    size = 1 + 0.1 * torch.sin(torch.from_numpy(rows) + 10.0 * seed)
    return (x * size.reshape(-1, *[1] * (x.ndim - 1)), *rest) if x.is_floating_point() else batch


def shaken_losses(case: Case, fitted: et.Fitted) -> Tensor:
    ends = np.cumsum([len(batch[1]) for batch in case.batches])
    rows = np.split(np.arange(ends[-1]), ends[:-1])
    draws = [[shaken(batch, r, seed) for batch, r in zip(case.batches, rows, strict=True)] for seed in (6, 7)]
    return torch.stack([losses(case, batches=changed) for changed in draws]).mean(dim=0)


def margin(model: Any, batch: Any) -> Tensor:
    logits = model(batch[0])
    own = F.one_hot(batch[1], logits.shape[1]).bool()
    return logits[own] - logits.masked_fill(own, -torch.inf).logsumexp(dim=1)


def support(case: Case, fitted: et.Fitted) -> Tensor:
    phi = F.normalize(dense_gradients(case.task, case.batches, margin))
    return -(phi @ phi.sum(dim=0) - 1) / len(phi)


def left_out(case: Case, fitted: Any, ridge: float = 1e-2) -> Tensor:
    """Regress the labels on projected gradients of the centred logits, once without each example."""
    classes, labels = 3, torch.cat([batch[1] for batch in case.batches])

    def logit(c: int) -> Tensor:
        found = dense_gradients(case.task, case.batches, lambda m, b: m(b[0])[:, c] - m(b[0]).mean(dim=1))
        return found @ fitted.described.directions.matrix.T

    psi = F.normalize(torch.cat([logit(c) for c in range(classes)], dim=1))
    targets = F.one_hot(labels, classes).double() - 1 / classes
    scores = []
    for i in range(len(psi)):
        others = torch.arange(len(psi)) != i
        gram = psi[others].T @ psi[others] + ridge * len(psi) * torch.eye(psi.shape[1], dtype=torch.float64)
        predicted = psi[i] @ torch.linalg.solve(gram, psi[others].T @ targets[others])
        scores.append(predicted[torch.arange(classes) != labels[i]].max() - predicted[labels[i]])
    return torch.stack(scores)


@dataclasses.dataclass(frozen=True)
class Line:
    """A method, and what it must answer."""

    method: Any
    """Its settings, or what makes them for a case."""
    metric: Callable[[Case], Tensor] | None = None
    """M, (P, P), of a method that scores pairs by g(z)ᵀ M g(x)."""
    own: Callable[[Case, Any], Tensor] | None = None
    """The scores of single examples, (N,), of one that scores no pairs."""
    models: tuple[str, ...] = tuple(CASES)

    def settings(self, case: Case) -> Any:
        return self.method(case) if callable(self.method) else self.method

    def fit(self, case: Case, data: Any = None, **options: Any) -> et.Fitted:
        return self.settings(case).fit(case.task, case.batches if data is None else data, **options)

    def expected(self, case: Case, fitted: et.Fitted) -> Tensor:  # (N,)
        if self.metric is None:
            return self.own(case, fitted)
        g = dense_gradients(case.task, case.batches)
        return ((g @ self.metric(case)) * g).sum(dim=1)


CLASSIFIERS = ("mlp", "conv", "encoder")
LISSA = et.Lissa(depth=10, damping=0.01, scale=50.0, batch_size=1000)
FEW = dataclasses.replace(LISSA, depth=3)
WHOLE = {"steps": 500, "sample": None}
METHODS = {
    "arnoldi truncated": Line(et.Arnoldi(keep=12, tail=None, curvature="hessian", **WHOLE), truncated),
    # A batch that holds all examples is one fixed matrix, whose dense form is known.
    "arnoldi as published": Line(et.Arnoldi.as_published(500, 12, batch=10**6), truncated),
    "arnoldi tail": Line(et.Arnoldi(keep=12, **WHOLE), tailed),
    "exact": Line(et.ExactHessian(), inverse),
    "ekfac": Line(et.EKFAC(damping=0.1), ekfac),
    "arnoldi in the metric of ekfac": Line(IN_METRIC, corrected),
    "randproj": Line(et.RandProj(9, seed=3), gaussian),
    "randselect": Line(et.RandSelect(9, seed=3), picked),
    "tracin": Line(et.TracIn(), identity),
    "lissa": Line(LISSA, neumann),
    "inverse arnoldi": Line(
        et.InverseArnoldi(steps=500, keep=500, solver=FEW), lambda case: neumann(case, depth=FEW.depth)
    ),
    "loss": Line(et.Loss(), own=lambda case, fitted: losses(case)),
    "mean loss": Line(lambda case: et.MeanLoss(states(case)), own=mean_losses),
    "augmented loss": Line(et.AugmentedLoss(shaken, draws=2, seed=3), own=shaken_losses),
    "support": Line(et.Support(), own=support, models=CLASSIFIERS),
    "tangent ridge": Line(et.TangentRidge(keep=7, ridge=1e-2, seed=3), own=left_out, models=CLASSIFIERS),
}
PAIRS = [name for name, line in METHODS.items() if line.metric is not None]
CAN = [field.name for field in dataclasses.fields(Capabilities)]

of_pairs = pytest.mark.parametrize("name", PAIRS)
# The cases have no record of a training.
pytestmark = pytest.mark.filterwarnings("ignore:The damping of this fit is a guess")


@pytest.fixture(params=METHODS)
def name(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def fits(cases) -> Callable[..., et.Fitted]:
    """Every method, fitted once for each model it is asked on: fits are immutable."""
    return functools.cache(lambda name, model="mlp": METHODS[name].fit(cases[model]))


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


def ask(fitted: et.Fitted, what: str, data: Any, path: Any) -> Any:
    """Ask a fit for one of the things that `can` speaks of."""
    questions = {
        "influence": lambda: fitted.influence(data, data),
        "features": lambda: fitted.features(data),
        "save": lambda: fitted.save(path),
        "spectrum": lambda: fitted.spectrum,
        "distill": lambda: fitted.distill(keep=1),
        "coordinates": lambda: fitted.with_coordinates(data, 3),
        "unit_gradients": lambda: fitted.self_influence(data, normalize="gradient"),
        "refine": lambda: fitted.influence(data, data, refine=et.Refine(12, damping=0.1)),
    }
    return questions[what]()


def test_every_public_method_has_a_line(cases):
    public = {getattr(et, name) for name in et.__all__} - {et.Ensemble}
    methods = {one for one in public if dataclasses.is_dataclass(one) and hasattr(one, "fit")}
    assert {type(line.settings(cases["mlp"])) for line in METHODS.values()} == methods


@pytest.mark.parametrize(("name", "model"), [(name, m) for name, line in METHODS.items() for m in line.models])
def test_scores_match_the_dense_oracle(cases, fits, name, model):
    case, line = cases[model], METHODS[name]
    fitted = fits(name, model)
    assert relative(fitted.self_influence(case.batches), line.expected(case, fitted)) < EXACT
    assert fitted.can.influence == (line.metric is not None)
    if fitted.can.influence:
        train, asked = dense_gradients(case.task, case.batches), dense_gradients(case.task, case.queries)
        found = fitted.influence(train=case.batches, queries=case.queries)
        assert relative(found, asked @ line.metric(case) @ train.T) < EXACT


@pytest.mark.parametrize("what", CAN)
def test_what_it_cannot_do_it_refuses_by_name(cases, fits, name, what, tmp_path):
    fitted = fits(name)
    data = cases["mlp"].batches
    if getattr(fitted.can, what):
        ask(fitted, what, data, tmp_path / "fit")
        return
    with refused(UnsupportedError, fitted.method["name"]):
        ask(fitted, what, data, tmp_path / "fit")


def test_a_run_holds_what_the_fit_says(cases, fits, name, tmp_path):
    case = cases["mlp"]
    fitted = fits(name)
    run = et.score(fitted, case.batches, tmp_path / "run", shard_rows=7)
    again = et.open_run(tmp_path / "run")
    assert len(again.reader.shards) == 3
    assert relative(torch.from_numpy(again.column("self_influence")), fitted.self_influence(case.batches)) < EXACT
    assert relative(torch.from_numpy(again.column("loss")), losses(case)) < EXACT
    assert np.array_equal(again.column("label"), torch.cat([batch[1] for batch in case.batches]))
    assert ("gradient_norm" in again.columns) == bool(fitted.terms())
    assert bool(again.num_features) == fitted.can.features
    if not fitted.can.influence:
        with refused(UnsupportedError, fitted.method["name"]):
            run.explain(3, k=2)
        return
    scores = fitted.influence(case.batches, [tuple(t[3:4] for t in case.batches[0])])[0]
    scores[3] = -torch.inf
    assert run.explain(3, k=2).proponents.rows[0].tolist() == scores.topk(2).indices.tolist()


def test_a_run_goes_on_where_it_stopped(cases, fits, name, tmp_path):
    case = cases["mlp"]
    fitted = fits(name)
    whole = et.score(fitted, case.batches, tmp_path / "whole", shard_rows=7)
    part = et.score(fitted, case.batches, tmp_path / "part", shard_rows=7)
    record = part.folder.record
    record.write(record.read()[:1])
    part.folder.table_file.unlink()
    went_on = et.score(METHODS[name].fit(case), case.batches, tmp_path / "part", shard_rows=7)
    for column in whole.columns:
        assert np.array_equal(went_on.column(column), whole.column(column))


def test_inverse_arnoldi_keeps_the_largest_of_the_inverse(cases):
    case, line = cases["mlp"], METHODS["inverse arnoldi"]
    few = dataclasses.replace(line.method, keep=5).fit(case.task, case.batches)
    assert torch.allclose(few.blocks[0].weights, eigen(line.metric(case))[0][:5], rtol=EXACT)


@of_pairs
def test_self_influence_is_the_diagonal(cases, fits, name):
    case = cases["mlp"]
    fitted = fits(name)
    pairs = fitted.influence(case.batches, case.batches)
    assert relative(pairs.diagonal(), fitted.self_influence(case.batches)) < EXACT


def test_batching_changes_nothing(cases, name):
    case = cases["mlp"]
    x, y = (torch.cat([b[i] for b in case.batches]) for i in (0, 1))
    dataset = torch.utils.data.TensorDataset(x, y)
    fits = [METHODS[name].fit(case, et.Data(dataset, batch_size=size)) for size in (1, 5, 17)]
    asked = [(fitted, et.Data(dataset, batch_size=size)) for fitted, size in zip(fits, (17, 1, 5), strict=True)]
    own = [fitted.self_influence(data) for fitted, data in asked]
    assert max(relative(other, own[0]) for other in own[1:]) < EXACT
    if fits[0].can.influence:
        pairs = [fitted.influence(data, case.queries) for fitted, data in asked]
        assert max(relative(other, pairs[0]) for other in pairs[1:]) < EXACT


def test_fitting_again_gives_the_same_bits(cases, fits, name):
    case = cases["conv"]
    again = METHODS[name].fit(case).self_influence(case.batches)
    assert torch.equal(again, fits(name, "conv").self_influence(case.batches))


@of_pairs
def test_the_measurement_is_what_queries_are_asked_about(cases, name):
    def logit(model, batch):
        return model(batch[0])[:, 1]

    case = cases["mlp"]
    task = et.classification(case.task.model, l2={"*.weight": 0.1, "*.bias": 0.05}, measurement=logit)
    fitted = METHODS[name].fit(dataclasses.replace(case, task=task))
    M = METHODS[name].metric(case)
    train, asked = dense_gradients(task, case.batches), dense_gradients(task, case.queries, logit)
    assert relative(fitted.influence(case.batches, case.queries), asked @ M @ train.T) < EXACT
    assert relative(fitted.self_influence(case.batches), ((train @ M) * train).sum(dim=1)) < EXACT
    if fitted.can.features:
        loss, measured = (fitted.features(case.queries, queries=q) for q in (False, True))
        assert relative(measured, loss) > 0.1


@of_pairs
def test_gradient_normalisation_is_unit_gradients(cases, fits, name):
    case = cases["mlp"]
    fitted = fits(name)
    M = METHODS[name].metric(case)
    train, asked = (torch.nn.functional.normalize(dense_gradients(case.task, b)) for b in (case.batches, case.queries))
    found = fitted.influence(case.batches, case.queries, normalize="gradient")
    assert relative(found, asked @ M @ train.T) < EXACT
    assert relative(fitted.self_influence(case.batches, normalize="gradient"), ((train @ M) * train).sum(dim=1)) < EXACT


@of_pairs
def test_features_normalisation_is_unit_features_or_is_refused(cases, fits, name):
    case = cases["mlp"]
    fitted = fits(name)
    if not fitted.can.features or any(block.identity for block in fitted.blocks):
        for ask in (
            lambda **o: fitted.self_influence(case.batches, **o),
            lambda **o: fitted.influence(case.batches, case.queries, **o),
        ):
            with refused(UnsupportedError, *(["'features'"] if fitted.can.features else [])):
                ask(normalize="features")
        return
    phi, asked = fitted.features(case.batches), fitted.features(case.queries, queries=True)
    lengths = asked.norm(dim=1)[:, None] * phi.norm(dim=1)
    found = fitted.influence(case.batches, case.queries, normalize="features")
    assert relative(found, fitted.influence(case.batches, case.queries) / lengths) < EXACT
    own = fitted.self_influence(case.batches, normalize="features")
    assert relative(own, fitted.self_influence(case.batches) / phi.square().sum(dim=1)) < EXACT


@of_pairs
def test_metric_normalisation_is_a_cosine_or_is_refused(cases, fits, name):
    case = cases["mlp"]
    fitted = fits(name)
    if not fitted.positive_metric:
        with refused(NumericalError, "normalize='metric'"):
            fitted.influence(case.batches, case.queries, normalize="metric")
        return
    M = METHODS[name].metric(case)
    train, asked = dense_gradients(case.task, case.batches), dense_gradients(case.task, case.queries)
    scale = ((asked @ M) * asked).sum(dim=1).sqrt()[:, None] * ((train @ M) * train).sum(dim=1).sqrt()
    found = fitted.influence(case.batches, case.queries, normalize="metric")
    assert relative(found, asked @ M @ train.T / scale) < EXACT
    assert found.abs().max() <= 1 + EXACT


def test_nats_divide_by_the_training_set(cases, fits, name):
    case = cases["mlp"]
    fitted = METHODS[name].fit(case, num_train=5000)
    if not fitted.has_curvature:
        with refused(UnsupportedError, fitted.method["name"], "unit='nats'"):
            fitted.self_influence(case.batches, unit="nats")
        return
    plain, nats = (fitted.influence(case.batches, case.queries, unit=u) for u in (None, "nats"))
    assert torch.allclose(plain / 5000, nats)
    default = fits(name).self_influence(case.batches[:1], unit="nats")
    # N is the size of what was fitted on, not of what is scored.
    assert torch.allclose(default * case.num_examples, fitted.self_influence(case.batches[:1]))


def test_features_give_the_score(cases, fits, name):
    case = cases["mlp"]
    fitted = fits(name)
    if not fitted.can.features:
        assert not any(term.block.directions.count for term in fitted.terms())
        return
    if fitted.can.distill:
        fitted = fitted.distill(tail=None)
    phi, asked = fitted.features(case.batches), fitted.features(case.queries)
    assert phi.shape == (case.num_examples, len(fitted.blocks[0].weights))
    scores = (asked * fitted.blocks[0].weights) @ phi.T
    assert relative(fitted.influence(case.batches, case.queries), scores) < EXACT


def test_a_saved_fit_answers_the_same(cases, fits, name, tmp_path):
    case = cases[METHODS[name].models[0]]
    fitted = fits(name, METHODS[name].models[0])
    if not fitted.can.save:
        assert not (tmp_path / "fit").exists()
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
        fitted = METHODS[name].fit(case)
        fitted.self_influence(case.batches)
        if fitted.can.influence:
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


def test_constructors_only_store_settings(cases, name):
    method = METHODS[name].settings(cases["mlp"])
    assert dataclasses.is_dataclass(method)
    with pytest.raises(dataclasses.FrozenInstanceError):
        method.seed = 5
