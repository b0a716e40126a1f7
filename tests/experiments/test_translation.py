"""Translation: files are read right, padding has no say, a training follows from its seed and can be resumed."""

import gzip
import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import eigentrace as et
from eigentrace.curvature.operator import Curvature
from eigentrace.errors import InputError
from experiments.translation import prepare_pairs
from experiments.translation.parts.corpora import (
    BEGIN,
    END,
    FILES,
    LONGEST,
    PAD,
    UNKNOWN,
    Corpora,
    Ordered,
    Subwords,
    Texts,
    padded,
    read_texts,
    small_texts,
    translation_task,
)
from experiments.translation.parts.cut import short_rows
from experiments.translation.parts.phrases import foreign, phrases
from experiments.translation.parts.transformer import Recipe, held_out, make_transformer, rate, train_transformer
from experiments.translation.parts.withheld import together, withheld
from tests.helpers.expecting import refused
from tests.helpers.make_pairs import make_pairs

CPU = torch.device("cpu")
TINY = Recipe(8, 1, 2, words=30, steps=6, tokens=40, row=20, warm_up=3, save_every=2)


def _pairs(count=12, seed=0, longest=9):
    return make_pairs(np.random.default_rng(seed).integers(2, longest + 1, (count, 2)), seed)


def _write(path, head, rows):
    with gzip.open(path, "wt", encoding="utf-8", newline="\n") as file:
        file.write("\n".join("\t".join(row) for row in (head, *rows)) + "\n")


def test_a_file_gives_its_pairs_and_verdicts(tmp_path):
    _write(tmp_path / "a.tsv.gz", ("x", "de", "en", "label"), [("1", "Ja\u2028.", "Yes", "V"), ("2", "Öl", "", "A")])
    texts = read_texts(tmp_path / "a.tsv.gz")
    assert texts == Texts(["Ja\u2028.", "Öl"], ["Yes", ""], ["V", "A"])
    _write(tmp_path / "b.tsv.gz", ("de", "en"), [("Ja", "Yes")])
    assert read_texts(tmp_path / "b.tsv.gz").verdicts == [""]
    _write(tmp_path / "e.tsv.gz", ("lang", "xx", "en", "label"), [("fr", "Oui", "Yes", "V")])
    assert read_texts(tmp_path / "e.tsv.gz", "lang") == Texts(["Oui"], ["Yes"], ["fr"])
    _write(tmp_path / "c.tsv.gz", ("de", "en"), [("Ja", "Yes", "more")])
    with refused(InputError, "c.tsv.gz"):
        read_texts(tmp_path / "c.tsv.gz")
    with refused(InputError, "d.tsv.gz"):
        read_texts(tmp_path / "d.tsv.gz")


def test_phrases_are_pairs_that_occur_once_and_files_share_none():
    pairs = phrases()
    assert len({german for german, _ in pairs}) == len({english for _, english in pairs}) == len(pairs)
    assert {language for *_, language in foreign()} == {"fr", "es"}
    assert ("Die Katze schläft heute.", "The cat is sleeping today.") in pairs
    texts = {name: small_texts(name) for name in FILES}
    for first, second in itertools.combinations(texts.values(), 2):
        assert not set(first.german) & set(second.german)
    right = set(pairs)
    judged = texts["judged"]
    is_right = [pair in right for pair in zip(judged.german, judged.english, strict=True)]
    assert is_right == [verdict == "V" for verdict in judged.verdicts]
    assert all(pair in right for pair in zip(texts["train"].german, texts["train"].english, strict=True))


def test_withheld_pairs_share_no_sentence_with_the_others():
    draw = np.random.default_rng(0)
    german, english = ([f"{side}{number}" for number in draw.integers(0, 2000, 1500)] for side in "de")
    german += [f"alone{number}" for number in range(500)]
    english += [f"by itself{number}" for number in range(500)]
    away = withheld(german, english)
    assert 0.25 < away.mean() <= 1 / 3
    for side in (german, english):
        assert not set(np.array(side)[away]) & set(np.array(side)[~away])
    assert np.array_equal(away, withheld(german, english))
    assert not np.array_equal(away, withheld(german, english, seed=1))
    groups = together(["a", "b", "b", "c", "d"], ["1", "1", "2", "3", "3"])
    assert groups[0] == groups[1] == groups[2] != groups[3] == groups[4]


def test_files_stand_for_training_withheld_and_test(tmp_path):
    rows = [("x", f"Satz {n}", f"sentence {n}") for n in range(300)]
    _write(tmp_path / FILES["train"], ("source", "de", "en"), rows)
    _write(tmp_path / FILES["test"], ("source", "de", "en"), [("newstest2016", "Ja", "Yes")])
    corpora = Corpora(tmp_path, tmp_path / "cache", small=False)
    train, away = corpora.texts("train"), corpora.texts("withheld")
    assert (len(train), len(away)) == (200, 100)
    assert sorted(train.german + away.german) == sorted(row[1] for row in rows)
    assert set(train.verdicts) == set(away.verdicts) == {"x"}
    assert corpora.texts("test").verdicts == ["newstest2016"]
    assert corpora.subwords.learned_from == train


