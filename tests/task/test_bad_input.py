"""Bad input must stop with a message that says what arrived, what was expected and what to do: one case per mistake."""

import itertools
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
)

import eigentrace as et
from eigentrace.errors import (
    DataError,
    DeterminismError,
    InputError,
    NumericalError,
    PrecisionWarning,
    TaskError,
    UnsupportedError,
)
from eigentrace.task import parameters as selection
from tests.helpers.small import CHEAP, cross_entropy, examples, fit, net, table

# --- the loss ---------------------------------------------------------------------------------------------------------


def detached(model, batch):
    with torch.no_grad():
        return cross_entropy(model, batch)


def sqrt_at_zero(model, batch):
    # √((w·0)²) is 0, and its derivative is 0/0.
    return (model(batch[0]).sum(1) * 0).square().sqrt() + cross_entropy(model, batch)


def in_place(model, batch):
    h = model(batch[0]).exp()
    total = h.square().sum(1)
    h.add_(1)  # the square needs the h of before
    return total


LOSSES = {
    "scalar": (lambda m, b: F.cross_entropy(m(b[0]), b[1]), TaskError, r"but returned shape \(\)\..*reduction='none'"),
    "column": (lambda m, b: cross_entropy(m, b)[:, None], TaskError, r"shape \(B,\), but returned shape \(8, 1\)"),
    "too few": (lambda m, b: cross_entropy(m, b)[:3], TaskError, "returned 3 numbers for a batch of 8 examples"),
    "per class": (lambda m, b: m(b[0]).flatten(), TaskError, "returned 24 numbers for a batch of 8 examples"),
    "a number": (lambda m, b: 1.0, TaskError, "must return a tensor with one number per example, got float"),
    "a list": (lambda m, b: list(cross_entropy(m, b)), TaskError, "one number per example, got list"),
    "integers": (lambda m, b: m(b[0]).argmax(1), TaskError, r"floating-point numbers, got torch\.int64"),
    "dropout": (
        lambda m, b: cross_entropy(m, (F.dropout(b[0], training=True), b[1])),
        DeterminismError,
        "twice differs by .* in eval mode.*dropout called as a function",
    ),
    "noise": (lambda m, b: cross_entropy(m, b) + torch.rand(len(b[1])), DeterminismError, "random masking, or noise"),
    "detached": (lambda m, b: cross_entropy(m, b).detach(), TaskError, r"gradient .* exactly zero.*\.detach\(\)"),
    "no_grad": (detached, TaskError, "gradient .* exactly zero.*no_grad"),
    "infinite gradient": (
        sqrt_at_zero,
        NumericalError,
        r"loss is finite but its gradient is not, first in '0\.weight'",
    ),
    "in place": (in_place, TaskError, "cannot be differentiated: .*inplace operation.* write it out of place"),
    "batch mean": (
        lambda m, b: cross_entropy(m, b) / len(b[1]),
        TaskError,
        "changes by .* when it is alone in its batch.*division by the batch's size",
    ),
    "batch statistics": (
        lambda m, b: cross_entropy(m, (b[0] - b[0].mean(0), b[1])),
        TaskError,
        "alone in its batch.*batch statistics",
    ),
    "other examples": (
        lambda m, b: cross_entropy(m, (b[0] + b[0].roll(1, 0), b[1])),
        TaskError,
        "alone in its batch.*other examples",
    ),
}


@pytest.mark.parametrize(("loss", "error", "match"), table(LOSSES))
def test_loss_is_refused(loss, error, match):
    with pytest.raises(error, match=match):
        fit(et.Task(net(), loss))


def test_a_norm_that_needs_several_examples_is_refused_like_other_batch_statistics():
    norm = nn.BatchNorm1d(4, track_running_stats=False)
    x, y = examples()
    model = nn.Sequential(nn.Linear(x.shape[1], 4), norm, nn.Linear(4, int(y.max()) + 1))
    with pytest.raises(TaskError, match=r"alone in its batch fails \(Expected more than 1 value.*batch statistics"):
        fit(et.classification(model), (x, y))


class Pair:
    """A batch that nobody but its loss can look into."""

    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.y)


def joined(graphs):
    """Put graphs into one, with the number of its graph for each node, as graph libraries do."""
    owner = torch.arange(len(graphs)).repeat_interleave(torch.tensor([len(x) for x, _ in graphs]))
    return torch.cat([x for x, _ in graphs]), owner, torch.tensor([y for _, y in graphs])


def of_graphs(model, batch):
    nodes, owner, y = batch
    sums = torch.zeros(len(y), 3, dtype=nodes.dtype).index_add(0, owner, model(nodes))
    return F.cross_entropy(sums, y, reduction="none")


