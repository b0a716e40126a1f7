"""The part of large files that --small uses."""

from collections.abc import Sequence
from itertools import chain, islice, zip_longest

# Largest number of characters of the longer side, short enough for a small network.
SHORT = 60


def short_rows(german: Sequence[str], english: Sequence[str], said: Sequence[str], count: int) -> list[int]:
    """Return rows of short pairs, some of each kind, in file order; files are sorted by kind.

    Args:
        german: Sources.
        english: Targets.
        said: What kind each pair is of: its origin, language or verdict.
        count: How many rows to take at most.
    """
    by_kind: dict[str, list[int]] = {}
    for row, (one, other, kind) in enumerate(zip(german, english, said, strict=True)):
        if max(len(one), len(other)) <= SHORT:
            by_kind.setdefault(kind, []).append(row)
    in_turn = chain.from_iterable(zip_longest(*by_kind.values()))
    return sorted(islice((row for row in in_turn if row is not None), count))
