"""The same numbers on a GPU as on the CPU, with data, directions and basis in either memory."""

import copy
import dataclasses

import pytest
import torch
from torch import nn

import eigentrace as et
from eigentrace.curvature.operator import Curvature, working_form
from eigentrace.curvature.products import Differentiation
from eigentrace.data import as_data
from eigentrace.errors import TaskError
from eigentrace.krylov.vectors import Vectors
from eigentrace.projection import Job, project
from eigentrace.projection.directions import DenseDirections
from tests.helpers.expecting import refused
from tests.helpers.models import CASES, Case, make

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def on_gpu(case: Case) -> et.Task:
    return case.make_task(copy.deepcopy(case.task.model).cuda())


@pytest.mark.parametrize("curvature", ["hessian", "gauss-newton"])
@pytest.mark.parametrize("name", CASES)
def test_influence_is_the_same_as_on_the_cpu(name, curvature):
    case = make(name)
    method = et.Arnoldi(steps=500, keep=12, curvature=curvature, sample=None)
    here, there = (method.fit(t, case.batches) for t in (case.task, on_gpu(case)))
    assert torch.allclose(here.spectrum.eigenvalues, there.spectrum.eigenvalues, rtol=1e-8, atol=1e-10)
    a, b = (fit.influence(case.batches, case.queries) for fit in (here, there))  # batches stay on the CPU
    assert b.device.type == "cpu"
    assert (a - b).norm() < 1e-6 * a.norm()


@pytest.mark.parametrize(
    "method", [et.RandProj(9), et.RandSelect(9), et.TracIn(), et.ExactHessian(), et.Lissa(depth=20)]
)
def test_other_methods_are_the_same(method):
    case = make("mlp")
    a, b = (method.fit(t, case.batches).influence(case.batches, case.queries) for t in (case.task, on_gpu(case)))
    assert (a - b).norm() < 1e-6 * a.norm()


@pytest.mark.parametrize(
    "basis", [et.Basis(place="host"), et.Basis(dtype="bf16"), et.Basis(dtype="bf16", place="host")]
)
def test_basis_in_host_memory_and_in_bf16(basis):
    case = make("conv")
    task = et.classification(case.task.model.float().cuda(), l2=0.1)
    batches = [(x.float(), y) for x, y in case.batches]
    plain, other = (et.Arnoldi(steps=40, keep=8, basis=b).fit(task, batches) for b in (et.Basis(), basis))
    assert torch.allclose(plain.spectrum.eigenvalues, other.spectrum.eigenvalues, rtol=2e-2)
    assert torch.allclose(plain.self_influence(batches), other.self_influence(batches), rtol=0.1, atol=1e-3)


def test_bf16_autocast_runs_a_transformer_in_every_path():
    case = make("encoder")
    task = et.classification(case.task.model.float().cuda(), l2=0.1)
    batches = [(x.float(), y) for x, y in case.batches]
    full, half = (et.Arnoldi(steps=40, keep=8, precision=p).fit(task, batches) for p in ("fp32", "bf16"))
    assert torch.allclose(full.spectrum.eigenvalues, half.spectrum.eigenvalues, rtol=0.1)


@pytest.mark.parametrize("kind", ["hessian", "gauss-newton"])
@pytest.mark.parametrize("name", CASES)
def test_bf16_products_are_close_and_need_no_second_backward(name, kind):
    # Autocast acts below torch.func, where softmax's backward meets mixed types; dual numbers see its casts.
    case = make(name)
    task = case.make_task(copy.deepcopy(case.task.model).float().cuda(), l2=0.0)
    batch = task.place(to_float(case.batches[0]))
    v = torch.randn(task.layout.numel, generator=torch.Generator().manual_seed(0)).cuda()
    full = Curvature(task, as_data([batch]), None, kind)
    half = dataclasses.replace(full, precision="bf16")
    with task.session():
        full, half = (dataclasses.replace(c, form=working_form(c, batch)) for c in (full, half))
        exact, first = full.matvec(v), half.matvec(v)
        assert half.form is Differentiation.DUAL or name == "recurrent"  # LSTM cells have no forward mode on a GPU
        assert (first - exact).norm() < 0.1 * exact.norm()
        # Autocast's cache of cast weights once grew with every product.
        held = torch.cuda.memory_allocated()
        for _ in range(3):
            half.matvec(v)
        assert torch.cuda.memory_allocated() <= held


