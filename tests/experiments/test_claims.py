"""Claims of the paper: each is judged by the stored numbers, stands on the page, and follows its numbers."""

import json
from copy import deepcopy
from functools import cache

import numpy as np
import pytest

from experiments import paper
from experiments.digits import mnist_large, mnist_long
from experiments.images.parts import resnet_cifar_page
from experiments.shared import claims
from experiments.shared.claims import (
    NOT_SEEN,
    SEEN,
    UNDECIDED,
    Claim,
    MissingNumberError,
    Pair,
    Sample,
    in_order,
    order,
    paired,
)
from tests.helpers.expecting import expect_mentions, refused
from tests.helpers.places import ROOT

FOLDER = ROOT / "docs" / "results"
MIRRORED = {SEEN: NOT_SEEN, NOT_SEEN: SEEN, UNDECIDED: UNDECIDED}


@cache
def stored(name):
    """The results of an experiment, of the first machine."""
    return next(iter(json.loads((FOLDER / "data" / f"{name}.json").read_text()).values()))


ALL = [(each.name, claim) for each in paper.experiments() for claim in each.claims]
ORDERS = [pytest.param(name, claim, id=f"{name}: {claim.text[:50]}") for name, claim in ALL if claim.pairs]
OTHERS = {f"{name}: {claim.text[:20]}": (name, claim) for name, claim in ALL if not claim.pairs}


def of(records, *place):
    for key in place:
        records = records[key]
    return records


def put(records, place, value):
    of(records, *place[:-1])[place[-1]] = value


def of_one_training(first, second, deviations=(None, None), stated=None):
    samples = (Sample({"": v}, {"": ()}, d) for v, d in zip((first, second), deviations, strict=True))
    return Pair("", *samples, stated)


def of_trainings(first, second, stated=None):
    samples = ({str(seed): value for seed, value in enumerate(values)} for values in (first, second))
    return Pair("", *(Sample(values, dict.fromkeys(values, ())) for values in samples), stated)


def test_every_experiment_has_claims_of_which_one_is_in_the_summary():
    for experiment in paper.experiments():
        assert any(claim.is_main for claim in experiment.claims), experiment.name


@pytest.mark.parametrize(("name", "claim"), ALL)
def test_every_claim_is_judged_by_the_stored_numbers(name, claim):
    found = claim.on(stored(name))
    assert found.outcome in MIRRORED
    assert "Not measured" not in found.evidence
    assert any(sign.isdigit() for sign in found.evidence)
    assert found.brief in ("", found.evidence) or len(found.brief) <= 200