WHOLE = {  # how one example goes into a batch, the loss of a batch, and what is said to stay whole
    "graphs": (joined, of_graphs, r"fails .* whole of a tensor of shape \(20, 3\) and 1 more"),
    "list of tensors": (
        lambda some: ([x for x, _ in some], torch.tensor([y for _, y in some])),
        lambda m, b: F.cross_entropy(torch.stack([m(x).sum(0) for x in b[0]]), b[1], reduction="none"),
        r"fails .* whole of a tensor of shape \(2, 3\) and 7 more",
    ),
    "object": (
        lambda some: Pair(torch.stack([x[0] for x, _ in some]), torch.tensor([y for _, y in some])),
        lambda m, b: F.cross_entropy(m(b.x), b.y, reduction="none"),
        "has 8 numbers, .* whole of an object of type Pair",
    ),
    "time first": (
        lambda some: (torch.stack([x[:2] for x, _ in some], dim=1), torch.tensor([y for _, y in some])),
        lambda m, b: (m(b[0]).sum((0, 2)) - b[1]).square(),
        r"has 8 numbers, .* whole of a tensor of shape \(2, 8, 3\)",
    ),
}


@pytest.mark.parametrize(("collate", "loss", "match"), table(WHOLE))
def test_batches_that_cannot_be_taken_apart_are_named_and_single_examples_are_right(collate, loss, match):
    x, y = examples(24)
    graphs = [(x[i : i + 2 + i % 2], int(y[i])) for i in range(12)]
    model = net()
    with pytest.raises(TaskError, match=f"alone in its batch {match}.*batch_size=1"):
        fit(et.Task(model, loss), et.Data(graphs, collate))
    single = et.Data(graphs, collate, batch_size=1)
    found = et.TracIn().fit(et.Task(model, loss), single)
    scores, pairs = found.self_influence(single), found.influence(single, single)
    assert torch.allclose(pairs.diagonal(), scores, rtol=1e-4)
    for graph, score in zip(graphs, scores, strict=True):
        own = torch.autograd.grad(loss(model, collate([graph])).sum(), list(model.parameters()))
        assert float(sum(g.square().sum() for g in own)) == pytest.approx(float(score), rel=1e-4)


def test_a_list_of_single_examples_is_named_among_the_causes():
    x, _ = examples()
    with pytest.raises(TaskError, match=r"alone in its batch fails .*list of single examples as Data\(examples\)"):
        fit(et.Task(nn.Linear(3, 3), lambda m, b: (m(b[0]) - b[1]).square()), [(row, row) for row in x])


def test_independence_is_judged_on_an_example_with_loss():
    # The first example is fitted so well that dividing its loss by anything changes nothing.
    def loss(model, batch):
        losses = model(batch[0]).square().sum(1) * (batch[1] > 0)
        return losses / len(losses)

    x, _ = examples()
    with pytest.raises(TaskError, match="alone in its batch"):
        fit(et.Task(net(), loss), (x, torch.tensor([0, 1] * 6)))


def test_nan_loss_in_the_first_batch_names_the_row():
    x, y = examples()
    x[5] = torch.nan
    with pytest.raises(NumericalError, match=r"not finite for 1 examples .*\(first: row 5\).*Check the inputs"):
        fit(data=(x, y))


@pytest.mark.parametrize("batch_size", [4, 64])
def test_nan_loss_beyond_the_probe_names_the_row_before_the_curvature_is_multiplied(batch_size):
    x, y = examples(30)
    x[[21, 23]] = torch.inf
    data = et.Data(TensorDataset(x, y), batch_size=batch_size)
    with pytest.raises(NumericalError, match=r"not finite for \d examples .*\(first: row 21\)"):
        fit(data=data, method=et.Arnoldi(steps=4, keep=2))


@pytest.mark.parametrize("method", [CHEAP, et.TracIn(), et.Lissa(depth=2, damping=0.1)], ids=["rows", "norms", "solve"])
def test_nan_loss_at_scoring_names_the_row(method):
    fitted = fit(method=method)
    x, y = examples(20)
    x[17] = torch.nan
    data = et.Data(TensorDataset(x, y), batch_size=6)
    with pytest.raises(NumericalError, match=r"The loss is not finite for 1 examples of a batch \(first: row 17\)"):
        fitted.self_influence(data)
    with pytest.raises(NumericalError, match="first: row 17"):
        fitted.influence(examples(), data)


def test_other_number_of_losses_in_a_later_batch():
    def loss(model, batch):
        losses = cross_entropy(model, batch)
        return losses if len(losses) == 8 else losses[:1]

    task = et.Task(net(), loss)
    batches = [tuple(t[i : i + 8] for t in examples(24)) for i in (0, 8)] + [examples(5)]
    with pytest.raises(TaskError, match="returned 17 numbers for 21 examples"):
        fit(task, batches, et.Arnoldi(steps=3, keep=1, sample=None))


class Writes(nn.Module):
    """Counts its calls, as a running statistic would, in one of three ways."""

    def __init__(self, how):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 3))
        self.register_buffer("count", torch.zeros(()))
        self.how = how

    def forward(self, x):
        if self.how == "buffer in place":
            self.count += 1
        if self.how == "buffer bound anew":
            self.count = self.count + 1
        if self.how == "parameter":
            self.weight.data.add_(1)
        return x @ self.weight