@pytest.mark.parametrize("place", ["device", "host"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_vectors_keep_the_digits_of_float32(monkeypatch, dtype, place):
    for chunk in ("_CHUNK_NUMBERS", "_PACKED_NUMBERS"):
        monkeypatch.setattr(f"eigentrace.krylov.vectors.{chunk}", 1 << 17)
    size = 70_001
    vectors = Vectors(20, torch.zeros(size, device="cuda"), et.Basis(dtype=dtype, place=place))
    for i in range(20):
        vectors.put(i, torch.randn(size, device="cuda") / size**0.5)
    w = torch.randn(size, device="cuda")
    for count in (1, 7, 20):
        stored = vectors.store[:count].cuda().double()
        assert ((vectors.dots(count, w) - stored @ w.double()).abs() <= 2e-6 * w.norm()).all()
        for coefficients in (torch.randn(count), torch.randn(3, count)):
            exact = coefficients.cuda().double() @ stored
            assert (vectors.combine(coefficients) - exact).abs().max() <= 2e-6 * exact.abs().max()
        assert (vectors.gram(count).cuda() - stored @ stored.T).abs().max() <= 1e-5
    coefficients = torch.randn(4, 20)
    mixed = vectors.combine(coefficients)
    vectors.mix(coefficients)
    # Other chunks may sum in another order: a digit of the stored type apart at most.
    eps = torch.finfo(vectors.store.dtype).eps
    assert torch.allclose(vectors.store[:4].cuda().float(), mixed, rtol=2 * eps, atol=1e-6)
    assert vectors.release(4).is_pinned() == (place == "host")


def test_a_basis_of_more_than_2_to_the_31_numbers():
    size, count = 60_000_001, 40
    vectors = Vectors(count, torch.zeros(size, device="cuda"), et.Basis())
    for index in range(count):
        vectors.store[index].fill_(index + 1)
    w = torch.zeros(size, device="cuda")
    w[0] = w[-1] = 1.0
    expected = 2.0 * torch.arange(1, count + 1, device="cuda")
    torch.testing.assert_close(vectors.dots(count, w), expected)
    mixed = vectors.combine(torch.ones(count))
    assert mixed[0].item() == mixed[-1].item() == count * (count + 1) / 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["hessian", "gauss-newton"])
def test_compiled_products_are_close(kind):
    case = make("encoder")
    task = et.classification(case.task.model.float().cuda())
    batch = task.place(to_float(case.batches[0]))
    v = torch.randn(task.layout.numel).cuda()
    eager = Curvature(task, as_data([batch]), None, kind, "bf16")
    fast = dataclasses.replace(eager, compile=True)
    with task.session():
        fast.matvec(v)
        assert (fast.matvec(v) - eager.matvec(v)).norm() < 0.1 * eager.matvec(v).norm()
    (product,) = fast._programs.values()
    assert product.program is not None


def test_held_examples_are_copied_once():
    case = make("mlp")
    task = on_gpu(case)
    curvature = Curvature(task, as_data(case.batches), None)
    with task.session():
        first, second = (list(curvature.batches()) for _ in range(2))
    assert all(a[0].data_ptr() == b[0].data_ptr() for a, b in zip(first, second, strict=True))


def to_float(batch):
    return tuple(t.float() if t.is_floating_point() else t for t in batch)


def test_save_and_load_across_devices(tmp_path):
    case = make("mlp")
    gpu = on_gpu(case)
    fitted = et.Arnoldi(steps=40, keep=12).fit(gpu, case.batches)
    fitted.save(tmp_path / "fit")
    a, b = (et.load(tmp_path / "fit", t).self_influence(case.batches) for t in (gpu, case.task))
    assert torch.allclose(a, b, rtol=1e-8)


def test_parameters_on_two_devices_are_refused():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).cuda())
    with refused(TaskError, "cpu", "cuda:0"):
        et.classification(model)


def test_labels_out_of_range_name_the_row_and_leave_the_gpu_alive():
    task = et.classification(nn.Linear(3, 2).cuda())
    good = [(torch.randn(4, 3), torch.tensor([0, 1, 0, 1]))]
    fitted = et.RandProj(3).fit(task, good)
    bad = [*good, (torch.randn(2, 3), torch.tensor([0, 7]))]
    with refused(ArithmeticError, "row 5"):
        fitted.self_influence(bad)
    assert fitted.self_influence(good).isfinite().all()


