"""Three engines, one answer: against gradients taken one example at a time by an ordinary backward pass."""

import copy
import dataclasses

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import eigentrace as et
from eigentrace.data import as_data
from eigentrace.errors import NumericalError, TaskError, UnsupportedError
from eigentrace.projection import Job, gradients, in_chunks, project
from eigentrace.projection import choose as choosing
from eigentrace.projection.directions import CoordinateDirections, DenseDirections, StackedDirections
from eigentrace.projection.engine import Compute
from eigentrace.projection.forward import forward
from eigentrace.projection.reverse import one_by_one, vmapped
from harness.models import Transformer, token_task
from tests.helpers.expecting import refused
from tests.helpers.models import CASES, dense_gradients

ENGINES = [forward, vmapped, one_by_one]
EXACT = 1e-10
CUDA = torch.cuda.is_available()
# Recurrent layers write in place, which vmap over examples forbids: the last fallback serves them.
PAIRS = [(name, engine) for name in CASES for engine in ENGINES if (name, engine) != ("recurrent", vmapped)]


def make_directions(layout, kind):
    dense = DenseDirections(torch.randn(11, layout.numel, dtype=layout.dtype), layout)
    unit = CoordinateDirections(torch.randperm(layout.numel)[:6].sort().values, layout)
    return {"dense": dense, "unit": unit, "stacked": StackedDirections((dense, unit, dense))}[kind]


def run(engine, job, batches):
    with job.task.session():
        found = [engine(job, batch, len(batch[1])) for batch in batches]
    return torch.cat([f.features for f in found]), found


@pytest.mark.parametrize("kind", ["dense", "unit", "stacked"])
@pytest.mark.parametrize(("name", "engine"), PAIRS)
def test_features_match_dense_gradients(cases, name, engine, kind):
    case = cases[name]
    directions = make_directions(case.task.layout, kind)
    expected = dense_gradients(case.task, case.batches) @ directions.dense(0, directions.count).T
    features, _ = run(engine, Job(case.task, case.task.losses, directions), case.batches)
    assert features.shape == (case.num_examples, directions.count)
    assert (features - expected).norm() < EXACT * expected.norm()


def attending(device):
    """A task with attention of every kind, its batch, and its gradients in float64."""
    torch.manual_seed(0)
    model = Transformer(16, 2, 2, words=23, norm_first=True).to(device)
    batch = tuple(torch.randint(0, 23, (6, length), device=device) for length in (9, 7, 7))
    double = token_task(copy.deepcopy(model).double())
    return token_task(model), batch, dense_gradients(double, [batch])


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="needs CUDA")])]
)
@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_runs_in_bfloat16(engine, device):
    task, batch, expected = attending(torch.device(device))
    directions = DenseDirections(torch.randn(11, task.layout.numel, device=device), task.layout)
    with task.session():
        found = engine(Job(task.in_bf16(), task.in_bf16().losses, directions), batch, 6)
    wanted = expected @ directions.dense(0, directions.count).double().T
    assert found.features.dtype == torch.float32
    assert (found.features - wanted).norm() < 5e-2 * wanted.norm()


@pytest.mark.parametrize(("name", "engine"), [pair for pair in PAIRS if pair[1] is not forward])
def test_norms_and_losses_come_along(cases, name, engine):
    case = cases[name]
    job = Job(case.task, case.task.losses, make_directions(case.task.layout, "unit"), norms=True)
    _, found = run(engine, job, case.batches)
    expected = dense_gradients(case.task, case.batches).square().sum(dim=1)
    assert torch.allclose(torch.cat([f.squares() for f in found]), expected, rtol=EXACT)
    with case.task.session():
        losses = torch.cat([case.task.losses(case.task.params, b) for b in case.batches])
    assert torch.allclose(torch.cat([f.losses for f in found]), losses, rtol=EXACT)


def test_chunks_within_a_batch_change_nothing(cases):
    case = cases["conv"]
    job = Job(case.task, case.task.losses, make_directions(case.task.layout, "dense"))
    whole = [run(engine, job, case.batches)[0] for engine in (vmapped, forward)]
    small = dataclasses.replace(job, compute=Compute(memory=2 * 2 * case.task.layout.numel * 8))
    parts = [run(engine, small, case.batches)[0] for engine in (vmapped, forward)]
    for a, b in zip(whole, parts, strict=True):
        assert (a - b).norm() < EXACT * a.norm()


@pytest.mark.parametrize("batch_size", [1, 2, 5, 17, 100])
def test_batch_size_does_not_matter(batch_size):
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))
    task = et.classification(model)
    dataset = TensorDataset(torch.randn(17, 4), torch.randint(0, 3, (17,)))
    fitted = et.RandProj(7).fit(task, dataset)
    alone = fitted.features(et.Data(dataset, batch_size=17))
    # float32: a sum over vectors of a few dozen numbers in another order
    assert torch.allclose(fitted.features(et.Data(dataset, batch_size=batch_size)), alone, rtol=1e-4, atol=1e-5)


