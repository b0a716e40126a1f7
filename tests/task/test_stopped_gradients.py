"""Every way to stop a gradient is a constant for every derivative, compared with dense ones of plain torch."""

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import eigentrace as et
from eigentrace.curvature.operator import Curvature
from eigentrace.curvature.products import Differentiation
from eigentrace.errors import TaskError, UnsupportedError
from tests.helpers.expecting import refused

STOPS = {}
SIZE = 43  # number of parameters


def stop(function):
    STOPS[function.__name__] = function
    return function


@stop
def switched_off_and_on(function, x):
    torch.set_grad_enabled(False)
    found = function(x)
    torch.set_grad_enabled(True)
    return found


@stop
def switched_back(function, x):
    before = torch.is_grad_enabled()
    torch.set_grad_enabled(False)
    found = function(x)
    torch.set_grad_enabled(before)
    return found


@stop
def private(function, x):
    before = torch.is_grad_enabled()
    torch._C._set_grad_enabled(False)
    found = function(x)
    torch._C._set_grad_enabled(before)
    return found


@stop
def with_a_flag(function, x):
    with torch.set_grad_enabled(False):
        return function(x)


@stop
def with_the_mode_found(function, x):
    with torch.set_grad_enabled(torch.is_grad_enabled()):
        return function(x).detach()


@stop
def decorated(function, x):
    return torch.no_grad()(function)(x)


@stop
def decorated_generator(function, x):
    @torch.no_grad()
    def parts():
        yield function(x[:3])
        yield function(x[3:])

    return torch.cat(list(parts())).detach()


@stop
def inference_mode(function, x):
    with torch.inference_mode():
        found = function(x)
    return found.clone()


@stop
def enabled_in_between(function, x):
    with torch.no_grad():
        with torch.enable_grad():
            x = x * 1
        return function(x)


@stop
def one_context_twice(function, x):
    context = torch.no_grad()
    with context:
        function(x)
    with context:
        return function(x)


@stop
def after_an_error(function, x):
    try:
        with torch.no_grad():
            raise KeyError
    except KeyError:
        return switched_off_and_on(function, x)


@stop
def in_a_mode_of_the_user(function, x):
    class Plain(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    with Plain():
        torch.set_grad_enabled(False)
    found = function(x)
    with torch.device("cpu"):
        torch.set_grad_enabled(True)
    return found


@stop
def a_view(function, x):
    found = function(x).detach() + (x - x.detach())
    with torch.no_grad():
        return found.view(-1)[:]


@stop
def written_into(function, x):
    found = torch.zeros_like(x)
    with torch.no_grad():
        found[:] = x
        found.copy_(function(found))
    return found


@stop
def written_over(function, x):
    other = x * 1
    with torch.no_grad():
        other.mul_(2)
    return other * function(x.detach())


@stop
def of_a_transform(function, x):
    with torch.no_grad():
        return torch.func.grad(lambda z: (function(z) * z).sum())(x)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(x):
        with torch.no_grad():
            return x * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, given):
        return 2 * ctx.saved_tensors[0] * given

    @staticmethod
    def jvp(ctx, given):
        return 2 * ctx.saved_tensors[0] * given

    @staticmethod
    def vmap(info, dims, x):
        return Square.apply(x), dims[0]


@stop
def of_a_custom_function(function, x):
    with torch.no_grad():
        return Square.apply(x)


@stop
def beside_a_custom_function(function, x):
    return Square.apply(x) * function(x).detach()


@stop
def data(function, x):
    return function(x).data


@stop
def data_of_the_input(function, x):
    return function(x.data)


@stop
def data_written_over(function, x):
    other = x * 1
    other.data.mul_(2)
    return other * function(x.detach())


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def examples():
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return x, x[:, :3].argmax(1)


def outputs_of(stopped):
    def outputs(model, batch):
        logits = model(batch[0])
        return logits * stopped(lambda z: torch.sigmoid(3 * z), logits[:, 0] * 1).unsqueeze(1)

    return outputs


def focal_of(stopped):
    def losses(outputs, batch):
        plain = nn.functional.cross_entropy(outputs, batch[1], reduction="none")
        return plain * stopped(lambda z: (1 - torch.exp(-z)) ** 2, plain)

    return losses


def task(model, stopped):
    return et.Task(model, outputs=outputs_of(stopped), output_loss=focal_of(stopped))


def rows(values, inputs):
    """The gradient of each of the values, by ordinary backward passes."""
    found = []
    for value in values:
        parts = torch.autograd.grad(value, inputs, create_graph=True, materialize_grads=True, allow_unused=True)
        found.append(torch.cat([part.flatten() for part in parts]))
    return torch.stack(found)


