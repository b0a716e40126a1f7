"""The noisy corpus: every kind is what the page says it is, and no pair comes twice."""

import numpy as np
import pytest

from experiments.translation.parts.corpora import Corpora
from experiments.translation.parts.noisy_corpus import (
    CLEAN,
    COMPARABLE,
    CRAWL,
    JUDGED,
    KINDS,
    OTHER_LANGUAGE,
    NoisyCorpus,
    described,
    halves,
)


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    return Corpora(None, tmp_path_factory.mktemp("cache"), small=True)


@pytest.fixture(scope="module")
def corpus(corpora):
    return NoisyCorpus.of(corpora)


def sides(corpus, kind):
    here = corpus.take(np.flatnonzero(corpus.kinds == kind)).texts
    return list(zip(here.german, here.english, strict=True))


def pairs_of(texts):
    return list(zip(texts.german, texts.english, strict=True))


def test_no_pair_comes_twice_and_none_was_trained_on(corpora, corpus):
    everything = pairs_of(corpus.texts)
    assert len(set(everything)) == len(everything)
    assert not set(everything) & set(pairs_of(corpora.texts("train")))
    assert all(corpus.counts().values())
    assert list(corpus.counts()) == list(KINDS)
    assert corpus.counts()[CLEAN] <= len(corpus) / 3


def test_clean_pairs_are_withheld_ones_that_no_noise_is_made_of(corpora, corpus):
    withheld = set(pairs_of(corpora.texts("withheld")))
    clean = sides(corpus, CLEAN)
    assert set(clean) <= withheld
    german, english = (set(side) for side in zip(*clean, strict=True))
    for kind in ("no translation", "both German", "both English"):
        for pair in sides(corpus, kind):
            assert not set(pair) & (german | english)


def test_exchanged_targets_are_true_sentences_of_other_pairs(corpora, corpus):
    withheld = pairs_of(corpora.texts("withheld"))
    own = dict(withheld)
    for german, english in sides(corpus, "no translation"):
        assert english in own.values()
        assert own[german] != english


def test_both_sides_are_of_one_language(corpora, corpus):
    withheld = corpora.texts("withheld")
    for kind, sentences in (("both German", withheld.german), ("both English", withheld.english)):
        for one, other in sides(corpus, kind):
            assert {one, other} <= set(sentences)
            assert one != other


def test_partial_pairs_have_one_side_whole_and_lack_or_add_something(corpora, corpus):
    own = dict(pairs_of(corpora.texts("withheld")))
    ways = {"source cut": 0, "target cut": 0, "source joined": 0, "target joined": 0}
    whole = {english: german for german, english in own.items()}
    for german, english in sides(corpus, "partial"):
        if german in own:
            ways["target cut" if english in own[german] else "target joined"] += 1
            assert english in own[german] or english.startswith(own[german] + " ")
            assert english != own[german]
        else:
            ways["source cut" if german in whole[english] else "source joined"] += 1
            assert german in whole[english] or german.startswith(whole[english] + " ")
    assert all(ways.values())


def test_near_copies_are_of_the_source(corpora, corpus):
    withheld = corpora.texts("withheld")
    same = 0
    for one, other in sides(corpus, "near copy"):
        assert one in withheld.german + withheld.english
        assert abs(len(one) - len(other)) <= max(len(word) for word in one.split()) + 1
        same += one == other
    assert 0 < same < corpus.counts()["near copy"]


def test_the_half_that_the_classifier_learns_from_is_not_in_the_corpus(corpora, corpus):
    learned, kept = halves(corpora.texts("wrong_language"))
    here = [one for pair in sides(corpus, OTHER_LANGUAGE) for one in pair]
    assert not set(here) & set(learned.german)
    assert set(kept.german) <= set(here)


def test_pairs_without_information_have_no_letters_here(corpus):
    found = sides(corpus, "no information")
    assert not any(sign.isalpha() for pair in found for one in pair for sign in one)
    assert any(one == other for one, other in found)
    assert any(one != other for one, other in found)


def test_verdicts_stay_with_the_judged_pairs(corpora, corpus):
    judged = corpora.texts("judged")
    said = dict(zip(pairs_of(judged), judged.verdicts, strict=True))
    for german, english, verdict, kind in zip(
        corpus.texts.german, corpus.texts.english, corpus.texts.verdicts, corpus.kinds, strict=True
    ):
        assert verdict == (said[german, english] if kind == JUDGED else "")
    assert corpus.counts()[CRAWL] == len(corpora.texts("crawl"))


def test_captions_are_clean_pairs_of_that_origin_and_all_comparable_ones(corpora, corpus):
    withheld = corpora.texts("withheld")
    origin = dict(zip(pairs_of(withheld), withheld.verdicts, strict=True))
    clean = {pair: found for pair, found in zip(pairs_of(corpus.texts), corpus.captions, strict=True) if pair in origin}
    assert {found == origin[pair].startswith("multi30k") for pair, found in clean.items()} == {True}
    assert set(clean.values()) == {True, False}
    assert corpus.captions[corpus.kinds == COMPARABLE].all()
    assert not corpus.captions[~np.isin(corpus.kinds, [CLEAN, COMPARABLE])].any()
    rows = np.flatnonzero(corpus.captions)
    assert corpus.take(rows).captions.all()


def test_the_corpus_follows_from_the_seed(corpora, corpus):
    again, other = NoisyCorpus.of(corpora), NoisyCorpus.of(corpora, seed=1)
    assert again.texts == corpus.texts
    assert np.array_equal(again.kinds, corpus.kinds)
    assert other.texts != corpus.texts


def test_tokens_and_kinds_stand_in_one_order(corpora):
    corpus, pairs = NoisyCorpus.tokenised(corpora)
    assert len(pairs) == len(corpus) == len(corpus.kinds)
    some = [0, 5, len(pairs) - 1]
    tokens = [pairs.source[row, : pairs.source_lengths[row]].tolist() for row in some]
    assert corpora.subwords.text(tokens) == [" ".join(corpus.texts.german[row].split()) for row in some]
    found = described(corpus)
    assert sum(cell["pairs"] for cell in found.values()) == len(corpus)
    assert found["no information"]["German words"] < 4
