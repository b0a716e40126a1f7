"""Answers by stored features and the choice of candidates, against dense matrices in double precision."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

import eigentrace as et
from eigentrace.errors import InputError
from eigentrace.runs.explain import EXACT, KEPT, RESCORED
from tests.helpers.expecting import refused
from tests.helpers.runs import Points, model

ROWS, KEPT_DIRECTIONS = 120, 4
QUERIES = [3, 17, 0, 119]


class Doubles(Points):
    """Points in double precision."""

    def __getitem__(self, row):
        x, y = super().__getitem__(row)
        return x.double(), y


def examples():
    return et.Data(Doubles(ROWS), batch_size=16)


@dataclass
class Dense:
    """Every gradient, and the inverse curvature with and without its tail."""

    gradients: torch.Tensor  # (N, P)
    kept: torch.Tensor  # (P, P) Gᵀ(Λ+δ)⁻¹G
    tail: torch.Tensor  # (P, P) (I − GᵀG)/δ
    inside: torch.Tensor  # (P, P) GᵀG

    def products(self, matrix):  # (N, N)
        return (self.gradients @ matrix @ self.gradients.T).numpy()

    def answer(self, normalize, *, whole):  # (N, N)
        """Scores of all pairs, divided by the lengths of gradients, of features, or in the metric of the scores."""
        scores = self.products(self.kept + self.tail if whole else self.kept)
        if normalize is None:
            return scores
        one = self.inside if normalize == "features" else torch.eye(len(self.kept), dtype=torch.float64)
        squares = np.diag(scores) if normalize == "metric" else np.diag(self.products(one))
        return scores / np.sqrt(np.outer(squares, squares))


@pytest.fixture(scope="module")
def fitted():
    return et.Arnoldi(steps=40, keep=KEPT_DIRECTIONS).fit(et.classification(model().double()), examples())


@pytest.fixture(scope="module")
def run(fitted, tmp_path_factory):
    return et.score(fitted, examples(), tmp_path_factory.mktemp("runs") / "x", shard_rows=50)


@pytest.fixture(scope="module")
def dense(fitted):
    net = fitted.task.model
    gradients = []
    for x, y in (Doubles(ROWS)[row] for row in range(ROWS)):
        loss = nn.functional.cross_entropy(net(x[None]), torch.tensor([y]))
        gradients.append(torch.cat([part.flatten() for part in torch.autograd.grad(loss, list(net.parameters()))]))
    G = fitted.eigenpairs.directions[:KEPT_DIRECTIONS].double()
    inside = G.T @ G
    weights = 1 / (fitted.spectrum.eigenvalues.double().clamp_min(0) + fitted.delta)
    tail = (torch.eye(len(inside), dtype=torch.float64) - inside) / fitted.delta
    return Dense(torch.stack(gradients), G.T @ torch.diag(weights) @ G, tail, inside)


def check(found, scores, k):
    """Compare with the k highest and the k lowest of the queries' scores."""
    expected = np.sort(scores[QUERIES], axis=1)
    for side, wanted in ((found.proponents, expected[:, ::-1][:, :k]), (found.opponents, expected[:, :k])):
        assert np.allclose(side.scores, wanted, rtol=1e-4, atol=1e-5 * np.abs(scores).max())


@pytest.mark.parametrize("normalize", [None, "gradient", "features", "metric"])
def test_stored_answers_are_normalised(normalize, run, dense):
    found = et.open_run(run.path).explain(QUERIES, k=9, normalize=normalize, exclude=None)
    assert found.how == KEPT
    scores = dense.answer(normalize, whole=False)
    check(found, scores / ROWS if normalize is None else scores, 9)


def test_unit_features_are_never_rescored(run):
    # The model is at hand, but what it would add has no features.
    found = run.explain(QUERIES, k=9, normalize="features", exclude=None)
    assert found.how == KEPT
    assert found.unit is None
    with refused(InputError, "normalize='features'", "rescore=True"):
        run.explain(QUERIES, normalize="features", rescore=True)


@pytest.mark.parametrize("normalize", [None, "gradient", "metric"])
def test_answers_of_the_model_are_those_of_the_whole_metric(normalize, run, dense):
    found = run.explain(QUERIES, k=9, normalize=normalize, exclude=None)
    assert (found.how, found.shortlist) == (EXACT, None)
    scores = dense.answer(normalize, whole=True)
    check(found, scores / ROWS if normalize is None else scores, 9)


def test_every_example_is_most_like_itself(run, fitted, tmp_path):
    stored = et.score(fitted.stored(examples(), coordinates=20), examples(), tmp_path / "x")
    half = et.score(fitted, examples(), tmp_path / "half", features="fp16")
    for opened in (run, stored, half):
        found = et.open_run(opened.path).explain(np.arange(ROWS), k=3, normalize="metric", exclude=None)
        assert found.unit == "cosine"
        assert np.allclose(found.proponents.scores[:, 0], 1, atol=1e-3)
        assert (np.abs(found.proponents.scores) <= 1 + 1e-3).all()
        assert (found.proponents.rows == np.arange(ROWS)[:, None]).any(axis=1).all()
    whole = et.open_run(run.path).explain(np.arange(ROWS), k=1, normalize="metric", exclude=None)
    assert np.array_equal(whole.proponents.rows[:, 0], np.arange(ROWS))


@pytest.mark.parametrize("normalize", [None, "gradient", "metric"])
def test_candidates_are_those_of_a_tail_that_is_a_tenth_alike(normalize, run, dense):
    kept, tails = dense.products(dense.kept), np.diag(dense.products(dense.tail))
    sizes = np.ones(ROWS)
    if normalize is not None:
        one = torch.eye(len(dense.kept), dtype=torch.float64)
        sizes = np.sqrt(np.diag(dense.products(dense.kept + dense.tail if normalize == "metric" else one)))
    share = 0.1 * np.sqrt(np.outer(tails, tails))
    whole = dense.answer(normalize, whole=True) / (ROWS if normalize is None else 1)
    found = run.explain(QUERIES, k=5, normalize=normalize, exclude=None, shortlist=20)
    assert (found.how, found.shortlist) == (RESCORED, 20)
    for place, row in enumerate(QUERIES):
        high, low = ((sign * kept + share)[row] / sizes for sign in (1, -1))
        listed = np.union1d(np.argsort(-high)[:10], np.argsort(-low)[:10])
        ranked = listed[np.argsort(whole[row, listed])]
        assert np.allclose(found.opponents.scores[place], whole[row, ranked[:5]], rtol=1e-4, atol=1e-7)
        assert np.allclose(found.proponents.scores[place], whole[row, ranked[::-1][:5]], rtol=1e-4, atol=1e-7)


def test_a_large_tail_is_not_overlooked(run, dense):
    """Among the same number of candidates are more of the strongest than the kept directions alone would name."""
    whole, kept = dense.answer(None, whole=True), dense.products(dense.kept)
    found = run.explain(np.arange(ROWS), k=5, exclude=None, shortlist=12)
    ours = by_kept = 0
    for row in range(ROWS):
        for sign, side in ((-1, found.proponents), (1, found.opponents)):
            best = set(np.argsort(sign * whole[row])[:5])
            ours += len(best & set(side.rows[row]))
            by_kept += len(best & {*np.argsort(kept[row])[:6], *np.argsort(-kept[row])[:6]})
    assert ours > by_kept