def names(engines):
    return [engine.__name__ for engine in engines]


def test_layerwise_comes_first_then_reverse_for_many_directions_and_forward_for_large_models(cases):
    task = cases["mlp"].task
    few, many = (Job(task, task.losses, make_directions(task.layout, k)) for k in ("unit", "stacked"))
    assert names(choosing.preferred(many)) == ["layerwise", "vmapped", "forward", "one_by_one"]
    tight = dataclasses.replace(few, compute=Compute(memory=1))
    assert names(choosing.preferred(tight)) == ["layerwise", "forward", "vmapped", "one_by_one"]
    assert forward not in choosing.preferred(dataclasses.replace(few, norms=True))


@pytest.mark.parametrize(
    ("engine", "order"),
    [("layerwise", ["layerwise"]), ("forward", ["forward"]), ("reverse", ["vmapped", "one_by_one"])],
)
def test_an_engine_can_be_asked_for(cases, engine, order):
    task = cases["mlp"].task
    job = Job(task, task.losses, make_directions(task.layout, "unit"), compute=Compute(engine=engine))
    assert names(choosing.preferred(job)) == order


class _Branching(nn.Module):
    """Reads a number out of its input, which vmap forbids and forward mode allows."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(3, 2)

    def forward(self, x):
        return self.a(x) * (2.0 if x.sum().item() > 1e9 else 1.0)


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_every_model_is_projected_by_the_chosen_engine(cases, name, norms):
    case = cases[name]
    directions = make_directions(case.task.layout, "dense")
    with case.task.session():
        found = [f for _, f in project(Job(case.task, case.task.losses, directions, norms), as_data(case.batches))]
    expected = dense_gradients(case.task, case.batches) @ directions.matrix.T
    assert (torch.cat([f.features for f in found]) - expected).norm() < EXACT * expected.norm()


def test_falls_back_when_vmap_cannot_go():
    model = _Branching().double()
    task, batch = et.classification(model), (torch.randn(6, 3).double(), torch.randint(0, 2, (6,)))
    directions = make_directions(task.layout, "dense")
    expected = dense_gradients(task, [batch])
    with task.session():
        (_, plain), *_ = project(Job(task, task.losses, directions), as_data([batch]))
        (_, normed), *_ = project(Job(task, task.losses, directions, norms=True), as_data([batch]))
        found = torch.cat(list(gradients(Job.of(task, "losses"), as_data([batch]))))
    assert (found - expected).norm() < EXACT * expected.norm()
    for projection in (plain, normed):
        assert (projection.features - expected @ directions.matrix.T).norm() < EXACT * projection.features.norm()


def test_no_engine_is_said_with_every_reason():
    class Sampled(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(2, 2)

        def forward(self, x):
            raise RuntimeError("needs hardware that is not there")

    task, batch = et.classification(Sampled()), (torch.randn(3, 2), torch.zeros(3, dtype=torch.long))
    job = Job(task, task.losses, make_directions(task.layout, "unit"))
    with task.session(), refused(UnsupportedError, "vmapped", "one_by_one", "needs hardware that is not there"):
        list(project(job, as_data([batch])))


def test_forward_mode_and_jobs_without_norms_refuse_them(cases):
    task = cases["mlp"].task
    job = Job(task, task.losses, make_directions(task.layout, "unit"))
    with task.session(), refused(UnsupportedError, "norms"):
        forward(dataclasses.replace(job, norms=True), cases["mlp"].batches[0], 7)
    with task.session(), refused(UnsupportedError, "Job(norms=True)"):
        forward(job, cases["mlp"].batches[0], 7).squares()


def test_gradients_are_gathered_within_a_budget():
    parts = [torch.ones(3, 4), torch.ones(2, 4), torch.ones(2, 4)]
    sizes = [len(chunk) for chunk in in_chunks(iter(parts), budget=2 * 4 * 4)]
    assert sizes == [2, 2, 2, 1]
    assert [len(chunk) for chunk in in_chunks(iter(parts), budget=1)] == [1] * 7


class _Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(3, 2)

    def forward(self, x, mask):
        return self.a((mask.reshape(-1, 4, 1) * x).mean(dim=1))


def test_a_shared_tensor_of_the_batch_size_is_refused_and_not_cut_up():
    # A mask of 4 × 4 beside a last batch of 4 examples: cut up by row, it gave gradients up to 165% off.
    def loss(model, batch):
        x, y, mask = batch
        return nn.functional.cross_entropy(model(x, mask.sum(dim=0)), y, reduction="none")

    def collate(examples):
        return (*torch.utils.data.default_collate(examples), torch.ones(4, 4).tril())

    dataset = TensorDataset(torch.randn(20, 4, 3), torch.randint(0, 2, (20,)))
    data = et.Data(dataset, collate, batch_size=16)
    fitted = et.TracIn().fit(et.Task(_Masked(), loss), data)
    with refused(TaskError, "row 16", "4 examples"):
        fitted.self_influence(data, compute=Compute(engine="reverse"))
    with refused(TaskError, "row 16", "4 examples"):
        fitted.influence([next(data.batches()).values], data)
    # The layerwise engine cuts nothing up: the odd batch is right as it is.
    whole = et.Data(dataset, collate, batch_size=20)
    assert torch.allclose(fitted.self_influence(data), fitted.self_influence(whole), rtol=1e-5)


def test_a_shared_tensor_is_refused_where_only_some_parameters_have_no_rule():
    torch.manual_seed(0)

    def loss(model, batch):
        x, y, mask = batch
        scores, _ = model.rest(model.a((mask.sum(dim=0).reshape(-1, 4, 1) * x).mean(dim=1))[:, None])
        return nn.functional.cross_entropy(scores[:, 0], y, reduction="none")

    def collate(examples):
        return (*torch.utils.data.default_collate(examples), torch.ones(4, 4).tril())

    model = nn.Module()
    model.a, model.rest = nn.Linear(3, 2), nn.LSTM(2, 2, batch_first=True)
    data = et.Data(TensorDataset(torch.randn(20, 4, 3), torch.randint(0, 2, (20,))), collate, batch_size=16)
    task = et.Task(model, loss)
    fitted = et.TracIn().fit(task, data)
    assert set(task.coverage.without_rule) == {name for name, _ in model.named_parameters() if name.startswith("rest")}
    with refused(TaskError, "row 16", "4 examples"):
        fitted.self_influence(data)


def test_a_bad_row_is_named_when_examples_go_one_by_one():
    x, y = torch.randn(6, 3), torch.randint(0, 2, (6,))
    task = et.classification(_Branching())
    x[4] = torch.nan
    with task.session(), refused(NumericalError, "row 4"):
        list(gradients(Job.of(task, "losses"), as_data([(x, y)])))


class Mixed(nn.Module):
    """Layers of two types, one of which no rule covers."""

    def __init__(self, first, last):
        super().__init__()
        self.first, self.bend = nn.Linear(4, 5, dtype=first), nn.PReLU(5, dtype=first)
        self.last = nn.Linear(5, 3, dtype=last)

    def forward(self, x):
        return self.last(self.bend(self.first(x.to(self.first.weight.dtype))).to(self.last.weight.dtype))


@pytest.mark.parametrize("engine", ["auto", "reverse", "forward"])
@pytest.mark.parametrize("types", [(torch.float32, torch.float64), (torch.float64, torch.float32)])
def test_models_of_two_types_are_projected_in_the_wider_one(types, engine):
    torch.manual_seed(0)
    task, data = et.classification(Mixed(*types)), (torch.randn(6, 4), torch.arange(6) % 3)
    fitted = et.RandProj(keep=5).fit(task, data)
    wide, (block,) = task.double(), fitted.blocks
    expected = dense_gradients(wide, [wide.place(data)]) @ block.directions.dense(0, 5).T
    features = fitted.features(data, compute=Compute(engine=engine))
    assert features.dtype == torch.float64
    assert (features - expected).norm() < 1e-6 * expected.norm()
    scores = fitted.influence(data, data, compute=Compute(engine=engine))
    assert (scores - expected @ expected.T / 5).norm() < 1e-6 * scores.norm()


def test_examples_that_cannot_be_doubled_go_one_at_a_time():
    # Time comes first here, and nothing but a batch of one example can be taken apart.
    torch.manual_seed(0)

    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.recur, self.head = nn.GRU(2, 3), nn.Linear(3, 2)

        def forward(self, x):
            return self.head(self.recur(x)[1][-1])

    def loss(model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

    def collate(examples):
        return torch.stack([x for x, _ in examples], dim=1), torch.tensor([y for _, y in examples])

    examples = [(torch.randn(3 + i % 2, 2).double(), i % 2) for i in range(6)]
    model, data = Last().double(), et.Data(examples, collate, batch_size=1)
    found = et.TracIn().fit(et.Task(model, loss), data).self_influence(data)
    for example, score in zip(examples, found, strict=True):
        own = torch.autograd.grad(loss(model, collate([example])).sum(), list(model.parameters()))
        assert float(sum(g.square().sum() for g in own)) == pytest.approx(float(score), rel=EXACT)
