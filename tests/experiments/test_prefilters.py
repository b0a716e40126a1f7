"""The rules of the prefilter: thresholds are where the page says, and distances are right."""

import numpy as np
import pytest

from experiments.translation.parts.corpora import Corpora, Texts
from experiments.translation.parts.noisy_corpus import halves
from experiments.translation.parts.prefilters import (
    DOUBT,
    Prefiltered,
    afrl,
    alibaba,
    are_alike,
    languages_told,
    learned_languages,
    microsoft,
    within,
)


def texts(*pairs):
    return Texts([german for german, _ in pairs], [english for _, english in pairs], [""] * len(pairs))


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    return Corpora(None, tmp_path_factory.mktemp("cache"), small=True)


@pytest.fixture(scope="module")
def languages(corpora):
    return learned_languages(corpora)


def distance(first, second):
    """Levenshtein's, by the whole table."""
    table = np.zeros((len(first) + 1, len(second) + 1), dtype=int)
    table[:, 0], table[0] = np.arange(len(first) + 1), np.arange(len(second) + 1)
    for i, one in enumerate(first, start=1):
        for j, other in enumerate(second, start=1):
            changed = table[i - 1, j - 1] + (one != other)
            table[i, j] = min(changed, table[i - 1, j] + 1, table[i, j - 1] + 1)
    return int(table[-1, -1])


def test_distances_are_those_of_the_whole_table():
    chance = np.random.default_rng(0)
    for _ in range(300):
        first = "".join(chance.choice(list("abc"), size=chance.integers(0, 9)))
        second = "".join(chance.choice(list("abc"), size=chance.integers(0, 9)))
        true = distance(first, second)
        assert [within(first, second, most) for most in range(10)] == [true <= most for most in range(10)]


def test_sides_that_are_alike_go():
    assert are_alike("Trinidad", "Trinidad")
    assert are_alike("Trinidad", "Trinidat")
    assert not are_alike("Hund", "Hut!")  # two edits
    long = "x" * 40
    assert are_alike(long, "y" * 3 + long[3:])  # 3 of 40 are less than a tenth
    assert not are_alike(long, "y" * 4 + long[4:])  # 4 are not
    assert alibaba(texts(("Ja.", "Yes."), ("Ja.", "Ja!"))).tolist() == [True, False]


def test_word_counts_may_differ_threefold():
    three, four = "eins zwei drei", "eins zwei drei vier"
    found = afrl(texts(("eins", three), ("eins", four), (three, "one"), (four, "one"), ("eins", "one")))
    assert found.tolist() == [True, False, True, False, True]


def test_words_have_thirty_characters_at_most():
    found = afrl(texts(("a" * 30, "b"), ("a" * 31, "b"), ("a", "b" * 31), ("a a", "b " + "c" * 30)))
    assert found.tolist() == [True, False, False, True]


def test_both_sides_must_be_in_their_language(corpora, languages):
    dev = corpora.texts("dev")
    german, english, french = dev.german[0], dev.english[0], "Mon père lit un bon livre."
    pairs = texts((german, english), (english, german), (german, german), (french, english), (german, "3 5."))
    assert microsoft(pairs, languages).tolist() == [True, False, False, False, False]


def test_a_sentence_in_doubt_stays(languages):
    doubtful = next(
        word for word in ("an", "in", "Anna", "so", "a", "e", "i", "s") if -DOUBT < languages.lead([word], "de")[0] < 0
    )
    english = "The dog is sleeping in the garden."
    assert microsoft(texts((doubtful, english)), languages).all()


def test_the_classifier_learns_from_one_half_and_is_tested_on_the_other(corpora, languages):
    learned, kept = halves(corpora.texts("wrong_language"))
    assert not set(learned.german) & set(kept.german)
    assert sorted(learned.german + kept.german) == sorted(corpora.texts("wrong_language").german)
    assert set(languages.names) == {"de", "en"} | set(learned.verdicts)
    told = languages_told(corpora, languages)
    assert min(told.values()) > 95
    assert told["German stays"] >= told["German"]
    assert told["other goes as German"] <= told["other, not German"]


def test_a_pair_must_pass_all_rules(corpora, languages):
    dev = corpora.texts("dev")
    pairs = texts((dev.german[0], dev.english[0]), (dev.german[0], dev.german[0]), ("Ja", dev.english[0] * 5))
    found = Prefiltered.of(pairs, languages)
    assert list(found.by_rule) == ["AFRL", "Alibaba", "Microsoft"]
    assert found.kept.tolist() == [True, False, False]
