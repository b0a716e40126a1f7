"""A batch with wrong inputs, labels or tokens must be refused, mentioning the row, the value or the shape."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import eigentrace as et
from eigentrace.errors import InputError, NumericalError, TaskError, UnsupportedError
from tests.helpers.expecting import expect_mentions, refused
from tests.helpers.small import CHEAP, cross_entropy, examples, fit, net, table


def test_nan_loss_in_the_first_batch_names_the_row():
    x, y = examples()
    x[5] = torch.nan
    with refused(NumericalError, "1 example", "row 5"):
        fit(data=(x, y))


@pytest.mark.parametrize("batch_size", [4, 64])
def test_nan_loss_beyond_the_probe_names_the_row_before_the_curvature_is_multiplied(batch_size):
    x, y = examples(30)
    x[[21, 23]] = torch.inf
    data = et.Data(TensorDataset(x, y), batch_size=batch_size)
    with refused(NumericalError, "2 examples", "row 21"):
        fit(data=data, method=et.Arnoldi(steps=4, keep=2))


@pytest.mark.parametrize("method", [CHEAP, et.TracIn(), et.Lissa(depth=2, damping=0.1)], ids=["rows", "norms", "solve"])
def test_nan_loss_at_scoring_names_the_row(method):
    fitted = fit(method=method)
    x, y = examples(20)
    x[17] = torch.nan
    data = et.Data(TensorDataset(x, y), batch_size=6)
    with refused(NumericalError, "1 example", "row 17"):
        fitted.self_influence(data)
    with refused(NumericalError, "row 17"):
        fitted.influence(examples(), data)


class Tokens(nn.Module):
    """A decoder of one layer: (B, T) -> (B, T, 5)."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 2), nn.Linear(2, 5)

    def forward(self, input_ids):
        return self.head(self.embed(input_ids))


def labels(y):
    return examples(8)[0], y


def tokens(T=4, **others):
    return {"input_ids": torch.ones(8, T, dtype=torch.long)} | others


CLASSIFIED = {
    "too large": (
        labels(torch.tensor([0, 1, 2, 0, 3, 1, 1, 1])),
        NumericalError,
        ("1 example", "row 4"),
    ),
    "negative": (
        labels(torch.tensor([0, -1, 2, 0, -9, 1, 1, 1])),
        NumericalError,
        ("2 examples", "row 1"),
    ),
    "floats": (labels(torch.zeros(8)), TaskError, ("(8,)", "torch.float32 (8,)")),
    "columns": (labels(torch.zeros(8, 1, dtype=torch.long)), TaskError, ("(8,)", "torch.int64 (8, 1)")),
    "list": (labels([0] * 8), TaskError, ("(8,)", "list")),
    "three items": ((*examples(8), torch.ones(8)), TaskError, ("(inputs, labels)", "tuple of 3 items")),
    "no labels": ({"input": torch.zeros(8, 3)}, TaskError, ("'labels'", "['input']")),
    "images": (
        (torch.zeros(8, 2, 3), torch.zeros(8, dtype=torch.long)),
        TaskError,
        ("(B, classes)", "(8, 2, 3)"),
    ),
}


@pytest.mark.parametrize(("batch", "error", "mentions"), table(CLASSIFIED))
def test_classification_batch_is_refused(batch, error, mentions):
    with refused(error, *mentions):
        fit(data=[batch])


@pytest.mark.parametrize("label", [3, -1, -100])
@pytest.mark.parametrize("method", [CHEAP, et.TracIn(), et.Lissa(depth=2, damping=0.1), et.Loss()], ids=str)
def test_a_label_that_is_no_class_is_named(method, label):
    x, y = examples(8)
    y[4] = label
    mentions = ("row 4", f"label is {label}", "3 classes", "0 to 2")
    with refused(NumericalError, *mentions):
        fit(data=(x, y), method=method)
    fitted = fit(method=method)
    with refused(NumericalError, *mentions):
        fitted.self_influence((x, y))
    if not isinstance(method, et.Loss):
        with refused(NumericalError, *mentions):
            fitted.influence(examples(), (x, y))


def test_a_label_that_is_no_class_is_named_beyond_the_first_examples(tmp_path):
    x, y = examples(30)
    y[21] = 7
    data, mentions = et.Data(TensorDataset(x, y), batch_size=8), ("row 21", 7, "3 classes")
    with refused(NumericalError, *mentions):
        fit(data=data, method=et.Arnoldi(steps=4, keep=2))
    with refused(NumericalError, *mentions):
        et.score(fit(), data, tmp_path / "run")
    with refused(NumericalError, *mentions):
        et.TangentRidge().fit(et.classification(net()), data)


SEQUENCES = {
    "no shift": (
        et.seq2seq,
        tokens(labels=torch.ones(8, 4, dtype=torch.long)),
        ("Tokens", "'decoder_input_ids'"),
    ),
    "misaligned": (et.causal_lm, tokens(labels=torch.ones(8, 3, dtype=torch.long)), ("(8, 3, 5)", "(8, 2)")),
    "one label": (et.causal_lm, tokens(labels=torch.ones(8, dtype=torch.long)), ("(B, T)", "torch.int64 (8,)")),
    "float labels": (et.causal_lm, tokens(labels=torch.ones(8, 4)), ("(B, T)", "torch.float32 (8, 4)")),
    "no labels": (et.causal_lm, tokens(), ("causal_lm", "'labels'", "['input_ids']")),
    "tuples": (et.causal_lm, examples(8), ("causal_lm", "'labels'", "tuple")),
    "no tokens": (et.causal_lm, tokens(0, labels=torch.ones(8, 0, dtype=torch.long)), ("'labels'", "(8, 0)")),
    "lists of tokens": (
        et.classification,
        et.Data([{"input_ids": [1, 2, 3, 4, 0], "labels": 1}] * 8),
        ("'input_ids'", "(B, T)", "list of 5", "set_format('torch')"),
    ),
    "lists of labels": (
        et.causal_lm,
        et.Data([{"input_ids": [1, 2, 3, 4, 0], "labels": [1, 2, 3, 4, 0]}] * 8),
        ("'labels'", "(B, T)", "list of 5", "eigentrace.Data(dataset, collate=...)"),
    ),
    "no inputs": (et.classification, tokens(0, labels=torch.ones(8, dtype=torch.long)), ("'input_ids'", "(8, 0)")),
}


