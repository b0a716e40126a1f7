"""Rank agreement of two halves: against scipy, at its limits, and kept with the fit."""

import dataclasses

import pytest
import torch
from scipy.stats import spearmanr
from torch import nn

import eigentrace as et
from eigentrace.errors import InputError
from tests.helpers.expecting import expect_mentions, refused
from tests.helpers.small import examples, net

METHOD = et.Arnoldi(steps=30, keep=5)


@pytest.fixture
def batch():
    x, y = examples(60)
    return x.double(), y


@pytest.fixture
def task():
    return et.classification(net().double())


class Fixed:
    """A method whose scores depend on which examples it was fitted on only through `answer`."""

    def __init__(self, answer):
        self.answer = answer

    def fit(self, task, data, *, num_train=None):
        return self

    def self_influence(self, data):
        return self.answer(len(data))

    def influence(self, train, queries):
        return self.answer(len(queries) * len(train)).view(len(queries), len(train))


def asked(answer, batch):
    seen = []

    @dataclasses.dataclass(frozen=True)
    class Method:
        sample: int | None = 40
        seed: int = 0

        def fit(self, task, data, *, num_train=None):
            seen.append(torch.cat([b.values[0] for b in data.batches()]))
            return Fixed(answer)

    return et.rank_agreement(Method(), None, batch), seen


@pytest.mark.parametrize("ties", [False, True])
def test_rank_correlation_is_scipys(ties, batch):
    given = {60: [], 8 * 60: []}

    def answer(count):
        scores = torch.randn(count, dtype=torch.float64)
        given[count].append((scores * 2).round() if ties else scores)
        return given[count][-1]

    found, _ = asked(answer, batch)
    assert found.self_influence == pytest.approx(spearmanr(*given[60]).statistic, abs=1e-12)
    pairs = zip(*(scores.view(8, 60) for scores in given[8 * 60]), strict=True)
    expected = [spearmanr(a, b).statistic for a, b in pairs]
    assert found.influence == pytest.approx(sum(expected) / 8, abs=1e-12)


def test_queries_whose_scores_do_not_vary_are_left_out(batch):
    def answer(count):
        scores = torch.arange(60.0).repeat(count // 60, 1)
        scores[1:] = 1.0
        return scores.flatten()

    found, _ = asked(answer, batch)
    assert found.influence == pytest.approx(1.0)
    nothing, _ = asked(torch.ones, batch)
    assert (nothing.self_influence, nothing.influence) == (None, None)
    expect_mentions(str(nothing), ["undefined", "self-influence"])


def test_the_halves_are_disjoint_and_come_from_the_sample(batch):
    found, (first, second) = asked(lambda n: torch.arange(n).double(), batch)
    assert (found.self_influence, found.influence) == (pytest.approx(1.0), pytest.approx(1.0))
    assert (found.half, found.examples, found.queries) == (20, 60, 8)
    rows = {tuple(row.tolist()) for row in torch.cat([first, second])}
    assert len(first) == len(second) == 20
    assert len(rows) == 40


def test_noise_agrees_about_nothing(batch):
    x, y = examples(2000)
    found, _ = asked(torch.randn, (x, y))
    assert abs(found.self_influence) < 0.25
    assert abs(found.influence) < 0.1


def test_a_fit_keeps_it_through_saving_and_cutting(task, batch, tmp_path):
    fitted = dataclasses.replace(METHOD, reliability=True).fit(task, batch)
    found = fitted.reliability
    assert isinstance(found, et.Reliability)
    assert found == et.rank_agreement(METHOD, task, batch)
    assert -1 <= found.influence <= 1
    assert found.self_influence > 0.3  # two halves of 30 examples of one small model
    expect_mentions(str(found), [f"{found.self_influence:.3f}", f"{found.influence:.3f}"])
    fitted.save(tmp_path / "fit")
    assert et.load(tmp_path / "fit", task).reliability == found
    assert fitted.distill(keep=3).reliability == found


def test_it_changes_no_score_and_is_off_unless_asked_for(task, batch):
    plain = METHOD.fit(task, batch)
    measured = dataclasses.replace(METHOD, reliability=True).fit(task, batch)
    assert plain.reliability is None
    assert et.Loss().fit(task, batch).reliability is None
    assert torch.equal(plain.influence(batch, batch), measured.influence(batch, batch))


def test_more_examples_agree_more():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1600, 3, generator=generator).double()
    y = torch.randint(0, 3, (1600,), generator=generator)
    task = et.classification(nn.Linear(3, 3).double(), l2=1e-3)
    few, many = (
        et.rank_agreement(et.Arnoldi(steps=12, keep=12, sample=size, tail=1e-3), task, (x, y)) for size in (32, 1600)
    )
    assert many.influence > few.influence
    assert many.influence > 0.98


def test_what_is_refused(task, batch):
    with refused(InputError, "sample", 16, 10):
        et.rank_agreement(et.Arnoldi(steps=10, keep=2, sample=10), task, batch)
    with refused(InputError, "RandProj"):
        et.rank_agreement(et.RandProj(), task, batch)
    with refused(InputError, "reliability", 1):
        et.Arnoldi(reliability=1)
    with refused(InputError, "queries", 0):
        et.rank_agreement(METHOD, task, batch, queries=0)
