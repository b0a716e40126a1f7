"""Hugging Face models, built from small configs without any download, through every path with default attention."""

import pytest
import torch
from torch import Tensor

import eigentrace as et
from eigentrace.curvature.operator import Curvature
from eigentrace.data import as_data
from eigentrace.projection import Job, project
from eigentrace.projection.directions import DenseDirections
from eigentrace.projection.forward import forward
from eigentrace.projection.reverse import one_by_one
from tests.helpers.hugging_face import MAKERS, bert, gpt2, marian, t5, transformers


@pytest.fixture(params=MAKERS)
def case(request):
    make, model, batch = MAKERS[request.param]()
    return make(model.double(), l2=0.1), {k: t.double() if t.is_floating_point() else t for k, t in batch.items()}


def parts(batch: dict[str, Tensor], *sizes: int) -> list[dict[str, Tensor]]:
    return [
        dict(zip(batch, piece, strict=True)) for piece in zip(*(t.split(sizes) for t in batch.values()), strict=True)
    ]


def own_loss(task, batch) -> Tensor:
    """Ask the model for its own loss, one example at a time, and undo its mean over tokens."""
    losses = []
    with task.session():
        for i in range(7):
            one = {key: t[i : i + 1] for key, t in batch.items()}
            loss, labels = task.model(**one).loss, one["labels"]
            if labels.ndim == 2:
                shifted = (
                    labels
                    if hasattr(task.model, "get_encoder") and task.model.config.is_encoder_decoder
                    else labels[:, 1:]
                )
                loss = loss * (shifted != -100).sum()
            losses.append(loss)
    return torch.stack(losses).double()


def test_loss_is_the_models_own_summed_over_tokens(case):
    task, batch = case
    found = et.Loss().fit(task, [batch]).self_influence([batch])
    assert torch.allclose(found, own_loss(task, batch), rtol=1e-5)  # the models compute theirs in float32


def test_second_order_matches_finite_differences(case):
    task, batch = case
    parts = {name: torch.randn_like(value) for name, value in task.params.items()}
    for name in {"model.shared.weight", "model.decoder.embed_tokens.weight"} & parts.keys():
        parts[name][task.model.config.pad_token_id] = 0  # held constant, as in training
    v = task.layout.flatten(parts)
    v /= v.norm()

    def gradient(at):
        values = task.layout.unflatten(at)
        return task.layout.flatten(torch.func.grad(lambda p: task.losses(p, batch).sum())(values))

    # T5 computes its norms in float32 whatever the model's type, so a small step would difference rounding.
    step, tol = (1e-2, 1e-3) if "T5" in type(task.model).__name__ else (1e-4, 1e-5)
    with task.session():
        exact = Curvature(task, as_data([batch]), None).matvec(v) - 0.1 * v
        difference = (gradient(task.vector + step * v) - gradient(task.vector - step * v)) / (2 * step) / 7
    assert (exact - difference).norm() < tol * exact.norm()


def test_every_path_agrees(case):
    task, batch = case
    train, queries = parts(batch, 3, 3, 1), parts(batch, 2, 5)[:1]
    fitted = et.Arnoldi(steps=30, keep=7).fit(task, train)
    scores = fitted.influence(train, queries)
    own = fitted.self_influence(train)
    assert torch.allclose(scores.diagonal(), own[:2], rtol=1e-6)
    truncated = fitted.distill(tail=None)
    phi = truncated.features([batch])
    expected = (phi[:2] / truncated.spectrum.eigenvalues) @ phi.T
    assert torch.allclose(truncated.influence(train, queries), expected, rtol=1e-6, atol=1e-9)
    hessian = et.Arnoldi(steps=30, keep=3, curvature="hessian", tail=None).fit(task, train)
    assert hessian.self_influence(train).isfinite().all()
    assert et.TracIn().fit(task, train).influence(train, queries).shape == (2, 7)
    assert et.Lissa(depth=3).fit(task, train).influence(train, queries).isfinite().all()


def test_padding_does_not_matter(case):
    task, batch = case
    if "input_ids" not in batch:
        pytest.skip("images have no padding")
    pad = {"input_ids": 2, "attention_mask": 0, "labels": -100}
    longer = {key: torch.nn.functional.pad(t, (0, 2), value=pad[key]) if t.ndim == 2 else t for key, t in batch.items()}
    fitted = et.RandProj(5).fit(task, [batch])
    assert torch.allclose(fitted.features([batch]), fitted.features([longer]), rtol=1e-6, atol=1e-9)


def test_padding_embeddings_are_constant_in_every_engine():
    # Marian starts its decoder with the padding token, whose row takes no gradient in training. Forward mode alone
    # would move it: 2% off in the shared embedding.
    make, model, batch = marian()
    task = make(model.double())
    directions = DenseDirections(torch.randn(4, task.layout.numel, dtype=torch.float64), task.layout)
    with task.session():
        a, b = (engine(Job(task, task.losses, directions), batch, 7).features for engine in (forward, one_by_one))
    assert torch.allclose(a, b, rtol=1e-8)


def test_tied_weights_are_counted_once():
    make, model, batch = gpt2()
    task = make(model)
    assert model.lm_head.weight is model.transformer.wte.weight
    assert task.coverage.selected == task.coverage.total == sum(p.numel() for p in model.parameters())
    alias = make(model, params="lm_head.*")
    assert alias.layout.names == ("transformer.wte.weight",)
    assert et.RandProj(3).fit(alias, [batch]).features([batch]).shape == (7, 3)


def test_batch_encodings_and_mean_reduction():
    make, model, batch = gpt2()
    encoded = transformers.BatchEncoding(batch)
    total, mean = (
        et.Loss().fit(make(model, reduction=r), [encoded]).self_influence([encoded]) for r in ("sum", "mean")
    )
    assert torch.allclose(mean, total / (batch["labels"][:, 1:] != -100).sum(dim=1).clamp_min(1))


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize(
    ("family", "targets"), [(gpt2, ["c_attn", "c_fc"]), (bert, ["query", "value"]), (t5, ["q", "v", "wo"])]
)
def test_adapters_have_rules(family, targets, dora):
    peft = pytest.importorskip("peft")
    make, model, batch = family()
    config = peft.LoraConfig(
        r=3, target_modules=targets, lora_dropout=0.1, fan_in_fan_out=family is gpt2, use_dora=dora
    )
    model = peft.get_peft_model(model, config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)  # they start at zero, where half of the gradients are
    task = make(model.double())
    directions = DenseDirections(torch.randn(5, task.layout.numel, dtype=torch.float64), task.layout)
    with task.session():
        found, expected = (
            next(project(Job.of(task, "losses", directions, True, et.Compute(engine=engine)), as_data([batch])))[1]
            for engine in ("layerwise", "reverse")
        )
    assert torch.allclose(found.features, expected.features, rtol=1e-8)
    assert torch.allclose(found.squares(), expected.squares(), rtol=1e-8)
    assert not task.coverage.without_rule
