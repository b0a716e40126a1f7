"""Packed rows: every pair once and whole, the loss and the gradient of the pairs one by one, no look at a neighbour."""

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from experiments.translation.parts.corpora import BEGIN, PAD, Pairs
from experiments.translation.parts.packing import batches, logits_of, packed, planned
from experiments.translation.parts.transformer import Recipe, make_transformer, train_transformer
from tests.helpers.expecting import refused
from tests.helpers.make_pairs import make_pairs

WIDTH = 14
TINY = Recipe(8, 2, 2, words=30, dropout=0.0)


MANY = make_pairs(np.random.default_rng(1).integers(2, 10, (40, 2)))


@pytest.fixture
def model():
    return make_transformer(TINY, torch.device("cpu"), 0).double()


def _alone(model, pairs, row):
    source, before, target = pairs.batch(np.array([row]))
    logits = model(source, before, source != PAD)
    return logits[0, : pairs.target_lengths[row]], target[0, : pairs.target_lengths[row]]


def test_a_pass_holds_every_pair_once_and_whole_and_rows_are_never_overfull():
    drawn = list(itertools.islice(batches(MANY, WIDTH, 3 * WIDTH, 0), 60))
    ends = np.cumsum([len(plan.pairs) for plan in drawn])
    first = int(np.searchsorted(ends, len(MANY))) + 1
    for start, end in ((0, first), (first, int(np.searchsorted(ends, 2 * len(MANY))) + 1)):
        assert sorted(np.concatenate([plan.pairs for plan in drawn[start:end]])) == list(range(len(MANY)))
    assert not np.array_equal(drawn[0].pairs, drawn[first].pairs)
    for plan in drawn:
        assert plan.count <= 3
        for side, table in zip(packed(MANY, plan), (MANY.source, MANY.target), strict=True):
            assert side.tokens.shape == (plan.count, WIDTH)
            said = [
                side.tokens[row][side.number[row] == number].tolist()
                for row in range(plan.count)
                for number in range(1, int(side.number[row].max()) + 1)
            ]
            assert said == [table[pair][table[pair] != PAD].tolist() for pair in plan.pairs]
            assert (side.tokens[side.number == 0] == PAD).all()


def test_batches_follow_from_their_seed():
    drawn = [list(itertools.islice(batches(MANY, WIDTH, 40, seed), 20)) for seed in (3, 3, 4)]
    assert all(np.array_equal(a.pairs, b.pairs) for a, b in zip(drawn[0], drawn[1], strict=True))
    assert not all(np.array_equal(a.pairs, b.pairs) for a, b in zip(drawn[0], drawn[2], strict=True))


def test_rows_are_filled_until_either_side_is_full():
    pairs = make_pairs([(4, 3), (3, 6), (3, 2), (2, 2), (10, 2), (2, 2)])
    plan = planned(pairs, np.arange(6), 10)
    assert plan.rows.tolist() == [0, 0, 1, 1, 2, 3]
    assert plan.source.tolist() == [0, 4, 0, 3, 0, 0]
    assert plan.target.tolist() == [0, 3, 0, 2, 0, 0]
    source, target = packed(pairs, plan)
    assert source.number[0].tolist() == [1] * 4 + [2] * 3 + [0] * 3
    assert target.place[0].tolist() == [*range(3), *range(6), 0]
    with refused(ValueError, 10, 2, 9):
        planned(pairs, np.arange(6), 9)


# The last of these fills the source's side of its row, so that padding of the target has nothing of its own there.
@pytest.mark.parametrize("pairs", [MANY, make_pairs([(5, 3), (5, 4), (4, 2)])], ids=["many", "full"])
def test_loss_and_gradient_are_those_of_the_pairs_one_by_one(model, pairs):
    sides = packed(pairs, planned(pairs, np.arange(len(pairs)), WIDTH))
    params = list(model.parameters())
    logits = logits_of(model, *sides)
    found = F.cross_entropy(logits.flatten(0, 1), sides[1].tokens.flatten(), ignore_index=PAD, reduction="sum")
    gradient = torch.autograd.grad(found, params)
    one_by_one = [F.cross_entropy(*_alone(model, pairs, row), reduction="sum") for row in range(len(pairs))]
    exact = torch.stack(one_by_one).sum()
    torch.testing.assert_close(found, exact, rtol=1e-12, atol=0)
    for one, other in zip(gradient, torch.autograd.grad(exact, params), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_no_pair_sees_another(model):
    sizes = [(4, 3), (3, 6), (4, 3)]
    pairs, other = make_pairs(sizes), make_pairs(sizes, seed=1)
    plan = planned(pairs, np.arange(3), WIDTH)
    assert plan.rows.tolist() == [0, 0, 0]
    for changed in range(3):
        mixed = Pairs(*(side.clone() for side in (pairs.source, pairs.target)), pairs.rows)
        mixed.source[changed], mixed.target[changed] = other.source[changed], other.target[changed]
        before, after = (logits_of(model, *packed(one, plan))[0] for one in (pairs, mixed))
        number = packed(pairs, plan)[1].number[0]
        same = (before == after).all(dim=1)
        # Padding, number 0, may look at anything and is looked at by nothing.
        assert same[(number != changed + 1) & (number > 0)].all()
        assert not same[number == changed + 1].any()
        torch.testing.assert_close(after[number == changed + 1], _alone(model, mixed, changed)[0])


def test_a_sentence_begins_with_its_own_beginning(model, monkeypatch):
    plan = planned(MANY, np.arange(len(MANY)), WIDTH)
    sides = packed(MANY, plan)
    seen = []
    decode = model.decode
    monkeypatch.setattr(model, "decode", lambda before, *more: seen.append(before) or decode(before, *more))
    logits_of(model, *sides)
    target = sides[1]
    here = target.number > 0
    assert (seen[0][here & (target.place == 0)] == BEGIN).all()
    later = here & (target.place > 0)
    assert torch.equal(seen[0][later], target.tokens.roll(1, dims=1)[later])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_training_on_a_gpu_is_repeatable_to_the_bit_recorded_or_not():
    # Wide enough for the attention and matrix kernels of real sizes, which add up in parallel where they may.
    draw = np.random.default_rng(0)
    pairs = make_pairs(draw.integers(2, 60, (2000, 2))).to(torch.device("cuda"))
    recipe = Recipe(256, 2, 4, words=2000, steps=40, tokens=4096, warm_up=10, dropout=0.1)
    # The last batch of a pass is of another shape than the one that is recorded.
    shapes = {plan.count for plan in itertools.islice(batches(pairs, recipe.row, recipe.tokens, 0), recipe.steps)}
    assert len(shapes) > 1
    seen = []
    for record in (True, True, False):
        model = make_transformer(recipe, torch.device("cuda"), 0)
        train_transformer(model, pairs, recipe, 0, record=record)
        seen.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert seen[0].isfinite().all()
    assert torch.equal(seen[0], seen[1])
    assert torch.equal(seen[0], seen[2])
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory
