"""Parts of a training set, drawn or made by leaving groups out, and the seeds that models on them start from."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from eigentrace.errors import InputError
from eigentrace.settings import check_counts


class TrainingJob(NamedTuple):
    """One model to train."""

    rows: np.ndarray  # (n,), ascending
    seed: int


@dataclass(frozen=True, eq=False)
class Subsets:
    """Which training examples each retrained model sees."""

    masks: np.ndarray
    """(m, N), true where an example is in the subset."""

    def __post_init__(self) -> None:
        masks = np.asarray(self.masks)
        if masks.ndim != 2 or masks.dtype != np.bool_ or not masks.size:
            raise InputError(
                f"masks must be booleans of shape (subsets, training examples), got {masks.dtype} {masks.shape}."
            )
        empty = np.flatnonzero(~masks.any(axis=1))
        if len(empty):
            raise InputError(f"Subset {empty[0]} holds no example: a model needs at least one to train on.")
        object.__setattr__(self, "masks", masks)

    def __len__(self) -> int:
        return len(self.masks)

    @property
    def num_train(self) -> int:
        """N, the size of the whole training set."""
        return self.masks.shape[1]

    @classmethod
    def random(cls, num_train: int, count: int = 100, fraction: float = 0.5, seed: int = 0) -> "Subsets":
        """Draw subsets without replacement.

        Subset i depends on the seed, the size and i alone, so that asking for more of them keeps the first ones.

        Args:
            num_train: N, the size of the training set.
            count: m, how many to draw.
            fraction: Share of the training set in each.
            seed: Fixes the draw.
        """
        check_counts(1, num_train=num_train, count=count)
        check_counts(0, seed=seed)
        size = round(fraction * num_train) if 0 < fraction < 1 else 0
        if not 0 < size < num_train:
            raise InputError(
                f"fraction={fraction!r} of {num_train} examples is not a part of them: give one between 0 and 1 that "
                "leaves at least one example in and one out."
            )
        masks = np.zeros((count, num_train), dtype=bool)
        for i in range(count):
            masks[i, np.random.default_rng([seed, i]).permutation(num_train)[:size]] = True
        return cls(masks)

    @classmethod
    def without(cls, num_train: int, groups: Iterable[Any]) -> "Subsets":
        """Make one subset per group of rows, holding everything else."""
        check_counts(2, num_train=num_train)
        masks = [~mask_of(rows, num_train) for rows in groups]
        if not masks:
            raise InputError("There are no groups to leave out: give at least one row, or list of rows.")
        return cls(np.stack(masks))

    def jobs(self, seeds: Sequence[Sequence[int]]) -> list[TrainingJob]:  # (m, s) -> m·s jobs
        """Pair every subset with its seeds, in order."""
        rows = [np.flatnonzero(mask) for mask in self.masks]
        return [TrainingJob(part, seed) for part, own in zip(rows, seeds, strict=True) for seed in own]


def mask_of(rows: Any, num_train: int) -> np.ndarray:  # -> (N,) bool
    """Mark rows (one, or several) of a training set."""
    index = np.atleast_1d(np.asarray(rows))
    if index.dtype.kind not in "iu" or index.ndim != 1 or not index.size:
        raise InputError(
            f"A group is a row number or a list of them, got {index.dtype} of shape {index.shape}; for a mask give "
            "`np.flatnonzero(mask)`."
        )
    if index.min() < 0 or index.max() >= num_train:
        raise InputError(f"A group names rows {index.min()} to {index.max()}; they must be from 0 to {num_train - 1}.")
    mask = np.zeros(num_train, dtype=bool)
    mask[index] = True
    if mask.sum() != len(index):
        raise InputError(f"A group of {len(index)} rows names only {mask.sum()} different ones: name each once.")
    return mask


def model_seed(seed: int, replicate: int, subset: int | None = None) -> int:
    """Derive the seed of a model, its own or (without a subset) shared by the models of a replicate.

    It fits 31 bits, because numpy's global generator takes no more than 32.
    """
    # Entropy that ends in zeros is the same as without them: subsets count from 1.
    entropy = [seed, replicate] if subset is None else [seed, replicate, subset + 1]
    return int(np.random.SeedSequence(entropy).generate_state(1)[0] >> 1)
