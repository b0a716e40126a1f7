"""Losses that depend on the other examples of a batch are refused, whether in the first batch or in a late one."""

import pytest
import torch
from torch import nn

import eigentrace as et
from eigentrace.errors import NumericalError, PrecisionWarning, TaskError
from tests.helpers.expecting import refused, warned

CLASSES = 50
WIDTH = 6


def losses_of(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def by_class_count(model, batch):
    return losses_of(model, batch) / torch.bincount(batch[1], minlength=CLASSES)[batch[1]]


def pull_of_the_same_class(model, batch):
    outputs = model(batch[0])
    same = (batch[1][:, None] == batch[1][None]).to(outputs.dtype)
    centres = same @ outputs / same.sum(1, keepdim=True)
    return nn.functional.cross_entropy(outputs, batch[1], reduction="none") + (outputs - centres).square().sum(1)


def in_batch_negatives(model, batch):
    outputs = model(batch[0])
    return nn.functional.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)), reduction="none")


def statistics_of_large_batches(model, batch):
    x = batch[0]
    return losses_of(model, (x if len(x) <= 8 else x - x.mean(0), batch[1]))


def statistics_in_the_gradient_only(model, batch):
    outputs = model(batch[0])
    others = outputs.mean(0)
    return nn.functional.cross_entropy(outputs + others - others.detach(), batch[1], reduction="none")


def cumulative(model, batch):
    return losses_of(model, batch).cumsum(0)


class Experts(nn.Module):
    """As in Switch or GShard: each of two experts takes so many examples of a batch, the others pass through."""

    def __init__(self, capacity):
        super().__init__()
        self.gate, self.last = nn.Linear(WIDTH, 2), nn.Linear(WIDTH, CLASSES)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.capacity = capacity

    def forward(self, x):
        gates = torch.softmax(self.gate(x), 1)
        chosen = nn.functional.one_hot(gates.argmax(1), 2)
        taken = (chosen * (chosen.cumsum(0) <= self.capacity)).to(x.dtype) * gates
        return self.last(x + sum(taken[:, [i]] * torch.tanh(e(x)) for i, e in enumerate(self.experts)))


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, CLASSES))


def data(size=256, batch_size=64, classes=CLASSES):
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(size, WIDTH, generator=generator), torch.randint(classes, (size,), generator=generator)
    return et.Data(torch.utils.data.TensorDataset(x, y), batch_size=batch_size)


LOSSES = [
    by_class_count, pull_of_the_same_class, in_batch_negatives, statistics_of_large_batches,
    statistics_in_the_gradient_only, cumulative,
]  # fmt: skip


@pytest.mark.parametrize("loss", LOSSES)
def test_losses_that_mix_examples_are_refused(loss):
    with refused(TaskError, "row", "rows"):
        et.TracIn().fit(et.Task(network(), loss), data())


def test_experts_with_capacity_are_refused():
    with refused(TaskError, "row"):
        et.TracIn().fit(et.classification(Experts(10)), data())
    et.TracIn().fit(et.classification(Experts(1000)), data())


def test_losses_that_do_not_mix_pass():
    scores = et.TracIn().fit(et.Task(network(), losses_of), data()).self_influence(data())
    # What passes is scored as in batches of one.
    alone = data(batch_size=1)
    assert torch.allclose(
        scores, et.TracIn().fit(et.Task(network(), losses_of), alone).self_influence(alone), rtol=1e-4
    )


class LateMixture:
    """A loss that mixes examples of one class number only, which the data has from some row on."""

    def __call__(self, model, batch):
        losses = losses_of(model, batch)
        late = batch[1] == 0
        return torch.where(late & (late.sum() > 1), losses / late.sum().clamp_min(1), losses)


@pytest.mark.parametrize("engine", ["layerwise", "reverse", "forward"])
def test_a_mixture_in_later_batches_stops_with_the_batch_named(engine):
    x, y = _late_data()
    late = et.Data(torch.utils.data.TensorDataset(x, y), batch_size=32)
    early = late.take(range(128))
    fitted = et.RandProj(keep=3).fit(et.Task(network(), LateMixture()), early)
    fitted.features(early, compute=et.Compute(engine=engine, batch="data"))
    # Batches 1, 2, 4, 8 and 16 are checked: the 8th holds rows 224 to 255.
    with refused(TaskError, 224, 255):
        fitted.features(late, compute=et.Compute(engine=engine, batch="data"))


class LateGradients:
    """A loss as of single examples, whose gradients mix examples of one class number, which later rows have."""

    def __call__(self, model, batch):
        outputs = model(batch[0])
        late = (batch[1] == 0).to(outputs.dtype)[:, None]
        others = (late * outputs).sum(0) / late.sum().clamp_min(1)
        return nn.functional.cross_entropy(outputs + late * (others - others.detach()), batch[1], reduction="none")


