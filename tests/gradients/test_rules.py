"""Every rule over random shapes and arguments, against ordinary gradients; none may leave its parameters to others."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.helpers.checking import Net, check, numbers, weight

any_shape = settings(max_examples=20, deadline=None, derandomize=True, database=None)
small = st.integers(1, 3)
SIZES = (3, 1, 2)  # of batches


def covered(layer, make_input, sizes=SIZES, **options):
    """Check a layer behind a scale, through which gradients must flow on, and in front of which nothing is learned."""
    torch.manual_seed(0)
    model = Net(lambda self, x: self.layer(x * self.scale), layer=layer, scale=weight())
    return check(model, [(make_input(n),) for n in sizes], **options)


def looked_up(layer, make_batch, sizes=SIZES, **options):
    torch.manual_seed(0)
    return check(Net(lambda self, *x: self.layer(*x), layer=layer), [make_batch(n) for n in sizes], **options)


@any_shape
@given(st.lists(small, max_size=3), small, small, st.booleans())
def test_linear(leading, inputs, outputs, bias):
    covered(nn.Linear(inputs, outputs, bias), lambda n: numbers(n, *leading, inputs))


@any_shape
@given(st.lists(small, min_size=1, max_size=2), small, small)
def test_linear_by_the_module_of_hugging_face(leading, inputs, outputs):
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D
    layer = conv1d(outputs, inputs)
    nn.init.normal_(layer.bias)
    covered(layer, lambda n: numbers(n, *leading, inputs))


def kernel_arguments(draw, dims):
    """Kernel, stride and dilation, each as one number for all dimensions or as one for each."""
    each = st.lists(small, min_size=dims, max_size=dims).map(tuple)
    steps = st.lists(st.integers(1, 2), min_size=dims, max_size=dims).map(tuple)
    one_or_each = st.one_of(st.integers(1, 2), steps)
    return draw(st.one_of(small, each)), draw(one_or_each), draw(one_or_each)


@pytest.mark.filterwarnings("ignore:Using padding='same'")  # torch copies the input; what it computes is the same
@pytest.mark.parametrize("dims", [1, 2, 3])
@any_shape
@given(st.data())
def test_convolution(dims, data):
    draw = data.draw
    kernel, stride, dilation = kernel_arguments(draw, dims)
    padding = draw(
        st.one_of(st.integers(0, 2), st.tuples(*[st.integers(0, 2)] * dims), st.just("valid"), st.just("same"))
    )
    layer = [nn.Conv1d, nn.Conv2d, nn.Conv3d][dims - 1](
        (groups := draw(small)) * draw(st.integers(1, 2)),
        groups * draw(st.integers(1, 2)),
        kernel,
        stride=1 if padding == "same" else stride,
        padding=padding,
        dilation=dilation,
        groups=groups,
        bias=draw(st.booleans()),
        padding_mode=draw(st.sampled_from(["zeros", "circular", "reflect", "replicate"] if dims < 3 else ["zeros"])),
    )
    sides = [draw(st.integers(5, 6)) for _ in range(dims)]
    covered(layer, lambda n: numbers(n, layer.in_channels, *sides), sizes=(3, 1))


@pytest.mark.parametrize("dims", [1, 2, 3])
@any_shape
@given(st.data())
def test_transposed_convolution(dims, data):
    draw = data.draw
    kernel, stride, dilation = kernel_arguments(draw, dims)
    each = [max(pair) for pair in zip(_each(stride, dims), _each(dilation, dims), strict=True)]
    layer = [nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d][dims - 1](
        (groups := draw(small)) * draw(st.integers(1, 2)),
        groups * draw(st.integers(1, 2)),
        kernel,
        stride=stride,
        padding=draw(st.integers(0, 1)),
        output_padding=tuple(draw(st.integers(0, largest - 1)) for largest in each),
        dilation=dilation,
        groups=groups,
        bias=draw(st.booleans()),
    )
    sides = [draw(st.integers(3, 4)) for _ in range(dims)]
    covered(layer, lambda n: numbers(n, layer.in_channels, *sides), sizes=(3, 1))


def _each(value, dims):
    return value if isinstance(value, tuple) else (value,) * dims


def test_depthwise_convolution_with_several_outputs_per_channel():
    covered(nn.Conv2d(3, 6, 3, groups=3, padding=1), lambda n: numbers(n, 3, 4, 5))


def test_output_size_of_a_transposed_convolution_is_asked_for():
    layer = nn.ConvTranspose2d(2, 3, 3, stride=2, padding=1)
    model = Net(lambda self, x: self.layer(x, output_size=(6, 5)), layer=layer)
    check(model, [(numbers(n, 2, 3, 3),) for n in SIZES])


@any_shape
@given(st.data())
def test_embedding(data):
    draw = data.draw
    tokens, width, leading = draw(st.integers(2, 6)), draw(small), draw(st.lists(small, max_size=2))
    padding = draw(st.one_of(st.none(), st.integers(-tokens, tokens - 1)))
    layer = nn.Embedding(tokens, width, padding_idx=padding, sparse=draw(st.booleans()))
    nn.init.normal_(layer.weight)  # the padding row too
    kind = draw(st.sampled_from([torch.int64, torch.int32]))
    looked_up(layer, lambda n: (torch.randint(0, tokens, (n, *leading), dtype=kind),), sizes=(4, 1, 3))


class OwnBag(nn.EmbeddingBag):
    """A layer that comes by as torch's function: its forward is not replaced by a lookup and a sum."""

    def forward(self, input, offsets=None, per_sample_weights=None):
        return super().forward(input, offsets, per_sample_weights)


