"""Models that assign to the data of their tensors in forward, as `module.to(dtype)` does: no process ends by it."""

import subprocess
import sys

import pytest
import torch
from torch import nn

import eigentrace as et
from eigentrace.errors import TaskError
from eigentrace.projection.engine import Compute
from tests.helpers.expecting import refused
from tests.helpers.places import ROOT

ENGINES = ("layerwise", "reverse", "forward")

# Its router is not among the parameters that the experts' engine differentiates: the transform's tensor was assigned to
# the data of an ordinary one, and used after the transform had ended.
SWITCH = """
import torch, transformers
import eigentrace as et

torch.manual_seed(0)
config = transformers.SwitchTransformersConfig(
    vocab_size=20, d_model=8, d_kv=4, d_ff=12, num_layers=2, num_decoder_layers=2, num_heads=2, num_experts=2,
    expert_capacity=8, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1, decoder_start_token_id=0,
    pad_token_id=0, dropout_rate=0.0,
)
model = transformers.SwitchTransformersForConditionalGeneration(config).eval()
tokens = torch.randint(1, 20, (6, 9))

def loss(model, batch):
    logits = model(input_ids=batch[:, :5], labels=batch[:, 5:].contiguous()).logits
    return torch.nn.functional.cross_entropy(logits.transpose(1, 2), batch[:, 5:], reduction="none").sum(1)

data = et.Data.from_batches([tokens])
fitted = et.TracIn().fit(et.Task(model, loss), data)
found = [fitted.self_influence(data, compute=et.Compute(engine=name)) for name in ("layerwise", "reverse")]
torch.testing.assert_close(*found, rtol=1e-4, atol=0)
assert "router.classifier.weight" not in str(fitted.task.coverage.without_rule)
"""


class Converting(nn.Module):
    """Calls a function on itself before anything else."""

    def __init__(self, first):
        super().__init__()
        self.first = first
        self.a, self.norm, self.b = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)

    def forward(self, x):
        self.first(self)
        return self.b(self.norm(self.a(x)).tanh())


def to_own_type(model):
    model.a = model.a.to(torch.float32)
    model.norm = model.norm.float()


def clamp_where_it_fits(model):
    model.a.weight.data = model.a.weight.data.clamp(-9, 9)


def to_another_type(model):
    model.a = model.a.double()


def halve(model):
    model.a.weight.data = model.a.weight.data / 2


def halve_later(model):
    """Halve once the weight is a tensor of the task, after the checks that run on the model itself."""
    if not isinstance(model.a.weight, nn.Parameter):
        halve(model)


def data(size=7):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(size, 3, generator=generator), torch.arange(size) % 2


def converting(first):
    torch.manual_seed(0)
    return Converting(first).eval()


def test_a_router_that_converts_itself_does_not_end_the_process():
    pytest.importorskip("transformers")
    command = [sys.executable, "-X", "faulthandler", "-c", SWITCH]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("params", ["all", ["b.*"]], ids=["all", "not those assigned"])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("first", [to_own_type, clamp_where_it_fits])
def test_assignments_that_change_nothing(first, engine, params):
    model, plain = converting(first), converting(lambda model: None)
    before = {name: (value.data_ptr(), value.clone()) for name, value in model.state_dict().items()}
    found, expected = (
        et.RandProj(keep=3).fit(et.classification(m, params=params), data()).features(data(), compute=Compute(engine=e))
        for m, e in ((model, engine), (plain, "reverse"))
    )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    for name, value in model.state_dict().items():
        assert (value.data_ptr(), value.tolist()) == (before[name][0], before[name][1].tolist())


@pytest.mark.parametrize("first", [to_another_type, halve, halve_later])
def test_other_values_are_refused_and_not_assigned(first):
    model = converting(first)
    before = model.a.weight.clone()
    with refused(TaskError, "'a.weight'", "float64 (4, 3)" if first is to_another_type else "float32 (4, 3)"):
        et.RandProj(keep=3).fit(et.classification(model), data()).features(data())
    assert torch.equal(model.a.weight, before)


@pytest.mark.parametrize("engine", ["layerwise", "reverse"])
def test_the_data_of_hidden_states(engine):
    def clamped(model, args, output):
        output.data = output.data.clamp(-0.5, 0.5)
        return output

    model = converting(lambda model: None)
    model.a.register_forward_hook(clamped)
    fitted = et.RandProj(keep=3).fit(et.classification(model), data())
    found = fitted.features(data(), compute=Compute(engine=engine))
    ones = [fitted.features(tuple(t[i : i + 1] for t in data()), compute=Compute(engine=engine)) for i in range(7)]
    torch.testing.assert_close(found, torch.cat(ones), rtol=1e-4, atol=1e-6)


def test_assignments_outside_of_a_model_are_torchs_own():
    kind = torch.Tensor.data
    et.RandProj(keep=3).fit(et.classification(converting(to_own_type)), data())
    assert torch.Tensor.data is kind
    assert "data" not in vars(torch.Tensor)