@pytest.mark.parametrize(
    ("engine", "error", "named"), [("reverse", TaskError, (224, 255)), ("layerwise", NumericalError, ("batch 8",))]
)
def test_gradients_mixed_in_later_batches_stop_with_the_batch_named(engine, error, named):
    x, y = _late_data()
    late = et.Data(torch.utils.data.TensorDataset(x, y), batch_size=32)
    fitted = et.RandProj(keep=3).fit(et.Task(network(), LateGradients()), late.take(range(128)))
    with refused(error, *named):
        fitted.features(late, compute=et.Compute(engine=engine, batch="data"))


def test_gradients_of_the_curvature_sample_are_checked_too():
    x, y = _late_data()
    late = et.Data(torch.utils.data.TensorDataset(x, y), batch_size=32)
    with refused(TaskError, "gradient", "row"):
        et.Arnoldi(steps=3, keep=2, sample=None, curvature="hessian").fit(et.Task(network(), LateGradients()), late)


@pytest.mark.parametrize("scale", [1.0, 8.0, 64.0, 256.0])
@pytest.mark.filterwarnings("ignore::eigentrace.errors.PrecisionWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_a_saturated_loss_are_not_taken_for_mixed(scale, dtype):
    model = network()
    with torch.no_grad():
        model[-1].weight *= scale
    x, _ = _late_data()
    labels = model(x).argmax(1)
    examples = et.Data(torch.utils.data.TensorDataset(x.to(dtype), labels), batch_size=37)
    fitted = et.RandProj(keep=3).fit(et.classification(model.to(dtype)), examples)
    scores = fitted.self_influence(examples, compute=et.Compute(engine="reverse", batch="data"))
    assert scores.isfinite().all()


def _late_data():
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(512, WIDTH, generator=generator), torch.randint(1, CLASSES, (512,), generator=generator)
    y[200:] = 0
    return x, y


@pytest.mark.parametrize("method", [et.Loss(), et.MeanLoss([network().state_dict()])])
def test_scores_that_are_losses_are_checked_too(method):
    x, y = _late_data()
    late = et.Data(torch.utils.data.TensorDataset(x, y), batch_size=32)
    fitted = method.fit(et.Task(network(), LateMixture()), late.take(range(128)))
    with refused(TaskError, 224, 255):
        fitted.self_influence(late)


def test_the_curvature_sample_is_checked_too():
    x, y = _late_data()
    late = et.Data(torch.utils.data.TensorDataset(x, y), batch_size=32)
    with refused(TaskError, "row"):
        et.Arnoldi(steps=3, keep=2, sample=None).fit(et.Task(network(), LateMixture()), late)


class Mean(nn.Module):
    """Averages over all positions, padding included."""

    def __init__(self, masked):
        super().__init__()
        self.table, self.last, self.masked = nn.Embedding(9, 4), nn.Linear(4, 2), masked

    def forward(self, tokens):
        found = self.table(tokens)
        if not self.masked:
            return self.last(found.mean(1))
        there = (tokens > 0).unsqueeze(2)
        return self.last((found * there).sum(1) / there.sum(1))


def padded(examples):
    width = max(len(tokens) for tokens, _ in examples)
    rows = [torch.cat([tokens, tokens.new_zeros(width - len(tokens))]) for tokens, _ in examples]
    return torch.stack(rows), torch.tensor([label for _, label in examples])


def test_models_that_depend_on_padding_are_warned_about():
    examples = [(torch.arange(1, 3 + row % 5), row % 2) for row in range(20)]
    ragged = et.Data(examples, padded, batch_size=10)
    with warned(PrecisionWarning, "row", "padding"):
        et.TracIn().fit(et.classification(Mean(False)), ragged)
    et.TracIn().fit(et.classification(Mean(True)), ragged)
    et.TracIn().fit(et.classification(Mean(False)), et.Data(examples[:1] * 8, padded, batch_size=4))


def left_padded(examples):
    width = max(map(len, examples))
    tokens, there = torch.zeros(2, len(examples), width, dtype=torch.long)
    for row, example in enumerate(examples):
        tokens[row, width - len(example) :], there[row, width - len(example) :] = example, 1
    return {"input_ids": tokens, "attention_mask": there, "labels": tokens.masked_fill(there == 0, -100)}


def test_padding_is_looked_for_beyond_first_examples_of_one_length():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 30, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 12}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).eval()
    examples = [torch.randint(1, 30, (length,)) for length in [9] * 24 + [4, 6, 3, 9, 5, 7, 8, 2] * 3]
    with warned(PrecisionWarning, "row", "padding"):
        et.TracIn().fit(et.causal_lm(model), et.Data(examples, left_padded, batch_size=8))
