"""Whole models and single layers through the layerwise engine: exact, in float32 and in bfloat16, in any batches."""

import copy
import gc
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

import eigentrace as et
from eigentrace.data.batch import map_tensors, select
from eigentrace.errors import UnsupportedError
from eigentrace.projection import Job
from eigentrace.projection import choose as choosing
from eigentrace.projection.directions import DenseDirections
from eigentrace.projection.engine import Compute
from tests.helpers.checking import (
    Net,
    check,
    compare,
    gap,
    numbers,
    one_at_a_time,
    run,
    some_directions,
    wavy,
    weight,
)
from tests.helpers.expecting import expect_mentions, refused

# Whole models: each a task in float32 and one batch of seven examples.


class SmallCNN(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Conv2d(1, 3, 3, stride=2, padding=1), nn.ReLU(inplace=True), nn.Conv2d(3, 4, 3, groups=1), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.5), nn.Linear(4, 3),
        )  # fmt: skip


class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += x
        return self.relu(out)


class ResNet(nn.Sequential):
    """With statistics that do something, and ReLU in place as torchvision has it."""

    def __init__(self):
        super().__init__(
            nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True),
            Block(4), nn.MaxPool2d(2), Block(4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3),
        )  # fmt: skip
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                nn.init.normal_(module.running_mean, std=0.3)
                nn.init.uniform_(module.running_var, 0.5, 2)
                nn.init.uniform_(module.weight, 0.5, 2)


