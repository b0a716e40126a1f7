"""Rules that clean a corpus without a network: the paper's baseline, from three submissions to WMT18.

AFRL's rules use words, Alibaba's the similarity of both sides, Microsoft's their languages. A pair must pass all.
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
"""Largest number of characters of a word. The paper says "tokens", but hardly any word has that many subwords."""
LEAST_DISTANCE = 2
LEAST_RELATIVE = 0.1
DOUBT = 5.0
"""Log-likelihood ratio, in nats, of another language from which a sentence is dropped; short ones are ambiguous."""
# Number of German and English sentences to train the classifier on; there are far fewer of other languages.
_LEARNED_FROM = 5000


def afrl(texts: Texts) -> np.ndarray:  # (N,) bool
    """Keep pairs whose numbers of words differ by a factor of at most three, without words of over 30 characters."""
    words = [[one.split() for one in side] for side in (texts.german, texts.english)]
    german, english = (np.array([max(1, len(one)) for one in side]) for side in words)
    ratio = english / german
    longest = np.array([max(map(len, (*de, *en)), default=0) for de, en in zip(*words, strict=True)], dtype=int)
    return (ratio <= RATIO) & (ratio >= 1 / RATIO) & (longest <= LONGEST_WORD)


def alibaba(texts: Texts) -> np.ndarray:  # (N,) bool
    """Keep pairs whose edit distance is at least two characters, and at least a tenth of their mean length."""
    return np.array(
        [not are_alike(german, english) for german, english in zip(texts.german, texts.english, strict=True)],
        dtype=bool,
    )


def are_alike(first: str, second: str) -> bool:
    """Return whether the edit distance of two sentences is below either threshold."""
    mean = (len(first) + len(second)) / 2
    # The largest distance below a threshold.
    most = max(LEAST_DISTANCE - 1, math.ceil(LEAST_RELATIVE * mean) - 1)
    return within(first, second, most)


def within(first: str, second: str, most: int) -> bool:
    """Return whether the Levenshtein distance of two texts is at most `most`.

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
    # Only a band around the diagonal is computed, row by row, until all distances exceed the limit.
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
    """Return a lower bound of the edit distance: the characters of one text that the other does not have."""
    counts: dict[str, int] = {}
    for sign in first:
        counts[sign] = counts.get(sign, 0) + 1
    for sign in second:
        counts[sign] = counts.get(sign, 0) - 1
    return max(sum(n for n in counts.values() if n > 0), -sum(n for n in counts.values() if n < 0))


def learned_languages(corpora: Corpora, seed: int = 0) -> Languages:
    """Train on German and English of the network's training pairs, and on half of the pairs of other languages."""
    train, foreign = corpora.texts("train"), halves(corpora.texts("wrong_language"), seed)[0]
    some = train.take(np.random.default_rng([seed, 14]).permutation(len(train))[:_LEARNED_FROM])
    sentences = {"de": some.german, "en": some.english}
    for name in sorted(set(foreign.verdicts)):
        sentences[name] = [one for one, said in zip(foreign.german, foreign.verdicts, strict=True) if said == name]
    return Languages.learned(sentences)


def microsoft(texts: Texts, languages: Languages) -> np.ndarray:  # (N,) bool
    """Keep pairs of a German and an English sentence; sentences without letters are dropped."""
    kept = np.ones(len(texts), dtype=bool)
    for side, name in ((texts.german, "de"), (texts.english, "en")):
        kept &= languages.lead(side, name) > -DOUBT
        kept &= np.array([letters(one) != "" for one in side], dtype=bool)
    return kept


@dataclass(frozen=True)
class Prefiltered:
    """The pairs that each rule keeps."""

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
        """The pairs that pass all rules."""
        return np.logical_and.reduce(list(self.by_rule.values()))


def languages_told(corpora: Corpora, languages: Languages, seed: int = 0) -> dict[str, float]:
    """Measure the accuracy of the classifier on held-out sentences, in percent.

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
