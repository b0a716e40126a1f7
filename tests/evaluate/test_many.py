"""Many models trained at once end where each of them ends alone."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from eigentrace.errors import InputError
from eigentrace.evaluate import SGD, Loop, ManyModels, Subsets, Trainer, retrain
from eigentrace.evaluate.many import margin
from eigentrace.evaluate.subsets import TrainingJob
from tests.helpers.expecting import refused

SETTINGS = SGD(epochs=3, batch_size=7, lr=0.1, momentum=0.9, weight_decay=1e-2)


def data(size=40, shape=(5,), seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(size, *shape, generator=generator, dtype=torch.float64),
        torch.randint(0, 3, (size,), generator=generator),
    )


TRAIN, QUERIES = data(), data(6, seed=1)


def linear(num_in, num_out, bias=True):
    return nn.Linear(num_in, num_out, bias, dtype=torch.float64)  # its weights are drawn in float64, too


def mlp(activation=nn.ReLU):
    return nn.Sequential(linear(5, 8), activation(), linear(8, 6), nn.Tanh(), linear(6, 3))


class Gated(nn.Module):
    """No plain network: a product of two layers, one of them used twice, and a norm."""

    def __init__(self):
        super().__init__()
        self.first, self.last = linear(5, 5), linear(5, 3, bias=False)
        self.norm = nn.LayerNorm(5, dtype=torch.float64)

    def forward(self, x):
        return self.last(self.norm(self.first(torch.sigmoid(self.first(x))) * x))


def alone(make, job, sgd, train=TRAIN, loss=F.cross_entropy):
    """Train one model as anybody would, with torch's own optimiser; nothing of the library."""
    torch.manual_seed(job.seed)
    model = make()
    optimizer = torch.optim.SGD(
        model.parameters(), lr=sgd.lr, momentum=sgd.momentum, weight_decay=sgd.weight_decay, foreach=False
    )
    x, y = (t[torch.from_numpy(job.rows)] for t in train)
    for _ in range(sgd.epochs):
        for rows in torch.randperm(len(x)).split(sgd.batch_size):
            optimizer.zero_grad()
            loss(model(x[rows]), y[rows]).backward()
            optimizer.step()
    return model


def losses(model, queries=QUERIES):
    with torch.no_grad():
        return F.cross_entropy(model(queries[0]), queries[1], reduction="none")


def some_jobs(count=5, size=20, seed=0):
    return Subsets.random(40, count, size / 40, seed).jobs([[100 + i] for i in range(count)])


MODELS = {
    "relu": mlp,
    "tanh": lambda: mlp(nn.Tanh),
    "sigmoid": lambda: mlp(nn.Sigmoid),
    "regression": lambda: linear(5, 3),
    "no bias": lambda: nn.Sequential(nn.Flatten(), linear(5, 4, bias=False), nn.ReLU(), linear(4, 3)),
    "ends in an activation": lambda: nn.Sequential(linear(5, 3), nn.Tanh()),
    "not plain": Gated,
}


def refuses_to_fuse(*given, **options):
    """Whether the faster way for plain networks is not for this one."""
    with refused(InputError, "engine='fused'"):
        ManyModels(*given, SETTINGS, engine="fused", **options)
    return True


@pytest.mark.parametrize("engine", ["auto", "fused", "mapped"])
@pytest.mark.parametrize("name", MODELS)
def test_each_ends_where_it_ends_alone(name, engine):
    make, jobs = MODELS[name], some_jobs()
    if engine == "fused" and name == "not plain":
        assert refuses_to_fuse(make(), TRAIN, QUERIES)
        return
    trainer = ManyModels(make(), TRAIN, QUERIES, SETTINGS, engine=engine)
    expected = torch.stack([losses(alone(make, job, SETTINGS)) for job in jobs])
    assert (expected.max(dim=0).values - expected.min(dim=0).values).min() > 1e-3  # the models are different ones
    torch.testing.assert_close(trainer.outputs(jobs), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    "sgd",
    [
        SGD(epochs=2, batch_size=64, lr=0.3),  # one batch, no momentum
        SGD(epochs=2, batch_size=1, lr=0.01, momentum=0.5),
        SGD(epochs=1, batch_size=20, lr=0.1, weight_decay=0.1),
        SGD(epochs=4, batch_size=19, lr=0.1, momentum=0.9),  # a last batch of one
    ],
)
@pytest.mark.parametrize("engine", ["fused", "mapped"])
def test_settings(sgd, engine):
    jobs = some_jobs(2)
    expected = torch.stack([losses(alone(mlp, job, sgd)) for job in jobs])
    found = ManyModels(mlp(), TRAIN, QUERIES, sgd, engine=engine).outputs(jobs)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def test_images_are_flattened():
    train, queries = data(shape=(1, 2, 3)), data(4, (1, 2, 3), seed=1)

    def make():
        return nn.Sequential(nn.Flatten(), linear(6, 4), nn.ReLU(), linear(4, 3))

    trainer, jobs = ManyModels(make(), train, queries, SETTINGS, engine="fused"), some_jobs(2)
    expected = torch.stack([losses(alone(make, job, SETTINGS, train), queries) for job in jobs])
    torch.testing.assert_close(trainer.outputs(jobs), expected, rtol=0, atol=1e-10)


