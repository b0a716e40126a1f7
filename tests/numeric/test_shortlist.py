"""Shortlists: the strongest by stored features, in pieces, with ties; rescored they are the exact ranking."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import eigentrace as et
from eigentrace.errors import InputError
from eigentrace.numeric import top_k as shortlist
from eigentrace.numeric.top_k import Ranked, best_of, shortlist_rows
from tests.helpers.expecting import refused


@pytest.mark.parametrize("piece", [3, 7, 1000])
def test_the_shortlist_holds_each_querys_strongest(monkeypatch, piece):
    monkeypatch.setattr(shortlist, "_AT_ONCE", piece)
    train, asked = torch.randn(50, 4), torch.randn(3, 4)
    found = shortlist_rows(train, asked, 10)
    scores = asked @ train.T
    assert found.tolist() == [sorted([*s.topk(5).indices.tolist(), *(-s).topk(5).indices.tolist()]) for s in scores]
    assert shortlist_rows(train, asked, 99).tolist() == [list(range(50))] * 3
    assert shortlist_rows(train[:1], asked, 2).tolist() == [[0]] * 3


def test_examples_of_equal_score_come_once():
    lists = shortlist_rows(torch.ones(30, 2), torch.ones(1, 2), 8)
    found = best_of(torch.zeros(1, 8), lists, 4)
    assert len(set(found.proponents.flatten().tolist())) == 4
    assert len(set(found.opponents.flatten().tolist())) == 4


def test_the_best_are_in_order_and_ties_by_row():
    scores = torch.tensor([[1.0, 3.0, 3.0, -2.0, -2.0]])
    found = best_of(scores, torch.tensor([2, 5, 7, 8, 9]), 3)
    assert found.proponents.tolist() == [[5, 7, 2]]
    assert found.proponent_scores.tolist() == [[3.0, 3.0, 1.0]]
    assert found.opponents.tolist() == [[8, 9, 2]]
    assert found.opponent_scores.tolist() == [[-2.0, -2.0, 1.0]]
    with refused(InputError, "(Q, k)", "(1, 1)", "(1, 3)"):
        Ranked(found.proponents, found.proponent_scores, found.opponents[:, :1], found.opponent_scores)


@pytest.fixture(scope="module")
def problem():
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 3))
        x = torch.randn(400, 8)
        y = (x[:, :3] + 0.5 * torch.randn(400, 3)).argmax(dim=1)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
        for _ in range(60):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    data = TensorDataset(x, y)
    return et.Arnoldi(steps=80, keep=8, coordinates=40).fit(et.classification(model), data), data, (x[:5] + 0.1, y[:5])


@pytest.mark.parametrize("tail", ["auto", "shaped"])
def test_rescored_it_is_the_exact_ranking(problem, tail):
    fitted, data, queries = problem
    fitted = fitted.distill(tail=tail)
    exact = fitted.influence(data, queries)
    stored = fitted.stored(coordinates=20)
    features = stored.features(data)
    found = stored.influence_topk(data, queries, 10, features=features, shortlist=80)
    whole = best_of(exact, torch.arange(400), 10)
    for ours, theirs in ((found.proponents, whole.proponents), (found.opponents, whole.opponents)):
        shared = [len(set(a.tolist()) & set(b.tolist())) / 10 for a, b in zip(ours, theirs, strict=True)]
        assert sum(shared) / len(shared) >= 0.9
    assert torch.allclose(found.proponent_scores, exact.gather(1, found.proponents), rtol=1e-3, atol=1e-3)
    assert torch.allclose(found.opponent_scores, exact.gather(1, found.opponents), rtol=1e-3, atol=1e-3)
    alone = stored.influence_topk(data, tuple(t[2:3] for t in queries), 10, features=features, shortlist=80)
    assert torch.equal(alone.proponents[0], found.proponents[2])  # the company a query is in changes nothing
    # everybody on the list: exactly the exact ranking; without features they are computed
    everybody = fitted.influence_topk(data, queries, 10, shortlist=400)
    assert torch.equal(everybody.proponents, whole.proponents)
    nats = fitted.influence_topk(data, queries, 10, shortlist=400, unit="nats")
    assert torch.allclose(nats.proponent_scores, everybody.proponent_scores / 400)


def test_only_the_shortlist_goes_through_the_model(problem):
    fitted, data, queries = problem
    stored = fitted.stored()
    features = stored.features(data)
    read = []

    class Watched(TensorDataset):
        def __getitem__(self, index):
            read.append(index)
            return super().__getitem__(index)

    one = tuple(t[:1] for t in queries)
    found = stored.influence_topk(Watched(*data.tensors), one, 5, features=features, shortlist=30)
    assert set(found.proponents.flatten().tolist()) <= set(read)
    assert len(set(read)) <= 30


def test_fits_without_a_tail_are_ranked_too(problem):
    fitted, data, queries = problem
    bare = fitted.distill(tail=None)
    found = bare.influence_topk(data, queries, 3, shortlist=50)
    assert torch.equal(found.proponents, best_of(bare.influence(data, queries), torch.arange(400), 3).proponents)


def test_impossible_shortlists_are_refused(problem):
    fitted, data, queries = problem
    stored = fitted.stored()
    with refused(InputError, "shortlist", 10, 20, 40):
        stored.influence_topk(data, queries, 20, shortlist=10)
    with refused(InputError, "k", 1, 0):
        stored.influence_topk(data, queries, 0)
    with refused(InputError, "7 examples", 400):
        stored.influence_topk(data, queries, 3, features=stored.features(data)[:7])
    with refused(InputError, 48, 3):
        stored.influence_topk(data, queries, 3, features=torch.zeros(400, 3))
    few = TensorDataset(*(t[:4] for t in data.tensors))
    assert stored.influence_topk(few, queries, 20).proponents.shape == (5, 4)  # no more than there are