# The layerwise engine.


def images(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(size, 3, 32, 32), torch.randint(0, 10, (size,))


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(inplace=True), nn.Conv2d(32, 64, 3, stride=2),
        nn.GroupNorm(4, 64), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(1024, 10),
    )  # fmt: skip


def projected(task, examples, directions, **settings):
    with task.session():
        job = Job.of(task, "losses", directions, True, et.Compute(**settings))
        found = [projection for _, projection in project(job, as_data([examples]))]
    return torch.cat([f.features for f in found]), torch.cat([f.squares() for f in found])


@pytest.fixture
def full_float32():
    """Convolutions without TF32, which torch allows by default and which keeps three digits."""
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield


def off(found, expected):
    return max(float((a.cpu() - b.cpu()).norm() / b.norm().cpu()) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", ["conv", "transformer", "encoder", "mlp"])
def test_layerwise_is_the_same_as_one_example_at_a_time(name):
    case = make(name)
    task = on_gpu(case)
    directions = DenseDirections(torch.randn(9, task.layout.numel, dtype=torch.float64).cuda(), task.layout)
    expected = projected(task, case.batches[0], directions, engine="reverse")
    assert off(projected(task, case.batches[0], directions, engine="layerwise"), expected) < 1e-10


@pytest.mark.usefixtures("full_float32")
def test_layerwise_in_float32_and_in_bfloat16():
    torch.manual_seed(0)
    task, batch = et.classification(network().cuda()), images(64)
    directions = DenseDirections(torch.randn(9, task.layout.numel).cuda(), task.layout)
    expected = projected(task, batch, directions, engine="reverse")
    assert off(projected(task, batch, directions, engine="layerwise"), expected) < 1e-5
    assert off(projected(task, batch, directions, engine="layerwise", precision="bf16"), expected) < 2e-2


def test_directions_stream_from_host_memory(monkeypatch):
    torch.manual_seed(0)
    task, batch = et.classification(network().cuda()), images(64)
    matrix = torch.randn(9, task.layout.numel)
    expected = projected(task, batch, DenseDirections(matrix.cuda(), task.layout))
    monkeypatch.setattr("eigentrace.projection.streamed._SHARE", 0.0)
    for host in (matrix, matrix.pin_memory()):
        directions = DenseDirections(host, task.layout)
        with task.session():
            job = Job.of(task, "losses", directions, True)
            found = [p.features for _, p in project(job, as_data([batch] * 3))]  # later batches know what comes next
        for features in found:
            assert off([features], expected[:1]) < 1e-5


@pytest.mark.usefixtures("full_float32")
def test_running_out_of_memory_halves_the_batch_and_loses_nothing():
    torch.manual_seed(0)
    task, batch = et.classification(network().cuda()), images(4096)
    directions = DenseDirections(torch.randn(9, task.layout.numel).cuda(), task.layout)
    expected = projected(task, batch, directions, batch="data")
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    allowed = (torch.cuda.memory_allocated() + 1.2 * 2**30) / total
    try:
        torch.cuda.set_per_process_memory_fraction(allowed)
        with task.session():
            job = Job.of(task, "losses", directions, True, et.Compute(memory=2**26))
            ((_, found),) = project(job, as_data([batch]))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert torch.cuda.max_memory_allocated() > 0
    assert off((found.features, found.squares()), expected) < 1e-5


@pytest.mark.usefixtures("full_float32")
def test_the_batch_grows_to_what_fits():
    torch.manual_seed(0)
    task = et.classification(network().cuda())
    data = et.Data(torch.utils.data.TensorDataset(*images(3000)), batch_size=16)
    directions = DenseDirections(torch.randn(9, task.layout.numel).cuda(), task.layout)
    with task.session():
        sizes, features = [], []
        for batch, found in project(Job.of(task, "losses", directions), data):
            sizes.append(len(batch))
            features.append(found.features)
        small = [f.features for _, f in project(Job.of(task, "losses", directions, compute=et.Compute(batch=16)), data)]
    assert max(sizes) > 16
    assert off([torch.cat(features)], [torch.cat(small)]) < 1e-5
