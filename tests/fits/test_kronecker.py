"""Kronecker eigenbases and the energies along them, against gradients written out one example at a time."""

import pytest
import torch
from torch import nn

import eigentrace as et
from eigentrace.data import as_data
from eigentrace.fits import kronecker
from eigentrace.fits.kronecker import eigenbases, energies, estimates, leading
from eigentrace.projection.directions import DenseDirections, matrix_shape
from eigentrace.projection.engine import Compute
from tests.helpers.checking import Net, gap, numbers, one_at_a_time, wavy, weight


def forward(self, tokens, image):
    h = self.n(self.e(tokens))
    h = self.t(self.a(h).tanh()) + self.p
    seen = self.d(self.c(image).relu()).flatten(1)
    return torch.cat(
        [(h @ self.e.weight.T).sum(dim=1), self.l(self.r(self.o(tokens).sum(dim=1))), seen * self.s], dim=1
    )


def network():
    """Tied and untied lookups, plain, tied, convolved, grouped and depthwise layers, norms, and one without a rule."""
    layers = {"e": nn.Embedding(5, 4), "a": nn.Linear(4, 4), "t": nn.Linear(4, 4), "n": nn.LayerNorm(4)}
    layers |= {"o": nn.Embedding(5, 3), "r": nn.PReLU(3), "l": nn.Linear(3, 2)}
    convolutions = {"c": nn.Conv2d(2, 4, 3, padding=1), "d": nn.Conv2d(4, 8, 2, groups=2)}
    model = Net(forward, **layers, **convolutions, p=weight(1, 3, 4), s=weight())
    model.t.weight = model.a.weight
    return model


def batches():
    return [(torch.randint(0, 5, (n, 3)), numbers(n, 2, 3, 3)) for n in (4, 1, 6)]


@pytest.fixture
def task():
    return et.Task(network(), wavy)


def orthonormal(task, count=0):
    matrix = torch.linalg.qr(numbers(task.layout.numel, max(count, 1)))[0].T[:count]
    return DenseDirections(matrix.contiguous(), task.layout)


def turned(task, gradients, bases, name):  # (N, r, s)
    part = gradients[:, task.layout.span(name)].unflatten(1, matrix_shape(task.layout, name))
    left, right = bases.get(name, (None, None))
    part = part if left is None else left.T @ part
    return part if right is None else part @ right


def test_bases_are_orthonormal_and_natural_where_they_should_be(task):
    with task.session():
        bases = eigenbases(task, as_data(batches()), Compute())
    for sides in bases.values():
        for basis in sides:
            if basis is not None:
                assert torch.allclose(basis.T @ basis, torch.eye(basis.shape[1]).double(), atol=1e-12)
    natural = {name: [side is None for side in sides] for name, sides in bases.items()}
    # Lookups keep their vocabulary; what has no outer product (biases, norms, PReLU, a broadcast) is not there at all.
    assert natural == {
        "e.weight": [True, False],
        "o.weight": [True, False],
        "a.weight": [False, False],
        "l.weight": [False, False],
        "c.weight": [False, False],
        "d.weight": [False, False],
    }


def test_bases_diagonalise_the_covariances():
    model = Net(lambda self, x: self.b(self.a(x).tanh()), a=nn.Linear(5, 4), b=nn.Linear(4, 3))
    task, x = et.Task(model, wavy), numbers(20, 3, 5)
    taken = {}

    def keep(module, inputs, output):
        output.retain_grad()
        taken.update(left=output, right=inputs[0])

    hook = model.a.register_forward_hook(keep)
    wavy(model, (x,)).sum().backward()
    hook.remove()
    model.zero_grad()
    with task.session():
        found = dict(zip(("left", "right"), eigenbases(task, as_data([(x,)]), Compute())["a.weight"], strict=True))
    for side, value in (("left", taken["left"].grad), ("right", taken["right"])):
        flat = value.detach().flatten(0, 1)
        inside = found[side].T @ (flat.T @ flat) @ found[side]
        assert torch.allclose(inside, inside.diagonal().diag(), atol=1e-10 * inside.max())
        assert (inside.diagonal().diff() <= 0).all()  # the largest first


@pytest.mark.parametrize("memory", [None, 1])
def test_energies_are_those_of_written_gradients(task, memory):
    data, compute = batches(), Compute(memory=memory)
    gradients, _ = one_at_a_time(task, data)
    kept = orthonormal(task, 3)
    with task.session():
        bases = eigenbases(task, as_data(data), compute)
        found = energies(task, as_data(data), bases, kept, compute)
    assert set(found.sums) == set(task.layout.names)
    for name, sums in found.sums.items():
        expected = turned(task, gradients, bases, name).square().sum(dim=0)
        assert gap(sums.reshape(1, -1), expected.reshape(1, -1)) < 1e-10, name
    phi = gradients @ kept.matrix.T
    assert torch.allclose(found.moments, phi.T @ phi)
    # A turned basis loses nothing: all energies together are the gradients' squared norms.
    assert float(sum(s.sum() for s in found.sums.values())) == pytest.approx(float(gradients.square().sum()))


