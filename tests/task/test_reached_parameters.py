"""Models whose parameters are used in ways that replacing module attributes does not reach, and eval() with effects."""

import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

import eigentrace as et
from eigentrace.errors import EigentraceWarning, TaskError, UnsupportedError
from eigentrace.projection import Job
from eigentrace.projection.choose import preferred
from eigentrace.projection.forward import CheckedForward
from eigentrace.projection.reverse import one_by_one
from tests.helpers.checking import run, some_directions
from tests.helpers.expecting import refused, warned


def examples(size=24, width=4):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(size, width, generator=generator)
    return torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())


def data():
    return et.Data(examples(), batch_size=8)


def fit(model, **options):
    return et.TracIn().fit(et.classification(model, **options), data())


class InList(nn.Module):
    """Registered, and used through a list."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 2)
        self.kept = [self.first.weight]

    def forward(self, x):
        return self.last(torch.tanh(x @ self.kept[0].T + self.first.bias))


class InClosure(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 2)
        weight = self.first.weight
        self.multiply = lambda x: x @ weight.T

    def forward(self, x):
        return self.last(torch.tanh(self.multiply(x) + self.first.bias))


class Shared(nn.Module):
    """A module that is not registered shares a registered weight, so that it gets a part of the gradient only."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)
        other = nn.Linear(4, 4)
        other.weight = self.first.weight
        self.others = (other,)

    def forward(self, x):
        return self.last(torch.tanh(self.others[0](torch.tanh(self.first(x)))))


class Hooked(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 2)
        mask = torch.zeros(5, 4)
        mask[:2] = 1
        self.first.weight.register_hook(lambda gradient: gradient * mask)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))


@pytest.mark.parametrize("kind", [InList, InClosure, Shared, Hooked])
def test_a_parameter_that_is_not_reached_is_named(kind):
    with refused(TaskError, "first.weight"):
        fit(kind())


@pytest.mark.parametrize("kind", [InList, InClosure, Shared, Hooked])
def test_a_parameter_that_is_not_reached_is_named_in_copies_of_the_task(kind):
    model = kind()
    task = et.classification(model)
    other = {name: value + 0.1 for name, value in model.state_dict().items()}
    for copied in (task.double(), task.at(other), task.at(other).double()):
        with refused(TaskError, "first.weight"):
            et.TracIn().fit(copied, data())


def test_copies_of_a_task_in_the_type_of_their_data():
    x = torch.randn(24, 4, dtype=torch.float64)
    doubles = et.Data(torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long()), batch_size=8)
    task = et.classification(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))).double()
    assert et.TracIn().fit(task, doubles).self_influence(doubles).isfinite().all()


class Plain(nn.Module):
    """A network whose hidden numbers may get a hook in each pass."""

    def __init__(self, hidden_hook=None):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)
        self.hidden_hook = hidden_hook

    def forward(self, x):
        h = self.middle(self.first(x))
        if self.hidden_hook is not None and h.requires_grad:
            h.register_hook(self.hidden_hook)
        return self.last(h)


def hooked(where, change):
    """A network in which the gradient of the hidden numbers is changed."""
    model = Plain(change if where == "tensor" else None)
    if where == "module":
        model.middle.register_full_backward_hook(lambda module, inner, outer: (change(inner[0]),))
    elif where == "module, before":
        model.middle.register_full_backward_pre_hook(lambda module, outer: (change(outer[0]),))
    return model


def trained_gradients(model):
    """What training accumulates for each example alone."""
    rows = []
    for x, y in examples():
        model.zero_grad()
        nn.functional.cross_entropy(model(x[None]), y[None]).backward()
        rows.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    model.zero_grad()
    return torch.stack(rows)


WHERE = ["module", "module, before", "tensor"]


@pytest.mark.parametrize("where", WHERE)
def test_factors_in_the_backward_pass_are_those_of_training(where):
    model = hooked(where, lambda gradient: -0.5 * gradient)
    expected = trained_gradients(model).square().sum(1)
    torch.testing.assert_close(torch.as_tensor(fit(model).self_influence(data())).float(), expected)


@pytest.mark.parametrize("where", WHERE)
def test_forward_mode_is_not_used_where_a_hook_changes_gradients(where):
    model = hooked(where, lambda gradient: -0.5 * gradient)
    task, batch = et.classification(model), examples().tensors
    with task.session():
        job = Job(task, task.losses, some_directions(task.layout))
        expected = one_by_one(job, batch, 24).features
        with refused(UnsupportedError, "hook"):
            CheckedForward()(job, batch, 24)
        (forward_only,) = preferred(replace(job, compute=et.Compute(engine="forward")))
        with refused(UnsupportedError, "forward"):
            forward_only(job, batch, 24)
    found = run(task, [batch], job.directions, norms=False, compute=et.Compute(engine="auto"))[0]
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    "change", [lambda g: g / g.norm(), lambda g: g.clamp(-0.01, 0.01), torch.sign], ids=["norm", "limit", "sign"]
)
@pytest.mark.parametrize("where", WHERE)
def test_a_hook_that_depends_on_the_other_examples_is_named(where, change):
    with refused(TaskError, "first.weight", "hook"):
        fit(hooked(where, change))


