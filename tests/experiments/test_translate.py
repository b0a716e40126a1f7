"""Translating: greedy search takes the best token each time, beams find what is worth most, padding has no say."""

import itertools

import numpy as np
import pytest
import torch

from experiments.translation.parts import translate
from experiments.translation.parts.corpora import BEGIN, END, LONGEST, PAD, Pairs, Subwords, small_texts
from experiments.translation.parts.transformer import Recipe, make_transformer, train_transformer
from experiments.translation.parts.translate import translated, worth

CPU = torch.device("cpu")
WORDS = 9


def _sources(count=7, longest=6, seed=0):
    draw = torch.Generator().manual_seed(seed)
    table = torch.full((count, longest), PAD, dtype=torch.int32)
    for row in table:
        size = int(torch.randint(1, longest, (), generator=draw))
        row[:size] = torch.randint(4, WORDS, (size,), generator=draw, dtype=torch.int32)
        row[size] = END
    return table


@pytest.fixture(scope="module")
def model():
    """Trained a little on sentences that mean nothing, so that it ends them, and is sure of nothing."""
    recipe = Recipe(16, 1, 2, words=WORDS, dropout=0.0, steps=150, tokens=200, lr=1e-2, warm_up=5, smoothing=0.0)
    found = make_transformer(recipe, CPU, 0)
    train_transformer(found, Pairs(_sources(60, seed=1), _sources(60, seed=2), np.arange(60)), recipe, 0)
    return found


def _log_probabilities(model, source, said):
    """By the plain forward pass, one sentence alone."""
    source = source[source != PAD].long()[None]
    with torch.no_grad():
        logits = model.eval()(source, torch.tensor([[BEGIN, *said]]))[0].clone()
    logits[:, [PAD, BEGIN]] = float("-inf")
    return logits.log_softmax(dim=1)


def _by_hand(model, source, longest):
    said = []
    while len(said) < longest:
        token = int(_log_probabilities(model, source, said)[-1].argmax())
        if token == END:
            break
        said.append(token)
    return said


def test_greedy_takes_the_best_token_of_the_plain_forward(model):
    sources = _sources()
    expected = [_by_hand(model, source, 12) for source in sources]
    assert len({len(one) for one in expected}) > 1
    for tokens in (6, 10_000):
        assert translated(model, sources, tokens=tokens, longest=12) == expected
    assert not model.training


def test_translations_that_ended_stay_as_they_were_while_most_go_on(model):
    sources = _sources(24)
    lengths = np.array([len(_by_hand(model, source, 12)) for source in sources])
    first, longest = lengths.min(), lengths.max()
    # One ends early: too few to be dropped before the others have reached the longest that is allowed.
    rows = [int(lengths.argmin()), *np.flatnonzero(lengths == longest)]
    assert first < longest
    assert len(rows) > 4
    expected = [_by_hand(model, sources[row], longest) for row in rows]
    assert translated(model, sources[rows], longest=int(longest)) == expected


def test_token_by_token_is_the_plain_forward_whoever_goes_on():
    model = make_transformer(Recipe(16, 3, 2, words=WORDS, dropout=0.1), CPU, 0).double().eval()
    source = _sources().long()
    mask = source != PAD
    said = torch.randint(4, WORDS, (len(source), 6))
    with torch.no_grad():
        decoding = translate.Decoding(model, model.encode(source, mask), mask)
        for place in range(said.shape[1]):
            found = decoding.next(said[:, place])
            logits = model(source, said[:, : place + 1], mask)[:, -1]
            logits[:, [PAD, BEGIN]] = float("-inf")
            torch.testing.assert_close(found, logits.log_softmax(dim=1), rtol=1e-12, atol=1e-12)
            if place in (1, 3):
                # One is left out, one comes twice, all in another order.
                rows = torch.tensor([2, 0, 5, 5, 1, 3])[: len(source) - (place == 3)]
                decoding.take(rows)
                source, mask, said = source[rows], mask[rows], said[rows]


def test_padding_has_no_say(model):
    sources = _sources()
    wide = torch.nn.functional.pad(sources, (0, 9), value=PAD)
    for beam in (1, 3):
        alone = [translated(model, source[None], beam=beam, longest=8)[0] for source in sources]
        assert translated(model, wide, beam=beam, longest=8) == alone


def test_one_beam_is_greedy(model):
    sources = _sources()
    greedy = translated(model, sources, longest=10)
    with torch.no_grad():
        for source, expected in zip(sources, greedy, strict=True):
            cut = source[source != PAD].long()[None]
            assert translate._beams(model, cut, 10, 1) == [expected]


def _value(model, source, said, longest):
    """What a whole translation is worth; one that has not ended is as long as may be."""
    steps = _log_probabilities(model, source, said)
    total = sum(float(steps[k, token]) for k, token in enumerate(said))
    if len(said) < longest:
        total += float(steps[len(said), END])
    return worth(total, min(len(said) + 1, longest))


def test_wide_beams_find_the_best_of_all_and_none_is_worse_than_greedy(model):
    sources, longest = _sources(5), 3
    choices = [t for t in range(WORDS) if t not in (PAD, BEGIN, END)]
    everything = [list(said) for size in range(longest + 1) for said in itertools.product(choices, repeat=size)]
    found = translated(model, sources, beam=len(everything), longest=longest)
    greedy = translated(model, sources, longest=longest)
    differ = 0
    for source, one, first in zip(sources, found, greedy, strict=True):
        values = [_value(model, source, said, longest) for said in everything]
        best = max(values)
        assert _value(model, source, one, longest) == pytest.approx(best, abs=1e-5)
        assert best >= _value(model, source, first, longest) - 1e-6
        differ += one != first
    assert differ


def test_translations_are_no_longer_than_positions():
    """A network that nobody trained says the same token for ever."""
    model = make_transformer(Recipe(16, 1, 2, words=WORDS), CPU, 3)
    for beam in (1, 2):
        assert {len(one) for one in translated(model, _sources(3), beam=beam)} == {LONGEST}


def test_nothing_to_translate(model):
    assert translated(model, torch.zeros((0, 4), dtype=torch.int32)) == []


def test_a_trained_network_translates_its_phrases(tmp_path):
    pytest.importorskip("tokenizers")
    texts = small_texts("train").take(range(60))
    subwords = Subwords(small_texts("train"), 240, tmp_path)
    pairs = subwords.pairs(texts)
    recipe = Recipe(48, 1, 4, words=240, steps=160, tokens=600, lr=1e-2, warm_up=20, dropout=0.0, smoothing=0.0)
    model = make_transformer(recipe, CPU, 0)
    train_transformer(model, pairs, recipe, 0)
    for beam in (1, 4):
        said = subwords.text(translated(model, pairs.source, beam=beam))
        right = sum(one == texts.english[row] for one, row in zip(said, pairs.rows, strict=True))
        assert right > 0.8 * len(pairs)
