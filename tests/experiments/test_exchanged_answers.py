"""Exchanged answers: examples are masked and exchanged as the page says, and a small run measures everything."""

import gzip
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score, roc_auc_score

import eigentrace as et
from eigentrace.errors import InputError
from experiments.shared.frame import main
from tests.helpers.expecting import expect_mentions, refused

pytest.importorskip("transformers")

from experiments.language.exchanged_answers import (
    EXPERIMENT,
    WORK,
    Draw,
    Question,
    by_rand_proj,
    by_the_paper,
    exchanged,
    projections,
)
from experiments.language.parts.exchanged_answers_page import PER_METHOD, POSITIVE, TRACIN, cell_name
from experiments.language.parts.network import (
    KEEPS,
    OUR_WAY,
    PAPER_WAY,
    SMALL,
    Network,
    Recipe,
    Size,
    batches,
    held_out,
    load_model,
    predicted,
    prepared,
    rate,
    tiny,
)
from experiments.language.parts.questions import (
    FILES,
    IGNORED,
    SUBFOLDER,
    Ordered,
    Texts,
    encoded,
    made_up,
    padded,
    read_texts,
)

DRAW = Draw(24, 6, 2, 2)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def network():
    model, encode, end = tiny()
    train, test = (encoded(made_up(count, seed), encode, end, 320) for count, seed in ((40, 0), (8, 1)))
    return Network(model, train, test, replace(SMALL, batch=16), {})


@pytest.fixture(scope="module")
def question(network):
    return Question.of(network, DRAW)


def test_only_tokens_of_answers_have_labels():
    _, encode, end = tiny()
    examples = encoded(Texts(["ab", "c"], ["xyz", "u"]), encode, end, 320)
    batch = padded([examples[0], examples[1]])
    asked, told = [*b"ab\n"], [*b"xyz", end]
    assert batch["input_ids"].tolist() == [[*asked, *told, 0], [*b"c\nu", end, 0, 0, 0, 0]]
    assert batch["labels"].tolist() == [[*[IGNORED] * 3, *told, IGNORED], [IGNORED] * 2 + [*b"u", end] + [IGNORED] * 4]
    assert batch["attention_mask"].tolist() == [[1] * 7 + [0], [1] * 4 + [0] * 4]
    assert examples.answer_lengths.tolist() == [4, 2]
    assert len(encoded(Texts(["ab", "c"], ["xyz", "u"]), encode, end, 6)) == 1


def test_the_loss_of_an_example_is_that_of_its_answer_alone(network):
    rows = np.array([3, 0, 7])
    batch = network.train.batch(rows, CPU)
    losses = network.task.losses(network.task.params, batch)
    for loss, row in zip(losses, rows, strict=True):
        asked, told = network.train[row]
        logits = network.model(input_ids=torch.cat([asked, told])[None]).logits[0, len(asked) - 1 : -1]
        torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(logits, told, reduction="sum"))
    logits, labels = predicted(network.model, batch)
    assert labels.tolist() == torch.cat([network.train.answers[row] for row in rows]).tolist()
    mean = losses.sum().item() / network.train.answer_lengths[rows].sum()
    assert held_out(network.model, network.train.take(rows))["loss"] == pytest.approx(mean, rel=1e-5)


def test_exchanged_answers_go_round_among_themselves(network, question):
    rows, answers = exchanged(40, DRAW, 0)
    assert len(set(rows)) == DRAW.examples
    assert sorted(rows) == sorted(answers)
    assert int((rows != answers).sum()) == DRAW.wrong
    again, other = exchanged(40, DRAW, 0), exchanged(40, DRAW, 1)
    assert np.array_equal(again[0], rows)
    assert np.array_equal(again[1], answers)
    assert not np.array_equal(other[0], rows)
    for fold in range(DRAW.folds):
        rows, answers = exchanged(40, DRAW, fold)
        for place, (row, answer) in enumerate(zip(rows, answers, strict=True), start=fold * DRAW.examples):
            assert torch.equal(question.examples.questions[place], network.train.questions[row])
            assert torch.equal(question.examples.answers[place], network.train.answers[answer])
            is_same = torch.equal(network.train.answers[row], network.train.answers[answer])
            assert question.is_wrong[place] != is_same


