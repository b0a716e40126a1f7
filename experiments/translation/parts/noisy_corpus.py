"""A noisy corpus of real sentences: clean pairs not used for training, and kinds of noise found on the web.

Each pair keeps its kind.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from experiments.translation.parts.corpora import Corpora, Pairs, Texts
from experiments.translation.parts.withheld import withheld

CLEAN, CRAWL, JUDGED = "clean", "web crawl", "judged by people"
COMPARABLE, OTHER_LANGUAGE = "comparable", "other language"
CAPTIONS = "multi30k"
"""Prefix of the origin of photo captions."""
KINDS = {
    CLEAN: "translations, nearly all by people",
    "no translation": "the target of another pair",
    "partial": "one side cut to a part, or with a second sentence behind it",
    COMPARABLE: "captions of one photo, written independently",
    "both German": "two German sentences that have nothing to do with each other",
    "both English": "two English sentences likewise",
    "near copy": "the source again, as it is or with a word or a letter changed",
    OTHER_LANGUAGE: "one side in one of 22 other languages",
    "no information": "one to three numbers or web addresses a side, out of the crawl; the same on both sides, or not",
    CRAWL: "as it was crawled",
    JUDGED: "from published releases of ParaCrawl, already filtered",
}
"""The kinds of pairs, with descriptions."""
WITHOUT_VERDICT = (CRAWL, JUDGED)
"""Kinds that are partly clean and partly noise."""
# Noise is made of a third of the withheld pairs. Of so many of these, two German or two English sentences are put side
# by side, or a copy is made; and there are so many pairs without information.
_HALF = 0.5
_WITHOUT_INFORMATION = 2 / 9
# Sides with fewer words are not cut.
_LEAST_CUT = 6
_PIECE = re.compile(r"(?:https?://|www\.)[^\s)>,]+|\d[\d.,:/-]*\d|\d")

Triples = Iterable[tuple[str, str, str]]
"""German side, English side and human verdict."""


@dataclass(frozen=True)
class NoisyCorpus:
    """Pairs with the kind of each."""

    texts: Texts
    kinds: np.ndarray  # (N,) of str
    captions: np.ndarray  # (N,) of bool
    """Whether both sides describe one photo, as a translation or independently."""

    def __len__(self) -> int:
        return len(self.texts)

    def take(self, rows: np.ndarray) -> "NoisyCorpus":
        """Return some of the pairs."""
        return NoisyCorpus(self.texts.take(rows), self.kinds[rows], self.captions[rows])

    def counts(self) -> dict[str, int]:
        """Count the pairs of each kind."""
        found = Counter(self.kinds.tolist())
        return {kind: found[kind] for kind in KINDS}

    @staticmethod
    def of(corpora: Corpora, seed: int = 0) -> "NoisyCorpus":
        """Assemble the corpus, without duplicates and training pairs."""
        seen = set(_pairs_of(corpora.texts("train")))
        unseen = corpora.texts("withheld")
        captions = {
            pair for pair, said in zip(_pairs_of(unseen), unseen.verdicts, strict=True) if said.startswith(CAPTIONS)
        }
        rows: list[tuple[str, str, str, str]] = []
        for kind, triples in _sources(corpora, seed).items():
            for german, english, verdict in triples:
                if (german, english) not in seen and german.strip() and english.strip():
                    seen.add((german, english))
                    rows.append((kind, german, english, verdict))
        mixed = np.random.default_rng([seed, 11]).permutation(len(rows))
        kinds, *columns = [list(column) for column in zip(*(rows[k] for k in mixed), strict=True)]
        texts = Texts(*columns)
        are_captions = [
            kind == COMPARABLE or pair in captions for kind, pair in zip(kinds, _pairs_of(texts), strict=True)
        ]
        return NoisyCorpus(texts, np.array(kinds, dtype=object), np.array(are_captions))

    @staticmethod
    def tokenised(corpora: Corpora, seed: int = 0) -> tuple["NoisyCorpus", Pairs]:
        """Assemble the corpus; return it and its tokens, without pairs that are too long."""
        corpus = NoisyCorpus.of(corpora, seed)
        pairs = corpora.subwords.pairs(corpus.texts)
        kept = Pairs(pairs.source, pairs.target, np.arange(len(pairs)))
        return corpus.take(pairs.rows), kept


def halves(texts: Texts, seed: int = 0) -> tuple[Texts, Texts]:
    """Split pairs of other languages into those for training the classifier and those for the corpus."""
    mixed = np.random.default_rng([seed, 12]).permutation(len(texts))
    return texts.take(np.sort(mixed[::2])), texts.take(np.sort(mixed[1::2]))


def _sources(corpora: Corpora, seed: int) -> dict[str, Triples]:
    """Return the pairs of each kind, including duplicates."""
    chance = np.random.default_rng([seed, 13])
    unseen = corpora.texts("withheld")
    # No sentence of the noise is in a clean pair either.
    is_material = withheld(unseen.german, unseen.english, seed + 1)
    clean, material = (unseen.take(chance.permutation(np.flatnonzero(is_material == k))) for k in (False, True))
    foreign = halves(corpora.texts("wrong_language"), seed)[1]
    crawl, judged = corpora.texts("crawl"), corpora.texts("judged")
    german, english = material.german, material.english
    half, count = round(_HALF * len(material)), round(_WITHOUT_INFORMATION * len(material))
    return {
        CLEAN: _as_they_are(clean),
        "no translation": _paired(german, english[1:] + english[:1]),
        "partial": _partial(material, chance),
        COMPARABLE: _as_they_are(corpora.texts("comparable")),
        "both German": _paired(german[:half], german[1:half] + german[:1]),
        "both English": _paired(english[half:], english[half + 1 :] + english[half : half + 1]),
        "near copy": ((one, _nearly(one, chance), "") for one in german[half::2] + english[:half:2]),
        OTHER_LANGUAGE: [*_paired(foreign.german, foreign.english), *_paired(german, foreign.german)],
        "no information": _without_information(crawl + judged, count, chance),
        CRAWL: _as_they_are(crawl),
        JUDGED: zip(judged.german, judged.english, judged.verdicts, strict=True),
    }


def _pairs_of(texts: Texts) -> Iterable[tuple[str, str]]:
    return zip(texts.german, texts.english, strict=True)


def _as_they_are(texts: Texts) -> Triples:
    return ((german, english, "") for german, english in _pairs_of(texts))


def _paired(german: Sequence[str], english: Sequence[str]) -> Triples:
    return ((one, other, "") for one, other in zip(german, english, strict=False))


def _partial(texts: Texts, chance: np.random.Generator) -> Triples:
    """Cut the source, cut the target, or append a second sentence to one of them, in turn; short sides are not cut."""
    sides = list(_pairs_of(texts))
    for number, (german, english) in enumerate(sides):
        after = sides[(number + 1) % len(sides)]
        long_enough = min(len(german.split()), len(english.split())) >= _LEAST_CUT
        way = number % 4 if long_enough else 2 + number % 2
        if way == 0:
            yield _cut(german, chance), english, ""
        elif way == 1:
            yield german, _cut(english, chance), ""
        elif way == 2:
            yield f"{german} {after[0]}", english, ""
        else:
            yield german, f"{english} {after[1]}", ""


def _cut(sentence: str, chance: np.random.Generator) -> str:
    """Keep the first or last quarter to half of the words."""
    words = sentence.split()
    size = max(1, round(len(words) * chance.uniform(0.25, 0.5)))
    return " ".join(words[:size] if chance.random() < 0.5 else words[-size:])


def _nearly(sentence: str, chance: np.random.Generator) -> str:
    """Return a sentence unchanged, without a word, with a changed letter, or in upper or lower case."""
    words = sentence.split()
    way = int(chance.integers(4))
    if way == 1 and len(words) > 1:
        gone = int(chance.integers(len(words)))
        return " ".join(words[:gone] + words[gone + 1 :])
    if way == 2:
        place = int(chance.integers(len(sentence)))
        return sentence[:place] + chr(ord("a") + int(chance.integers(26))) + sentence[place + 1 :]
    return sentence.lower() if way == 3 else sentence


def _without_information(texts: Texts, count: int, chance: np.random.Generator) -> Triples:
    """Combine numbers and URLs of some texts, or 1, 2, 3, ... if there are none."""
    pieces = sorted({found for side in (texts.german, texts.english) for one in side for found in _PIECE.findall(one)})
    pieces = pieces or [str(number + 1) for number in range(max(count, 1))]

    def draw() -> str:
        return " ".join(pieces[k] for k in chance.integers(len(pieces), size=int(chance.integers(1, 4))))

    for number in range(count):
        side = draw()
        yield side, side if number % 2 else draw(), ""


def described(corpus: NoisyCorpus) -> dict[str, dict[str, float]]:
    """Return the number of pairs and the mean number of words per side of each kind."""
    sides: dict[str, Callable[[Texts], list[str]]] = {"German": lambda t: t.german, "English": lambda t: t.english}
    words = {name: np.array([len(one.split()) for one in side(corpus.texts)]) for name, side in sides.items()}
    found: dict[str, dict[str, float]] = {}
    for kind, number in corpus.counts().items():
        here = corpus.kinds == kind
        found[kind] = {"pairs": number} | {
            f"{k} words": float(w[here].mean()) if number else 0.0 for k, w in words.items()
        }
    return found
