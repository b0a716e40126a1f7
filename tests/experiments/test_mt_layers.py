"""The training of the translation network, and its layers one by one: numbers mean what the pages say."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

import eigentrace as et
from experiments.shared.frame import main
from experiments.translation import mt_layers, mt_training
from experiments.translation.mt_layers import BLOCKS, by_arnoldi, by_projections
from experiments.translation.mt_retrieval import Draw, Question
from experiments.translation.mt_training import Watched
from experiments.translation.parts import mt_layers_page
from experiments.translation.parts.corpora import PAD
from experiments.translation.parts.mt_layers_page import (
    ARNOLDI,
    GAUSS_NEWTON,
    PLAIN,
    RAND_PROJ,
    SELECTIONS,
    cell_of,
)
from experiments.translation.parts.network import ALL, DECODER, EMBEDDING, ENCODER, LAST, PARAMETERS, Network, Size
from experiments.translation.parts.transformer import Recipe, held_out, make_transformer, train_transformer
from tests.helpers.token_pairs import token_pairs

TINY = Recipe(16, 2, 2, words=40, steps=8, tokens=100, warm_up=3)
KEPT = (2, 4, 8, 12)
SIZE = Size(TINY, steps=14, sample=8, product_batch=8, batch=16)
DRAW = Draw(16, 4, 2)
CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def few_directions():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mt_layers, "KEPT", KEPT)
        yield


@pytest.fixture(scope="module")
def pairs():
    return token_pairs(40, 8, words=40, shortest=3)


@pytest.fixture(scope="module")
def question(pairs, tmp_path_factory):
    model = make_transformer(TINY, CPU, 0)
    train_transformer(model, pairs, TINY, 0)
    network = Network(model.eval(), pairs, SIZE, tmp_path_factory.mktemp("cache") / "net.pt", {})
    return Question.of(network, DRAW)


@pytest.fixture(scope="module")
def of_all_layers(question):
    return by_arnoldi(question, ALL, ARNOLDI, 1)


def test_blocks_hold_every_parameter_once(question):
    task = question.network.task
    sizes = {layers: task(layers).layout.numel for layers in (ALL, *PARAMETERS)}
    for layers in SELECTIONS:
        assert sizes[layers] == sum(sizes[block] for block in BLOCKS[layers])
    names = [name for block in BLOCKS[ALL] for name in task(block).layout.names]
    assert sorted(names) == sorted(task(ALL).layout.names)
    assert set(task(LAST).layout.names) < set(task(DECODER).layout.names)


def test_one_fit_gives_the_scores_of_every_cut(question, of_all_layers):
    method = et.Arnoldi.as_published(14, 12, 8, seed=1, basis=et.Basis(dtype="bf16"), compile=False)
    data = question.ordered.data
    fitted = method.fit(question.network.task(ALL), mt_layers.Ordered.of(question.network.train, 8).data)
    for keep in KEPT:
        scores = question.ordered.back(fitted.distill(keep).self_influence(data))
        assert of_all_layers[cell_of(ALL, ARNOLDI, keep, 1)]["ap"] == pytest.approx(question.judged(scores)["ap"])
    squares = question.ordered.back(fitted.features(data))[:, :4] ** 2
    plain = of_all_layers[cell_of(ALL, PLAIN, 4, 1)]
    assert plain["mean_ap"] == pytest.approx(question.judged(squares.sum(axis=1))["mean_ap"])
    assert len(of_all_layers) == 2 * len(KEPT)


def test_directions_are_divided_among_the_blocks(of_all_layers):
    for keep in KEPT:
        cell = of_all_layers[cell_of(ALL, ARNOLDI, keep, 1)]
        assert sum(cell[f"share_{block}"] for block in (EMBEDDING, ENCODER, DECODER)) == pytest.approx(1)
        assert 0 < cell["positive"] <= keep
        assert abs(cell["smallest"]) <= abs(cell["largest"])


def test_gauss_newton_differs_in_the_matrix_only(question, of_all_layers, monkeypatch):
    made = []
    fit = et.Arnoldi.fit
    monkeypatch.setattr(et.Arnoldi, "fit", lambda self, *args: made.append(self) or fit(self, *args))
    found = by_arnoldi(question, ENCODER, GAUSS_NEWTON, 0)
    assert "share_encoder" not in found[cell_of(ENCODER, GAUSS_NEWTON, 4, 0)]
    by_arnoldi(question, ENCODER, ARNOLDI, 0)
    assert replace(made[0], curvature="hessian") == made[1]


def test_projections_of_blocks_add_up_to_those_of_all_layers(question, monkeypatch):
    found = by_projections(question, 2)
    assert set(found) == {cell_of(layers, RAND_PROJ, keep, 2) for layers in SELECTIONS for keep in KEPT}
    data, task = question.ordered.data, question.network.task(ALL)
    rows = torch.zeros(max(KEPT), task.layout.numel)
    for number, block in enumerate(BLOCKS[ALL]):
        part = question.network.task(block)
        drawn = et.RandProj(max(KEPT), seed=2 + mt_layers.PROJECTIONS * number).fit(part, data)
        for name in part.layout.names:
            rows[:, task.layout.span(name)] = drawn.blocks[0].directions.matrix[:, part.layout.span(name)]
    squares = (task_gradients(question) @ rows.T).double().square().numpy()
    expected = question.judged(squares[:, : KEPT[2]].mean(axis=1))["ap"]
    assert found[cell_of(ALL, RAND_PROJ, KEPT[2], 2)]["ap"] == pytest.approx(expected)


def task_gradients(question):
    """Return the gradient of every pair, one at a time."""
    task = question.network.task(ALL)
    model = question.network.model
    found = []
    for row in range(len(question.pairs)):
        batch = question.pairs.batch(np.array([row]))
        model.zero_grad()
        logits = model(batch[0], batch[1], batch[0] != PAD).flatten(0, 1)
        torch.nn.functional.cross_entropy(logits, batch[2].flatten(), ignore_index=PAD, reduction="sum").backward()
        found.append(torch.cat([dict(model.named_parameters())[name].grad.flatten() for name in task.layout.names]))
    model.zero_grad(set_to_none=True)
    return torch.stack(found)


def test_the_weights_of_the_lowest_loss_are_kept(pairs, tmp_path):
    model = make_transformer(TINY, CPU, 0)
    watched = Watched.of(model, 2, {"withheld": pairs}, lambda steps: tmp_path / f"{steps}.pt")
    kept, losses = {}, []

    def look(steps):
        watched.look(steps)
        if steps % 2 == 0:
            losses.append(held_out(model, pairs)["loss"])
            kept[steps] = model.embedding.weight.detach().clone()

    train_transformer(model, pairs, TINY, 0, after=look)
    assert watched.steps == [2, 4, 6, 8]
    assert watched.losses["withheld"] == losses
    assert watched.best == watched.steps[losses.index(min(losses))]
    assert [path.name for path in tmp_path.iterdir()] == [f"{watched.best}.pt"]
    weights = torch.load(tmp_path / f"{watched.best}.pt", weights_only=True)
    assert torch.equal(weights["embedding.weight"], kept[watched.best])
    shorter = make_transformer(TINY, CPU, 0)
    train_transformer(shorter, pairs, replace(TINY, steps=watched.best), 0)
    assert torch.equal(shorter.embedding.weight, kept[watched.best])


def test_a_small_training_is_found_by_the_other_experiments(tmp_path, monkeypatch):
    argv = ["--small", "--out", str(tmp_path), "--cache", str(tmp_path / "cache")]
    assert main(mt_training.EXPERIMENT, [*argv, "--parts", "dropout_0_1"]) == 0
    (records,) = json.loads((tmp_path / "data" / "mt_training_small.json").read_text()).values()
    (cell,) = records["trainings"]["cells"].values()
    assert cell["best"] in cell["steps"]
    assert cell["withheld_loss"] == min(cell["losses"]["withheld"])
    assert "dropout 0.1" in (tmp_path / "figures" / next((tmp_path / "figures").iterdir()).name).read_text()
    from experiments.translation.mt_retrieval import EXPERIMENT
    from experiments.translation.parts import network

    monkeypatch.setattr(network, "train_transformer", None)  # what is in the cache is not trained again
    monkeypatch.setattr(network, "SMALL", replace(network.SMALL, recipe=replace(network.SMALL_RECIPE, dropout=0.1)))
    assert main(EXPERIMENT, [*argv, "--parts", "bleu"]) == 0
    (records,) = json.loads((tmp_path / "data" / "mt_retrieval_small.json").read_text()).values()
    assert records["retrieval"]["cells"]["bleu"]["multi30k"] > 5


@pytest.mark.slow
def test_a_small_run_measures_every_layer(tmp_path, monkeypatch):
    monkeypatch.setattr(mt_layers, "KEPT", mt_layers_page.KEPT)
    argv = ["--small", "--out", str(tmp_path), "--cache", str(tmp_path / "cache")]
    parts = ["network", "all_0", "encoder_0", "gauss_newton_1", "proj_0", "proj_1"]
    assert main(mt_layers.EXPERIMENT, [*argv, "--parts", ",".join(parts)]) == 0
    (records,) = json.loads((tmp_path / "data" / "mt_layers_small.json").read_text()).values()
    cells = records["layers"]["cells"]
    assert not any("failed" in cell for cell in cells.values())
    assert len(cells) == 2 + 5 * 4 + 2 * len(SELECTIONS) * 4
    page = (tmp_path / "mt_layers_small.md").read_text()
    assert "| all layers, Arnoldi, λ left out |" in page
    assert len(list(tmp_path.glob("figures/*.svg"))) == 1