def test_numbers_are_means_over_folds_and_draws(question):
    scores = np.random.default_rng(1).random((DRAW.folds * DRAW.examples, 3))
    cell = question.judged(scores)
    found = {"auc": [], "ap": [], "mean_auc": [], "mean_ap": []}
    per_token = scores / question.examples.answer_lengths[:, None] ** 2.0
    for fold in range(DRAW.folds):
        here = slice(fold * DRAW.examples, (fold + 1) * DRAW.examples)
        for prefix, values in (("", scores), ("mean_", per_token)):
            for column in values[here].T:
                found[f"{prefix}auc"].append(100 * roc_auc_score(question.is_wrong[here], column))
                found[f"{prefix}ap"].append(100 * average_precision_score(question.is_wrong[here], column))
    for key, numbers in found.items():
        assert cell[key] == pytest.approx(np.mean(numbers))
        assert cell[f"{key}_deviation"] == pytest.approx(np.std(numbers, ddof=1))


def test_the_papers_cuts_are_those_of_the_fit(network, question, monkeypatch):
    fitted, _ = network.fit(PAPER_WAY)
    monkeypatch.setattr(Network, "fit", lambda self, estimator: (fitted, 1.0))
    found = by_the_paper(question)
    method = network.method(PAPER_WAY)
    assert (method.curvature, method.tail, method.spread, method.sample) == ("hessian", None, True, SMALL.sample)
    assert network.method(OUR_WAY).curvature == "gauss-newton"
    for keep in KEEPS:
        for name, positive in ((PAPER_WAY, False), (POSITIVE, True)):
            scores, _ = question.own(fitted.distill(keep, positive_only=positive))
            assert found[name, keep]["ap"] == pytest.approx(question.judged(scores)["ap"])


def test_layers_give_the_features_of_whole_gradients(network):
    data = Ordered.of(network.train, 16).data
    fitted = et.RandProj(3).fit(network.task, data)
    by_layer, whole = (fitted.features(data, compute=et.Compute(engine=engine)) for engine in ("layerwise", "reverse"))
    torch.testing.assert_close(by_layer, whole, rtol=1e-4, atol=1e-4)


def test_every_draw_has_directions_of_its_own(network, question):
    fitted = projections(question)
    (block,) = fitted.blocks
    rows = block.directions.dense(0, block.directions.count)
    assert rows.shape == (DRAW.draws * max(KEEPS), network.task.layout.numel)
    assert rows.std().item() == pytest.approx(1, rel=0.01)
    gram = rows @ rows.T / rows.shape[1]
    torch.testing.assert_close(gram, torch.eye(len(rows)), rtol=0, atol=0.05)
    phi, _ = question.features(fitted)
    draws = np.stack([(phi[:, start : start + 10] ** 2).mean(axis=1) for start in (0, max(KEEPS))], axis=1)
    assert by_rand_proj(question)["RandProj", 10]["ap"] == pytest.approx(question.judged(draws)["ap"])


def test_silu_is_written_out_and_the_network_stays_the_same(network):
    from transformers import LlamaForCausalLM

    assert not [module for module in network.model.modules() if type(module).__name__ in ("SiLU", "SiLUActivation")]
    as_made = LlamaForCausalLM(network.model.config).eval()
    as_made.load_state_dict(network.model.state_dict())
    tokens = torch.arange(12)[None]
    expected = as_made(input_ids=tokens).logits
    torch.testing.assert_close(prepared(as_made)(input_ids=tokens).logits, expected)
    torch.testing.assert_close(network.model(input_ids=tokens).logits, expected)