class ViT(nn.Module):
    """Patches by convolution, a class token, positions, attention in one matrix."""

    def __init__(self, width=6):
        super().__init__()
        self.patches = nn.Conv2d(1, width, 4, stride=4)
        self.cls = weight(1, 1, width)
        self.positions = weight(1, 5, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.scale = nn.Parameter(torch.full((width,), 0.5))
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        h = self.patches(x).flatten(2).transpose(1, 2)
        h = torch.cat([self.cls.expand(len(x), -1, -1), h], dim=1) + self.positions
        q, k, v = self.qkv(self.norm1(h)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        h = h + self.scale * self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        h = h + self.down(F.gelu(self.up(self.norm2(h))))
        return self.head(h[:, 0])


class LoRALinear(nn.Module):
    """A frozen layer and a low-rank one beside it, as in PEFT; `merged` adds the matrices first, as DoRA does."""

    def __init__(self, base, rank=2, merged=False):
        super().__init__()
        self.base, self.merged = base.requires_grad_(False), merged
        self.lora_A = nn.Linear(base.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False)
        self.magnitude = nn.Parameter(torch.rand(base.out_features) + 0.5)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        if not self.merged:
            return self.base(x) + self.lora_B(self.lora_A(self.dropout(x))) * 2.0
        matrix = self.base.weight + 2.0 * self.lora_B.weight @ self.lora_A.weight
        return F.linear(x, (self.magnitude / matrix.norm(dim=1).detach())[:, None] * matrix, self.base.bias)


class LoRA(nn.Module):
    def __init__(self, merged=False):
        super().__init__()
        self.embed = nn.Embedding(20, 6).requires_grad_(False)
        self.up = LoRALinear(nn.Linear(6, 8), merged=merged)
        self.down = LoRALinear(nn.Linear(8, 6), merged=merged)
        self.norm = nn.LayerNorm(6).requires_grad_(False)
        self.head = nn.Linear(6, 3)
        if not merged:
            del self.up.magnitude, self.down.magnitude

    def forward(self, tokens):
        h = self.embed(tokens)
        return self.head((h + self.down(F.silu(self.up(self.norm(h))))).mean(dim=1))


def images(model):
    return et.classification(model), (torch.randn(7, 1, 8, 8), torch.randint(0, 3, (7,)))


def sentences(model):
    return et.classification(model), (torch.randint(0, 20, (7, 5)), torch.randint(0, 3, (7,)))


def hugging_face(name):
    """Take a model of the Hugging Face tests, or a Llama."""
    from tests.helpers.hugging_face import MAKERS, padded, transformers

    if name != "llama":
        make, model, batch = MAKERS[name]()
        return make(model), batch
    config = transformers.LlamaConfig(
        vocab_size=20, hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=16, bos_token_id=0, eos_token_id=1, pad_token_id=2,
    )  # fmt: skip
    ids, mask = padded(7)
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    return et.causal_lm(transformers.LlamaForCausalLM(config)), batch


MODELS = {
    "cnn": lambda: images(SmallCNN()),
    "resnet": lambda: images(ResNet()),
    "vit": lambda: images(ViT()),
    "lora": lambda: sentences(LoRA()),
    "merged lora": lambda: sentences(LoRA(merged=True)),
    **{f"hf {name}": lambda name=name: hugging_face(name) for name in ("bert", "gpt2", "t5", "marian", "vit", "llama")},
}


@pytest.fixture(params=MODELS)
def whole(request):
    return MODELS[request.param]()


def cut(batch, *sizes):
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [select(batch, slice(a, a + n), 7) for a, n in zip(starts, sizes, strict=True)]


def in_double(task, batch):
    """Rebuild a task and its batch in float64: the oracle reads the model's own parameters."""
    model = copy.deepcopy(task.model).double()
    other = et.Task(model, outputs=task._outputs, output_loss=task._output_loss)
    return other, map_tensors(lambda t: t.double() if t.is_floating_point() else t, batch)


@pytest.mark.parametrize("norms", [True, False])
def test_whole_models_exactly(whole, norms):
    task, batch = in_double(*whole)
    # T5 has norms in float32 whatever its type, which forward mode, serving its attention bias, does not round alike.
    compare(task, cut(batch, 3, 1, 3), norms=norms, without=None, tol=1e-8)
    assert all("relative_attention_bias" in name for name in task.coverage.without_rule), str(task.coverage)


def test_whole_models_have_rules_for_everything(whole):
    task, batch = whole
    run(task, [batch], some_directions(task.layout))
    assert task.coverage.without_rule == {}, str(task.coverage)


def test_whole_models_in_float32_in_any_batches(whole):
    task, batch = whole
    directions = some_directions(task.layout)
    forward, _, losses = run(task, [batch], directions, False, Compute(engine="forward"))
    _, squares, _ = run(task, [batch], directions, True, Compute(engine="reverse"))
    for sizes in [(7,), (1, 4, 2)]:
        found = run(task, cut(batch, *sizes), directions)
        for a, b in zip(found, (forward, squares, losses), strict=True):
            assert gap(a, b) < 1e-5


def test_whole_models_in_bfloat16_in_any_batches(whole):
    task, batch = whole
    directions = some_directions(task.layout)
    low = Compute(engine="layerwise", precision="bf16")
    # Against ordinary gradients of the same rounded model: a ReLU may switch between float32 and bfloat16.
    expected = run(task, [batch], directions, True, replace(low, engine="reverse"))
    wholly = run(task, [batch], directions, True, low)
    for sizes in [(7,), (1, 4, 2)]:
        found = run(task, cut(batch, *sizes), directions, True, low)
        assert all(off(a, b) < 2e-2 for a, b in zip(found, expected, strict=True))
        assert all(off(a, b) < 5e-3 for a, b in zip(found, wholly, strict=True))


def off(found, expected):
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("name", ["resnet", "vit", "hf marian"])
def test_the_measurement_has_an_engine_too(name):
    task, batch = in_double(*MODELS[name]())
    asked = et.Task(
        task.model, lambda m, b: task._loss(m, b) * 0, measurement=lambda m, b: task._loss(m, b).square() + 1
    )
    directions = some_directions(asked.layout)
    gradients, losses = one_at_a_time(task, [batch])
    with asked.session():
        job = Job.of(asked, "measurements", directions, True, Compute(engine="layerwise"))
        ((_, found),) = choosing.project(job, et.data.as_data([batch]))
    # Some of the models compute their loss in float32, whatever their type.
    assert gap(found.features, 2 * losses[:, None] * gradients @ directions.dense(0, directions.count).T) < 1e-5
    assert gap(found.losses, losses.square() + 1) < 1e-5


# Layers without a rule: they go by another engine, alone.


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

    def forward(self, x):
        flat = x.reshape(-1, 3)
        choice = flat.argmax(dim=-1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            chosen = (choice == number).nonzero().squeeze(1)
            out = out.index_add(0, chosen, expert(flat[chosen]))
        return out.reshape(x.shape)


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, gradient):
        x, w = ctx.saved_tensors
        return gradient * w, (gradient * x).flatten(0, -2).sum(dim=0)


def attention(**options):
    return Net(lambda self, x: self.mha(x, x, x, need_weights=False)[0], mha=nn.MultiheadAttention(3, 1, **options))


WITHOUT = {
    "lstm": lambda: Net(lambda self, x: self.rnn(x)[0], rnn=nn.LSTM(3, 3, batch_first=True)),
    "two-sided lstm": lambda: Net(
        lambda self, x: self.rnn(x)[0][..., :3], rnn=nn.LSTM(3, 2, 2, batch_first=True, bidirectional=True)
    ),
    "gru": lambda: Net(lambda self, x: self.rnn(x)[0], rnn=nn.GRU(3, 3, batch_first=True)),
    "lstm, tokens first": lambda: Net(
        lambda self, x: self.rnn(x.transpose(0, 1))[0].transpose(0, 1), rnn=nn.LSTM(3, 3)
    ),
    "attention": lambda: attention(batch_first=True),
    "bilinear": lambda: nn.Bilinear(3, 3, 3),
    "prelu": lambda: nn.PReLU(2),
    "instance norm": lambda: nn.InstanceNorm1d(2, affine=True),
    "einsum": lambda: Net(lambda self, x: torch.einsum("btd,de->bte", x, self.w), w=weight(3, 3)),
    "own function": lambda: Net(lambda self, x: Scaled.apply(x, self.w), w=weight(3)),
    "experts": Experts,
}


@pytest.mark.parametrize("norms", [True, False])
@pytest.mark.parametrize("name", WITHOUT)
def test_others_serve_what_has_no_rule_and_only_that(name, norms):
    layer = WITHOUT[name]()

    def forward(self, x):
        h = self.before(x).tanh()
        return self.after(self.layer(h, h) if name == "bilinear" else self.layer(h))

    model = Net(forward, before=nn.Linear(3, 3), layer=layer, after=nn.Linear(3, 2))
    without = {f"layer.{n}" for n, _ in layer.named_parameters()}
    task = check(model, [(numbers(n, 2, 3),) for n in (4, 1, 3)], without=without, norms=norms)
    assert set(task.coverage.without_rule) == without
    expect_mentions(str(task.coverage), [f"{len(without)} of them", next(iter(task.coverage.without_rule))])
    assert task.coverage.fraction == 1


@pytest.mark.parametrize(
    "directions", [lambda layout: DenseDirections(torch.randn(1, layout.numel), layout)], ids=["one direction"]
)
@pytest.mark.parametrize("memory", [1, 2_000, None])
def test_others_serve_within_any_memory(memory, directions):
    model = Net(lambda self, x: self.b(self.r(self.a(x))), a=nn.Linear(3, 2), r=nn.PReLU(2), b=nn.Linear(2, 2))
    compute = Compute(engine="layerwise", memory=memory)
    for norms in (True, False):
        check(model, [(numbers(5, 3),)], directions=directions, norms=norms, compute=compute, without={"r.weight"})


def test_encoder_layer_with_its_own_attention():
    model = Net(
        lambda self, x: self.head(self.layer(x)),
        layer=nn.TransformerEncoderLayer(4, 2, 6, batch_first=True),
        head=nn.Linear(4, 2),
    )
    without = {f"layer.self_attn.{n}" for n, _ in model.layer.self_attn.named_parameters()}
    check(model, [(numbers(n, 3, 4),) for n in (4, 2)], without=without)


def test_a_model_without_any_rule_says_so():
    model = Net(lambda self, x: self.r(x), r=nn.PReLU())
    with refused(UnsupportedError, "layerwise", "prelu"):
        check(model, [(numbers(3, 2),)])
    check(model, [(numbers(3, 2),)], compute=Compute(), without={"r.weight"})


# Parts of a model.


@pytest.mark.parametrize("params", ["last layer", "all", "*.bias", "0.*", ["1.*", "3.weight"], "top 20%"], ids=str)
def test_some_of_the_parameters(params):
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 2)).double()
    model[1].requires_grad_(False)
    task = check(model, [(numbers(n, 2, 3),) for n in (4, 1, 2)], params=params)
    assert [p.requires_grad for p in model.parameters()] == [True, True, False, False, True, True]
    assert (task.coverage.fraction == 1) == (params == "all")


@pytest.mark.parametrize("where", [0, 1, 2])
def test_frozen_parts(where):
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)).double()
    model[where].requires_grad_(False)
    check(model, [(numbers(n, 3),) for n in (4, 1)])


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_batches_of_any_size(size):
    model = Net(
        lambda self, x: self.b(self.n(self.a(x)).tanh()), a=nn.Linear(3, 4), n=nn.LayerNorm(4), b=nn.Linear(4, 2)
    )
    check(model, [(numbers(size, 2, 3),), (numbers(1, 2, 3),), (numbers(7, 2, 3),)])


def test_a_single_example():
    check(Net(lambda self, x: self.a(x.reshape(-1, 3)).reshape(len(x), -1), a=nn.Linear(3, 2)), [(numbers(1, 4, 3),)])


# Surprises.


def with_autocast(self, x):
    with torch.autocast("cpu", torch.bfloat16):
        h = self.n(self.b(self.c(self.a(x)[..., None]).mean(-1)))
    return self.d(h.to(x.dtype))


def autocasting():
    layers = {"a": nn.Linear(3, 4), "c": nn.Conv1d(4, 4, 1), "b": nn.Linear(4, 4), "n": nn.LayerNorm(4)}
    return Net(with_autocast, **layers, d=nn.Linear(4, 2))


def test_autocast_inside_a_model():
    model = autocasting().float()
    data = [(torch.randn(n, 3),) for n in (4, 2)]
    check(model, data, tol=2e-2)


def test_autocast_inside_a_model_in_double():
    # Autocast leaves float64 alone, and so must we.
    check(autocasting(), [(numbers(n, 3),) for n in (4, 2)])


def test_bfloat16_asked_of_a_model_in_double():
    task = et.Task(Net(lambda self, x: self.b(self.a(x).tanh()), a=nn.Linear(3, 4), b=nn.Linear(4, 2)), wavy)
    directions, data = some_directions(task.layout), [(numbers(4, 3),)]
    gradients, _ = one_at_a_time(task, data)
    features, *_ = run(task, data, directions, True, Compute(engine="layerwise", precision="bf16"))
    expected = gradients @ directions.dense(0, directions.count).T
    assert ((features - expected).norm(dim=1) / expected.norm(dim=1)).max() < 2e-2


def test_parameters_in_bfloat16():
    model = nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 2)).bfloat16()
    data = [(torch.randn(n, 4, 3, dtype=torch.bfloat16),) for n in (4, 2)]
    check(model, data, tol=2e-2)


def test_parameters_of_two_types():
    def forward(self, x):
        return self.b(self.a(x.float()).tanh().double())

    model = Net(forward, a=nn.Linear(3, 4), b=nn.Linear(4, 2))
    model.a.float()
    check(model, [(numbers(n, 3),) for n in (4, 2)], tol=1e-6)


PARAMETRISED = {
    "weight norm": parametrizations.weight_norm,
    "spectral norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
}


@pytest.mark.parametrize("kind", PARAMETRISED)
@pytest.mark.parametrize(
    "layer", [lambda: nn.Linear(3, 4), lambda: nn.Conv1d(3, 4, 2, padding=1)], ids=["linear", "conv"]
)
def test_parametrised_weights(kind, layer):
    layer = PARAMETRISED[kind](layer())
    model = Net(lambda self, x: self.b(self.a(x).tanh().flatten(1)), a=layer, b=nn.LazyLinear(2))
    shape = (3,) if layer.weight.ndim == 2 else (3, 3)
    model(numbers(1, *shape))
    check(model, [(numbers(n, *shape),) for n in (4, 1)])


