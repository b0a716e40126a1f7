"""Packing of several sentence pairs per row, as in the paper, without attention between pairs and with own positions.

Rows are then nearly full on both sides, and all batches but the last of an epoch have the same shape.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from experiments.translation.parts.corpora import BEGIN, PAD, Pairs
from harness.models import Transformer


@dataclass(frozen=True)
class Plan:
    """The row and position of each pair, in the order of rows."""

    pairs: np.ndarray
    rows: np.ndarray
    source: np.ndarray
    """Position of its first token in the row, on each side."""
    target: np.ndarray
    width: int
    """Number of tokens of a row, on each side."""

    @property
    def count(self) -> int:
        """Number of rows."""
        return int(self.rows[-1]) + 1

    def take(self, start: int, end: int) -> "Plan":
        """Return the pairs of the rows from `start` on."""
        here = slice(*np.searchsorted(self.rows, [start, end]))
        return Plan(self.pairs[here], self.rows[here] - start, self.source[here], self.target[here], self.width)


def planned(pairs: Pairs, order: np.ndarray, width: int) -> Plan:
    """Fill rows with pairs in a given order; a new row begins if either side does not fit."""
    sizes = zip(pairs.source_lengths[order].tolist(), pairs.target_lengths[order].tolist(), strict=True)
    row, source, target = 0, 0, 0
    found = []
    for on_source, on_target in sizes:
        if max(on_source, on_target) > width:
            raise ValueError(f"A pair has {on_source} and {on_target} tokens, a row holds {width}.")
        if source + on_source > width or target + on_target > width:
            row, source, target = row + 1, 0, 0
        found.append((row, source, target))
        source, target = source + on_source, target + on_target
    rows, sources, targets = np.array(found, dtype=np.int64).reshape(-1, 3).T
    return Plan(order, rows, sources, targets, width)


def batches(pairs: Pairs, width: int, tokens: int, seed: int) -> Iterator[Plan]:
    """Yield batches of rows forever, with all pairs in a new order in every epoch."""
    draw = np.random.default_rng([seed, 2])
    while True:
        # Pairs are shuffled, and thereby rows and batches.
        plan = planned(pairs, draw.permutation(len(pairs)), width)
        at_once = max(1, tokens // width)
        yield from (plan.take(start, start + at_once) for start in range(0, plan.count, at_once))


class Side(NamedTuple):
    """One side of a batch of rows."""

    tokens: Tensor  # (R, W), like all
    number: Tensor
    """The pair in its row that a position belongs to; 0 for padding."""
    place: Tensor
    """The position within its sentence."""


def packed(pairs: Pairs, plan: Plan) -> tuple[Side, Side]:
    """Return the tokens of a batch, packed, on the device of the pairs."""
    first = np.searchsorted(plan.rows, plan.rows)
    numbers = np.arange(len(plan.rows)) - first + 1

    def side(table: Tensor, lengths: np.ndarray, starts: np.ndarray) -> Side:
        sizes = lengths[plan.pairs]
        place = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        found = np.zeros((3, plan.count * plan.width), dtype=np.int64)
        here = np.repeat(plan.rows * plan.width + starts, sizes) + place
        found[:, here] = np.repeat(plan.pairs, sizes), place, np.repeat(numbers, sizes)
        # Asynchronous: otherwise every step would wait for the previous one.
        there = torch.from_numpy(found.reshape(3, plan.count, plan.width)).to(table.device, non_blocking=True)
        return Side(table[there[0], there[1]].long().masked_fill(there[2] == 0, PAD), there[2], there[1])

    return (
        side(pairs.source, pairs.source_lengths, plan.source),
        side(pairs.target, pairs.target_lengths, plan.target),
    )


def logits_of(model: Transformer, source: Side, target: Side) -> Tensor:  # (R, W, words)
    """Predict every target token from those before it in its sentence and from the source of its pair."""
    before = target.tokens.roll(1, dims=1).masked_fill(target.place == 0, BEGIN)
    memory = model.encode(source.tokens, _same(source, source), source.place)
    own = _same(target, target).tril()
    # Padding attends to everything, since attention to nothing is NaN.
    across = _same(target, source) | (target.number == 0)[:, :, None]
    return model.head(model.decode(before, memory, across, own, target.place))


def _same(one: Side, other: Side) -> Tensor:  # (R, W, W)
    """Return which positions belong to the same pair."""
    return one.number[:, :, None] == other.number[:, None, :]
