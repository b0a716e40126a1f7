"""The checks before expensive work: silent on sound tasks, loud at the first sign of wrong numbers."""

import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import eigentrace as et
from eigentrace.curvature.checks import check_curvature
from eigentrace.curvature.operator import Curvature
from eigentrace.curvature.products import Differentiation
from eigentrace.data import as_data
from eigentrace.errors import DeterminismError, NumericalError, PrecisionWarning, TaskError
from eigentrace.task.checks import check_task
from tests.helpers.expecting import refused, warned
from tests.helpers.small import cross_entropy, examples, net


def curvature_of(task, data=None, **options):
    return Curvature(task, as_data(examples() if data is None else data), None, **options)


def checked(curvature):
    with curvature.task.session():
        return check_curvature(curvature, torch.Generator().manual_seed(0))


def test_sound_tasks_pass_in_silence(cases):
    for case in cases.values():
        with case.task.session():
            check_task(case.task, as_data(case.batches))
        for kind in ("hessian", "gauss-newton"):
            checked(Curvature(case.task, as_data(case.batches), None, kind))


def test_a_single_example_passes():
    task = et.classification(net())
    with task.session():
        check_task(task, as_data(examples(1)))


def test_only_a_few_examples_are_read():
    class Watched(Dataset):
        read = ()

        def __len__(self):
            return 1000

        def __getitem__(self, i):
            self.read = (*self.read, i)
            return examples()[0][i % 12], 0

    data = Watched()
    task = et.classification(net())
    with task.session():
        check_task(task, as_data(data))
    assert set(range(32)) < set(data.read)
    assert len(set(data.read)) <= 96


def test_missing_numbers_in_unused_inputs_are_no_change():
    # NaN differs from itself; a column of missing values that the model ignores must not look like shuffling.
    x, y = examples()
    x = torch.cat([x, torch.full((12, 1), torch.nan)], dim=1)
    task = et.Task(net(), lambda m, b: cross_entropy(m, (b[0][:, :3], b[1])))
    with task.session():
        check_task(task, as_data((x, y)))


def test_dataset_of_changing_shape_is_refused():
    class Cropped(Dataset):
        def __len__(self):
            return 1

        def __getitem__(self, i):
            return torch.zeros(int(torch.randint(2, 1000, ()))), 0

    task = et.classification(net())
    with task.session(), refused(DeterminismError, "batch", "int64 (1,)"):
        check_task(task, as_data(Cropped()))


def test_the_form_that_works_is_settled():
    class NoForwardMode(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.sin()

        @staticmethod
        def backward(ctx, g):
            return g * ctx.saved_tensors[0].cos()

    task = et.Task(net(), lambda m, b: cross_entropy(lambda x: NoForwardMode.apply(m(x)), b))
    assert checked(curvature_of(et.classification(net()))).form is Differentiation.DUAL
    assert checked(curvature_of(task)).form is Differentiation.REVERSE


class Noisy(torch.autograd.Function):
    """The identity, with gradients that draw new numbers every time."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g * torch.rand_like(g)


class NoisyTwice(torch.autograd.Function):
    """The identity, whose second derivatives draw new numbers every time."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return Noisy.apply(g)


@pytest.mark.parametrize(("noise", "named"), [(Noisy, ("gradient", "row")), (NoisyTwice, ("curvature", 0.001))])
def test_noise_that_only_derivatives_see(noise, named):
    # The loss itself repeats.
    task = et.Task(net(), lambda m, b: cross_entropy(lambda x: noise.apply(m(x)), b))
    with refused(DeterminismError, *named):
        checked(curvature_of(task))


def test_curvature_that_is_not_finite():
    # |x|^1.5 has a derivative at zero and no second one.
    def loss(model, batch):
        return cross_entropy(model, batch) + (model[2].bias * 0).abs().pow(1.5).sum()

    with refused(NumericalError, "curvature"):
        checked(curvature_of(et.Task(net(), loss)))


def test_every_loss_of_the_sample_is_looked_at():
    x, y = examples(40)
    x[33] = torch.nan
    batches = [(x[i : i + 10], y[i : i + 10]) for i in range(0, 40, 10)]
    curvature = curvature_of(et.classification(net()), batches)
    with refused(NumericalError, "1 example", "row 33"):
        checked(curvature)
    rows = np.array([2, 11, 33, 39])
    with refused(NumericalError, "row 33"):
        checked(Curvature(curvature.task, curvature.data, rows))
    checked(Curvature(curvature.task, curvature.data, rows[[0, 1, 3]]))


def test_number_of_losses_is_looked_at_in_every_batch():
    def loss(model, batch):
        losses = cross_entropy(model, batch)
        return losses if len(losses) == 12 else torch.cat([losses, losses])

    curvature = curvature_of(et.Task(net(), loss), [examples(12), examples(3)])
    with refused(TaskError, "6 numbers", "3 examples"):
        checked(curvature)


def wrong_tanh(factor):
    """A tanh whose second derivative is off by a factor: the kind of bug a framework ships."""

    class Slope(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x):
            return 1 - x.tanh() ** 2

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx, g):
            t = ctx.saved_tensors[0].tanh()
            return -2 * factor * g * t * (1 - t**2)

    class Tanh(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x):
            return x.tanh()

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx, g):
            return g * Slope.apply(ctx.saved_tensors[0])

    return lambda x: Tanh.apply(5 * x)


@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_wrong_derivative_rule_is_noticed(factor):
    model = nn.Linear(3, 3)
    tanh = wrong_tanh(factor)
    task = et.Task(model, lambda m, b: (tanh(m(b[0])) - 2).square().sum(1))
    if factor == 1:
        checked(curvature_of(task))
        return
    with warned(PrecisionWarning, "Hessian", "curvature='gauss-newton'"):
        checked(curvature_of(task))


def test_kinks_alone_do_not_make_noise():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checked(curvature_of(et.classification(model)))
