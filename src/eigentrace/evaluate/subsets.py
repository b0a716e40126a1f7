"""Subsets of a training set, random or without given groups, and the seeds of the models trained on them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from eigentrace.errors import InputError
from eigentrace.settings import check_counts, counted


class TrainingJob(NamedTuple):
    """One model to train: its training rows and its seed."""

    rows: np.ndarray  # (n,), ascending
    seed: int


@dataclass(frozen=True, eq=False)
class Subsets:
    """Subsets of the training examples, one for each retrained model."""

    masks: np.ndarray
    """(m, N), true if an example is in the subset."""

    def __post_init__(self) -> None:
        masks = np.asarray(self.masks)
        if masks.ndim != 2 or masks.dtype != np.bool_ or not masks.size:
            raise InputError(
                f"masks must be booleans of shape (subsets, training examples), got {masks.dtype} {masks.shape}."
            )
        empty = np.flatnonzero(~masks.any(axis=1))
        if len(empty):
            raise InputError(f"Subset {empty[0]} is empty: put at least one example in every subset.")
        object.__setattr__(self, "masks", masks)

    def __len__(self) -> int:
        return len(self.masks)

    def __repr__(self) -> str:
        return f"<Subsets: {len(self):,} of {counted(self.num_train, 'example')}>"

    @property
    def num_train(self) -> int:
        """N, the size of the whole training set."""
        return self.masks.shape[1]

    @classmethod
    def random(cls, num_train: int, count: int = 100, fraction: float = 0.5, seed: int = 0) -> "Subsets":
        """Draw subsets without replacement.

        Subset i depends only on the seed, the sizes and i, so a larger `count` does not change the first subsets.

        Args:
            num_train: N, the size of the training set.
            count: m, the number of subsets.
            fraction: Share of the training set in each subset, between 0 and 1.
            seed: Seed of the draw.
        """
        check_counts(1, num_train=num_train, count=count)
        check_counts(0, seed=seed)
        size = round(fraction * num_train) if 0 < fraction < 1 else 0
        if not 0 < size < num_train:
            raise InputError(
                f"fraction={fraction!r} of {num_train} examples is not a proper subset: choose a fraction between 0 "
                "and 1 that keeps at least one example and leaves out at least one."
            )
        masks = np.zeros((count, num_train), dtype=bool)
        for i in range(count):
            masks[i, np.random.default_rng([seed, i]).permutation(num_train)[:size]] = True
        return cls(masks)

    @classmethod
    def without(cls, num_train: int, groups: Iterable[Any]) -> "Subsets":
        """Return one subset per group of rows, with all examples except the group."""
        check_counts(2, num_train=num_train)
        masks = [~mask_of(rows, num_train) for rows in groups]
        if not masks:
            raise InputError("There are no groups to leave out: pass at least one row or list of rows.")
        return cls(np.stack(masks))

    def jobs(self, seeds: Sequence[Sequence[int]]) -> list[TrainingJob]:  # (m, s) -> m·s jobs
        """Return one job for every subset and each of its seeds, in order."""
        rows = [np.flatnonzero(mask) for mask in self.masks]
        return [TrainingJob(part, seed) for part, own in zip(rows, seeds, strict=True) for seed in own]


def mask_of(rows: Any, num_train: int) -> np.ndarray:  # -> (N,) bool
    """Return the mask of a row, or several rows, of a training set."""
    index = np.atleast_1d(np.asarray(rows))
    if index.dtype.kind not in "iu" or index.ndim != 1 or not index.size:
        raise InputError(
            f"A group must be a row or a list of rows, got {index.dtype} of shape {index.shape}. For a mask, pass "
            "`np.flatnonzero(mask)`."
        )
    if index.min() < 0 or index.max() >= num_train:
        raise InputError(
            f"A group has rows from {index.min()} to {index.max()}: rows must be between 0 and {num_train - 1}."
        )
    mask = np.zeros(num_train, dtype=bool)
    mask[index] = True
    if mask.sum() != len(index):
        raise InputError(f"A group of {len(index)} rows has only {mask.sum()} distinct ones: pass each row once.")
    return mask


def model_seed(seed: int, replicate: int, subset: int | None = None) -> int:
    """Derive the seed of a model; without `subset`, one that all models of a replicate share.

    It has 31 bits, because numpy's global generator takes at most 32.
    """
    # Trailing zeros do not change the seed sequence, so subsets count from 1.
    entropy = [seed, replicate] if subset is None else [seed, replicate, subset + 1]
    return int(np.random.SeedSequence(entropy).generate_state(1)[0] >> 1)
