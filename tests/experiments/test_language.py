"""The language classifier: it is naive Bayes, and says so where it cannot know."""

import numpy as np
import pytest

from experiments.translation.parts.language import LONGEST_GRAM, PRIOR_COUNT, ROWS, Languages, letters
from experiments.translation.parts.phrases import foreign, phrases

GERMAN, ENGLISH = (list(side) for side in zip(*phrases(), strict=True))
OTHER = {name: [one for one, _, said in foreign() if said == name] for name in ("es", "fr")}


@pytest.fixture(scope="module")
def languages():
    half = {"de": GERMAN[::2], "en": ENGLISH[::2]} | {name: found[::2] for name, found in OTHER.items()}
    return Languages.learned(half)


def test_only_letters_count():
    assert letters("Größe: 3,5 cm (O'Neill)") == "größe cm o neill"
    assert letters("12.04.2011 — 3!") == ""


def test_evidence_is_the_sum_over_grams_of_log_frequencies():
    languages = Languages.learned({"a": ["ab", "ab"], "b": ["ba"]})
    # " ab " has four single signs, three pairs, two triples and one gram of four.
    grams = [" ab "[i : i + n] for n in range(1, LONGEST_GRAM + 1) for i in range(4 - n + 1)]
    assert len(grams) == 10
    found = {}
    for name, text in (("a", " ab  ab "), ("b", " ba ")):
        words = text.split("  ")
        counts = {}
        for word in words:
            padded = f" {word.strip()} "
            for n in range(1, LONGEST_GRAM + 1):
                for i in range(len(padded) - n + 1):
                    counts[padded[i : i + n]] = counts.get(padded[i : i + n], 0) + 1
        total = sum(counts.values()) + PRIOR_COUNT * ROWS
        found[name] = sum(np.log((counts.get(gram, 0) + PRIOR_COUNT) / total) for gram in grams)
    assert languages.evidence(["ab"])[0] == pytest.approx([found["a"], found["b"]], rel=1e-5)


def test_sentences_have_no_say_in_each_others_evidence(languages):
    together = languages.evidence([GERMAN[1], "", ENGLISH[3], "7", OTHER["fr"][5]])
    for row, one in zip(together, [GERMAN[1], "", ENGLISH[3], "7", OTHER["fr"][5]], strict=True):
        assert row == pytest.approx(languages.evidence([one])[0])
    assert languages.evidence([]).shape == (0, 4)
    many = languages.evidence(GERMAN * 12)
    assert many[-1] == pytest.approx(many[len(GERMAN) - 1])


def test_unseen_sentences_are_told_apart(languages):
    for name, sentences in ({"de": GERMAN[1::2], "en": ENGLISH[1::2]} | {k: v[1::2] for k, v in OTHER.items()}).items():
        assert np.mean([guess == name for guess in languages.guessed(sentences)]) > 0.97
        lead = languages.lead(sentences, name)
        assert np.array_equal(lead > 0, [guess == name for guess in languages.guessed(sentences)])


def test_where_there_are_no_letters_nothing_is_ahead(languages):
    assert languages.lead(["2011", "...", ""], "de").tolist() == [0, 0, 0]
    assert languages.lead(GERMAN[:1], "de")[0] > 10