def test_sizes_may_differ_and_chunks_do_not_matter():
    jobs = [TrainingJob(np.arange(size), 7 * size) for size in (20, 40, 13, 20, 1)]
    expected = torch.stack([losses(alone(mlp, job, SETTINGS)) for job in jobs])
    for at_once in (1, 2, 16):
        found = ManyModels(mlp(), TRAIN, QUERIES, SETTINGS, at_once=at_once).outputs(jobs)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def test_float32_models_of_float64_data_and_small_labels():
    x, y = TRAIN
    trainer = ManyModels(mlp().float(), (x, y.to(torch.uint8)), QUERIES, SETTINGS)
    found = trainer.outputs(some_jobs(2))
    assert found.dtype == torch.float32
    expected = ManyModels(mlp(), TRAIN, QUERIES, SETTINGS).outputs(some_jobs(2))
    # Weights are drawn in float32, other numbers than in float64: both learn, neither equals the other.
    assert found.shape == expected.shape
    assert not torch.allclose(found.double(), expected, atol=1e-3)


def test_own_loss_and_targets():
    x = TRAIN[0]
    targets = torch.stack([x.sum(dim=1), x[:, 0]], dim=1)

    def squares(outputs, targets):
        return (outputs - targets).square().sum(dim=1)

    def make():
        return nn.Sequential(linear(5, 4), nn.GELU(), linear(4, 2))

    assert refuses_to_fuse(make(), (x, targets), (x[:4], targets[:4]), loss=squares)
    trainer = ManyModels(make(), (x, targets), (x[:4], targets[:4]), SETTINGS, loss=squares)
    jobs = some_jobs(2)
    models = [alone(make, job, SETTINGS, (x, targets), lambda out, target: squares(out, target).mean()) for job in jobs]
    with torch.no_grad():
        expected = torch.stack([squares(model(x[:4]), targets[:4]) for model in models])
    torch.testing.assert_close(trainer.outputs(jobs), expected, rtol=0, atol=1e-10)


def test_margin_is_the_log_odds():
    outputs, labels = torch.randn(5, 3, dtype=torch.float64), torch.tensor([0, 1, 2, 1, 0])
    p = outputs.softmax(dim=1).gather(1, labels[:, None]).squeeze(1)
    torch.testing.assert_close(margin(outputs, labels), torch.logit(p))
    trainer = ManyModels(mlp(), TRAIN, QUERIES, SETTINGS, measure="margin")
    assert not trainer.higher_is_worse
    by_loss = ManyModels(mlp(), TRAIN, QUERIES, SETTINGS).outputs(some_jobs(2))
    torch.testing.assert_close(trainer.outputs(some_jobs(2)), torch.logit((-by_loss).exp()))


def test_probability_is_that_of_the_label():
    trainer = ManyModels(mlp(), TRAIN, QUERIES, SETTINGS, measure="probability")
    assert not trainer.higher_is_worse
    by_loss = ManyModels(mlp(), TRAIN, QUERIES, SETTINGS).outputs(some_jobs(2))
    torch.testing.assert_close(trainer.outputs(some_jobs(2)), (-by_loss).exp())


def test_own_measure_in_parts(monkeypatch):
    queries = data(200, seed=3)
    sgd = SGD(epochs=1, batch_size=8, lr=0.1)
    monkeypatch.setattr(ManyModels, "_query_parts", lambda self, num: [slice(0, 90), slice(90, 200)])
    trainer = ManyModels(mlp(), TRAIN, queries, sgd, measure=lambda outputs, labels: outputs[:, 0])
    assert trainer.higher_is_worse
    (job,) = some_jobs(1)
    expected = alone(mlp, job, sgd)(queries[0])[:, 0].detach()
    torch.testing.assert_close(trainer.outputs([job])[0], expected, rtol=0, atol=1e-10)