def test_tokens_are_written_out_as_the_tokenizer_would(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    learned = small_texts("train")
    subwords = Subwords(learned, 150, tmp_path)
    pairs = subwords.encoded(learned)
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"]
    assert torch.equal(pairs.source, subwords.pairs(learned).source)
    tokens = [row[:size].tolist() for row, size in zip(pairs.target, pairs.target_lengths, strict=True)]
    assert subwords.text(tokens) == learned.english
    tokenizer = tokenizers.Tokenizer.from_file(str(next(tmp_path.glob("*.json"))))
    tokenizer.decoder = tokenizers.decoders.Metaspace()
    pieces = [[7, 90, 30], [140, 12], [UNKNOWN, 60, END, PAD], []]
    assert subwords.text(pieces) == [tokenizer.decode(one).strip() for one in pieces]


def test_subwords_are_learned_once_and_long_pairs_left_out(tmp_path, monkeypatch):
    tokenizers = pytest.importorskip("tokenizers")
    learned = small_texts("train")
    subwords = Subwords(learned, 100, tmp_path)
    texts = Texts(["Der Hund lacht.", "ja " * 200, ""], ["The dog is laughing.", "yes", "yes"], [""] * 3)
    pairs = subwords.pairs(texts)
    assert pairs.rows.tolist() == [0]
    assert pairs.source.shape[1] <= LONGEST
    (path,) = tmp_path.glob("subwords_*.json")
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    assert tokenizer.get_vocab_size() == 100
    ids = pairs.target[0, : pairs.target_lengths[0]].tolist()
    assert ids[-1] == END
    assert tokenizer.decode(ids[:-1]).replace(" ", "").replace("▁", " ").strip() == "The dog is laughing."

    def gone(*_):
        raise AssertionError("the tokens are there already")

    monkeypatch.setattr(Subwords, "_tokenizer", gone)
    again = subwords.pairs(texts)
    assert torch.equal(again.source, pairs.source)
    assert torch.equal(again.target, pairs.target)


def test_without_a_tokenizer_the_message_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    with refused(InputError, 'pip install -e ".[hf]"', "--cache"):
        Subwords(small_texts("train"), 100, tmp_path).pairs(small_texts("dev"))


def test_all_files_are_prepared_and_read_at_toy_size(tmp_path, capsys):
    pytest.importorskip("tokenizers")
    for name, file in FILES.items():
        texts = small_texts(name)
        if name != "withheld":
            _write(tmp_path / file, ("de", "en"), [*zip(texts.german, texts.english, strict=True), ("x" * 70, "y")])
    assert prepare_pairs.main(["--data", str(tmp_path), "--cache", str(tmp_path / "cache")]) == 0
    assert capsys.readouterr().out.count("pairs") == len(FILES)
    corpora = Corpora(tmp_path, tmp_path / "cache", small=True)
    assert corpora.texts("dev").german == small_texts("dev").german


def test_the_small_form_takes_short_pairs_of_every_kind():
    german = ["a"] * 5 + ["b" * 61, "b", "c"]
    english = ["x"] * 7 + ["x" * 60]
    said = ["news"] * 5 + ["captions", "captions", "web"]
    assert short_rows(german, english, said, 4) == [0, 1, 6, 7]
    assert short_rows(german, english, said, 99) == [0, 1, 2, 3, 4, 6, 7]


def test_a_batch_is_what_collating_gives(tmp_path):
    pairs = _pairs()
    rows = np.array([3, 0, 7])
    ordered = Ordered.of(pairs, 5)
    assert (np.diff(pairs.lengths[ordered.order]) <= 0).all()
    items = [
        (pairs.source[row, : pairs.source_lengths[row]], pairs.target[row, : pairs.target_lengths[row]]) for row in rows
    ]
    for one, other in zip(pairs.batch(rows), padded(items), strict=True):
        assert torch.equal(one, other)
    source, before, target = pairs.batch(rows)
    assert source.shape[1] % 4 == target.shape[1] % 4 == 0
    assert (before[:, 0] == BEGIN).all()
    assert torch.equal(before[:, 1:], target[:, :-1])
    numbers = torch.arange(len(pairs))[torch.from_numpy(ordered.order)]
    assert ordered.back(numbers).tolist() == list(range(len(pairs)))
    both = pairs + _pairs(3, 1, longest=4)
    assert both.target_lengths.tolist() == [*pairs.target_lengths, *_pairs(3, 1, longest=4).target_lengths]


@pytest.fixture(scope="module")
def model():
    found = make_transformer(TINY, CPU, 0)
    train_transformer(found, _pairs(), TINY, 0)
    return found.eval()


def _scores(model, pairs, batch):
    ordered = Ordered.of(pairs, batch)
    task = translation_task(model)
    train = Ordered.of(_pairs(), 6).data
    fits = [et.RandProj(3).fit(task, train), et.RandSelect(50).fit(task, train), et.TracIn().fit(task, train)]
    return [ordered.back(fit.self_influence(ordered.data)) for fit in (*fits, et.Loss().fit(task, train))]


def test_scores_do_not_depend_on_padding(model):
    pairs = _pairs(7, 5)
    longer = pairs + _pairs(1, 6, longest=30)
    for alone, at_once, wide in zip(
        _scores(model, pairs, 1), _scores(model, pairs, 7), _scores(model, longer, 8), strict=True
    ):
        assert (alone > 0).all()
        np.testing.assert_allclose(at_once, alone, rtol=2e-4)
        np.testing.assert_allclose(wide[:7], alone, rtol=2e-4)


def test_a_loss_is_the_sum_over_the_tokens_that_are_there(model):
    pairs = _pairs(3, 7)
    task = translation_task(model)
    with torch.no_grad():
        losses = task.losses(task.params, pairs.batch(np.arange(3)))
        for row in range(3):
            source, before, target = (side[:1] for side in pairs.batch(np.array([row])))
            size, length = pairs.target_lengths[row], pairs.source_lengths[row]
            logits = model(source[:, :length], before[:, :size])[0]
            assert float(F.cross_entropy(logits, target[0, :size], reduction="sum")) == pytest.approx(
                float(losses[row]), rel=1e-5
            )
    found = held_out(model, pairs)
    assert found["loss"] == pytest.approx(float(losses.sum()) / pairs.target_lengths.sum(), rel=1e-5)


@pytest.mark.parametrize("kind", ["hessian", "gauss-newton"])
def test_curvature_is_that_of_double_backward(model, kind):
    pairs = _pairs(5, 8)
    task = translation_task(model).double()
    v = torch.randn(task.layout.numel, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    data = Ordered.of(pairs, 2).data
    with task.session():
        found = Curvature(task, data, None, kind).matvec(v)
    names, sizes = task.layout.names, task.layout.sizes
    batch = pairs.batch(np.arange(5))

    def outputs(flat):
        values = {n: p.view(task.params[n].shape) for n, p in zip(names, flat.split(sizes), strict=True)}
        return task.outputs(values, batch)

    def total(flat):
        return task.output_losses(outputs(flat), batch).sum()

    with sdpa_kernel(SDPBackend.MATH):
        if kind == "hessian":
            _, exact = torch.autograd.functional.hvp(total, task.vector, v)
        else:
            logits, tangent = torch.autograd.functional.jvp(outputs, task.vector, v)
            _, turned = torch.autograd.functional.hvp(lambda z: task.output_losses(z, batch).sum(), logits, tangent)
            _, exact = torch.autograd.functional.vjp(outputs, task.vector, turned)
    torch.testing.assert_close(found, exact / 5, rtol=1e-8, atol=1e-10)


def test_transformer_base_has_the_size_of_the_paper():
    with torch.device("meta"):
        model = make_transformer(Recipe(), torch.device("meta"), 0)
    count = sum(p.numel() for p in model.parameters())
    assert count == 60_524_544
    assert model.head.weight is model.embedding.weight
    assert (len(model.encoder), len(model.decoder), model.embedding.weight.shape) == (6, 6, (32_000, 512))


def test_the_rate_rises_and_falls():
    assert rate(1, 1000) == pytest.approx(0.001)
    assert rate(1000, 1000) == 1
    assert rate(4000, 1000) == pytest.approx(0.5)


def test_training_follows_from_its_seed_and_goes_on_where_it_stopped(tmp_path, monkeypatch):
    def trained(seed, unfinished=None):
        model = make_transformer(TINY, CPU, seed)
        train_transformer(model, _pairs(), TINY, seed, unfinished)
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    whole = trained(1)
    assert torch.equal(whole, trained(1))
    assert not torch.equal(whole, trained(2))

    path = tmp_path / "new" / "net.unfinished"
    step = torch.optim.Adam.step
    calls = []

    def killed(self, *given, **named):
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return step(self, *given, **named)

    with monkeypatch.context() as patched:
        patched.setattr(torch.optim.Adam, "step", killed)
        with pytest.raises(KeyboardInterrupt):
            trained(1, path)
    assert torch.load(path, weights_only=True)["step"] == 4
    assert torch.equal(trained(1, path), whole)
    assert not path.exists()


def test_training_learns_and_leaves_the_random_state(model):
    state = torch.random.get_rng_state()
    recipe = Recipe(16, 1, 2, words=30, steps=60, tokens=60, row=20, lr=1e-2, warm_up=5, dropout=0.0)
    other = make_transformer(recipe, CPU, 0)
    before = held_out(other, _pairs())["loss"]
    train_transformer(other, _pairs(), recipe, 0)
    assert held_out(other, _pairs())["loss"] < before / 2
    assert torch.equal(torch.random.get_rng_state(), state)