def dense(model, stopped):
    """The per-example gradients, the Hessian and the Gauss-Newton matrix of plain torch."""
    batch, parameters = examples(), list(model.parameters())
    outputs = outputs_of(stopped)(model, batch)
    gradients = rows(focal_of(stopped)(outputs, batch), parameters)
    jacobian = rows(outputs.flatten(), parameters)
    ends = outputs.detach().requires_grad_()
    inner = rows(rows([focal_of(stopped)(ends, batch).sum()], [ends])[0], [ends])
    hessian = rows(gradients.sum(0), parameters)
    size = len(batch[0])
    return gradients.detach(), (hessian / size).detach(), (jacobian.T @ inner @ jacobian / size).detach()


def same(a, b):
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def product(made, kind, form):
    v = torch.randn(SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    with made.session():
        return Curvature(made, et.Data.from_batches([examples()]), None, kind, form=form).matvec(v), v


@pytest.mark.parametrize("form", Differentiation)
@pytest.mark.parametrize("stopped", STOPS.values(), ids=STOPS)
def test_products(model, stopped, form):
    _, hessian, gauss_newton = dense(model, stopped)
    for kind, matrix in (("hessian", hessian), ("gauss-newton", gauss_newton)):
        found, v = product(task(model, stopped), kind, form)
        same(found, matrix @ v)
        assert torch.is_grad_enabled()


@pytest.mark.parametrize("stopped", STOPS.values(), ids=STOPS)
def test_several_products_at_once(model, stopped):
    _, hessian, _ = dense(model, stopped)
    made = task(model, stopped)
    with made.session():
        form = Differentiation.DUAL
        found = Curvature(made, et.Data.from_batches([examples()]), None, form=form).matmat(torch.eye(SIZE).double())
    same(found, hessian)


@pytest.mark.parametrize("engine", ["forward", "reverse", "layerwise"])
@pytest.mark.parametrize("stopped", STOPS.values(), ids=STOPS)
def test_features(model, stopped, engine):
    expected, _, _ = dense(model, stopped)
    batch = et.Data.from_batches([examples()])
    fitted = et.RandProj(keep=5, seed=3).fit(task(model, stopped), batch)
    found = fitted.features(batch, compute=et.Compute(engine=engine))
    same(found, expected @ fitted.blocks[0].directions.dense(0, 5).T.double())
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("form", Differentiation)
@pytest.mark.parametrize("leave", [torch.set_grad_enabled, torch._C._set_grad_enabled])
def test_a_loss_that_leaves_gradients_disabled(model, form, leave):
    def losses(model, batch):
        found = nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
        leave(False)
        return found

    plain = et.classification(model)
    made = et.Task(model, losses)
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled):
            same(product(made, "hessian", form)[0], product(plain, "hessian", form)[0])
            assert torch.is_grad_enabled() is enabled
    batch = et.Data.from_batches([examples()])
    for engine in ("forward", "reverse", "layerwise"):
        one, other = (
            et.RandProj(keep=5, seed=3).fit(t, batch).features(batch, compute=et.Compute(engine=engine))
            for t in (made, plain)
        )
        same(one, other)


def detached_in_place(function, x):
    return function(x).detach_()


def detached_by_function(function, x):
    return torch.detach_(function(x))


@pytest.mark.parametrize("stopped", [detached_in_place, detached_by_function])
def test_detaching_in_place_is_right_or_refused(model, stopped):
    _, hessian, gauss_newton = dense(model, stopped)
    for form in (Differentiation.DUAL, Differentiation.REVERSE):
        found, v = product(task(model, stopped), "hessian", form)
        same(found, hessian @ v)
    found, v = product(task(model, stopped), "gauss-newton", Differentiation.DUAL)
    same(found, gauss_newton @ v)
    with refused(UnsupportedError, ".detach()", "detach_()"):
        product(task(model, stopped), "hessian", Differentiation.FORWARD)


def pushed(function, x):
    def cube(z):
        with torch.no_grad():
            square = z * z
        return square * z

    return torch.func.jvp(cube, (x,), (torch.ones_like(x),))[1]


def pushed_without_gradients(function, x):
    with torch.no_grad():
        return torch.func.jvp(function, (x,), (torch.ones_like(x),))[1]


@pytest.mark.parametrize("stopped", [pushed, pushed_without_gradients])
def test_a_jvp_of_the_user_s_with_disabled_gradients_is_right_or_refused(model, stopped):
    _, hessian, _ = dense(model, stopped)
    found, v = product(task(model, stopped), "hessian", Differentiation.REVERSE)
    same(found, hessian @ v)
    with refused(UnsupportedError, ".detach()", "torch.func.jvp"):
        product(task(model, stopped), "hessian", Differentiation.FORWARD)


def gradient_of(model, batch, **options):
    with torch.enable_grad():
        x = batch[0].clone().requires_grad_()
        return torch.autograd.grad(model(x).square().sum(), x, **options)[0].square().sum(1)


def by_backward(model, batch):
    with torch.enable_grad():
        x = batch[0].clone().requires_grad_()
        model(x).square().sum().backward(inputs=[x])
    return x.grad.square().sum(1)


def with_a_graph(model, batch):
    weights = gradient_of(model, batch, create_graph=True)
    torch.set_grad_enabled(False)
    weights = weights + torch.sigmoid(weights).sqrt()
    torch.set_grad_enabled(True)
    return weights + gradient_of(model, batch, create_graph=True)