@pytest.mark.parametrize(
    ("how", "name"), [("buffer in place", "count"), ("buffer bound anew", "count"), ("parameter", "weight")]
)
def test_model_that_writes_to_itself_is_refused_and_put_back(how, name):
    model = Writes(how)
    buffer = model.count
    with pytest.raises(
        TaskError, match=f"Evaluating the loss changes '{name}', even in eval mode. The change was undone"
    ):
        fit(et.classification(model))
    assert model.count is buffer
    assert model.count == 0
    assert torch.equal(model.weight, torch.ones(3, 3))


def test_model_that_writes_is_put_back_when_its_loss_is_wrong_too():
    model = Writes("buffer in place")
    with pytest.raises(TaskError, match="one number per example"):
        fit(et.Task(model, lambda m, b: m(b[0]).sum()))
    assert model.count == 0


def test_dropout_modules_are_fine():
    assert fit(et.classification(nn.Sequential(nn.Dropout(0.9), net()))).self_influence(examples()).isfinite().all()


def test_embedding_that_rescales_its_own_rows_is_refused():
    model, tokens = nn.Embedding(5, 3, max_norm=0.1), (torch.arange(6) % 5, torch.arange(6) % 3)
    before = model.weight.detach().clone()
    with pytest.raises(TaskError, match="changes 'weight', even in eval mode"):
        fit(et.classification(model), tokens)
    assert torch.equal(model.weight, before)


class SparseFunction(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 3))

    def forward(self, tokens):
        return F.embedding(tokens, self.weight, sparse=True)


def test_sparse_embeddings():
    tokens = (torch.arange(6) % 5, torch.arange(6) % 3)
    assert fit(et.classification(nn.Embedding(5, 3, sparse=True)), tokens).features(tokens).isfinite().all()
    with pytest.raises(TaskError, match=r"cannot be differentiated: .*[sS]parse.*use sparse=False"):
        fit(et.classification(SparseFunction()), tokens)


def test_inference_mode_is_refused():
    task = et.classification(net())
    with torch.inference_mode(), pytest.raises(UnsupportedError, match=r"inside torch\.inference_mode\(\).*no_grad"):
        fit(task)


# --- the data ---------------------------------------------------------------------------------------------------------


class Augmented(Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, i):
        return torch.randn(3), 0


class Stream(IterableDataset):
    def __iter__(self):
        return iter([(torch.randn(3), 0)])


class Unstable(Sampler):
    def __len__(self):
        return 12

    def __iter__(self):
        return iter(np.random.permutation(12).tolist())


class Endless(Sampler):
    def __len__(self):
        return 12

    def __iter__(self):
        return itertools.repeat(0)


class Shrinking:
    """Batches that are one example shorter on every pass."""

    def __init__(self):
        self.size = 12

    def __len__(self):
        return 1

    def __getitem__(self, i):
        if i:
            raise IndexError
        self.size -= 1
        return examples(self.size)


def dataset():
    return TensorDataset(*examples())


