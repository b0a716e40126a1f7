"""Rules that clean a corpus without any network: those of three submissions to WMT18 that the paper took as a baseline.

AFRL looks at words, Alibaba at how alike the two sides are, Microsoft at their languages. A pair must pass all.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from experiments.translation.parts.corpora import Corpora, Texts
from experiments.translation.parts.language import Languages, letters
from experiments.translation.parts.noisy_corpus import halves

RATIO = 3.0
LONGEST_WORD = 30
"""Characters. The paper says "tokens"; so many subwords in one word hardly ever come, and addresses are meant."""
LEAST_DISTANCE = 2
LEAST_RELATIVE = 0.1
DOUBT = 5.0
"""Nats by which another language must be ahead for a sentence to go: short ones are hard to tell, and stay."""
# Sentences of German and of English that the classifier learns from; of the other languages it has far fewer.
_LEARNED_FROM = 5000


def afrl(texts: Texts) -> np.ndarray:  # (N,) bool
    """Keep pairs with at most three times as many words on one side as on the other, and none of over 30 characters."""
    words = [[one.split() for one in side] for side in (texts.german, texts.english)]
    german, english = (np.array([max(1, len(one)) for one in side]) for side in words)
    ratio = english / german
    longest = np.array([max(map(len, (*de, *en)), default=0) for de, en in zip(*words, strict=True)], dtype=int)
    return (ratio <= RATIO) & (ratio >= 1 / RATIO) & (longest <= LONGEST_WORD)


def alibaba(texts: Texts) -> np.ndarray:  # (N,) bool
    """Keep pairs whose sides are two edits or more apart, and a tenth of their mean length or more, in characters."""
    return np.array(
        [not are_alike(german, english) for german, english in zip(texts.german, texts.english, strict=True)],
        dtype=bool,
    )


def are_alike(first: str, second: str) -> bool:
    """Tell whether the edit distance of two sentences is below either threshold."""
    mean = (len(first) + len(second)) / 2
    # The largest distance that is below a threshold.
    most = max(LEAST_DISTANCE - 1, math.ceil(LEAST_RELATIVE * mean) - 1)
    return within(first, second, most)


def within(first: str, second: str, most: int) -> bool:
    """Tell whether so many insertions, deletions and exchanges at most make one text the other.

    >>> within("kitten", "sitting", 3), within("kitten", "sitting", 2)
    (True, False)
    """
    if abs(len(first) - len(second)) > most:
        return False
    start = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        start += 1
    first, second = first[start:], second[start:]
    if not first or not second:
        return True
    if _least(first, second) > most:
        return False
    # Only what lies at most so far from the diagonal can be reached; row by row, until nothing is near enough.
    beyond = most + 1
    row = [min(k, beyond) for k in range(len(second) + 1)]
    for i, one in enumerate(first, start=1):
        low, high = max(1, i - most), min(len(second), i + most)
        new = [beyond] * (len(second) + 1)
        new[0] = min(i, beyond)
        for j in range(low, high + 1):
            new[j] = min(row[j - 1] + (one != second[j - 1]), row[j] + 1, new[j - 1] + 1, beyond)
        if min(new[low - 1 : high + 1]) > most:
            return False
        row = new
    return row[-1] <= most


def _least(first: str, second: str) -> int:
    """Return a number of edits that is surely needed: characters of one that the other does not have."""
    counts: dict[str, int] = {}
    for sign in first:
        counts[sign] = counts.get(sign, 0) + 1
    for sign in second:
        counts[sign] = counts.get(sign, 0) - 1
    return max(sum(n for n in counts.values() if n > 0), -sum(n for n in counts.values() if n < 0))


def learned_languages(corpora: Corpora, seed: int = 0) -> Languages:
    """Learn German and English from pairs that the network was trained on, and others from half of their pairs."""
    train, foreign = corpora.texts("train"), halves(corpora.texts("wrong_language"), seed)[0]
    some = train.take(np.random.default_rng([seed, 14]).permutation(len(train))[:_LEARNED_FROM])
    sentences = {"de": some.german, "en": some.english}
    for name in sorted(set(foreign.verdicts)):
        sentences[name] = [one for one, said in zip(foreign.german, foreign.verdicts, strict=True) if said == name]
    return Languages.learned(sentences)


def microsoft(texts: Texts, languages: Languages) -> np.ndarray:  # (N,) bool
    """Keep pairs of a German and an English sentence. One without letters is in no language, and goes."""
    kept = np.ones(len(texts), dtype=bool)
    for side, name in ((texts.german, "de"), (texts.english, "en")):
        kept &= languages.lead(side, name) > -DOUBT
        kept &= np.array([letters(one) != "" for one in side], dtype=bool)
    return kept


@dataclass(frozen=True)
class Prefiltered:
    """What each rule keeps."""

    by_rule: dict[str, np.ndarray]  # each (N,) bool

    @staticmethod
    def of(texts: Texts, languages: Languages) -> "Prefiltered":
        """Apply all rules."""
        rules: dict[str, Callable[[], np.ndarray]] = {
            "AFRL": lambda: afrl(texts),
            "Alibaba": lambda: alibaba(texts),
            "Microsoft": lambda: microsoft(texts, languages),
        }
        return Prefiltered({name: rule() for name, rule in rules.items()})

    @property
    def kept(self) -> np.ndarray:  # (N,) bool
        """What passes all of them."""
        return np.logical_and.reduce(list(self.by_rule.values()))


def languages_told(corpora: Corpora, languages: Languages, seed: int = 0) -> dict[str, float]:
    """Measure, on sentences it has not learned from, in percent, what the classifier gets right.

    German and English are those of the development pairs; other languages the half that goes into the corpus, where
    it is right to say that a sentence is in any language but the one expected.
    """
    dev, foreign = corpora.texts("dev"), halves(corpora.texts("wrong_language"), seed)[1].german
    found = {
        "German": languages.lead(dev.german, "de") > 0,
        "German stays": languages.lead(dev.german, "de") > -DOUBT,
        "English": languages.lead(dev.english, "en") > 0,
        "English stays": languages.lead(dev.english, "en") > -DOUBT,
        "other, not German": languages.lead(foreign, "de") <= 0,
        "other goes as German": languages.lead(foreign, "de") <= -DOUBT,
        "other, not English": languages.lead(foreign, "en") <= 0,
        "other goes as English": languages.lead(foreign, "en") <= -DOUBT,
    }
    return {name: 100 * float(right.mean()) for name, right in found.items()}
