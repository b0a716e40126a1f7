"""Support of the others, and regression on the network's own gradients, against dense float64 oracles."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import eigentrace as et
from eigentrace.data import as_data
from eigentrace.errors import InputError, NumericalError, UnsupportedError
from eigentrace.methods.label_agreement import labels_of, margins
from eigentrace.methods.tangent import RIDGES
from tests.helpers.expecting import refused
from tests.helpers.models import dense_gradients
from tests.helpers.small import cross_entropy, examples, net, table


def margin(model, batch):
    """The oracle: labels are read from the batch, as the package cannot."""
    logits = model(batch[0])
    own = F.one_hot(batch[1], logits.shape[1]).bool()
    return logits[own] - logits.masked_fill(own, -torch.inf).logsumexp(dim=1)


@pytest.fixture
def model():
    return net().double()


@pytest.fixture
def batch():
    x, y = examples(20)
    return x.double(), y


def dense_support(task, batches):
    phi = F.normalize(dense_gradients(task, batches, margin))
    return -(phi @ phi.sum(dim=0) - 1) / len(phi)


def test_labels_are_read_off_the_loss(model, batch):
    task = et.classification(model)
    assert torch.equal(labels_of(task, model(batch[0]), batch), batch[1])
    many = torch.arange(5000), torch.arange(5000)
    wide = et.classification(nn.Sequential(nn.Embedding(5000, 2), nn.Linear(2, 5000)))
    assert torch.equal(labels_of(wide, torch.zeros(5000, 5000), many), many[1])


def test_the_margin_is_the_logit_above_all_others(model, batch):
    task = et.classification(model)
    found = margins(task, task.params, batch)
    assert torch.allclose(found, margin(model, batch), rtol=1e-12)
    # What makes it a margin of this loss: cross-entropy is log(1 + exp(−margin)).
    assert torch.allclose(F.softplus(-found), cross_entropy(model, batch), rtol=1e-12)


@pytest.mark.parametrize("name", ["mlp", "conv"])
def test_support_matches_the_dense_oracle(cases, name):
    case = cases[name]
    fitted = et.Support().fit(case.task, case.batches)
    assert torch.allclose(fitted.self_influence(case.batches), dense_support(case.task, case.batches), atol=1e-10)


def test_support_of_fitted_examples_keeps_its_digits(batch):
    """At losses of 1e-20 gradients of the loss are zero to rounding; those of the margin are not."""
    model = net().double()
    model[2].weight.data *= 60
    model[2].bias.data *= 60
    labels = model(batch[0]).argmax(dim=1)
    assert cross_entropy(model, (batch[0], labels)).median() < 1e-9
    task = et.classification(model)
    found = et.Support().fit(task, (batch[0], labels)).self_influence((batch[0], labels))
    assert torch.allclose(found, dense_support(task, [(batch[0], labels)]), atol=1e-9)
    assert found.std() > 1e-3


def test_scale_of_the_logits_does_not_matter_for_a_linear_two_class_model(batch):
    x, y = batch[0], batch[1] % 2
    linear = nn.Linear(3, 2).double()
    first = et.Support().fit(et.classification(linear), (x, y)).self_influence((x, y))
    linear.weight.data *= 5
    linear.bias.data *= 5
    second = et.Support().fit(et.classification(linear), (x, y)).self_influence((x, y))
    # With two classes the margin is a difference of logits: its gradient depends on x and y alone.
    assert torch.allclose(first, second, atol=1e-12)


def test_an_example_that_stands_against_all_others_scores_highest():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 3, generator=generator).abs()
    y = torch.zeros(40, dtype=torch.long)
    y[17] = 1
    for method in (et.Support(), et.TangentRidge(keep=8)):
        scores = method.fit(et.classification(nn.Linear(3, 2)), (x, y)).self_influence((x, y))
        assert int(scores.argmax()) == 17, method


def test_one_example_has_nobody_to_back_it(model, batch):
    one = (batch[0][:1], batch[1][:1])
    assert et.Support().fit(et.classification(model), one).self_influence(one).abs() < 1e-12


def test_an_example_without_a_gradient_scores_zero():
    linear = nn.Linear(3, 2, bias=False).double()
    x, y = torch.randn(5, 3).double(), torch.tensor([0, 1, 0, 1, 0])
    x[2] = 0
    scores = et.Support().fit(et.classification(linear), (x, y)).self_influence((x, y))
    assert scores[2] == 0
    assert scores.isfinite().all()


def test_part_of_the_training_set_is_held_against_the_whole(model, batch):
    task = et.classification(model)
    fitted = et.Support().fit(task, batch)
    part = tuple(t[5:9] for t in batch)
    assert torch.allclose(fitted.self_influence(part), fitted.self_influence(batch)[5:9], atol=1e-12)


def dense_left_out(task, batches, directions, ridge):
    """Regress again for every example, without it."""
    classes, count = 3, sum(len(b[1]) for b in batches)
    labels = torch.cat([b[1] for b in batches])
    psi = []
    for c in range(classes):
        logit = dense_gradients(task, batches, lambda m, b, c=c: m(b[0])[:, c] - m(b[0]).mean(dim=1))
        psi.append(logit @ directions.T)
    psi = F.normalize(torch.cat(psi, dim=1))
    targets = F.one_hot(labels, classes).double() - 1 / classes
    scores = []
    for i in range(count):
        others = torch.arange(count) != i
        # λ·N stays as it is: the example leaves, the penalty does not change.
        H = psi[others].T @ psi[others] + ridge * count * torch.eye(psi.shape[1], dtype=torch.float64)
        predicted = psi[i] @ torch.linalg.solve(H, psi[others].T @ targets[others])
        scores.append(predicted[torch.arange(classes) != labels[i]].max() - predicted[labels[i]])
    return torch.stack(scores)


@pytest.mark.parametrize("ridge", [1e-1, 1e-3])
def test_tangent_ridge_is_a_regression_without_the_example(cases, ridge):
    case = cases["mlp"]
    task = et.classification(case.task.model)
    fitted = et.TangentRidge(keep=7, ridge=ridge, seed=3).fit(task, case.batches)
    expected = dense_left_out(task, case.batches, fitted.described.directions.matrix, ridge)
    assert torch.allclose(fitted.self_influence(case.batches), expected, atol=1e-9)


def test_the_ridge_is_the_one_of_least_left_out_error(model, batch):
    task = et.classification(model)
    fitted = et.TangentRidge(keep=5).fit(task, batch)
    errors = {}
    for ridge in RIDGES:
        other = et.TangentRidge(keep=5, ridge=ridge).fit(task, batch)
        with task.session():
            (found,) = other.described.of(as_data(batch), et.Compute())
        psi, targets = found[1], found[2]
        hat = (psi @ other.inverse) @ psi.T
        errors[ridge] = float((((hat @ targets) - targets) / (1 - hat.diagonal())[:, None]).square().mean())
    assert fitted.method["ridge"] == min(errors, key=errors.get)


def test_many_classes_are_seen_through_random_signs(batch):
    task = et.classification(nn.Linear(3, 30).double())
    fitted = et.TangentRidge(keep=4, outputs=6).fit(task, batch)
    assert fitted.described.functions.shape == (6, 30)
    assert fitted.described.functions.sum(dim=1).abs().max() < 1e-12
    assert fitted.self_influence(batch).isfinite().all()


@pytest.mark.parametrize("method", [et.Support(), et.TangentRidge(keep=4)], ids=["support", "tangent"])
class TestBoth:
    def test_batching_changes_nothing(self, model, batch, method):
        dataset = torch.utils.data.TensorDataset(*batch)
        task = et.classification(model)
        found = [method.fit(task, d).self_influence(d) for d in (et.Data(dataset, batch_size=s) for s in (1, 7, 20))]
        assert torch.allclose(found[0], found[1], atol=1e-10)
        assert torch.allclose(found[0], found[2], atol=1e-10)

    def test_what_is_refused(self, model, batch, method):
        name = type(method).__name__
        with refused(UnsupportedError, name, "loss", "outputs", "output_loss"):
            method.fit(et.Task(model, cross_entropy), batch)
        smoothed = et.Task(
            model,
            outputs=lambda m, b: m(b[0]),
            output_loss=lambda z, b: F.cross_entropy(z, b[1], reduction="none", label_smoothing=0.3),
        )
        with refused(UnsupportedError, name, "row 0", 0.6487, 0.2738):
            method.fit(smoothed, batch)
        tokens = et.Task(
            model, outputs=lambda m, b: m(b[0])[:, None], output_loss=lambda z, b: z.square().sum(dim=(1, 2))
        )
        with refused(UnsupportedError, name, "(B, classes)", (8, 1, 3)):
            method.fit(tokens, batch)
        fitted = method.fit(et.classification(model), batch)
        with refused(UnsupportedError, name, "pairs"):
            fitted.influence(batch, batch)
        with refused(UnsupportedError, name, "features"):
            fitted.features(batch)

    def test_a_label_that_is_no_class_is_named(self, model, batch, method):
        labels = batch[1].clone()
        labels[15] = 9
        with refused(NumericalError, "row 15", 9, 3):
            method.fit(et.classification(model), (batch[0], labels))

    def test_the_model_is_left_as_found(self, model, batch, method):
        model.train()
        state = torch.get_rng_state()
        method.fit(et.classification(model), batch).self_influence(batch)
        assert model.training
        assert all(p.grad is None for p in model.parameters())
        assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("settings", "mentions"),
    table(
        {
            "keep": ({"keep": 0}, ("keep", 1, 0)),
            "outputs": ({"outputs": 0}, ("outputs", 1, 0)),
            "negative": ({"ridge": -1.0}, ("ridge", 0, -1.0)),
            "zero": ({"ridge": 0.0}, ("ridge", "'auto'", 0.0)),
        }
    ),
)
def test_wrong_settings(settings, mentions):
    with refused(InputError, *mentions):
        et.TangentRidge(**settings)