def test_a_gradient_taken_inside_the_model():
    # Forces are gradients of an energy: hooks must not take that pass for the one that counts.
    def loss(model, batch):
        with torch.enable_grad():
            x = batch[0].detach().requires_grad_()
            energy = model.b(model.a(x).tanh()).sum()
            (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return force.square().sum(dim=1)

    model = Net(None, a=nn.Linear(3, 4), b=nn.Linear(4, 1))
    check(model, [(numbers(n, 3),) for n in (4, 2)], loss=loss, compute=Compute(), without=None)


# The model as it was, and nothing left behind.


def state(model):
    hooks = [m._forward_hooks or m._backward_hooks or m._forward_pre_hooks for m in model.modules()]
    flags = [(p.requires_grad, p.grad, p._version, p.data_ptr()) for p in model.parameters()]
    return any(hooks), flags, [m.training for m in model.modules()], [sorted(vars(m)) for m in model.modules()]


@pytest.mark.parametrize("name", ["resnet", "vit", "merged lora"])
def test_the_model_is_left_as_found(name):
    task, batch = MODELS[name]()
    task.model.train()
    for module in list(task.model.modules())[1:3]:
        module.eval()
    before, numbers_before = state(task.model), copy.deepcopy(task.model.state_dict())
    x, version = batch[0], batch[0]._version
    features, squares, losses = run(task, [batch], some_directions(task.layout))
    assert state(task.model) == before
    assert all(torch.equal(value, numbers_before[key]) for key, value in task.model.state_dict().items())
    assert (x._version, x.requires_grad, x.grad) == (version, False, None)
    assert not any(t.requires_grad or t.grad_fn for t in (features, squares, losses))
    task.model.train()
    F.cross_entropy(task.model(batch[0]), batch[1]).backward()  # it can be trained on
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("name", ["resnet", "vit", "merged lora", "hf gpt2"])
def test_nothing_is_left_in_memory(name):
    task, batch = MODELS[name]()
    directions = some_directions(task.layout)
    gc.collect()
    gc.disable()
    try:
        counts = []
        with task.session():
            job = Job.of(task, "losses", directions, True, Compute(engine="layerwise"))
            for _, found in choosing.project(job, et.data.as_data([batch] * 6)):
                del found
                counts.append(sum(issubclass(type(item), torch.Tensor) for item in gc.get_objects()))
    finally:
        gc.enable()
    assert counts[-1] <= counts[1], counts


def test_no_whole_gradient_of_a_batch_is_kept():
    # 64 examples of a 256 × 256 matrix are 16 MiB of gradients; a budget of 1 MiB must do.
    model = Net(lambda self, x: self.b(self.a(x).tanh()), a=nn.Linear(256, 256), b=nn.Linear(256, 2)).float()
    task = et.Task(model, wavy)
    directions = DenseDirections(torch.randn(3, task.layout.numel), task.layout)
    largest = 0

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                largest = max(largest, out.untyped_storage().nbytes())
            return out

    data, compute = [(torch.randn(64, 4, 256),)], Compute(engine="layerwise", memory=2**20)
    own = max(directions.matrix.nbytes, 3 * 64 * 4 * 256 * 4)
    with Largest():
        run(task, data, directions, True, compute)
    assert largest <= own + 2**20


@pytest.mark.parametrize("engine", ["layerwise", "reverse", "auto"])
@pytest.mark.parametrize("scale", [20, 60, 100, 200])
def test_a_model_that_fits_its_data_well_raises_no_alarm_in_bfloat16(scale, engine):
    # Losses of 1e-3 and less change by a tenth when logits of 60 are rounded to bfloat16 in another order.
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5))
    x = torch.randn(600, 20)
    with torch.no_grad():
        best = model(x).topk(2, dim=1)
        sure = best.values[:, 0] - best.values[:, 1] > 0.12
        for p in model[4].parameters():
            p.mul_(scale)
    x, y = x[sure], best.indices[sure, 0]
    task = et.classification(model)
    batches = [(x[i : i + 8], y[i : i + 8]) for i in range(0, 40, 8)]
    features, *_ = run(task, batches, some_directions(task.layout), True, Compute(engine=engine, precision="bf16"))
    assert features.isfinite().all()