def by_torch_func(model, batch):
    return torch.func.grad(lambda x: model(x).square().sum())(batch[0]).square().sum(1)


@pytest.mark.parametrize("weights", [gradient_of, by_backward, with_a_graph, by_torch_func])
def test_losses_that_differentiate(model, weights):
    def losses(model, batch):
        found = nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
        return weights(model, batch) * found

    parameters, made = list(model.parameters()), et.Task(model, losses)
    gradients = rows(losses(model, examples()), parameters)
    hessian = rows(gradients.mean(0), parameters).detach()
    for form in (Differentiation.DUAL, Differentiation.REVERSE):
        found, v = product(made, "hessian", form)
        same(found, hessian @ v)
    try:  # torch.func refuses requires_grad_
        found, v = product(made, "hessian", Differentiation.FORWARD)
        same(found, hessian @ v)
    except RuntimeError:
        assert weights is not by_torch_func
    batch = et.Data.from_batches([examples()])
    fitted = et.RandProj(keep=5, seed=3).fit(made, batch)
    same(fitted.features(batch), gradients.detach() @ fitted.blocks[0].directions.dense(0, 5).T.double())


def test_tensors_of_inference_mode_are_refused(model):
    def losses(model, batch):
        found = nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
        with torch.inference_mode():
            weights = torch.exp(-found)
        return weights * found

    with refused(TaskError, ".detach()", "torch.inference_mode()"):
        et.TracIn().fit(et.Task(model, losses), examples())


def test_parts_of_torch_are_as_they_were_afterwards(model):
    def found():
        functions = (torch._C._set_grad_enabled, torch.detach_, torch.Tensor.detach_, torch.Tensor.data)
        return (*functions, vars(torch.autograd.Function)["apply"], torch.autograd._engine_run_backward)

    before = found()
    et.Arnoldi(steps=5, keep=2, sample=None).fit(task(model, switched_off_and_on), et.Data.from_batches([examples()]))
    assert found() == before
    assert torch._C._is_fwd_grad_enabled()
    assert not torch.overrides._get_current_function_mode_stack()


@pytest.mark.parametrize("engine", ["forward", "auto"])
def test_another_model_in_the_loss_leaves_no_graph(model, engine):
    teacher = nn.Linear(4, 3).double()

    def losses(model, batch):
        return (model(batch[0]) - teacher(batch[0])).square().sum(1)

    fitted = et.RandProj(keep=3).fit(et.Task(model, losses, params=["2.*"]), examples())
    assert not fitted.features(examples(), compute=et.Compute(engine=engine)).requires_grad


class Changing(nn.Module):
    """Calls a function on itself, if told to, before anything else."""

    def __init__(self, change):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 5).double(), nn.Linear(5, 3).double()
        self.change, self.changes = change, False

    def forward(self, x):
        if self.changes:
            self.change(self)
        return self.b(self.a(x).tanh())


def clamped(model):
    model.a.weight.data.clamp_(-0.2, 0.2)


def clamped_without_gradients(model):
    torch.set_grad_enabled(False)
    model.a.weight.clamp_(-0.2, 0.2)
    torch.set_grad_enabled(True)


def clamped_by_alias(model):
    model.a.weight.detach().clamp_(-0.2, 0.2)


def loaded(model):
    model.a.load_state_dict({name: value.clamp(-0.2, 0.2) for name, value in model.a.state_dict().items()})


@pytest.mark.parametrize("engine", ["forward", "reverse", "layerwise"])
@pytest.mark.parametrize("change", [clamped, clamped_without_gradients, clamped_by_alias, loaded])
def test_a_model_that_begins_to_change_itself_is_refused(change, engine):
    model = Changing(change)
    fitted = et.RandProj(keep=5).fit(et.classification(model), examples())
    model.changes = True
    with refused(TaskError, "a.weight"):
        fitted.features(examples(), compute=et.Compute(engine=engine))


def loaded_again(model):
    model.a.load_state_dict({name: value.detach().clone() for name, value in model.a.state_dict().items()})


def clamped_to_itself(model):
    torch.set_grad_enabled(False)
    model.a.weight.clamp_(-9, 9)
    torch.set_grad_enabled(True)


@pytest.mark.parametrize("change", [loaded_again, clamped_to_itself])
def test_writing_the_same_numbers_changes_no_derivative(change):
    model = Changing(change)
    made, batch = et.classification(model), et.Data.from_batches([examples()])
    v = torch.randn(SIZE, dtype=torch.float64)

    def found():
        fitted = et.RandProj(keep=5, seed=3).fit(made, batch)
        with made.session():
            products = [Curvature(made, batch, None, form=form).matvec(v) for form in Differentiation]
        engines = ("forward", "reverse", "layerwise")
        return products + [fitted.features(batch, compute=et.Compute(engine=engine)) for engine in engines]

    expected = found()
    model.changes = True
    for one, other in zip(found(), expected, strict=True):
        same(one, other)
