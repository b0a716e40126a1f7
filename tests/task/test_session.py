"""The model and torch's global settings are left exactly as they were: after every method, and after an exception."""

import copy
import sys

import pytest
import torch
from torch import nn

import eigentrace as et
from eigentrace.task.session import prepared
from tests.helpers.expecting import refused
from tests.helpers.small import cross_entropy, examples, fit, net

METHODS = {
    "arnoldi": et.Arnoldi(steps=4, keep=2),
    "hessian": et.Arnoldi(steps=30, keep=2, curvature="hessian", tail=None),
    "inverse": et.InverseArnoldi(steps=2, keep=1, solver=et.Lissa(depth=2, damping=0.1)),
    "exact": et.ExactHessian(damping=0.5, curvature="gauss-newton"),
    "lissa": et.Lissa(depth=2, damping=0.1),
    "tracin": et.TracIn(),
    "randproj": et.RandProj(keep=2),
    "randselect": et.RandSelect(keep=2),
}


class Everything(nn.Module):
    """One of each thing that a careless library changes: modes, flags, hooks, buffers, and notes forward leaves."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 4, sparse=True)
        self.attend = nn.MultiheadAttention(4, 2, batch_first=True)
        self.recur = nn.LSTM(4, 2, batch_first=True)
        self.norm = nn.BatchNorm1d(2)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(2, 3)
        self.seen, self.notes, self.last = [], {}, None
        self.embed.requires_grad_(False)
        self.norm.eval()  # frozen by hand while the rest trains
        self.head.weight.grad = torch.full((3, 2), 7.0)
        self.head.register_forward_hook(lambda module, args, output: None)

    def forward(self, tokens):
        h = self.embed(tokens)
        h = h + self.attend(h, h, h, need_weights=False)[0]
        h = self.drop(self.norm(self.recur(h)[0][:, -1]))
        self.last = self.notes["last"] = h
        self.seen.append(len(tokens))
        return self.head(h)


def batch():
    return torch.arange(24).view(8, 3) % 5, torch.arange(8) % 3


def of_model(model):
    """Everything there is to know about a model, tensors by identity and by value."""
    found = {}
    for name, module in model.named_modules():
        attributes = dict(vars(module))
        found[name] = attributes
        for key, value in attributes.items():
            if isinstance(value, dict | list):
                found[name, key] = copy.copy(value)
    for name, tensor in (dict(model.named_parameters()) | dict(model.named_buffers())).items():
        found[name, "value"] = tensor.detach().clone().tolist()
        found[name, "flags"] = (id(tensor), tensor.requires_grad, tensor.dtype, tensor._version)
        found[name, "grad"] = (id(tensor.grad), None if tensor.grad is None else tensor.grad.tolist())
    return found


def of_torch():
    """Every global setting that the package touches, or could."""
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    return {
        "mha": torch.backends.mha.get_fastpath_enabled(),
        "sdpa": (cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()),
        "cudnn sdpa": cuda.cudnn_sdp_enabled(),
        "mkldnn": (torch.backends.mkldnn.enabled, torch.backends.mkldnn.deterministic),
        "cudnn": (cudnn.enabled, cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32),
        "grad": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")),
        "weight norm": (torch._weight_norm, sys.modules["torch.nn.utils.weight_norm"]._weight_norm),
        "default": (torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()),
        "random": torch.get_rng_state().tolist(),
    }


@pytest.fixture(params=[False, True], ids=["defaults", "unusual settings"])
def _settings(request):
    """Run under torch's defaults, and under a caller's own choices, which must come back rather than the defaults."""
    if not request.param:
        yield
        return
    cuda, backends = torch.backends.cuda, torch.backends
    backends.mha.set_fastpath_enabled(False)
    cuda.enable_flash_sdp(False)
    backends.cudnn.benchmark = backends.cudnn.deterministic = True
    backends.mkldnn.enabled = False
    try:
        with torch.no_grad():
            yield
    finally:
        backends.mha.set_fastpath_enabled(True)
        cuda.enable_flash_sdp(True)
        backends.cudnn.benchmark = backends.cudnn.deterministic = False
        backends.mkldnn.enabled = True


@pytest.mark.usefixtures("_settings")
@pytest.mark.parametrize("name", METHODS)
def test_nothing_is_left_behind(name):
    model = Everything().train(True)
    model.norm.eval()
    task, data = et.classification(model), batch()
    before = of_model(model), of_torch()
    fitted = METHODS[name].fit(task, data)
    assert (of_model(model), of_torch()) == before
    fitted.self_influence(data, normalize="gradient")
    fitted.influence(data, data)
    if name not in ("tracin", "lissa"):
        fitted.features(data)
    assert (of_model(model), of_torch()) == before


@pytest.mark.usefixtures("_settings")
@pytest.mark.parametrize("calls", [1, 4, 9])
def test_nothing_is_left_behind_by_an_exception(calls):
    model, left = Everything(), [calls]

    def loss(m, b):
        losses = cross_entropy(m, b)
        left[0] -= 1
        if left[0] == 0:
            raise KeyError("from the user's own loss")
        return losses

    task = et.Task(model, loss)
    before = of_model(model), of_torch()
    with refused(KeyError, "the user's own loss"):
        METHODS["hessian"].fit(task, batch())
    assert (of_model(model), of_torch()) == before


def test_nothing_is_left_behind_by_an_interrupt_while_scoring():
    model = Everything()
    fitted = METHODS["tracin"].fit(et.classification(model), batch())

    class Interrupted(torch.utils.data.Dataset):
        def __len__(self):
            return 12

        def __getitem__(self, i):
            if i == 9:
                raise KeyboardInterrupt
            return batch()[0][i % 8], i % 3

    before = of_model(model), of_torch()
    with pytest.raises(KeyboardInterrupt):
        fitted.self_influence(et.Data(Interrupted(), batch_size=4))
    assert (of_model(model), of_torch()) == before


def test_inside_a_session_the_kernels_have_every_derivative():
    model = Everything()
    with prepared(model):
        assert not any(module.training for module in model.modules())
        assert not model.embed.sparse
        assert not torch.backends.mha.get_fastpath_enabled()
        assert not torch.backends.mkldnn.enabled
        assert not torch.backends.cudnn.enabled
        assert not torch.backends.cuda.flash_sdp_enabled()
        assert torch.backends.cuda.math_sdp_enabled()
        assert not torch.is_grad_enabled()
    with prepared(net()):
        assert torch.backends.mkldnn.enabled  # convolutions need it: it is off around recurrent layers only


def test_sessions_nest():
    model = Everything()
    before = of_model(model), of_torch()
    with prepared(model), prepared(model):
        pass
    assert (of_model(model), of_torch()) == before


def test_a_loader_with_its_own_batches_draws_nothing_from_the_global_random_state():
    dataset = torch.utils.data.TensorDataset(*examples())
    loader = torch.utils.data.DataLoader(dataset, batch_sampler=[[0, 1, 2], [3, 4, 5, 6]])
    task, before = et.classification(net()), torch.get_rng_state()
    fit(task, loader).self_influence(loader)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_model_that_keeps_tensors_can_be_copied_afterwards():
    # A tensor of a transform that has ended cannot be copied, so one left on the model would break the caller.
    model = Everything()
    fit(et.classification(model), batch(), METHODS["arnoldi"])
    assert model.last is None
    assert not model.notes
    copy.deepcopy(model.state_dict())


class Padded(nn.Module):
    """Embeddings with a padding row, asked for by position or by keyword."""

    def __init__(self, keyword):
        super().__init__()
        self.embed, self.keyword = nn.Embedding(5, 3, padding_idx=0), keyword
        self.embed.weight.data.normal_()  # the padding row too, as tied or loaded weights may have it

    def forward(self, tokens):
        return self.embed(input=tokens) if self.keyword else self.embed(tokens)


@pytest.mark.parametrize("keyword", [False, True])
def test_padding_takes_no_gradient_in_either_mode(keyword):
    task, data = et.classification(Padded(keyword)), (torch.arange(8) % 5, torch.arange(8) % 3)
    weights = task.params["embed.weight"]
    with task.session():
        forward, reverse = (
            torch.func.jacfwd(lambda w: task.losses({"embed.weight": w}, data))(weights),
            torch.func.jacrev(lambda w: task.losses({"embed.weight": w}, data))(weights),
        )
    torch.testing.assert_close(forward, reverse)
    assert not forward[:, 0].any()
    assert forward[1, 1].any()


class Positions(nn.Embedding):
    """Positions looked up by shape, as sinusoidal embeddings do, with a padding row of their own."""

    def forward(self, shape):
        return super().forward(torch.arange(shape[1]))


def test_embeddings_called_with_something_else_are_left_alone():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.positions, self.head = Positions(6, 3, padding_idx=1), nn.Linear(3, 3)

        def forward(self, x):
            return self.head((x.unsqueeze(-1) + self.positions(x.shape)).mean(dim=1))

    x = torch.randn(6, 4)
    fitted = et.RandProj(2).fit(et.classification(Model()), (x, torch.tensor([0, 1, 2] * 2)))
    assert fitted.self_influence((x, torch.tensor([0, 1, 2] * 2))).isfinite().all()
