"""Numbers of rows of the digit experiments, paired for claims about their order."""

from collections.abc import Mapping
from itertools import pairwise

from experiments.digits.parts.scores import LISSA
from experiments.shared.claims import (
    NOT_SEEN,
    SEEN,
    Finding,
    MissingNumberError,
    Pair,
    Records,
    Sample,
    paired,
    seed_sample,
)

STATED = {"auc": 0.1, "ap": 0.7}
"""Standard deviations over 20 runs of RandProj, from the paper, for numbers without a spread of their own."""


def row_sample(records: Records, row: str, key: str) -> Sample:
    """Return one number of a row over seeds, whichever part has it."""
    for part, record in records.items():
        if any(name.startswith(f"{row}, seed ") and key in cell for name, cell in record["cells"].items()):
            return seed_sample(records, part, row, key)
    raise MissingNumberError(f"{row}, {key}")


def row_pair(records: Records, first: str, second: str, key: str = "ap", label: str = "") -> Pair:
    """Pair two rows, on the digits that all methods share where LiSSA is one of them."""
    hindrance = ""
    if any(row.startswith(LISSA) for row in (first, second)):
        try:
            samples = [row_sample(records, row, f"shared_{key}") for row in (first, second)]
            return paired(label, samples, STATED[key])
        except MissingNumberError:
            hindrance = "LiSSA was scored on other digits"
    return paired(label, (row_sample(records, row, key) for row in (first, second)), STATED[key], hindrance)


def named_pairs(records: Records, first: str, others: list[str], key: str = "ap") -> list[Pair]:
    """Pair one row with others."""
    return [row_pair(records, first, other, key, f"{first} over {other}: ") for other in others]


def chained(records: Records, rows: list[str], key: str = "ap") -> list[Pair]:
    """Pair neighbours in an order, the first ahead."""
    return [row_pair(records, first, second, key, f"{first} over {second}: ") for first, second in pairwise(rows)]


def levels(records: Records, paper: Mapping[str, float], within: float = 5.0) -> Finding:
    """Judge whether the AP of every row is near the paper's, and name the rows that are not."""
    found = {row: row_sample(records, row, "ap") for row in paper}
    far = {row: sample for row, sample in found.items() if abs(sample.mean - paper[row]) > within}
    told = ", ".join(f"{row} {sample} (paper {paper[row]})" for row, sample in far.items())
    count = max(len(sample.values) for sample in found.values())
    trainings = f"{count} training" + ("s" if count > 1 else "")
    said = f"{len(far)} of {len(paper)} rows are further away" + (f": {told}" if far else "")
    return Finding(NOT_SEEN if far else SEEN, f"AP, {trainings}: {said}.")


def part_of(records: Records, name: str) -> Records:
    """Return one part alone."""
    return {name: records[name]} if name in records else {}


def keeps_pair(records: Records, first: str, second: str, keep: int, key: str = "ap") -> Pair:
    """Pair two methods at the same K."""
    return row_pair(records, f"{first}, K={keep}", f"{second}, K={keep}", key, f"K = {keep}: ")