@any_shape
@given(st.data())
def test_embedding_bag(data):
    draw = data.draw
    tokens, width, length = draw(st.integers(2, 6)), draw(small), draw(st.integers(1, 4))
    mode, weighted = draw(st.sampled_from([("sum", False), ("sum", True), ("mean", False)]))
    padding = draw(st.one_of(st.none(), st.integers(-tokens, tokens - 1)))
    kind = draw(st.sampled_from([nn.EmbeddingBag, OwnBag]))
    layer = kind(tokens, width, mode=mode, padding_idx=padding, sparse=draw(st.booleans()))
    nn.init.normal_(layer.weight)

    def batch(n):
        bags = torch.randint(0, tokens, (n, length))
        return (bags, None, numbers(n, length)) if weighted else (bags,)

    looked_up(layer, batch, sizes=(4, 1, 3))


@any_shape
@given(st.lists(small, max_size=2), st.lists(st.integers(2, 3), min_size=1, max_size=3), st.booleans(), st.booleans())
def test_layer_norm(leading, shape, affine, bias):
    layer = nn.LayerNorm(shape, elementwise_affine=affine, bias=bias, eps=1e-3)
    covered(layer, lambda n: numbers(n, *leading, *shape))


@any_shape
@given(st.lists(small, max_size=2), st.lists(st.integers(2, 3), min_size=1, max_size=2), st.sampled_from([None, 1e-2]))
def test_rms_norm(leading, shape, eps):
    covered(nn.RMSNorm(shape, eps=eps), lambda n: numbers(n, *leading, *shape))


@pytest.mark.parametrize("name", ["t5.modeling_t5.T5LayerNorm", "llama.modeling_llama.LlamaRMSNorm"])
def test_rms_norms_of_hugging_face(name):
    room, _, kind = name.rpartition(".")
    layer = getattr(pytest.importorskip(f"transformers.models.{room}"), kind)(4)
    nn.init.normal_(layer.weight)
    covered(layer, lambda n: numbers(n, 3, 4))


@any_shape
@given(st.integers(1, 3), st.integers(1, 3), st.lists(st.integers(2, 3), max_size=3))
def test_group_norm(groups, each, spatial):
    covered(nn.GroupNorm(groups, groups * each), lambda n: numbers(n, groups * each, *spatial, 2))


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("spatial", [(), (3,), (2, 3), (2, 1, 3)])
def test_batch_norm_in_eval(spatial, affine):
    layer = [nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d][len(spatial)](3, affine=affine)
    layer.running_mean.normal_()
    layer.running_var.uniform_(0.5, 2)
    covered(layer, lambda n: numbers(n, 3, *spatial))