DATA = {
    "empty dataset": (lambda: TensorDataset(torch.zeros(0, 3)), "The data is empty"),
    "empty list": (lambda: [], "list of batches is empty"),
    "empty loader": (lambda: DataLoader(TensorDataset(torch.zeros(0, 3))), "The data is empty"),
    "empty batches": (lambda: [examples(0), examples(0)], "The data is empty"),
    "shuffle": (
        lambda: DataLoader(dataset(), shuffle=True),
        r"shuffles \(its sampler is a RandomSampler\).*shuffle=False",
    ),
    "RandomSampler": (lambda: DataLoader(dataset(), sampler=RandomSampler(dataset())), "sampler is a RandomSampler"),
    "SubsetRandomSampler": (
        lambda: DataLoader(dataset(), sampler=SubsetRandomSampler(range(3))),
        "SubsetRandomSampler",
    ),
    "unstable sampler": (lambda: DataLoader(dataset(), sampler=Unstable()), "sampler is a Unstable"),
    "shuffling batch sampler": (
        lambda: DataLoader(dataset(), batch_sampler=BatchSampler(RandomSampler(dataset()), 4, drop_last=False)),
        "shuffles .*BatchSampler",
    ),
    "some rows, in another order": (
        lambda: DataLoader(dataset(), sampler=[2, 0, 1]),
        r"example 0 is number 2 of the \d+ of its dataset.*Subset\(dataset, indices\).*list\(loader\)",
    ),
    "rows that come twice": (
        lambda: DataLoader(dataset(), sampler=[0, 1, 1, 2]),
        "follows a list, so that its example 2 is number 1 ",
    ),
    "a sampler without end": (lambda: DataLoader(dataset(), sampler=Endless()), "example 1 is number 0 "),
    "names in place of numbers": (
        lambda: DataLoader(dataset(), sampler=[("a", 1), ("b", 2)]),
        "does not name examples by their number",
    ),
    "batches of a dataset in another order": (
        lambda: DataLoader([dataset()[:2], dataset()[2:4]], batch_size=None, sampler=[1, 0]),
        "example 0 is number 1 of the 2 ",
    ),
    "another order, and workers of its own": (
        lambda: DataLoader(dataset(), sampler=[*range(1, len(dataset())), 0], worker_init_fn=int),
        "example 0 is number 1 ",
    ),
    "unstable batch sampler": (
        lambda: DataLoader(dataset(), batch_sampler=BatchSampler(Unstable(), 4, drop_last=False)),
        "shuffles .*BatchSampler",
    ),
    "stream": (Stream, "began with other examples than when it was first read.*no shuffling"),
    "loader of a stream": (lambda: DataLoader(Stream()), "began with other examples than when it was first read"),
    "generator": (lambda: (b for b in [examples()]), "generator has no length or no random access"),
    "int": (lambda: 3, "Expected data, got int"),
    "str": (lambda: "train.csv", "Expected data, got str"),
    "tensor": (lambda: torch.zeros(12, 3), "Expected data, got Tensor"),
    "model": (net, "Expected data, got Sequential"),
    "bare tensors": (
        lambda: list(examples()),
        r"list of 2 bare tensors may be one batch or several. Write `\[batch\]`",
    ),
    "list of examples": (lambda: list(dataset()), r"holds a single number, as one example does.*eigentrace\.Data"),
    "list of dict examples": (
        lambda: [{"x": torch.zeros(3), "labels": 1}],
        "the dict it begins with holds a single number",
    ),
    "one example": (lambda: dataset()[0], r"A tuple is read as one batch.* holds a single number.*Data\(\[example\]\)"),
    "one dict example": (
        lambda: {"x": torch.zeros(3), "labels": torch.tensor(1)},
        r"A dict is read as one batch.* holds a single number.*Data\.from_batches\(\[batch\]\)",
    ),
    "tuple of batches": (lambda: (examples(), examples()), r"read as one batch .*holds no tensor: \(tuple, tuple\)"),
    "tuple of arrays": (lambda: (np.zeros((2, 3)), np.zeros(2)), r"\(ndarray, ndarray\).*arrays as tensors"),
    "batch without tensors": (lambda: [{"x": [1.0]}], "type dict holds no tensor with a leading dimension"),
    "empty dict": (dict, "holds no tensor"),
}


@pytest.mark.parametrize(("make", "match"), table(DATA))
def test_data_is_refused(make, match):
    with pytest.raises(DataError, match=match):
        fit(data=make())


DATA_ARGUMENTS = {
    "too few ids": (lambda: et.Data(dataset(), ids=["a"]), "Got 1 ids for 12 examples"),
    "ids of batches": (lambda: et.Data.from_batches([examples()], ids=range(3)), "Got 3 ids for 12 examples"),
    "batch_size 0": (
        lambda: et.Data(dataset(), batch_size=0),
        "batch_size must be a whole number of at least 1, got 0",
    ),
    "batch_size None": (lambda: et.Data(dataset(), batch_size=None), "at least 1, got None"),
    "loader": (lambda: et.Data(DataLoader(dataset())), "takes a dataset and got a DataLoader"),
    "dict": (lambda: et.Data({"x": torch.zeros(3)}), "dict has no length or no random access"),
    "stream": (lambda: et.Data(Stream()), r"Stream has no length or no random access.*Data\.stream\(dataset\)"),
    "generator as a stream": (
        lambda: et.Data.stream(example for example in dataset()),
        "A generator gives its examples once, and they are read several times",
    ),
    "iterator as a stream": (lambda: et.Data.stream(iter(dataset())), "gives its examples once.*begins anew"),
    "loader as a stream": (lambda: et.Data.stream(DataLoader(Stream())), "takes a dataset and got a DataLoader"),
    "int as a stream": (lambda: et.Data.stream(3), "gives examples when it is iterated over, got int"),
    "length 0": (lambda: et.Data.stream(Stream(), length=0), "length must be a whole number of at least 1, got 0"),
    "ids of a stream": (lambda: et.Data.stream(Stream(), length=2, ids=["a"]), "Got 1 ids for 2 examples"),
    "generator of batches": (lambda: et.Data.from_batches(iter([examples()])), r"got list_iterator.*`list\(batches\)`"),
}


@pytest.mark.parametrize(("make", "match"), table(DATA_ARGUMENTS))
def test_data_arguments_are_refused(make, match):
    with pytest.raises(DataError, match=match):
        make()


def test_no_data_is_refused():
    with pytest.raises(DataError, match="Expected data, got NoneType"):
        CHEAP.fit(et.classification(net()), None)


def test_random_augmentation_is_refused():
    with pytest.raises(DeterminismError, match=r"first batch twice gave different numbers.*augments or shuffles"):
        fit(data=Augmented())


@pytest.mark.parametrize(
    ("items", "reason"),
    [([(torch.zeros(3), 0), (torch.zeros(4), 0)], "equal size"), ([(object(), 0)], "found .*object")],
    ids=["ragged", "no tensors"],
)
def test_examples_that_cannot_be_stacked(items, reason):
    with pytest.raises(DataError, match=rf"(?s)tuple cannot be stacked into a batch: .*{reason}.*collate=\.\.\."):
        fit(data=et.Data(items))