@pytest.mark.parametrize("where", WHERE)
def test_hooks_that_only_look_are_allowed(where):
    def look(gradient):
        seen.append(gradient.norm())
        return gradient

    seen = []
    model = hooked(where, look)
    expected = trained_gradients(model).square().sum(1)
    seen.clear()
    torch.testing.assert_close(torch.as_tensor(fit(model).self_influence(data())).float(), expected)
    assert seen


def masked(parameter):
    parameter.grad[2:] = 0


def removed(parameter):
    parameter.grad = None


@pytest.mark.parametrize("change", [masked, removed])
def test_hooks_after_accumulation_are_named_and_not_called(change):
    def hook(parameter):
        calls.append(parameter)
        change(parameter)

    calls = []
    model = Plain()
    handle = model.first.weight.register_post_accumulate_grad_hook(hook)
    model.first.weight.grad = torch.ones(5, 4)
    with warned(EigentraceWarning, "first.weight", "register_post_accumulate_grad_hook"):
        fit(model)
    assert not calls
    assert torch.equal(model.first.weight.grad, torch.ones(5, 4))
    assert [name for name, parameter in model.named_parameters() if parameter.grad is not None] == ["first.weight"]
    with warnings.catch_warnings():
        warnings.simplefilter("error", EigentraceWarning)
        fit(model, params="last.*")
        handle.remove()
        fit(model)


@pytest.mark.parametrize("kind", [InList, InClosure, Shared, Hooked])
def test_others_can_be_attributed_to(kind):
    assert fit(kind(), params="last.*").self_influence(data()).isfinite().all()


def test_frozen_parameters_that_are_selected_stay_frozen():
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    model[0].requires_grad_(False)
    fit(model, params="all")
    assert [parameter.requires_grad for parameter in model.parameters()] == [False, False, True, True]
    assert all(parameter.grad is None for parameter in model.parameters())


class Adapted(nn.Module):
    """As loralib does: the adapter is merged into the weight by eval() and taken out again by train()."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(4, 2)
        self.down, self.up = nn.Parameter(torch.randn(2, 4)), nn.Parameter(torch.randn(2, 2))
        self.merged, self.calls = False, 0

    def train(self, mode=True):
        super().train(mode)
        self.calls += 1
        if self.merged == mode:
            sign = -1 if mode else 1
            self.base.weight.data += sign * self.up @ self.down
            self.merged = not mode
        return self

    def forward(self, x):
        return self.base(x) if self.merged else self.base(x) + x @ self.down.T @ self.up.T


def test_eval_with_side_effects_is_not_called():
    model = nn.Sequential(Adapted(), nn.Tanh(), nn.Linear(2, 2))
    before, calls = {name: value.clone() for name, value in model.state_dict().items()}, model[0].calls
    for _ in range(2):
        fitted = fit(model)
        fitted.self_influence(data())
    assert model[0].calls == calls
    assert not model[0].merged
    assert all(module.training for module in model.modules())
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    plain = nn.Sequential(Adapted(), nn.Tanh(), nn.Linear(2, 2))
    plain.load_state_dict(before)
    assert torch.equal(fit(plain).self_influence(data()), fitted.self_influence(data()))


def test_modes_of_scripted_submodules_are_put_back():
    model = nn.Sequential(nn.Linear(4, 3), torch.jit.script(nn.Dropout(0.5)), nn.Linear(3, 2))
    model.train()
    model[2].eval()
    fit(model).self_influence(data())
    assert [module.training for module in model] == [True, True, False]


def test_a_mode_that_cannot_be_set_is_refused_before_anything_changes():
    class Stubborn(nn.Module):
        def __setattr__(self, name, value):
            if name == "training" and "weight" in self.__dict__.get("_parameters", {}):
                raise AttributeError("training is fixed")
            super().__setattr__(name, value)

        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(2, 4))

        def forward(self, x):
            return x @ self.weight.T

    model = nn.Sequential(nn.Dropout(0.1), Stubborn())
    with refused(UnsupportedError, "'1'", "Stubborn"):
        fit(model)
    assert model[0].training


def test_gradients_scaled_by_frequency_are_refused():
    class Words(nn.Module):
        def __init__(self, scaled):
            super().__init__()
            self.table, self.last = nn.Embedding(6, 3, scale_grad_by_freq=scaled), nn.Linear(3, 2)

        def forward(self, x):
            return self.last(self.table(x.abs().long().clamp(max=5)).mean(1))

    with refused(TaskError, "table", "scale_grad_by_freq"):
        fit(Words(True))
    fit(Words(False))
    fit(Words(True), params="last.*")
