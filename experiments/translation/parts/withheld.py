"""Sentence pairs that are withheld from training."""

from collections.abc import Sequence

import numpy as np

SHARE = 1 / 3


def withheld(german: Sequence[str], english: Sequence[str], seed: int = 0) -> np.ndarray:  # (N,) bool
    """Withhold a third of the pairs, none of which shares a sentence, in either language, with the others.

    Corpora hold one sentence with several translations. Pairs that hang together through such sentences stay on one
    side, or what is withheld would be half seen.
    """
    groups = together(german, english)
    sizes = np.bincount(groups)
    mixed = np.random.default_rng([seed, 7]).permutation(len(sizes))
    chosen = np.zeros(len(sizes), dtype=bool)
    chosen[mixed[np.cumsum(sizes[mixed]) <= SHARE * len(groups)]] = True
    return chosen[groups]


def together(german: Sequence[str], english: Sequence[str]) -> np.ndarray:  # (N,) int
    """Return the connected components of pairs that share sentences."""
    leader = list(range(len(german)))

    def first(row: int) -> int:
        while leader[row] != row:
            leader[row] = leader[leader[row]]
            row = leader[row]
        return row

    for side in (german, english):
        seen: dict[str, int] = {}
        for row, sentence in enumerate(side):
            leader[first(row)] = first(seen.setdefault(sentence, row))
    return np.unique([first(row) for row in range(len(german))], return_inverse=True)[1]