def test_loader_that_changes_its_batches():
    loader = DataLoader(Shrinking(), batch_size=None, sampler=[0])
    with pytest.raises(DataError, match="from row 0 on has 10 examples, and had 11 when it was counted"):
        fit(data=loader)


# --- the model and its parameters -------------------------------------------------------------------------------------


class With(nn.Module):
    """A linear model with one more parameter."""

    def __init__(self, extra):
        super().__init__()
        self.extra = nn.Parameter(extra, requires_grad=False)
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        return self.linear(x)


def scripted():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(net())


def task(model=None, params="trainable", **options):
    return et.Task(model or net(), cross_entropy, params, **options)


TASKS = {
    "no match": (lambda: task(params="head.*"), r"params='head\.\*' matches none of the 4 parameters"),
    "one unmatched": (lambda: task(params=["0.*", "no.*"]), r"patterns \['no\.\*'\] match no parameter"),
    "empty list": (lambda: task(params=[]), r"params=\[\] matches none"),
    "no function hit": (lambda: task(params=lambda name, p: False), "matches none of the 4"),
    "None": (lambda: task(params=None), "a string, a list of glob patterns .* got NoneType"),
    "parameters": (lambda: task(params=list(net().parameters())), r"got list of \['Parameter'\]"),
    "all frozen": (lambda: task(net().requires_grad_(False)), "'trainable' matches none.*after unfreezing some"),
    "no parameters": (lambda: task(nn.Tanh()), "Tanh has no parameters"),
    "integers": (lambda: task(With(torch.ones(2, dtype=torch.int8)), "all"), "'extra' has type torch.int8"),
    "complex": (lambda: task(With(torch.ones(2) * 1j), "all"), "complex64, which has no real gradient"),
    "float16": (lambda: task(net().half()), r"'0\.weight' is stored in torch\.float16.*model\.float\(\)"),
    "float8": (lambda: task(With(torch.ones(2).to(torch.float8_e5m2)), "all"), "torch.float8_e5m2, whose range"),
    "meta": (lambda: task(net().to("meta")), r"'0\.weight' is on the meta device.*load the weights"),
    "meta elsewhere": (lambda: task(With(torch.ones(2, device="meta"))), "'extra' is on the meta device"),
    "lazy": (lambda: task(nn.LazyLinear(3)), "'weight' is not initialised yet: run the model once"),
    "lazy elsewhere": (lambda: task(nn.Sequential(nn.LazyLinear(3), net()), "1.*"), "not initialised yet"),
    "negative l2": (lambda: task(l2=-1.0), "l2 must be .* not negative, got -1.0"),
    "nan l2": (lambda: task(l2=float("nan")), "l2 must be a finite number .* got nan"),
    "text l2": (lambda: task(l2={"0.*": "0.1"}), r"got '0\.1' for '0\.\*'"),
    "unmatched l2": (lambda: task(l2={"no.*": 1.0}), r"l2 pattern 'no\.\*' matches none of the selected"),
    "two losses": (lambda: task(outputs=cross_entropy, output_loss=cross_entropy), "exactly one of the two"),
    "no loss": (lambda: et.Task(net()), "Give either `loss`, or `outputs` and `output_loss`"),
    "half a loss": (lambda: et.Task(net(), outputs=cross_entropy), "`outputs` and `output_loss` go together"),
    "loss no function": (lambda: et.Task(net(), "mse"), "loss must be a function, got str"),
    "measurement": (lambda: task(measurement=1), "measurement must be a function, got int"),
    "function as model": (lambda: task(cross_entropy), r"must be a torch\.nn\.Module, got function"),
    "TorchScript": (lambda: task(scripted()), r"TorchScript .* cannot be differentiated.*original nn\.Module"),
    "reduction": (lambda: et.seq2seq(net(), reduction="none"), "reduction must be 'sum' or 'mean' .* got 'none'"),
}


@pytest.mark.parametrize(("make", "match"), table(TASKS))
def test_task_is_refused(make, match):
    with pytest.raises(TaskError, match=match):
        make()


def test_several_devices_are_refused():
    class Stub:
        dtype, is_complex, is_floating_point = torch.float32, staticmethod(lambda: False), staticmethod(lambda: True)

        def __init__(self, device):
            self.device = torch.device(device)

    with pytest.raises(TaskError, match=r"several devices \(cuda:0, cuda:1\)"):
        selection._check({"a": Stub("cuda:0"), "b": Stub("cuda:1")})


def test_bfloat16_parameters_warn():
    x, y = examples()
    with pytest.warns(PrecisionWarning, match="stored in bfloat16, so gradients carry about two digits") as caught:
        CHEAP.fit(et.classification(net().bfloat16()), (x.bfloat16(), y))
    assert caught[0].filename == __file__


