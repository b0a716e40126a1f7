"""Sentence pairs of random tokens."""

import numpy as np
import torch

from experiments.translation.parts.corpora import END, PAD, Pairs


def token_pairs(count: int, width: int, words: int, shortest: int) -> Pairs:
    """Return pairs of random tokens below `words`, of `shortest` to `width` tokens with END."""
    draw = np.random.default_rng(0)
    sides = []
    for _ in range(2):
        table = np.full((count, width), PAD, dtype=np.int32)
        for row, size in zip(table, draw.integers(shortest, width + 1, count), strict=True):
            row[: size - 1] = draw.integers(4, words, size - 1)
            row[size - 1] = END
        sides.append(torch.from_numpy(table))
    return Pairs(sides[0], sides[1], np.arange(count))
