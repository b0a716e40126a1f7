"""The ready tasks against losses written out by hand, over the forms that batches and outputs come in."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import eigentrace as et
from eigentrace.errors import TaskError
from tests.helpers.expecting import refused
from tests.helpers.small import examples, fit, net

ONE = {"input_ids": torch.arange(5), "labels": torch.arange(5)}


class Wrapped(nn.Module):
    """Returns the logits of `net` in a form of one's choice, from inputs under a name."""

    def __init__(self, wrap):
        super().__init__()
        self.net, self.wrap = net(), wrap

    def forward(self, x):
        return self.wrap(self.net(x))


class Seq2Seq(nn.Module):
    """Copies a shifted target through one layer, and knows how to shift, as Hugging Face models do."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 3), nn.Linear(3, 5)
        self.config = SimpleNamespace(use_cache=True)
        self.calls = []

    def prepare_decoder_input_ids_from_labels(self, labels):
        return torch.cat([torch.zeros_like(labels[:, :1]), labels[:, :-1].clamp_min(0)], dim=1)

    def forward(self, decoder_input_ids, input_ids, use_cache=None):
        return SimpleNamespace(logits=self.head(self.embed(decoder_input_ids) + self.embed(input_ids)), cache=use_cache)


class Causal(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 3), nn.Linear(3, 5)

    def forward(self, input_ids):
        return (self.head(self.embed(input_ids)), "past")


def losses(task, batch):
    with task.session():
        return task.losses(task.params, batch)


def by_hand(logits, labels, reduction="sum"):
    """One loss per example: a loop over examples and tokens."""
    found = []
    for i in range(len(labels)):
        valid = [t for t in range(labels.shape[1]) if labels[i, t] != -100]
        values = [-logits[i, t].log_softmax(0)[labels[i, t]] for t in valid]
        found.append(sum(values) / (max(len(valid), 1) if reduction == "mean" else 1) if values else torch.tensor(0.0))
    return torch.stack(found)


X, Y = examples()
BATCHES = {
    "tuple": (X, Y),
    "list": [X, Y],
    "dict": {"x": X, "labels": Y},
    "dict of inputs": ({"x": X}, Y),
    "tuple of inputs": ((X,), Y),
    "int32 labels": (X, Y.int()),
}
OUTPUTS = {
    "tensor": lambda logits: logits,
    "object": lambda logits: SimpleNamespace(logits=logits),
    "dict": lambda logits: {"logits": logits},
    "tuple": lambda logits: (logits, "hidden"),
}


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("output", OUTPUTS)
def test_classification(batch, output):
    expected = F.cross_entropy(net()(X), Y, reduction="none")
    found = losses(et.classification(Wrapped(OUTPUTS[output])), BATCHES[batch])
    torch.testing.assert_close(found, expected)


def tokens(**others):
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 5, (6, 4), generator=generator)
    labels[1, 2:] = labels[2, 0] = -100
    labels[3] = -100  # an example without a single valid token
    return {"input_ids": torch.randint(0, 5, (6, 4), generator=generator), "labels": labels} | others


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_causal_lm_predicts_the_next_token(reduction):
    model, batch = Causal(), tokens()
    found = losses(et.causal_lm(model, reduction=reduction), batch)
    expected = by_hand(model(batch["input_ids"])[0][:, :-1], batch["labels"][:, 1:], reduction)
    torch.testing.assert_close(found, expected)
    assert found[3] == 0


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_seq2seq_shifts_the_labels(reduction):
    model, batch = Seq2Seq(), tokens()
    shifted = model.prepare_decoder_input_ids_from_labels(batch["labels"])
    logits = model(shifted, batch["input_ids"]).logits
    found = losses(et.seq2seq(model, reduction=reduction), batch)
    torch.testing.assert_close(found, by_hand(logits, batch["labels"], reduction))
    given = losses(et.seq2seq(model, reduction=reduction), batch | {"decoder_input_ids": shifted})
    assert torch.equal(given, found)


def test_caches_are_switched_off():
    seen = []
    model = Seq2Seq()
    model.register_forward_hook(lambda module, args, output: seen.append(output.cache))
    losses(et.seq2seq(model), tokens())
    assert seen == [False]


def test_token_tasks_score(cases):
    for task in (et.causal_lm(Causal(), l2=0.1), et.seq2seq(Seq2Seq(), l2=0.1)):
        fitted = fit(task, [tokens()], et.Arnoldi(steps=20, keep=3))
        scores = fitted.self_influence([tokens()])
        assert scores.isfinite().all()
        assert scores[3] == 0


def test_an_example_that_is_not_valid_has_a_loss_of_its_own_only():
    # A wrong label must not reach the losses of its neighbours.
    wrong = tokens()
    wrong["labels"][5, 1] = 17
    model = Causal()
    found, clean = losses(et.causal_lm(model), wrong), losses(et.causal_lm(model), tokens())
    assert found[5].isnan()
    assert torch.equal(found[:5], clean[:5])


def test_a_single_logit_is_refused():
    task = et.classification(nn.Linear(3, 1))
    with refused(TaskError, "classification", "binary_cross_entropy_with_logits"):
        et.Loss().fit(task, [(torch.randn(4, 3), torch.zeros(4, dtype=torch.long))])


@pytest.mark.parametrize("data", [ONE, [ONE, ONE]])
@pytest.mark.parametrize("make", [et.causal_lm, et.seq2seq])
def test_one_example_without_a_first_dimension_is_refused(make, data):
    model = Seq2Seq() if make is et.seq2seq else Causal()
    for method in (et.TracIn(), et.Arnoldi(steps=4, keep=2)):
        with refused(TaskError, "(B, T)", "torch.int64 (5,)", "(1, T)", "Data(examples)"):
            method.fit(make(model), data)
    batch = {name: tensor[None] for name, tensor in ONE.items()}
    fitted = et.TracIn().fit(make(model), batch)
    assert torch.equal(fitted.self_influence(batch), fitted.self_influence(et.Data([ONE])))
    with refused(TaskError, "torch.int64 (1,)", "(1, T)"):
        fitted.influence(batch, data)