def test_model_instead_of_task_is_refused():
    with pytest.raises(
        InputError, match=r"fit takes a Task first, got Sequential.*eigentrace\.classification\(model\)"
    ):
        CHEAP.fit(net(), examples())


# --- the ready tasks --------------------------------------------------------------------------------------------------


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
        r"not finite for 1 .*\(first: row 4\)",
    ),
    "negative": (
        labels(torch.tensor([0, -1, 2, 0, -9, 1, 1, 1])),
        NumericalError,
        r"not finite for 2 .*\(first: row 1\)",
    ),
    "floats": (labels(torch.zeros(8)), TaskError, r"integer labels of shape \(8,\), got torch\.float32 \(8,\)"),
    "columns": (labels(torch.zeros(8, 1, dtype=torch.long)), TaskError, r"got torch\.int64 \(8, 1\)"),
    "list": (labels([0] * 8), TaskError, r"integer labels of shape \(8,\), got list"),
    "three items": ((*examples(8), torch.ones(8)), TaskError, r"batches \(inputs, labels\) .* got tuple of 3 items"),
    "no labels": ({"input": torch.zeros(8, 3)}, TaskError, r"'labels' entry, got a dict with \['input'\]"),
    "images": ((torch.zeros(8, 2, 3), torch.zeros(8, dtype=torch.long)), TaskError, r"\(B, classes\), got \(8, 2, 3\)"),
}


@pytest.mark.parametrize(("batch", "error", "match"), table(CLASSIFIED))
def test_classification_batch_is_refused(batch, error, match):
    with pytest.raises(error, match=match):
        fit(data=[batch])


NO_CLASS = r"\(first: row 4\)\. Its label is {}, and the model has 3 classes, numbered 0 to 2\. Mend the labels"


@pytest.mark.parametrize("label", [3, -1, -100])
@pytest.mark.parametrize("method", [CHEAP, et.TracIn(), et.Lissa(depth=2, damping=0.1), et.Loss()], ids=str)
def test_a_label_that_is_no_class_is_named(method, label):
    x, y = examples(8)
    y[4] = label
    with pytest.raises(NumericalError, match=NO_CLASS.format(label)):
        fit(data=(x, y), method=method)
    fitted = fit(method=method)
    with pytest.raises(NumericalError, match=NO_CLASS.format(label)):
        fitted.self_influence((x, y))
    if not isinstance(method, et.Loss):
        with pytest.raises(NumericalError, match=NO_CLASS.format(label)):
            fitted.influence(examples(), (x, y))


def test_a_label_that_is_no_class_is_named_beyond_the_first_examples(tmp_path):
    x, y = examples(30)
    y[21] = 7
    data, told = et.Data(TensorDataset(x, y), batch_size=8), r"row 21\)\. Its label is 7, and the model has 3 classes"
    with pytest.raises(NumericalError, match=told):
        fit(data=data, method=et.Arnoldi(steps=4, keep=2))
    with pytest.raises(NumericalError, match=told):
        et.score(fit(), data, tmp_path / "run")
    with pytest.raises(NumericalError, match=told):
        et.TangentRidge().fit(et.classification(net()), data)


SEQUENCES = {
    "no shift": (
        et.seq2seq,
        tokens(labels=torch.ones(8, 4, dtype=torch.long)),
        "Tokens cannot make decoder inputs .* shifted right",
    ),
    "misaligned": (
        et.causal_lm,
        tokens(labels=torch.ones(8, 3, dtype=torch.long)),
        r"Logits \(8, 3, 5\) and labels \(8, 2\) do not",
    ),
    "one label": (
        et.causal_lm,
        tokens(labels=torch.ones(8, dtype=torch.long)),
        r"integers of shape \(B, T\), got torch\.int64 \(8,\)",
    ),
    "float labels": (et.causal_lm, tokens(labels=torch.ones(8, 4)), r"integers of shape \(B, T\), got torch\.float32"),
    "no labels": (et.causal_lm, tokens(), r"causal_lm expects dict batches with a 'labels' entry, got a dict with"),
    "tuples": (et.causal_lm, examples(8), "expects dict batches with a 'labels' entry, got tuple"),
    "no tokens": (
        et.causal_lm,
        tokens(0, labels=torch.ones(8, 0, dtype=torch.long)),
        r"All texts of a batch are empty: its 'labels' have shape \(8, 0\)\. Leave such texts out, or pad",
    ),
    "lists of tokens": (
        et.classification,
        et.Data([{"input_ids": [1, 2, 3, 4, 0], "labels": 1}] * 8),
        r"'input_ids' of a batch must be .* \(B, T\), got a list of 5: .* number by number\. .*set_format\('torch'\)",
    ),
    "lists of labels": (
        et.causal_lm,
        et.Data([{"input_ids": [1, 2, 3, 4, 0], "labels": [1, 2, 3, 4, 0]}] * 8),
        r"'labels' of a batch must be .* \(B, T\), got a list of 5: .* eigentrace\.Data\(dataset, collate=",
    ),
    "no inputs": (
        et.classification,
        tokens(0, labels=torch.ones(8, dtype=torch.long)),
        r"All texts of a batch are empty: its 'input_ids' have shape \(8, 0\)\.",
    ),
}