# A bare parameter of shape (2, 3) and tokens of shape (B, 2, 3).
BARE = {
    "class token by expand": lambda p, x: torch.cat([p[:1].expand(len(x), -1, -1), x], dim=1),
    "class token by expand_as": lambda p, x: torch.cat([p.expand_as(x), x], dim=1),
    "class token by repeat": lambda p, x: torch.cat([p[None].repeat(len(x), 1, 1), x], dim=1),
    "class token by broadcast_to": lambda p, x: torch.cat([torch.broadcast_to(p, x.shape), x], dim=2),
    "class token first along the sequence": lambda p, x: torch.cat(
        [p[:, None].expand(-1, len(x), -1), x.transpose(0, 1)]
    ).transpose(0, 1),
    "positions added": lambda p, x: x + p,
    "positions sliced": lambda p, x: x[:, :1] + p[None][:, :1],
    "positions first": lambda p, x: p + x,
    "positions times a number": lambda p, x: torch.add(x, p, alpha=2.5),
    "subtracted": lambda p, x: x - p,
    "subtracted from": lambda p, x: torch.sub(p, x, alpha=0.5),
    "scale": lambda p, x: x * p,
    "scale along the batch's other side": lambda p, x: (x.permute(1, 2, 0) * p[..., None]).permute(2, 0, 1),
    "scale of one number": lambda p, x: x * p[0, 0],
    "scale that adds dimensions": lambda p, x: x[:, :1, :, None] * p[:, 0],
    "divided": lambda p, x: x / p,
    "divided by something": lambda p, x: p / (x + 9),
    "mask token": lambda p, x: torch.where(x > 0, p, x),
    "mask token the other way round": lambda p, x: torch.where(x > 0, x, p[0]),
    "mask token by the method": lambda p, x: x.where(x > 0, p),
    "both from parameters": lambda p, x: torch.where(x > 0, p, p * 2),
    "one plus": lambda p, x: (1 + p) * x,
    "cast": lambda p, x: x * p.to(torch.float64).contiguous(),
    "exponential": lambda p, x: x * p.exp(),
    "penalty": lambda p, x: x + p.square().sum(),
    "matrix on the right": lambda p, x: x @ p.reshape(3, 2),
    "matrix transposed": lambda p, x: x @ p.t(),
    "matrix by T": lambda p, x: F.linear(x, p.reshape(3, 2).T),
    "matrix by permute": lambda p, x: torch.matmul(x, p.permute(1, 0)),
    "matrix turned twice": lambda p, x: F.linear(x, p.T.contiguous().transpose(0, 1)),
    "matrix in two pieces": lambda p, x: torch.cat([F.linear(x, piece) for piece in p.chunk(2)], dim=-1),
    "matrix one by one": lambda p, x: torch.stack([F.linear(x, row[None]) for row in p.unbind()], dim=1),
    "matrix by keywords": lambda p, x: F.linear(input=x, weight=p, bias=p[:, 0]),
    "bias of one number": lambda p, x: F.linear(x, p, p[:1, 0]),
    "batched product": lambda p, x: torch.bmm(x, p.T.expand(len(x), 3, 2)),
    "addmm": lambda p, x: torch.addmm(p[:, 0], x[:, 0], p.T),
    "looked up": lambda p, x: F.embedding((x > 0).long(), p),
    "looked up in the transposed": lambda p, x: F.embedding((x > 0).long(), p.T),
    "convolution": lambda p, x: F.conv1d(x, p[None]),
    "scale and shift of a norm": lambda p, x: F.layer_norm(x, (2, 3), p, 1 - p),
    "attention bias of all heads": lambda p, x: (x + (p @ p.T)[:, :1]).softmax(dim=-1),
    "normalised": lambda p, x: F.linear(x, F.normalize(p, dim=1)),
    "half of it constant": lambda p, x: x * torch.cat([p[:1].detach(), p[1:]]),
    "resized as positions are": lambda p, x: x * F.interpolate(p[None, None], (4, 6), mode="bicubic")[0, 0, :2, :3],
}


@pytest.mark.parametrize("use", BARE)
def test_bare_parameters(use):
    model = Net(lambda self, x: BARE[use](self.p, x * self.scale), p=weight(2, 3), scale=weight())
    check(model, [(numbers(n, 2, 3),) for n in (4, 1, 2)])


# What is rare enough to have no rule: right numbers, by another engine, for this parameter only.
REFUSED = {
    "pow": lambda p, x: x.abs().add(1) ** p,
    "einsum": lambda p, x: torch.einsum("btd,ed->bte", x, p),
    "left of the examples": lambda p, x: p @ x.transpose(1, 2),
    "vector": lambda p, x: x @ p[0],
    "stacked": lambda p, x: x + torch.stack([p] * len(x)),
    "looked up by index": lambda p, x: x + p[(x[:, :, 0] > 0).long()],
    "written into": lambda p, x: x * _with_zero(p),
    "beta": lambda p, x: torch.addmm(p[:, 0], x[:, 0], p.T, beta=0.5),
    "filled in": lambda p, x: x.masked_fill(x > 0, p[0, 0]),
    "rounded": lambda p, x: x + p + torch.div(x, p, rounding_mode="floor"),
    "complex": lambda p, x: torch.fft.ifft(torch.fft.fft(x) * torch.fft.fft(p)).real,
}


def _with_zero(p):
    copy = p.clone()
    copy[0] = 0
    return copy


@pytest.mark.parametrize("use", REFUSED)
def test_uses_without_a_rule(use):
    model = Net(lambda self, x: REFUSED[use](self.p, x * self.scale), p=weight(2, 3), scale=weight())
    check(model, [(numbers(n, 2, 3),) for n in (4, 1, 2)], without={"p"})


def test_frequencies_scale_gradients_of_one_example_only():
    tokens = torch.tensor([[0, 0, 1], [0, 2, 2], [1, 1, 1], [2, 0, 1]])
    layers = {"e": nn.Embedding(3, 2, scale_grad_by_freq=True), "a": nn.Linear(2, 2)}
    # One example at a time: in a batch, the frequencies are those of all its examples, which is refused.
    check(Net(lambda self, x: self.a(self.e(x)), **layers), [(one[None],) for one in tokens], without={"e.weight"})
