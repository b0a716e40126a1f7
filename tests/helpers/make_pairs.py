"""Pairs of random sentences with given lengths."""

from collections.abc import Sequence

import numpy as np
import torch

from experiments.translation.parts.corpora import END, PAD, Pairs, rounded


def make_pairs(sizes: Sequence[tuple[int, int]] | np.ndarray, seed: int = 0, words: int = 30) -> Pairs:
    """Draw pairs with the given numbers of (source, target) tokens, END included."""
    draw = np.random.default_rng(seed)
    sides = []
    for side in np.asarray(sizes).T:
        table = np.full((len(side), rounded(max(side))), PAD, dtype=np.int32)
        for row, size in zip(table, side, strict=True):
            row[: size - 1] = draw.integers(4, words, size - 1)
            row[size - 1] = END
        sides.append(torch.from_numpy(table))
    return Pairs(sides[0], sides[1], np.arange(len(table)))
