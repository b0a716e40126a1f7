"""A task evaluates the user's loss at any values of the parameters, in any state of the model, and changes neither."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import eigentrace as et
from eigentrace.errors import NumericalError, TaskError
from tests.helpers.expecting import refused
from tests.helpers.small import cross_entropy, examples, fit, net, table


class Normed(nn.Module):
    """Parameters, a frozen one, and buffers of both kinds that enter the output."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.shift = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("scale", torch.full((3,), 2.0))
        self.register_buffer("order", torch.tensor([2, 0, 1]))
        self.register_buffer("cache", torch.zeros(2), persistent=False)

    def forward(self, x):
        return self.linear(x * self.scale + self.shift)[:, self.order]


def losses(task):
    with task.session():
        return task.losses(task.params, task.place(examples()))


def test_losses_are_those_of_the_function():
    model = net()
    expected = cross_entropy(model, examples())
    assert torch.equal(losses(et.Task(model, cross_entropy)), expected)
    split = et.Task(model, outputs=lambda m, b: m(b[0]), output_loss=lambda o, b: cross_entropy(lambda _: o, b))
    assert torch.equal(losses(split), expected)
    assert split.has_outputs


def test_losses_at_other_values():
    model, other = net(), net(1)
    task = et.Task(model, cross_entropy)
    values = {name: p.detach() for name, p in other.named_parameters()}
    with task.session():
        assert torch.equal(task.losses(values, examples()), cross_entropy(other, examples()))


def test_vector_is_the_parameters():
    model = net()
    assert torch.equal(et.Task(model, cross_entropy).vector, nn.utils.parameters_to_vector(model.parameters()))


def test_l2_is_one_number_or_goes_by_pattern():
    assert set(et.Task(net(), cross_entropy, l2=0.5).l2.values()) == {0.5}
    task = et.Task(net(), cross_entropy, l2={"*.weight": 0.5})
    assert task.l2 == {"0.weight": 0.5, "0.bias": 0.0, "2.weight": 0.5, "2.bias": 0.0}


def test_measurements_are_the_losses_unless_given():
    plain = et.Task(net(), cross_entropy)
    measured = et.Task(net(), cross_entropy, measurement=lambda m, b: m(b[0])[:, 0])
    with plain.session(), measured.session():
        assert torch.equal(plain.measurements(plain.params, examples()), cross_entropy(net(), examples()))
        assert torch.equal(measured.measurements(measured.params, examples()), net()(examples()[0])[:, 0])


def test_wrong_measurement_is_named():
    task = et.Task(net(), cross_entropy, measurement=lambda m, b: m(b[0]).sum())
    with refused(TaskError, "measurement", "(B,)", "()"):
        fit(task).influence(examples(), examples())


MEASUREMENTS = {
    "too many": (lambda m, b: m(b[0]).flatten(), ("measurement", "36 numbers", "12 examples")),
    "not finite": (lambda m, b: (m(b[0])[:, 0] * 0).log().log(), ("measurement", "12 examples", "row 0")),
    "of the batch": (
        lambda m, b: m(b[0])[:, 0] - m(b[0])[:, 0].mean(),
        ("row",),
    ),
}


@pytest.mark.parametrize("method", [et.TracIn(), et.RandProj(keep=2), et.Lissa(depth=2, damping=0.1)])
@pytest.mark.parametrize(("measurement", "mentions"), table(MEASUREMENTS))
def test_bad_measurement_is_called_one(measurement, mentions, method):
    task = et.Task(net(), cross_entropy, measurement=measurement)
    with refused((TaskError, NumericalError), *mentions):
        fit(task, method=method).influence(examples(), examples())


def test_outputs_of_a_task_without_them():
    task = et.Task(net(), cross_entropy)
    with refused(TaskError, "`loss`", "`outputs`", "`output_loss`", "curvature='hessian'"):
        task.outputs(task.params, examples())


def test_wrong_output_loss_is_named():
    task = et.Task(net(), outputs=lambda m, b: m(b[0]), output_loss=lambda o, b: F.cross_entropy(o, b[1]))
    with refused(TaskError, "output_loss", "(B,)", "()", "reduction='none'"):
        task.output_losses(torch.zeros(12, 3), examples())


def test_at_another_state_is_the_model_that_loaded_it():
    model, other = Normed(), Normed()
    other.scale.mul_(3)
    other.shift.data.add_(1)
    task = et.Task(model, cross_entropy)
    before = copy.deepcopy(model.state_dict())
    assert torch.equal(losses(task.at(other.state_dict())), cross_entropy(other, examples()))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(losses(task), cross_entropy(model, examples()))


def test_double_is_the_model_in_float64():
    model = Normed()
    x, y = examples()
    expected = cross_entropy(copy.deepcopy(model).double(), (x.double(), y))
    double = et.Task(model, cross_entropy).double()
    assert double.is_double_copy
    assert double.layout.dtype == torch.float64
    assert torch.equal(losses(double), expected)
    assert model.linear.weight.dtype == model.scale.dtype == torch.float32
    assert double.double() is double


def test_double_of_complex_numbers():
    class Turned(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(3, 3)
            self.register_buffer("turn", torch.exp(1j * torch.arange(3)))

        def forward(self, x):
            return self.head((x * self.turn).real)

    x, y = examples()
    task, data = et.Task(Turned(), cross_entropy), (torch.complex(x, x.flip(1)), y)
    double = task.double()
    assert double.losses(double.params, double.place(data)).dtype == torch.float64
    exact = et.ExactHessian(damping=0.5).fit(task, data).self_influence(data)
    assert torch.allclose(exact, et.ExactHessian(damping=0.5).fit(double, data).self_influence(data))


def test_double_of_another_state():
    other = Normed()
    other.scale.mul_(3)
    task = et.Task(Normed(), cross_entropy)
    x, y = examples()
    expected = cross_entropy(copy.deepcopy(other).double(), (x.double(), y))
    for found in (task.at(other.state_dict()).double(), task.double().at(other.state_dict())):
        assert torch.equal(losses(found), expected)


def test_double_of_a_double_model_is_itself():
    task = et.Task(net().double(), cross_entropy)
    assert task.double() is task


def test_loss_that_uses_its_own_reference_to_the_model():
    # People close over the model instead of using the argument; every method must see the swapped parameters.
    model = net()
    task = et.Task(model, lambda _, batch: cross_entropy(model, batch), l2=0.1)
    exact = fit(task, method=et.ExactHessian()).self_influence(examples())
    argument = fit(et.Task(model, cross_entropy, l2=0.1), method=et.ExactHessian()).self_influence(examples())
    assert torch.equal(exact, argument)


def test_model_that_keeps_tensors_of_its_training():
    # Such a model cannot be deep-copied, so nothing may try to.
    model = net()
    model.last = model(examples()[0])
    fit(et.classification(model), method=et.ExactHessian(damping=0.1)).self_influence(examples())
    assert model.last.requires_grad


def test_compiled_models_are_seen_through():
    compiled = torch.compile(net(), backend="eager")
    task = et.Task(compiled, cross_entropy)
    assert task.model is compiled._orig_mod
    assert task.layout.names[0] == "0.weight"