@pytest.mark.parametrize(("make", "batch", "mentions"), table(SEQUENCES))
def test_sequence_batch_is_refused(make, batch, mentions):
    with refused(TaskError, *mentions):
        fit(make(Tokens()), batch if isinstance(batch, et.Data) else [batch])


def test_causal_lm_label_out_of_range_names_the_row():
    wrong = torch.ones(8, 4, dtype=torch.long)
    wrong[6, 2] = 5
    with refused(NumericalError, "row 6"):
        fit(et.causal_lm(Tokens()), tokens(labels=wrong))


@pytest.mark.parametrize("wrong", [5, -1], ids=["beyond", "negative"])
def test_a_token_outside_the_vocabulary_is_named_with_the_table_and_its_size(wrong):
    good = tokens(labels=torch.ones(8, 4, dtype=torch.long))
    bad = {name: value.clone() for name, value in good.items()}
    bad["input_ids"][6, 2] = wrong
    mentions = ("'embed'", "Tokens", f"entry {wrong}", "[6, 2]", "(8, 4)", "0 to 4")
    task = et.causal_lm(Tokens())
    with refused(InputError, *mentions):
        fit(task, [bad])
    fitted = fit(task, [good])
    for engine in ("auto", "forward"):
        with refused(InputError, *mentions):
            fitted.self_influence([bad], compute=et.Compute(engine=engine))
    with refused(InputError, "'embed'", "Tokens", "0 to 4"):  # one by one, the numbers may be out of sight
        fitted.self_influence([bad], compute=et.Compute(engine="reverse"))


def test_a_text_beyond_the_models_positions_mentions_both_lengths():
    class Short(Tokens):
        """Adds positions as BERT does, from a table that is cut to the length of the text."""

        def __init__(self):
            super().__init__()
            self.config, self.places = SimpleNamespace(max_position_embeddings=3), nn.Parameter(torch.zeros(3, 2))

        def forward(self, input_ids):
            return self.head(self.embed(input_ids) + self.places[: input_ids.shape[1]])

    with pytest.raises(RuntimeError) as caught:
        fit(et.causal_lm(Short()), [tokens(labels=torch.ones(8, 4, dtype=torch.long))])
    expect_mentions(caught.value.__notes__[0], ["4 tokens", "3 positions", "max_length=3"])


def test_labels_that_are_all_ignored_are_named_among_the_causes():
    with refused(NumericalError, "labels", -100):
        et.Arnoldi(steps=4, keep=2).fit(et.causal_lm(Tokens()), tokens(labels=torch.full((8, 4), -100)))


def by_name(model, batch):
    return cross_entropy(model, (batch["x"], batch["y"]))


X, Y = (t[:3] for t in examples())
ASKED = {
    "no label": ([{"x": X}], KeyError, "{'x': float32 (3, 3)}"),
    "a tuple": ([(X, Y)], TypeError, "tuple(float32 (3, 3), int64 (3,))"),
    "bare tensors": (et.Data(list(X)), (IndexError, TypeError), "float32 (3, 3)"),
    "other widths": ([{"x": X[:, :2], "y": Y}], UnsupportedError, "{'x': float32 (3, 2), 'y': int64 (3,)}"),
}


@pytest.mark.parametrize("method", [CHEAP, et.TracIn(), et.TracIn([net(1).state_dict()])], ids=["rows", "norms", "at"])
@pytest.mark.parametrize(("queries", "error", "batch"), table(ASKED))
def test_queries_of_another_form_are_named_beside_that_of_the_fit(method, queries, error, batch, tmp_path):
    x, y = examples()
    train = [{"x": x, "y": y}]
    fitted = method.fit(et.Task(net(), by_name), train)
    fitted.save(tmp_path / "fit")
    run = et.score(fitted, train, tmp_path / "run")
    for ask in (
        lambda: fitted.influence(train, queries),
        lambda: fitted.self_influence(queries),
        lambda: et.load(tmp_path / "fit", et.Task(net(), by_name)).influence(train, queries),
        lambda: run.explain(queries),
    ):
        with pytest.raises(error) as caught:
            ask()
        (note,) = caught.value.__notes__
        expect_mentions(note, [f"batch {batch}", "{'x': float32 (8, 3), 'y': int64 (8,)}"])


def test_a_loss_fit_asked_about_another_form_mentions_both():
    x, y = examples()
    fitted = et.Loss().fit(et.Task(net(), by_name), [{"x": x, "y": y}])
    with pytest.raises(KeyError) as caught:
        fitted.self_influence([{"x": x}])
    expect_mentions(caught.value.__notes__[0], ["{'x': float32 (12, 3)}", "{'x': float32 (8, 3), 'y': int64 (8,)}"])