def test_every_epoch_has_every_example_once(network):
    recipe = Recipe(epochs=2, batch=16)
    plan = list(batches(network.train, recipe, 0))
    assert sorted(np.concatenate(plan[:3])) == sorted(np.concatenate(plan[3:])) == list(range(40))
    assert all(np.array_equal(one, other) for one, other in zip(plan, batches(network.train, recipe, 0), strict=True))
    rates = [rate(step, 4, 10) for step in range(1, 11)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[3:] == sorted(rates[3:], reverse=True)
    assert rates[-1] > 0


def test_files_are_read_from_the_folder_or_its_folder(tmp_path):
    (tmp_path / SUBFOLDER).mkdir()
    rows = [{"question": "1+1?", "answer": "2"}, {"question": "ü?", "answer": "3"}]
    for place, name, lines in ((tmp_path, "test", rows[:1]), (tmp_path / SUBFOLDER, "train", rows)):
        with gzip.open(place / FILES[name], "wt", encoding="utf-8") as file:
            file.write("".join(f"{json.dumps(line)}\n" for line in lines))
    assert read_texts(tmp_path, "train") == Texts(["1+1?", "ü?"], ["2", "3"])
    assert len(read_texts(tmp_path, "test")) == 1
    with refused(InputError, FILES["test"], "github.com/openai/grade-school-math"):
        read_texts(tmp_path / SUBFOLDER, "test")
    with gzip.open(tmp_path / FILES["test"], "wt", encoding="utf-8") as file:
        file.write("{}\n")
    with refused(InputError, FILES["test"], "question"):
        read_texts(tmp_path, "test")
    with refused(InputError, tmp_path.name, "config.json"):
        load_model(tmp_path)


def test_a_folder_without_the_files_is_refused_before_anything_is_measured(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(EXPERIMENT, ["--data", str(tmp_path), "--out", str(tmp_path / "out")])
    expect_mentions(capsys.readouterr().err, [FILES["train"], "github.com/openai/grade-school-math"])
    for file in FILES.values():
        (tmp_path / file).touch()
    argv = ["--data", str(tmp_path), "--out", str(tmp_path / "out"), "--cache", str(tmp_path / "cache")]
    assert main(EXPERIMENT, [*argv, "--parts", "tracin"]) == 1
    expect_mentions(capsys.readouterr().out, ["--model", "GGUF"])


def test_the_full_size_is_that_of_the_page():
    size = Size()
    assert (size.products, size.sample, size.tail_products, size.tail_sample) == (200, 128, 60, 512)
    assert Draw() == Draw(4096, 256, 2, 5)
    assert sorted(name for _, methods in WORK.values() for name in methods) == sorted(PER_METHOD)
    assert set(EXPERIMENT.parts) == {"network", *WORK}


def names_of(methods):
    return {cell_name(method, keep) for method in methods for keep in PER_METHOD[method]}


def test_a_small_run_of_some_parts_measures_them_and_makes_a_page(tmp_path):
    argv = ["--small", "--out", str(tmp_path), "--cache", str(tmp_path / "cache"), "--parts", "network,select,tracin"]
    assert main(EXPERIMENT, argv) == 0
    (records,) = json.loads((tmp_path / "data" / "exchanged_answers_small.json").read_text()).values()
    cells = records["answers"]["cells"]
    assert set(cells) == {"network", "loss", *names_of(["RandSelect", TRACIN])}
    assert not any("failed" in cell for cell in cells.values())
    assert cells["network"]["test_loss"] < cells["network"]["before_loss"] / 2
    page = (tmp_path / "exchanged_answers_small.md").read_text()
    assert "| TracIn, one checkpoint " in page
    assert str(tmp_path) not in page
    before = (tmp_path / "data" / "exchanged_answers_small.json").read_text()
    assert main(EXPERIMENT, [*argv, "--missing"]) == 0
    assert (tmp_path / "data" / "exchanged_answers_small.json").read_text() == before


@pytest.mark.slow
def test_a_small_run_measures_everything(tmp_path):
    assert main(EXPERIMENT, ["--small", "--out", str(tmp_path), "--cache", str(tmp_path / "cache")]) == 0
    (records,) = json.loads((tmp_path / "data" / "exchanged_answers_small.json").read_text()).values()
    cells = records["answers"]["cells"]
    assert set(cells) == {"network", "loss", *names_of(PER_METHOD)}
    assert not any("failed" in cell for cell in cells.values())
    assert all({"score_seconds", "fit_seconds"} <= cells[name].keys() for name in names_of(PER_METHOD))
    assert all("Not measured" not in claim.on(records).evidence for claim in EXPERIMENT.claims)