@pytest.mark.parametrize(("make", "batch", "match"), table(SEQUENCES))
def test_sequence_batch_is_refused(make, batch, match):
    with pytest.raises(TaskError, match=match):
        fit(make(Tokens()), batch if isinstance(batch, et.Data) else [batch])


def test_output_without_logits_is_refused():
    class Speaks(nn.Linear):
        def forward(self, x):
            return "cat"

    with pytest.raises(TaskError, match="returned str, in which no logits were found"):
        fit(et.classification(Speaks(3, 3)))


def test_causal_lm_label_out_of_range_names_the_row():
    wrong = torch.ones(8, 4, dtype=torch.long)
    wrong[6, 2] = 5
    with pytest.raises(NumericalError, match="first: row 6"):
        fit(et.causal_lm(Tokens()), tokens(labels=wrong))


@pytest.mark.parametrize("wrong", [5, -1], ids=["beyond", "negative"])
def test_a_token_outside_the_vocabulary_is_named_with_the_table_and_its_size(wrong):
    good = tokens(labels=torch.ones(8, 4, dtype=torch.long))
    bad = {name: value.clone() for name, value in good.items()}
    bad["input_ids"][6, 2] = wrong
    message = rf"'embed' of Tokens asks for entry {wrong} \(at \[6, 2\] .*\(8, 4\)\), .* 0 to 4\. .* tokenizer"
    task = et.causal_lm(Tokens())
    with pytest.raises(InputError, match=message):
        fit(task, [bad])
    fitted = fit(task, [good])
    for engine in ("auto", "forward"):
        with pytest.raises(InputError, match=message):
            fitted.self_influence([bad], compute=et.Compute(engine=engine))
    with pytest.raises(InputError, match="'embed' of Tokens asks for"):  # one by one, the numbers may be out of sight
        fitted.self_influence([bad], compute=et.Compute(engine="reverse"))


def test_an_error_of_the_callers_own_says_what_batch_it_met():
    x, y = examples()
    data = {"x": x.double(), "more": [y, "text"]}
    with pytest.raises(RuntimeError, match="same dtype") as caught:
        fit(et.Task(net(), lambda m, b: cross_entropy(m, (b["x"], b["more"][0]))), data)
    (note,) = caught.value.__notes__
    assert "with the batch {'x': float64 (8, 3), 'more': list(int64 (8,), str)}. Call it yourself" in note


@pytest.mark.parametrize("enabled", [False, True])
def test_a_loss_that_differentiates_by_itself_is_told_how(enabled):
    def loss(model, batch):
        x = batch[0].clone().requires_grad_()
        with torch.set_grad_enabled(enabled or torch.is_grad_enabled()):
            (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        return slope.square().sum(dim=1)

    model, data = net(), examples()
    if not enabled:
        with pytest.raises(RuntimeError, match="does not require grad") as caught:
            fit(et.Task(model, loss), data)
        assert "must do so inside torch.enable_grad()" in caught.value.__notes__[0]
        return
    scores = et.TracIn().fit(et.Task(model, loss), data).self_influence(data)
    for i, score in enumerate(scores):
        own = torch.autograd.grad(loss(model, (data[0][i : i + 1],)).sum(), list(model.parameters()), allow_unused=True)
        assert float(sum(g.square().sum() for g in own if g is not None)) == pytest.approx(float(score), rel=1e-4)


class Items(torch.utils.data.Dataset):
    """Gives what a function makes of each row of a few examples."""

    def __init__(self, make):
        self.make, (self.x, self.y) = make, examples()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, row):
        return self.make(self.x[row], self.y[row])


class Flowing(torch.utils.data.IterableDataset):
    def __iter__(self):
        return zip(*examples(), strict=True)


SINGLES = {
    "tensors": (TensorDataset(*examples()), r"list\(float32 \(3,\), int64 \(\)\) looks like a single"),
    "numbers": (Items(lambda x, y: (x, int(y))), r"list\(float32 \(3,\), int\) looks like a single"),
    "arrays": (Items(lambda x, y: (x.numpy(), y.numpy())), "looks like a single example"),
    "dicts": (
        Items(lambda x, y: {"input": x, "labels": int(y)}),
        r"\{'input': .*, 'labels': int\} looks like a single",
    ),
    "pictures": (Items(lambda x, y: (x.view(1, 3, 1), int(y))), "looks like a single example"),
    "lengths": (Items(lambda x, y: (x, y[None])), r"list\(float32 \(3,\), int64 \(1,\)\) looks like a single"),
    "only numbers": (Items(lambda x, y: (float(x[0]), int(y))), r"list\(float, int\) is none.* If this is a single"),
    "a stream": (Flowing(), "looks like a single example"),
}


