"""Language identification by naive Bayes on character n-grams, trained on a few sentences per language."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

# Largest n of the n-grams, which include the space before and after a word.
LONGEST_GRAM = 4
# The table has 2^18 rows; n-grams that are hashed to the same row are treated as equal.
_ROW_BITS = 18
ROWS = 1 << _ROW_BITS
# Additive smoothing of counts.
PRIOR_COUNT = 0.01
# Batch size in sentences.
_AT_ONCE = 8192


@dataclass(frozen=True)
class Languages:
    """A trained classifier: log-frequencies of n-grams by language."""

    names: tuple[str, ...]
    table: np.ndarray  # (ROWS + 1, languages) float32; the last row is for what is no gram

    @staticmethod
    def learned(sentences: Mapping[str, Sequence[str]]) -> "Languages":
        """Count the n-grams of sentences of each language. The prior over languages is uniform."""
        columns = []
        for texts in sentences.values():
            counts = np.full(ROWS, PRIOR_COUNT)
            for grams, _ in _grams(texts):
                counts += np.bincount(grams.ravel(), minlength=ROWS + 1)[:ROWS]
            columns.append(np.append(np.log(counts / counts.sum()), 0.0))
        return Languages(tuple(sentences), np.stack(columns, axis=1).astype(np.float32))

    def evidence(self, sentences: Sequence[str]) -> np.ndarray:  # (N, languages)
        """Return the log-likelihood of each sentence in each language; 0 for sentences without letters."""
        parts = [np.zeros((0, len(self.names)))]
        table = torch.from_numpy(self.table).double()
        for grams, starts in _grams(sentences):
            begins = torch.from_numpy(starts)
            sums = sum(F.embedding_bag(torch.from_numpy(column), table, begins, mode="sum").numpy() for column in grams)
            # A sentence without letters is reduced to two spaces.
            has_letters = np.diff(starts, append=grams.shape[1]) > 2
            parts.append(np.asarray(sums) * has_letters[:, None])
        return np.concatenate(parts)

    def lead(self, sentences: Sequence[str], expected: str) -> np.ndarray:  # (N,)
        """Return the log-likelihood ratio, in nats, of a language to the likeliest other one.

        Grams overlap and are counted as if they did not, so that a nat of this is worth less than one.
        """
        found = self.evidence(sentences)
        place = self.names.index(expected)
        return found[:, place] - np.delete(found, place, axis=1).max(axis=1)

    def guessed(self, sentences: Sequence[str]) -> list[str]:
        """Return the most likely language of each sentence."""
        return [self.names[place] for place in self.evidence(sentences).argmax(axis=1)]


def letters(sentence: str) -> str:
    """Return the words of a sentence in lower case, with letters only.

    >>> letters("Um 8 Uhr, O'Neill!")
    'um uhr o neill'
    """
    return " ".join("".join(sign if sign.isalpha() else " " for sign in sentence.lower()).split())


def _grams(sentences: Sequence[str]) -> Iterator[tuple[np.ndarray, np.ndarray]]:  # (LONGEST_GRAM, signs), (sentences,)
    """Yield, for batches of sentences, the table row of every n-gram by its start, and the starts of sentences."""
    for start in range(0, len(sentences), _AT_ONCE):
        texts = [f" {letters(one)} " for one in sentences[start : start + _AT_ONCE]]
        signs = np.frombuffer("".join(texts).encode("utf-32-le"), dtype=np.uint32).astype(np.uint64)
        sizes = np.array([len(text) for text in texts])
        ends = np.repeat(np.cumsum(sizes), sizes)
        grams = np.full((LONGEST_GRAM, len(signs)), ROWS)
        hashed = np.zeros(len(signs), dtype=np.uint64)
        for size in range(1, LONGEST_GRAM + 1):
            places = np.arange(len(signs) - size + 1)
            # Fibonacci hashing: the upper bits of a product with 2^64/golden ratio spread neighbouring numbers evenly.
            hashed = hashed[: len(places)] * np.uint64(1_000_003) + signs[size - 1 :]
            rows = (hashed * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(64 - _ROW_BITS)
            grams[size - 1, : len(places)] = np.where(places + size <= ends[: len(places)], rows, ROWS)
        yield grams, np.cumsum(sizes) - sizes