def test_energies_fall_faster_than_in_the_natural_basis():
    model = Net(lambda self, x: self.b(self.a(x).tanh()), a=nn.Linear(12, 10), b=nn.Linear(10, 3))
    task, mixing = et.Task(model, wavy), numbers(4, 12)
    data = as_data([(numbers(200, 4) @ mixing + 0.1 * numbers(200, 12),)])
    with task.session():
        bases = eigenbases(task, data, Compute())
        rotated, natural = (energies(task, data, b, orthonormal(task), Compute()).sums["a.weight"] for b in (bases, {}))
    share = [float(s.flatten().sort(descending=True).values[:12].sum() / s.sum()) for s in (rotated, natural)]
    assert share[0] > 1.5 * share[1]


def test_wide_sides_stay_as_they_are(task, monkeypatch):
    monkeypatch.setattr(kronecker, "WIDEST_SIDE", 4)
    with task.session():
        bases = eigenbases(task, as_data(batches()), Compute())
    assert [side is None for side in bases["c.weight"]] == [False, True]  # 4 channels, 18 numbers under the kernel


def test_only_leading_columns_are_looked_at(task, monkeypatch):
    monkeypatch.setattr(kronecker, "_MOST_COLUMNS", 2)
    data = as_data(batches())
    gradients, _ = one_at_a_time(task, batches_of(data))
    with task.session():
        bases = eigenbases(task, data, Compute())
        found = energies(task, data, bases, orthonormal(task), Compute())
    assert bases["c.weight"][1].shape == (18, 2)
    for name, sums in found.sums.items():
        expected = turned(task, gradients, bases, name).square().sum(dim=0)
        assert torch.allclose(sums, expected), name


def batches_of(data):
    return [batch.values for batch in data.batches()]


def test_few_tokens_are_enough_for_a_covariance(monkeypatch):
    model = Net(lambda self, x: self.a(x).tanh(), a=nn.Linear(6, 5))
    task, data = et.Task(model, wavy), as_data([(numbers(30, 9, 6),)])
    with task.session():
        monkeypatch.setattr(kronecker, "_MOST_TOKENS", 3)
        bases = eigenbases(task, data, Compute())
    assert all(torch.allclose(u.T @ u, torch.eye(u.shape[1]).double()) for u in bases["a.weight"])


def test_models_without_any_rule_keep_their_natural_basis():
    model = Net(lambda self, x: self.r(x), r=nn.PReLU(4))
    task, data = et.Task(model, wavy), [(numbers(6, 4),)]
    gradients, _ = one_at_a_time(task, data)
    with task.session():
        assert eigenbases(task, as_data(data), Compute()) == {}
        found = energies(task, as_data(data), {}, orthonormal(task), Compute())
    assert torch.allclose(found.sums["r.weight"].flatten(), gradients.square().sum(dim=0))


@pytest.mark.parametrize("off", [0.0, 0.005, 0.02])
def test_candidates_are_where_the_residual_energy_is(task, off):
    data = as_data([(torch.randint(0, 5, (150, 3)), numbers(150, 2, 3, 3))])
    gradients, _ = one_at_a_time(task, batches_of(data))
    # Kept: the leading directions of the gradients, as curvature would find them, a little off.
    V = torch.linalg.svd(gradients, full_matrices=False)[2][:8]
    kept = DenseDirections(torch.linalg.qr((V + off * numbers(*V.shape)).T)[0].T.contiguous(), task.layout)
    with task.session():
        found = energies(task, data, eigenbases(task, data, Compute()), kept, Compute())
        directions = leading(found, kept, torch.arange(8), 60)
    residual = gradients - gradients @ kept.matrix.T @ kept.matrix
    every = torch.cat([turned(task, residual, found.bases, n).square().sum(dim=0).flatten() for n in task.layout.names])
    if not off:  # singular vectors do not correlate with what is left: the estimate is exact
        estimated = estimates(found, kept, torch.arange(8))
        flat = torch.cat([estimated[name].flatten() for name in task.layout.names])
        assert torch.allclose(flat, every, atol=1e-9 * float(every.max()))
    chosen = (residual @ directions.dense(0, 60).T).square().sum(dim=0)
    best = every.sort(descending=True).values[:20].sum()
    assert chosen.sort(descending=True).values[:20].sum() > 0.95 * best


def test_more_than_there_are_gives_all(task):
    data = as_data(batches())
    with task.session():
        found = energies(task, data, eigenbases(task, data, Compute()), orthonormal(task), Compute())
    directions = leading(found, orthonormal(task), torch.arange(0), 10**6)
    whole = directions.dense(0, directions.count)
    assert directions.count == task.layout.numel
    assert torch.allclose(whole @ whole.T, torch.eye(directions.count).double(), atol=1e-12)


def test_where_float32_gives_up_float64_diagonalises(monkeypatch):
    x = torch.randn(200, 12) * (torch.arange(12) < 5)  # most inputs are always zero
    covariances = (x.T @ x)[None]
    expected = kronecker._eigenvectors(covariances, 1024)
    eigh = torch.linalg.eigh

    def picky(matrix):
        if matrix.dtype == torch.float32:
            raise torch.linalg.LinAlgError("the algorithm failed to converge")
        return eigh(matrix)

    monkeypatch.setattr(torch.linalg, "eigh", picky)
    found = kronecker._eigenvectors(covariances, 1024)
    assert found.dtype == torch.float32
    assert torch.allclose(found[:, :5], expected[:, :5], atol=1e-5)
    assert torch.allclose(found.T @ found, torch.eye(12), atol=1e-5)