def test_own_first_weights_start_from_the_given_ones():
    given = mlp()
    before = [p.detach().clone() for p in given.parameters()]

    def disturb(model, seed):
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p), alpha=0.1 * (seed % 2))

    trainer = ManyModels(given, TRAIN, QUERIES, SETTINGS, initialise=disturb)
    job = some_jobs(1)[0]

    def make():
        model = mlp()
        model.load_state_dict(given.state_dict())
        torch.manual_seed(job.seed)
        disturb(model, job.seed)
        return model

    expected = losses(alone(make, job, SETTINGS))
    for _ in range(2):  # the first run leaves nothing behind for the second
        torch.testing.assert_close(trainer.outputs([job])[0], expected, rtol=0, atol=1e-10)
    assert all(torch.equal(a, b) for a, b in zip(before, given.parameters(), strict=True))


def test_frozen_layers_stay_as_given():
    given = mlp()
    for p in given[0].parameters():
        p.requires_grad_(False)
    assert refuses_to_fuse(given, TRAIN, QUERIES)
    trainer = ManyModels(given, TRAIN, QUERIES, SETTINGS)
    job = some_jobs(1)[0]
    start, generator = trainer.start(job.seed)
    assert torch.equal(start["0.weight"], given[0].weight)
    assert not torch.equal(start["2.weight"], given[2].weight)

    def make():
        model = mlp()
        model.load_state_dict(start)
        model[0].requires_grad_(False)
        torch.set_rng_state(generator.get_state())
        return model

    torch.testing.assert_close(trainer.outputs([job])[0], losses(alone(make, job, SETTINGS)), rtol=0, atol=1e-10)


def test_the_callers_random_state_and_model_are_left_alone():
    model, state = mlp(), torch.get_rng_state()
    before = [p.detach().clone() for p in model.parameters()]
    ManyModels(model.eval(), TRAIN, QUERIES, SETTINGS).outputs(some_jobs(2))
    assert torch.equal(torch.get_rng_state(), state)
    assert not model.training
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(p.grad is None for p in model.parameters())


def test_out_of_memory_halves_the_chunk(monkeypatch):
    trainer, train = ManyModels(mlp(), TRAIN, QUERIES, SETTINGS, at_once=8), ManyModels._train
    sizes = []

    def scarce(self, jobs):
        sizes.append(len(jobs))
        if len(jobs) > 2:
            raise torch.OutOfMemoryError("no room")
        return train(self, jobs)

    jobs = some_jobs(5)
    expected = trainer.outputs(jobs)
    monkeypatch.setattr(ManyModels, "_train", scarce)
    torch.testing.assert_close(trainer.outputs(jobs), expected)
    assert sizes == [5, 2, 2, 1]


def test_the_recipe_knows_what_matters():
    def recipe(model=None, train=TRAIN, queries=QUERIES, sgd=SETTINGS, **options):
        return ManyModels(model or mlp(), train, queries, sgd, **options).recipe()

    base = recipe()
    assert recipe() == base  # other first weights of the template, which are drawn anew
    assert recipe(at_once=3, engine="mapped") == base
    others = [
        recipe(model=mlp(nn.Tanh)),
        recipe(model=mlp().float()),
        recipe(train=(TRAIN[0] + 1e-9, TRAIN[1])),
        recipe(queries=data(6, seed=2)),
        recipe(sgd=SGD(epochs=3, batch_size=7, lr=0.1, momentum=0.9)),
        recipe(measure="margin"),
        recipe(measure="probability"),
        recipe(measure=lambda outputs, labels: outputs[:, 0]),
        recipe(initialise=lambda model, seed: None),
        recipe(loss=lambda outputs, labels: F.cross_entropy(outputs, labels, reduction="none") * 2),
    ]
    assert all(other != base for other in others)


def test_the_recipe_knows_weights_that_stay_as_given():
    def keep(model, seed):
        pass

    def frozen(shift):
        model = nn.Sequential(linear(5, 4), nn.ReLU(), linear(4, 3))
        nn.init.constant_(model[0].weight, shift)
        model[0].requires_grad_(False)
        nn.init.zeros_(model[0].bias)
        return model

    torch.manual_seed(0)
    given, other = mlp(), mlp()
    kept = [ManyModels(model, TRAIN, QUERIES, SETTINGS, initialise=keep) for model in (given, other, given)]
    assert kept[0].recipe() != kept[1].recipe()
    kept[0].outputs(some_jobs(1))
    assert kept[0].recipe() == kept[2].recipe()
    fixed = [ManyModels(frozen(shift), TRAIN, QUERIES, SETTINGS).recipe() for shift in (0.0, 1.0, 0.0)]
    assert fixed[0] != fixed[1]
    assert fixed[0] == fixed[2]


