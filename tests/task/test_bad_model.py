"""A model that cannot be used must be refused, mentioning the parameter, buffer or type that is the reason."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import eigentrace as et
from eigentrace.errors import PrecisionWarning, TaskError, UnsupportedError
from eigentrace.task import parameters as selection
from tests.helpers.expecting import refused, warned
from tests.helpers.small import CHEAP, cross_entropy, examples, fit, net, table


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


MODELS = {  # a model, the parameters to select, and what the error mentions
    "all frozen": (lambda: net().requires_grad_(False), "trainable", ("'trainable'", "0.weight")),
    "no parameters": (nn.Tanh, "trainable", ("Tanh",)),
    "integers": (lambda: With(torch.ones(2, dtype=torch.int8)), "all", ("'extra'", "torch.int8")),
    "complex": (lambda: With(torch.ones(2) * 1j), "all", ("'extra'", "torch.complex64")),
    "float16": (lambda: net().half(), "trainable", ("'0.weight'", "torch.float16", "model.float()")),
    "float8": (lambda: With(torch.ones(2).to(torch.float8_e5m2)), "all", ("'extra'", "torch.float8_e5m2")),
    "meta": (lambda: net().to("meta"), "trainable", ("'0.weight'", "meta")),
    "meta elsewhere": (lambda: With(torch.ones(2, device="meta")), "trainable", ("'extra'", "meta")),
    "lazy": (lambda: nn.LazyLinear(3), "trainable", ("'weight'", "UninitializedParameter")),
    "lazy elsewhere": (lambda: nn.Sequential(nn.LazyLinear(3), net()), "1.*", ("'0.weight'", "UninitializedParameter")),
    "function as model": (lambda: cross_entropy, "trainable", ("torch.nn.Module", "function")),
    "TorchScript": (scripted, "trainable", ("TorchScript", "nn.Module")),
}


@pytest.mark.parametrize(("make", "params", "mentions"), table(MODELS))
def test_model_is_refused(make, params, mentions):
    with refused(TaskError, *mentions):
        et.Task(make(), cross_entropy, params)


def test_several_devices_are_refused():
    class Stub:
        dtype, is_complex, is_floating_point = torch.float32, staticmethod(lambda: False), staticmethod(lambda: True)

        def __init__(self, device):
            self.device = torch.device(device)

    with refused(TaskError, "cuda:0", "cuda:1"):
        selection._check({"a": Stub("cuda:0"), "b": Stub("cuda:1")})


def test_bfloat16_parameters_warn():
    x, y = examples()
    with warned(PrecisionWarning, "bfloat16", "precision='bf16'") as caught:
        CHEAP.fit(et.classification(net().bfloat16()), (x.bfloat16(), y))
    assert caught[0].filename == __file__


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
    with refused(TaskError, f"'{name}'"):
        fit(et.classification(model))
    assert model.count is buffer
    assert model.count == 0
    assert torch.equal(model.weight, torch.ones(3, 3))


def test_model_that_writes_is_put_back_when_its_loss_is_wrong_too():
    model = Writes("buffer in place")
    with refused(TaskError, "(B,)", "()"):
        fit(et.Task(model, lambda m, b: m(b[0]).sum()))
    assert model.count == 0


def test_dropout_modules_are_fine():
    assert fit(et.classification(nn.Sequential(nn.Dropout(0.9), net()))).self_influence(examples()).isfinite().all()


def test_a_norm_that_needs_several_examples_is_refused_like_other_batch_statistics():
    norm = nn.BatchNorm1d(4, track_running_stats=False)
    x, y = examples()
    model = nn.Sequential(nn.Linear(x.shape[1], 4), norm, nn.Linear(4, int(y.max()) + 1))
    with refused(TaskError, "[1, 4]", "Data(examples)"):
        fit(et.classification(model), (x, y))


def test_embedding_that_rescales_its_own_rows_is_refused():
    model, tokens = nn.Embedding(5, 3, max_norm=0.1), (torch.arange(6) % 5, torch.arange(6) % 3)
    before = model.weight.detach().clone()
    with refused(TaskError, "'weight'"):
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
    with refused(TaskError, "sparse", "sparse=False"):
        fit(et.classification(SparseFunction()), tokens)


def test_output_without_logits_is_refused():
    class Speaks(nn.Linear):
        def forward(self, x):
            return "cat"

    with refused(TaskError, "str", "`.logits`"):
        fit(et.classification(Speaks(3, 3)))


def test_other_index_errors_of_a_model_pass_through():
    class Picks(nn.Linear):
        def forward(self, x):
            return super().forward(x), [][len(x)]

    with refused(IndexError, "list index"):
        fit(et.classification(Picks(3, 3)))


def test_inference_mode_is_refused():
    task = et.classification(net())
    with torch.inference_mode(), refused(UnsupportedError, "torch.inference_mode()", "torch.no_grad()"):
        fit(task)