def test_the_page_has_every_claim_with_its_outcome_and_fits_the_reader():
    page = (FOLDER / "paper.md").read_text(encoding="utf-8")
    summary, _, sections = page.partition("\n## ")
    assert page.count("\n") < 650
    listed = [line for line in summary.splitlines() if line.startswith("- ")]
    assert len(listed) == sum(claim.is_main for _, claim in ALL) <= 24
    assert all(line.startswith(("- **Seen.** ", "- **Not seen.** ", "- **Cannot be told.** ")) for line in listed)
    for name, claim in ALL:
        assert f"- {claim.line(stored(name))}\n" in sections
        assert f"- {claim.line(stored(name))}\n" in (FOLDER / f"{name}.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(("name", "claim"), ORDERS)
def test_an_order_turns_with_its_numbers(name, claim):
    """Swapping the numbers of a pair in the records mirrors its outcome; a claim that was seen is then not seen."""
    before = claim.on(stored(name)).outcome
    for place, pair in enumerate(claim.pairs(stored(name))):
        records = deepcopy(stored(name))
        assert pair.first.places.keys() == pair.second.places.keys()
        for training, here in pair.first.places.items():
            there = pair.second.places[training]
            one, other = of(records, *here), of(records, *there)
            put(records, here, other)
            put(records, there, one)
        swapped = claim.pairs(records)[place]
        assert swapped.gap == pytest.approx(-pair.gap)
        assert swapped.outcome == MIRRORED[pair.outcome]
        if before == SEEN:
            assert claim.on(records).outcome == NOT_SEEN


def _scaled(place, factor):
    return lambda records: put(records, place, factor * of(records, *place))


def _set(value, *places):
    def mutate(records):
        for place in places:
            put(records, place, value)

    return mutate


def _swapped(first, second):
    def mutate(records):
        one, other = of(records, *first), of(records, *second)
        put(records, first, other)
        put(records, second, one)

    return mutate


def _cells(part, names, key):
    return [(part, "cells", name, key) for name in names]


def _as_published(rows, *parts):
    def mutate(records):
        for part in parts or records:
            for name, cell in records[part]["cells"].items():
                if (row := name.rpartition(", seed ")[0]) in rows:
                    cell["ap"] = rows[row].ap

    return mutate


def _arrays(part, start, change):
    """Change the AP of every fit and seed of the noise of a score."""

    def mutate(records):
        for name, cell in records[part]["cells"].items():
            if name.startswith(start):
                cell["ap"] = change(np.array(cell["ap"])).tolist()

    return mutate


def _with_the_papers_table(records):
    for (share, method, keep), (_, ap) in resnet_cifar_page.PAPER.items():
        part = next(part for part, name in resnet_cifar_page.SHARES.items() if name == share)
        _arrays(part, f"{method}, K={keep},", lambda aps, ap=ap: 0 * aps + ap)(records)


def _without(*names):
    return lambda records: [records.pop(name) for name in names]


def _correlations(low, high):
    return _cells("exemplars", ("Arnoldi", "Arnoldi per token"), f"spearman {low}-{high}")


MUTATIONS = {
    "error_analysis: What is left out of ": (
        _set(1.1, *_cells("quadratic", ["k=10"], "largest_share_of_bound")),
        NOT_SEEN,
    ),
    "error_analysis: What is left out is ": (_set(0, *_cells("network", ["network"], "negative")), NOT_SEEN),
    "error_analysis: Under noise in the H": (
        _set(0.1, *_cells("noise", ["alignment"], "slope_batches")),
        SEEN,
    ),
    "mnist_small: With large K, Arnold": (
        _set(0, *_cells("eigenvalues", ["exact"], "negative")),
        SEEN,
    ),
    "mnist_large: The AP of every row ": (_as_published(mnist_large.PAPER), SEEN),
    "mnist_long: Without ℓ2, the AP o": (_as_published(mnist_long.PAPER["plain"], "plain"), SEEN),
    "mnist_long: With ℓ2, the AP of e": (_as_published(mnist_long.PAPER["l2"], "l2"), SEEN),
    "mnist_large: Products on all digi": (
        _scaled(("arnoldi", "cells", "Arnoldi, all digits, K=10, seed 0", "ap"), 0.9),
        NOT_SEEN,
    ),
    "mnist_large: LiSSA scores about t": (_scaled(("lissa", "cells", "LiSSA, r=10, seed 0", "seconds"), 1000), SEEN),
    "mnist_large: Arnoldi scores ten t": (
        _scaled(("gradients", "cells", "TracIn, C=10, seed 0", "seconds"), 100),
        NOT_SEEN,
    ),
    "mnist_neighbours: Most proponents of a": (
        _set(
            90.0,
            *_cells("neighbours", [f"paper, wrong, proponents, {n}, seed 0" for n in ("no", "yes")], "same_given"),
        ),
        SEEN,
    ),
    "inverse_arnoldi: The inverse finds no": (
        _swapped(*_cells("inverse", ["Arnoldi on H⁻¹, K=100, seed 0", "Arnoldi, K=100, seed 0"], "ap")),
        NOT_SEEN,
    ),
    "resnet_cifar: Self-influence finds": (_arrays("all", "RandProj, K=20", lambda aps: 0 * aps + 56), NOT_SEEN),
    "resnet_cifar: The top tenth of the": (_swapped(("top10",), ("all",)), NOT_SEEN),
    "resnet_cifar: Arnoldi is ahead of ": (_with_the_papers_table, SEEN),
    "resnet_cifar: Arnoldi finds more w": (_arrays("top10", "Arnoldi, K=20", lambda aps: aps + 9), NOT_SEEN),
    "resnet_cifar: Negative eigenvalues": (
        _set(7.0, *_cells("all", [f"Arnoldi, K=10, fit {fit}" for fit in range(3)], "negative")),
        SEEN,
    ),
    "image_exemplars: With unit gradients,": (
        _set(
            0.9,
            *(
                (part, "cells", f"explained/paper/{way}", "own_first")
                for part in ("cifar", "cifar_resnet20")
                for way in ("gradient", "features")
            ),
        ),
        SEEN,
    ),
    "mt_retrieval: Forward mode takes l": (
        _set(2.0**40, *_cells("memory", ["20 dense directions, forward mode, one at a time, batch 512"], "peak")),
        NOT_SEEN,
    ),
    "scaling: The time of a fit gr": (_without("resnet_50", "transformer_base"), SEEN),
    "scaling: The same among visio": (_scaled(("vit_b_32", "cells", "orthogonalisation/200", "seconds"), 30), NOT_SEEN),
    "mt_exemplars: In the cleanest tent": (_set(0.5, *_correlations(0, 10)), SEEN),
    "mt_exemplars: Between 70 and 100%,": (_set(-0.2, *_correlations(70, 100)), SEEN),
    "throughput: Millions of pairs ar": (
        _set(1e6, *_cells("throughput", ["forward, bf16, batch 512"], "per_hour")),
        NOT_SEEN,
    ),
}
"""A change of the stored numbers for every claim that is not an order, and the outcome that it must have then."""


def test_every_claim_that_is_no_order_has_a_mutation():
    assert MUTATIONS.keys() == OTHERS.keys()


@pytest.mark.parametrize("which", MUTATIONS)
def test_other_claims_turn_with_their_numbers_too(which):
    (name, claim), (mutate, outcome) = OTHERS[which], MUTATIONS[which]
    records = deepcopy(stored(name))
    mutate(records)
    assert claim.on(stored(name)).outcome != claim.on(records).outcome == outcome


@pytest.mark.parametrize(
    ("pair", "outcome"),
    [
        (of_one_training(3.0, 1.0, stated=0.7), SEEN),  # 2 > 2 · √2 · 0.7 = 1.98
        (of_one_training(1.0, 3.0, stated=0.7), NOT_SEEN),
        (of_one_training(2.9, 1.0, stated=0.7), UNDECIDED),
        (of_one_training(9.0, 1.0, (3.0, 4.0), stated=0.1), UNDECIDED),  # its own spread counts, 2 · 5
        (of_one_training(12.0, 1.0, (3.0, 4.0), stated=0.1), SEEN),
        (of_one_training(99.0, 1.0), UNDECIDED),  # no spread is known
        (of_trainings([5.0, 6.0, 7.0], [4.0, 5.1, 5.9]), SEEN),  # paired: differences of 1, .9 and 1.1
        (of_trainings([4.0, 5.1, 5.9], [5.0, 6.0, 7.0]), NOT_SEEN),
        (of_trainings([5.0, 6.0, 7.0], [4.0, 6.1, 5.0]), UNDECIDED),
        (of_trainings([5.0, 5.1], [4.9, 5.05]), UNDECIDED),  # t is 3 with one degree of freedom
    ],
)
def test_what_it_takes_to_tell_an_order(pair, outcome):
    assert pair.outcome == outcome


def test_trainings_are_paired_by_name():
    first = Sample({"0": 1.0, "1": 5.0, "2": 3.0}, {})
    second = Sample({"1": 4.0, "0": 0.1, "3": 9.0}, {})
    pair = Pair("", first, second)
    assert pair.gap == pytest.approx(0.95)
    assert pair.needed == pytest.approx(6.31 * 0.0707 / 2**0.5, rel=1e-3)


def test_a_training_that_one_score_lacks_is_left_out():
    first, second = Sample({"0": 5.0}, {"0": ("a",)}), Sample({"0": 4.0, "1": 100.0}, {"0": ("b",), "1": ("c",)})
    pair = paired("", [first, second], 0.1)
    assert (pair.gap, pair.outcome) == (1.0, SEEN)
    assert pair.second.places == {"0": ("b",)}


def test_a_claim_about_several_pairs_needs_all_of_them():
    ahead, level, behind = (of_one_training(value, 5.0, stated=0.1) for value in (9.0, 5.1, 1.0))
    hindered = Pair("", ahead.first, ahead.second, 0.1, "other digits")
    for pairs, outcome in (
        ([ahead, ahead], SEEN),
        ([ahead, level], UNDECIDED),
        ([level, behind, ahead], NOT_SEEN),
        ([ahead, hindered], UNDECIDED),
    ):
        assert in_order("AP", pairs).outcome == outcome
    found = in_order("AP", [level, behind, ahead])
    expect_mentions(found.evidence, ["AP, 1 training", "not seen: 1 against 5", "cannot be told: 5.1 against 5"])
    assert found.brief == "AP, 1 training: 1 against 5."
    assert "other digits" in in_order("AP", [hindered]).brief


def test_numbers_that_are_missing_leave_a_claim_untold():
    def pairs(records):
        return [Pair("", *(claims.cell_sample(records, "part", name, "ap", "ap_sd") for name in ("a", "b")))]

    claim = order("a over b.", "AP", pairs)
    good, failed = {"ap": 2.0, "ap_sd": 0.1}, {"failed": "out of memory"}
    assert claim.on({"part": {"cells": {"a": good, "b": good | {"ap": 1.0}}}}).outcome == SEEN
    for records in ({}, {"part": {"cells": {"a": good}}}, {"part": {"cells": {"a": good, "b": failed}}}):
        found = claim.on(records)
        assert found.outcome == UNDECIDED
        assert "Not measured" in found.evidence
    with refused(MissingNumberError, "part"):
        claims.number({}, "part", "cells", "a", "ap")
    assert Claim("c", lambda records: claims.Finding(SEEN, "of 3")).line({}) == "**Seen.** c *of 3*"


def test_a_share_of_nothing_has_a_spread():
    records = {"part": {"cells": {"a": {"share": 0.0}, "b": {"share": 50.0}}}}
    nothing = claims.percent(records, ("part", "cells", "a", "share"), 98)
    assert nothing.mean == 0
    assert nothing.deviation == pytest.approx(100 * (0.01 * 0.99 / 98) ** 0.5)
    half = claims.percent(records, ("part", "cells", "b", "share"), 100, scale=1)
    assert (half.mean, half.deviation) == pytest.approx((50.0, 5.0))