def test_both_trainers_keep_the_contract():
    jobs, subsets = some_jobs(3), Subsets.random(40, 3, 0.5)
    assert isinstance(ManyModels(mlp(), TRAIN, QUERIES, SETTINGS), Trainer)
    loop = Loop(lambda rows, seed: alone(mlp, TrainingJob(rows, seed), SETTINGS), losses)
    assert isinstance(loop, Trainer)
    many = ManyModels(mlp(), TRAIN, QUERIES, SETTINGS)
    torch.testing.assert_close(loop.outputs(jobs), many.outputs(jobs), rtol=0, atol=1e-10)
    both = [retrain(trainer, subsets, seeds=2).outputs for trainer in (loop, many)]
    np.testing.assert_allclose(*both, rtol=0, atol=1e-10)


REFUSED = {
    "dropout": (
        dict(model=nn.Sequential(nn.Linear(5, 3), nn.Dropout())),
        ("1 (Dropout)",),
    ),
    "batch norm": (dict(model=nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3))), ("1 (BatchNorm1d)",)),
    "nothing to train": (dict(model=nn.ReLU()), ("model", "torch.nn.Module", "ReLU")),
    "no tensors": (dict(train=[1, 2]), ("train", "(inputs, targets)", "list")),
    "lengths": (dict(queries=(QUERIES[0], QUERIES[1][:2])), ("queries", "6 inputs", "2 targets")),
    "empty": (dict(train=(TRAIN[0][:0], TRAIN[1][:0])), ("train", "0 inputs", "0 targets")),
    "label too large": (dict(train=(TRAIN[0], TRAIN[1] + 1)), ("train", 1, 3)),
    "label too small": (dict(queries=(QUERIES[0], QUERIES[1] - 1)), ("queries", -1, 3)),
    "float labels": (dict(train=(TRAIN[0], TRAIN[0])), ("loss", "(40, 5)")),
    "measure": (dict(measure="accuracy"), ("measure", "'margin'", "'probability'", "'accuracy'")),
    "engine": (dict(engine="fast"), ("engine", "'auto'", "'fused'", "'mapped'", "'fast'")),
    "not plain": (dict(model=Gated(), engine="fused"), ("engine='fused'", "nn.Sequential", "nn.Linear")),
    "at_once": (dict(at_once=0), ("at_once", 1, 0)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses(name):
    options, mentions = REFUSED[name]
    arguments = dict(model=mlp(), train=TRAIN, queries=QUERIES, sgd=SETTINGS) | options
    with refused(InputError, *mentions):
        ManyModels(**arguments)


def test_refuses_weights_it_cannot_draw():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(5, 3, dtype=torch.float64))

        def forward(self, x):
            return x @ self.weight

    trainer = ManyModels(Own(), TRAIN, QUERIES, SETTINGS)
    with refused(InputError, "Own", "reset_parameters"):
        trainer.outputs(some_jobs(1))


def test_refuses_other_data_and_measures_of_another_shape():
    trainer = ManyModels(mlp(), TRAIN, QUERIES, SETTINGS, measure=lambda outputs, labels: outputs)
    with refused(InputError, 30, 40):
        retrain(trainer, Subsets.random(30, 3), seeds=1)
    with refused(InputError, "queries", "(6, 3)"):
        trainer.outputs(some_jobs(1))


@pytest.mark.parametrize("wrong", [dict(epochs=0), dict(batch_size=0), dict(lr=-1.0), dict(momentum=float("nan"))])
def test_settings_are_checked(wrong):
    with refused(InputError, *wrong, *wrong.values()):
        SGD(**(dict(epochs=1) | wrong))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("engine", ["fused", "mapped"])
def test_on_a_gpu_as_on_the_cpu(engine):
    jobs = some_jobs()
    expected = ManyModels(mlp(), TRAIN, QUERIES, SETTINGS).outputs(jobs)
    trainer = ManyModels(mlp(), TRAIN, QUERIES, SETTINGS, device="cuda", engine=engine)
    assert trainer.at_once > 16
    torch.testing.assert_close(trainer.outputs(jobs).cpu(), expected, rtol=0, atol=1e-10)