@pytest.mark.parametrize(("dataset", "match"), table(SINGLES))
def test_a_loader_without_a_batch_size_that_gives_single_examples_is_named(dataset, match):
    loader = DataLoader(dataset, batch_size=None)
    told = (
        rf"^The DataLoader has batch_size=None, so .* read as batches, .*{match}.*pass the dataset itself, or give the"
    )
    with pytest.raises(DataError, match=told):
        fit(data=loader)
    for fitted in (fit(), fit(method=et.TracIn()), fit(method=et.Loss())):
        with pytest.raises(DataError, match=told):
            fitted.self_influence(loader)
    with pytest.raises(DataError, match=told):
        fit(method=et.TracIn()).influence(examples(), loader)


def test_a_loader_without_a_batch_size_is_noted_where_its_items_may_be_batches():
    loader = DataLoader(Items(lambda x, y: x), batch_size=None)
    with pytest.raises(TaskError, match="alone in its batch") as caught:
        fit(et.Task(net(), lambda m, b: (m(b) - b).square()), loader)
    assert (
        "batch_size=None, so what its dataset gives is read as batches. If float32 (3,) is" in caught.value.__notes__[0]
    )


@pytest.mark.parametrize("extra", [(), (3,), (torch.tensor(0.5),), (torch.ones(1, 3),), ("name",)], ids=str)
def test_a_loader_without_a_batch_size_that_gives_batches_is_read(extra):
    x, y = examples()
    batches = [(x[i : i + 4], y[i : i + 4], *extra) for i in (0, 4, 8)]
    task = et.Task(net(), lambda m, b: cross_entropy(m, b[:2]))
    scores = fit(task, DataLoader(batches, batch_size=None)).self_influence(DataLoader(batches, batch_size=None))
    torch.testing.assert_close(scores, fit(task, (x, y)).self_influence((x, y)))


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
def test_queries_of_another_form_are_told_beside_that_of_the_fit(method, queries, error, batch, tmp_path):
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
        made = "and the fit was made on batches such as {'x': float32 (8, 3), 'y': int64 (8,)}. Training examples and"
        assert f"on the batch {batch}, {made}" in note


def test_a_loss_that_is_asked_about_another_form_says_so():
    x, y = examples()
    fitted = et.Loss().fit(et.Task(net(), by_name), [{"x": x, "y": y}])
    with pytest.raises(KeyError) as caught:
        fitted.self_influence([{"x": x}])
    assert "the fit was made on batches such as {'x'" in caught.value.__notes__[0]


def test_other_index_errors_of_a_model_pass_through():
    class Picks(nn.Linear):
        def forward(self, x):
            return super().forward(x), [][len(x)]

    with pytest.raises(IndexError, match="list index out of range"):
        fit(et.classification(Picks(3, 3)))


def test_a_text_beyond_the_models_positions_is_said_to_be_too_long():
    class Short(Tokens):
        """Adds positions as BERT does, from a table that is cut to the length of the text."""

        def __init__(self):
            super().__init__()
            self.config, self.places = SimpleNamespace(max_position_embeddings=3), nn.Parameter(torch.zeros(3, 2))

        def forward(self, input_ids):
            return self.head(self.embed(input_ids) + self.places[: input_ids.shape[1]])

    with pytest.raises(RuntimeError, match="must match the size") as caught:
        fit(et.causal_lm(Short()), [tokens(labels=torch.ones(8, 4, dtype=torch.long))])
    assert "have 4 tokens, and the model has 3 positions. Cut them" in caught.value.__notes__[0]


def test_labels_that_are_all_ignored_are_named_among_the_causes():
    with pytest.raises(NumericalError, match=r"no label counts \(all of them -100.*Look at the labels"):
        et.Arnoldi(steps=4, keep=2).fit(et.causal_lm(Tokens()), tokens(labels=torch.full((8, 4), -100)))


# --- classes for the record of a run ----------------------------------------------------------------------------------

CLASSES = {  # outputs of a model with three, and labels of (inputs, classes)
    "several classes": (
        lambda o: o,
        lambda b: F.one_hot(b[1], 3),
        r"the class of each example.*got torch\.int64 \(12, 3\)",
    ),
    "targets": (lambda o: o, lambda b: b[0][:, 0], r"integers of shape \(B,\), got torch\.float32 \(12,\)"),
    "a list": (lambda o: o, lambda b: b[1].tolist(), "got list.*Leave `labels` out"),
    "one logit": (lambda o: o[:, :1], lambda b: b[1] > 0, r"shape \(12, classes\).*got \(12, 1\).*two outputs for two"),
    "pixels": (lambda o: o[:, :, None], lambda b: b[1], r"one output per class.*got \(12, 3, 1\)"),
}


@pytest.mark.parametrize(("view", "labels", "match"), table(CLASSES))
def test_classes_that_a_run_cannot_record_are_refused_before_anything_is_written(view, labels, match, tmp_path):
    task = et.Task(
        net(),
        outputs=lambda m, b: view(m(b[0])),
        output_loss=lambda o, b: o.flatten(1).square().sum(dim=1),
        labels=labels,
    )
    with pytest.raises(TaskError, match=match):
        et.score(fit(task), examples(), tmp_path / "run")
